"""Recipes for variants of attention that take no layers."""

from attention import attended
from recipes import Call, recipe
from scores import Scores, options

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
