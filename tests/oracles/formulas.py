"""Variants of attention by the formulas of their papers, dense, in float64.

`FORMULAS` has one for each of `CALLS` in the bench of variants. It draws the same arrays, in the same order.
"""

from itertools import pairwise

import deformable
import naive
import numpy as np
import selected

from bench.variants import OPTIONS
from fastattn._bench.cases import VARIANTS


def doubles(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


def behind(len_q, len_k, offset=None):
    """Distances of query i behind key j, by their positions: (len_q, len_k)."""
    offset = len_k - len_q if offset is None else offset
    return offset + np.arange(len_q)[:, None] - np.arange(len_k)


def repeated(x, q):
    """x (..., heads_kv, n, d) with each head repeated for the query heads that share it."""
    return np.repeat(x, q.shape[-3] // x.shape[-3], -3)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    """x with rows of length 1."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rms(x):
    """x with rows whose mean square is 1."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def shaw(q, k, v, key_table, value_table, **options):
    q, k, v, a, b = doubles(q, k, v, key_table, value_table)
    k, v, clip = repeated(k, q), repeated(v, q), len(a) // 2
    distance = behind(q.shape[-2], k.shape[-2], options.get("q_offset"))
    row = np.clip(-distance, -clip, clip) + clip
    bias = np.einsum("...id,ijd->...ij", q, a[row]) / np.sqrt(q.shape[-1])
    given = options.pop("bias", 0)
    _, lse, probs, _ = naive.attention(q, k, v, bias=bias + given, **options)
    return probs @ v + np.einsum("...ij,ijd->...id", probs, b[row]), lse


def transformer_xl(q, k, v, relative, u, w, **options):
    q, k, v, relative, u, w = doubles(q, k, v, relative, u, w)
    k, v, scale = repeated(k, q), repeated(v, q), options.pop("scale", q.shape[-1] ** -0.5)
    distance = behind(q.shape[-2], k.shape[-2], options.get("q_offset"))
    row = np.clip(distance.max(initial=0) - distance, 0, relative.shape[-2] - 1)
    positions = np.einsum("bhid,hijd->bhij", q + w[:, None], relative[:, row])
    bias = scale * positions + options.pop("bias", 0)
    return naive.attention(q + u[:, None], k, v, bias=bias, scale=scale, **options)[:2]


def deberta(q, k, v, kr, qr, bucket, **options):
    q, k, v = doubles(q, k, v)
    k, v = repeated(k, q), repeated(v, q)
    terms = 1 + (kr is not None) + (qr is not None)
    scale = (q.shape[-1] * terms) ** -0.5
    bias = np.zeros((*q.shape[:-1], k.shape[-2]))
    if kr is not None:
        bias += np.einsum("bhid,hijd->bhij", q, doubles(kr)[0][:, bucket])
    if qr is not None:
        bias += np.einsum("bhjd,hijd->bhij", k, doubles(qr)[0][:, bucket])
    return naive.attention(q, k, v, bias=scale * bias, scale=scale, **options)[:2]


def logarithmic_buckets(distance, span, most):
    """Version 2 of DeBERTa: distances beyond span // 2 share buckets by their logarithm, up to `most`."""
    middle = span // 2
    far = np.log(np.maximum(abs(distance), middle) / middle) / np.log((most - 1) / middle)
    shared = np.sign(distance) * (np.ceil(far * (middle - 1)) + middle).astype(int)
    return np.clip(np.where(abs(distance) <= middle, distance, shared) + span, 0, 2 * span - 1)


def forgetting(q, k, v, log_forget, **options):
    len_q, len_k = q.shape[-2], k.shape[-2]
    sums = np.cumsum(log_forget.astype(float), -1)
    position = np.clip(len_k - len_q + np.arange(len_q), 0, max(len_k - 1, 0))
    bias = np.zeros((*log_forget.shape[:-1], len_q, len_k))
    if len_k:
        bias = sums[..., position, None] - sums[..., None, :]
    return naive.attention(*doubles(q, k, v), bias=bias, causal=True, **options)[:2]


def differential(q, k, v, weights, **options):
    """`weights` broadcasts to (..., heads, len_q, len_k)."""
    q1, q2, k1, k2, v = doubles(q[:, 0::2], q[:, 1::2], k[:, 0::2], k[:, 1::2], v)
    first, second = (naive.attention(*pair, v, **options)[2] for pair in ((q1, k1), (q2, k2)))
    return (first - weights * second) @ repeated(v, q1)


def latent(q, cache, w, u, **options):
    q, cache, w, u = doubles(q, cache, w, u)
    rank = w.shape[-1]
    compressed, shared = cache[:, None, :, :rank], np.repeat(cache[:, None, :, rank:], q.shape[1], 1)
    k = np.concatenate([np.einsum("hdr,bxjr->bhjd", w, compressed), shared], -1)
    return naive.attention(q, k, np.einsum("hdr,bxjr->bhjd", u, compressed), **options)[:2]


def linformer(q, k, v, e, f):
    keys, values = repeated(e @ k, q), repeated(f @ v, q)
    return softmax(q @ keys.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ values


def nystrom(q, k, v, n, iterations, scale):
    """Xiong et al. 2021, equations 13 and 14; segments begin at the multiples of length / n, rounded down."""

    def means(x):
        edges = np.arange(n + 1) * x.shape[-2] // n
        return np.stack([x[..., begin:end, :].mean(-2) for begin, end in pairwise(edges)], -2)

    q_mean, k_mean = means(q), means(k)
    first = softmax(scale * q @ k_mean.swapaxes(-1, -2))
    a = softmax(scale * q_mean @ k_mean.swapaxes(-1, -2))
    last = softmax(scale * q_mean @ k.swapaxes(-1, -2))
    z, one = a.swapaxes(-1, -2) / a.sum(-2).max(-1)[..., None, None], np.eye(n)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return first @ z @ last @ v


def reformer(q, v, rotations, chunk, causal, scale):
    """Kitaev et al. 2020 for one head, token by token. `times` counts how often a token meets each key."""
    n, chunks, rounds = len(q), -(-len(q) // chunk), len(rotations)
    k = rms(q)
    at = np.zeros((rounds, n), int)  # the chunk of each token, counted over all rounds
    for r, rotation in enumerate(rotations):
        buckets = np.argmax(np.concatenate([q @ rotation, -(q @ rotation)], axis=-1), axis=-1)
        at[r] = r * chunks + np.argsort(np.lexsort((np.arange(n), buckets))) // chunk
    out, lse = np.zeros((rounds, n, v.shape[-1])), np.zeros((rounds, n))
    for r, i in np.ndindex(rounds, n):
        near = {at[r, i], (at[r, i] - 1) % (rounds * chunks)}
        times = sum((at == c).sum(0) for c in near) * ((np.arange(n) <= i) | (not causal))
        s = scale * k @ q[i]
        s[i] -= 1e5
        most = s[times > 0].max()
        weights = times * np.exp(np.where(times > 0, s, most) - most)
        out[r, i], lse[r, i] = weights @ v / weights.sum(), most + np.log(weights.sum())
    return np.einsum("rid,ri->id", out, softmax(lse.T).T)


def layer_norm(x, parameters, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def feed_forward(x, parameters):
    hidden = np.maximum(x @ parameters["linear1.weight"].T + parameters["linear1.bias"], 0)
    return hidden @ parameters["linear2.weight"].T + parameters["linear2.bias"]


def projected_attention(x, y, heads, parameters, hidden):
    """x (batch, n, d) attends y (batch, m, d), but for the elements that `hidden` (batch, m) marks."""
    weights = np.split(parameters["self_attn.in_proj_weight"], 3)
    biases = np.split(parameters["self_attn.in_proj_bias"], 3)
    q, k, v = (
        (z @ weight.T + bias).reshape(*z.shape[:2], heads, -1).swapaxes(1, 2)
        for z, weight, bias in zip((x, y, y), weights, biases, strict=True)
    )
    mask = None if hidden is None else ~hidden[:, None, None]
    out = naive.attention(q, k, v, mask=mask)[0].swapaxes(1, 2).reshape(x.shape)
    return out @ parameters["self_attn.out_proj.weight"].T + parameters["self_attn.out_proj.bias"]


def set_attention(layer, x, y, hidden=None):
    """A multihead attention block of the Set Transformer, with the weights of an encoder layer."""
    parameters = {name: p.astype(float) for name, p in layer.state_dict().items()}
    x, y = np.broadcast_to(x, (len(y), *x.shape[-2:])).astype(float), y.astype(float)

    def attend(x):
        return projected_attention(x, y, layer.self_attn.num_heads, parameters, hidden)

    if layer.norm_first:
        h = x + attend(layer_norm(x, parameters, "norm1"))
        return h + feed_forward(layer_norm(h, parameters, "norm2"), parameters)
    h = layer_norm(x + attend(x), parameters, "norm1")
    return layer_norm(h + feed_forward(h, parameters), parameters, "norm2")


def _option(case):
    """A variant that is an argument of attention()."""
    return lambda x: naive.attention(x.q, x.k, x.v, **VARIANTS[case](x.shape, np.random.default_rng(1)))[0]


def _deberta(x):
    kr, qr = (x.draw(x.shape.heads_q, 512, x.shape.head_dim) / 8 for _ in range(2))
    bucket = logarithmic_buckets(behind(x.shape.len_q, x.shape.len_k), 256, 512)
    return deberta(x.q, x.k, x.v, kr, qr, bucket)[0]


def _selected(x):
    """Blocks of 16 keys: those of a query, and every fourth one before, as many as the bench lists."""
    blocks = np.arange(x.shape.len_q)[:, None] // 16 - 4 * np.arange(max(1, x.shape.len_k // 64))
    lists = np.maximum(blocks, 0)[None]
    return selected.selected_attention(x.q, x.k, x.v, lists, 16, causal=True)[0]


def _deformable(x):
    """Levels are the halves of the grid (10, 15)."""
    points = (*x.v.shape[:2], x.shape.len_q, 16)
    locations = x.draw(*points, 2) / 4 + 0.5
    return deformable.attention(x.v, [(5, 15), (5, 15)], locations, x.draw(*points) / 4)


# Each takes the `Inputs` of a call, in float64.
FORMULAS = {
    **{name: _option(case) for name, case in OPTIONS.items()},
    "deberta": _deberta,
    "gated": lambda x: naive.attention(x.q, x.k, x.v)[0] * sigmoid(x.draw(*x.q.shape[:-1], x.shape.dim_v)),
    "deformable": _deformable,
    "selected": _selected,
    "all_statistics": _option("plain"),
    "dropout": lambda x: naive.attention(x.q, x.k, x.v, dropout=0.1, seed=1)[0],
}  # fmt: skip
