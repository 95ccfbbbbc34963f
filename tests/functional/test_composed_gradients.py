"""Gradients of variants that are made of calls of attention: finite differences, NaN behind masks, dtypes."""

from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from dlpack import OnlyDLPack
from oracle import assert_same_bits

from fastattn import functional
from fastattn._args.types import BackwardArgs
from fastattn._bench.cases import as_dtype
from fastattn._engine import dispatch
from fastattn.grad import vjp

B, H, K, L, M, D, E = 2, 4, 2, 7, 9, 6, 3
NARROW = ("q", "k", "v", "gate")  # in 16 bits where results are
OPTIONS = ("bias", "sinks", "alibi_slopes", "softcap")


class Call(NamedTuple):
    """Arrays that have gradients, by name, and the other arguments."""

    function: str
    arrays: dict[str, Any]
    fixed: Any = MappingProxyType({})
    taken: tuple[str, ...] = OPTIONS  # of the options below


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def calls(len_q, len_k):
    """Calls by name."""

    def qkv(**more):
        return {"q": draw(B, H, len_q, D), "k": draw(B, K, len_k, D), "v": draw(B, K, len_k, E), **more}

    return {
        "gated": Call("gated", qkv(gate=draw(B, H, len_q, E))),
        "gated, heads": Call("gated", qkv(gate=draw(H, len_q, 1))),
        "disentangled": Call(
            "disentangled",
            qkv(position_keys=draw(H, 6, D), position_queries=draw(H, 6, D, seed=1)),
            taken=OPTIONS[:3],
        ),
        "disentangled, keys": Call("disentangled", qkv(position_keys=draw(H, 6, D)), taken=OPTIONS[:3]),
    }


CALLS = calls(L, M)
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def options(call, len_q=L, len_k=M):
    """All options that a call takes, and how it is causal."""
    arrays = {
        "bias": draw(H, len_q, len_k),
        "sinks": draw(H),
        "alibi_slopes": np.linspace(0.1, 0.4, H),
        "softcap": np.array(2.0),
    }
    causal = {"q_offset": 1} if "bias" in call.taken else {}
    if causal:
        causal["causal"] = True
    return {name: arrays[name] for name in call.taken}, causal


def floats(call, arrays):
    """Options that are floats."""
    return {name: float(arrays[name]) for name in ("softcap", "scale") if name in {*arrays} - {*call.arrays}}


def forward(call, arrays, fixed):
    """The results, as a tuple."""
    function = getattr(functional, f"{call.function}_attention")
    return function(**{**arrays, **floats(call, arrays)}, **fixed, return_lse=True)


def backward(call, arrays, fixed, cotangents, results, need=None):
    """The gradients by name; the forward pass on their way has the bits of `results`."""
    function = getattr(functional, f"{call.function}_attention")
    need = [f"d{name}" for name in arrays] if need is None else need
    again, pullback = vjp(function, **{**arrays, **floats(call, arrays)}, **fixed, return_lse=True)
    assert_same_bits(again, results)
    return dict(zip(need, pullback(*cotangents, need=need), strict=True))


def cotangents_of(results):
    return [draw(*x.shape, seed=n + 5).astype(x.dtype) for n, x in enumerate(results)]


def assert_slope(call, arrays, fixed, cotangents, name, got):
    """`got` is the slope of the scalar sum(dout * out) + sum(dlse * lse) along arrays[name]."""
    x = arrays[name]
    assert np.shape(got) == x.shape, name
    step = 1e-6 * draw(*x.shape, seed=9)
    slope = 0.0
    for sign in (1, -1):
        moved = forward(call, {**arrays, name: x + sign * step}, fixed)
        terms = (np.where(a == -np.inf, 0, a) * b for a, b in zip(moved, cotangents, strict=True))
        slope += sign * sum(x.sum() for x in terms) / 2
    np.testing.assert_allclose((got * step).sum(), slope, rtol=1e-5, atol=1e-12, err_msg=name)


def placed(call):
    """A mask, lengths and positions, by which some rows attend nothing; a scale, and a bias of keys."""
    mask = np.random.default_rng(1).random((L, M)) < 0.8
    places = {"mask": mask, "kv_lengths": np.array([6, M]), "q_offset": -1, "window": (5, 4)}
    arrays = {"bias": draw(1, 1, M), "scale": np.array(0.4)}
    if call.function == "disentangled":
        arrays.pop("scale")
    return arrays, places


