"""Expected results of attention: those of naive.py in a wider type, and the contract's error bound."""

import hashlib
import pickle
from functools import cache
from typing import NamedTuple

import ml_dtypes
import naive
import numpy as np

from fastattn._bench.cases import Shape, combine, make_inputs
from fastattn.masks import Mask

# In 16 bits the bound is wide: scores spread this much make few keys matter, so that a wrong one shows.
_SPREAD = 3
# Calls whose results are remembered: those of a test function, about 100 KB each.
_REMEMBERED = 1500


class Expected(NamedTuple):
    """The reference, and how far from it each element may lie."""

    out: np.ndarray
    out_tolerance: np.ndarray
    lse: np.ndarray
    lse_tolerance: np.ndarray


class Case(NamedTuple):
    """One call of attention() and what it must return."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    arguments: dict
    expected: Expected


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


_expected = {}  # by what the call consists of: implementations are held against one computation


def with_array(arguments, q=None, k=None):
    """The arguments, with a structural mask as the array of it; masks/test_definitions.py holds that."""
    if not isinstance(arguments.get("mask"), Mask):
        return arguments
    len_q, len_k = q.shape[-2], k.shape[-2]
    offset = arguments.get("q_offset")
    if offset is None and arguments.get("kv_lengths") is not None:
        offset = np.asarray(arguments["kv_lengths"]) - len_q
    heads = q.shape[-3] if q.ndim > 2 else 1
    array = arguments["mask"].to_array(
        len_q, len_k, batch_shape=q.shape[:-3], num_heads=heads, q_offset=offset
    )
    return {**arguments, "mask": array}


def expect(*arrays, **arguments):
    """The reference for one call. It is computed once for all implementations."""
    arguments = with_array(arguments, *arrays[:2])
    key = hashlib.sha1(pickle.dumps((arrays, arguments))).digest()
    if key not in _expected:
        if len(_expected) >= _REMEMBERED:
            _expected.clear()
        _expected[key] = compute(*arrays, **arguments)
    return _expected[key]


@np.errstate(all="ignore")
def compute(q, k, v, **arguments):
    """The reference for one call, with the contract's bound.

    max|out - ref| <= 2 max|naive - ref| + 4 eps max|V attended|, where naive is the plain computation in q's
    dtype; where that is not finite, 8 eps max|V attended|. For lse, 2 max|naive - ref| + 4 eps max(1, |lse|).
    """
    wider = np.longdouble if q.dtype == np.float64 else np.float64
    out, lse, _, attend = naive.attention(q, k, v, **arguments, dtype=wider)
    plain_out, plain_lse, _, _ = naive.attention(q, k, v, **arguments, dtype=q.dtype)
    values = abs(v[None] if v.ndim == 2 else v).astype(wider)
    values = np.repeat(values, out.shape[-3] // values.shape[-3], -3)
    attended = np.where(attend.any(-2)[..., None] & np.isfinite(values), values, 0)
    unit = eps(q.dtype) * attended.max(initial=0)
    out_tolerance = _tolerance(plain_out, out, 4 * unit, 8 * unit)
    unit = eps(q.dtype) * np.maximum(1, abs(lse))
    lse_tolerance = _tolerance(plain_lse, lse, 4 * unit, 8 * unit)
    expected = Expected(out, out_tolerance, lse, lse_tolerance)
    return expected if q.ndim > 2 else Expected(*(array[0] for array in expected))


def _tolerance(plain, ref, floor, where_not_finite):
    plain = plain.astype(ref.dtype)
    error = abs(plain - ref).max(initial=0, where=np.isfinite(plain) & np.isfinite(ref))
    return np.where(np.isfinite(plain), 2 * error + floor, where_not_finite)


@np.errstate(all="ignore")
def assert_close(got, ref, tolerance):
    """Every element of `got` lies within `tolerance` of `ref`; NaN and infinities stand at its places."""
    got = np.asarray(got).astype(ref.dtype)
    assert got.shape == ref.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(ref), "NaN at other places")
    finite = np.isfinite(ref)
    np.testing.assert_array_equal(got[~finite], ref[~finite], "infinities at other places")
    wrong = finite & ~(abs(got - ref) <= tolerance)
    if wrong.any():
        worst = np.unravel_index(np.where(wrong, abs(got - ref), 0).argmax(), wrong.shape)
        raise AssertionError(
            f"{np.count_nonzero(wrong)} of {wrong.size} differ, most at {tuple(map(int, worst))}: "
            f"got {got[worst]}, expected {ref[worst]} within {tolerance[worst]}"
        )


def assert_telling(expected):
    """Raise if a comparison could not fail: mostly zeros, mostly NaN, or a bound as wide as the values."""
    out = expected.out
    if out.size:
        assert np.count_nonzero(out) >= out.size / 2, "the expected output is mostly zeros"
        assert np.isfinite(out).sum() >= out.size / 2, "the expected output is mostly NaN"
        largest = abs(out[np.isfinite(out)]).max()
        assert np.median(expected.out_tolerance) < largest / 2, "the bound is as wide as the values"


def check(got, expected, telling=True):
    """Hold `got`, from attention(..., return_lse=True), to `expected`. `telling=False` allows zeros."""
    if telling:
        assert_telling(expected)
    out, lse = got
    assert_close(out, expected.out, expected.out_tolerance)
    assert_close(lse, expected.lse, expected.lse_tolerance)
    assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)


def spread_inputs(shape, dtype, rng, **how):
    """`cases.make_inputs`, with widely spread scores in 16 bits."""
    q, k, v = make_inputs(shape, dtype, rng, **how)
    return q * q.dtype.type(_SPREAD if q.itemsize == 2 else 1), k, v


@cache
def case(shape: Shape, variants: tuple[str, ...], dtype: str, *, telling=True, **how) -> Case:
    """One call and its expected result, computed once for all implementations.

    Masks drawn at random may leave hardly anything: the first seed counts that leaves half of the output. A
    call that has nothing to leave, an empty one, is asked for with `telling=False`.
    """
    for seed in range(50):
        rng = np.random.default_rng(seed)
        q, k, v = spread_inputs(shape, dtype, rng, **how)
        arguments = combine(variants, shape, rng)
        expected = expect(q, k, v, **arguments)
        if not telling or 2 * np.count_nonzero(expected.out) >= expected.out.size:
            return Case(q, k, v, arguments, expected)
    raise ValueError(f"no seed makes {variants} on {shape} attend enough")


def poison(array, hidden, rng):
    """Write NaN, infinities and huge numbers, which must never show, to keys `hidden` of (..., len_k, d)."""
    largest = float(ml_dtypes.finfo(array.dtype).max)
    garbage = rng.choice([np.nan, np.inf, -np.inf, largest, -largest], array[..., hidden, :].shape)
    array[..., hidden, :] = garbage.astype(array.dtype)


def garbage_behind_masks(len_q, dtype):
    """(q, clean k and v, k and v with garbage in masked keys, the masks); the first row attends nothing."""
    rng = np.random.default_rng(1)
    q, k, v = spread_inputs(Shape("", 1, 2, 2, len_q, 90, 8), dtype, rng)
    clean = k.copy(), v.copy()
    hidden = np.arange(90) % 3 == 0
    poison(k, hidden, rng)
    poison(v, hidden, rng)
    return q, clean, (k, v), {"mask": ~hidden, "row_ranges": (0, np.where(np.arange(len_q) == 0, 0, 77))}


def assert_same_bits(got, expected):
    """Two lists of arrays are equal to the last bit, also in NaN and -0.0."""
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), f"{np.count_nonzero(a != b)} of {a.size} elements differ"
