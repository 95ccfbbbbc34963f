"""Second moments of what a decoder's linear maps are multiplied by, over some texts.

A map's error in its result is the error of its weight times its input. Its mean square is a quadratic form of
the weight's error, whose matrix is that of the inputs' second moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._engine.plain import Plain
from fastattn._engine.steps import OUT, X
from fastattn.models._parameters import required

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array
    from fastattn.models._decoder import Decoder

_TOKENS = 512  # of a sequence that is computed at once


class _Watch(Plain):
    """Plain operations, which add up the moments of each product's input."""

    def __init__(self) -> None:
        self.moments: dict[int, Array] = {}  # by the id of the weight

    def linear(self, x: Any, weight: PackedLinear, *how: Any, **options: Any) -> Any:
        """`ops.linear`."""
        rows = x.astype(np.float32, copy=False)
        there = self.moments.setdefault(id(weight), np.zeros((weight.in_features,) * 2, np.float32))
        there += rows.T @ rows
        return super().linear(x, weight, *how, **options)


def moments(model: Decoder, texts: Iterable[str]) -> dict[str, Array]:
    """Sums of x x^T over all tokens, (in_features, in_features), by the names of the maps' tensors."""
    tape, longest = _Watch(), min(_TOKENS, model.max_length or _TOKENS)
    for ids in model.text.encode(texts):
        for begin in range(0, len(ids), longest):
            tokens = np.array(ids[begin : begin + longest])
            x, call, _ = model._inputs(tokens, np.array([len(tokens)]), len(tokens))
            for program in (model.program, model.logits):
                values = {X: x}
                for step in program.steps:
                    out = np.empty((len(tokens), step.columns), x.dtype)
                    values[step.out] = step.run(tape, values, call, out)
                x = values[OUT] if program.steps else x
    if not tape.moments:
        raise ValueError("(): calibrate has no text with a token; expected some ten thousand tokens")
    found: dict[str, Array] = {}
    for parameter, parts, _ in required(model.origin).parameters:
        if id(parameter) in tape.moments:
            found |= {part.name: tape.moments[id(parameter)] for part in parts}
    return found
