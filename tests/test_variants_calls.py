"""Every call that the bench of variants times: in every dtype, alike on all implementations."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn import variants
from fastattn._bench import variant_problem
from fastattn._bench.cases import Shape
from fastattn._bench.variant_problem import CALLS, DTYPES, VariantProblem

SHAPE = Shape("", batch=2, heads_q=4, heads_kv=2, len_q=150, len_k=150, head_dim=16)


@cache
def reference(problem):
    return problem.reference()[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_call(name, dtype, implementation):
    problem = VariantProblem(SHAPE, name, dtype, 0)
    out = problem.call()()
    error = abs(out.reshape(-1, out.shape[-1]).astype(np.float64) - reference(problem))
    assert error.max() <= problem.tolerance


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_gives_the_same_bits(name, implementation):
    call = VariantProblem(SHAPE, name, "float32", 0).call()
    before = fastattn.get_num_threads()
    try:
        fastattn.set_num_threads(1)
        one = call()
        fastattn.set_num_threads(2)
        assert call().tobytes() == one.tobytes()
    finally:
        fastattn.set_num_threads(before)


def test_every_variant_has_a_call():
    source = Path(variant_problem.__file__).read_text()
    without = {name for name in variants.__all__ if name not in source}
    assert without == {"perceiver", "pooling_by_attention"}  # whose parts induced_set_attention has
