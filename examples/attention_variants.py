"""Variants of attention in a few lines over fastattn, to copy with these imports, or to import.

q, k and v are (..., heads, len, head_dim), all with as many heads, where nothing else is said;
docs/variants.md has formulas and papers. `options` go to the inner calls: scale, softcap, num_threads and
the like. Where these are made by `rows`, an array of a mask or ``return_lse=True`` does not fit.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn import attention, attention_weights, merge_states, ops
from fastattn import functional as F
from fastattn import masks as M
from fastattn.grad import vjp


def rebased_features(x, gamma, beta):
    """Squares and products of normalised x: ``(q . k)^2``, but for a factor that `normalize` takes out."""
    return F.feature_maps.taylor(ops.layer_norm(x, gamma, beta))[..., 1 + x.shape[-1] :]


def random_directions(head_dim, num_features, rng):
    """FAVOR+'s directions: orthogonal by blocks of head_dim, as long as independent normal vectors."""
    blocks = []
    for _ in range(-(-num_features // head_dim)):
        directions, signs = np.linalg.qr(rng.standard_normal((head_dim, head_dim)))
        blocks.append((directions * np.sign(np.diag(signs))).T)  # uniform over rotations
    lengths = np.linalg.norm(rng.standard_normal((num_features, head_dim)), axis=1, keepdims=True)
    return np.concatenate(blocks)[:num_features] * lengths


def favor(x, directions, axes):
    """Performer's positive random features, whose products estimate ``exp(q @ k / sqrt(head_dim))``.

    `axes` are -1 for queries, (-1, -2) for keys: a factor for each query, and one for all keys of a head,
    keep features at 1 or less, and cancel where results are normalised (with eps=0).
    """
    y = x * x.dtype.type(x.shape[-1] ** -0.25)
    exponents = y @ directions.T - np.square(y).sum(-1, keepdims=True) / 2
    return np.exp(exponents - exponents.max(axes, keepdims=True)).astype(x.dtype)


def slot_scores(q, k, write, log_decay):
    """Products of q with each slot's key: the state times q, as a gradient of q is the state times dout."""
    _, pullback = vjp(
        F.linear_attention, write, write, k, rule="gated", log_decay=log_decay, scale=1.0
    )  # of any queries
    return pullback(q, need=("dq",))[0]


def slot_scores_by_heads(q, k, write, log_decay):
    """Products as in `slot_scores`, but with gradients: each slot is a head, whose values are its writes."""

    def each_slot(x):  # (..., heads * slots, len)
        return x.swapaxes(-1, -2).reshape(*x.shape[:-3], -1, x.shape[-2])

    decay, values = each_slot(log_decay), each_slot(write)[..., None]
    out = F.linear_attention(q, k, values, rule="decay", log_decay=decay, scale=1.0)
    return out.reshape(*write.shape[:-2], write.shape[-1], write.shape[-2]).swapaxes(-1, -2)


def gated_slots(q, k, v, write, log_decay, scores=slot_scores):
    """Gated slot attention; `write` and `log_decay` are (..., heads, len, slots)."""
    p = ops.softmax(scores(q, k, write, log_decay))
    return F.linear_attention(p, write, v, rule="gated", log_decay=log_decay, scale=1.0)


def bounded_memory(q, k, v, control):
    """ABC: slots hold means of keys and of values by exp(control), (..., heads, len, slots)."""
    total = np.logaddexp.accumulate(control, axis=-2, dtype=np.float64)
    log_decay = np.full_like(control, -np.inf)
    log_decay[..., 1:, :] = np.minimum(total[..., :-1, :] - total[..., 1:, :], 0)
    write = np.exp(control - total).astype(control.dtype)
    return gated_slots(q, k, v, write, log_decay)


def rwkv4(k, v, w, u):
    """RWKV-4's mean of values, for k and v (..., len, channels); w >= 0 and u are (channels,).

    Each channel is a head. Its keys are divided by the largest weight so far, exp(top): none overflows.
    """
    fade = w * np.arange(k.shape[-2], dtype=np.float64)[:, None]
    top = np.maximum.accumulate(k + fade, axis=-2) - fade
    before = np.concatenate([np.full_like(top[..., :1, :], -np.inf), top[..., :-1, :]], axis=-2)
    key, log_decay = np.exp(k - top), np.minimum(before - w - top, 0)
    keys, values, decays = (x.swapaxes(-1, -2).astype(k.dtype)[..., None] for x in (key, v, log_decay))
    values = np.concatenate([values, np.ones_like(values)], axis=-1)
    ones, decays = np.ones_like(keys), decays[..., 0]
    sums = F.linear_attention(ones, keys, values, rule="decay", log_decay=decays, scale=1.0)
    past = np.zeros((*k.shape, 2), k.dtype)  # what stood before each token
    past[..., 1:, :, :] = sums.swapaxes(-2, -3)[..., :-1, :, :]
    most = np.maximum(before, u + k)
    old, own = np.exp(before - most), np.exp(u + k - most)
    return ((old * past[..., 0] + own * v) / (old * past[..., 1] + own)).astype(k.dtype)


def rwkv6(r, k, v, log_w, u):
    """RWKV-6: the state before a token, and the token itself with a bonus u (heads, head_dim).

    `log_w` is (..., heads, len, head_dim), and (heads, 1, head_dim) in RWKV-5.
    """
    out = (r * u[:, None] * k).sum(-1, keepdims=True) * v
    gates = log_w if log_w.shape[-2] == 1 else log_w[..., :-1, :]
    out[..., 1:, :] += F.linear_attention(
        r[..., 1:, :], k[..., :-1, :], v[..., :-1, :], rule="gated", log_decay=gates, scale=1.0
    )
    return out


def gated_delta_net2(q, k, v, log_decay, erase_gate, write_gate, **options):
    """Gated DeltaNet-2: gates of what is erased (..., len, head_dim) and written (..., len, head_dim_v)."""
    q, k = F.feature_maps.unit(q), F.feature_maps.unit(k)
    options |= {"rule": "kimi_delta", "log_decay": log_decay, "erase": erase_gate * k}
    return F.linear_attention(q, k, write_gate * v, **options)


def comba(q, k, v, log_decay, beta, erase_strength, correction, **options):
    """Comba, with numbers (..., heads, len); log_decay is at least -10.

    It erases from the state before the decay, the kernel after it: so keys are divided by the decay.
    """
    q, k = F.feature_maps.unit(q), F.feature_maps.unit(k)
    erase = k * (erase_strength * np.exp(-log_decay))[..., None]
    q, v = q - correction[..., None] * k, beta[..., None] * v
    return F.linear_attention(q, k, v, rule="gated_delta", log_decay=log_decay, erase=erase, **options)


def as_tokens(*steps):
    """The steps of each token, (..., len, dim), as tokens (..., len * steps, dim)."""
    x = np.stack(steps, axis=-2)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def last_steps(found, steps):
    """The rows of each token's last step; after them the state, if `found` has one."""
    if isinstance(found, tuple):
        return found[0][..., steps - 1 :: steps, :], *found[1:]
    return found[..., steps - 1 :: steps, :]


def delta_product(q, k, v, beta, log_decay, **options):
    """DeltaProduct: k, v (..., len, steps, dim), beta (..., len, steps), log_decay (..., len)."""
    steps = k.shape[-2]
    q, k = F.feature_maps.unit(q), F.feature_maps.unit(k)
    keys, values = (x.reshape(*x.shape[:-3], -1, x.shape[-1]) for x in (k, v))
    decays = np.zeros_like(beta)
    decays[..., 0] = log_decay
    of_steps = {n: x.reshape(*x.shape[:-2], -1) for n, x in (("beta", beta), ("log_decay", decays))}
    options |= {"rule": "gated_delta", **of_steps}
    return last_steps(F.linear_attention(as_tokens(*[q] * steps), keys, values, **options), steps)


def rwkv7(r, log_w, k, v, a, b, **options):
    """RWKV-7: r, log_w (at least -10), k, a and b (..., len, head_dim), v (..., len, head_dim_v).

    A token takes two steps of Kimi's delta rule: the first one erases by ``-a / w`` and
    writes by b, the second one erases nothing and writes v by k.
    """
    none, decays = np.zeros_like(a), as_tokens(log_w, np.zeros_like(log_w))
    keys, values = as_tokens(b, k), as_tokens(np.zeros_like(v), v)
    options |= {"rule": "kimi_delta", "log_decay": decays, "erase": as_tokens(-a * np.exp(-log_w), none)}
    return last_steps(F.linear_attention(as_tokens(r, r), keys, values, scale=1.0, **options), 2)


def hopfield(state, stored, beta, steps):
    """Modern Hopfield network: states (..., heads, n, d) move towards what is stored (..., heads, m, d)."""
    for _ in range(steps):
        state = attention(state, stored, stored, scale=beta)
    return state


def differential(q, k, v, lambda_, lambda_init=None, **options):
    """Differential attention: q and k (..., 2 heads, len, d) have the two softmaxes of each head in turn.

    `lambda_` is a number, or (..., heads, 1, 1). With `lambda_init`, results are normed and scaled by
    ``1 - lambda_init``; multiply them by the norm's weight, if it has one.
    """
    first, second = (attention(q[..., n::2, :, :], k[..., n::2, :, :], v, **options) for n in (0, 1))
    out = (first - lambda_ * second).astype(q.dtype)
    return out if lambda_init is None else ops.rms_norm(out, eps=1e-5) * q.dtype.type(1 - lambda_init)


def latent(q, cache, key_weight, value_weight, absorbed=False, **options):
    """Multi-head latent attention (MLA): q (..., heads, len, nope + rope), cache (..., len, rank + rope).

    A token of the cache has its latent vector, normalised, and its rotated key, which all heads share. The
    weights (heads, nope or value_dim, rank) are the rows of each head of ``kv_b_proj.weight``. `absorbed`:
    all heads attend the cache itself, which is less work for few queries.
    """
    nope, rank = key_weight.shape[-2:]
    lane = np.float64 if q.dtype == np.float64 else np.float32

    def mapped(x, weight):
        return (x.astype(lane) @ weight.astype(lane)).astype(q.dtype)

    shared, to_values = cache[..., None, :, :], value_weight.swapaxes(-1, -2)
    options = {"scale": q.shape[-1] ** -0.5, **options}
    if absorbed:
        queries = np.concatenate([mapped(q[..., :nope], key_weight), q[..., nope:]], axis=-1)
        return mapped(attention(queries, shared, shared[..., :rank], **options), to_values)
    latents, rotated = np.split(shared, [rank], axis=-1)
    keys = mapped(latents, key_weight.swapaxes(-1, -2))
    rotated = np.broadcast_to(rotated, (*keys.shape[:-1], rotated.shape[-1]))
    return attention(q, np.concatenate([keys, rotated], axis=-1), mapped(latents, to_values), **options)


def grouped_latent(q, caches, key_weights, value_weights, **options):
    """Grouped latent attention: a cache for each group of q (batch, groups, heads, len, d)."""
    parts = zip(q.swapaxes(0, 1), caches, key_weights, value_weights, strict=True)
    return np.concatenate([latent(*part, **options) for part in parts], axis=1)


def turned(x, most):
    """cosFormer's features of x (..., len, d): relu(x), turned by a right angle over `most` positions."""
    angle = np.pi / 2 / most * np.arange(x.shape[-2])[:, None]
    parts = [np.maximum(x, 0) * factor for factor in (np.cos(angle), np.sin(angle))]
    return np.concatenate(parts, axis=-1).astype(x.dtype)


def log_linear(q, k, v, log_decay, shares):
    """Log-linear attention with Mamba-2's decay, for arrays (batch, heads, len, ...).

    `shares` (batch, heads, len, levels) are of the token itself, then of runs of 1, 2, 4, ... tokens before.
    """
    length = q.shape[-2]
    levels = (length - 1).bit_length() + 1
    arrays = q, k, v, log_decay[..., None], shares
    more = [(0, 0), (0, 0), (0, 2 ** (levels - 1) - length), (0, 0)]
    q, k, v, log_decay, shares = (np.pad(x, more) for x in arrays)  # to a power of 2
    out = shares[..., :1] * (q * k).sum(-1, keepdims=True) * v * q.shape[-1] ** -0.5

    def halves(x):  # (batch, heads, runs, 2, half, ...): the first half of a run is the second one's past
        return x.reshape(*x.shape[:2], -1, 2, half, x.shape[-1])

    for level in range(1, levels):
        half = 2 ** (level - 1)
        (q1, k1, v1, decay1), (q2, k2, v2, decay2) = (
            [halves(x)[..., i, :, :] for x in (q, k, v, log_decay)] for i in (0, 1)
        )
        options = {"rule": "decay", "log_decay": decay1[..., 0]}
        _, state = F.linear_attention(q1, k1, v1, return_state=True, **options)
        options = {"rule": "decay", "log_decay": decay2[..., 0], "state": state}
        past = F.linear_attention(q2, np.zeros_like(k2), np.zeros_like(v2), **options)
        halves(out)[..., 1, :, :] += halves(shares)[..., 1, :, level, None] * past
    return out[..., :length, :]


def contextual_positions(q, k, v, table, rows=256):
    """CoPE, causal: the position of a key is the sum of gates from it to the query.

    `table` (positions, head_dim) has the embeddings of whole positions. The bias is made by rows.
    """
    out, length, most = [], q.shape[-2], len(table) - 1
    for first in range(0, length, rows):
        last = min(first + rows, length)
        queries, keys = q[..., first:last, :], k[..., :last, :]
        scores = queries @ keys.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        gates = np.tril(ops.activate(scores, "sigmoid"), first)
        sums = np.cumsum(gates[..., ::-1], axis=-1, dtype=np.float64)[..., ::-1]
        place = np.minimum(sums, most)
        whole, logits = place.astype(int), queries @ table.T
        below = np.take_along_axis(logits, whole, axis=-1)
        above = np.take_along_axis(logits, np.minimum(whole + 1, most), axis=-1)
        bias = (below + (place - whole) * (above - below)).astype(q.dtype)
        out.append(attention(queries, keys, v[..., :last, :], bias=bias, causal=True))
    return np.concatenate(out, axis=-2)


def selective(q, k, v, rows=256):
    """Selective attention, causal: what head 0 scores above 0 hides that key from all later queries."""
    out, length = [], q.shape[-2]
    hidden = np.zeros((*q.shape[:-3], 1, 1, length))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        queries, keys = q[..., first:last, :], k[..., :last, :]
        scores = queries[..., :1, :, :] @ keys[..., :1, :, :].swapaxes(-1, -2) * q.shape[-1] ** -0.5
        hides = np.tril(np.maximum(scores, 0), first - 1)  # no query hides its own key ...
        hides[..., 0] = 0  # ... or the first one
        sums = hidden[..., :last] + np.cumsum(hides, axis=-2, dtype=np.float64)
        hidden[..., :last] = sums[..., -1:, :]
        bias = (hides - sums).astype(q.dtype)
        out.append(attention(queries, keys, v[..., :last, :], bias=bias, causal=True))
    return np.concatenate(out, axis=-2)


def path(q, k, v, w, beta, **options):
    """PaTH: between a key and a query lie reflections ``I - beta w w^T``, with w (..., heads, len, head_dim).

    They take from a score the result of a delta rule, whose values are products with all keys.
    """
    products = np.tril(w @ k.swapaxes(-1, -2), -1)
    taken = F.linear_attention(q, w, products, rule="delta", beta=beta)
    return attention(q, k, v, bias=-taken, causal=True, **options)


def given_scores(logits, v, **options):
    """``softmax(logits) @ v``, as in Luong's location form and Synthesizers: the logits are a bias."""
    q, k = (np.zeros((*x.shape[:-1], 1), v.dtype) for x in (logits, v))
    return attention(q, k, v, bias=logits, **options)


def block_diffusion(size, length):
    """Bitmap of block diffusion's training: a noised copy of `length` tokens, then the clean ones.

    Noised blocks attend themselves and clean blocks before; clean ones are block-causal.
    """
    own, past = np.eye(length // size, dtype=bool), np.tri(length // size, k=-1, dtype=bool)
    return np.block([[own, past], [own & past, own | past]])


def dilated_window(q, k, v, window, dilation, **options):
    """Attention with `masks.dilated`, at the cost of its keys: plain windows over every n-th token."""
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    for first in range(min(dilation, q.shape[-2])):
        parts = (x[..., first::dilation, :] for x in (q, k, v))
        out[..., first::dilation, :] = attention(*parts, window=(window, window), **options)
    return out


def multi_token(q, k, v, kernel):
    """Multi-token attention's convolution of scores, causal; `kernel` is (heads, queries, keys)."""
    scores = np.tril(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5)
    c_q, c_k = kernel.shape[-2:]
    more = [(0, 0)] * (q.ndim - 2) + [(c_q - 1, 0), ((c_k - 1) // 2, c_k // 2)]
    near = np.lib.stride_tricks.sliding_window_view(np.pad(scores, more), (c_q, c_k), axis=(-2, -1))
    logits = np.einsum("...hijab,hab->...hij", near, kernel[:, ::-1, ::-1])
    return given_scores(logits, v, causal=True)


def laser(q, k, v, **options):
    """LASER: the logarithm of attention to exp(v), less each feature's largest value."""
    most = v.max(axis=-2, keepdims=True)
    return most + np.log(attention(q, k, np.exp(v - most), **options))


def inverted(q, k, v):
    """Attention whose softmax is over the queries: sums of values by it, and their means (slot attention)."""
    _, of_key = attention(k, q, q, return_lse=True)
    mean, of_query = attention(q, k, v, bias=-of_key[..., None, :], return_lse=True)
    return mean * np.exp(of_query)[..., None], mean


def sinkhorn(q, k, v, logits, iterations):
    """Sinkhorn attention: each block of queries attends its own block of keys, and a sorted one.

    `logits` (..., heads, blocks, blocks) are the sorting network's, of blocks of queries and of keys.
    """
    for axis in (-1, -2) * iterations:
        logits = logits - np.logaddexp.reduce(logits, axis=axis, keepdims=True)
    blocks = logits.shape[-1]
    of_blocks = [x.reshape(*x.shape[:-2], blocks, -1, x.shape[-1]) for x in (q, k, v)]
    keys, values = (
        np.concatenate([np.einsum("...rs,...snd->...rnd", np.exp(logits), x), x], axis=-2)
        for x in of_blocks[1:]
    )
    return attention(of_blocks[0], keys, values).reshape(*q.shape[:-1], v.shape[-1])


def routing(x, v, centroids):
    """Routing attention, causal: x (..., heads, len, d), both queries and keys, attends its own cluster.

    `centroids` is (heads, clusters, d).
    """
    cluster = np.argmax(x @ centroids.swapaxes(-1, -2), axis=-1)
    order = np.argsort(cluster, axis=-1, kind="stable")
    mask = M.causal() & M.documents(np.take_along_axis(cluster, order, axis=-1))
    x, v = (np.take_along_axis(y, order[..., None], axis=-2)[..., None, :, :] for y in (x, v))
    out = attention(x, x, v, mask=mask)[..., 0, :, :]  # heads are batch dimensions: each has its clusters
    return np.take_along_axis(out, np.argsort(order, axis=-1)[..., None], axis=-2)


def attend_blocks(q, k, v, queries, blocks, block_size, top_k):
    """Causal attention of each query head to its own block of keys and the best others, `top_k` in all.

    Scores are products of `queries`, (..., heads_q, len_q, any), and `blocks`, (..., heads_kv, blocks, any).
    """
    heads = k.shape[-3], q.shape[-3] // k.shape[-3], 1  # each query head is a batch item: it has its own list
    q, queries = (x.reshape(*x.shape[:-3], *heads, *x.shape[-2:]) for x in (q, queries))
    k, v, blocks = (x[..., None, None, :, :] for x in (k, v, blocks))
    how = {"block_size": block_size, "causal": True}
    selected = F.select_keys(queries, blocks, top_k, last=1, kv_lengths=k.shape[-2], **how)
    out = F.selected_attention(q, k, v, selected, **how)
    return out.reshape(*out.shape[:-5], -1, *out.shape[-2:])


def moba(q, k, v, block_size=512, top_k=3):
    """Mixture of block attention, by the means of blocks of keys."""
    first = np.arange(0, k.shape[-2], block_size)
    sizes = np.diff(first, append=k.shape[-2])[:, None]
    means = np.add.reduceat(k, first, axis=-2) / sizes.astype(k.dtype)
    return attend_blocks(q, k, v, q, means, block_size, top_k)


def quest(q, k, v, page_size=16, top_k=128):
    """Quest, by the largest score that a page may have: of its features' bounds, which a cache may keep."""
    low, high = (
        f.reduceat(k, np.arange(0, k.shape[-2], page_size), axis=-2) for f in (np.minimum, np.maximum)
    )
    queries = np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=-1)
    return attend_blocks(q, k, v, queries, np.concatenate([high, low], axis=-1), page_size, top_k)


def native_sparse(q, k, v, gates, size=32, stride=16, block_size=64, top_k=16, window=512):
    """Native sparse attention: means of `size` keys each, blocks by their probabilities, and a window.

    `gates` is (..., heads_q, len_q, 3). There are `size` keys at least. Models learn what means are here.
    """
    len_q, len_k, heads_kv = q.shape[-2], k.shape[-2], k.shape[-3]
    short_k, short_v = (
        np.lib.stride_tricks.sliding_window_view(x, size, axis=-2)[..., ::stride, :, :].mean(-1)
        for x in (k, v)
    )
    number = np.arange(short_k.shape[-2])
    ends = np.clip((np.arange(len_k - len_q, len_k) - size + 1) // stride + 1, 0, len(number))
    seen, lse = attention(q, short_k, short_v, row_ranges=(0, ends), return_lse=True)
    strides = (number[:, None] * stride + np.arange(0, size, stride)) // block_size
    covers = (strides[..., None] == np.arange(-(-len_k // block_size))).sum(1).astype(q.dtype)

    def score(rows, begin):  # of blocks: the probabilities of their strides, over the heads of a group
        of = slice(begin, begin + rows.shape[-2])
        keys = np.repeat(short_k, q.shape[-3] // heads_kv, axis=-3).swapaxes(-1, -2)
        p = np.exp(rows @ keys * q.shape[-1] ** -0.5 - lse[..., of, None])
        p = np.where(number < ends[of, None], p, 0)
        return p.reshape(*p.shape[:-3], heads_kv, -1, *p.shape[-2:]).sum(-3) @ covers

    how = {"block_size": block_size, "causal": True}
    of_blocks = k[..., ::block_size, :]  # as many rows as blocks: `score` counts, not they
    selected = F.select_keys(q, of_blocks, top_k, score=score, kv_lengths=len_k, first=1, last=2, **how)
    chosen = F.selected_attention(q, k, v, selected, **how)
    near = attention(q, k, v, causal=True, window=(window - 1, 0))
    return sum(gates[..., i, None] * x for i, x in enumerate((seen, chosen, near)))


def deepseek_sparse(q, cache, key_weight, value_weight, index_q, index_k, index_weights, top_k=2048):
    """DeepSeek sparse attention: latent attention, absorbed, to the keys that a lightning indexer selects."""
    how = {"weights": index_weights, "activation": "relu", "causal": True}
    selected = F.select_keys(index_q, index_k[..., None, :, :], top_k, **how)
    nope, rank = key_weight.shape[-2:]
    queries = np.concatenate([q[..., :nope] @ key_weight, q[..., nope:]], axis=-1)
    keys, scale = cache[..., None, :, :], q.shape[-1] ** -0.5
    latents = F.selected_attention(queries, keys, keys[..., :rank], selected, causal=True, scale=scale)
    return latents @ value_weight.swapaxes(-1, -2)


def hyper(q, k, v, rotations, block, sample):
    """HyperAttention: blocks of queries and keys in the order of hashes, and a sample of the other keys.

    `rotations` is (head_dim, bits), `sample` (samples,) places in that order, drawn from all.
    """

    def order_of(x):  # neighbouring hashes differ by one bit: bits count as a Gray code
        bits = np.cumsum(x @ rotations > 0, axis=-1) % 2
        return np.argsort(bits @ (2 ** np.arange(bits.shape[-1])[::-1]), axis=-1, kind="stable")

    def blocks(x):
        return x.reshape(*x.shape[:-2], -1, block, x.shape[-1])

    by_query, by_key = order_of(q)[..., None], order_of(k)[..., None]
    q = np.take_along_axis(q, by_query, axis=-2)
    k, v = (np.take_along_axis(x, by_key, axis=-2) for x in (k, v))
    near, of_near = attention(*(blocks(x) for x in (q, k, v)), return_lse=True)
    near, of_near = near.reshape(*q.shape[:-1], -1), of_near.reshape(q.shape[:-1])
    mask = np.arange(q.shape[-2])[:, None] // block != sample // block
    far, of_far = attention(q, k[..., sample, :], v[..., sample, :], mask=mask, return_lse=True)
    weight = of_far.dtype.type(np.log(k.shape[-2] / len(sample)))
    out, _ = merge_states((near, far), (of_near, of_far + weight))
    return np.take_along_axis(out, np.argsort(by_query, axis=-2), axis=-2)


def by_distance(x, len_k):
    """View (..., rows, len_k) of x (..., rows, rows + len_k - 1), whose columns are distances between tokens.

    The first column is that of the last query and the first key.
    """
    *lead, row, column = x.strides
    shape = (*x.shape[:-1], len_k)
    return as_strided(x[..., x.shape[-2] - 1 :], shape, (*lead, row - column, column))


def transformer_xl(q, k, v, relative, of_content, of_position, rows=128, **options):
    """Transformer-XL; `relative` (heads, len_q + len_k - 1, d) is of distances i - j, from the largest down.

    `of_content` and `of_position` (heads, d) are added to queries. The bias is made by rows.
    """
    out, len_q, len_k = [], q.shape[-2], k.shape[-2]
    for first in range(0, len_q, rows):
        queries = q[..., first : first + rows, :]
        last = first + queries.shape[-2]
        table = relative[:, len_q - last : len_q - first + len_k - 1].swapaxes(-1, -2)
        products = (queries + of_position[:, None]) * q.shape[-1] ** -0.5 @ table
        place = {"bias": by_distance(products, len_k), "q_offset": len_k - len_q + first}
        out.append(attention(queries + of_content[:, None], k, v, **place, **options))
    return np.concatenate(out, axis=-2)


def shaw(q, k, v, of_keys, of_values, rows=128, **options):
    """Attention to ``k_j + a_r`` of ``v_j + b_r``, r the distance j - i, clipped; made by rows.

    `of_keys` and `of_values` (2 clip + 1, d) are a and b.
    """
    out, len_q, len_k, clip = [], q.shape[-2], k.shape[-2], len(of_keys) // 2
    for first in range(0, len_q, rows):
        queries = q[..., first : first + rows, :]
        place = len_k - len_q + first  # of the first of these queries
        n = queries.shape[-2] + len_k - 1
        r = np.clip(np.arange(n) - (place + n - len_k), -clip, clip) + clip
        products = queries * q.shape[-1] ** -0.5 @ of_keys[r].T
        how = {"bias": by_distance(products, len_k), "q_offset": place}
        p = attention_weights(queries, k, **how, **options)
        products[...] = 0
        by_distance(products, len_k)[...] = p  # of each distance
        out.append(p @ v + products @ of_values[r])
    return np.concatenate(out, axis=-2)


def forgetting(q, k, v, log_forget, rows=512, **options):
    """Forgetting Transformer, causal; `log_forget` (..., heads, len) has logarithms of gates.

    The sum of gates between key and query is a difference of two sums, of which that of the query cancels.
    Sums are relative to one in the middle of some queries, for float32 to be enough.
    """
    out, length, before = [], k.shape[-2], k.shape[-2] - q.shape[-2]  # the last query is at the last key
    sums = np.cumsum(log_forget, axis=-1, dtype=np.float64)
    for first in range(before, length, rows):
        last = min(first + rows, length)
        bias = (sums[..., (first + last) // 2, None] - sums[..., :last]).astype(q.dtype)[..., None, :]
        parts = q[..., first - before : last - before, :], k[..., :last, :], v[..., :last, :]
        out.append(attention(*parts, bias=bias, causal=True, **options))
    return np.concatenate(out, axis=-2)


def memory(q, k, v, memory_k, memory_v, gate=None, **options):
    """Attention to the keys of the sequence, with `options`, and to all of a memory.

    It is one softmax over both, or with a `gate` (heads,) a mean of two.
    """
    near, of_near = attention(q, k, v, return_lse=True, **options)
    far, of_far = attention(q, memory_k, memory_v, return_lse=True)
    if gate is None:
        return merge_states((near, far), (of_near, of_far))[0]
    share = ops.activate(gate, "sigmoid")[:, None, None]
    return share * far + (1 - share) * near


def nystrom(q, k, v, landmarks, iterations=6):
    """Nyström's method on the probabilities; `landmarks`, a number, of means of as many segments."""

    def means(x):
        edges = np.arange(landmarks + 1) * x.shape[-2] // landmarks
        return np.add.reduceat(x, edges[:-1], axis=-2) / np.diff(edges)[:, None].astype(x.dtype)

    q_mean, k_mean = means(q), means(k)
    a, one = attention_weights(q_mean, k_mean), np.eye(landmarks, dtype=q.dtype)
    inverse = a.swapaxes(-1, -2) / a.sum(axis=-2).max(axis=-1)[..., None, None]
    for _ in range(iterations):
        ax = a @ inverse
        inverse = inverse @ (13 * one - ax @ (15 * one - ax @ (7 * one - ax))) / 4
    return attention(q, k_mean, inverse @ attention(q_mean, k, v))


def reformer(x, v, rotations, chunk, causal=False, **options):
    """Reformer: each token of x (..., heads, len, d), both query and key, attends tokens hashed near to it.

    `rotations` is (heads, rounds, d, buckets / 2); chunks divide the length, and there are at least two.
    """
    rotated = x[..., None, :, :] @ rotations
    order = np.argmax(np.concatenate([rotated, -rotated], axis=-1), axis=-1).argsort(axis=-1, kind="stable")

    def chunks(y):  # (..., heads, chunks of all rounds, chunk, d)
        y = np.take_along_axis(y, order[..., None], axis=-2)
        return y.reshape(*y.shape[:-3], -1, chunk, y.shape[-1])

    def with_previous(y):
        return np.concatenate([np.roll(y, 1, axis=-3), y], axis=-2)

    q, k, v = (chunks(y[..., None, :, :]) for y in (x, ops.rms_norm(x, eps=1e-6), v))
    i = order.reshape(*q.shape[:-1], 1)
    j = with_previous(i).swapaxes(-1, -2)
    bias = np.where(i == j, -1e4, 0)  # itself only where there is nothing else; finite in float16
    if causal:
        bias = np.where(j > i, -np.inf, bias)
    kv = with_previous(k), with_previous(v)
    out, lse = attention(q, *kv, bias=bias.astype(x.dtype), return_lse=True, **options)
    back = order.argsort(axis=-1)
    rounds = np.take_along_axis(out.reshape(*order.shape, -1), back[..., None], axis=-2)
    lses = np.take_along_axis(lse.reshape(order.shape), back, axis=-1)
    return np.einsum("...rnd,...nr->...nd", rounds, ops.softmax(lses.swapaxes(-1, -2))).astype(x.dtype)


def set_block(layer, x, y, **masks):
    """MAB of the Set Transformer: x (batch, n, d_model) attends y (batch, m, d_model), in a `layer`.

    ISAB: set_block(second, x, set_block(first, points, x)); PMA: set_block(layer, seeds, x).
    """
    if layer.norm_first:
        h = x + layer.self_attn(layer.norm1(x), y, y, **masks)[0]
        return h + layer.feed_forward(layer.norm2(h))
    h = layer.norm1(x + layer.self_attn(x, y, y, **masks)[0])
    return layer.norm2(h + layer.feed_forward(h))
