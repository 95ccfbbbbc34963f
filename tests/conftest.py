"""A test that asks for `implementation` runs on every instruction set of this CPU and on the fallback."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# Spinning threads of NumPy's BLAS and of OpenMP slow each other down; on a busy machine, where they wait for
# threads that do not run, the tests took twice as long. NumPy and the extension read these when imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import fastattn
from fastattn._engine import settings

COMPILED = () if os.environ.get("FASTATTN_BACKEND") == "numpy" else fastattn.available_isas()
IMPLEMENTATIONS = (*COMPILED, "numpy")
NOTHING_COMPILED = pytest.param(None, marks=pytest.mark.skip("of compiled kernels, and there are none"))

each_isa = pytest.mark.parametrize("isa", COMPILED or [NOTHING_COMPILED])

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


def forced(implementation, **more):
    """A context in which `implementation`, the name of an instruction set or "numpy", computes."""
    if implementation == "numpy":
        return settings.forced(backend="numpy", **more)
    return settings.forced(isa=implementation, backend="compiled", **more)


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


def child_environment(**changes):
    """os.environ with `changes`, in which a child imports the fastattn under test.

    What a child prints is read: in UTF-8, without colours, and as no other variable of Python's has it.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(Path(fastattn.__file__).parents[1])
    environment |= {"PYTHONIOENCODING": "utf-8", "PYTHON_COLORS": "0"}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = str(value)
    return environment
