"""The scans of Mamba and Mamba-2 and their gradients against definitions in float64."""

import re
from itertools import pairwise

import channels
import numpy as np
import pytest
from differences import assert_gradient
from implementations import forced
from precisions import EPS, each_dtype, lane

from fastattn.functional import mamba2_scan, selective_scan
from fastattn.grad import vjp

# Around the kernel's tokens (32), channels (16, 64) and numbers of a state (16).
LENGTHS = [0, 1, 2, 31, 32, 33, 100]
SIZES = [(1, 1), (15, 3), (16, 16), (17, 17), (64, 16), (65, 5), (200, 33)]
SCANS = {"mamba": (selective_scan, channels.scan), "mamba2": (mamba2_scan, channels.mamba2)}
each_scan = pytest.mark.parametrize("name", SCANS)
ALL = {"dt_softplus": True, "return_state": True}


def mamba(shape, states, dtype=np.float32, sequences=None):
    """Arguments for x of `shape`, (..., length, channels), the state last."""
    normal, of_lane = np.random.default_rng(shape[-2]).standard_normal, lane(dtype)
    batch = shape[:-2] if sequences is None else (sequences,)
    found = {name: normal(shape).astype(dtype) for name in ("x", "dt", "z")}
    found |= {name: normal((*shape[:-1], states)).astype(dtype) for name in "BC"}
    found["A"] = -np.exp(normal((shape[-1], states))).astype(of_lane)
    found |= {name: normal(shape[-1]).astype(of_lane) for name in ("D", "dt_bias")}
    return found | {"state": normal((*batch, shape[-1], states)).astype(of_lane)}


def mamba2(shape, states, dtype=np.float32, sequences=None, groups=2):
    """Arguments for x of `shape`, (..., heads, length, head_dim), the state last."""
    normal, of_lane = np.random.default_rng(shape[-2]).standard_normal, lane(dtype)
    (*batch, heads, length, head_dim) = shape if sequences is None else (sequences, *shape)
    found = {name: normal(shape).astype(dtype) for name in "xz"}
    found |= {name: normal((*shape[:-3], groups, length, states)).astype(dtype) for name in "BC"}
    found |= {"dt": normal(shape[:-1]).astype(of_lane), "A": -np.exp(normal(heads)).astype(of_lane)}
    found |= {name: normal(heads).astype(of_lane) for name in ("D", "dt_bias")}
    return found | {"state": normal((*batch, heads, states, head_dim)).astype(of_lane)}


def problem(name, length, size, states, dtype=np.float32, sequences=None):
    """Arguments of the scan `name` with two sequences, or with `sequences` end to end."""
    heads = () if name == "mamba" else (4,)
    shape = (*(() if sequences is not None else (2,)), *heads, length, size)
    return (mamba if name == "mamba" else mamba2)(shape, states, dtype, sequences)


def cut(given, i, j):
    """The arguments for tokens i to j."""
    by_head = given["dt"].ndim < given["x"].ndim
    part = {name: x[..., i:j, :] if name in ("x", "dt", "B", "C", "z") else x for name, x in given.items()}
    return part | ({"dt": given["dt"][..., i:j]} if by_head else {})


def close(got, expected, dtype, factor=32):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    most = np.abs(expected).max(initial=1)
    bound = factor * EPS[lane(dtype)] * most + 4 * EPS[np.dtype(dtype)] * np.abs(expected)
    assert (np.abs(got.astype(np.float64) - expected) <= bound).all()


def check(name, given, **options):
    function, definition = SCANS[name]
    got, after = function(**given, **options, return_state=True)
    expected, last = definition(**given, **options)
    dtype = given["x"].dtype
    if name == "mamba2" and dtype.itemsize == 2:  # values times steps are rounded to it
        assert got.dtype == dtype
        bound = 4 * EPS[dtype] * np.abs(expected).max(initial=1)
        assert np.abs(got.astype(float) - expected).max(initial=0) <= bound
        return
    close(got, expected, dtype)
    close(after, last, lane(dtype))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_of_mamba(implementation, sizes, length):
    given = mamba((2, length, sizes[0]), sizes[1])
    check("mamba", given, dt_softplus=True)
    plain = {name: given[name] for name in ("x", "A", "B", "C")}
    check("mamba", plain | {"dt": np.abs(given["dt"])})


@each_dtype
@pytest.mark.parametrize("length", [0, 1, 4, 5, 33, 100])
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (3, 3)], ids=str)
def test_sizes_of_mamba2(implementation, heads, length, dtype):
    given = mamba2((2, heads[0], length, 24), 20, dtype, groups=heads[1])
    check("mamba2", given, dt_softplus=True)
    plain = {name: given[name] for name in ("x", "dt", "A", "B", "C")}
    check("mamba2", plain)
    check("mamba2", plain, dt_softplus=True, dt_limits=(0.3, 1.5))


