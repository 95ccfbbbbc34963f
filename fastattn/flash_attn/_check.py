"""What the functions here share: their options, and shapes with the heads inside."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np

from fastattn._args.attention import raise_shapes
from fastattn._args.errors import wrong_type
from fastattn._args.types import Shape
from fastattn._args.values import as_array, integer, short


def is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of torch, which need not be installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def same_kind(first: Any, /, **others: Any) -> tuple[Any, ...]:
    """`others` that are not None, as arrays, or as tensors where the `first` argument is one, q."""
    if is_tensor(first):
        for name, x in others.items():
            if x is not None and not is_tensor(x):
                raise wrong_type(name, x, "a tensor, as q is")
        return tuple(others.values())
    found = others.items()
    return tuple(x if x is None or type(x) is np.ndarray else as_array(name, x) for name, x in found)


def require_shapes(names: tuple[str, str, str], q: Shape, k: Shape, v: Shape) -> None:
    """Raise unless q, k and v with these shapes are (batch, length, heads, head_dim), and fit."""
    if len(q) == len(k) == len(v) == 4:
        (_, _, heads_q, head_dim), (_, len_k, heads_kv, head_dim_k), (_, len_v, heads_v, head_dim_v) = q, k, v
        fits = (head_dim_k, len_v, heads_v) == (head_dim, len_k, heads_kv)
        if fits and heads_q and heads_kv and head_dim and head_dim_v and not heads_q % heads_kv:
            return
        raise_shapes(names, (q, k, v), heads_axis=-2)
    for name, shape in zip(names, (q, k, v), strict=True):
        if len(shape) != 4:
            raise_shape(name, shape, "(batch, length, heads, head_dim)")


def raise_shape(name: str, shape: Shape, expected: object) -> NoReturn:
    """Say that the argument `name` has another shape than expected."""
    raise ValueError(f"(): {name} has shape {tuple(shape)}; expected {expected}")


def window_of(window_size: Any) -> tuple[int, int] | None:
    """The argument `window_size`; None for no bounds."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        expected = "a pair (left, right) of integers, -1 for no bound"
        raise TypeError(f"(): window_size is {short(window_size)}; expected {expected}")
    left, right = window_size
    if type(left) is not int or type(right) is not int or left < -1 or right < -1:
        left, right = (integer(f"window_size[{i}]", n, -1) for i, n in enumerate(window_size))
    return None if left == right == -1 else (left, right)


def sides(window: tuple[int, int] | None) -> tuple[int | None, int | None] | None:
    """The option `window` of `fastattn.attention`."""
    return window and (None if window[0] == -1 else window[0], None if window[1] == -1 else window[1])


def softcap_of(softcap: Any) -> Any:
    """The option `softcap` of `fastattn.attention`, where 0 is none."""
    return None if isinstance(softcap, (int, float)) and not softcap else softcap
