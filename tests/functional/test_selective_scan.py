"""The selective scan and its gradient against their definition in float64, on every implementation."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from channels import scan, split
from differences import assert_gradient
from implementations import forced

from fastattn.functional import selective_scan
from fastattn.grad import vjp

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16]
EPS = {np.dtype(np.float32): 2**-23, np.dtype(np.float64): 2**-52, np.dtype(np.float16): 2**-10, BF16: 2**-7}
# Around the kernel's tokens (32), channels (16, 64) and numbers of a state (16).
LENGTHS = [0, 1, 2, 31, 32, 33, 100]
SIZES = [(1, 1), (15, 3), (16, 16), (17, 17), (64, 16), (65, 5), (200, 33)]


def problem(shape, states, dtype=np.float32, seed=0, sequences=None):
    rng = np.random.default_rng(seed)
    lane = np.float64 if dtype == np.float64 else np.float32
    channels = shape[-1]
    batch = shape[:-2] if sequences is None else (sequences,)
    normal = rng.standard_normal
    arrays = {name: normal(shape).astype(dtype) for name in ("x", "dt")}
    arrays |= {name: normal((*shape[:-1], states)).astype(dtype) for name in "BC"}
    arrays["A"] = -np.exp(normal((channels, states))).astype(lane)
    more = {"D": normal(channels).astype(lane), "dt_bias": normal(channels).astype(lane)}
    more |= {"z": normal(shape).astype(dtype), "state": normal((*batch, channels, states)).astype(lane)}
    return {name: arrays[name] for name in ("x", "dt", "A", "B", "C")}, more


def close(got, expected, dtype, factor=32):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    lane = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    most = np.abs(expected).max(initial=1)
    bound = factor * EPS[lane] * most + 4 * EPS[np.dtype(dtype)] * np.abs(expected)
    assert (np.abs(got.astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(implementation, sizes, length):
    channels, states = sizes
    arrays, more = problem((2, length, channels), states)
    out, state = selective_scan(**arrays, **more, dt_softplus=True, return_state=True)
    expected, after = scan(**arrays, **more, dt_softplus=True)
    close(out, expected, np.float32)
    close(state, after, np.float32)
    arrays["dt"] = np.abs(arrays["dt"])
    close(selective_scan(**arrays), scan(**arrays)[0], np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(implementation, dtype):
    arrays, more = problem((2, 40, 70), 16, dtype)
    out, state = selective_scan(**arrays, **more, dt_softplus=True, return_state=True)
    expected, after = scan(**arrays, **more, dt_softplus=True)
    close(out, expected, dtype)
    close(state, after, np.dtype(np.float64 if dtype == np.float64 else np.float32))


def test_a_state_handed_on_gives_the_result_of_the_whole(implementation):
    arrays, more = problem((2, 90, 40), 16)
    state = more.pop("state")
    tokens = {name: arrays.pop(name) for name in ("x", "dt", "B", "C")} | {"z": more.pop("z")}
    whole = selective_scan(**tokens, **arrays, **more, state=state, dt_softplus=True)
    _, end = selective_scan(**tokens, **arrays, **more, state=state, dt_softplus=True, return_state=True)
    for cuts in ([0, 1, 2, 90], [0, 32, 64, 90], [0, 45, 45, 90]):
        kept, parts = state.copy(), []
        for i, j in pairwise(cuts):
            part = {name: x[:, i:j] for name, x in tokens.items()}
            out, after = selective_scan(
                **part, **arrays, **more, state=kept, out_state=kept, dt_softplus=True
            )
            assert after is kept
            parts.append(out)
        np.testing.assert_array_equal(kept, end)
        # Single tokens add the numbers of a state in an order of their own.
        out, bound = np.concatenate(parts, axis=1), 2e-6 * np.abs(whole).max() * (1 in cuts)
        np.testing.assert_allclose(out, whole, rtol=0, atol=bound)


@pytest.mark.parametrize("lengths", [[5, 0, 40, 1, 2], [0, 0], [], [0, 100, 0]], ids=str)
def test_sequences_end_to_end(implementation, lengths):
    begins = np.cumsum([0, *lengths])
    arrays, more = problem((begins[-1], 40), 8, sequences=len(lengths))
    state, options = more.pop("state"), {"dt_softplus": True, "return_state": True}
    tokens = {name: arrays.pop(name) for name in ("x", "dt", "B", "C")} | {"z": more.pop("z")}
    out, after = selective_scan(**tokens, **arrays, **more, state=state, begins=begins, **options)
    for s, parts in enumerate(split(begins, *tokens.values())):
        part = dict(zip(tokens, parts, strict=True))
        alone, last = selective_scan(**part, **arrays, **more, state=state[s], **options)
        np.testing.assert_array_equal(out[begins[s] : begins[s + 1]], alone)
        np.testing.assert_array_equal(after[s], last)


def test_threads_and_company_change_no_bit(implementation):
    arrays, more = problem((3, 70, 300), 16)
    out = selective_scan(**arrays, **more, dt_softplus=True, num_threads=1)
    again = selective_scan(**arrays, **more, dt_softplus=True, num_threads=3)
    np.testing.assert_array_equal(again, out)
    one = {name: x[1] if x.ndim == 3 else x for name, x in (arrays | more).items()}
    np.testing.assert_array_equal(selective_scan(**one, dt_softplus=True), out[1])


def test_states_may_grow_and_overflow(implementation):
    arrays, _ = problem((40, 20), 4)
    arrays["A"] = np.abs(arrays["A"])
    arrays["dt"] = np.where(np.arange(20) < 10, 0.1, 30).astype(np.float32) * np.ones((40, 1), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = scan(**arrays)[0]
        got = selective_scan(**arrays)
    close(got[:, :10], expected[:, :10], np.float32)
    large = np.abs(expected[:, 10:]) > 1e40
    assert large.any()
    assert not np.isfinite(got[:, 10:][large]).any()


def test_small_decays_do_not_leave_denormal_numbers(implementation):
    arrays, _ = problem((100, 16), 4)
    arrays["x"][5:] = 0
    arrays["dt"] = np.full_like(arrays["dt"], 3)
    _, state = selective_scan(**arrays, return_state=True)
    assert not state[np.abs(state) < np.finfo(np.float32).tiny].any()


def test_what_is_not_finite_stays_in_its_channel_and_after_its_token(implementation):
    arrays, _ = problem((40, 70), 8)
    clean = selective_scan(**arrays, dt_softplus=True)
    arrays["x"][9, 17] = np.nan
    out = selective_scan(**arrays, dt_softplus=True)
    touched = np.zeros(out.shape, bool)
    touched[9:, 17] = True
    np.testing.assert_array_equal(np.isnan(out), touched)
    np.testing.assert_array_equal(out[~touched], clean[~touched])


@pytest.mark.parametrize("states", [1, 5, 8, 16, 20, 33])
def test_an_infinite_token_alone_is_as_among_others(implementation, states):
    """Lanes that no number of the state fills have no part in the sum."""
    x, dt = np.array([[3e38] * 3, [1] * 3], np.float32), np.array([[2] * 3, [1] * 3], np.float32)
    A, B = -np.ones((3, states), np.float32), np.ones((2, states), np.float32)
    with np.errstate(over="ignore"):
        alone, among = selective_scan(x[:1], dt[:1], A, B[:1], B[:1]), selective_scan(x, dt, A, B, B)
    np.testing.assert_array_equal(alone, np.full((1, 3), np.inf, np.float32))
    np.testing.assert_array_equal(alone, among[:1])


@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_against_differences(implementation, ragged):
    begins = [0, 4, 4, 5] if ragged else None
    arrays, more = problem((5, 3) if ragged else (2, 4, 3), 2, np.float64, sequences=3 if ragged else None)
    given = arrays | more
    options = {"dt_softplus": True, "begins": begins, "return_state": True}
    (out, state), pullback = vjp(selective_scan, **given, **options)
    rng = np.random.default_rng(5)
    dout, dstate = rng.standard_normal(out.shape), rng.standard_normal(state.shape)
    found = pullback(dout, dstate, need=tuple(f"d{name}" for name in given))

    def both(**changed):
        results = selective_scan(**given | changed, **options)
        return np.concatenate([x.ravel() for x in results])

    cotangents = np.concatenate([dout.ravel(), dstate.ravel()])
    for name, got in zip(given, found, strict=True):
        assert_gradient(got, lambda y, name=name: both(**{name: y}), given[name], cotangents, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "states"), [((2, 70, 100), 16), ((1, 33, 5), 17), ((2, 0, 4), 3)], ids=str)
def test_gradients_against_those_of_float64(implementation, shape, states, dtype):
    arrays, more = problem(shape, states, dtype)
    given = arrays | more
    dout = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    names = tuple(f"d{name}" for name in given)
    _, pullback = vjp(selective_scan, **given, dt_softplus=True)
    found = pullback(dout, need=names)
    with forced("numpy"):
        _, pullback = vjp(
            selective_scan, **{n: x.astype(np.float64) for n, x in given.items()}, dt_softplus=True
        )
        expected = pullback(dout.astype(np.float64), need=names)
    for name, got, want in zip(given, found, expected, strict=True):
        # What the gate gives back is rounded to x's dtype, and is in every gradient.
        factor = 256 if np.dtype(dtype).itemsize > 2 else 8 * EPS[np.dtype(dtype)] / 2**-23
        close(got, want, given[name].dtype, factor)
    _, pullback = vjp(selective_scan, **given, dt_softplus=True, num_threads=3)
    for got, again in zip(found, pullback(dout, need=names), strict=True):
        np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"dt": np.ones((2, 5, 7), np.float32)}, ValueError, r"dt has shape .*; expected x's, \(2, 5, 6\)"),
        (
            {"A": np.ones((5, 4), np.float32)},
            ValueError,
            r"A has shape .*; expected \(channels, states\) = \(6,",
        ),
        ({"B": np.ones((2, 5, 3), np.float32)}, ValueError, r"B has shape .*; expected x's, \(2, 5, 4\)"),
        ({"C": np.ones((2, 5, 4))}, TypeError, "C has dtype float64; expected x's, float32"),
        ({"C": None}, TypeError, "C is None; expected an array"),
        ({"D": np.ones(5, np.float32)}, ValueError, r"D has shape \(5,\); expected \(6,\)"),
        ({"z": np.ones((2, 5, 7), np.float32)}, ValueError, "z has shape"),
        ({"state": np.ones((2, 4, 6), np.float32)}, ValueError, r"state has shape .*; expected \(2, 6, 4\)"),
        (
            {"begins": [0, 5]},
            ValueError,
            r"x has shape \(2, 5, 6\); expected \(tokens, channels\), as begins",
        ),
        ({"delta": 1}, TypeError, "delta"),
    ],
)
def test_errors_come_before_anything_is_computed(implementation, changed, error, message):
    ones = np.ones((2, 5, 6), np.float32)
    given = {"x": ones, "dt": ones, "A": -np.ones((6, 4), np.float32)}
    given |= {name: np.ones((2, 5, 4), np.float32) for name in "BC"}
    with pytest.raises(error, match=r"^selective_scan\(\): .*" + message):
        selective_scan(**given | changed)


def test_results_lie_apart_from_all_inputs(implementation):
    arrays, more = problem((2, 5, 6), 5)
    memory = np.ones(60, np.float32)
    shared = {"z": memory.reshape(2, 5, 6)}
    with pytest.raises(ValueError, match=r"^selective_scan\(\): out_state shares memory with z"):
        selective_scan(**arrays, **shared, dt_softplus=True, out_state=memory.reshape(2, 6, 5))
    options = {"out": memory.reshape(2, 5, 6), "out_state": memory.reshape(2, 6, 5)}
    with pytest.raises(ValueError, match=r"^selective_scan\(\): out_state shares memory with out"):
        selective_scan(**arrays, z=more["z"], dt_softplus=True, **options)
    for name in ("z", "dt", "x"):
        given = arrays | {"z": more["z"]}
        with pytest.raises(ValueError, match=rf"^selective_scan\(\): out shares memory with {name}"):
            selective_scan(**given, dt_softplus=True, out=given[name])
