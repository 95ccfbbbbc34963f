"""A test that asks for `implementation` runs on every instruction set of this CPU and on the fallback."""

import os
import subprocess
import sys

import hypothesis
import pytest

# Spinning threads of NumPy's BLAS and of OpenMP slow each other down; on a busy machine, where they wait for
# threads that do not run, the tests took twice as long. NumPy and the extension read these when imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from implementations import COMPILED, IMPLEMENTATIONS, child_environment, forced

# An implementation stays in force for all examples of a property; timing says nothing on a shared machine.
_HYPOTHESIS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture]}
hypothesis.settings.register_profile("default", max_examples=25, derandomize=True, **_HYPOTHESIS)
hypothesis.settings.register_profile("long", max_examples=500, **_HYPOTHESIS)
hypothesis.settings.load_profile("default")


def pytest_configure(config):
    if not COMPILED:  # what test_config.py tests in a process of its own is no news in every other test
        config.addinivalue_line("filterwarnings", "ignore::fastattn.FallbackWarning")


def pytest_report_header(config):
    return f"fastattn implementations: {', '.join(IMPLEMENTATIONS)}"


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """The name of the instruction set in force, or "numpy"."""
    with forced(request.param):
        yield request.param


@pytest.fixture
def python():
    """Run code in a process of its own, python(code, NAME=value, ...); the value None unsets NAME."""

    def run(code, timeout=120, **environment):
        command = [sys.executable, "-W", "default", "-c", code]
        environment = child_environment(**environment)
        return subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)

    return run
