"""Settings in a sentence-transformers folder: prompts, similarity, and the modules after the last layer.

Of ``rows`` (tokens, features), ``rows[cu_seqlens[i] : cu_seqlens[i + 1]]`` are the hidden states of text i.
Pooling makes one vector of them, and the other modules change that vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.packed import PackedLinear
from fastattn._args.types import Activation, Array, Ints, Rounding, lane_dtype
from fastattn._args.values import choice, short
from fastattn.models._files import Config, ModelError, sentences_config
from fastattn.models._modules import (
    AFTER_POOLING,
    SPARSE_STATIC,
    STATIC,
    is_multi_vector,
    modules_of,
    task_of,
)
from fastattn.models._parameters import Precision
from fastattn.models._similarity import SIMILARITIES, unit
from fastattn.models._source import Rows, Source
from fastattn.models._text import string
from fastattn.models._tokenizers import LENGTHS, check_transformer

Module = Callable[[Array], Array]  # of vectors (n, features)


class PoolingMode(NamedTuple):
    """A way to make one vector of a text's tokens (length, features), and the way back."""

    vector: Callable[[Array, int], Array]  # of the tokens, and of how many before them were left out
    gradient: Callable[[Array, Array], Array]  # by the tokens, all of the text, from that by the vector


def _weighted_mean(tokens: Array, before: int) -> Array:
    """The mean with the weight i for token i of the text, counted from 1."""
    weights = np.arange(before + 1, before + 1 + len(tokens), dtype=tokens.dtype)
    mean: Array = (tokens * weights[:, None]).sum(axis=0) / weights.sum()
    return mean


def _at(row: int) -> PoolingMode:
    def gradient(tokens: Array, dvector: Array) -> Array:
        dtokens = np.zeros_like(tokens)
        dtokens[row] = dvector
        return dtokens

    return PoolingMode(lambda tokens, before: tokens[row], gradient)


def _weighted(vector: Callable[[Array, int], Array], weights: Callable[[int], Any]) -> PoolingMode:
    """A sum whose `weights` follow from the number of tokens."""

    def gradient(tokens: Array, dvector: Array) -> Array:
        shares = np.asarray(weights(len(tokens)), tokens.dtype)
        return np.broadcast_to(shares[:, None] * dvector, tokens.shape)

    return PoolingMode(vector, gradient)


def _of_largest(tokens: Array, dvector: Array) -> Array:
    """Give the gradient to the first of equal ones, as `argmax` finds it."""
    dtokens = np.zeros_like(tokens)
    np.put_along_axis(dtokens, tokens.argmax(axis=0)[None], dvector[None], axis=0)
    return dtokens


