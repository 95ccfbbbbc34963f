"""Recipes for linear attention and its feature maps."""

import numpy as np
from judge import Like
from recipes import RECIPES, Call, native, recipe, same
from scores import Scores

from fastattn import functional
from fastattn._args.types import lane_dtype
from fastattn.functional import feature_maps


def tokens(d):
    """q, k and v of equal lengths, and what else rules take: decays and the strength of writing."""
    s = Scores.draw(d, equal=True)._replace(one_head=False)
    shape = (*s.batch, s.heads_q, s.len_k)
    arrays = {
        "q": d.floats(*shape, s.head_dim),
        "k": d.floats(*shape, s.head_dim),
        "v": d.floats(*shape, s.head_dim_v),
    }
    gates = {
        "scalar": -abs(np.asarray(d.floats(*shape))),
        "vector": -abs(np.asarray(d.floats(*shape, s.head_dim))),
        "beta": d.laid_out(d.rng.random(shape).astype(d.dtype)),
    }
    return s, arrays, gates


@recipe
def linear_attention(d):
    s, arguments, gates = tokens(d)
    rule = d.choose("linear", "decay", "gated", "delta", "gated_delta", "kimi_delta")
    plain = "delta" not in rule
    if rule in ("decay", "gated_delta"):
        arguments["log_decay"] = gates["scalar"]
    if rule in ("gated", "kimi_delta"):
        arguments["log_decay"] = gates["vector"]
    if not plain:
        arguments |= d.some(0.7, beta=lambda: gates["beta"])
        arguments |= d.some(0.4, erase=lambda: d.floats(*np.shape(arguments["k"])))
    lane, state = lane_dtype(d.dtype), (*s.batch, s.heads_q, s.head_dim, s.head_dim_v)
    more = d.some(
        0.15, scale=lambda: 0.3, normalize=lambda: plain, return_state=lambda: True, eps=lambda: 1e-3,
        num_threads=lambda: 2, causal=lambda: rule != "linear",
        out=lambda: np.empty(arguments["v"].shape, d.dtype),
        state=lambda: d.floats(*state, dtype=lane), out_state=lambda: np.empty(state, lane),
    )  # fmt: skip
    if more.get("normalize"):
        more = {name: x for name, x in more.items() if "_state" not in name and name != "state"}
    # A sum to normalise by may be near 0. Without keys of length 1 a delta rule grows exponentially.
    tolerance = 1.0 if plain and "normalize" not in more else np.inf
    arguments = {**arguments, "rule": rule, **more}
    return Call(functional.linear_attention, arguments, lambda a: attended(a, plain), (), tolerance)


RECIPES += [linear_attention] * 2


def attended(a, finite):
    """The result that the arguments `a` should give, of finite numbers if `finite`."""
    q, k, v = (np.asarray(a[name]) for name in ("q", "k", "v"))
    states = max(k.shape[-3], v.shape[-3])
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    lane = lane_dtype(native(q))
    found = [Like((*batch, max(states, q.shape[-3]), q.shape[-2], v.shape[-1]), native(q), finite)]
    if a.get("return_state") or a.get("out_state") is not None:
        found.append(Like((*batch, states, q.shape[-1], v.shape[-1]), lane, finite))
        if a.get("normalize"):
            found.append(Like((*batch, states, q.shape[-1]), lane, finite))
    return found


@recipe
def feature_map(d):
    x = d.floats(*d.batch(), d.length(), d.size())
    return d.choose(
        Call(feature_maps.elu, {"x": x}, same("x")),
        Call(feature_maps.unit, {"x": x, **d.some(0.3, eps=lambda: 1e-3)}, same("x")),
        Call(feature_maps.taylor, {"x": x}),
    )
