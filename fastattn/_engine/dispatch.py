"""Run a checked argument object: on the compiled kernels, or on their NumPy twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from fastattn._args.types import lane_dtype
from fastattn._engine import settings
from fastattn._reference import attention as reference
from fastattn._reference import (
    backward,
    channels,
    deformable,
    grad,
    ops,
    pack,
    recurrent,
    rowwise,
    selection,
    updates,
)

if TYPE_CHECKING:
    from fastattn._args.packed import LinearArgs, PackedLinear
    from fastattn._args.types import Array, AttentionArgs, Ints

    class KernelArgs(Protocol):
        """The arguments of a kernel, whose name is `kernel`."""

        kernel: ClassVar[str]

    class ResultArgs(KernelArgs, Protocol):
        """Arguments with an array for the result."""

        @property
        def out(self) -> Array: ...

    class GradArgs(KernelArgs, Protocol):
        """Arguments of a gradient, which may be a sum over no rows: `empty`."""

        @property
        def empty(self) -> bool: ...


# The name of a kernel, which its arguments have as `kernel`, is the same in both implementations.
_TWINS: dict[str, Callable[[Any], None]] = {
    "attention": reference.attention,
    "attention_backward": backward.attention_backward,
    "conv": channels.conv,
    "conv_grad": channels.conv_grad,
    "deformable": deformable.deformable,
    "deformable_grad": deformable.deformable_grad,
    "dropout": grad.dropout,
    "linear": ops.linear,
    "logits": grad.logits,
    "nearest": selection.nearest,
    "outer": grad.outer,
    "pack": pack.pack,
    "recurrent": recurrent.recurrent,
    "recurrent_backward": recurrent.recurrent_backward,
    "rope": ops.rope,
    "rows": ops.rows,
    "rows_grad": grad.rows_grad,
    "rowwise": rowwise.rowwise,
    "rowwise_backward": rowwise.rowwise_backward,
    "scan": channels.scan,
    "scan_grad": channels.scan_grad,
    "scatter": grad.scatter,
    "selected": selection.selected,
    "selection": selection.selection,
    "update": updates.update,
}
_COMPILED = {name: getattr(settings.core, name) for name in _TWINS} if settings.core else {}


def run(args: ResultArgs, backend: str | None = None) -> None:
    """Compute `args` on `backend`, a checked name, or on the default one."""
    # An empty result may still have more batch items than a loop could visit. A recurrence has to write its
    # state even so.
    if not args.out.size and not args.kernel.startswith(("recurrent", "scan")):
        return
    _run(args, backend)


def run_groups(
    args: LinearArgs,
    weights: Sequence[PackedLinear],
    counts: Ints,
    backend: str | None,
    biases: Sequence[Array | None] | None = None,
) -> None:
    """Compute `args`, of whose rows counts[i] in turn are multiplied by weights[i], not by `args.weight`.

    If there are `biases`, biases[i] is added.
    """
    end = 0
    for i in np.flatnonzero(counts).tolist():
        begin, end = end, end + int(counts[i])
        bias = None if biases is None else biases[i]
        x, out = args.x[begin:end], args.out[begin:end]
        run(replace(args, x=x, weight=weights[i], bias=bias, out=out), backend)


def run_grad(args: GradArgs, backend: str | None = None) -> None:
    """Compute the arguments of a gradient, which may be a sum over no rows."""
    if args.empty:
        _TWINS[args.kernel](args)
    else:
        _run(args, backend)


def _run(args: KernelArgs, backend: str | None) -> None:
    if (backend or settings.current.backend) == "compiled":
        _COMPILED[args.kernel](args)
        return
    if backend is None:
        settings.warn_of_fallback()
    _TWINS[args.kernel](args)


def plan(args: AttentionArgs, backend: str | None) -> dict[str, Any]:
    """Return what would run on `args`: kernel, ISA, and rows (of all heads of a group) and keys of a tile."""
    if (backend or settings.default_backend()) == "compiled":
        plan = settings.core.plan(args)
    else:
        block_q, block_k = reference.block_sizes(args)
        rows = block_q * (args.heads_q // args.heads_kv)
        plan = {"kernel": "numpy", "isa": None, "block_q": rows, "block_k": block_k, "gathers": ""}
    gathers = plan.pop("gathers")
    return {**plan, "conversions": tuple(_conversions(args, plan.get("bf16_dot", False), gathers))}


def _conversions(args: AttentionArgs, dotted: bool, gathers: str) -> Iterator[str]:
    """Say what is converted or gathered, block by block, while the kernel runs."""
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v)):
        if x.itemsize == 1:
            yield f"{name} widened and scaled, block by block: int8 to {lane_dtype(args.q.dtype)}"
        elif x.itemsize == 2 and not dotted:
            yield f"{name} widened, block by block: {x.dtype} to float32"
        elif name == "v" and dotted:
            yield "v interleaved, block by block: pairs of rows for the bfloat16 dot product"
        elif name in gathers:
            yield f"{name} gathered, block by block: rows {x.strides[-2]} bytes apart"
