"""The oracle: attention by its definition, dense, from the public arguments, nothing taken from fastattn."""

import numpy as np


@np.errstate(all="ignore")
def attention(q, k, v, *, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None,
              alibi_slopes=None, sinks=None, kv_lengths=None, q_offset=None, row_ranges=None, dtype=float):
    """q is (..., heads_q, len_q, head_dim) or (len_q, head_dim); returns out, lse, probs, who attends whom.

    In float64 it is the reference; in another dtype the plain computation that the error bound measures by.
    A 16-bit dtype multiplies matrices in float32 and rounds scores, probabilities and the output.
    """
    q, k, v = (array[None] if q.ndim == 2 else array for array in (q, k, v))
    work = np.promote_types(dtype, np.float32).type
    group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
    q, k, v = q.astype(work), np.repeat(k.astype(work), group, -3), np.repeat(v.astype(work), group, -3)
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

    scores = q @ k.swapaxes(-1, -2) * work(head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = work(softcap) * np.tanh(scores / work(softcap))
    if bias is not None:
        scores = scores + np.asarray(bias).astype(work)
    if alibi_slopes is not None:
        scores = scores - np.asarray(alibi_slopes).astype(work)[..., None, None] * abs(distance).astype(work)
    attend = np.broadcast_to(attend, scores.shape)
    scores = np.where(attend, scores.astype(dtype).astype(work), -np.inf)

    sink = np.asarray(-np.inf if sinks is None else sinks).astype(work)[..., None]
    row_max = np.maximum(scores.max(-1, initial=-np.inf), sink)
    row_max = np.where(attend.any(-1) | (sink > -np.inf), row_max, work(0))
    probs = np.where(attend, np.exp(scores - row_max[..., None]), work(0))
    row_sum = probs.sum(-1) + np.exp(sink - row_max)
    lse = row_max + np.log(row_sum)
    probs = (probs / np.where(row_sum == 0, work(1), row_sum)[..., None]).astype(dtype).astype(work)
    if np.isfinite(v).all():
        out = probs @ v
    else:  # 0 x NaN is not 0: every row sums over the keys that it attends, and no others
        out = np.where(attend[..., None], probs[..., None] * v[..., None, :, :], work(0)).sum(-2)
    return out.astype(dtype), lse, probs, attend
