"""dtypes that callers name: a string, a NumPy type or a dtype, all alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from fastattn._args.errors import needed
from fastattn._args.types import INT4
from fastattn._args.values import is_float, one_of, short


def float_dtype(dtype: Any, of_cache: bool = False) -> np.dtype[Any]:
    """`dtype` as one of the four floating types, in native byte order; `of_cache` also int8 or INT4."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        # It registers the name with NumPy.
        needed("ml_dtypes", "(): dtype 'bfloat16' needs the ml_dtypes package", "pip install ml_dtypes")
    found = _dtype(dtype)
    if of_cache and (found == INT4 or "int4" in (dtype if isinstance(dtype, str) else "", str(found))):
        return INT4
    if found is None or not (is_float(found) or (of_cache and found == np.int8)):
        expected = f"float32, float64, float16{', bfloat16, int8 or int4' if of_cache else ' or bfloat16'}"
        raise TypeError(f"(): dtype is {short(dtype)}; expected {expected}")
    return found.newbyteorder("=")


def dtype_choice(name: str, dtype: Any, options: Collection[str], where: str = "") -> str:
    """The name of `dtype`, one of `options`: some of these NumPy does not know, such as "int4".

    The message ends with `where`.
    """
    if isinstance(dtype, str) and dtype in options:
        return dtype
    found = _dtype(dtype)
    if found is None or found.name not in options:
        raise ValueError(f"(): {name} is {short(dtype)}; expected {one_of(options)}{where}")
    return found.name


def _dtype(x: Any) -> np.dtype[Any] | None:
    if x is None:  # NumPy takes it for float64
        return None
    try:
        found: np.dtype[Any] = np.dtype(x)
    except (TypeError, ValueError, SyntaxError):
        return None
    return found
