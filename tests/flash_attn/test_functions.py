"""flash-attn's functions on arrays: what they compute, by their definition in float64, and their errors."""

import flash
import ml_dtypes
import numpy as np
import pytest
from dropped import kept
from oracle import assert_same_bits, check, expect
from refused import assert_refused, refused

import fastattn.flash_attn as fa
from fastattn.layers import KVCache

RNG = np.random.default_rng(1)
# As in its own tests: lengths of queries and keys that straddle tiles, either longer.
LENGTHS = [
    (1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (3, 799), (64, 128), (217, 128),
    (5, 3), (0, 7), (7, 0),
]  # fmt: skip
HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "local": {"window_size": (30, 9)},
    "causal local": {"causal": True, "window_size": (17, 40)},
    "left": {"window_size": (40, -1), "scale": 0.3},
    "softcap": {"softcap": 5.0, "causal": True},
    "alibi": {"alibi": np.linspace(0.03, 0.7, 6)},
    "alibi of each": {"alibi": np.linspace(0.03, 0.7, 12).reshape(2, 6), "causal": True, "softcap": 2.0},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def theirs(options):
    """The options by flash-attn's names."""
    names = {"alibi": "alibi_slopes", "scale": "softmax_scale"}
    return {names.get(name, name): x for name, x in options.items()}


def inputs(len_q, len_k, heads=(6, 2), head_dim=40, dtype=np.float32, batch=2):
    shapes = (batch, len_q, heads[0], head_dim), (batch, len_k, heads[1], head_dim)
    return [RNG.standard_normal(shape).astype(dtype) for shape in (shapes[0], shapes[1], shapes[1])]


def held_to_the_definition(got, q, k, v, options):
    """`got` is out, and lse."""
    expected = expect(
        *(x.swapaxes(1, 2) for x in (q, k, v)), **flash.options_of(q.shape[1], k.shape[1], **options)
    )
    check((got[0].swapaxes(1, 2), got[1]), expected, telling=False)


@every_option
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_the_definition(implementation, lengths, heads, options):
    q, k, v = inputs(*lengths, heads)
    out, lse, probs = fa.flash_attn_func(q, k, v, **theirs(options), return_attn_probs=True)
    assert probs is None
    assert out.flags.c_contiguous or out.swapaxes(1, 2).flags.c_contiguous
    held_to_the_definition((out, lse), q, k, v, options)
    assert_same_bits([fa.flash_attn_func(q, k, v, **theirs(options), deterministic=True)], [out])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("head_dim", [32, 59, 128, 257])
@pytest.mark.parametrize("options", [OPTIONS["causal"], OPTIONS["causal local"]], ids=["causal", "local"])
def test_types_and_head_dims(implementation, dtype, head_dim, options):
    q, k, v = inputs(67, 128, head_dim=head_dim, dtype=dtype)
    got = fa.flash_attn_func(q, k, v, **theirs(options), return_attn_probs=True)
    held_to_the_definition(got[:2], q, k, v, options)


def test_a_row_of_nothing_is_zero():
    q, k, v = inputs(5, 3)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :2] == 0).all()
    assert np.isneginf(lse[:, :, :2]).all()
    assert out[:, 2:].all()


@every_option
def test_packed_forms_have_the_same_bits(options):
    options = theirs(options) | {"return_attn_probs": True}
    qkv = RNG.standard_normal((2, 33, 3, 6, 24)).astype(np.float32)
    q, k, v = (qkv[:, :, i] for i in range(3))
    expected = fa.flash_attn_func(q, k, v, **options)[:2]
    assert_same_bits(fa.flash_attn_qkvpacked_func(qkv, **options)[:2], expected)
    assert_same_bits(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options)[:2], expected)
    tokens, begins = qkv.reshape(66, 3, 6, 24), np.array([0, 33, 66], np.int32)
    outs = [
        fa.flash_attn_varlen_qkvpacked_func(tokens, begins, 33, **options),
        fa.flash_attn_varlen_kvpacked_func(tokens[:, 0], tokens[:, 1:], begins, begins, 33, 33, **options),
    ]
    for out, lse, _ in outs:
        assert_same_bits([out.reshape(expected[0].shape)], [np.ascontiguousarray(expected[0])])
        assert_same_bits([lse.reshape(6, 2, 33)], [np.ascontiguousarray(expected[1].swapaxes(0, 1))])


