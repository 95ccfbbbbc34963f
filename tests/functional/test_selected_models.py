"""Attentions that select their keys by the formulas of their papers, in float64."""

import numpy as np
import pytest
import selected as oracle

from fastattn import functional as F
from fastattn.grad import vjp

RNG = np.random.default_rng(1)
HEADS = [(4, 4), (6, 2), (16, 1)]


def arrays(heads, len_q, len_k, dtype=np.float64, batch=(2,)):
    shapes = (heads[0], len_q, 16), (heads[1], len_k, 16), (heads[1], len_k, 12)
    return [RNG.standard_normal((*batch, *shape)).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(100, 100), (1, 75), (20, 64), (3, 3)])
def test_moba(implementation, heads, len_q, len_k):
    q, k, v = arrays(heads, len_q, len_k)
    got = F.moba_attention(q, k, v, block_size=16, top_k=3)
    np.testing.assert_allclose(got, oracle.moba(q, k, v, 16, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(60, 60), (1, 75), (20, 64), (3, 3)])
def test_quest(implementation, heads, len_q, len_k):
    q, k, v = arrays(heads, len_q, len_k)
    got = F.quest_attention(q, k, v, page_size=8, top_k=4)
    np.testing.assert_allclose(got, oracle.quest(q, k, v, 8, 4), rtol=0, atol=1e-12)
    pages = [k[:, :, i : i + 8] for i in range(0, len_k, 8)]
    bounds = [np.stack([f(p, axis=-2) for p in pages], axis=-2) for f in (np.min, np.max)]
    np.testing.assert_array_equal(F.quest_attention(q, k, v, page_size=8, top_k=4, bounds=bounds), got)