@pytest.mark.parametrize("how", [lambda call: ({}, {}), options, placed], ids=["plain", "options", "placed"])
@every_call
def test_finite_differences(call, how, monkeypatch, implementation):
    """With any number of threads, in pieces of few rows; where keys broadcast over the batch, too."""
    monkeypatch.setattr("fastattn.functional._relative._PIECE_SCORES", 1)
    monkeypatch.setattr("fastattn.functional._relative._LEAST_ROWS", 3)
    more, chosen = how(call)
    arrays, fixed = {**call.arrays, **more}, {**call.fixed, **chosen}
    if how is placed:
        arrays["k"] = arrays["k"][:1]
    results = forward(call, arrays, fixed)
    cotangents = cotangents_of(results)
    got = backward(call, arrays, {**fixed, "num_threads": 1}, cotangents, results)
    for name in arrays:
        assert_slope(call, arrays, fixed, cotangents, name, got[f"d{name}"])
    for threads in (2, 5):
        again = backward(call, arrays, {**fixed, "num_threads": threads}, cotangents, results)
        assert_same_bits(map(np.asarray, again.values()), map(np.asarray, got.values()))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lengths", [(0, M), (L, 0), (0, 0)], ids=["no queries", "no keys", "neither"])
def test_each_gradient_alone_of_empty_lengths(lengths, name, implementation):
    call = calls(*lengths)[name]
    more, causal = options(call, *lengths)
    arrays, fixed = {**call.arrays, **more}, {**call.fixed, **causal}
    if call.function != "disentangled":
        arrays["scale"] = np.array(fixed.pop("scale", 0.4))
    results = forward(call, arrays, fixed)
    cotangents = cotangents_of(results)
    for x in arrays:
        [got] = backward(call, arrays, fixed, cotangents, results, [f"d{x}"]).values()
        assert_slope(call, arrays, fixed, cotangents, x, got)
    if "bias" in arrays and call.function != "disentangled":
        [got] = backward(call, arrays, fixed, cotangents, results, ["dbias_diagonals"]).values()
        np.testing.assert_array_equal(got, np.zeros((len(arrays["bias"]), max(0, sum(lengths) - 1))))


@pytest.mark.parametrize("made", [OnlyDLPack, lambda x: x.astype(">f8")], ids=["DLPack", "byte order"])
@every_call
def test_arrays_of_other_libraries(call, made):
    """Arrays by DLPack alone, and float64 of any byte order, beside native arrays, too, change no bit."""
    more, causal = options(call)
    softcap = {name: more.pop(name) for name in ("softcap",) if name in more}
    arrays, fixed = {**call.arrays, **more}, {**call.fixed, **causal}
    results = forward(call, {**arrays, **softcap}, fixed)
    cotangents, need = cotangents_of(results), [f"d{name}" for name in arrays]
    expected = backward(call, {**arrays, **softcap}, fixed, cotangents, results, need)
    for theirs in (arrays, *([name] for name in arrays)):
        given = {n: made(x) if n in theirs else x for n, x in arrays.items()} | softcap
        assert_same_bits(forward(call, given, fixed), results)
        found = backward(call, given, fixed, [made(x) for x in cotangents], results, need)
        assert_same_bits(found.values(), expected.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@every_call
def test_dtypes(call, dtype, implementation):
    """Gradients have each array's dtype, and are close to those of the same numbers in float64."""
    arrays, kind = {}, as_dtype(dtype)
    for name, x in call.arrays.items():
        narrow = name in NARROW
        arrays[name] = x.astype(kind if narrow else np.float32)
    wide = {name: x.astype(float) for name, x in arrays.items()}
    exact = forward(call, wide, call.fixed)
    cotangents = [x.astype(kind if n == 0 else np.float32) for n, x in enumerate(cotangents_of(exact))]
    expected = backward(call, wide, call.fixed, [x.astype(float) for x in cotangents], exact)
    got = backward(call, arrays, call.fixed, cotangents, forward(call, arrays, call.fixed))
    bound = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    for name, x in got.items():
        assert x.dtype == arrays[name[1:]].dtype, name
        worst = abs(x.astype(float) - expected[name]).max() / abs(expected[name]).max()
        assert worst < bound, (name, worst)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axes", [(-1,), (-2,), (-2, -3), (-2, -3, -4)], ids=str)
@every_call
def test_broadcast_views(call, axes, dtype, implementation):
    """Views that have strides of 0 where others have some: NumPy's casts and products keep their order."""

    def broadcast(x):
        of_x = [axis for axis in axes if x.ndim >= -axis]
        once = x[tuple(slice(0, 1) if axis - x.ndim in of_x else slice(None) for axis in range(x.ndim))]
        return np.broadcast_to(once, x.shape)

    arrays = {n: broadcast(x.astype(dtype if n in NARROW else "f4")) for n, x in call.arrays.items()}
    whole = {name: np.array(x, order="C") for name, x in arrays.items()}
    results = forward(call, whole, call.fixed)
    again = forward(call, arrays, call.fixed)
    cotangents = [broadcast(x) for x in cotangents_of(results)]
    expected = backward(call, whole, call.fixed, [x.copy(order="C") for x in cotangents], results)
    got = backward(call, arrays, call.fixed, cotangents, again)
    bound = {"float32": 1e-4, "float16": 2e-2}[dtype]
    for name, x in expected.items():
        scale = 1 + abs(x.astype(float)).max()
        np.testing.assert_allclose(got[name], x, rtol=bound, atol=bound * scale, err_msg=name)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "bias" in call.taken])
