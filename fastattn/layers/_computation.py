"""Calls of layers: checks of their inputs, and the computation, which runs plainly or with a pullback."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from fastattn._args.attention import dropout_of
from fastattn._args.errors import told, wrong_dtype, wrong_shape, wrong_type
from fastattn._args.ops import cotangent, data, rows
from fastattn._args.types import FLOAT32, FLOAT64, Array, ArrayLike, Shape
from fastattn._args.values import as_array, converted, flag, float_array, of_lists
from fastattn._engine.recorder import Drops
from fastattn._engine.tape import PLAIN, Tape
from fastattn._engine.values import Value
from fastattn.grad import Pullback

if TYPE_CHECKING:
    import numpy as np

P = ParamSpec("P")


class Computation(NamedTuple):
    """One call, checked; `run` computes it on the operations of a tape."""

    layers: Sequence[Any]  # each a `Layer`
    inputs: Mapping[str, Array]  # (..., features)
    run: Callable[..., Any]  # from a tape and the inputs' values, which are rows, to the value of the result
    shape: Shape  # of the result
    by_block: bool = False  # `run` makes checkpoints of its blocks
    more: Callable[[], Any] | None = None  # the second result of a call, after `run`

    def with_pullback(self, checkpoint: bool, dropout: float, seed: int | None) -> tuple[Any, Pullback]:
        """What a call returns, and its pullback, as `fastattn.grad.vjp` returns them."""
        inputs, layers, shape = self.inputs, self.layers, self.shape
        checkpoint = flag("checkpoint", checkpoint)
        tape = Tape(drops=Drops(*dropout_of(dropout, seed)), by_block=checkpoint)
        (first, x), *others = inputs.items()
        for other, y in others:
            if y.dtype != x.dtype:
                raise TypeError(f"(): {other} has dtype {y.dtype}; expected {x.dtype}, as {first} has")
        for layer in layers:
            layer._require_parts()
        versions = [layer._versions() for layer in layers]
        values = [Value(rows(x)) for x in inputs.values()]
        out = self.run(tape, *values) if self.by_block else tape.block(self.run, *values)
        result, dtype = out.array.reshape(shape), out.array.dtype

        def check(dout: ArrayLike, **others: Any) -> tuple[Array]:
            if [layer._versions() for layer in layers] != versions:
                again = "call vjp again for their gradients"
                raise RuntimeError(f"(): the weights have changed since; {again}")
            return (cotangent(dout, others, shape, dtype),)

        def back(dout: Array) -> tuple[Any, ...]:
            tape.pull(out, rows(dout))
            found = (value.found().reshape(x.shape) for value, x in zip(values, inputs.values(), strict=True))
            return *found, *(_by_name(layer, tape) for layer in layers)

        return result if self.more is None else (result, self.more()), Pullback(check, back)


# The fields of a `Computation`, of which a call makes a tuple: that takes less time.
Made = tuple[Any, ...]


def _by_name(layer: Any, tape: Tape) -> dict[str, Array]:
    """The gradients of a layer's parameters."""
    for _, part in layer._walk():
        part._settle(tape.gradients)
    found: dict[str, Array] = layer._all_named(tape.gradients.of)
    return found


def computed(by_name: str = "", returns: str = "Array") -> Callable[[Callable[P, Made]], Callable[P, Array]]:
    """Decorate a layer's `__call__` that returns what it `Made`: calls run it, and `grad.vjp` records it.

    Python's error for too many positional arguments also says which ones are passed `by_name`.
    """

    def decorate(computation: Callable[P, Made]) -> Callable[P, Array]:
        @functools.wraps(computation)
        def call(*args: P.args, **options: P.kwargs) -> Any:
            try:
                made = computation(*args, **options)
                _, inputs, run, shape = made[:4]
                out = run(PLAIN, *map(rows, inputs.values())).reshape(shape)
            except Exception as error:
                name, own = type(args[0]).__name__, computation.__qualname__
                raise told(error, name, computation, options, by_name, own) from error.__cause__
            return out if len(made) < 6 else (out, made[5]())

        call.computation = computation  # type: ignore[attr-defined]
        signature = inspect.signature(computation).replace(return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**computation.__annotations__, "return": returns}
        return call

    return decorate


def checked(name: str, x: Any, features: int, weights_dtype: str) -> Array:
    """`x` as an array (..., features), for kernels whose weights are stored as `weights_dtype`."""
    array = data(name, x)
    if array.shape[-1] != features:
        heads = ", heads side by side" if array.ndim == 4 else ""
        raise wrong_shape(name, array, f"(..., {features}){heads}")
    if (array.dtype == FLOAT64) != (weights_dtype == "float64"):
        lane = "float64" if weights_dtype == "float64" else "float32"
        expected = lane if lane == "float64" else "float32, float16 or bfloat16"
        hint = of_lists({name: x}) or converted(name, x, lane)
        raise wrong_dtype(name, array, f"{expected}, for weights in {weights_dtype}{hint}")
    return array


def require(name: str, x: Any, kind: Any, expected: str) -> None:
    """Raise unless `x`, the argument `name`, is of `kind`, a type or several; messages say `expected`."""
    if not isinstance(x, kind):
        raise wrong_type(name, x, expected)


def keys_values(given: Any, batch: int, heads_kv: int, head_dim: int, q: np.dtype[Any]) -> Any:
    """A caller's keys and values, checked: (batch, heads_kv, length, head_dim), for queries of dtype q."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise wrong_type("keys_values", given, "a pair (k, v) of arrays")
    k, v = (float_array(f"keys_values[{i}]", x) for i, x in enumerate(given))
    shape = (batch, heads_kv, k.shape[2] if k.ndim == 4 else -1, head_dim)
    if not k.shape == v.shape == shape:
        expected = f"({batch}, {heads_kv}, length, {head_dim}) for both"
        raise ValueError(f"(): keys_values have shapes {k.shape} and {v.shape}; expected {expected}")
    if k.dtype != v.dtype or (k.dtype != q and not (q == FLOAT32 and k.dtype.itemsize == 2)):
        raise TypeError(f"(): keys_values have dtypes {k.dtype} and {v.dtype}; expected {q}, query's")
    return k, v


def batch_first(name: str, x: Array) -> Array:
    """`x` (batch, length, features), or (length, features) as a batch of one."""
    if x.ndim == 3:
        return x
    if x.ndim == 2:
        return x[None]
    raise wrong_shape(name, x, f"(batch, length, {x.shape[-1]})")


def one_batch(name: str, x: Any) -> Any:
    """`x`, an array of one sequence, as a batch of it; None stays None."""
    return None if x is None else as_array(name, x)[None]
