"""The arguments of `fastattn.grad`, checked and normalised."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fastattn._args.errors import put_name, wrong_shape, wrong_type
from fastattn._args.grad_types import DropoutArgs, RowsGradArgs
from fastattn._args.ops import data, epsilon, like, require_gate_alone, result, rows, vector
from fastattn._args.types import ACTIVATIONS, FLOAT64, Activation, Array, Shape, lane_dtype
from fastattn._args.values import choice, flag, integer, number, short
from fastattn._engine.settings import require_backend, threads


def needed(need: Any, known: Collection[str]) -> tuple[str, ...]:
    """`need`, names of gradients, each of them once."""
    if isinstance(need, str) or not isinstance(need, (tuple, list)):
        raise TypeError(f"(): need is {short(need)}; expected a tuple of names")
    for name in need:
        choice("need", name, known)
    if len(set(need)) < len(need):
        raise ValueError(f"(): need is {short(need)}; expected each name once")
    return tuple(need)


def places(into: Any, count: int) -> Sequence[Array | None]:
    """`into`, arrays for so many gradients or None for each."""
    if into is None:
        return [None] * count
    if not isinstance(into, (tuple, list)):
        raise wrong_type("into", into, "a tuple of arrays, or None, one for each name in need")
    if len(into) != count:
        raise ValueError(f"(): into has length {len(into)}; expected {count}, as need has")
    return into


class Results:
    """Arrays for the gradients that are needed: those of `into`, or new ones."""

    def __init__(self, need: tuple[str, ...], into: Sequence[Array | None] | None, inputs: dict[str, Any]):
        self._need = need
        self._given = dict(zip(need, places(into, len(need)), strict=True))
        self._inputs = [(name, x, x) for name, x in inputs.items()]
        self._made: dict[str, Array] = {}

    def array(self, name: str, shape: Shape, dtype: np.dtype[Any], like: str = "x") -> Array | None:
        """The array for the gradient `name`, None if it is not needed."""
        if name not in self._given:
            return None
        called = f"into, for {name},"
        found = result(self._given[name], shape, dtype, self._inputs, like, called)
        self._made[name] = found
        self._inputs.append((f"{name}'s", found, found))
        return found

    def __call__(self) -> tuple[Array, ...]:
        return tuple(self._made[name] for name in self._need)


def _rows_of(x: Array | None) -> Array | None:
    return None if x is None else rows(x)


def rows_grad_args(
    kernel: str,
    dout: Any,
    x: Any,
    need: Any,
    known: Collection[str],
    into: Any,
    num_threads: int | None,
    backend: str | None,
    *,
    called: str = "x",
    weight: Any = None,
    eps: float = 0.0,
    residual: Any = None,
    dsum: Any = None,
    up: Any = None,
    activation: Activation | None = None,
    gate: Any = None,
    gate_first: bool = False,
) -> tuple[RowsGradArgs, Results]:
    """Check the arguments of the gradients of norms, `softmax` and `activate`; x is `called` so."""
    try:
        if backend is not None:
            require_backend(backend)
        array = data(called, x)
        shape, dtype, lane = array.shape, array.dtype, lane_dtype(array.dtype)
        given = {"dout": dout, "residual": residual, "dsum": dsum, "up": up, "gate": gate}
        others = {name: like(name, each, shape, dtype, called) for name, each in given.items()}
        if others["dout"] is None:
            raise wrong_type("dout", dout, "an array")
        weight_array = vector("weight", weight, shape[-1:], lane)
        if kernel == "activate" or activation is not None or gate is not None:
            choice("activation", activation, ACTIVATIONS)
        if kernel == "rms_norm":
            require_gate_alone(gate, flag("gate_first", gate_first), residual=residual, dsum=dsum)
        if kernel not in ("activate", "softmax"):
            eps = epsilon("eps", eps, lane)
        names = needed(need, known)
        for name in ("up", "gate"):
            if f"d{name}" in names and others[name] is None:
                raise ValueError(f"(): need has 'd{name}', but {name} is None; expected an array {name}")
        results = Results(names, into, {called: array, **others, "weight": weight_array})
        args = RowsGradArgs(
            kernel,
            rows(others["dout"]),
            rows(array),
            threads(num_threads),
            _rows_of(results.array("dx", shape, dtype, called)),
            _rows_of(others["residual"]),
            _rows_of(others["dsum"]),
            _rows_of(others["up"] if gate is None else others["gate"]),
            _rows_of(results.array("dup" if gate is None else "dgate", shape, dtype, called)),
            weight_array,
            results.array("dweight", shape[-1:], lane, "sums of"),
            results.array("dbias", shape[-1:], lane, "sums of"),
            eps,
            activation,
            gate_first,
        )
        return args, results
    except Exception as error:
        put_name(kernel, error)
        raise


MOST_SEED = 2**64 - 1


def dropout_args(
    x: Any, rate: float, seed: int, stream: int, out: Any, num_threads: int | None
) -> tuple[DropoutArgs, Array]:
    """Check the arguments of `dropout`; also returns the result in x's shape."""
    array = data("x", x)
    value = number("rate", rate, FLOAT64)
    if not 0 <= value < 1:
        raise ValueError(f"(): rate is {rate}; expected at least 0 and less than 1")
    seed = integer("seed", seed, 0, MOST_SEED)
    stream = integer("stream", stream, 0, 2**32 - 1)
    if rows(array).shape[0] > 2**32:
        raise wrong_shape("x", array, f"at most {2**32} rows")
    in_place = isinstance(out, np.ndarray) and out.__array_interface__ == array.__array_interface__
    inputs = [] if in_place else [("x", x, array)]
    full = result(out, array.shape, array.dtype, inputs)
    args = DropoutArgs(rows(array), rows(full), value, 1 / (1 - value), seed, stream, threads(num_threads))
    return args, full
