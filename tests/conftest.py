"""Fixtures, and which cases run: a sample by default, all of them with --full.

A test with the fixture `implementation` runs on every instruction set of this CPU and on the fallback.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# Spinning threads of NumPy's BLAS and of torch's OpenMP slow tests down, most on a busy machine, where they
# wait for threads that do not run. Both read these when imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

sys.path.append(
    str(Path(__file__).parents[1])
)  # of bench/, last: an installed package goes before the checkout

import inputs_of_variants
import numpy as np
from implementations import COMPILED, IMPLEMENTATIONS, THREADINGS, child_environment, forced

import fastattn

# An implementation stays in force for all examples of a property; timing says nothing on a shared machine.
_HYPOTHESIS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture]}
hypothesis.settings.register_profile("default", max_examples=25, derandomize=True, **_HYPOTHESIS)
hypothesis.settings.register_profile("long", max_examples=500, **_HYPOTHESIS)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="run every case; by default a sample of those of each test"
    )


def pytest_configure(config):
    if not COMPILED:  # what test_config.py tests in a process of its own is no news in every other test
        config.addinivalue_line("filterwarnings", "ignore::fastattn.FallbackWarning")


def pytest_report_header(config):
    cases = "all cases" if config.getoption("full") else "a sample of the cases, --full for all"
    return f"fastattn implementations: {', '.join(IMPLEMENTATIONS)}; {cases}"


def pytest_collection_modifyitems(config, items):
    """Leave out what is not in the sample, but for --full and for tests that the command names with ::."""
    if config.getoption("full"):
        return
    named = [argument.partition("::") for argument in config.args if "::" in argument]
    named = [(Path(config.invocation_params.dir, path), name) for path, _, name in named]
    cases, kept = {}, set()
    for item in items:
        if any(item.path == path and item.nodeid.partition("::")[2].startswith(name) for path, name in named):
            kept.add(item)
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept |= {item for name, of_test in cases.items() for item in sample(name, of_test)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def sample(name, items):
    """Choose cases of one test: each parameter has every value, and each implementation every dtype.

    Cases are looked at in an order that is drawn from the test's name. One stays out if those before it had
    all of its values.
    """
    random.Random(name).shuffle(items)
    seen = set()
    for item in items:
        values = values_of(item)
        if not values <= seen:
            seen |= values
            yield item


def values_of(item):
    """Collect the values of a case's parameters in a set."""
    parameters = (
        {name: repr(value) for name, value in item.callspec.params.items()}
        if hasattr(item, "callspec")
        else {}
    )
    return {*parameters.items(), tuple(parameters.get(name) for name in ("implementation", "isa", "dtype"))}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """The name of the instruction set in force, or "numpy"."""
    with forced(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def same_draws(request):
    """Every `RNG` begins anew for each test: its numbers do not depend on the tests before it."""
    for module in (inputs_of_variants, request.module):
        if hasattr(module, "RNG"):
            module.RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state


@pytest.fixture(params=THREADINGS if COMPILED else (None,))
def threading_of(request, monkeypatch):
    """Owner of the threads that compute, here and in processes that a test starts."""
    if request.param is None:
        yield
        return
    before = fastattn.show_config()["threading"]
    monkeypatch.setenv("FASTATTN_THREADING", request.param)
    fastattn.set_threading(request.param)
    yield request.param
    fastattn.set_threading(before)


@pytest.fixture(scope="session")
def minilm_folder():
    """The folder of all-MiniLM-L6-v2, where it is; FASTATTN_REQUIRE_MODEL=1 makes a missing one fail."""
    import sentence_similarity

    try:
        return sentence_similarity.model_folder()
    except FileNotFoundError as error:
        if os.environ.get("FASTATTN_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture
def python():
    """Run code in a process of its own, python(code, NAME=value, ...); the value None unsets NAME."""

    def run(code, timeout=120, **environment):
        command = [sys.executable, "-W", "default", "-c", code]
        environment = child_environment(**environment)
        return subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)

    return run
