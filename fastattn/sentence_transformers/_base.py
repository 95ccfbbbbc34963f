"""The base of the three classes: the constructor, prompts, and what stands for devices and processes."""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any, TypedDict

from fastattn._args.errors import put_name, wrong_type
from fastattn._args.values import choice, flag, integer, short
from fastattn._args.words import not_an_argument
from fastattn.models import load
from fastattn.models._files import Config
from fastattn.models._hub import place_of
from fastattn.models._modules import first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

BACKENDS = ("fastattn", "torch")  # the second is the default of sentence-transformers: here it is this one
# Keys of `model_kwargs`: arguments of `load`, and others that change no result here.
_LOADED = {"dtype", "weights_dtype", "activations", "gguf_file"}
_MOOT = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors")
_TYPES = ("float32", "float64", "bfloat16")
# Methods of sentence-transformers that are not here, and what is.
_ABSENT = {
    name: instead
    for names, instead in {
        "fit old_fit smart_batching_collate": "fastattn.train trains models",
        "save save_pretrained save_to_hub push_to_hub": "fastattn.models.save writes a folder",
        "half bfloat16 float dtype": 'model_kwargs={"dtype": ...} says the type',
        "cuda cpu compile gradient_checkpointing_enable": "it computes on CPUs, compiled",
        "forward transformers_model config processor": "`model` is the model of fastattn",
        "evaluate": "evaluators' own functions take arrays of `encode`",
    }.items()
    for name in names.split()
}


class Options(TypedDict, total=False):
    """Keyword arguments of every constructor, which `Base` documents."""

    modules: Any
    device: Any
    prompts: Mapping[str, str] | None
    default_prompt_name: str | None
    cache_folder: str | os.PathLike[str] | None
    trust_remote_code: bool
    revision: str | None
    local_files_only: bool
    token: bool | str | None
    model_kwargs: Mapping[str, Any] | None
    processor_kwargs: Mapping[str, Any] | None
    config_kwargs: Mapping[str, Any] | None
    model_card_data: Any
    backend: str


