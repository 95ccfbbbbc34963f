"""Definitions of each kind of structural mask, as a dense array of who attends whom.

It reads the numbers that a mask was built with. It does not call the product's `resolve` or `to_array`.
"""

import numpy as np

from fastattn import masks
from fastattn.masks._mask import _Both, _Either, _Not


def dense(mask, q, k, kv_lengths=None, q_offset=None):
    """`mask` for the positions of one call: bool, broadcasts to (..., heads, len_q, len_k)."""
    len_q, len_k = q.shape[-2], k.shape[-2]
    if q_offset is None:
        q_offset = (len_k if kv_lengths is None else np.asarray(kv_lengths)) - len_q
    return attends(
        mask, np.asarray(q_offset)[..., None, None, None] + np.arange(len_q)[:, None], np.arange(len_k)
    )


def attends(mask, i, j):
    """Tell whether the query at position i attends key j; i is (..., 1, len_q, 1), j is (len_k,)."""
    match mask:
        case _Both(left=one, right=other):
            return attends(one, i, j) & attends(other, i, j)
        case _Either(left=one, right=other):
            return attends(one, i, j) | attends(other, i, j)
        case _Not(mask=one):
            return ~attends(one, i, j)
        case masks.causal():
            return j <= i
        case masks.window(left=left, right=right):
            left, right = (np.inf if side is None else side for side in (left, right))
            return (i - left <= j) & (j <= i + right)
        case masks.first_keys(n=n):
            return (j < np.asarray(n)[..., None, None, None]) & (i == i)
        case masks.chunked(size=size):
            return i // size == j // size
        case masks.documents(ids=ids, query_ids=None):
            same = (ids[..., None, :, None] == ids[..., None, None, :]) & (ids >= 0)[..., None, None, :]
            return _selected(i == j, same)
        case masks.dilated(window=window, dilation=step):
            return (abs(i - j) <= window * step) & ((i - j) % step == 0)
        case masks.strided(stride=stride):
            return (j <= i) & ((i - j <= stride) | ((i - j) % stride == 0))
        case masks.global_tokens(index=index):
            return np.isin(i, index) | np.isin(j, index)
        case masks.block_sparse(bitmap=bitmap, block=(block_q, block_k)):
            blocks_q, blocks_k = map(np.arange, bitmap.shape[-2:])
            attended = _selected(i // block_q == blocks_q, bitmap)
            return _selected(attended, blocks_k[:, None] == j // block_k)
        case masks.bigbird(block=block):
            return attends(masks.block_sparse(_bigbird(mask, j.size), block), i, j)
    raise TypeError(f"no definition of {mask!r}")


def _selected(rows, table):
    """Union, for each row, of the rows of `table` that it selects: rows (..., n, m), table (..., m, k)."""
    return rows.astype(np.float32) @ table.astype(np.float32) > 0


def _bigbird(mask, len_k):
    """Blocks that attend one another. It checks the fixed blocks, and how many there are at random."""
    number = np.arange(-(-len_k // mask.block))
    near = 2 * abs(number[:, None] - number) < mask.window
    fixed = near | (number < mask.global_blocks) | (number < mask.global_blocks)[:, None]
    bitmap = mask.bitmap(len_k)
    assert (bitmap >= fixed).all()
    assert ((bitmap & ~fixed).sum(1) == np.minimum(mask.random, (~fixed).sum(1))).all()
    return bitmap
