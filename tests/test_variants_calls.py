"""Every call that the bench of variants times: in every dtype, alike on all implementations."""

import doctest
import inspect
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn import plot, variants
from fastattn._bench import variant_problem
from fastattn._bench.cases import Shape, make_inputs
from fastattn._bench.variant_problem import CALLS, DTYPES, Inputs, VariantProblem

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


NAMES = [(module, name) for module in (variants, plot) for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_parameter_is_documented(module, name):
    function = getattr(module, name)
    text, parameters = inspect.getdoc(function), inspect.signature(function).parameters
    assert [p for p in parameters if not re.search(rf"\b{p}\b", text.split("Parameters\n", 1)[1])] == []
    assert set(function.__annotations__) == {*parameters, "return"}
    for example in doctest.DocTestFinder().find(function, name, globs={}):
        assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize(
    "name", [name for name in CALLS if not name.startswith(("latent", "induced", "reformer"))]
)
def test_batch_dimensions_broadcast(name, implementation):
    """One sequence of queries for all keys gives what as many copies of it give."""
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(0))

    def call(q):
        draw = np.random.default_rng(1)
        return CALLS[name](Inputs(SHAPE, q, k, v, lambda *shape: draw.standard_normal(shape, np.float32)))()

    assert call(q[:1]).tobytes() == call(np.repeat(q[:1], 2, axis=0)).tobytes()


def test_every_variant_has_a_call():
    source = Path(variant_problem.__file__).read_text()
    without = {name for name in variants.__all__ if name not in source}
    assert without == {"perceiver", "pooling_by_attention"}  # whose parts induced_set_attention has
