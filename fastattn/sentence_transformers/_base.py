"""What the classes share: constructors, prompts, devices, arrays and tensors."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from fastattn._args.errors import named, needed, wrong_type
from fastattn._args.options import require_options
from fastattn._args.types import Array
from fastattn._args.values import choice, flag, integer, short
from fastattn._args.words import not_an_argument
from fastattn.models import load
from fastattn.models._encode_calls import DOCUMENT, QUERY, Compared
from fastattn.models._files import Config
from fastattn.models._hub import place_of
from fastattn.models._modules import first_of
from fastattn.models._similarity import SIMILARITIES, similarities

BACKENDS = ("fastattn", "torch")  # the second is the default of sentence-transformers: here it is this one
# Keys of `model_kwargs`: arguments of `load`, and others that change no result here.
_LOADED = {"dtype", "weights_dtype", "activations", "gguf_file"}
_MOOT = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors")
_TYPES = ("float32", "float64", "bfloat16")


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
    """A model of `fastattn.models`, as `model`, with the interface of sentence-transformers.

    Parameters
    ----------
    model_name_or_path : path or str
        A folder, or a name of the Hub.
    prompts, default_prompt_name : optional
        Prompts added to the folder's, and the prompt of calls that name none.
    cache_folder, revision, local_files_only, token : optional
        Arguments of huggingface_hub; the cache also from SENTENCE_TRANSFORMERS_HOME.
    model_kwargs : mapping, optional
        `dtype` or `torch_dtype`, `weights_dtype`, `activations`, `gguf_file`, as in `fastattn.models.load`.
        "auto" selects the type in config.json if models can have it, else float32.
    processor_kwargs : mapping, optional
        `model_max_length`, the maximum number of tokens of a text.
    device, backend, trust_remote_code : optional
        "cpu"; "fastattn" or "torch", which are the same here; no effect, as code of a repository never runs.
    modules, config_kwargs, model_card_data : None
        Not supported.
    """

    prompts: dict[str, str]
    default_prompt_name: str | None
    _kinds: tuple[type[Any], ...]  # of `model`
    _organization: str | None = None  # of names without one

    @named("{cls}")
    def __init__(self, name: Any, options: Options):
        taken: dict[str, Any] = {**dict.fromkeys(Options.__annotations__), **options}
        own = (name for name in inspect.signature(type(self)).parameters if name != "options")
        require_options(options, Options, *own)
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
            known = ", ".join(sorted({*_LOADED, *_MOOT}))
            raise ValueError(f"(): model_kwargs has {word!r}; expected one of {known}")
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
            came = f"processor_kwargs has {next(iter(processor))!r}"
            raise ValueError(f"(): {came}; expected 'model_max_length'")
        if length is not None:
            model.max_seq_length = length
        self.model: Any = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    @property
    def max_seq_length(self) -> int | None:
        """Maximum number of tokens of a text; can be set."""
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
        """The `tokenizers.Tokenizer`; in sentence-transformers a tokenizer of transformers."""
        return self.model.text.tokenizer

    @property
    def device(self) -> str:
        """The device, "cpu"."""
        return "cpu"

    @named("to")
    def to(self, device: Any) -> Any:
        """Return the model, which stays on the CPU; other devices raise."""
        on_cpu(device)
        return self

    def eval(self) -> Any:
        """Return the model, which is always in inference mode."""
        return self

    def _call(
        self,
        taken: Any,
        prompt_name: str | None,
        prompt: str | None,
        batch_size: int,
        progress: bool | None,
        device: Any,
        others: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Checked options of the model's function; `others`, of the method `taken`, may only be a task."""
        on_cpu(device)
        if others and others.keys() != {"task"}:
            raise ValueError(*not_an_argument(others, taken, "task").args)
        if prompt is None:
            name = self.default_prompt_name if prompt_name is None else prompt_name
            prompt = "" if name is None else self.prompts[choice("prompt_name", name, self.prompts)] or ""
        elif not isinstance(prompt, str):
            raise wrong_type("prompt", prompt, "a string")
        size = integer("batch_size", batch_size, 1)
        return {"prompt": prompt, "batch_size": size, "show_progress_bar": progress}


