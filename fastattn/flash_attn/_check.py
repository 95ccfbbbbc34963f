"""What the functions share: kinds of arrays, shapes with the heads inside, flash-attn's options."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

from fastattn._args.attention import raise_shapes
from fastattn._args.errors import wrong_shape, wrong_type
from fastattn._args.types import FLOAT32
from fastattn._args.values import as_array, float_array, integer, is_int4, number, short


def is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of torch, which need not be installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def of_tensors() -> Any:
    """The module of functions for tensors: imported with torch, or with the first tensor.

    torch's compiler follows no import: it has to find the module loaded.
    """
    name = "fastattn.flash_attn._torch"
    return sys.modules.get(name) or import_module(name)


def same_kind(first: Any, /, **others: Any) -> tuple[Any, ...]:
    """`others` that are not None, as tensors if `first` is one, else as arrays."""
    if not is_tensor(first):
        found = others.items()
        return tuple(x if x is None or type(x) is np.ndarray else as_array(name, x) for name, x in found)
    for name, x in others.items():
        if x is not None and not is_tensor(x):
            raise wrong_type(name, x, "a tensor, as the others are")
        if x is not None and x.is_cpu != first.is_cpu:
            expected = f"{first.device.type}, as the first one is"
            raise ValueError(f"(): {name} is on {x.device.type}; expected {expected}")
    return tuple(others.values())


def require_shapes(names: tuple[str, str, str], *arrays: Any) -> None:
    """Raise unless the arrays q, k and v are (batch, length, heads, head_dim), and fit."""
    q, k, v = arrays[0].shape, arrays[1].shape, arrays[2].shape
    if not len(q) == len(k) == len(v) == 4:
        name, x = next((n, x) for n, x in zip(names, arrays, strict=True) if x.ndim != 4)
        raise wrong_shape(name, x, "(batch, length, heads, head_dim)")
    heads_kv = k[2]
    fits = k == v or k[:3] == v[:3]
    if k[0] != v[0]:
        raise wrong_shape(names[2], arrays[2], f"{k[0]} in the first axis, as {names[1]} has")
    if not (fits and k[3] == q[3] and q[2] and heads_kv and q[3] and v[3]) or q[2] % heads_kv:
        for name, x in zip(names, arrays, strict=True):
            if is_int4(x):  # whose bytes are not a head_dim
                float_array(name, x)
        raise_shapes(names, (tuple(q), tuple(k), tuple(v)), heads_axis=-2)


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


def scale_of(softmax_scale: Any) -> float | None:
    """The option `scale` of `fastattn.attention`."""
    return None if softmax_scale is None else number("softmax_scale", softmax_scale, FLOAT32)


def softcap_of(softcap: Any) -> Any:
    """The option `softcap` of `fastattn.attention`, where 0 is none."""
    return None if isinstance(softcap, (int, float, np.number)) and not softcap else softcap
