"""An encoder layer without masks, cache or options of attention: one call for all its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastattn._engine.program import OUT, AttendStep, LinearStep, NormStep, Program, X
from fastattn.layers._state import last_change

if TYPE_CHECKING:
    from fastattn._engine.program import Step
    from fastattn.layers._transformer import TransformerEncoderLayer

# Buffers behind the layer's input and output: sums before a norm, what a norm makes of them, queries with
# keys and values, what attention makes of them, and the inner features.
_SUM, _NORMED, _QKV, _CONTEXT, _INNER = range(2, 7)


class PlainEncoder(NamedTuple):
    """What a plain layer runs."""

    made_at: object  # the last change to any layer by then
    program: Program | None  # None: the layer is not plain


def plain_encoder(layer: TransformerEncoderLayer, before: PlainEncoder | None) -> PlainEncoder:
    """`before`, or a new one if some layer has changed since."""
    change = last_change()
    if before is not None and before.made_at is change:
        return before
    heads, forward = layer.self_attn, layer.feed_forward
    maps, out = heads.all_maps, heads.out_proj
    if maps is None or not heads.is_plain():
        return PlainEncoder(change, None)
    norms = [
        (norm._kind, norm.weight_vector, getattr(norm, "bias_vector", None), norm.eps)
        for norm in (layer.norm1, layer.norm2)
    ]
    first = NormStep(X if layer.norm_first else _SUM, _NORMED, *norms[0])
    last = NormStep(_SUM, _NORMED if layer.norm_first else OUT, *norms[1])
    attend: list[Step] = [
        LinearStep(_NORMED if layer.norm_first else X, _QKV, maps.weight, maps.bias),
        AttendStep(_QKV, _CONTEXT, heads.num_heads, heads._heads_kv, heads._head_dim, heads._head_dim**-0.5),
        LinearStep(_CONTEXT, _SUM, out.packed_weight, out.bias_vector, residual=X),
    ]
    residual, total = (_SUM, OUT) if layer.norm_first else (_NORMED, _SUM)
    feed: list[Step] = [
        LinearStep(_NORMED, _INNER, forward.weight1, forward.bias1, forward._function),
        LinearStep(_INNER, total, forward.weight2, forward.bias2, residual=residual),
    ]
    steps = [first, *attend, last, *feed] if layer.norm_first else [*attend, first, *feed, last]
    width, wide, context = layer.d_model, maps.weight.out_features, heads._width
    at = 2 * width  # inner features lie where queries, keys, values and context did
    places = ((0, width), (width, width), (at, wide), (at + wide, context), (at, forward.dim_feedforward))
    return PlainEncoder(change, Program("layer", tuple(steps), places, width))
