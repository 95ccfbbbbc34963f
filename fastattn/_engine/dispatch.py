"""Run a checked argument object: on the compiled kernels, or on their NumPy twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from fastattn._args.types import INT4, lane_dtype
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

    class ResultArgs(Protocol):
        """Arguments with an array for the result."""

        kernel: ClassVar[str]

        @property
        def out(self) -> Array: ...

    class GradArgs(Protocol):
        """Arguments of a gradient, which may be a sum over no rows: `empty`."""

        kernel: ClassVar[str]

        @property
        def empty(self) -> bool: ...


# A kernel has its name in both implementations; that of its arguments' class says it, too.
_TWINS: dict[str, Callable[[Any], None]] = {
    name: function
    for module in (
        reference, backward, channels, deformable, grad, ops, pack, recurrent, rowwise, selection, updates,
    )
    for name, function in vars(module).items()
    if getattr(function, "__module__", None) == module.__name__ and not name.startswith("_")
}  # fmt: skip
_COMPILED: dict[str, Any] = {name: getattr(settings.core, name, None) for name in _TWINS}


def run(args: ResultArgs, backend: str | None = None) -> None:
    """Compute `args` on `backend`, a checked name, or on the default one."""
    # An empty result may still have more batch items than a loop could visit. A recurrence has to write its
    # state even so.
    if not args.out.size and not args.kernel.startswith(("recurrent", "scan")):
        return
    _run(args, backend)


def plain_attention(q: Any, k: Any, v: Any) -> Array | None:
    """Attention without options; None if its arguments need to be checked."""
    if settings.current.backend != "compiled":
        return None
    return settings.core.plain_attention(q, k, v, settings.get_num_threads())  # type: ignore[no-any-return]


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


def _run(args: Any, backend: str | None) -> None:
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
        plan = {"kernel": "numpy", "isa": None, "block_q": rows, "block_k": block_k}
        plan |= {"gathers": "", "int8_products": False}
    gathers = plan.pop("gathers")
    return {**plan, "conversions": tuple(_conversions(args, plan, gathers))}


def _conversions(args: AttentionArgs, plan: dict[str, Any], gathers: str) -> Iterator[str]:
    """Say what is converted or gathered, block by block, while the kernel runs; or rounded before."""
    dotted = plan.get("bf16_dot", False)
    wide = "bfloat16" if dotted else lane_dtype(args.q.dtype)
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v)):
        if plan["int8_products"]:
            if name == "q":
                yield f"q rounded, tile by tile: {x.dtype} to int8"
            elif x.itemsize > 1:
                yield f"{name} rounded, {x.size / 2**20:.3g} MB: {x.dtype} to int8"
        elif x.dtype == INT4 and plan["kernel"] != "few_rows":
            yield f"{name} widened, block by block: int4 to {wide}"
        elif args.k.dtype == INT4 and plan["kernel"] == "few_rows":
            if name == "q":
                yield f"q rounded, 32 numbers at a time: {x.dtype} to int8"
        elif x.itemsize == 1:
            yield f"{name} widened and scaled, block by block: int8 to {wide}"
        elif x.itemsize == 2 and not dotted:
            yield f"{name} widened, block by block: {x.dtype} to float32"
        elif name == "v" and dotted:
            yield "v interleaved, block by block: pairs of rows for the bfloat16 dot product"
        elif name in gathers and args.block_table is not None and x.shape[-2] % 64:
            yield f"{name} gathered, block by block: pages of {x.shape[-2]} keys"
        elif name in gathers:
            yield f"{name} gathered, block by block: rows {x.strides[-2]} bytes apart"
