"""Options of ``pytest bench/``: which engines, suites and problems it times."""

import sys
from pathlib import Path

import pytest

import fastattn

sys.path.append(str(Path(__file__).parents[1]))  # last: the package that is installed counts
from bench import SUITES
from fastattn._bench.harness import Unsupported, largest_error, time_call

ENGINES = dict.fromkeys(name for suite in SUITES.values() for name in suite.engines)
DTYPES = dict.fromkeys(name for suite in SUITES.values() for name in suite.dtypes)


def pytest_addoption(parser):
    group = parser.getgroup("fastattn")
    group.addoption("--suite", action="append", choices=SUITES, help="may be repeated (all)")
    group.addoption("--engine", default="fastattn,fallback,numpy", help=f"some of {','.join(ENGINES)}")
    group.addoption("--dtype", default="float32", choices=DTYPES)
    group.addoption("--threads", type=int, default=fastattn.get_num_threads(), help="of each engine")


def pytest_generate_tests(metafunc):
    """Every engine that is installed, on every problem of its suite."""
    config = metafunc.config
    names = config.getoption("engine").split(",")
    unknown = [name for name in names if name not in (*ENGINES, "fastattn")]
    if unknown:
        raise pytest.UsageError(f"--engine: no {unknown[0]!r}; there are {', '.join(ENGINES)}")
    cases = []
    for suite in config.getoption("suite") or SUITES:
        engines = SUITES[suite].engines
        installed = [name for name in names if name in engines and not engines[name].missing()]
        for problem in metafunc.module.problems(suite, config.getoption("dtype")):
            named = problem.variant in problem.name
            label = problem.name if named else f"{problem.variant}-{problem.name}"
            label = label.replace(",", "x").replace(" ", "-")
            cases += [
                pytest.param(engines[name], problem, id=f"{suite}-{label}-{name}") for name in installed
            ]
    metafunc.parametrize(("engine", "problem"), cases)


@pytest.fixture
def time_problem(benchmark, engine, problem, request):
    """A function that checks the result of the engine and times the fastest of its ways."""

    def check_and_time():
        benchmark.group = f"{problem.variant} {problem.name} {problem.dtype}"
        try:
            ways = engine.named_ways(problem, request.config.getoption("threads"))
        except Unsupported as reason:
            pytest.skip(str(reason))
        for way in ways.values():
            way.load()
        name, way = min(ways.items(), key=lambda item: time_call(item[1].call, 0.02) if len(ways) > 1 else 0)
        error = largest_error(way.read(way.call()), *problem.reference())
        assert error <= problem.tolerance

        benchmark(way.call)
        rate = "GB/s" if problem.unit == "bytes" else "GFLOP/s"
        benchmark.extra_info.update({"way": name, "error": error})
        if benchmark.stats:  # none with --benchmark-disable
            benchmark.extra_info[rate] = round(problem.work / benchmark.stats.stats.median / 1e9, 1)

    return check_and_time
