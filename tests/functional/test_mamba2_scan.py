"""The scan of Mamba-2 and its gradient against its definition in float64, on every implementation."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from channels import mamba2
from differences import assert_gradient

from fastattn.functional import mamba2_scan
from fastattn.grad import vjp

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16]
EPS = {np.dtype(np.float32): 2**-23, np.dtype(np.float64): 2**-52, np.dtype(np.float16): 2**-10, BF16: 2**-7}


def problem(heads, groups, length, head_dim, states, dtype=np.float32, batch=(2,)):
    rng = np.random.default_rng(length)
    lane = np.float64 if dtype == np.float64 else np.float32
    normal = rng.standard_normal
    arrays = {"x": normal((*batch, heads, length, head_dim)).astype(dtype)}
    arrays |= {"dt": normal((*batch, heads, length)).astype(lane), "A": -np.exp(normal(heads)).astype(lane)}
    arrays |= {name: normal((*batch, groups, length, states)).astype(dtype) for name in "BC"}
    more = {"D": normal(heads).astype(lane), "dt_bias": normal(heads).astype(lane)}
    more["z"] = normal(arrays["x"].shape).astype(dtype)
    more["state"] = normal((*batch, heads, states, head_dim)).astype(lane)
    return arrays, more


def close(got, expected, dtype, factor=64):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    most = np.abs(expected).max(initial=1)
    unit = EPS[np.dtype(dtype)] / 16 if np.dtype(dtype).itemsize == 2 else EPS[np.dtype(dtype)]
    assert np.abs(got.astype(np.float64) - expected).max(initial=0) <= factor * unit * most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 4, 5, 33, 100])
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (3, 3)], ids=str)
def test_results(implementation, heads, length, dtype):
    arrays, more = problem(*heads, length, 24, 20, dtype)
    out, state = mamba2_scan(**arrays, **more, dt_softplus=True, return_state=True)
    expected, after = mamba2(**arrays, **more, dt_softplus=True)
    close(out, expected, dtype)
    if dtype.itemsize > 2:
        close(state, after, state.dtype)
    limits = {"dt_softplus": True, "dt_limits": (0.3, 1.5)}
    close(mamba2_scan(**arrays, **limits), mamba2(**arrays, **limits)[0], dtype)
    close(mamba2_scan(**arrays), mamba2(**arrays)[0], dtype)


def test_a_state_handed_on_gives_the_result_of_the_whole(implementation):
    arrays, more = problem(4, 2, 70, 16, 8)
    state, rates = more.pop("state"), arrays.pop("A")
    tokens = arrays | {"z": more.pop("z")}
    whole, last = mamba2_scan(**tokens, A=rates, **more, state=state, dt_softplus=True, return_state=True)
    for cuts in ([0, 1, 2, 70], [0, 32, 64, 70], [0, 45, 45, 70]):
        kept, parts = state.copy(), []
        for i, j in pairwise(cuts):
            part = {name: x[..., i:j] if name == "dt" else x[..., i:j, :] for name, x in tokens.items()}
            options = {"state": kept, "out_state": kept, "dt_softplus": True}
            parts.append(mamba2_scan(**part, A=rates, **more, **options)[0])
        close(np.concatenate(parts, axis=-2), whole, np.float32)
        close(kept, last, np.float32)


def ragged(begins, head_dim, states, dtype):
    """Sequences end to end."""
    arrays, more = problem(4, 2, begins[-1], head_dim, states, dtype, batch=())
    more["state"] = (
        np.random.default_rng(2).standard_normal((len(begins) - 1, 4, states, head_dim)).astype(dtype)
    )
    return arrays | more


def sequence(given, i, j, s):
    """The arguments of one of them."""
    part = {name: x[..., i:j, :] if name in "xBCz" else x for name, x in given.items()}
    return part | {"dt": given["dt"][..., i:j], "state": given["state"][s]}


def test_sequences_end_to_end_are_apart_to_the_bit(implementation):
    begins = [0, 1, 1, 40, 73]
    given = ragged(begins, 16, 8, np.float32)
    options = {"dt_softplus": True, "return_state": True}
    out, after = mamba2_scan(**given, begins=begins, **options)
    for s, (i, j) in enumerate(pairwise(begins)):
        alone, state = mamba2_scan(**sequence(given, i, j, s), **options)
        np.testing.assert_array_equal(out[:, i:j], alone)
        np.testing.assert_array_equal(after[s], state)
    spoiled = given | {"x": given["x"].copy()}
    spoiled["x"][:, 1:40] = np.nan
    odd = mamba2_scan(**spoiled, begins=begins, **options)[0]
    np.testing.assert_array_equal(odd[:, [0, *range(40, 73)]], out[:, [0, *range(40, 73)]])
    kept = given["state"].copy()
    mamba2_scan(**given | {"state": kept}, begins=begins, dt_softplus=True, out_state=kept)
    np.testing.assert_array_equal(kept, after)
    empty = {name: x[:0] if name == "state" else x[..., :0, :] for name, x in given.items() if name in "xBCz"}
    out, after = mamba2_scan(**empty, dt=given["dt"][:, :0], A=given["A"], begins=[0], return_state=True)
    assert out.shape == (4, 0, 16)
    assert after.shape == (0, 4, 8, 16)


def test_gradients_of_sequences_end_to_end(implementation):
    begins = [0, 1, 1, 4, 6]
    given = ragged(begins, 3, 2, np.float64)
    options = {"dt_softplus": True, "return_state": True}
    (out, after), pullback = vjp(mamba2_scan, **given, begins=begins, **options)
    rng = np.random.default_rng(5)
    dout, dafter = rng.standard_normal(out.shape), rng.standard_normal(after.shape)
    found = dict(zip(given, pullback(dout, dafter, need=tuple(f"d{name}" for name in given)), strict=True))

    def loss(**changed):
        total = 0.0
        for s, (i, j) in enumerate(pairwise(begins)):
            y, last = mamba2(**sequence(given | changed, i, j, s), dt_softplus=True)
            total += (y * dout[:, i:j]).sum() + (last * dafter[s]).sum()
        return np.array([total])

    for name, got in found.items():
        assert_gradient(got, lambda y, name=name: loss(**{name: y}), given[name], np.ones(1), 1e-6)
    none = ragged([0], 3, 2, np.float64)
    out, pullback = vjp(mamba2_scan, **none, begins=[0])
    for name, got in zip(none, pullback(out, need=tuple(f"d{name}" for name in none)), strict=True):
        np.testing.assert_array_equal(got, np.zeros(none[name].shape))


@pytest.mark.parametrize("limits", [(0.0, np.inf), (0.5, 1.2)], ids=str)
def test_gradients_against_differences(implementation, limits):
    arrays, more = problem(4, 2, 5, 3, 2, np.float64)
    given = arrays | more
    options = {"dt_softplus": True, "dt_limits": limits, "return_state": True}
    (out, state), pullback = vjp(mamba2_scan, **given, **options)
    rng = np.random.default_rng(5)
    dout, dstate = rng.standard_normal(out.shape), rng.standard_normal(state.shape)
    found = pullback(dout, dstate, need=tuple(f"d{name}" for name in given))

    def both(**changed):
        return np.concatenate([x.ravel() for x in mamba2_scan(**given | changed, **options)])

    cotangents = np.concatenate([dout.ravel(), dstate.ravel()])
    for name, got in zip(given, found, strict=True):
        assert got.dtype == given[name].dtype
        assert_gradient(got, lambda y, name=name: both(**{name: y}), given[name], cotangents, 1e-6)


def test_some_gradients_are_those_of_all(implementation):
    arrays, more = problem(4, 2, 40, 16, 8)
    given = arrays | more
    out, pullback = vjp(mamba2_scan, **given, dt_softplus=True)
    names = [f"d{name}" for name in given]
    whole = dict(zip(names, pullback(out, need=tuple(names)), strict=True))
    for name in names:
        _, pullback = vjp(mamba2_scan, **given, dt_softplus=True)
        np.testing.assert_array_equal(pullback(out, need=(name,))[0], whole[name])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"dt": np.ones((2, 5, 4), np.float32)}, ValueError, r"dt has shape .*; expected .* = \(2, 4, 5\)"),
        ({"A": np.ones(4, np.float32)}, ValueError, "A has 1.0; expected 0 or less"),
        ({"A": np.ones(3, np.float32)}, ValueError, r"A has shape \(3,\); expected \(4,\)"),
        ({"B": np.ones((2, 3, 5, 8), np.float32)}, ValueError, "B has shape .* groups a divisor of 4"),
        ({"C": np.ones((2, 2, 6, 8), np.float32)}, ValueError, "C has shape"),
        (
            {"C": np.ones((2, 2, 5, 9), np.float32)},
            ValueError,
            r"C has shape .*; expected B's, \(2, 2, 5, 8\)",
        ),
        ({"B": np.ones((2, 2, 5, 8), np.float16)}, TypeError, "B has dtype float16; expected x's, float32"),
        (
            {"B": np.ones((3, 2, 5, 8), np.float32)},
            ValueError,
            r"B has shape .* as x, \(2, 4, 5, 6\), has them",
        ),
        ({"A": None}, TypeError, "A is None; expected an array"),
        ({"dt_limits": ("a", "b")}, ValueError, r"dt_limits is \('a', 'b'\); expected a pair"),
        ({"D": np.ones(5, np.float32)}, ValueError, r"D has shape \(5,\); expected \(4,\)"),
        ({"z": np.ones((2, 4, 5, 7))}, TypeError, "z has dtype float64"),
        ({"dt_limits": (1.0, 0.5)}, ValueError, r"dt_limits is \(1.0, 0.5\); expected a pair"),
        (
            {"state": np.ones((2, 4, 6, 8), np.float32)},
            ValueError,
            r"state has shape .*; expected \(2, 4, 8, 6\)",
        ),
        ({"chunk_size": 1}, TypeError, "chunk_size"),
        ({"begins": [0, 5]}, ValueError, r"x has shape .*; expected \(heads, tokens, head_dim\), as begins"),
    ],
)
def test_errors_come_before_anything_is_computed(implementation, changed, error, message):
    given = {"x": np.ones((2, 4, 5, 6), np.float32), "dt": np.ones((2, 4, 5), np.float32)}
    given |= {"A": -np.ones(4, np.float32)} | {name: np.ones((2, 2, 5, 8), np.float32) for name in "BC"}
    with pytest.raises(error, match=r"^mamba2_scan\(\): .*" + message):
        mamba2_scan(**given | changed)


@pytest.mark.parametrize("name", ["x", "dt"])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_what_is_not_finite_reaches_later_tokens_of_its_head_alone(name, odd, implementation):
    arrays, _ = problem(4, 2, 50, 16, 8)
    expected = mamba2_scan(**arrays, dt_softplus=True)
    arrays[name][1, 2, 20] = odd
    out, reached = mamba2_scan(**arrays, dt_softplus=True), np.zeros(expected.shape, bool)
    reached[1, 2, 20:] = True
    assert not np.isfinite(out[reached]).any()
    close(out[~reached], expected[~reached], np.dtype(np.float32))


def test_a_state_lies_apart_from_all_inputs(implementation):
    arrays, _ = problem(2, 1, 4, 8, 4, batch=(1,))
    memory = np.ones((1, 2, 4, 8), np.float32)
    for name in ("z", "x"):
        with pytest.raises(ValueError, match=rf"^mamba2_scan\(\): out_state shares memory with {name}"):
            mamba2_scan(**arrays | {name: memory}, dt_softplus=True, out_state=memory)
    with pytest.raises(ValueError, match=r"^mamba2_scan\(\): out_state shares memory with D"):
        mamba2_scan(**arrays, D=memory.ravel()[:2], dt_softplus=True, out_state=memory)