class Vectors(Compared, Base):
    """The base of `SentenceTransformer` and `SparseEncoder`: queries, documents and similarities."""

    encode: Callable[..., Any]

    def __init__(self, model_name_or_path: Any, options: Options, similarity_fn_name: Any):
        super().__init__(model_name_or_path, options)
        usual = self.model.similarity_fn_name
        self.similarity_fn_name = usual if similarity_fn_name is None else similarity_fn_name

    @property
    def similarity_fn_name(self) -> str:
        """Name of the measure of `similarity`; can be set, also to a member of their enum."""
        return self._similarity

    @similarity_fn_name.setter
    @named("{cls}")
    def similarity_fn_name(self, name: Any) -> None:
        name = getattr(name, "value", name)
        self._similarity = choice("similarity_fn_name", name or SIMILARITIES[0], SIMILARITIES)

    def get_embedding_dimension(self) -> int:
        """Features of a vector."""
        features: int = self.model.get_sentence_embedding_dimension()
        return features

    def get_sentence_embedding_dimension(self) -> int:
        """`get_embedding_dimension` under its older name."""
        return self.get_embedding_dimension()

    @renamed(sentences="inputs")
    def encode_query(self, inputs: Any, *more: Any, **options: Any) -> Any:
        """Encode queries: `encode` with the task and, by default, the prompt "query"."""
        return self._of_task("query", QUERY, inputs, *more, **options)

    @renamed(sentences="inputs")
    def encode_document(self, inputs: Any, *more: Any, **options: Any) -> Any:
        """Encode documents; the default prompt is "document", "passage" or "corpus", the first there is."""
        return self._of_task("document", DOCUMENT, inputs, *more, **options)

    def _of_task(
        self,
        task: str,
        names: Sequence[str],
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """`encode` for a task; without another prompt with the first of the prompts `names` that exists."""
        if prompt_name is None and prompt is None:
            prompt_name = next((name for name in names if name in self.prompts), None)
        return self.encode(inputs, prompt_name, prompt, *more, **options, task=task)


def on_cpu(device: Any) -> None:
    """Raise unless a device, or each of several, is the CPU."""
    for each in device if isinstance(device, (list, tuple)) else [device]:
        if each is not None and str(each) not in ("cpu", "cpu:0"):
            raise ValueError(f"(): device is {short(str(each))}; expected 'cpu'")


def _dtype(given: Any, place: Path) -> str:
    """Dtype of a model, from a name, a dtype of torch or "auto"; by default float32."""
    name = str(given or "float32").removeprefix("torch.")
    if name != "auto":
        return choice("dtype of model_kwargs", name, _TYPES)
    config = Config(first_of(place)[1] / "config.json", optional=True).values
    said = config.get("dtype", config.get("torch_dtype"))
    return said if said in _TYPES else _TYPES[0]


def torch_of(reason: str) -> Any:
    """The module torch, where a tensor is asked for."""
    return needed("torch", f"(): {reason} needs torch", "pip install torch")


def is_tensor(x: Any) -> bool:
    """Tell whether x is a tensor of torch, without importing it."""
    return type(x).__module__.partition(".")[0] == "torch"


def arrays_of(name: str, x: Any) -> tuple[Any, bool]:
    """`x`, the argument `name`, an array or tensor or a list, in NumPy; and whether it was of torch."""
    if is_tensor(x):
        return x.detach().cpu().float().numpy() if x.is_floating_point() else x.cpu().numpy(), True
    if isinstance(x, (list, tuple)) and any(map(is_tensor, x)):
        rows = [arrays_of(name, each)[0] for each in x]
        if len({np.shape(row) for row in rows}) > 1:
            raise ValueError(f"(): {name} has vectors of different shapes; expected one shape")
        return np.stack(rows), True
    return x, False


def as_asked(x: Array, one: bool, to_numpy: bool, to_tensor: bool) -> Any:
    """Array x (n, ...) as it is, as a tensor, or a list of n tensors; without rows, of the shape (0,).

    With `one`, x is a single row, and so is the result.
    """
    x = np.asarray(x)[None] if one else x
    found: Any = x if len(x) else np.array([])
    if to_tensor:
        torch = torch_of("convert_to_tensor=True")
        found = torch.from_numpy(x) if len(x) else torch.tensor([])
    elif not to_numpy:
        found = list(torch_of("convert_to_numpy=False").from_numpy(x)) if len(x) else []
    return found[0] if one else found


def returned(x: Array, of_torch: bool) -> Any:
    """`x`, or a tensor of it."""
    return torch_of("a tensor").from_numpy(x) if of_torch else x


def compared(
    kind: str, a: Any, b: Any, pairwise: bool, names: tuple[str, str] = ("embeddings1", "embeddings2")
) -> Any:
    """Similarity `kind` of vectors, the arguments `names`: an array, or a tensor if either is of torch."""
    (x, first), (y, second) = arrays_of(names[0], a), arrays_of(names[1], b)
    return returned(similarities(kind, x, y, pairwise, names), first or second)
