"""Recipes for `attention` and for functions with its arguments."""

import numpy as np
from judge import Like
from recipes import RECIPES, Call, native, recipe
from scores import Scores, bias, dense_mask, options

import fastattn
from fastattn import functional
from fastattn._args.types import INT4_BLOCK, lane_dtype, shape_of
from fastattn._engine.rounding import in_blocks


def rows_of(a, q="q", k="k", v="v"):
    """Shape of the result without its last axis, from the arguments; and q's and v's dimensions."""
    q, k, v = (np.asarray(a[name]) for name in (q, k, v))
    if q.ndim == k.ndim == v.ndim == 2:
        return q.shape[:1]
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    return (*batch, q.shape[-3] if q.ndim > 2 else 1, q.shape[-2])


def attended(a, dim=None):
    """Describe the results of attention for the arguments `a`."""
    rows, dtype = rows_of(a), native(a["q"])
    found = [Like((*rows, shape_of(np.asarray(a["v"]))[-1] if dim is None else dim), dtype)]
    lane, heads = lane_dtype(dtype), rows[:-1]
    len_k = np.asarray(a["v"]).shape[-2]
    if a.get("return_lse"):
        found.append(Like(rows, lane, finite=False))
    for name in a.get("stats") or ():
        if name.startswith("top_k"):
            found += [Like((*rows, int(name[6:])), lane), Like((*rows, int(name[6:])), np.int64)]
        else:
            shapes = {"key_sums": (*heads, len_k), "mean_weights": (*heads[:-1], rows[-1], len_k)}
            found.append(Like(shapes.get(name, rows), lane, finite=name != "row_max"))
    return found


def dropped(d):
    """Sometimes the arguments of dropout."""
    shares = 0.0, 1e-9, 0.1, 0.5, 0.99
    return {"dropout": d.choose(*shares), "seed": int(d.rng.integers(2**63))} if d.chance(0.2) else {}


@recipe
def attention(d):
    s = Scores.draw(d)
    stats = d.chance(0.3)
    more = {**(options(d, s) if stats else options(d, s, "stats")), **dropped(d)}
    compare = not any(name.startswith("top_k") for name in more.get("stats", ()))
    return Call(fastattn.attention, {**s.qkv(d), **more}, attended, tolerance=1.0 if compare else np.inf)


RECIPES += [attention] * 5


@recipe
def int8_attention(d):
    """Draw a call with int8 keys and values, whose scales may broadcast."""
    s = Scores.draw(d)
    arguments = {"q": s.q(d)}
    for name, x in zip("kv", s.kv(d), strict=True):
        arguments[name] = d.laid_out(d.rng.integers(-128, 128, x.shape).astype(np.int8))
        shape = x.shape[:-1] if d.chance(0.7) else d.broadcast(*x.shape[:-1])
        scale = d.rng.standard_normal(shape) * 0.01
        scale = scale.astype(d.choose(lane_dtype(s.dtype), lane_dtype(s.dtype), np.float64))
        arguments[f"{name}_scale"] = d.laid_out(scale)
    function = d.choose(fastattn.attention, fastattn.attention, functional.sigmoid_attention)
    left_out = ("stats",) if function is fastattn.attention else ("sinks", "return_lse", "stats")
    return Call(function, {**arguments, **options(d, s, *left_out)}, attended)


@recipe
def int4_attention(d):
    """Draw a call with int4 keys and values, for few rows of which queries are rounded, too."""
    dims = (INT4_BLOCK * int(n) for n in d.rng.integers(1, 6, 2))
    s = Scores.draw(d)._replace(**dict(zip(("head_dim", "head_dim_v"), dims, strict=True)))
    arguments = {"q": s.q(d)}
    for name, x in zip("kv", map(np.asarray, s.kv(d)), strict=True):
        rows = in_blocks(x.reshape(1, 1, -1, x.shape[-1]))
        arguments[name] = d.laid_out(rows.reshape(*x.shape[:-1], rows.shape[-1]))
    function = d.choose(fastattn.attention, fastattn.attention, functional.sigmoid_attention)
    left_out = ("stats",) if function is fastattn.attention else ("sinks", "return_lse", "stats")
    tolerance = {"float32": 50.0, "float16": 4.0}.get(s.dtype.name, 1.0)
    return Call(function, {**arguments, **options(d, s, *left_out)}, attended, tolerance=tolerance)


