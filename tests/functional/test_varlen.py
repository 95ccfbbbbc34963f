"""Ragged batches: every sequence has, bit for bit, what its own call of `attention` gives."""

import ml_dtypes
import numpy as np
import pytest

import fastattn

LENGTHS = {
    "self": ([3, 0, 17, 130, 64, 1, 257], None),
    "cross": ([3, 0, 17, 130, 64, 1, 257], [3, 5, 17, 0, 64, 900, 31]),
    "cache": ([1, 1, 1, 5], [2100, 3, 700, 1300]),  # keys are split
    "one": ([40], None),
    "none": ([], None),
    "empty": ([0, 0], [0, 4]),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (10, 3)},
    "causal window": {"causal": True, "window": (20, None), "softcap": 3.0},
    "alibi": {"alibi_slopes": np.linspace(0.1, 1, 4), "causal": True},
    "sinks": {"sinks": np.linspace(0.1, 1, 4), "scale": 0.3},
}


def ragged(which, dtype=np.float32, seed=0):
    """q, k, v and where their sequences begin."""
    lengths_q, lengths_k = LENGTHS[which]
    begins_q = np.append(0, np.cumsum(lengths_q)).astype(np.int64)
    begins_k = begins_q if lengths_k is None else np.append(0, np.cumsum(lengths_k))
    rng = np.random.default_rng(seed)
    shapes = (begins_q[-1], 4, 32), (begins_k[-1], 2, 32), (begins_k[-1], 2, 24)
    return *(rng.standard_normal(shape).astype(dtype) for shape in shapes), begins_q, begins_k


def one_by_one(q, k, v, begins_q, begins_k, **options):
    """Call attention for each sequence alone, and put the results end to end."""
    outs, lses = [q[:0, :, :1] * np.zeros(v.shape[-1], q.dtype)], [np.zeros((q.shape[1], 0), np.float32)]
    for i in range(len(begins_q) - 1):
        rows, keys = slice(*begins_q[i : i + 2]), slice(*begins_k[i : i + 2])
        own = {
            name: x[i] if name in ("alibi_slopes", "sinks") and x.ndim == 2 else x
            for name, x in options.items()
        }
        for name in ("k_scale", "v_scale"):
            if name in own:
                own[name] = own[name][keys].T
        by_head = (x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys]))
        out, lse = fastattn.attention(*by_head, return_lse=True, **own)
        outs.append(out.swapaxes(0, 1))
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses, axis=1)


