"""An encoder layer without masks, cache or options of attention: one call for all its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._program import AttendStep, LinearStep, NormStep, Program
from fastattn.layers import calls

if TYPE_CHECKING:
    from fastattn._args import Array
    from fastattn._program import Step
    from fastattn.layers.transformer import TransformerEncoderLayer

# Buffers: the layer's input and output; sums before a norm, and what a norm makes of them; queries with keys
# and values, what attention makes of them, and the inner features, which are not needed at the same time.
_X, _OUT, _SUM, _NORMED, _QKV, _CONTEXT, _INNER = range(7)


class PlainEncoder(NamedTuple):
    """What a plain layer runs, and the fields of the layer that it was made of."""

    made_of: tuple[Any, ...]
    program: Program | None  # None: the layer is not plain
    widths: tuple[int, int, int]  # features of _QKV, _CONTEXT and _INNER

    def __call__(self, x: Array, batch: int) -> Array:
        """x is (batch * length, d_model)."""
        assert self.program is not None
        (n, width), (wide, context, inner) = x.shape, self.widths
        columns = 2 * width + max(wide + context, inner)
        memory = calls.scratch("layer", n, columns, x.dtype)
        flat, out = memory.reshape(-1), np.empty((n, width), x.dtype)
        buffers, begins = [x, out], (0, width, 2 * width, 2 * width + wide, 2 * width)
        for begin, features in zip(begins, (width, width, *self.widths), strict=True):
            buffers.append(flat[begin * n : (begin + features) * n].reshape(n, features))
        self.program.run(buffers, batch, None)
        calls.keep("layer", memory)
        return out


def plain_encoder(layer: TransformerEncoderLayer, before: PlainEncoder | None) -> PlainEncoder:
    """`before`, if it is still what `layer` is made of, or a new one."""
    heads, forward = layer.self_attn, layer.feed_forward
    maps, out = heads.all_maps, heads.out_proj
    norms = [
        (norm.weight_vector, getattr(norm, "bias_vector", None), norm.eps)
        for norm in (layer.norm1, layer.norm2)
    ]
    made_of: tuple[Any, ...] = (
        *(heads, maps, out.packed_weight, out.bias_vector, layer.norm_first),
        *(forward.weight1, forward.bias1, forward.weight2, forward.bias2),
        *(*norms[0], *norms[1]),
    )
    if before is not None and all(a is b for a, b in zip(made_of, before.made_of, strict=True)):
        return before
    if maps is None or not heads.is_plain():
        return PlainEncoder(made_of, None, (0, 0, 0))
    kind = layer.norm
    first = NormStep(_X if layer.norm_first else _SUM, _NORMED, kind, *norms[0])
    last = NormStep(_SUM, _NORMED if layer.norm_first else _OUT, kind, *norms[1])
    attend: list[Step] = [
        LinearStep(_NORMED if layer.norm_first else _X, _QKV, maps.weight, maps.bias),
        AttendStep(_QKV, _CONTEXT, heads.num_heads, heads._heads_kv, heads._head_dim),
        LinearStep(_CONTEXT, _SUM, out.packed_weight, out.bias_vector, residual=_X),
    ]
    residual, total = (_SUM, _OUT) if layer.norm_first else (_NORMED, _SUM)
    feed: list[Step] = [
        LinearStep(_NORMED, _INNER, forward.weight1, forward.bias1, forward._function),
        LinearStep(_INNER, total, forward.weight2, forward.bias2, residual=residual),
    ]
    steps = [first, *attend, last, *feed] if layer.norm_first else [*attend, first, *feed, last]
    widths = (maps.weight.out_features, heads._width, layer.dim_feedforward)
    return PlainEncoder(made_of, Program(tuple(steps)), widths)
