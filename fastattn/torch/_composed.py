"""Functions of arrays as functions of tensors, with the gradients that they have here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fastattn import grad, ops
from fastattn.torch._tensors import array_of, num_threads, tensor_of

# From arrays, by name, and options: results, and what maps their gradients to those of named arrays.
Recorded = Callable[..., tuple[tuple[Any, ...], Callable[..., tuple[Any, ...]]]]


def recorded(function: Callable[..., Any]) -> Recorded:
    """Make what `composed` calls of a function that `grad.vjp` knows, which returns its state, too."""

    def record(given: dict[str, Any], options: dict[str, Any]) -> Any:
        results, pullback = grad.vjp(function, **given, **options, return_state=True)

        def back(need: tuple[str, ...], dout: Any, dstate: Any) -> tuple[Any, ...]:
            found: tuple[Any, ...] = pullback(dout, dstate, need=need)
            return found

        return results, back

    return record


def record_conv(given: dict[str, Any], options: dict[str, Any]) -> Any:
    """Run `ops.causal_conv1d`, and say how its gradients are found; its state is left out."""
    out = ops.causal_conv1d(**given, **options)

    def back(need: tuple[str, ...], dout: Any) -> tuple[Any, ...]:
        return grad.causal_conv1d(dout, **given, **options, need=need)

    return (out,), back


class _Composed(torch.autograd.Function):  # type: ignore[misc]
    """A recorded function; its second call of `backward` records it anew."""

    @staticmethod
    def forward(ctx: Any, record: Recorded, names: tuple[str, ...], options: Any, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.record, ctx.names, ctx.options = record, names, options
        results, ctx.back = record(_arrays(names, tensors), options)
        ctx.save_for_backward(*tensors)
        ctx.like = [(x.shape, x.dtype) for x in results]
        return tuple(tensor_of(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors, back = ctx.saved_tensors, ctx.back
        if back is None:
            _, back = ctx.record(_arrays(ctx.names, tensors), ctx.options)
        ctx.back = None
        wanted = ctx.needs_input_grad[3:]
        need = tuple(f"d{name}" for name, yes in zip(ctx.names, wanted, strict=True) if yes)
        dout, *more = (None if g is None else array_of(g.detach().contiguous()) for g in grads)
        if dout is None:
            dout = np.zeros(*ctx.like[0])
        results = [tensor_of(np.ascontiguousarray(x)) for x in back(need, dout, *more)]
        if torch.is_grad_enabled():  # create_graph=True
            known = (*tensors, *(g for g in grads if g is not None))
            results = _First.apply(len(results), *results, *known)
        found = dict(zip(need, results, strict=True))
        return (None, None, None, *(found.get(f"d{name}") for name in ctx.names))


class _First(torch.autograd.Function):  # type: ignore[misc]
    """First derivatives: whoever wants one of them gets an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("fastattn: functions of hybrid models have a first derivative, no second")


def composed(record: Recorded, tensors: Mapping[str, Any], **options: Any) -> tuple[Any, ...]:
    """Return the results of a recorded function of tensors by name, None left out; differentiable."""
    given = {name: x for name, x in tensors.items() if x is not None}
    options["num_threads"] = num_threads()
    result: tuple[Any, ...] = _Composed.apply(record, tuple(given), options, *given.values())
    return result


def _arrays(names: tuple[str, ...], tensors: tuple[Any, ...]) -> dict[str, Any]:
    return {name: array_of(x.detach()) for name, x in zip(names, tensors, strict=True)}
