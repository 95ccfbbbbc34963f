"""The shapes of ``python -m fastattn bench`` under pytest-benchmark, grouped by shape and variant."""

from fastattn._bench.cases import SHAPES, STRUCTURED, STRUCTURES, grouped
from fastattn._bench.suites.attention.problem import TINY, Problem

suite = "attention"
VARIANTS = ("plain", "causal", "padding_mask", "kv_lengths")


def problems(dtype):
    for shape in (*SHAPES, *map(grouped, SHAPES), TINY):
        for variant in VARIANTS:
            if variant == "plain" or (shape is not TINY and not (variant == "causal" and shape.decode)):
                yield Problem(shape, variant, dtype, seed=0)
    for shape in STRUCTURED:
        for variant in ("plain", *STRUCTURES):
            yield Problem(shape, variant, dtype, seed=0)


def test_attention(time_problem):
    time_problem()