POOLINGS = {
    "cls": _at(0),
    "max": PoolingMode(lambda tokens, before: tokens.max(axis=0), _of_largest),
    "mean": _weighted(lambda tokens, before: tokens.mean(axis=0), lambda n: np.full(n, 1 / n)),
    "mean_sqrt_len_tokens": _weighted(
        lambda tokens, before: tokens.sum(axis=0) / np.sqrt(tokens.dtype.type(len(tokens))),
        lambda n: np.full(n, n**-0.5),
    ),
    "weightedmean": _weighted(_weighted_mean, lambda n: np.arange(1, n + 1) / (n * (n + 1) / 2)),
    "lasttoken": _at(-1),
}
_FLAGS = {  # the keys of most files, each with true or false; several modes stand in this order
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Classes of torch.nn that a Dense module may name, and their names in `ops.linear`.
ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "Tanh": None,  # which follows the kernel
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of the hidden states of each text to one vector; several modes are concatenated."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True  # whether a prompt's tokens count

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """Read it from the folder's config.json."""
        config = Config(folder / "config.json")
        said: Any = config.values.get("pooling_mode")
        if said is None:
            said = [mode for name, mode in _FLAGS.items() if config.get(name, bool, False)]
            said = said or ["mean"]
        modes = said if isinstance(said, list) else [said]
        if not modes or not all(isinstance(mode, str) and mode in POOLINGS for mode in modes):
            raise config.wrong("pooling_mode", said, f"one or several of {', '.join(POOLINGS)}")
        return cls(tuple(modes), config.get("include_prompt", bool, True))

    def __call__(self, rows: Array, cu_seqlens: Ints, prompt_length: int = 0) -> Array:
        """Vectors (n, modes * features) in the lane type; a text that has no token gets zeros."""
        lane, before = lane_dtype(rows.dtype), 0 if self.include_prompt else prompt_length
        pooled = np.zeros((len(cu_seqlens) - 1, len(self.modes), rows.shape[1]), lane)
        ends = cu_seqlens.tolist()
        for vectors, begin, end in zip(pooled, ends, ends[1:], strict=False):
            tokens = rows[begin + before : end].astype(lane, copy=False)
            if len(tokens):
                for vector, mode in zip(vectors, self.modes, strict=True):
                    vector[:] = POOLINGS[mode].vector(tokens, before)
        return pooled.reshape(len(pooled), len(self.modes) * rows.shape[1])

    def gradient(self, rows: Array, cu_seqlens: Ints, dvectors: Array) -> Array:
        """The gradient of rows (tokens, features), from that of their vectors, without a prompt."""
        drows = np.zeros_like(rows)
        apart = dvectors.reshape(len(dvectors), len(self.modes), rows.shape[1])
        for dvector, begin, end in zip(apart, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            for each, mode in zip(dvector, self.modes, strict=True):
                if end > begin:
                    drows[begin:end] += POOLINGS[mode].gradient(rows[begin:end], each)
        return drows


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """``activation(x @ weight.T + bias)``; in some folders plus x, or plus another linear map of it."""

    weight: PackedLinear
    bias: Array | None
    activation: Activation | None = None
    residual: PackedLinear | bool = False  # True: x itself
    tanh: bool = False  # in place of an activation of the kernel's
    rounded: Rounding | None = None  # what x is rounded to

    @classmethod
    def of(cls, folder: Path, features: int, dtype: np.dtype[Any]) -> tuple[Dense, int]:
        """Read it from the folder; return it and the number of features that it makes of `features`."""
        config = Config(folder / "config.json")
        n_in, n_out = config.size("in_features"), config.size("out_features")
        _require_features(config, "in_features", n_in, features)
        biased, added = config.get("bias", bool, True), config.get("use_residual", bool, False)
        name = config.get("activation_function", str, "torch.nn.modules.activation.Tanh")
        activation = name.rpartition(".")[2]
        if activation not in ACTIVATIONS:
            raise config.wrong("activation_function", name, f"one of {', '.join(ACTIVATIONS)}")
        with ExitStack() as stack:
            source = Source(folder, config, Precision(dtype, dtype.name), stack)

            def read() -> Dense:
                weight = source.pack([Rows("linear.weight", (n_out, n_in))])
                bias = source.vector(Rows("linear.bias", (n_out,))) if biased else None
                residual: Any = added
                if added and n_in != n_out:
                    residual = source.pack([Rows("residual.weight", (n_out, n_in))])
                return cls(weight, bias, ACTIVATIONS[activation], residual, activation == "Tanh")

            return source.checked(read, own=("linear.", "residual.")), n_out

    def __call__(self, x: Array) -> Array:
        """The vectors (n, out_features) of vectors (n, in_features)."""
        y = ops.linear(x, self.weight, self.bias, activation=self.activation, activations=self.rounded)
        if self.tanh:
            np.tanh(y, out=y)
        if self.residual is True:
            y += x
        elif self.residual is not False:
            y += ops.linear(x, self.residual)
        return y


def applied(modules: Iterable[Module], x: Array) -> Array:
    """Run vectors x (n, features) through modules one after another."""
    for module in modules:
        x = module(x)
    return x


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Norm of each vector: features at mean 0 and variance 1, times weight, plus bias."""

    weight: Array
    bias: Array | None
    eps: float = 1e-5

    @classmethod
    def of(cls, folder: Path, features: int, dtype: np.dtype[Any]) -> tuple[LayerNorm, int]:
        """Read it, as `Dense.of` does."""
        config = Config(folder / "config.json")
        _require_features(config, "dimension", config.size("dimension"), features)
        with ExitStack() as stack:
            source = Source(folder, config, Precision(dtype, dtype.name), stack)
            weight, bias = (Rows(f"norm.{part}", (features,)) for part in ("weight", "bias"))
            return source.checked(lambda: cls(source.vector(weight), source.vector(bias))), features

    def __call__(self, x: Array) -> Array:
        """The vectors (n, features), normalised."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Vectors of length 1."""

    @classmethod
    def of(cls, folder: Path, features: int, dtype: np.dtype[Any]) -> tuple[Normalize, int]:
        """Make it, as `Dense.of` does; there is no file."""
        return cls(), features

    def __call__(self, x: Array) -> Array:
        """The vectors (n, features), scaled."""
        return unit(x)


_MODULES: dict[str, Any] = dict(zip(AFTER_POOLING, (Dense, LayerNorm, Normalize), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Sentences:
    """Settings of an encoder's texts and vectors; in a folder without such files, the mean of the tokens."""

    pooling: Pooling
    modules: tuple[Dense | LayerNorm | Normalize, ...]  # after it, one after another
    features: int  # of a vector
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    truncate_dim: int | None

    @classmethod
    def of(cls, source: Source, features: int, towers: bool = False) -> Sentences:
        """Read them from the folder of modules.json, for hidden states of so many `features`.

        Of two `towers`, these are vectors of texts and images, and nothing pools them.
        """
        pooling, modules, folder = Pooling(), [], source.outer
        lane, named = source.precision.lane, modules_of(folder, source.route, towers)
        by_token = is_multi_vector(named)
        level = "token_embeddings" if by_token else "sentence_embedding"
        if not towers and (not named or named[0][0] not in (STATIC, SPARSE_STATIC)):
            check_transformer(source.folder, task_of(folder, named), LENGTHS if by_token else ())
        for kind, inner in named:
            if kind == "Pooling":
                pooling = Pooling.of(inner)
                features *= len(pooling.modes)
            elif kind in _MODULES:
                config = Config(inner / "config.json", optional=True)
                config.refuse(module_input_name=level, module_output_name=level)
                module, features = _MODULES[kind].of(inner, features, lane)
                modules.append(module)
        config = sentences_config(folder)
        prompts = _prompts(config)
        default = config.values.get("default_prompt_name")
        if default is not None and not (isinstance(default, str) and default in prompts):
            expected = f"one in 'prompts': {', '.join(map(short, prompts))}"
            raise config.wrong("default_prompt_name", default, expected)
        similarity = "cosine" if by_token else config.one_of("similarity_fn_name", SIMILARITIES, "cosine")
        truncate_dim = config.optional_size("truncate_dim")
        return cls(pooling, tuple(modules), features, prompts, default, similarity, truncate_dim)

    def prompt(self, name: Any, prompt: Any, names: tuple[str, ...] = ()) -> str:
        """Prompt that a call puts before a text; `names` come before the default one."""
        if prompt is None:
            if name is None:
                name = next((name for name in names if name in self.prompts), self.default_prompt_name)
            return "" if name is None else self.prompts[choice("prompt_name", name, self.prompts)]
        return string("prompt", prompt)

    def vectors(self, rows: Array, cu_seqlens: Ints, prompt_length: int) -> Array:
        """Vectors of texts, (n, features) in the lane type, from their hidden states."""
        return self.after_pooling(self.pooling(rows, cu_seqlens, prompt_length))

    def after_pooling(self, pooled: Array) -> Array:
        """Run pooled vectors (n, features) through the modules."""
        return applied(self.modules, pooled)


def _prompts(config: Config) -> dict[str, str]:
    """The prompts by their names; sentence-transformers knows an empty one for queries and documents."""
    prompts = {"query": "", "document": ""}
    for name, prompt in config.get("prompts", dict, {}).items():
        if not isinstance(prompt, str | None):
            raise ModelError(f"{config.path}: prompt {short(name)} is {short(prompt)}; expected a string")
        prompts[name] = prompt or ""
    return prompts


def _require_features(config: Config, key: str, size: int, features: int) -> None:
    """Raise unless a module takes the vectors that the one before it makes."""
    if size != features:
        raise config.wrong(key, size, f"{features}, which the module before it makes")
