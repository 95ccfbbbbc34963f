"""Registration of our operators in torch's dispatcher, with the least between a caller and a kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import _C
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from fastattn.torch._tensors import stand_ins

# Fragments of one namespace; the object keeps its operators alive.
LIBRARY = torch.library.Library("fastattn", "DEF")
# Compilers may pass tensors in any strides: what cannot be read in place is copied.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)


def define(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], check: Callable[..., Any]
) -> Any:
    """Define an operator of CPU tensors; returns it.

    `check` gets the operator's arguments by name, with arrays for tensors as `stand_ins` makes them, and
    raises where their shapes or types are not those that `kernel` takes. `fake` makes an empty result.
    """

    def checked(*args: Any, **options: Any) -> Any:
        names = (argument.name for argument in op._schema.arguments)
        named = dict(zip(names, args, strict=False)) | options
        _require_one_device(name, named)
        given = stand_ins(named)
        if given is not None:
            check(**given)
        return fake(*args, **options)

    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"fastattn::{name}", checked, lib=LIBRARY)
    op = getattr(torch.ops.fastattn, name).default
    return op


def _require_one_device(func: str, given: dict[str, Any]) -> None:
    """Raise if tensors are on several devices: a fake kernel would leave the result uninitialized."""
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    first, *others = tensors
    for name in others:
        came, expected = tensors[name].device.type, tensors[first].device.type
        if came != expected:
            raise ValueError(f"{func}(): {name} is on {came}; expected {expected}, as {first} is")


def differentiate(op: Any, backward: Callable[..., Any], keep: Callable[..., None], func: str) -> None:
    """Give `op`, all of whose positional arguments are tensors, its gradient.

    torch.library.register_autograd would do, but that torch.func.grad refuses it, and that tangents
    vanish in it where no gradient is wanted.
    """
    lists = isinstance(op._schema.returns[0].type, torch.ListType)

    def forward(ctx: Any, keyset: Any, options: dict[str, Any], *args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(_C._AutoDispatchBelowAutograd())
            if _C._are_functorch_transforms_active():  # outer transforms derive, too
                stack.enter_context(torch.enable_grad())
                stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
            result = op.redispatch(keyset & _C._after_autograd_keyset, *args, **options)
        # The dispatcher leaves out arguments that have their defaults, from the end on.
        inputs = *args, *[None] * (_positional(op) - len(args))
        keep(ctx, inputs, options, result)
        return tuple(result) if lists else result

    def gradient(ctx: Any, *grads: Any) -> Any:
        return None, None, *backward(ctx, ctx.needs_input_grad[2:], *grads)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{func}(): it has no derivative in forward mode (torch.func.jvp, jacfwd, forward_ad); expected"
            " reverse mode (torch.func.grad, vjp, backward)"
        )

    methods = {"forward": forward, "backward": gradient, "jvp": jvp}
    methods = {name: staticmethod(method) for name, method in methods.items()}
    function: Any = type(f"{op._opname}_function", (torch.autograd.Function,), methods)

    def autograd(keyset: Any, *args: Any, **options: Any) -> Any:
        if not differentiates(args):
            return op.redispatch(keyset & _C._after_autograd_keyset, *args, **options)
        if _C._are_functorch_transforms_active():  # which have unwrapped to this level already
            with enable_single_level_autograd_function():
                result = super(torch.autograd.Function, function).apply(keyset, options, *args)
        else:
            result = function.apply(keyset, options, *args)
        return list(result) if lists else result

    LIBRARY.impl(op._opname, autograd, "Autograd", with_keyset=True)


def forbid_gradients(op: Any, func: str) -> None:
    """Raise where somebody wants the gradient of `op`, the gradient of `func`."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{func}(): it has a first derivative, no second")

    differentiate(op, backward, lambda *_: None, func)


def differentiate_by(op: Any, other: Any, result: Callable[[Any], Any]) -> None:
    """Compute `result` by `other` in place of `op` where derivatives are wanted: it keeps their inputs."""

    def autograd(keyset: Any, *args: Any, **options: Any) -> Any:
        if differentiates(args):
            return result(other(*args, **options))
        return op.redispatch(keyset & _C._after_autograd_keyset, *args, **options)

    LIBRARY.impl(op._opname, autograd, "Autograd", with_keyset=True)


def differentiates(args: Any) -> bool:
    """Whether a derivative may be wanted: tangents do not ask whether gradients are enabled."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args)


def _positional(op: Any) -> int:
    return sum(not argument.kwarg_only for argument in op._schema.arguments)


def autocast(op: Any, count: int) -> None:
    """Under torch.autocast, take the first `count` tensors in its dtype, as torch's own attention does."""

    def cast(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            taken = [x if x.dtype is torch.float64 else x.to(dtype) for x in args[:count]]
            return op(*taken, *args[count:], **options)

    LIBRARY.impl(op._opname, cast, "AutocastCPU")
