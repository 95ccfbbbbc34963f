"""How an operator of ours enters torch's dispatcher, with the least between a caller and a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _C

if TYPE_CHECKING:
    from collections.abc import Callable

# Fragments of one namespace; the object keeps its operators alive.
LIBRARY = torch.library.Library("fastattn", "DEF")
# Compilers may pass tensors in any strides: what cannot be read in place is copied.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator of CPU tensors; returns it."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"fastattn::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastattn, name).default


def differentiate(op: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give `op` its gradient."""
    torch.library.register_autograd(_name(op), backward, setup_context=setup_context, lib=LIBRARY)


def forbid_gradients(op: Any, message: str) -> None:
    """Raise where somebody wants the gradient of `op`: torch would only warn, and go on without."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(message)

    torch.library.register_autograd(_name(op), backward, lib=LIBRARY)


def differentiate_by(op: Any, other: Any, result: Callable[[Any], Any]) -> None:
    """Where gradients are wanted, compute `result` of `other` in place of `op`: it keeps what they need."""

    def autograd(keyset: Any, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args):
            return result(other(*args, **options))
        return op.redispatch(keyset & _C._after_autograd_keyset, *args, **options)

    LIBRARY.impl(op._opname, autograd, "Autograd", with_keyset=True)


def autocast(op: Any, count: int) -> None:
    """Under torch.autocast, take the first `count` tensors in its dtype, as torch's own attention does."""

    def cast(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            taken = [x if x.dtype is torch.float64 else x.to(dtype) for x in args[:count]]
            return op(*taken, *args[count:], **options)

    LIBRARY.impl(op._opname, cast, "AutocastCPU")


def _name(op: Any) -> str:
    return f"fastattn::{op._opname}"
