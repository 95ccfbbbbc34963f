"""The oracle: dense attention by its definition, from public arguments. It imports nothing of fastattn."""

import numpy as np
from dropped import kept


@np.errstate(all="ignore")
def masked_scores(
    q,
    k,
    *,
    mask=None,
    bias=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    kv_lengths=None,
    q_offset=None,
    row_ranges=None,
    dtype=float,
    product=np.matmul,
):
    """q is (..., heads_q, len_q, head_dim); returns scores, -inf where masked, and who attends whom."""
    work = np.promote_types(dtype, np.float32).type
    q, k = q.astype(work), np.repeat(k.astype(work), q.shape[-3] // k.shape[-3] if k.shape[-3] else 1, -3)
    (len_q, head_dim), len_k = q.shape[-2:], k.shape[-2]
    length = np.asarray(len_k if kv_lengths is None else kv_lengths)
    offset = np.asarray(length - len_q if q_offset is None else q_offset)
    # How far a query stands behind a key.
    distance = offset[..., None, None, None] + np.arange(len_q)[:, None] - np.arange(len_k)

    attend = np.arange(len_k) < length[..., None, None, None]
    if causal:
        attend = attend & (distance >= 0)
    if window is not None:
        left, right = (np.inf if side is None else side for side in window)
        attend = attend & (distance <= left) & (-distance <= right)
    if row_ranges is not None:
        begin, end = (np.asarray(side)[..., None] for side in row_ranges)
        attend = attend & (begin <= np.arange(len_k)) & (np.arange(len_k) < end)
    if mask is not None:
        attend = attend & mask
    if bias is not None:
        attend = attend & (bias != -np.inf)

    scores = product(q, k.swapaxes(-1, -2)) * work(head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = work(softcap) * np.tanh(scores / work(softcap))
    if bias is not None:
        scores = scores + np.asarray(bias).astype(work)
    if alibi_slopes is not None:
        scores = scores - np.asarray(alibi_slopes).astype(work)[..., None, None] * abs(distance).astype(work)
    attend = np.broadcast_to(attend, scores.shape)
    return np.where(attend, scores.astype(dtype).astype(work), -np.inf), attend


@np.errstate(all="ignore")
def attention(q, k, v, *, sinks=None, dropout=0.0, seed=None, dtype=float, **options):
    """q is (..., heads_q, len_q, head_dim) or (len_q, head_dim); returns out, lse, probs, who attends whom.

    In float64 it is the reference; in another dtype the plain computation that the error bound measures by.
    A 16-bit dtype multiplies matrices in float32 and rounds scores, probabilities and the output.
    """
    q, k, v = (array[None] if q.ndim == 2 else array for array in (q, k, v))
    scores, attend = masked_scores(q, k, **options, dtype=dtype)
    work = scores.dtype.type
    sink = np.asarray(-np.inf if sinks is None else sinks).astype(work)[..., None]
    row_max = np.maximum(scores.max(-1, initial=-np.inf), sink)
    row_max = np.where(attend.any(-1) | (sink > -np.inf), row_max, work(0))
    probs = np.where(attend, np.exp(scores - row_max[..., None]), work(0))
    row_sum = probs.sum(-1) + np.exp(sink - row_max)
    lse = row_max + np.log(row_sum)
    probs = probs / np.where(row_sum == 0, work(1), row_sum)[..., None]
    if dropout:
        probs = np.where(kept(probs.shape, dropout, seed), probs / work(1 - dropout), work(0))
    probs = probs.astype(dtype).astype(work)
    return average(probs, v, attend).astype(dtype), lse, probs, attend


@np.errstate(all="ignore")
def average(weights, v, attend):
    """weights is (..., heads_q, len_q, len_k), v (..., heads_kv, len_k, head_dim_v)."""
    v = np.repeat(v.astype(weights.dtype), weights.shape[-3] // v.shape[-3] if v.shape[-3] else 1, -3)
    if np.isfinite(v).all():
        return weights @ v
    # 0 x NaN is not 0: every row sums over the keys that it attends, and no others
    return np.where(attend[..., None], weights[..., None] * v[..., None, :, :], weights.dtype.type(0)).sum(-2)
