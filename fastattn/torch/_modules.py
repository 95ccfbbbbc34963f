"""Put our functions where modules of transformers look for theirs, in those imported already and later."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from fastattn._args.errors import put_name
from fastattn._undo import Shared
from fastattn.torch._hybrids import FUNCTIONS, PACKED, REFUSED, NotTaken
from fastattn.torch._indexers import with_promises
from fastattn.torch._measure import gains, measuring, refused
from fastattn.torch._packed import NAME
from fastattn.torch._tensors import traced

# The attribute by which parts of models keep a function of their module from the start.
_HELD = {"multi_scale_deformable_attention_v2": "ms_deformable_attn_core"}
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


# Classes of indexers, but for the end of their names, whose `forward` is computed by promises.
_INDEXERS = (
    "DeepseekV32", "DeepseekV4", "GlmMoeDsa", "Glm5NextText", "AXK2", "Dots3NoteText", "HYV4", "HYV4VL",
    "MistralLarge4Text",
)  # fmt: skip
# Names that a model takes for flash attention in place of any other.
_KERNELS = "_compatible_flash_implementations"
_OURS = "_of_fastattn"  # what our replacements have as an attribute
# A module or a class, a name, what transformers has there or None, and ours.
_replaced: list[tuple[Any, str, Any, Any]] = []


def measures() -> bool:
    """Whether calls are timed beside torch's first: as the last `register` says that is not undone."""
    return next(reversed(IN_USE.users.values()), True)


def _replace() -> Callable[[], None]:
    try:
        _replace_in([module for name, module in list(sys.modules.items()) if _is_of_models(name)])
        sys.meta_path.insert(0, _Later)
    except BaseException:
        _put_back()
        raise
    return _put_back


# Users are those of `register` that are not undone, their values whether they measure.
IN_USE = Shared(_replace)


def _replace_in(modules: Iterable[ModuleType]) -> None:
    for place, name, ours in [found for module in modules for found in _places(module)]:
        _replaced.append((place, name, vars(place).get(name), ours))
        setattr(place, name, ours)


def _put_back() -> None:
    """Give modules their functions back, but for those that somebody else has replaced since."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Later]
    while _replaced:
        place, name, theirs, ours = _replaced.pop()
        if vars(place).get(name) is not ours:
            continue
        if theirs is None:
            delattr(place, name)
        else:
            setattr(place, name, theirs)


def _is_of_models(name: str) -> bool:
    return name.startswith("transformers.models.") and ".modeling_" in name


class _Later:
    """The finder of modules that are imported while ours are in use: they get them at once."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own, whose loader then replaces functions."""
        spec = PathFinder.find_spec(name, path, target) if _is_of_models(name) else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if IN_USE.users:
                _replace_in([module])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Held:
    """An attribute of parts of models that holds a function: they call ours in its place."""

    def __init__(self, name: str, theirs: Any, ours: Any):
        self.name, self.theirs, self.ours = name, theirs, ours

    def __get__(self, part: Any, owner: Any = None) -> Any:
        held = self if part is None else vars(part).get(self.name)
        return self.ours if held is self.theirs else held

    def __set__(self, part: Any, function: Any) -> None:
        vars(part)[self.name] = function


def hybrid_functions(model: Any) -> list[str]:
    """Name the functions of transformers that modules of a model call, and that are ours while in use."""
    modules = {sys.modules.get(type(part).__module__) for part in model.modules()}
    return [name for name in FUNCTIONS if any(name in vars(module) for module in modules if module)]


