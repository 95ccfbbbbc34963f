"""Recipes for variants of attention that take no layers."""

import numpy as np
from attention import attended
from recipes import Call, recipe
from scores import Scores, options, per_head

from fastattn import functional


def with_scores(d, s, function, *without, **more):
    """A call with q, k and v, `more` arguments, and those of attention's options that the function takes."""
    return Call(function, {**s.qkv(d), **more, **options(d, s, "stats", *without)}, attended)


@recipe
def gated_attention(d):
    s = Scores.draw(d)
    gate = d.floats(*s.out[:-1], d.choose(1, s.head_dim_v))
    return with_scores(d, s, functional.gated_attention, gate=gate)


@recipe
def forgetting_attention(d):
    s = Scores.draw(d)
    log_forget = -abs(np.asarray(d.floats(*s.batch, s.heads_q, s.len_k)))
    return with_scores(d, s, functional.forgetting_attention, "causal", "sinks", log_forget=log_forget)


@recipe
def cosine_attention(d):
    s = Scores.draw(d)
    return with_scores(d, s, functional.cosine_attention, "scale", scale=d.choose(2.0, per_head(d, s)))


@recipe
def qk_norm_attention(d):
    s = Scores.draw(d)
    weights = d.some(0.7, q_weight=lambda: d.floats(s.head_dim), k_weight=lambda: d.floats(s.head_dim))
    norm = d.some(0.3, norm=lambda: "layer_norm", eps=lambda: 1e-3)
    return with_scores(d, s, functional.qk_norm_attention, **weights, **norm)


@recipe
def memory_attention(d):
    s = Scores.draw(d)
    heads = () if s.one_head else (s.heads_kv,)
    k, v = (d.floats(*heads, 3, dim) for dim in (s.head_dim, s.head_dim_v))
    gate = d.some(0.3, gate=lambda: per_head(d, s))
    return with_scores(d, s, functional.memory_attention, memory_k=k, memory_v=v, **gate)


@recipe
def shaw_attention(d):
    s = Scores.draw(d)
    values = d.some(0.6, value_table=lambda: d.floats(5, s.head_dim_v))
    keys = d.floats(5, s.head_dim)
    return with_scores(d, s, functional.shaw_attention, "softcap", "alibi_slopes", key_table=keys, **values)


@recipe
def transformer_xl_attention(d):
    s = Scores.draw(d)
    keys = d.floats(max(0, s.len_q + s.len_k - 1), s.head_dim)
    biases = d.some(
        0.5,
        content_bias=lambda: d.floats(s.heads_q, s.head_dim),
        position_bias=lambda: d.floats(s.heads_q, s.head_dim),
    )
    return with_scores(d, s, functional.transformer_xl_attention, "softcap", relative_keys=keys, **biases)


@recipe
def disentangled_attention(d):
    s = Scores.draw(d)
    keys, queries = (d.floats(s.heads_q, 6, s.head_dim) for _ in range(2))
    more = d.some(0.5, position_queries=lambda: queries, max_distance=lambda: 20)
    return with_scores(d, s, functional.disentangled_attention, "softcap", position_keys=keys, **more)


@recipe
def differential_attention(d):
    s = Scores.draw(d)._replace(one_head=False)
    q, k, v = s.qkv(d).values()
    q, k = (np.concatenate([np.asarray(x)] * 2, axis=-3) for x in (q, k))
    more = d.some(0.4, lambda_init=lambda: 0.5, eps=lambda: 1e-4)
    more |= options(d, s, "out", "return_lse", "stats", "sinks", "alibi_slopes")
    arguments = {"q": q, "k": k, "v": v, "lambda_": per_head(d, s), **more}
    return Call(functional.differential_attention, arguments)


@recipe
def latent_attention(d):
    s = Scores.draw(d, grouped=False)._replace(one_head=False)
    nope, rope_dim, rank = d.size(), 2 * d.size(0, 3), d.size()
    arguments = {
        "q": s.q(d, nope + rope_dim),
        "cache": d.floats(*s.batch, s.len_k, rank + rope_dim),
        "key_weight": d.floats(s.heads_q, nope, rank),
        "value_weight": d.floats(s.heads_q, s.head_dim_v, rank),
        **d.some(0.5, absorbed=lambda: d.choose(True, False)),
        **options(d, s, "out", "stats"),
    }
    return Call(functional.latent_attention, arguments)
