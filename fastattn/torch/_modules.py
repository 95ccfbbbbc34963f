"""Put our functions where modules of transformers look for theirs, in those imported already and later."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastattn.torch._hybrids import FUNCTIONS, PACKED, REFUSED, NotTaken
from fastattn.torch._measure import gains, measuring, refused

_FACTORY = "use_kernel_func_from_hub_with_fallback"  # the decorator of transformers' own functions
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


_OURS = "_of_fastattn"  # what our replacements have as an attribute
_in_use: dict[object, bool] = {}  # of each register() that is not undone: whether it measures
_replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, transformers' function there, and ours


def measures() -> bool:
    """Whether calls are timed beside torch's first: as the last `register` says that is not undone."""
    return next(reversed(_in_use.values()), True)


def replace_functions(measure: bool) -> Callable[[], None]:
    """Let modules of transformers call our functions; returns what undoes it, once."""
    if not _in_use:
        try:
            for module, name, function in list(_places()):
                _replaced.append((module, name, getattr(module, name), function))
                setattr(module, name, function)
        except BaseException:
            _put_back()
            raise
    key = object()
    _in_use[key] = measure

    def undo() -> None:
        if _in_use.pop(key, None) is not None and not _in_use:
            _put_back()

    return undo


def _put_back() -> None:
    """Give modules their functions back, but for those that somebody else has replaced since."""
    while _replaced:
        module, name, theirs, ours = _replaced.pop()
        if getattr(module, name, None) is ours:
            setattr(module, name, theirs)


def hybrid_functions(model: Any) -> list[str]:
    """Name the functions of transformers that modules of a model call, and that are ours while in use."""
    modules = {sys.modules.get(type(part).__module__) for part in model.modules()}
    return [name for name in FUNCTIONS if any(name in vars(module) for module in modules if module)]


def _places() -> Iterator[tuple[Any, str, Any]]:
    """Find where new functions go: modules that have them, and where later ones get their decorator."""
    from transformers import integrations
    from transformers.integrations import hub_kernels

    factory = getattr(hub_kernels, _FACTORY, None)
    if factory is not None:  # else transformers is older, and has these functions by other names
        for module in (integrations, hub_kernels):
            yield module, _FACTORY, _decorating(factory)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for function in FUNCTIONS:
                own = vars(module).get(function)
                if own is not None and not hasattr(own, _OURS):
                    yield module, function, _replacement(function, own)


def _decorating(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Make transformers' decorator one whose functions are ours while they are in use."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        decorate = factory(*args, **kwargs)

        def decorated(function: Callable[..., Any]) -> Any:
            own = decorate(function)
            return _replacement(function.__name__, own) if function.__name__ in FUNCTIONS else own

        return decorated

    return make


def _replacement(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function `name` of transformers one that is ours on CPUs."""
    names = list(inspect.signature(own).parameters)

    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not _in_use or _traced() or measuring():
            return own(*args, **kwargs)
        ours, why = FUNCTIONS[name], ""
        try:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if len(given) < len(args) + len(kwargs):
                raise NotTaken("an argument is given twice, or one too many")
            _require_taken(given)
            if not measures() or _packed(given) or _gains(name, own, ours, given):
                return ours(**given)
        except REFUSED as error:  # before anything was computed
            why = str(error)
            if _packed(kwargs) == ["cu_seq_lens_q"]:  # theirs does not look at it
                raise
        result = own(*args, **kwargs)
        if why:
            refused(name, why)
        return result

    setattr(function, _OURS, True)
    return function


def _traced() -> bool:
    """Whether a call is compiled or exported, or one of torch.func: then it is transformers'."""
    return torch.compiler.is_compiling() or bool(torch._C._are_functorch_transforms_active())


def _packed(given: dict[str, Any]) -> list[str]:
    """The arguments that tell packed sequences apart: transformers' raises, or has a library that does."""
    return [name for name in PACKED if given.get(name) is not None]


def _require_taken(given: dict[str, Any]) -> None:
    """Refuse tensors of other devices and of other types, but for integers: nothing is computed of these."""
    plain = (torch.Tensor, torch.nn.Parameter)
    for x in given.values():
        taken = type(x) in plain and x.is_cpu and x.dtype in _TAKEN
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not taken:
            raise NotTaken(f"a tensor is a {type(x).__name__} in {x.dtype} on {x.device}")


# Of a call that is timed, so many tokens: along these axes of its arguments.
_TOKENS = 256
_BY_HEADS = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
_AXES: dict[str, dict[str, int]] = {
    "causal_conv1d_fn": {"hidden_states": 2},
    "torch_chunk_gated_delta_rule": _BY_HEADS,
    "torch_recurrent_gated_delta_rule": _BY_HEADS,
    "chunk_kimi_delta_attention": _BY_HEADS,
    "recurrent_kimi_delta_attention": _BY_HEADS,
    "mamba2_chunk_scan": dict.fromkeys(("hidden_states", "dt", "B", "C"), 1),
    "mamba_selective_scan": dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2),
}


def _gains(name: str, own: Callable[..., Any], ours: Callable[..., Any], given: dict[str, Any]) -> bool:
    """Whether ours gains for such calls, which are timed at the first of a kind."""
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    sizes = " and ".join("x".join(str(2 ** int(n).bit_length()) for n in x.shape) for x in tensors[:2])
    key = (name, str(tensors[0].dtype).removeprefix("torch."), f"less than {sizes}")

    def sample() -> dict[str, Any]:
        """The arguments, cut to some tokens; updates write to copies of their states."""
        part = dict(given)
        for argument, x in given.items():
            axis = _AXES.get(name, {}).get(argument)
            if axis is not None and x is not None:
                part[argument] = x.detach().narrow(axis, 0, min(_TOKENS, x.shape[axis]))
            elif isinstance(x, torch.Tensor):
                part[argument] = x.detach().clone()
        return part

    def pairs() -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
        first, second = sample(), sample()
        yield lambda: own(**first), lambda: ours(**second)

    return gains(key, pairs)
