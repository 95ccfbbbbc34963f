"""Gradients by the names of their parameters: checks, their norm, sums of several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import named, wrong_shape, wrong_type
from fastattn._args.types import FLOAT32
from fastattn._args.updates import Update, UpdateArgs
from fastattn._args.values import float_array, number
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads, require_backend, threads
from fastattn.train._checks import require_apart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastattn._args.types import Array


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


def norm_of(arrays: Iterable[Array], num_threads: int, backend: str | None = None) -> float:
    """The square root of the sum of all squares; NaN or infinity if an element is that.

    Its bits depend on the arrays and the instruction set alone.
    """
    total = 0.0
    by_dtype: dict[Any, list[Array]] = {}
    for array in arrays:
        by_dtype.setdefault(array.dtype, []).append(array)
    for each in by_dtype.values():
        args = UpdateArgs("squares", [Update(array) for array in each], num_threads)
        dispatch.run(args, backend)
        total += sum_of(args.sums)
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


def sum_of(numbers: Array) -> float:
    """Exact sum of numbers, rounded once; fsum refuses what is not finite."""
    return math.fsum(numbers.tolist()) if np.isfinite(numbers).all() else math.nan


@named("grad_norm")
def grad_norm(
    grads: Mapping[str, Array], *, num_threads: int | None = None, backend: str | None = None
) -> float:
    """The norm of all gradients together: the square root of the sum of the squares of all elements.

    Parameters
    ----------
    grads : mapping of str to array_like
        Of any floating type.
    num_threads : int, optional
    backend : {"compiled", "numpy"}, optional

    Returns
    -------
    float
        NaN if an element is NaN, infinity if one is infinite. Its bits do not depend on `num_threads`.
    """
    if backend is not None:
        require_backend(backend)
    return norm_of(_lanes(grads).values(), threads(num_threads), backend)


@named("clip_grad_norm")
def clip_grad_norm(grads: Mapping[str, Array], max_norm: float) -> float:
    """Scale all gradients in place so that their common norm is at most `max_norm`; returns what it was.

    Optimizers do the same as part of a step: ``optimizer.step(grads, max_norm=1.0)``, without a pass over
    memory.

    Parameters
    ----------
    grads : mapping of str to ndarray
        Writable arrays, which share no memory. Those whose norm is not finite stay as they are.
    max_norm : float
        The factor is ``max_norm / (norm + 1e-6)``, as torch's, if that is below 1.
    """
    most = number("max_norm", max_norm, FLOAT32, positive=True)
    for name, array in mapping("grads", grads).items():
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise ValueError(f"(): the gradient of {name} cannot be changed; expected a writable ndarray")
    require_apart("grads", grads)
    norm = norm_of(_lanes(grads).values(), get_num_threads())
    factor = clip_factor(norm, most)
    if factor < 1:
        for array in grads.values():
            array *= array.dtype.type(factor)
    return norm


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Factor that clips gradients of this norm; 1 if it is not finite."""
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def _lanes(grads: Any) -> dict[str, Array]:
    """`grads` as the kernels read them, float32 or float64."""
    arrays = {}
    for name, x in mapping("grads", grads).items():
        array = float_array(f"the gradient of {name}", x)
        lane = np.float64 if array.dtype.itemsize == 8 else np.float32
        arrays[name] = np.require(array, lane, ("C", "ALIGNED"))
    return arrays


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