def test_what_masks_hide_never_shows(name, implementation):
    """NaN in keys that nobody attends, and in the rows of q and dout that attend nothing."""
    call = CALLS[name]
    mask = np.random.default_rng(1).random((L, M)) < 0.7
    mask[:, [2, 6]], mask[3] = False, False
    fixed = {**call.fixed, "mask": mask}
    clean = {**call.arrays}
    dirty = {name: x.copy() for name, x in clean.items()}
    for place in ("k", "v"):
        dirty[place][..., [2, 6], :] = np.nan
    dirty["q"][..., 3, :] = np.nan
    found = []
    for arrays in (clean, dirty):
        results = forward(call, arrays, fixed)
        cotangents = cotangents_of(results)
        if arrays is dirty:
            for x in cotangents:
                x[..., 3, :] = np.nan if x.ndim == 4 and x.shape[-1] == E else x[..., 3, :]
        found.append(backward(call, arrays, fixed, cotangents, results))
    for name, x in found[0].items():
        assert np.isfinite(x).all(), name
        np.testing.assert_array_equal(found[1][name], x, err_msg=name)


# The products of attention that each gradient is made of, where they are not that of its own name.
MADE_OF = {
    "dscale": {"dq"},
    "dgate": set(),
    "dposition_keys": {"dbias"},
    "dposition_queries": {"dbias"},
    ("disentangled", "dq"): {"dq", "dbias"},
    ("disentangled", "dk"): {"dk", "dbias"},
}
PRODUCTS = ("dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes", "dsoftcap", "dbias_diagonals")


@every_call
def test_what_is_not_asked_for_is_not_computed(call, monkeypatch):
    """Only the products that a gradient is made of are computed, with the bits it has beside all others."""
    more, causal = options(call)
    arrays, fixed = {**call.arrays, **more}, {**call.fixed, **causal}
    results = forward(call, arrays, fixed)
    cotangents = cotangents_of(results)
    whole = backward(call, arrays, fixed, cotangents, results)
    asked = set()

    def spy(args, *rest, run=dispatch.run):
        if isinstance(args, BackwardArgs):
            asked.update(name for name in PRODUCTS if getattr(args, name) is not None)
        return run(args, *rest)

    monkeypatch.setattr(dispatch, "run", spy)
    for name, x in whole.items():
        asked.clear()
        alone = backward(call, arrays, fixed, cotangents, results, (name,))
        expected = MADE_OF.get((call.function, name), MADE_OF.get(name, {name}))
        assert asked == expected, name
        np.testing.assert_array_equal(alone[name], x, err_msg=name)


@every_call
def test_errors(call):
    name = rf"^pullback of {call.function}_attention\(\): "
    results = forward(call, call.arrays, call.fixed)
    cotangents = cotangents_of(results)
    with pytest.raises(ValueError, match=name + "need has 'dnothing'; expected d"):
        backward(call, call.arrays, call.fixed, cotangents, results, ("dnothing",))
    with pytest.raises(TypeError, match=name + "need is 'dq'; expected a tuple of names"):
        backward(call, call.arrays, call.fixed, cotangents, results, "dq")
    wrong = [cotangents[0][..., :1, :], *cotangents[1:]]
    with pytest.raises(ValueError, match=name + "dout has shape"):
        backward(call, call.arrays, call.fixed, wrong, results)
    more = [cotangents[0], draw(*results[0].shape[:-1], 2)]
    with pytest.raises(ValueError, match=name + "dmore has shape"):
        backward(call, call.arrays, call.fixed, more, results)


def test_dscale_of_a_scale_of_1_and_a_dlse_that_is_not_aligned(implementation):
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 4))
    _, lse = functional.gated_attention(x, x, x, x, scale=1, return_lse=True)
    odd = np.empty(lse.nbytes + 1, np.uint8)[1:].view(lse.dtype).reshape(lse.shape)
    odd[...] = lse
    need = ("dq", "dscale")
    got = vjp(functional.gated_attention, x, x, x, x, scale=1, return_lse=True)[1](x, odd, need=need)
    close = {"scale": 1 + 1e-12, "return_lse": True}
    ref = vjp(functional.gated_attention, x, x, x, x, **close)[1](x, lse, need=need)
    for name, a, b in zip(need, got, ref, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=name)
