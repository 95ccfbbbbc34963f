"""Checks of a layer's inputs, and attention without them for arrays that a layer has checked or made.

In a small layer, checking each array again would take longer than the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.ops import data
from fastattn._args.types import FLOAT32, FLOAT64, plain_args
from fastattn._args.values import as_array, float_array
from fastattn._engine import settings

if TYPE_CHECKING:
    from fastattn._args.types import Array, AttentionArgs


def checked(func: str, name: str, x: Any, features: int, weights_dtype: str) -> Array:
    """`x` as an array (..., features), for kernels whose weights are stored as `weights_dtype`."""
    array = data(func, name, x)
    if array.shape[-1] != features:
        raise wrong_shape(func, name, array, f"(..., {features})")
    if (array.dtype == FLOAT64) != (weights_dtype == "float64"):
        expected = "float64" if weights_dtype == "float64" else "float32, float16 or bfloat16"
        raise wrong_dtype(func, name, array, f"{expected}, for weights in {weights_dtype}")
    return array


def require(func: str, name: str, x: Any, kind: Any, expected: str) -> None:
    """Raise unless `x`, the argument `name`, is of `kind`, a type or several; messages say `expected`."""
    if not isinstance(x, kind):
        raise wrong_type(func, name, x, expected)


def keys_values(func: str, given: Any, batch: int, heads_kv: int, head_dim: int, q: np.dtype[Any]) -> Any:
    """A caller's keys and values, checked: (batch, heads_kv, length, head_dim), for queries of dtype q."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise wrong_type(func, "keys_values", given, "a pair (k, v) of arrays")
    k, v = (float_array(func, f"keys_values[{i}]", x) for i, x in enumerate(given))
    shape = (batch, heads_kv, k.shape[2] if k.ndim == 4 else -1, head_dim)
    if not k.shape == v.shape == shape:
        expected = f"({batch}, {heads_kv}, length, {head_dim}) for both"
        raise ValueError(f"{func}(): keys_values have shapes {k.shape} and {v.shape}; expected {expected}")
    if k.dtype != v.dtype or (k.dtype != q and not (q == FLOAT32 and k.dtype.itemsize == 2)):
        raise TypeError(f"{func}(): keys_values have dtypes {k.dtype} and {v.dtype}; expected {q}, query's")
    return k, v


def batch_first(func: str, name: str, x: Array) -> Array:
    """`x` (batch, length, features), or (length, features) as a batch of one."""
    if x.ndim == 3:
        return x
    if x.ndim == 2:
        return x[None]
    raise wrong_shape(func, name, x, f"(batch, length, {x.shape[-1]})")


def one_batch(func: str, name: str, x: Any) -> Any:
    """`x`, an array of one sequence, as a batch of it; None stays None."""
    return None if x is None else as_array(func, name, x)[None]


def widened(x: Array, scale: Array | None, dtype: np.dtype[Any]) -> Array:
    """Keys or values of a cache in int8 as `dtype`; those without scales as they are."""
    return x if scale is None else (x * scale[..., None]).astype(dtype)


def attention_call(
    func: str, q: Array, k: Array, v: Array, out: Array, options: dict[str, Any], made_here: bool
) -> AttentionArgs:
    """The arguments of `fastattn.attention` into `out`, of the result's shape and dtype, with any strides.

    q, k and v have four axes. `made_here`: they are a layer's own projections, not a caller's arrays.
    """
    if options or not made_here or not k.dtype == v.dtype == q.dtype or v.shape[2] != k.shape[2]:
        args = attention_args(func, q, k, v, names=("query", "key", "value"), **options)
        if args.out.shape != out.shape:
            raise ValueError(f"{func}(): attention gives shape {args.out.shape}; expected {out.shape}")
        args.out = out
        return args
    # There is nothing to check, which saves a third of a small layer's Python.
    return plain_args(q, k, v, out, settings.get_num_threads())