@every_option
@pytest.mark.parametrize("page", [None, 1, 16, 64, 100])
def test_packed_sequences_have_the_bits_of_their_own_calls(implementation, options, page):
    """In pages, too, which are drawn at random and hold garbage elsewhere."""
    lengths_q, lengths_k = [3, 0, 70, 130, 1], [5, 9, 70, 200, 100]
    if options.get("alibi") is not None and options["alibi"].ndim == 2:
        options = options | {"alibi": np.linspace(0.03, 0.7, 30).reshape(5, 6)}
    q, k, v = inputs(sum(lengths_q), sum(lengths_k), batch=1)
    begins_q, begins_k = (np.append(0, np.cumsum(x)).astype(np.int32) for x in (lengths_q, lengths_k))
    keys, table = (k[0], v[0]), None
    if page is not None:
        counts = [-(-n // page) for n in lengths_k]
        table = np.full((5, max(counts)), 2**30, np.int32)
        order = iter(RNG.permutation(sum(counts)))
        keys = [np.full((sum(counts), page, *x.shape[2:]), np.nan, np.float32) for x in (k, v)]
        for b, count in enumerate(counts):
            for i in range(count):
                table[b, i] = next(order)
                rows = slice(begins_k[b] + i * page, min(begins_k[b] + (i + 1) * page, begins_k[b + 1]))
                for pages, x in zip(keys, (k, v), strict=True):
                    pages[table[b, i], : rows.stop - rows.start] = x[0, rows]
    out, lse, _ = fa.flash_attn_varlen_func(
        q[0],
        *keys,
        begins_q,
        begins_k,
        130,
        200,
        **theirs(options),
        return_attn_probs=True,
        block_table=table,
    )
    assert lse.shape == (6, sum(lengths_q))
    for b in range(5):
        rows, own = slice(*begins_q[b : b + 2]), slice(*begins_k[b : b + 2])
        slopes = options.get("alibi")
        more = {} if slopes is None else {"alibi": slopes[b] if slopes.ndim == 2 else slopes}
        found = fa.flash_attn_func(
            q[:, rows], k[:, own], v[:, own], **theirs(options | more), return_attn_probs=True
        )
        for x, y in zip((out[rows], lse[:, rows]), found, strict=False):
            np.testing.assert_array_equal(x, y[0])


def test_dropout_is_drawn_from_numpys_generator():
    """Its rate, its mean, and which probabilities it takes: those of the seed that was drawn."""
    q, k, _ = inputs(60, 80)
    v = np.broadcast_to(np.eye(80, dtype=np.float32)[:, None], (2, 80, 2, 80))
    q *= 0.1
    plain = fa.flash_attn_func(q, k, v)
    np.random.seed(3)  # noqa: NPY002
    first, second = (fa.flash_attn_func(q, k, v, dropout_p=0.17) for _ in range(2))
    np.random.seed(3)  # noqa: NPY002
    out, lse = (
        fa.flash_attn_varlen_func(
            q.reshape(-1, 6, 40),
            k.reshape(-1, 2, 40),
            v.reshape(-1, 2, 80),
            [0, 60, 120],
            [0, 80, 160],
            dropout_p=0.17,
        ),
        None,
    )
    assert lse is None
    np.testing.assert_array_equal(out.reshape(first.shape), first)
    np.random.seed(3)  # noqa: NPY002
    seed = int(np.random.randint(2**63 - 1, dtype=np.int64))  # noqa: NPY002
    mask = kept((2, 6, 60, 80), 0.17, seed).swapaxes(1, 2)
    np.testing.assert_array_equal(first != 0, mask)
    assert (first != second).any()
    np.testing.assert_allclose(first[mask], (plain / 0.83)[mask], rtol=1e-5)
    assert abs((first == 0).mean() - 0.17) < 0.01
    assert abs(first.sum(-1).mean() - 1) < 0.01


def test_a_softcap_of_any_zero_is_none():
    for zero in (0, np.float32(0), np.int64(0)):
        assert_same_bits([fa.flash_attn_func(X, X, X, softcap=zero)], [fa.flash_attn_func(X, X, X)])


X = np.ones((2, 5, 4, 8), np.float32)
TOKENS, BEGINS = X.reshape(10, 4, 8), np.array([0, 4, 10])
I4 = KVCache(dtype="int4").append(X.repeat(4, -1), X.repeat(4, -1)).k
VARLEN = "fa.flash_attn_varlen_func(t, t, t, "


@refused(r"""
fa.flash_attn_func(x[0], x, x)
    -> ValueError: ^flash_attn_func\(\): q has shape \(5, 4, 8\); expected \(batch, len
fa.flash_attn_func(x, x[:, :, :3], x[:, :, :3])
    -> ValueError: ^flash_attn_func\(\): q has 4 heads, .*\(2, 5, 4, 8\)
fa.flash_attn_func(x, x, x[:, :3])
    -> ValueError: flash_attn_func\(\): v has a length of 3, shape \(2, 3, 4, 8\)
fa.flash_attn_func(x, x[..., :7], x) -> ValueError: ^flash_attn_func\(\): k has a head_dim of 7
fa.flash_attn_func(x, i, i) -> TypeError: ^flash_attn_func\(\): k has dtype int4; expected float32
fa.flash_attn_func(x, x.astype(np.float16), x) -> TypeError: ^flash_attn_func\(\): q, k and v have dtypes
fa.flash_attn_func(x, x[:1].repeat(3, 0), x)
    -> ValueError: ^flash_attn_func\(\): v has shape .*; expected 3 in the first axis, as k has
fa.flash_attn_func(x, x[:1], x[:1]) -> ValueError: ^flash_attn_func\(\): k has shape .*; expected a batch of
fa.flash_attn_kvpacked_func(x, z.astype(np.float16).astype(int))
    -> TypeError: ^flash_attn_kvpacked_func\(\): k has dtype int64
fa.flash_attn_func(x, x, x, dropout_p=None)
    -> TypeError: ^flash_attn_func\(\): dropout_p is None; expected a real
fa.flash_attn_func(x, x, x, dropout_p=1.0)
    -> ValueError: ^flash_attn_func\(\): dropout_p is 1.0; expected at least 0
fa.flash_attn_func(x, x, x, dropout_p="a") -> TypeError: ^flash_attn_func\(\): dropout_p is 'a'
fa.flash_attn_func(x, x, x, 0.1, return_attn_probs=True) -> ValueError: probabilities are never stored
fa.flash_attn_func(x, x, x, softmax_scale="a") -> TypeError: ^flash_attn_func\(\): softmax_scale is 'a'
fa.flash_attn_func(x, x, x, causal=1) -> TypeError: ^flash_attn_func\(\): causal is 1; expected True or False
fa.flash_attn_func(x, x, x, window_size=3)
    -> TypeError: ^flash_attn_func\(\): window_size is 3; expected a pair
fa.flash_attn_func(x, x, x, window_size=(-2, 3)) -> ValueError: ^flash_attn_func\(\): window_size\[0\] is -2
fa.flash_attn_func(x, x, x, window_size=(1, 2.0)) -> TypeError: ^flash_attn_func\(\): window_size\[1\] is 2.0
fa.flash_attn_func(x, x, x, softcap=-1.0) -> ValueError: ^flash_attn_func\(\): softcap is -1.0
fa.flash_attn_func(x, x, x, alibi_slopes=np.ones(3))
    -> ValueError: ^flash_attn_func\(\): alibi_slopes has shape \(3,\)
fa.flash_attn_kvpacked_func(x, x)
    -> ValueError: ^flash_attn_kvpacked_func\(\): kv has shape .*\(batch, length, 2, heads
fa.flash_attn_qkvpacked_func(x[:, :, None]) -> ValueError: ^flash_attn_qkvpacked_func\(\): qkv has shape
fa.flash_attn_varlen_qkvpacked_func(x, [0, 2])
    -> ValueError: ^flash_attn_varlen_qkvpacked_func\(\): qkv has shape
fa.flash_attn_varlen_func(t, t, t, [0, 6, 4, 10], b)
    -> ValueError: ^flash_attn_varlen_func\(\): cu_seqlens_q falls
fa.flash_attn_varlen_func(t, t, t, b, [0, 4, 9])
    -> ValueError: ^flash_attn_varlen_func\(\): cu_seqlens_k goes from
fa.flash_attn_varlen_func(t, t, t, b, b / 2)
    -> TypeError: ^flash_attn_varlen_func\(\): cu_seqlens_k has dtype float64
fa.flash_attn_varlen_func(t, x, x, b, b, block_table=[[0.0], [1.0]])
    -> TypeError: block_table has dtype float64
fa.flash_attn_varlen_func(t, x, x, b, b, block_table=[[0], [1]])
    -> ValueError: block_table has room for 5 keys
fa.flash_attn_varlen_func(t, x, x, b, b, block_table=[[0, 9], [1, 2]]) -> ValueError: block_table\[1, 1\] is 2
fa.flash_attn_varlen_func(t, x, x, b, b, block_table=[[-1, 9], [1, 0]])
    -> ValueError: block_table\[0, 0\] is -1
""")  # fmt: skip
def test_errors_name_the_argument(code, error):
    assert_refused(code, error, fa=fa, x=X, z=X[:, :, None].repeat(2, 2), t=TOKENS, b=BEGINS, i=I4)