NSA = {
    "compress_size": 8,
    "compress_stride": 4,
    "block_size": 16,
    "top_k": 4,
    "first": 1,
    "last": 2,
    "window": 20,
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(150, 150), (1, 131), (20, 64), (5, 5)])
def test_native_sparse_attention(implementation, heads, len_q, len_k):
    q, k, v = arrays(heads, len_q, len_k)
    gates = RNG.random((2, heads[0], len_q, 3))
    got = F.native_sparse_attention(q, k, v, gates, **NSA)
    np.testing.assert_allclose(got, oracle.native_sparse(q, k, v, gates, *NSA.values()), rtol=0, atol=1e-12)
    count = max(0, (len_k - 8) // 4 + 1)
    short = [RNG.standard_normal((2, heads[1], count, n)) for n in (16, 12)]
    got = F.native_sparse_attention(q, k, v, gates, compressed_k=short[0], compressed_v=short[1], **NSA)
    expected = oracle.native_sparse(q, k, v, gates, *NSA.values(), compressed=short)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def latent(len_q, len_k, heads=4, dtype=np.float64):
    shapes = {
        "q": (2, heads, len_q, 12 + 4), "cache": (2, len_k, 10 + 4), "key_weight": (heads, 12, 10),
        "value_weight": (heads, 9, 10), "index_q": (2, 3, len_q, 8), "index_k": (2, len_k, 8),
        "index_weights": (2, 3, len_q),
    }  # fmt: skip
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("len_q", "len_k"), [(70, 70), (1, 75), (20, 64), (3, 3)])
@pytest.mark.parametrize("heads", [1, 4, 40])
def test_deepseek_sparse_attention(implementation, heads, len_q, len_k):
    call = latent(len_q, len_k, heads)
    got = F.deepseek_sparse_attention(**call, top_k=9)
    np.testing.assert_allclose(got, oracle.deepseek_sparse(**call, top_k=9), rtol=0, atol=1e-12)
    every, lse = F.deepseek_sparse_attention(**call, top_k=len_k, return_lse=True)
    dense = F.latent_attention(*list(call.values())[:4], causal=True, return_lse=True)
    np.testing.assert_allclose(every, dense[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse, dense[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["moba", "quest", "native", "native_compressed", "deepseek"])
def test_gradients(name, implementation):
    """Along random directions, that change no selection here."""
    q, k, v = arrays((6, 2), 25, 60)
    gates, short = RNG.random((2, 6, 25, 3)), [RNG.standard_normal((2, 2, 14, n)) for n in (16, 12)]
    options, need = {}, ("dq", "dk", "dv")
    inputs = {"q": q, "k": k, "v": v}
    if name == "moba":
        function, options = F.moba_attention, {"block_size": 16, "top_k": 2, "scale": 0.3}
    elif name == "quest":
        function, options = F.quest_attention, {"page_size": 8, "top_k": 3}
    elif name.startswith("native"):
        function, options = F.native_sparse_attention, dict(NSA)
        inputs["gates"] = gates
        if name == "native_compressed":
            inputs |= {"compressed_k": short[0], "compressed_v": short[1]}
    else:
        call = latent(25, 60)
        function, inputs = F.deepseek_sparse_attention, {n: call.pop(n) for n in list(call)[:4]}
        options = {**call, "top_k": 9, "sinks": RNG.standard_normal(4)}
    scale = options.setdefault("scale", 0.3)
    need = (*(f"d{n}" for n in inputs), "dscale")
    out, pull = vjp(function, **inputs, **options)
    dout = RNG.standard_normal(out.shape)
    found = pull(dout, need=need)
    for which, (label, x) in enumerate(inputs.items()):
        direction = RNG.standard_normal(x.shape)
        ends = (function(**{**inputs, label: x + step * direction}, **options) for step in (1e-6, -1e-6))
        high, low = ((end * dout).sum() for end in ends)
        slope = (high - low) / 2e-6
        np.testing.assert_allclose((found[which] * direction).sum(), slope, rtol=1e-6, atol=1e-6)
    ends = (function(**inputs, **{**options, "scale": scale + step}) for step in (1e-6, -1e-6))
    high, low = ((end * dout).sum() for end in ends)
    np.testing.assert_allclose(found[-1], (high - low) / 2e-6, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_dtypes(implementation, dtype):
    """A result of q's dtype. Selections are those of float64 where scores are integers, which are exact."""
    q, k, v = (RNG.integers(-3, 4, x.shape).astype(dtype) for x in arrays((4, 2), 40, 70))
    eps = np.finfo(dtype).eps
    got = F.quest_attention(q, k, v, page_size=8, top_k=3)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(float), oracle.quest(q, k, v, 8, 3), rtol=0, atol=16 * eps)


def test_lengths_of_a_cache(implementation):
    """Keys behind a sequence's length are not read, whatever stands there."""
    q, k, v = arrays((6, 2), 2, 80, np.float32)
    lengths = np.array([50, 33])
    for x in (k, v):
        for b, n in enumerate(lengths):
            x[b, :, n:] = np.nan
    calls = {
        F.moba_attention: {"block_size": 16, "top_k": 2},
        F.quest_attention: {"page_size": 8, "top_k": 3},
        F.native_sparse_attention: NSA,
    }
    gates = RNG.random((2, 6, 2, 3)).astype(np.float32)
    for function, options in calls.items():
        more = (gates,) if function is F.native_sparse_attention else ()
        got = function(q, k, v, *more, kv_lengths=lengths, **options)
        for b, n in enumerate(lengths):
            alone = function(q[b], k[b, :, :n], v[b, :, :n], *(x[b] for x in more), **options)
            np.testing.assert_allclose(got[b], alone, rtol=0, atol=2e-6)


BAD = {
    r"moba_attention\(\): block_size is 0": lambda q, k, v: F.moba_attention(q, k, v, block_size=0),
    r"moba_attention\(\): top_k is 0": lambda q, k, v: F.moba_attention(q, k, v, top_k=0),
    r"moba_attention\(\): causal is not an argument": lambda q, k, v: F.moba_attention(q, k, v, causal=False),
    r"native_sparse_attention\(\): compress_size is 30; expected a multiple of compress_stride, 16": (
        lambda q, k, v: F.native_sparse_attention(q, k, v, np.ones((2, 4, 20, 3)), compress_size=30)
    ),
    r"native_sparse_attention\(\): gates has shape \(2, 4, 20, 2\)": (
        lambda q, k, v: F.native_sparse_attention(q, k, v, np.ones((2, 4, 20, 2)))
    ),
    r"native_sparse_attention\(\): compressed_k has shape": (
        lambda q, k, v: F.native_sparse_attention(q, k, v, np.ones((2, 4, 20, 3)), compressed_k=k)
    ),
    r"quest_attention\(\): bounds\[0\] has shape": lambda q, k, v: F.quest_attention(q, k, v, bounds=(k, k)),
}


@pytest.mark.parametrize(("message", "call"), BAD.items(), ids=BAD)
def test_errors(message, call):
    with pytest.raises((TypeError, ValueError), match="^" + message):
        call(*arrays((4, 2), 20, 40))


def test_padding_of_a_batch(implementation):
    """Queries behind a sequence's length see what is within it, and no NaN that fills it up."""
    q, k, v = arrays((4, 2), 60, 60, np.float32)
    gates, lengths = RNG.random((2, 4, 60, 3)).astype(np.float32), np.array([60, 33])
    k[1, :, 33:] = v[1, :, 33:] = np.nan
    place = {"kv_lengths": lengths, "q_offset": 0}
    calls = {
        F.moba_attention: ({"block_size": 16, "top_k": 2}, ()),
        F.quest_attention: ({"page_size": 8, "top_k": 3}, ()),
        F.native_sparse_attention: (NSA, (gates,)),
    }
    for function, (options, more) in calls.items():
        got = function(q, k, v, *more, **options, **place)
        assert np.isfinite(got).all()
        expected = function(*(x[1, :, :33] for x in (q, k, v, *more)), **options)
        np.testing.assert_allclose(got[1, :, :33], expected, rtol=0, atol=2e-6)


MANY = {"compress_size": 9, "block_size": 9, "top_k": 9, "page_size": 9}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("many", [3_000_000, 2**40, 2**70])
def test_more_than_all_keys_is_all_keys(many, name):
    """In no more time: sizes of users bound no loop."""
    q, k, v = arrays((4, 2), 6, 6)
    gates, indexer = RNG.random((2, 4, 6, 3)), latent(6, 6)
    calls = {
        ("compress_size", "block_size", "top_k"): lambda **sizes: vjp(
            F.native_sparse_attention, q, k, v, gates, compress_stride=1, **sizes
        ),
        ("block_size", "top_k"): lambda **sizes: vjp(F.moba_attention, q, k, v, **sizes),
        ("page_size", "top_k"): lambda **sizes: vjp(F.quest_attention, q, k, v, **sizes),
        ("top_k",): lambda **sizes: vjp(
            F.deepseek_sparse_attention,
            *list(indexer.values())[:4],
            **dict(list(indexer.items())[4:]),
            **sizes,
        ),
    }
    for taken, call in calls.items():
        if name in taken:
            out, pullback = call(**{name: many})
            expected, pullback_expected = call(**{name: MANY[name]})
            np.testing.assert_array_equal(out, expected)
            for dx, dy in zip(pullback(out), pullback_expected(out), strict=True):
                np.testing.assert_array_equal(dx, dy)


def test_branches_of_weight_0_are_left_out():
    q, k, v = arrays((4, 2), 40, 40)
    gates = RNG.random((2, 4, 40, 3))
    gates[..., 20:, 0] = gates[..., 20:, 1] = 0
    sizes = {**NSA, "window": 5}
    expected = F.native_sparse_attention(q, k, v, gates, **sizes)
    v[:, :, 3] = np.inf
    got = F.native_sparse_attention(q, k, v, gates, **sizes)
    np.testing.assert_array_equal(got[..., 20:, :], expected[..., 20:, :])
    assert not np.isfinite(got[..., 8:20, :]).any()


def test_an_indexer_has_one_key_a_token():
    call = latent(20, 40)
    wrong = {
        "index_k": call["index_k"][:, :20],
        "index_q": call["index_q"][:, :, :9],
        "index_weights": call["index_weights"].swapaxes(1, 2),
    }
    for name, x in [*wrong.items(), ("index_weights", None)]:
        with pytest.raises((TypeError, ValueError), match=rf"^deepseek_sparse_attention\(\): {name} has"):
            F.deepseek_sparse_attention(**{**call, name: x}, top_k=5)
