"""Attention by definition, dense, in float64 or wider. The bench and the self-test compare with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench.cases import Array
from fastattn.masks import Mask


def dense(mask: Mask, q: Array, k: Array, kv_lengths: Any, q_offset: Any) -> Array:
    """A structural mask as an array (..., H, Lq, Lk), for the positions that the arguments give."""
    if q_offset is None and kv_lengths is not None:
        q_offset = np.asarray(kv_lengths) - q.shape[-2]
    *batch, heads, len_q, _ = q.shape
    return mask.to_array(len_q, k.shape[-2], batch_shape=tuple(batch), num_heads=heads, q_offset=q_offset)


@np.errstate(all="ignore")
def masked_scores(
    q: Array,
    k: Array,
    *,
    rows: Any = slice(None),
    dtype: Any = np.float64,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    kv_lengths: Any = None,
    q_offset: Any = None,
    row_ranges: tuple[Any, Any] | None = None,
) -> Array:
    """Scores of the query `rows`, (..., H, rows, Lk), -inf where masked; see `attention`."""
    if isinstance(mask, Mask):
        mask = dense(mask, q, k, kv_lengths, q_offset)
    dtype = np.dtype(dtype)
    work: Any = dtype.type if dtype in (np.float64, np.longdouble) else np.float32
    len_q, len_k = q.shape[-2], k.shape[-2]
    heads = np.arange(q.shape[-3]) // (q.shape[-3] // k.shape[-3])

    length = np.asarray(len_k if kv_lengths is None else kv_lengths)
    offset = np.asarray(length - len_q if q_offset is None else q_offset)
    key = np.arange(len_k)
    position = offset[..., None, None, None] + np.arange(len_q)[rows, None]

    def of_rows(x: Any) -> Array:
        """x is (..., Lq or 1, Lk or 1): its rows."""
        x = np.asarray(x)
        picked: Array = x[..., rows, :] if x.ndim > 1 and x.shape[-2] == len_q else x
        return picked

    attend = key < length[..., None, None, None]
    if causal:
        attend = attend & (key <= position)
    if window is not None:
        left, right = (np.inf if side is None else side for side in window)
        attend = attend & (key >= position - left) & (key <= position + right)
    if row_ranges is not None:
        begin, end = (of_rows(np.asarray(side)[..., None]) for side in row_ranges)
        attend = attend & (key >= begin) & (key < end)
    if mask is not None:
        attend = attend & of_rows(mask)

    scores = q[..., rows, :].astype(work) @ k.astype(work)[..., heads, :, :].swapaxes(-1, -2)
    scores *= work(q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = work(softcap) * np.tanh(scores / work(softcap))
    if bias is not None:
        scores = scores + of_rows(bias).astype(work)
        attend = attend & (of_rows(bias) != -np.inf)
    if alibi_slopes is not None:
        scores = scores - np.asarray(alibi_slopes, work)[..., None, None] * abs(position - key).astype(work)
    found: Array = np.where(attend, scores.astype(dtype).astype(work), -np.inf)
    return found


@np.errstate(all="ignore")
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    rows: Any = slice(None),
    dtype: Any = np.float64,
    sinks: Array | None = None,
    sigmoid_bias: float | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """q is (..., H, Lq, D), k and v are (..., Hkv, Lk, D or Dv); returns the query `rows` of out and lse.

    With a `dtype` below float64 it is the plain computation from which error bounds are derived: matrix
    products in float32; scores, probabilities and output rounded to the dtype. With `sigmoid_bias` it is
    sigmoid attention, which has no lse: its lse is NaN.
    """
    dtype = np.dtype(dtype)
    work: Any = dtype.type if dtype in (np.float64, np.longdouble) else np.float32
    heads = np.arange(q.shape[-3]) // (q.shape[-3] // k.shape[-3])
    scores = masked_scores(q, k, rows=rows, dtype=dtype, **options)
    if sigmoid_bias is not None:
        probs = (1 / (1 + np.exp(-(scores + work(sigmoid_bias))))).astype(dtype).astype(work)
        out = probs @ v.astype(work)[..., heads, :, :]
        return out.astype(dtype), np.full(out.shape[:-1], np.nan)
    sink = np.asarray(-np.inf if sinks is None else sinks, work)[..., None]
    row_max = np.maximum(scores.max(-1, initial=-np.inf), sink)
    row_max[row_max == -np.inf] = 0
    probs = np.exp(scores - row_max[..., None])
    row_sum = probs.sum(-1) + np.exp(sink - row_max)
    lse = row_max + np.log(row_sum)
    probs = np.where(row_sum[..., None] > 0, probs / row_sum[..., None], 0).astype(dtype).astype(work)
    return (probs @ v.astype(work)[..., heads, :, :]).astype(dtype), lse
