"""A model of torch, made faster where it stands."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import wrong_type
from fastattn._args.ops import integer_activations
from fastattn._args.packed import STORED
from fastattn.torch._hugging_face import NAME, register
from fastattn.torch._linear import FrozenLinear
from fastattn.torch._memory import keep_freed
from fastattn.torch._sdpa import patch_sdpa
from fastattn.torch._undo import Undo

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

    from fastattn._args.types import Rounding

_OWN = "own"  # each weight keeps its dtype


def optimize(
    model: Any, weights_dtype: DTypeLike | None = None, *, activations: Rounding | None = None
) -> Undo:
    """Make a model of torch faster for inference on CPUs, where it stands.

    Models of transformers, and those inside of others, such as a SentenceTransformer's, get the attention
    implementation "fastattn"; other calls of ``scaled_dot_product_attention`` are computed here, see
    `patch_sdpa`. The weights of every ``nn.Linear`` are frozen and packed. glibc's allocator keeps what is
    freed, up to 2 GB, where it would give large blocks back to the system after each layer.

    Parameters
    ----------
    model : torch.nn.Module
        On a CPU. It is changed in place, in evaluation mode or not.
    weights_dtype : {"float32", "bfloat16", "int8", "int4", "nf4"}, optional
        How weights are packed, see `ops.pack`; default as they are. Narrower ones change results.
    activations : {"int8"}, optional
        See `ops.linear`.

    Returns
    -------
    Undo
        Its text says what was replaced and what was not; ``undo()``, or the end of a ``with`` block, gives
        the model back as it was.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    RuntimeError
        If there are no compiled kernels.

    Notes
    -----
    Modules stay what they are: their types, names, parameters and hooks. Packed weights are kept beside the
    parameters, so that memory grows by their size. A parameter that is written to in place, as by
    `load_state_dict`, is packed again; one whose ``.data`` is replaced is not seen. Where a gradient is
    wanted, under autocast, in float64 and on other devices, a module computes as before. Weights are frozen:
    ``requires_grad`` is False until `undo`.
    """
    func = "optimize"
    if not isinstance(model, torch.nn.Module):
        raise wrong_type(func, "model", model, "a torch.nn.Module")
    dtype = None
    if weights_dtype is not None:
        allowed = [name for name in STORED if name != "float64"]
        dtype = dtype_choice(func, "weights_dtype", weights_dtype, allowed)
    if activations is not None:
        integer_activations(func, activations, dtype or _OWN)
    patch = patch_sdpa()
    steps: list[Callable[[], None]] = [patch.undo]
    lines = ["scaled_dot_product_attention on CPUs: fastattn"]
    try:
        lines += _replace_attention(model, steps)
        lines += _replace_linears(model, dtype, activations, steps)
    except BaseException:
        Undo(steps).undo()
        raise
    if kept := keep_freed():
        steps.append(kept.undo)
        lines.append("memory that is freed: kept by the process, up to 2 GB")
    return Undo(steps, "\n".join(lines))


def _replace_attention(model: Any, steps: list[Callable[[], None]]) -> list[str]:
    """Set the attention implementation of models of transformers."""
    lines, inside = [], set()
    for name, module in model.named_modules():
        if module in inside or not hasattr(module, "set_attn_implementation"):
            continue
        inside.update(module.modules())
        register()
        before = {
            each: each.config._attn_implementation
            for each in module.modules()
            if hasattr(each, "set_attn_implementation")
        }
        module.set_attn_implementation(NAME)
        steps.append(lambda before=before: _set_back(before))  # type: ignore[misc]
        lines.append(f"attention of {_called(name, module)}: {before[module]} -> {NAME}")
    return lines


def _set_back(before: dict[Any, str]) -> None:
    for module, implementation in before.items():
        module.config._attn_implementation = implementation


def _called(name: str, module: Any) -> str:
    return f"{type(module).__name__} {name}".rstrip()


def _replace_linears(
    model: Any, dtype: str | None, activations: Rounding | None, steps: list[Callable[[], None]]
) -> list[str]:
    packed: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if why := _why_kept(module):
            kept[why] += 1
            continue
        linear = FrozenLinear(module, dtype, activations)
        parameters = [p for p in (module.weight, module.bias) if p is not None and p.requires_grad]
        steps.append(lambda module=module, parameters=parameters: _thaw(module, parameters))  # type: ignore[misc]
        for parameter in parameters:
            parameter.requires_grad_(False)
        module.forward = linear
        packed[linear.packed.dtype] += 1
    lines = [f"{n} nn.Linear packed in {name}" for name, n in packed.items()]
    return lines + [f"{n} nn.Linear left alone: {why}" for why, n in kept.items()]


def _why_kept(module: Any) -> str | None:
    weight = module.weight
    if type(module) is not torch.nn.Linear:
        return f"a {type(module).__name__} is more than that"
    if "forward" in vars(module):
        return "its forward pass has been replaced"
    if not (type(weight) is torch.nn.Parameter and weight.is_cpu):
        return f"its weight is a {type(weight).__name__} on {weight.device.type}"
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is in {weight.dtype}"
    return None


def _thaw(module: Any, parameters: list[Any]) -> None:
    del module.forward
    for parameter in parameters:
        parameter.requires_grad_()
