"""What a score_mod of flex_attention does to a score, read from its calls of torch: nothing is guessed.

A function that runs under `_Reader` gets a score without a value. Each sum, product or condition that the
score goes through is noted, until the result is ``factor * score + bias``, or ``factor * tanh(ratio * score)
+ bias``. The reader also sees whether positions matter by their distance alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Names of functions of torch, of methods and operators, without underscores.
_SUMS = {"add": 1, "sub": -1, "subtract": -1, "rsub": -1}
_PRODUCTS = {"mul": operator.mul, "multiply": operator.mul}
_PRODUCTS |= dict.fromkeys(("div", "divide", "true_divide", "truediv"), operator.truediv)
_NEGATIVE = ("neg", "negative")
_CASTS = ("to", "float", "double", "type_as", "int", "long", "clone", "contiguous")
_COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne", "greater_equal", "less_equal", "greater", "less")
_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor")


@dataclass(frozen=True)
class _Form:
    """``factor * score + bias``, with a ratio ``factor * tanh(ratio * score) + bias``; no bias is 0."""

    factor: Any = 1.0
    bias: Any = None
    ratio: Any = None

    def plus(self, x: Any) -> _Form:
        return replace(self, bias=x if self.bias is None else self.bias + x)

    def times(self, x: Any, by: Callable[..., Any] = operator.mul) -> _Form:
        return replace(self, factor=by(self.factor, x), bias=None if self.bias is None else by(self.bias, x))


class _Reader(TorchFunctionMode):  # type: ignore[misc]
    """Follow one score, and the positions of its query and its key, through calls of torch."""

    def __init__(self, score: Any, q_idx: Any, kv_idx: Any):
        super().__init__()
        self.forms = {id(score): _Form()}
        # By how much a tensor grows when both positions grow by 1. Differences of equal ones do not.
        self.moves = {id(q_idx): 1, id(kv_idx): 1}
        self.by_distance = True
        self.kept = [score, q_idx, kv_idx]  # so that nothing else gets their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = getattr(func, "__name__", str(func))
        name = called.strip("_")
        given = tree_leaves((args, kwargs))
        moving = any(self.moves.get(id(x)) for x in given)
        if not any(id(x) in self.forms for x in given):
            result = _indexed(*args) if name == "getitem" else func(*args, **kwargs)
            if moving:
                self._follow_position(name, args, kwargs, result)
            return result
        self.by_distance &= not moving
        if name == "get" or name in _LIKE or (called in _CASTS and id(args[0]) not in self.forms):
            result = func(*args, **kwargs)
            if name != "get" or not isinstance(result, torch.Tensor):  # its dtype, its device
                return result
        if called in _CASTS:
            found = self.forms[id(args[0])] if func(*args, **kwargs).is_floating_point() else None
        else:
            found = None if kwargs else self._computed(func, name, args)
        if found is None:
            what = f"calls {called} on a score"
            if name in ("rdiv", "rtruediv", "reciprocal"):
                what = "divides by a score"
            elif kwargs:
                what += f", with {'=, '.join(kwargs)}="
            raise NotImplementedError(
                f"(): score_mod {what}; expected sums, products and quotients with other"
                " tensors, tanh of a score before anything is added to it, where and masked_fill"
            )
        in_place = called.endswith("_") and not called.startswith("__")
        result = args[0] if in_place else self.kept[0].clone()
        self.forms[id(result)] = found
        self.kept.append(result)
        return result

    def _follow_position(self, name: str, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        moves = [self.moves.get(id(x), 0) for x in args]
        moved = None
        if name in _CASTS and result.dtype.itemsize >= 4:  # others round large positions
            moved = moves[0]
        elif name in _NEGATIVE:
            moved = -moves[0]
        elif len(moves) == 2 and not kwargs:
            if name in _COMPARISONS and moves[0] == moves[1]:
                moved = 0
            elif name in _SUMS:
                x, y = moves[::-1] if name == "rsub" else moves
                moved = x + _SUMS[name] * y
        if moved is None:
            self.by_distance = False
        else:
            self.moves[id(result)] = moved
            self.kept.append(result)

    def _computed(self, func: Any, name: str, args: Any) -> _Form | None:
        """The form of a result, or None where it is of no such form."""
        if name in ("where", "masked_fill") and len(args) == 3:
            if name == "masked_fill":
                args = args[1], args[2], args[0]
            elif func is torch.Tensor.where:
                args = args[1], args[0], args[2]
            return self._chosen(*args)
        if name == "rsub":
            args = args[::-1]
        forms = [self.forms.get(id(x)) for x in args]
        x, y = forms[0], forms[-1]
        if len(forms) == 1 and x:
            if name == "tanh" and x.bias is None and x.ratio is None:
                return _Form(ratio=x.factor)
            return x.times(-1.0) if name in _NEGATIVE else None
        if len(forms) != 2:
            return None
        sign, by = _SUMS.get(name), _PRODUCTS.get(name)
        if sign and x and y:
            total = replace(x, factor=x.factor + sign * y.factor)
            total = total if y.bias is None else total.plus(sign * y.bias)
            return total if x.ratio is y.ratio else None
        if sign and x:
            return x.plus(sign * args[1])
        if sign and y:
            return y.times(sign).plus(args[0])
        if by and x and not y:
            return x.times(args[1], by)
        return y.times(args[0]) if by is operator.mul and y and not x else None

    def _chosen(self, condition: Any, one: Any, other: Any) -> _Form | None:
        """The form of ``where(condition, one, other)``."""
        x, y = self.forms.get(id(one)), self.forms.get(id(other))
        if x is None:
            return None if y is None else self._chosen(~condition, other, one)
        if y is None:  # -inf is -inf, whatever the factor
            hides = isinstance(other, float) and other == -math.inf
            wide = torch.as_tensor(other, dtype=torch.float32)
            y = replace(
                x, factor=x.factor if hides else torch.where(wide.isneginf(), x.factor, 0.0), bias=other
            )
        if x.ratio is not y.ratio:
            return None
        same = isinstance(x.factor, float) and isinstance(y.factor, float) and x.factor == y.factor
        factor = x.factor if same else torch.where(condition, x.factor, y.factor)
        if x.bias is None and y.bias is None:
            return replace(x, factor=factor)
        biases = (0.0 if each.bias is None else each.bias for each in (x, y))
        return replace(x, factor=factor, bias=torch.where(condition, *biases))


def _indexed(x: Any, index: Any) -> Any:
    """``x[index]`` under torch.vmap, where create_mask's own has a gradient for few kinds of indices."""
    places = list(index) if isinstance(index, tuple) else [index]
    if all(isinstance(place, torch.Tensor) for place in places):
        return torch.ops.aten.index.Tensor(x, places)
    return x[index]


