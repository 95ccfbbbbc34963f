"""What the functions share: kinds of arrays, shapes with the heads inside, flash-attn's options."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np

from fastattn._args.attention import raise_shapes
from fastattn._args.errors import wrong_dtype, wrong_type
from fastattn._args.types import Array, Shape
from fastattn._args.values import as_array, integer, short


def is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of torch, which need not be installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def same_kind(first: Any, /, **others: Any) -> tuple[Any, ...]:
    """`others` that are not None, as tensors if `first` is one, else as arrays."""
    if not is_tensor(first):
        found = others.items()
        return tuple(x if x is None or type(x) is np.ndarray else as_array(name, x) for name, x in found)
    for name, x in others.items():
        if x is not None and not is_tensor(x):
            raise wrong_type(name, x, "a tensor, as the others are")
    return tuple(others.values())


def integer_array(name: str, x: Any) -> Array:
    """`x` as an array of integers, of any type."""
    array = x if type(x) is np.ndarray else as_array(name, x)
    if array.dtype.kind not in "iu":
        raise wrong_dtype(name, array, "integers")
    return array


def require_shapes(names: tuple[str, str, str], q: Shape, k: Shape, v: Shape) -> None:
    """Raise unless q, k and v with these shapes are (batch, length, heads, head_dim), and fit."""
    if not len(q) == len(k) == len(v) == 4:
        name, shape = next((n, x) for n, x in zip(names, (q, k, v), strict=True) if len(x) != 4)
        raise_shape(name, shape, "(batch, length, heads, head_dim)")
    heads_kv = k[2]
    fits = k == v or k[:3] == v[:3]
    if k[0] != v[0]:
        raise_shape(names[2], v, f"{k[0]} in the first axis, as {names[1]} has")
    if not (fits and k[3] == q[3] and q[2] and heads_kv and q[3] and v[3]) or q[2] % heads_kv:
        raise_shapes(names, (q, k, v), heads_axis=-2)


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
    return None if isinstance(softcap, (int, float, np.number)) and not softcap else softcap
