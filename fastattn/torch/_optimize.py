"""Optimization of a torch model in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import compress
from math import prod
from typing import Any

import torch

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, wrong_type
from fastattn._args.ops import integer_activations
from fastattn._args.types import DTypeLike, Rounding
from fastattn._args.values import flag
from fastattn._args.weight_types import OF_FLOAT32
from fastattn._undo import Undo
from fastattn.torch._hugging_face import NAME, register
from fastattn.torch._linear import CLASSES, TAKEN, FrozenLinear
from fastattn.torch._measure import GAIN, ratio_of
from fastattn.torch._memory import keep_freed as keep_freed_memory
from fastattn.torch._modules import hybrid_functions
from fastattn.torch._packed import NAME as PACKED
from fastattn.torch._sdpa import patch_sdpa, said

_OWN = "own"  # each weight keeps its dtype
_MOST_MEASURED = 1024  # features: a product of 256 rows takes about 2 ms
# In evaluation mode they may compute without calling the modules within them.
_FAST = torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer


@named("optimize")
def optimize(
    model: Any,
    weights_dtype: DTypeLike | None = None,
    *,
    activations: Rounding | None = None,
    measure: bool = True,
    keep_freed: bool = False,
) -> Undo:
    """Make a torch model faster for inference on CPUs, in place.

    Models of transformers, also within others such as a SentenceTransformer, get the attention implementation
    "fastattn" and the replacements of `register`; other calls of ``scaled_dot_product_attention`` go through
    `patch_sdpa`. The weights of every ``nn.Linear`` are frozen and packed.

    Parameters
    ----------
    model : torch.nn.Module
        On a CPU, in evaluation mode or not.
    weights_dtype : str, optional
        Type of packed weights, see `ops.pack`; by default their own. Narrower types change results.
    activations : {"int8"}, optional
        See `ops.linear`.
    measure : bool, default True
        Replace only what gains 5%. Each kind of ``nn.Linear`` (dtype, powers of two of its features, up to
        1024) is timed now, with 1, 16 and 256 rows; attention at the first call of each kind, see
        `patch_sdpa`. An ``nn.Linear`` that gains at some numbers of rows calls torch where it is slower;
        with `weights_dtype` or `activations`, the geometric mean decides for all numbers of rows.
        False: replace everything.
    keep_freed : bool, default False
        Let glibc's allocator keep up to 2 GB of freed memory in this process, instead of returning large
        blocks to the system after each layer. `undo` returns the memory.

    Returns
    -------
    Undo
        Prints what was replaced and what was not. ``undo()``, or the end of a ``with`` block, restores the
        model.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    RuntimeError
        If there are no compiled kernels.

    Notes
    -----
    Modules keep their types, names, parameters and hooks. Memory grows by the size of the packed weights. A
    parameter that is replaced, or written in place, as by `load_state_dict`, is packed again. Not seen are
    writes that torch does not count: through ``.data`` or NumPy, to parameters made in inference mode, and by
    fused optimizers. torch computes calls that need a derivative, under autocast, in float64, on other
    devices, and traced calls (`torch.export`, `torch.jit`, `make_fx`, a dispatch mode). Weights are frozen:
    ``requires_grad`` is False until `undo`.
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module")
    dtype = None
    if weights_dtype is not None:
        dtype = dtype_choice("weights_dtype", weights_dtype, OF_FLOAT32)
    if activations is not None:
        integer_activations(activations, dtype or _OWN)
    keeps = flag("keep_freed", keep_freed)
    patch = patch_sdpa(measure=measure)
    steps: list[Callable[[], None]] = [patch.undo]
    lines = []
    try:
        lines += _replace_attention(model, measure, steps)
        lines += _replace_linears(model, dtype, activations, measure, steps)
        if keeps:
            end, kept = keep_freed_memory()
            steps.append(end)
            lines.append(f"freed memory: {kept}")
    except BaseException:
        Undo(steps).undo()
        raise
    return Undo(steps, lambda: "\n".join([said(measure), *lines]))


def _replace_attention(model: Any, measure: bool, steps: list[Callable[[], None]]) -> list[str]:
    """Set the attention implementation of models of transformers."""
    lines, inside = [], set()
    for name, module in model.named_modules():
        if module in inside or not hasattr(module, "set_attn_implementation"):
            continue
        inside.update(module.modules())
        steps.append(register(measure=measure).undo)
        before = [(config, config._attn_implementation) for config in _configs(module)]
        was = module.config._attn_implementation
        if any(implementation not in (NAME, PACKED) for _, implementation in before):
            steps.append(partial(_set_back, before))
            module.set_attn_implementation(NAME)
        now = module.config._attn_implementation
        change = f"{was} -> {now}" if now != was else f"{now}, as before"
        called = f"{type(module).__name__} {name}".rstrip()
        lines.append(f"attention of {called}: {change}")
        if functions := hybrid_functions(module):
            lines.append(f"{', '.join(functions)} of transformers: replaced in the whole process")
    return lines