def renamed(**names: str) -> Callable[[Any], Any]:
    """Let a function take arguments by the names of older versions, too: old=new."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for old in given.keys() & names.keys():
                if names[old] in given:
                    raise TypeError(f"{function.__name__}(): {old} is {names[old]}; expected one of them")
                given[names[old]] = given.pop(old)
            return function(*args, **given)

        return call

    return decorate


class Base:
    """A model of `fastattn.models`, as `model`, under the names of sentence-transformers.

    Parameters
    ----------
    model_name_or_path : path or str
        A folder, or a name of the Hub.
    prompts, default_prompt_name : optional
        Prompts beside the folder's, or in their place; and the one that counts where a call says none.
    cache_folder, revision, local_files_only, token : optional
        Arguments of huggingface_hub; the first also from SENTENCE_TRANSFORMERS_HOME.
    model_kwargs : mapping, optional
        `dtype` or `torch_dtype`, `weights_dtype`, `activations`, `gguf_file`, as in `fastattn.models.load`.
        "auto" is the type in config.json where models can have it, else float32.
    processor_kwargs : mapping, optional
        `model_max_length`, the most tokens of a text.
    device, backend, trust_remote_code : optional
        "cpu"; "fastattn" or "torch", one thing here; no code of a repository is run, whatever it says.
    modules, config_kwargs, model_card_data : None
        They are refused.
    """

    prompts: dict[str, str]
    default_prompt_name: str | None
    _kinds: tuple[type[Any], ...]  # of `model`
    _organization: str | None = None  # of names without one

    def __init__(self, model_name_or_path: str | os.PathLike[str] | None, options: Options):
        name = type(self).__name__
        try:
            self.model: Any = self._loaded(model_name_or_path, options)
        except Exception as error:
            put_name(name, error)
            raise

    def _loaded(self, name: Any, options: Options) -> Any:
        """The model, and this object's settings."""
        taken: dict[str, Any] = {**dict.fromkeys(Options.__annotations__), **options}
        for word in options.keys() - Options.__annotations__.keys():
            own = (name for name in inspect.signature(type(self)).parameters if name != "options")
            expected = ", ".join((*own, *Options.__annotations__))
            raise TypeError(f"(): {word} is not an argument; expected one of {expected}")
        for word in ("modules", "config_kwargs", "model_card_data"):
            if taken[word]:
                raise ValueError(f"(): {word} is given; expected none: models are read from folders")
        if not isinstance(name, (str, os.PathLike)):
            raise wrong_type("model_name_or_path", name, "a folder or a name of the Hub")
        choice("backend", taken["backend"] or BACKENDS[0], BACKENDS)
        on_cpu(taken["device"])
        flag("trust_remote_code", taken["trust_remote_code"] or False)
        if self._organization and isinstance(name, str) and not os.path.exists(name) and "/" not in name:
            name = f"{self._organization}/{name}"
        given = taken["model_kwargs"] or {}
        how = {"dtype" if key == "torch_dtype" else key: x for key, x in given.items() if key not in _MOOT}
        for word in how.keys() - _LOADED:
            raise ValueError(
                f"(): model_kwargs has {word!r}; expected of {', '.join(sorted({*_LOADED, *_MOOT}))}"
            )
        on_cpu([x for x in [given.get("device_map")] if x != "auto"])
        hub = {
            "cache_dir": taken["cache_folder"] or os.environ.get("SENTENCE_TRANSFORMERS_HOME"),
            "local_files_only": flag("local_files_only", taken["local_files_only"] or False),
            "token": taken["token"],
        }
        place = place_of(name, taken["revision"], how.pop("gguf_file", None), **hub)
        model = load(place, **{**how, "dtype": _dtype(how.get("dtype"), place)})
        if not isinstance(model, self._kinds):
            kinds = " or ".join(kind.__name__ for kind in self._kinds)
            raise ValueError(f"(): the class of {place} is {type(model).__name__}; expected {kinds}")
        encoder = getattr(model, "encoder", model)
        given = {name: prompt or "" for name, prompt in (taken["prompts"] or {}).items()}
        self.prompts = {**encoder.prompts, **given}
        self.default_prompt_name = taken["default_prompt_name"] or encoder.default_prompt_name
        if self.default_prompt_name is not None:
            choice("default_prompt_name", self.default_prompt_name, self.prompts)
        processor = dict(taken["processor_kwargs"] or {})
        length = processor.pop("model_max_length", None)
        if processor:
            raise ValueError(
                f"(): processor_kwargs has {next(iter(processor))!r}; expected 'model_max_length'"
            )
        if length is not None:
            model.max_seq_length = length
        return model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    def __getattr__(self, name: str) -> Any:
        """Raise an error that says what stands in the place of what is not here."""
        instead = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"{type(self).__name__} has no {name}{instead}", name=name, obj=self)

    @property
    def max_seq_length(self) -> int | None:
        """The most tokens of a text; it can be set."""
        found: int | None = self.model.max_seq_length
        return found

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        self.model.max_seq_length = tokens

    def get_max_seq_length(self) -> int | None:
        """`max_seq_length`."""
        return self.max_seq_length

    @property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`; sentence-transformers has one of transformers here."""
        return self.model.text.tokenizer

    @property
    def device(self) -> str:
        """The device, "cpu"."""
        return "cpu"

    def to(self, device: Any) -> Any:
        """Return the model, which stays on the CPU; another device is refused."""
        try:
            on_cpu(device)
        except ValueError as error:
            put_name("to", error)
            raise
        return self

    def eval(self) -> Any:
        """Return the model, which is never in training."""
        return self

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> dict[str, Any]:
        """A pool without processes: one process uses all CPUs, so calls with a pool compute in place."""
        on_cpu(list(target_devices or ()))
        return {"input": None, "output": None, "processes": []}

    @staticmethod
    def stop_multi_process_pool(pool: Mapping[str, Any]) -> None:
        """End a pool, which has no processes."""

    def _prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """The prompt of a call."""
        if prompt is not None:
            if not isinstance(prompt, str):
                raise wrong_type("prompt", prompt, "a string")
            return prompt
        name = self.default_prompt_name if prompt_name is None else prompt_name
        return "" if name is None else self.prompts[choice("prompt_name", name, self.prompts)] or ""


def checked_call(
    batch_size: int, device: Any, others: Mapping[str, Any] | None = None, taken: Any = None
) -> int:
    """Check what every call takes; `others` of the function `taken` may have a task, and nothing else."""
    on_cpu(device)
    if others and others.keys() != {"task"}:
        raise ValueError(*not_an_argument(others, taken, "task").args)
    return integer("batch_size", batch_size, 1)


def on_cpu(device: Any) -> None:
    """Raise unless a device, or each of several, is the CPU: several are one here."""
    for each in device if isinstance(device, (list, tuple)) else [device]:
        if each is not None and str(each) not in ("cpu", "cpu:0"):
            raise ValueError(f"(): device is {short(str(each))}; expected 'cpu'")


def _dtype(given: Any, place: Path) -> str:
    """The type of a model, by a name, a type of torch or "auto"; by default float32."""
    name = str(given or "float32").removeprefix("torch.")
    if name != "auto":
        return choice("dtype of model_kwargs", name, _TYPES)
    config = Config(first_of(place)[1] / "config.json", optional=True).values
    said = config.get("dtype", config.get("torch_dtype"))
    return said if said in _TYPES else _TYPES[0]