@each_dtype
def test_dtypes_of_mamba(implementation, dtype):
    check("mamba", mamba((2, 40, 70), 16, dtype), dt_softplus=True)


@each_scan
def test_a_state_handed_on_gives_the_result_of_the_whole(implementation, name):
    given, scan = problem(name, 90, 40, 16), SCANS[name][0]
    whole, last = scan(**given, **ALL)
    for cuts in ([0, 1, 2, 90], [0, 32, 64, 90], [0, 45, 45, 90]):
        kept, parts = given["state"].copy(), []
        for i, j in pairwise(cuts):
            out, after = scan(**cut(given, i, j) | {"state": kept}, out_state=kept, dt_softplus=True)
            assert after is kept
            parts.append(out)
        joined = np.concatenate(parts, axis=-2)
        close(joined, whole, np.float32)
        close(kept, last, np.float32)
        if name == "mamba":
            np.testing.assert_array_equal(kept, last)
            if 1 not in cuts:  # single tokens add the numbers of a state in another order
                np.testing.assert_array_equal(joined, whole)


@each_scan
@pytest.mark.parametrize("lengths", [[5, 0, 40, 1, 2], [0, 0], [], [0, 100, 0]], ids=str)
def test_sequences_end_to_end(implementation, name, lengths):
    begins, scan = np.cumsum([0, *lengths]), SCANS[name][0]
    given = problem(name, begins[-1], 40, 8, sequences=len(lengths))
    out, after = scan(**given, begins=begins, **ALL)
    assert (out.shape, after.shape) == (given["x"].shape, given["state"].shape)
    for s, (i, j) in enumerate(pairwise(begins)):
        alone, last = scan(**cut(given, i, j) | {"state": given["state"][s]}, **ALL)
        np.testing.assert_array_equal(out[..., i:j, :], alone)
        np.testing.assert_array_equal(after[s], last)
    kept = given["state"].copy()
    scan(**given | {"state": kept}, begins=begins, dt_softplus=True, out_state=kept)
    np.testing.assert_array_equal(kept, after)
    if lengths[0:1] == [5]:
        given["x"][..., 5:45, :] = np.nan
        others = [*range(5), *range(45, 48)]
        odd = scan(**given, begins=begins, **ALL)[0]
        np.testing.assert_array_equal(odd[..., others, :], out[..., others, :])


@each_scan
def test_threads_and_company_change_no_bit(implementation, name):
    given, scan = problem(name, 70, 300, 16), SCANS[name][0]
    out = scan(**given, dt_softplus=True, num_threads=1)
    np.testing.assert_array_equal(scan(**given, dt_softplus=True, num_threads=3), out)
    one = {n: x[1] if n in ("x", "dt", "B", "C", "z", "state") else x for n, x in given.items()}
    alone = scan(**one, dt_softplus=True)
    if implementation == "numpy" and name == "mamba2":  # whose BLAS chooses by shape
        close(alone, out[1], np.float32)
    else:
        np.testing.assert_array_equal(alone, out[1])