def of_pages(a):
    """Describe the results of attention to pages for the arguments `a`."""
    q, dim = np.asarray(a["q"]), np.asarray(a["v"]).shape[-1]
    rows = q.shape[:-1] if q.ndim > 2 else (1, *q.shape[:-1])
    found = [Like((*rows, dim), native(q))]
    return [*found, Like(rows, lane_dtype(native(q)), finite=False)] if a.get("return_lse") else found


@recipe
def paged_attention(d):
    """Draw a call with keys in pages, some of which may not exist."""
    page, n, count = d.choose(1, 16, 64, d.size()), d.choose(0, 1, 2, 5), d.size(1, 9)
    s = Scores.draw(d)
    s = s._replace(one_head=False, len_k=page * n)
    k, v = (d.floats(count, s.heads_kv, page, dim, dtype=s.dtype) for dim in (s.head_dim, s.head_dim_v))
    table = d.rng.integers(0 if d.chance(0.8) else -1, count, (*s.batch, n))
    arguments = {"q": s.q(d), "k": k, "v": v, "block_table": table, **options(d, s, "stats"), **dropped(d)}
    return Call(fastattn.attention, arguments, of_pages)


@recipe
def explain(d):
    s = Scores.draw(d)
    return Call(fastattn.explain, {**s.qkv(d), **options(d, s), **dropped(d)}, tolerance=np.inf)


@recipe
def attention_weights(d):
    s = Scores.draw(d)
    more = {**options(d, s, "out", "return_lse", "num_threads", "backend", "stats"), **dropped(d)}
    return Call(fastattn.attention_weights, {"q": s.q(d), "k": s.kv(d)[0], **more}, lambda a: [
        Like((*rows_of(a, v="k"), np.shape(a["k"])[-2]), native(a["q"]))])  # fmt: skip


@recipe
def merge_states(d):
    s, n = Scores.draw(d), d.size(1, 3)
    outs = [d.floats(*s.out) for _ in range(n)]
    lses = [d.floats(*s.out[:-1], dtype=lane_dtype(s.dtype)) for _ in range(n)]
    return Call(fastattn.merge_states, {"outs": outs, "lses": lses})


@recipe
def flex_attention(d):
    s = Scores.draw(d)
    more = options(d, s, only=("mask", "scale", "q_offset", "return_lse"))
    if d.chance(0.6):
        more["score_mod"] = d.choose(
            lambda x, b, h, i, j: x - 0.1 * abs(i - j),
            lambda x, b, h, i, j: x * (1 + h),
            lambda x, b, h, i, j: x,
        )
    return Call(functional.flex_attention, {**s.qkv(d), **more}, attended)


@recipe
def scaled_dot_product_attention(d):
    s = Scores.draw(d, grouped=d.chance(0.2))
    k, v = s.kv(d)
    arguments = {"query": s.q(d), "key": k, "value": v, **options(d, s, only=("scale",))}
    arguments |= d.some(0.4, attn_mask=lambda: d.choose(dense_mask, bias)(d, s))
    arguments |= d.some(0.3, is_causal=lambda: True, enable_gqa=lambda: True, dropout_p=lambda: 0.0)
    return Call(fastattn.scaled_dot_product_attention, arguments)


@recipe
def sigmoid_attention(d):
    s = Scores.draw(d)
    more = {**options(d, s, "sinks", "return_lse", "stats"), **d.some(0.5, sigmoid_bias=lambda: -1.5)}
    return Call(functional.sigmoid_attention, {**s.qkv(d), **more}, attended)


@recipe
def sparse(d):
    s = Scores.draw(d)
    more = options(d, s, "sinks", "row_ranges", "return_lse", "stats")
    function = d.choose(
        functional.sparsemax_attention,
        functional.entmax15_attention,
        functional.top_k_attention,
    )
    top = function is functional.top_k_attention
    arguments = {**s.qkv(d), **({"top_k": d.size()} if top else {}), **more}
    return Call(function, arguments, attended, tolerance=np.inf if top else 1.0)


@recipe
def talking_heads_attention(d):
    s = Scores.draw(d, grouped=False)
    more = options(d, s, "sinks", "row_ranges", "return_lse", "stats")
    pairs = {"pre": lambda: d.floats(s.heads_q, s.heads_q), "post": lambda: d.floats(s.heads_q, s.heads_q)}
    return Call(functional.talking_heads_attention, {**s.qkv(d), **d.some(0.6, **pairs), **more})


@recipe
def additive_attention(d):
    s = Scores.draw(d)
    more = options(d, s, "sinks", "row_ranges", "return_lse", "stats")
    w = d.floats(*d.choose((s.head_dim,), (s.heads_q, s.head_dim)))
    return Call(functional.additive_attention, {**s.qkv(d), "weight": w, **more}, attended)
