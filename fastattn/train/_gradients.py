"""Gradients by the names of their parameters: checks, their norm, sums of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastattn._args.errors import wrong_shape, wrong_type
from fastattn._args.types import Array
from fastattn._args.updates import Update, UpdateArgs
from fastattn._args.values import float_array
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads


def mapping(name: str, x: Any) -> Mapping[str, Any]:
    """`x`, a mapping of names."""
    if not isinstance(x, Mapping):
        raise wrong_type(name, x, "a mapping of names to arrays")
    return x


def gradients(grads: Any, params: Mapping[str, Array]) -> dict[str, Array]:
    """Check `grads`: one for each of `params`, in its shape and dtype, as the kernels read them.

    Names of no parameter in `params` are left to the caller.
    """
    given = mapping("grads", grads)
    missing = [name for name in params if name not in given]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        expected = "one for every parameter that is not frozen"
        raise ValueError(f"(): grads lacks {missing[0]}{more}; expected {expected}")
    return {name: _gradient(name, given[name], param) for name, param in params.items()}


def require_known(grads: Any, params: Mapping[str, Array]) -> None:
    """Raise if `grads` has a name of no parameter."""
    unknown = mapping("grads", grads).keys() - params.keys()
    if unknown:
        raise ValueError(f"(): grads has {sorted(unknown, key=str)[0]!r}, which is the name of no parameter")


def _gradient(name: str, x: Any, param: Array) -> Array:
    array = float_array(f"the gradient of {name}", x)
    if array.shape != param.shape:
        raise wrong_shape(f"the gradient of {name}", array, f"the parameter's, {param.shape}")
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes infinite, which is seen
        return np.require(array, param.dtype, ("C", "ALIGNED"))


def norm_of(arrays: Iterable[Array], num_threads: int) -> float:
    """The square root of the sum of all squares; NaN or infinity if an element is that.

    Its bits depend on the arrays and the instruction set alone.
    """
    total = 0.0
    by_dtype: dict[Any, list[Array]] = {}
    for array in arrays:
        by_dtype.setdefault(array.dtype, []).append(array)
    for each in by_dtype.values():
        args = UpdateArgs("squares", [Update(array) for array in each], num_threads)
        dispatch.run(args)
        # An exact sum, rounded once; fsum refuses what is not finite.
        total += math.fsum(args.sums.tolist()) if np.isfinite(args.sums).all() else math.nan
    if math.isfinite(total):
        return math.sqrt(total)
    every = [array for each in by_dtype.values() for array in each]
    largest = max(
        (float(np.abs(array).max(initial=0)) for array in every), default=0.0
    )  # NaN where one is NaN
    if not all(np.isfinite(array).all() for array in every):
        return largest if math.isinf(largest) and not any(np.isnan(a).any() for a in every) else math.nan
    # Finite, but their squares are not.
    return largest * math.sqrt(sum(float(np.square(np.divide(a, largest, dtype=float)).sum()) for a in every))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Factor that clips gradients of this norm; 1 if it is not finite."""
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


class Sum:
    """Gradients of several batches, added in memory that is kept."""

    def __init__(self) -> None:
        self.total: dict[str, Array] = {}

    def add(self, grads: Any, params: Mapping[str, Array], first: bool) -> None:
        """Add `grads`, or begin with them."""
        arrays = gradients(grads, params)
        if first:
            for name, array in arrays.items():
                if name not in self.total:
                    self.total[name] = np.empty_like(array)
                self.total[name][...] = array
            return
        # x - (-1) y: gradient descent with the rate -1.
        by_dtype: dict[Any, list[Update]] = {}
        for name, array in arrays.items():
            by_dtype.setdefault(array.dtype, []).append(Update(array, self.total[name]))
        for updates in by_dtype.values():
            dispatch.run(UpdateArgs("sgd", updates, get_num_threads(), lr=-1.0))
