"""Gradients of attention by their definition, dense, from public arguments; imports nothing of fastattn."""

from types import SimpleNamespace

import naive
import numpy as np


def summed(shape, x):
    """x, summed over the axes along which an array of `shape` was broadcast."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


def of_kv_heads(x, heads_kv):
    """(..., heads_q, n, m) summed over the heads of a group."""
    return x.reshape(*x.shape[:-3], heads_kv, x.shape[-3] // heads_kv, *x.shape[-2:]).sum(-3)


def diagonals(shape, ds):
    """Sums of ds (..., len_q, len_k) along its diagonals, number j - i + len_q - 1, for a bias of `shape`."""
    len_q, len_k = ds.shape[-2:]
    n = max(0, len_q + len_k - 1)
    sums = np.zeros((*ds.shape[:-2], n), ds.dtype)
    for i in range(len_q):
        sums[..., len_q - 1 - i : len_q - 1 - i + len_k] += ds[..., i, :]
    return summed((*shape[:-2], n), sums)


@np.errstate(all="ignore")
def attention(dout, q, k, v, *, dlse=0.0, sinks=None, keep=1.0, dtype=float, **options):
    """All gradients by name, and the same sums of absolute values. q is (batch, heads_q, len_q, head_dim).

    In float64 it is the reference; in another dtype the plain computation that the error bound measures by.
    `keep` is what dropout multiplies each probability by: 0, or 1 / (1 - dropout).
    """
    scores, attend = naive.masked_scores(q, k, **options, dtype=dtype)
    work = scores.dtype.type
    _, lse, probs, _ = naive.attention(q, k, v, sinks=sinks, dtype=dtype, **options)
    group, len_q, len_k = q.shape[-3] // k.shape[-3], q.shape[-2], k.shape[-2]
    # Keys that no row attends, and rows that attend none, take no part, whatever they hold.
    keys, rows = attend.any(-2)[..., None], attend.any(-1)[..., None]
    x = SimpleNamespace(scale=work(options.get("scale", q.shape[-1] ** -0.5)), heads_kv=k.shape[-3])
    x.k, values = (np.where(keys, np.repeat(y.astype(work), group, -3), work(0)) for y in (k, v))
    x.q, x.dout = (np.where(rows, y.astype(work), work(0)) for y in (q, dout))
    x.kept = probs * work(keep) if np.ndim(keep) == 0 else probs * keep.astype(work)
    dprobs = x.dout @ values.swapaxes(-1, -2) * np.asarray(keep, work)
    average = naive.average(x.kept, values, attend).astype(dtype)  # the result, with dropout
    dlse = np.broadcast_to(np.asarray(dlse, work), lse.shape)[..., None]
    delta = (x.dout * average.astype(work)).sum(-1, keepdims=True) - dlse
    x.ds = np.where(attend, probs * (dprobs - delta), work(0)).astype(dtype).astype(work)
    x.products = x.q @ x.k.swapaxes(-1, -2)
    cap = options.get("softcap")
    u = x.products * (x.scale / work(cap)) if cap else np.zeros_like(x.ds)
    x.inner = x.ds * (1 - np.tanh(u) ** 2)
    x.of_softcap = np.tanh(u) - u * (1 - np.tanh(u) ** 2)
    sink = np.asarray(-np.inf if sinks is None else sinks).astype(work)[..., None]
    weight = np.exp(sink - np.where(lse == -np.inf, np.inf, lse))
    x.of_sinks = np.where(weight == 0, 0, -weight * delta[..., 0])
    length = np.asarray(len_k if options.get("kv_lengths") is None else options["kv_lengths"])
    offset = np.asarray(options["q_offset"]) if options.get("q_offset") is not None else length - len_q
    far = abs(offset[..., None, None, None] + np.arange(len_q)[:, None] - np.arange(len_k))
    x.of_slopes = -far.astype(work)
    sizes = SimpleNamespace(**{name: abs(y) for name, y in vars(x).items()})
    sizes.ds = np.where(attend, probs * (abs(dprobs) + abs(delta)), work(0))
    sizes.inner = sizes.ds * (1 - np.tanh(u) ** 2)
    sizes.of_softcap = abs(np.tanh(u)) + abs(u * (1 - np.tanh(u) ** 2))
    given = {**options, "sinks": sinks}
    shapes = {name: np.shape(given[name]) for name in ("bias", "sinks", "alibi_slopes") if name in given}
    return contracted(x, shapes), contracted(sizes, shapes)


def contracted(x, shapes):
    """All gradients; each is linear in every array of x."""
    gradients = {
        "dq": x.scale * (x.inner @ x.k),
        "dk": x.scale * of_kv_heads(x.inner.swapaxes(-1, -2) @ x.q, x.heads_kv),
        "dv": of_kv_heads(x.kept.swapaxes(-1, -2) @ x.dout, x.heads_kv),
        "dscale": (x.inner * x.products).sum(),
        "dsoftcap": (x.ds * x.of_softcap).sum(),
        "dsinks": summed(shapes.get("sinks", ()), x.of_sinks.sum(-1)),
        "dalibi_slopes": summed(shapes.get("alibi_slopes", ()), (x.ds * x.of_slopes).sum((-1, -2))),
    }
    if "bias" in shapes:
        gradients["dbias"] = summed(shapes["bias"], x.ds)
        gradients["dbias_diagonals"] = diagonals(shapes["bias"], x.ds)
    return gradients