def require_equal(got, expected):
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("which", LENGTHS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_bits_of_single_calls(implementation, which, options, num_threads):
    call = ragged(which)
    got = fastattn.varlen_attention(*call, return_lse=True, num_threads=num_threads, **options)
    require_equal(got, one_by_one(*call, **options))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("which", ["self", "cross", "cache"])
def test_dtypes(implementation, dtype, which):
    call = ragged(which, dtype)
    got = fastattn.varlen_attention(*call, return_lse=True, causal=True)
    assert got[0].dtype == dtype
    require_equal(got, one_by_one(*call, causal=True))


@pytest.mark.parametrize("which", ["cross", "cache"])
def test_int8_keys_and_values(implementation, which):
    q, k, v, *begins = ragged(which)
    rng = np.random.default_rng(1)
    k, v = (rng.integers(-127, 128, x.shape).astype(np.int8) for x in (k, v))
    scales = {name: rng.random((len(k), 2), np.float32) / 64 for name in ("k_scale", "v_scale")}
    got = fastattn.varlen_attention(q, k, v, *begins, return_lse=True, window=(100, 0), **scales)
    require_equal(got, one_by_one(q, k, v, *begins, window=(100, 0), **scales))


def test_slopes_and_sinks_of_each_sequence(implementation):
    call = ragged("cross")
    numbers = np.random.default_rng(2).random((len(LENGTHS["cross"][0]), 4))
    options = {"alibi_slopes": numbers, "sinks": numbers[::-1]}
    got = fastattn.varlen_attention(*call, return_lse=True, **options)
    require_equal(got, one_by_one(*call, **options))
    once = {name: x[:1] for name, x in options.items()}  # one row for all
    got = fastattn.varlen_attention(*call, return_lse=True, **once)
    require_equal(got, one_by_one(*call, **{name: x[0] for name, x in once.items()}))


def test_strides_and_out(implementation):
    """Queries, keys and values side by side, as a linear map writes them, and a place for the result."""
    *_, begins, _ = ragged("self")
    qkv = np.random.default_rng(3).standard_normal((begins[-1], 8, 32)).astype(np.float32)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    place = np.full((begins[-1], 6, 32), 7, np.float32)
    out = fastattn.varlen_attention(q, k, v, begins, begins, out=place[:, 1:5])
    expected, _ = one_by_one(q, k, v, begins, begins)
    assert out.base is place
    np.testing.assert_array_equal(place[:, 1:5], expected)
    assert (place[:, ::5] == 7).all()


def test_nobody_sees_nan_of_another_sequence(implementation):
    q, k, v, begins_q, begins_k = ragged("cross")
    expected = fastattn.varlen_attention(q, k, v, begins_q, begins_k)
    for x, begins in ((k, begins_k), (v, begins_k), (q, begins_q)):
        x[begins[2] : begins[3]] = np.nan
    out = fastattn.varlen_attention(q, k, v, begins_q, begins_k)
    others = np.r_[: begins_q[2], begins_q[3] : len(q)]
    np.testing.assert_array_equal(out[others], expected[others])
    assert np.isnan(out[begins_q[2] : begins_q[3]]).all()


Q = np.ones((5, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q is None; expected an array of one numeric type"),
        ({"k": None}, "k is None; expected an array of one numeric type"),
        ({"v": None}, "v is None; expected an array of one numeric type"),
        ({"q": Q[0]}, r"q has shape \(4, 8\); expected \(tokens, heads, head_dim\)"),
        ({"v": Q[None]}, r"v has shape \(1, 5, 4, 8\); expected \(tokens, heads, head_dim\)"),
        ({"q": Q.astype(int)}, "q has dtype int64"),
        ({"k": Q[:4]}, r"cu_seqlens_k goes from 0 to 5; expected 0 to 4, the tokens of k"),
        ({"cu_seqlens_q": [0, 3]}, r"cu_seqlens_q goes from 0 to 3; expected 0 to 5, the tokens of q"),
        ({"cu_seqlens_q": [1, 5]}, r"cu_seqlens_q goes from 1 to 5; expected 0 to 5, the tokens of q"),
        (
            {"cu_seqlens_q": [0, 4, 3, 5]},
            "cu_seqlens_q falls from 4 to 3 at index 2; expected it not to fall",
        ),
        (
            {"cu_seqlens_q": [0, 5]},
            "cu_seqlens_q is of 1 sequences and cu_seqlens_k of 2; expected the same number",
        ),
        ({"cu_seqlens_q": []}, r"cu_seqlens_q has shape \(0,\); expected \(sequences \+ 1,\)"),
        (
            {"cu_seqlens_q": np.array([0, 5], object)},
            "cu_seqlens_q is of dtype object and holds int; expected an array of one numeric type",
        ),
        ({"cu_seqlens_q": 5}, r"cu_seqlens_q has shape \(\); expected \(sequences \+ 1,\)"),
        ({"cu_seqlens_k": [0.0, 5.0]}, "cu_seqlens_k has dtype float64; expected integers"),
        ({"window": (-1, 0)}, r"window\[0\] is -1; expected at least 0, or None for no bound"),
        ({"causal": 1}, "causal is 1; expected True or False"),
        ({"alibi_slopes": np.ones((3, 4))}, r"alibi_slopes has shape \(3, 4\)"),
        ({"sinks": np.ones(3)}, r"sinks has shape \(3,\)"),
        ({"out": np.ones((4, 5, 8), np.float32)}, r"out has shape \(4, 5, 8\); expected \(5, 4, 8\)"),
        ({"out": Q}, "out shares memory with q"),
        ({"k_scale": np.ones((5, 4))}, "k_scale is given without v_scale"),
        ({"mask": np.ones(5, bool)}, "mask is not an argument; expected one of"),
        (
            {"q": np.ones((5, 3, 8), np.float32), "k": Q[:, :2], "v": Q[:, :2]},
            r"q has 3 heads, shape \(5, 3, 8\); expected a multiple of k's 2 heads, shape \(5, 2, 8\)",
        ),
        ({"q": Q[:, :0]}, r"q has 0 heads, shape \(5, 0, 8\); expected at least 1"),
        ({"k": Q[..., :4]}, r"k has a head_dim of 4, shape \(5, 4, 4\); expected a head_dim of 8"),
        ({"v": Q[:, :2]}, r"v has 2 heads, shape \(5, 2, 8\); expected 4 heads, as k has"),
        (
            {"v": Q[:3]},
            r"v has a length of 3, shape \(3, 4, 8\); expected a length of 5, as k has, shape \(5, 4",
        ),
        (
            {
                "k": Q.astype(np.int8),
                "v": Q.astype(np.int8),
                "k_scale": np.ones((4, 5)),
                "v_scale": Q[..., 0],
            },
            r"k_scale has shape \(4, 5\); expected one that fits \(tokens_k, heads_kv\) = \(5, 4\)",
        ),
    ],
)
def test_errors(changes, message):
    arguments = {"q": Q, "k": Q, "v": Q, "cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 5], **changes}
    with pytest.raises((TypeError, ValueError), match=rf"varlen_attention\(\): {message}"):
        fastattn.varlen_attention(**arguments)
