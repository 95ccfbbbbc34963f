"""Every call that the bench of variants times, in every dtype and on every implementation, by its formula."""

import inspect
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from formulas import FORMULAS

import bench
import fastattn
from bench.variants import CALLS, Inputs, VariantProblem
from fastattn import functional
from fastattn._bench.cases import DTYPES, Shape, as_dtype, make_inputs

SHAPE = Shape("", batch=2, heads_q=4, heads_kv=2, len_q=150, len_k=150, head_dim=16)
# Results are up to 4, inputs have their dtype's values.
TOLERANCES = {"float32": 2e-5, "float64": 1e-13, "float16": 6e-3, "bfloat16": 5e-2}


def inputs(dtype, wanted):
    """The arrays of a call, whose numbers fit `dtype`, in the type `wanted`."""
    held, wanted = as_dtype(dtype), as_dtype(wanted)
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32).astype(held).astype(wanted)

    q, k, v = (x.astype(wanted) for x in make_inputs(SHAPE, dtype, np.random.default_rng(0)))
    return Inputs(SHAPE, q, k, v, draw)


@cache
def by_formula(name, dtype):
    return FORMULAS[name](inputs(dtype, "float64"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_call(name, dtype, implementation):
    out = CALLS[name](inputs(dtype, dtype))()
    expected = by_formula(name, dtype)
    assert np.count_nonzero(expected) > expected.size / 2
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_gives_the_same_bits(name, implementation):
    call = VariantProblem(SHAPE, name, "float32", 0).timed()
    before = fastattn.get_num_threads()
    try:
        fastattn.set_num_threads(1)
        one = call()
        fastattn.set_num_threads(2)
        assert call().tobytes() == one.tobytes()
    finally:
        fastattn.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("latent")])
def test_batch_dimensions_broadcast(name, implementation):
    """One sequence of queries for all keys gives the same as copies of it do."""
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(0))

    def call(q):
        draw = np.random.default_rng(1)
        return CALLS[name](Inputs(SHAPE, q, k, v, lambda *shape: draw.standard_normal(shape, np.float32)))()

    assert call(q[:1]).tobytes() == call(np.repeat(q[:1], 2, axis=0)).tobytes()


def test_every_variant_has_a_call():
    suites = (path for path in Path(bench.__file__).parent.rglob("*.py") if path.name != "compare.py")
    source = "".join(path.read_text() for path in suites)
    names = [name for name in functional.__all__ if inspect.isfunction(getattr(functional, name))]
    assert [name for name in names if name not in source and not name.endswith("_backward")] == []


def _options_calls():
    """Calls f(q, k, v, **options) of every function that takes a bias: (1, 4, 9, 16) and (1, 2, 40, 16)."""
    rng = np.random.default_rng(3)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tables = draw(4, 20, 16)
    mix, w, gate = draw(4, 4), draw(4, 16), draw(1, 4, 9, 16)
    v = functional
    return {
        "attention": fastattn.attention,
        "sigmoid": v.sigmoid_attention,
        "sparsemax": v.sparsemax_attention,
        "entmax15": v.entmax15_attention,
        "topk": lambda *x, **o: v.top_k_attention(*x, top_k=3, **o),
        "additive": lambda *x, **o: v.additive_attention(*x, w, **o),
        "talking_heads": lambda *x, **o: v.talking_heads_attention(*x, mix, mix, **o),
        "deberta_keys": lambda *x, **o: v.disentangled_attention(*x, tables, **o),
        "deberta_queries": lambda *x, **o: v.disentangled_attention(*x, None, tables, **o),
        "gated": lambda *x, **o: v.gated_attention(*x, gate, **o),
    }


WITH_OPTIONS = _options_calls()


def _bias(hidden):
    return {"bias": np.where(hidden, -np.inf, np.float32(0.25)).astype(np.float32)}


HIDING = {
    "bias": _bias,
    "mask": lambda hidden: {"mask": ~hidden},
    "kv_lengths": lambda hidden: {"kv_lengths": int(np.argmax(hidden)), "q_offset": 5},
}


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_what_is_hidden_does_not_reach_the_result(name, how, implementation):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, heads, n, 16), np.float32) for heads, n in ((4, 9), (2, 40), (2, 40)))
    hidden = np.arange(40) >= 31
    for garbage in (np.nan, np.inf, -np.inf, np.finfo(np.float32).max):
        results = []
        for here in (0, garbage):
            k[..., hidden, :] = v[..., hidden, :] = here
            results.append(WITH_OPTIONS[name](q, k, v, **HIDING[how](hidden)))
        np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_query_of_what_is_not_finite_is_its_own_row_s_matter(name, implementation):
    """It does not warn either, as the kernels do not: here warnings are errors."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, heads, n, 16), np.float32) for heads, n in ((4, 9), (2, 40), (2, 40)))
    expected = WITH_OPTIONS[name](q, k, v)
    for garbage in (np.nan, np.inf, -np.inf, np.finfo(np.float32).max):
        q[..., 3, :] = garbage
        got = WITH_OPTIONS[name](q, k, v)
        np.testing.assert_allclose(np.delete(got, 3, axis=-2), np.delete(expected, 3, axis=-2), atol=1e-5)
