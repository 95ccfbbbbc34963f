"""The layers of decoders that normalise before each of their two halves, as one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastattn._engine.program import OUT, AttendStep, HeadNormStep, LinearStep, NormStep, Program, X

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Activation, Array
    from fastattn._engine.program import Step

    Norm = tuple[Array, Array | None]  # weight, bias
    Linear = tuple[PackedLinear, Array | None]
    Window = tuple[int, int] | None

# Buffers behind X, the tokens' vectors, and OUT, to which every half of a layer adds: what a norm makes of
# it, queries with keys and values, what attention makes of them, and the inner features of the feed-forward.
_NORMED, _QKV, _CONTEXT, _INNER = range(2, 6)


class Common(NamedTuple):
    """What all layers share."""

    hidden_size: int
    heads: int
    heads_kv: int
    head_dim: int
    norm: str  # "layer_norm" or "rms_norm"
    eps: float
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's weights."""

    attention_norm: Norm
    qkv: Linear
    qk_norm: Array | None  # (heads + heads_kv, head_dim): of an RMS norm of each head of q and k
    window: Window
    scale: float
    attended: Linear  # behind attention
    inner_norm: Norm
    inner: Linear  # a gated pair in Llama
    outer: Linear


def layers_program(common: Common, layers: Sequence[Layer]) -> tuple[Program, tuple[Window, ...]]:
    """From token vectors (n, hidden_size) to hidden states, and the windows that its steps know by number."""
    hidden, heads, heads_kv, head_dim, kind, eps, activation = common
    windows = tuple(dict.fromkeys(layer.window for layer in layers))
    steps: list[Step] = []
    x = X
    for i, layer in enumerate(layers):
        steps.append(NormStep(x, _NORMED, kind, *layer.attention_norm, eps))
        steps.append(LinearStep(_NORMED, _QKV, *layer.qkv))
        if layer.qk_norm is not None:
            steps.append(HeadNormStep(_QKV, layer.qk_norm, eps))
        ranges = windows.index(layer.window)
        steps += [
            AttendStep(_QKV, _CONTEXT, heads, heads_kv, head_dim, layer.scale, i, ranges),
            LinearStep(_CONTEXT, OUT, *layer.attended, residual=x),
            NormStep(OUT, _NORMED, kind, *layer.inner_norm, eps),
            LinearStep(_NORMED, _INNER, *layer.inner, activation),
            LinearStep(_INNER, OUT, *layer.outer, residual=OUT),
        ]
        x = OUT
    inner = max((layer.inner[0].out_features for layer in layers), default=0)
    context, qkv = heads * head_dim, (heads + 2 * heads_kv) * head_dim
    end = max(hidden, context)  # normed features lie where the context does, inner ones where q, k and v do
    places = ((0, hidden), (end, qkv), (0, context), (end, inner))
    return Program("model", tuple(steps), places, hidden), windows


def logits_program(common: Common, norm: Norm, output: PackedLinear) -> Program:
    """From hidden states (n, hidden_size) to logits (n, vocab_size)."""
    hidden = common.hidden_size
    steps = (NormStep(X, _NORMED, common.norm, *norm, common.eps), LinearStep(_NORMED, OUT, output, None))
    return Program("model", steps, ((0, hidden),), output.out_features)
