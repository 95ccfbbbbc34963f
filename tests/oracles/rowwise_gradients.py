"""Gradients of attention with other normalisers and scores, dense, by their formulas, in any dtype."""

import numpy as np
import rowwise_oracle as oracle
from gradients import diagonals, of_kv_heads, summed


def weights_of(kind, s, top_k, n_keys):
    """Return p of finite scores (n,), and w with which ds = w (dp - sum(w dp) / sum(w))."""
    if kind == "sparsemax":
        p = oracle.sparsemax(s)
        return p, (p > 0).astype(s.dtype)
    if kind == "entmax15":
        p = oracle.entmax15(s)
        return p, np.sqrt(p)
    if kind == "sigmoid":
        p = 1 / (1 + np.exp(-s + np.log(s.dtype.type(n_keys))))
        return p, p * (1 - p)
    p = oracle.top_k(top_k)(s) if kind == "top_k" else oracle.softmax(s)
    return p, p


def mix(x, matrix):
    """(..., heads, n, m): head h gives matrix[h, g] of itself to head g."""
    return x if matrix is None else np.einsum("...hij,hg->...gij", x, matrix)


def pairs(q, k, weight):
    """tanh(q_i + k_j), (..., heads, len_q, len_k, head_dim), and its products with the weight."""
    tangents = np.tanh(q[..., :, None, :] + k[..., None, :, :])
    return tangents, np.einsum("...hijd,hd->...hij", tangents, weight)


@np.errstate(all="ignore")
def gradients(kind, dout, q, k, v, dtype, *, top_k=7, weight=None, pre=None, post=None, **arguments):
    """All gradients by name, and the same sums of absolute values."""
    work, group, shapes = np.dtype(dtype).type, q.shape[-3] // k.shape[-3], {}
    weight, pre, post = (None if x is None else x.astype(dtype) for x in (weight, pre, post))
    scale = work(arguments.get("scale", 1.0 if kind == "additive" else q.shape[-1] ** -0.5))
    arguments["scale"] = float(scale)
    attend = oracle.scores(q, k, dtype, **arguments)[1]
    some = attend.any(-3, keepdims=True) if post is not None else attend
    q, dout = (np.where(some.any(-1)[..., None], x.astype(dtype), work(0)) for x in (q, dout))
    keys, values = (np.repeat(x.astype(dtype), group, -3) for x in (k, v))
    keys = np.where(some.any(-2)[..., None], keys, work(0))
    plain = keys.swapaxes(-1, -2)
    tangents = None
    if kind == "additive":
        tangents, products = pairs(q, keys, weight)
    else:
        products = q @ plain
    mixed = mix(products, pre)
    s, _ = oracle.scores(q, k, dtype, lambda *_: mixed, **arguments)
    probs, w = np.zeros_like(s), np.zeros_like(s)
    for row in np.ndindex(s.shape[:-1]):
        if attend[row].any():
            probs[row][attend[row]], w[row][attend[row]] = weights_of(
                kind, s[row][attend[row]], top_k, k.shape[-2]
            )
    dweights = dout @ values.swapaxes(-1, -2)
    used = w != 0 if kind in ("sparsemax", "entmax15", "top_k") else np.broadcast_to(some, w.shape)
    dweights = np.where(used, dweights, work(0))
    dprobs = mix(dweights, None if post is None else post.T)
    total = np.where(w.sum(-1, keepdims=True) == 0, 1, w.sum(-1, keepdims=True))
    delta = (w * dprobs).sum(-1, keepdims=True) / total if kind != "sigmoid" else np.zeros_like(total)
    cap = arguments.get("softcap")
    u = mixed * (scale / work(cap)) if cap else np.zeros_like(s)
    arrays = {
        "q": q, "dout": dout, "keys": keys, "products": products, "dweights": dweights, "probs": probs,
        "pre": pre, "post": post, "weight": weight, "tangents": tangents, "slopes": 1 - np.tanh(u) ** 2,
        "of_softcap": np.tanh(u) - u * (1 - np.tanh(u) ** 2), "far": -distances(q, k, arguments),
        "scale": scale,
    }  # fmt: skip
    sizes = {name: None if x is None else abs(x) for name, x in arrays.items()}
    sizes["of_softcap"] = abs(np.tanh(u)) + abs(u * (1 - np.tanh(u) ** 2))
    sizes["slopes"] = arrays["slopes"]
    shapes = {name: np.shape(arguments[name]) for name in ("bias", "alibi_slopes") if name in arguments}
    heads_kv = k.shape[-3]
    return (
        contracted(w * (dprobs - delta), heads_kv, shapes, **arrays),
        contracted(w * (abs(dprobs) + abs(delta)), heads_kv, shapes, **sizes),
    )


def distances(q, k, arguments):
    """abs(i - j), (..., 1, len_q, len_k)."""
    length = np.asarray(k.shape[-2] if arguments.get("kv_lengths") is None else arguments["kv_lengths"])
    given = arguments.get("q_offset")
    offset = length - q.shape[-2] if given is None else np.asarray(given)
    far = offset[..., None, None, None] + np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
    return abs(far).astype(q.dtype)


def contracted(ds, heads_kv, shapes, **x):
    """All gradients; each is linear in every array."""
    inner = ds * x["slopes"]
    pre, post = x["pre"], x["post"]
    found = {"dsoftcap": (ds * x["of_softcap"]).sum()}
    mixed = mix(inner, None if pre is None else pre.T)
    if x["tangents"] is not None:
        slopes = np.einsum("...hij,...hijd->...hijd", inner, 1 - x["tangents"] ** 2)
        found["dq"] = x["scale"] * x["weight"][:, None] * slopes.sum(-2)
        found["dk"] = of_kv_heads(x["scale"] * x["weight"][:, None] * slopes.sum(-3), heads_kv)
        terms = np.einsum("...hij,...hijd->...hd", inner, x["tangents"])
        found["dweight"] = x["scale"] * summed(x["weight"].shape, terms)
    else:
        found["dq"] = x["scale"] * (mixed @ x["keys"])
        found["dk"] = x["scale"] * of_kv_heads(mixed.swapaxes(-1, -2) @ x["q"], heads_kv)
        found["dscale"] = (mixed * x["products"]).sum()
    weights = mix(x["probs"], post)
    found["dv"] = of_kv_heads(weights.swapaxes(-1, -2) @ x["dout"], heads_kv)
    if pre is not None:
        each = np.einsum("...hij,...gij->...hg", x["products"], inner)
        found["dpre"] = x["scale"] * summed(pre.shape, each)
    if post is not None:
        found["dpost"] = summed(post.shape, np.einsum("...gij,...fij->...gf", x["probs"], x["dweights"]))
    if "bias" in shapes:
        found["dbias"] = summed(shapes["bias"], ds)
        found["dbias_diagonals"] = diagonals(shapes["bias"], ds)
    if "alibi_slopes" in shapes:
        found["dalibi_slopes"] = summed(shapes["alibi_slopes"], (ds * x["far"]).sum((-1, -2)))
    return found