def _places(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Find where a module's functions are called: in it, in a class of that name, or held by parts."""
    for name, part in list(vars(module).items()):
        forward = getattr(part, "forward", None) if isinstance(part, type) else None
        indexes = name.endswith("Indexer") and name.removesuffix("Indexer") in _INDEXERS
        if indexes and forward is not None and not hasattr(forward, _OURS):
            yield part, "forward", _indexing(forward)
        if isinstance(part, type) and (kernels := vars(part).get(_KERNELS)) and NAME not in kernels:
            yield part, _KERNELS, [*kernels, NAME]
    for function in FUNCTIONS:
        own = vars(module).get(function)
        if isinstance(own, type):
            if not hasattr(own.forward, _OURS):  # type: ignore[attr-defined]
                yield own, "forward", _replacement(function, own.forward)  # type: ignore[attr-defined]
        elif own is not None and not hasattr(own, _OURS):
            ours, held = _replacement(function, own), _HELD.get(function, "")
            holders = [x for x in vars(module).values() if isinstance(x, type) and _holds(x, held)]
            yield from ((x, held, _Held(held, own, ours)) for x in holders)
            if not holders:  # else models could not be pickled: the function has to be found by its name
                yield module, function, ours


def _holds(part: Any, name: str) -> bool:
    """Whether a class sets an attribute `name` of parts of models as it makes them."""
    code = getattr(part.__init__, "__code__", None)
    return issubclass(part, torch.nn.Module) and code is not None and name in code.co_names


def _replacement(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function `name` of transformers one that is ours on CPUs."""
    parameters = inspect.signature(own).parameters.values()
    names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]

    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not IN_USE.users or traced() or measuring():
            return own(*args, **kwargs)
        ours, reason = FUNCTIONS[name], None
        try:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if len(given) < len(args) + len(kwargs):
                raise NotTaken("an argument is given twice, or one too many")
            _require_taken(given)
            if not measures() or _packed(given) or _gains(name, own, ours, given):
                return ours(**given)
        except REFUSED as error:  # before anything was computed
            put_name(name, error)
            if _packed(kwargs) == ["cu_seq_lens_q"]:  # theirs does not look at it
                raise
            reason = error
        try:
            result = own(*args, **kwargs)
        except Exception as error:
            raise error from reason
        if reason is not None:
            refused(name, str(reason))
        return result

    setattr(function, _OURS, True)
    return function


def _indexing(own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `forward` of an indexer one that selects here."""
    selecting = with_promises(own, measures)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        ours = IN_USE.users and not traced() and not measuring()
        return selecting(*args, **kwargs) if ours else own(*args, **kwargs)

    setattr(forward, _OURS, True)
    return forward


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


# Never timed in 16 bits: torch's `grid_sample` (2.13) then counts elements in 16 bits, and reads elsewhere.
_SAMPLING = tuple(name for name in FUNCTIONS if "deformable" in name.lower())
# Of a call that is timed, so many tokens: along these axes of its arguments.
_TOKENS = 256
_WRITTEN = ("state", "conv_state")  # copies of other arguments would not be expanded where these are
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
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if name in _SAMPLING and tensors[0].itemsize == 2:
        return True
    sizes = (tuple(map(int.bit_length, x.shape)) for x in tensors[:2])
    key = _text, name, tensors[0].dtype, *sizes

    def sample() -> dict[str, Any]:
        """The arguments, cut to some tokens; updates write to copies of their states."""
        part = dict(given)
        for argument, x in given.items():
            axis = _AXES.get(name, {}).get(argument)
            if axis is not None and x is not None:
                part[argument] = x.detach().narrow(axis, 0, min(_TOKENS, x.shape[axis]))
            elif isinstance(x, torch.Tensor):
                part[argument] = x.detach().clone() if argument in _WRITTEN else x.detach()
        return part

    def pair() -> tuple[Callable[[], Any], Callable[[], Any]]:
        first, second = sample(), sample()
        return lambda: own(**first), lambda: ours(**second)

    return gains(key, pair)


def _text(name: str, dtype: Any, *sizes: tuple[int, ...]) -> str:
    """What is measured, for `measured`."""
    return f"{name} {dtype} less than {' and '.join('x'.join(str(2**n) for n in x) for x in sizes)}"
