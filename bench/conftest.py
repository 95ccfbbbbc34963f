"""Which engines, variants and shapes ``pytest bench/`` times."""

import pytest

import fastattn
from fastattn._bench.cases import DTYPES, SHAPES, grouped
from fastattn._bench.engines import ENGINES
from fastattn._bench.problem import TINY, Problem

VARIANTS = ("plain", "causal", "padding_mask", "kv_lengths")


def pytest_addoption(parser):
    group = parser.getgroup("fastattn")
    group.addoption("--engine", default="fastattn,fallback,numpy", help=f"some of {','.join(ENGINES)}")
    group.addoption("--dtype", default="float32", choices=DTYPES)
    group.addoption("--threads", type=int, default=fastattn.get_num_threads(), help="of each engine")


def problems(dtype):
    for shape in (*SHAPES, *map(grouped, SHAPES), TINY):
        for variant in VARIANTS:
            if variant == "plain" or (shape is not TINY and not (variant == "causal" and shape.decode)):
                yield Problem(shape, variant, dtype, seed=0)


def pytest_generate_tests(metafunc):
    config = metafunc.config
    names = config.getoption("engine").split(",")
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise pytest.UsageError(f"--engine: no {unknown[0]!r}; there are {', '.join(ENGINES)}")
    metafunc.parametrize("engine", [name for name in names if ENGINES[name].installed()])
    cases = list(problems(config.getoption("dtype")))
    metafunc.parametrize(
        "problem", cases, ids=[f"{p.variant}-{p.shape.name.replace(',', 'x')}" for p in cases]
    )


@pytest.fixture
def threads(request):
    return request.config.getoption("threads")