def _configs(model: Any) -> Iterator[Any]:
    """Configs of a model, each before those within it, which take their implementation from it."""
    configs = [x.config for x in reversed(list(model.modules())) if hasattr(x, "set_attn_implementation")]
    while configs:
        yield (config := configs.pop())
        parts = (getattr(config, key, None) for key in getattr(config, "sub_configs", ()))
        configs += [part for part in parts if part is not None]


def _set_back(before: list[tuple[Any, str]]) -> None:
    for config, implementation in before:
        config._attn_implementation = implementation


def _replace_linears(
    model: Any,
    dtype: str | None,
    activations: Rounding | None,
    measure: bool,
    steps: list[Callable[[], None]],
) -> list[str]:
    packed: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        why = _why_kept(module)
        slower = _slower(module, dtype, activations) if measure and not why else ()
        if slower and all(slower):
            own = str(module.weight.dtype).removeprefix("torch.")
            why = f"torch is as fast or faster here in {own} than packed in {dtype or own}; see measured()"
        if why:
            kept[why] += 1
            continue
        linear = FrozenLinear(module._parameters, dtype, activations, slower if any(slower) else ())
        frozen = [name for name, p in module.named_parameters() if p.requires_grad]
        parameters = [module._parameters[name] for name in frozen]
        steps.append(partial(_thaw, module, linear, frozen, parameters))
        for parameter in parameters:
            parameter.requires_grad_(False)
        module.forward = linear.forward
        of_torch = " and ".join(compress(CLASSES.values(), slower))
        packed[linear.packed.dtype + (of_torch and f"; torch computes {of_torch}")] += 1
    lines = [f"{n} nn.Linear packed in {name}" for name, n in packed.items()]
    lines += [f"{n} nn.Linear left alone: {why}" for why, n in kept.items()]
    if torch.backends.mha.get_fastpath_enabled() and any(isinstance(x, _FAST) for x in model.modules()):
        lines.append(
            "nn.MultiheadAttention, nn.TransformerEncoderLayer: torch's fast path in evaluation mode; without"
            " it after torch.backends.mha.set_fastpath_enabled(False)"
        )
    return lines


def _slower(module: Any, dtype: str | None, activations: Rounding | None) -> tuple[bool, ...]:
    """Whether torch is faster, for each class of rows; everywhere if none gains. Weights are (out, in)."""
    sizes = [min(2 ** (int(n) - 1).bit_length(), _MOST_MEASURED) for n in reversed(module.weight.shape)]
    own = module.weight.dtype

    @cache
    def modules() -> tuple[Any, Any]:
        """Modules of this kind, as they are called: torch's, and a packed one."""
        theirs, ours = (torch.nn.Linear(*sizes, dtype=own).requires_grad_(False) for _ in range(2))
        ours.forward = FrozenLinear(ours._parameters, dtype, activations).forward
        return theirs, ours

    def pair(rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        x = torch.randn(rows, sizes[0]).to(own)
        theirs, ours = modules()
        return partial(theirs, x), partial(ours, x)

    kind = _text, own, dtype or own, activations, *sizes
    found = [ratio_of((*kind, rows), partial(pair, rows)) for rows in CLASSES]
    if dtype is not None or activations is not None:  # one precision, whatever the number of rows
        found = [prod(found) ** (1 / len(found))] * len(found)
    return tuple(ratio < 1 or max(found) < GAIN for ratio in found)


def _text(own: Any, dtype: Any, activations: Rounding | None, features: int, out: int, rows: int) -> str:
    """What is measured, for `measured`."""
    inputs = f", {activations} inputs" if activations else ""
    return f"linear {own} packed in {dtype}{inputs} {features} to {out}, rows: {rows}"


def _why_kept(module: Any) -> str | None:
    weight = module.weight
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight itself"
    if type(module) is not torch.nn.Linear:
        return f"a {type(module).__name__} is more than that"
    if "forward" in vars(module):
        return "its forward pass has been replaced"
    if not (type(weight) is torch.nn.Parameter and weight.is_cpu):
        return f"its weight is a {type(weight).__name__} on {weight.device.type}"
    if weight.layout is not torch.strided:
        return f"its weight is {weight.layout}"
    if weight.dtype not in TAKEN:
        return f"its weight is in {weight.dtype}"
    return None


def _thaw(module: Any, linear: FrozenLinear, names: list[str], parameters: list[Any]) -> None:
    linear.in_use = False
    if vars(module).get("forward") == linear.forward:
        del module.forward
    now = [module._parameters.get(name) for name in names]  # others, after load_state_dict(assign=True)
    for parameter in (*parameters, *now):
        if parameter is not None and parameter.is_floating_point():
            parameter.requires_grad_()
