"""Keys and values in pages: the bits of keys in one piece, whatever the pages are, and what is refused."""

from itertools import pairwise

import numpy as np
import pytest
from oracle import assert_same_bits
from refused import assert_refused, refused

import fastattn
from fastattn import functional, layers
from fastattn._bench.cases import DTYPES, STRUCTURES, VARIANTS, Shape, combine, make_inputs
from fastattn.layers import KVCache

# Both kernels, several blocks and splits; pages divide the keys, so that masks fit.
SHAPES = [
    Shape("tile", batch=2, heads_q=4, heads_kv=2, len_q=45, len_k=192, head_dim=20),
    Shape("one_tile", batch=2, heads_q=3, heads_kv=1, len_q=5, len_k=192, head_dim=17, head_dim_v=9),
    Shape("few_rows", batch=3, heads_q=4, heads_kv=2, len_q=1, len_k=1152, head_dim=24),
    Shape("task", batch=1, heads_q=2, heads_kv=2, len_q=300, len_k=384, head_dim=16),
]
PAGES = (1, 3, 16, 48, 64, 192)
every_page = pytest.mark.parametrize("page", PAGES)
every_dtype = pytest.mark.parametrize("dtype", [*DTYPES, "int8"])


def table_of(batch, pages, rng, spare=3):
    """Pages of each sequence, (batch, pages), in any order; some pages are nobody's."""
    return rng.permutation(batch * pages + spare)[: batch * pages].reshape(batch, pages)


def paged(x, table, page, rows_first=False):
    """x (batch, heads, keys, ...) in pages (pages, heads, page, ...); what is nobody's is NaN."""
    heads, tail = x.shape[1], x.shape[3:]
    shape = (page, heads) if rows_first else (heads, page)
    pages = np.full((table.max() + 2, *shape, *tail), 99 if x.dtype == np.int8 else np.nan, x.dtype)
    pages = pages.swapaxes(1, 2) if rows_first else pages
    for b, row in enumerate(table):
        for i, number in enumerate(row):
            pages[number] = x[b, :, i * page : (i + 1) * page]
    return pages


def inputs(shape, dtype, rng):
    """q, and the arguments that may be in pages."""
    q, k, v = make_inputs(shape, "float32" if dtype == "int8" else dtype, rng)
    if dtype != "int8":
        return q, {"k": k, "v": v}
    cached = KVCache(dtype="int8").append(k, v)
    return q, {"k": cached.k, "v": cached.v, "k_scale": cached.k_scale, "v_scale": cached.v_scale}


def same(first, second):
    """Assert that two results, or tuples and dictionaries of results, have the same bits."""
    if isinstance(first, dict):
        first, second = first.values(), second.values()
    if isinstance(first, np.ndarray):
        assert_same_bits(first, second)
        return
    for one, other in zip(first, second, strict=True):
        same(one, other)


