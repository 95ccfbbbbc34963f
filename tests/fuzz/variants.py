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