@dataclass(frozen=True)
class ScoreMod(_Form):
    """A form of tensors that broadcast to (batch, heads_q, len_q, len_k).

    `diagonals` is a bias of distances, (batch, heads_q, len_q + len_k - 1), number j - i + len_q - 1 of query
    i and key j.
    """

    diagonals: Any = None


def read(score_mod: Callable[..., Any], shape: tuple[int, ...], lane: torch.dtype) -> ScoreMod:
    """What `score_mod` does to scores of this shape, in the dtype `lane`; differentiable."""
    score = torch.tensor(torch.nan, dtype=lane)
    seen: dict[str, bool] = {}
    *lead, len_q, len_k = shape

    def called(b: Any, h: Any, i: Any, j: Any) -> Any:
        if seen.get("by_distance"):
            j = j - (len_q - 1)
        reader = _Reader(score, i, j)
        with reader:
            result = score_mod(score, b, h, i, j)
        form = reader.forms.get(id(result))
        if form is None:
            raise NotImplementedError(
                "(): score_mod returns what does not depend on its score; expected a score"
            )
        seen.update(
            by_distance=reader.by_distance, added=form.bias is not None, capped=form.ratio is not None
        )
        parts = (0.0 if x is None else x for x in (form.factor, form.bias, form.ratio))
        return tuple(
            x.to(lane) if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=lane) for x in parts
        )

    create_mask(called, 1, 1, 1, 1, "cpu")  # one score shows what it depends on
    rows, keys = (1, len_q + len_k - 1) if seen["by_distance"] else (len_q, len_k)
    factor, bias, ratio = create_mask(called, *lead, rows, keys, "cpu")
    # What does not depend on an axis has no stride along it: how results leave torch.vmap.
    factor, bias, ratio = (
        x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
        for x in (factor, bias, ratio)
    )
    if bias.isnan().any():
        raise ValueError("(): what score_mod adds to scores is NaN; expected numbers")
    found = ScoreMod(_narrowed(factor), ratio=_narrowed(ratio) if seen["capped"] else None)
    if not seen["added"]:
        return found
    if seen["by_distance"] and bias.shape[-1] > 1:
        return replace(found, diagonals=bias[:, :, 0])
    return replace(found, bias=bias)


def _narrowed(x: Any) -> Any:
    """`x` with axes of length 1 where all numbers along an axis are equal.

    Not where it needs a gradient: equal numbers may come from different ones of a parameter.
    """
    if x.requires_grad:
        return x
    for axis in range(x.ndim):
        first = x.narrow(axis, 0, 1)
        if (x.detach() == first.detach()).all():
            x = first
    return x