def test_states_may_grow_and_overflow(implementation):
    given = mamba((40, 20), 4)
    given = {name: given[name] for name in ("x", "B", "C")} | {"A": np.abs(given["A"])}
    given["dt"] = np.where(np.arange(20) < 10, 0.1, 30).astype(np.float32) * np.ones((40, 1), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = channels.scan(**given)[0]
        got = selective_scan(**given)
    close(got[:, :10], expected[:, :10], np.float32)
    large = np.abs(expected[:, 10:]) > 1e40
    assert large.any()
    assert not np.isfinite(got[:, 10:][large]).any()


def test_small_decays_do_not_leave_denormal_numbers(implementation):
    given = {name: x for name, x in mamba((100, 16), 4).items() if name in "xABC"}
    given["x"][5:] = 0
    _, state = selective_scan(**given, dt=np.full_like(given["x"], 3), return_state=True)
    assert not state[np.abs(state) < np.finfo(np.float32).tiny].any()


@each_scan
@pytest.mark.parametrize("argument", ["x", "dt"])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_what_is_not_finite_reaches_later_tokens_of_its_channel_or_head(implementation, name, argument, odd):
    given, scan = problem(name, 50, 40, 8), SCANS[name][0]
    del given["z"], given["D"]
    clean = scan(**given, dt_softplus=True)
    place = (1, 20, 17) if name == "mamba" else (1, 2, 20)
    given[argument][place] = odd
    out, reached = scan(**given, dt_softplus=True), np.zeros(clean.shape, bool)
    reached[(1, slice(20, None), 17) if name == "mamba" else (1, 2, slice(20, None))] = True
    assert not np.isfinite(out[reached]).any()
    close(out[~reached], clean[~reached], np.dtype(np.float32))


@pytest.mark.parametrize("states", [1, 5, 8, 16, 20, 33])
def test_an_infinite_token_alone_is_as_among_others(implementation, states):
    """Lanes that no number of the state fills have no part in the sum."""
    x, dt = np.array([[3e38] * 3, [1] * 3], np.float32), np.array([[2] * 3, [1] * 3], np.float32)
    A, B = -np.ones((3, states), np.float32), np.ones((2, states), np.float32)
    with np.errstate(over="ignore"):
        alone, among = selective_scan(x[:1], dt[:1], A, B[:1], B[:1]), selective_scan(x, dt, A, B, B)
    np.testing.assert_array_equal(alone, np.full((1, 3), np.inf, np.float32))
    np.testing.assert_array_equal(alone, among[:1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mamba", {}),
        ("mamba", {"begins": [0, 4, 4, 5]}),
        ("mamba2", {}),
        ("mamba2", {"dt_limits": (0.5, 1.2)}),
        ("mamba2", {"begins": [0, 1, 1, 5]}),
    ],
    ids=str,
)
def test_gradients_against_differences(implementation, name, options):
    given = problem(name, 5, 3, 2, np.float64, 3 if "begins" in options else None)
    function, options = SCANS[name][0], {**ALL, **options}
    (out, state), pullback = vjp(function, **given, **options)
    rng, need = np.random.default_rng(5), tuple(f"d{name}" for name in given)
    dout, dstate = rng.standard_normal(out.shape), rng.standard_normal(state.shape)
    found = pullback(dout, dstate, need=need)

    def both(**changed):
        return np.concatenate([x.ravel() for x in function(**given | changed, **options)])

    cotangents = np.concatenate([dout.ravel(), dstate.ravel()])
    for argument, got in zip(given, found, strict=True):
        changed = lambda y, argument=argument: both(**{argument: y})  # noqa: E731
        assert_gradient(got, changed, given[argument], cotangents, 1e-6)
        (alone,) = vjp(function, **given, **options)[1](dout, dstate, need=(f"d{argument}",))
        np.testing.assert_array_equal(alone, got)


@each_scan
def test_gradients_of_no_sequences(implementation, name):
    given = problem(name, 0, 3, 2, np.float64, 0)
    out, pullback = vjp(SCANS[name][0], **given, begins=[0])
    for argument, got in zip(given, pullback(out, need=tuple(f"d{n}" for n in given)), strict=True):
        np.testing.assert_array_equal(got, np.zeros(given[argument].shape))


@each_dtype
@pytest.mark.parametrize(("shape", "states"), [((2, 70, 100), 16), ((1, 33, 5), 17), ((2, 0, 4), 3)], ids=str)
def test_gradients_against_those_of_float64(implementation, shape, states, dtype):
    given = mamba(shape, states, dtype)
    dout = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    need = tuple(f"d{name}" for name in given)
    one, three = (
        vjp(selective_scan, **given, dt_softplus=True, num_threads=n)[1](dout, need=need) for n in (1, 3)
    )
    with forced("numpy"):
        wide = {name: x.astype(np.float64) for name, x in given.items()}
        expected = vjp(selective_scan, **wide, dt_softplus=True)[1](dout.astype(np.float64), need=need)
    for name, got, again, want in zip(given, one, three, expected, strict=True):
        # What the gate gives back is rounded to x's dtype, and is in every gradient.
        factor = 256 if np.dtype(dtype).itemsize > 2 else 8 * EPS[np.dtype(dtype)] / 2**-23
        close(got, want, given[name].dtype, factor)
        np.testing.assert_array_equal(got, again)


ONES, HEADS = np.ones((2, 5, 6), np.float32), np.ones((2, 4, 5, 6), np.float32)
RIGHT = {
    "mamba": {"x": ONES, "dt": ONES, "A": -np.ones((6, 4), np.float32)} | dict.fromkeys("BC", ONES[..., :4]),
    "mamba2": {"x": HEADS, "dt": HEADS[..., 0], "A": -np.ones(4, np.float32)}
    | dict.fromkeys("BC", np.ones((2, 2, 5, 8), np.float32)),
}
WRONG = [
    ("mamba", {"dt": np.ones((2, 5, 7), np.float32)}, r"dt has shape .*; expected x's, \(2, 5, 6\)"),
    ("mamba", {"A": np.ones((5, 4), np.float32)}, r"A has shape .*; expected \(channels, states\) = \(6,"),
    ("mamba", {"B": ONES[..., :3]}, r"B has shape .*; expected x's, \(2, 5, 4\)"),
    ("mamba", {"C": np.ones((2, 5, 4))}, "C has dtype float64; expected x's, float32"),
    ("mamba", {"C": None}, "C is None; expected an array"),
    ("mamba", {"D": np.ones(5, np.float32)}, r"D has shape \(5,\); expected \(6,\)"),
    ("mamba", {"z": np.ones((2, 5, 7), np.float32)}, "z has shape"),
    ("mamba", {"state": np.ones((2, 4, 6), np.float32)}, r"state has shape .*; expected \(2, 6, 4\)"),
    ("mamba", {"begins": [0, 5]}, r"x has shape \(2, 5, 6\); expected \(tokens, channels\), as begins"),
    ("mamba", {"delta": 1}, "delta"),
    ("mamba2", {"dt": np.ones((2, 5, 4), np.float32)}, r"dt has shape .*; expected .* = \(2, 4, 5\)"),
    ("mamba2", {"A": np.ones(4, np.float32)}, "A has 1.0; expected 0 or less"),
    ("mamba2", {"A": np.ones(3, np.float32)}, r"A has shape \(3,\); expected \(4,\)"),
    ("mamba2", {"A": None}, "A is None; expected an array"),
    ("mamba2", {"B": np.ones((2, 3, 5, 8), np.float32)}, "B has shape .* groups a divisor of 4"),
    ("mamba2", {"B": np.ones((2, 2, 5, 8), np.float16)}, "B has dtype float16; expected x's, float32"),
    ("mamba2", {"B": np.ones((3, 2, 5, 8), np.float32)}, r"B has shape .* as x, \(2, 4, 5, 6\), has them"),
    ("mamba2", {"C": np.ones((2, 2, 6, 8), np.float32)}, "C has shape"),
    ("mamba2", {"C": np.ones((2, 2, 5, 9), np.float32)}, r"C has shape .*; expected B's, \(2, 2, 5, 8\)"),
    ("mamba2", {"dt_limits": ("a", "b")}, r"dt_limits is \('a', 'b'\); expected a pair"),
    ("mamba2", {"dt_limits": (1.0, 0.5)}, r"dt_limits is \(1.0, 0.5\); expected a pair"),
    ("mamba2", {"D": np.ones(5, np.float32)}, r"D has shape \(5,\); expected \(4,\)"),
    ("mamba2", {"z": np.ones((2, 4, 5, 7))}, "z has dtype float64"),
    ("mamba2", {"state": np.ones((2, 4, 6, 8), np.float32)}, r"state has .*; expected \(2, 4, 8, 6\)"),
    ("mamba2", {"chunk_size": 1}, "chunk_size"),
    ("mamba2", {"begins": [0, 5]}, r"x has shape .*; expected \(heads, tokens, head_dim\), as begins"),
]


@pytest.mark.parametrize(("name", "changed", "message"), WRONG)
def test_errors_come_before_anything_is_computed(implementation, name, changed, message):
    error = TypeError if re.search("dtype|None|delta|chunk_size", message) else ValueError
    scan = SCANS[name][0]
    with pytest.raises(error, match=rf"^{scan.__name__}\(\): .*{message}"):
        scan(**RIGHT[name] | changed)


def test_results_lie_apart_from_all_inputs(implementation):
    memory = np.ones(60, np.float32)
    out, state = memory.reshape(2, 5, 6), memory.reshape(2, 6, 5)
    given = mamba((2, 5, 6), 5)
    del given["state"]
    for changed, message in (
        ({"z": out, "out_state": state}, "out_state shares memory with z"),
        ({"out": out, "out_state": state}, "out_state shares memory with out"),
        *(({"out": given[name]}, f"out shares memory with {name}") for name in ("z", "dt", "x")),
    ):
        with pytest.raises(ValueError, match=rf"^selective_scan\(\): {message}"):
            selective_scan(**given | changed, dt_softplus=True)
    given, memory = mamba2((1, 2, 4, 8), 4, groups=1), np.ones((1, 2, 4, 8), np.float32)
    del given["state"]
    for name, x in (("z", memory), ("x", memory), ("D", memory.ravel()[:2])):
        with pytest.raises(ValueError, match=rf"^mamba2_scan\(\): out_state shares memory with {name}"):
            mamba2_scan(**given | {name: x}, dt_softplus=True, out_state=memory)