@every_dtype
@every_page
@pytest.mark.parametrize("variant", [*VARIANTS, *STRUCTURES])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_bits_are_those_of_one_piece(shape, variant, page, dtype, implementation):
    rng = np.random.default_rng(page)
    q, held = inputs(shape, dtype, rng)
    arguments = (
        {"mask": STRUCTURES[variant](shape, rng)} if variant in STRUCTURES else combine([variant], shape, rng)
    )
    table = table_of(shape.batch, shape.len_k // page, rng)
    pages = {name: paged(x, table, page, rows_first=page % 2 == 0) for name, x in held.items()}
    whole = fastattn.attention(q, **held, **arguments, return_lse=True)
    same(fastattn.attention(q, **pages, block_table=table, **arguments, return_lse=True), whole)


@every_page
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_statistics_and_dropout(shape, page, implementation):
    rng = np.random.default_rng(1)
    q, held = inputs(shape, "bfloat16", rng)
    table = table_of(shape.batch, shape.len_k // page, rng)
    pages = {name: paged(x, table, page) for name, x in held.items()}
    for more in ({"stats": ("top_k:3", "entropy", "key_sums", "mean_weights")}, {"dropout": 0.3, "seed": 5}):
        same(fastattn.attention(q, **pages, block_table=table, causal=True, **more),
             fastattn.attention(q, **held, causal=True, **more))  # fmt: skip


@pytest.mark.parametrize("window", [None, (30, 0)])
@pytest.mark.parametrize("len_q", [1, 7, 40])
def test_pages_that_nobody_attends_may_be_anything(window, len_q, implementation):
    """Entries after the lengths and before the window are not read: they may be no pages, and hold NaN."""
    rng = np.random.default_rng(2)
    shape = Shape("", batch=3, heads_q=4, heads_kv=2, len_q=len_q, len_k=160, head_dim=16)
    q, held = inputs(shape, "float32", rng)
    lengths, page = np.array([160, 41, 77]), 16
    table = table_of(3, 10, rng)
    known = table.copy()
    for b, length in enumerate(lengths):
        known[b, -(-length // page) :] = -7
        known[b, : max(0, length - len_q - 30) // page if window else 0] = 2**40
    pages = {name: paged(x, table, page) for name, x in held.items()}
    for x in pages.values():  # rows after a length, too
        x[table[1, 2], :, 41 % page :] = np.nan
    arguments = {"kv_lengths": lengths, "window": window, "causal": True}
    same(fastattn.attention(q, **pages, block_table=known, **arguments),
         fastattn.attention(q, **held, **arguments))  # fmt: skip


def test_sequences_share_pages(implementation):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((4, 6, 2, 8), np.float32)
    k, v = rng.standard_normal((2, 5, 3, 32, 8), np.float32)
    table = np.array([[0, 1], [0, 2], [0, 3], [4, 0]], np.uint8)
    whole = [np.concatenate([x[table[:, 0]], x[table[:, 1]]], axis=2) for x in (k, v)]
    same(fastattn.attention(q, k, v, block_table=table, causal=True),
         fastattn.attention(q, *whole, causal=True))  # fmt: skip
    one = fastattn.attention(q, k, v, block_table=table[0], kv_lengths=50)  # the same keys for all
    same(one[1], fastattn.attention(q[1], whole[0][0, :, :50], whole[1][0, :, :50]))


@every_page
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (10, 0)}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_ragged_calls(dtype, options, page, implementation):
    rng = np.random.default_rng(4)
    lengths_q, lengths_k = np.array([3, 0, 64, 5, 1]), np.array([100, 7, 64, 33, 0])
    begins_q, begins_k = (np.append(0, np.cumsum(x)) for x in (lengths_q, lengths_k))
    shape = Shape("", batch=1, heads_q=4, heads_kv=2, len_q=begins_q[-1], len_k=begins_k[-1], head_dim=16)
    q, held = inputs(shape, dtype, rng)
    ragged = {name: x[0].swapaxes(0, 1) for name, x in held.items()}
    pages_each = -(-100 // page)
    table, pages = table_of(5, pages_each, rng), {}
    for name, x in ragged.items():
        padded = np.zeros((5, x.shape[1], pages_each * page, *x.shape[2:]), x.dtype)
        for i, (begin, end) in enumerate(pairwise(begins_k)):
            padded[i, :, : end - begin] = x[begin:end].swapaxes(0, 1)
        pages[name] = paged(padded, table, page).swapaxes(1, 2)
    q = q[0].swapaxes(0, 1)
    call = {"cu_seqlens_q": begins_q, "cu_seqlens_k": begins_k, "return_lse": True, **options}
    same(fastattn.varlen_attention(q, **pages, block_table=table, **call),
         fastattn.varlen_attention(q, **ragged, **call))  # fmt: skip


Q, PAGED, TABLE = np.ones((2, 4, 3, 8)), np.ones((10, 2, 16, 8)), np.arange(8).reshape(2, 4)
RAGGED = np.ones((5, 4, 8))
NAMES = {"attention": fastattn.attention, "functional": functional, "fastattn": fastattn, "Q": Q, "K": PAGED,
         "P": PAGED.swapaxes(1, 2), "T": TABLE, "R": RAGGED, "C": layers.PagedKVCache}  # fmt: skip


@refused(r"""
attention(Q, K, K, block_table=T + 5) -> ValueError:
    attention\(\): block_table\[1, 1\] is 10; expected 0 to 9
attention(Q, K, K, block_table=T - 1) -> ValueError:
    attention\(\): block_table\[0, 0\] is -1; expected 0 to 9
attention(Q, K, K, block_table=T * 1.0) -> TypeError:
    attention\(\): block_table has dtype float64; expected int
attention(Q, K, K, block_table=3) -> ValueError:
    block_table has shape \(\); expected \(..., pages of a sequence\)
attention(Q, K, K, block_table=T[:, None]) -> ValueError: block_table has shape \(2, 1, 4\)
attention(Q, K[0], K[0], block_table=T) -> ValueError:
    k has shape \(2, 16, 8\); expected \(pages, heads_kv, page
attention(Q, K, K[:5], block_table=T) -> ValueError: v has 5 pages; expected 10, as k has
attention(Q, K[:0], K[:0], block_table=T) -> ValueError:
    k has shape \(0, 2, 16, 8\); expected .*, none of them 0
attention(Q, K, K, block_table=T, kv_lengths=[65, 1]) -> ValueError: kv_lengths has 65; expected 0 to 64
attention(Q, K, K, block_table=T, mask=np.ones((3, 16), bool)) -> ValueError: mask has shape \(3, 16\)
vjp(attention, Q, K, K, block_table=T) -> ValueError:
    block_table is given; expected none: pages have no gradients
functional.attention_backward(Q, Q, K, K, Q, Q[..., 0], block_table=T) -> TypeError:
    block_table is not an argument
functional.sigmoid_attention(Q, K, K, block_table=T) -> TypeError:
    block_table is not an argument: attention takes
fastattn.varlen_attention(R, R, R, [0, 5], [0, 5], block_table=[[0]]) -> ValueError:
    k has shape \(5, 4, 8\)
fastattn.varlen_attention(R, P, P, [0, 5], [0, 65], block_table=T[:1]) -> ValueError:
    block_table has room for 64 keys of a sequence; expected at least 65
C(0, 16, 2, 8) -> ValueError: PagedKVCache\(\): pages is 0; expected at least 1
C(8, 16, 2, 8).append([1], K[:1], K[:1]) -> ValueError:
    there is no sequence 1; expected a number from allocate
C(8, 16, 2, 8).free(True) -> TypeError: PagedKVCache.free\(\): sequence is True; expected an integer
C(8, 16, 2, 8, "int32") -> TypeError: dtype is 'int32'; expected float32
""")
def test_errors(code, error):
    assert_refused(code, error, **NAMES)


def test_explain_says_what_is_gathered():
    for len_q, page, gathered in ((1, 8, True), (1, 16, False), (100, 16, True), (100, 64, False)):
        q, k = np.ones((2, 4, len_q, 8), np.float32), np.ones((10, 4, page, 8), np.float32)
        report = fastattn.explain(q, k, k, block_table=TABLE, backend=None)
        if report["backend"] == "compiled":
            assert (f"k gathered, block by block: pages of {page} keys" in report["conversions"]) == gathered
