"""What a sentence-transformers folder says: what comes before the tokenizer, and behind the last layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.types import lane_dtype
from fastattn._args.values import choice, flag
from fastattn.functional._varlen import varlen_attention
from fastattn.models._files import Config, ModelError, is_name, read_json

if TYPE_CHECKING:
    from fastattn._args.types import Array, Ints

MODES = ("mean", "cls", "max", "lasttoken")
_FLAGS = {  # the keys of most files, each with true or false
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Sentences:
    """How a text is prepared for the tokenizer: put the prompt before it, strip it, make it lower case."""

    prompt: str = ""
    lower: bool = False

    @classmethod
    def of(cls, folder: Path) -> Sentences:
        """As the folder's two files say; the defaults where there are none."""
        lower = Config(folder / "sentence_bert_config.json", optional=True).get("do_lower_case", bool, False)
        config = Config(folder / "config_sentence_transformers.json", optional=True)
        name: Any = config.values.get("default_prompt_name")
        if name is None:
            return cls(lower=lower)
        prompt = config.get("prompts", dict, {}).get(name) if isinstance(name, str) else None
        if not isinstance(prompt, str):
            raise ModelError(f"{config.path}: 'default_prompt_name' is {name!r}; expected one of 'prompts'")
        return cls(prompt, lower)

    def __call__(self, text: str) -> str:
        """The text for the tokenizer."""
        stripped = (self.prompt + text).strip()
        return stripped.lower() if self.lower else stripped


@dataclass(frozen=True, slots=True)
class Pooling:
    """How hidden states become a vector: the mode, and whether it is scaled to length 1."""

    mode: str = "mean"
    normalize: bool = False

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """As modules.json and the pooling's own config.json say; the defaults where there are none."""
        path = folder / "modules.json"
        if not path.is_file():
            return cls()
        mode, normalize = "mean", False
        for module in read_json(path, list):
            kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
            if kind == "Pooling":
                name = module.get("path")
                if not is_name(name):
                    raise ModelError(f"{path}: 'path' of Pooling is {name!r}; expected a folder beside it")
                mode = _mode(folder / name / "config.json", bool(Sentences.of(folder).prompt))
            elif kind == "Normalize":
                normalize = True
            elif kind != "Transformer":
                raise ModelError(f"{path} has a module {kind!r}; expected Transformer, Pooling, Normalize")
        return cls(mode, normalize)

    def changed(self, func: str, mode: str | None, normalize: bool | None) -> Pooling:
        """The same with another mode or normalisation, where they are not None."""
        return Pooling(
            self.mode if mode is None else choice(func, "pooling", mode, MODES),
            self.normalize if normalize is None else flag(func, "normalize", normalize),
        )

    def __call__(self, rows: Array, begins: Ints) -> Array:
        """The vectors (sequences, features) of rows (tokens, features); sequence i is from begins[i] on."""
        n, features = len(begins) - 1, rows.shape[1]
        if self.mode == "mean":  # what attention with equal scores is; it runs on our threads
            score = np.zeros((1, 1, 1), rows.dtype)
            queries, keys = (np.broadcast_to(score, (m, 1, 1)) for m in (n, len(rows)))
            pooled: Array = varlen_attention(queries, keys, rows[:, None], np.arange(n + 1), begins)[:, 0]
        else:
            pooled = np.zeros((n, features), rows.dtype)
            some = begins[1:] > begins[:-1]
            if self.mode == "cls":
                pooled[some] = rows[begins[:-1][some]]
            elif self.mode == "lasttoken":
                pooled[some] = rows[begins[1:][some] - 1]
            else:
                pooled[some] = np.maximum.reduceat(rows, begins[:-1][some]) if some.any() else 0
        pooled = pooled.astype(lane_dtype(pooled.dtype), copy=False)
        if self.normalize:
            norm = np.sqrt(np.square(pooled).sum(axis=1, keepdims=True))
            pooled = pooled / np.maximum(norm, 1e-12)
        return pooled


def _mode(path: Path, has_prompt: bool) -> str:
    """The mode that a pooling's config.json says."""
    values = read_json(path)
    if has_prompt and values.get("include_prompt") is False:
        only = "only True is supported where there is a default prompt"
        raise ModelError(f"{path}: 'include_prompt' is False; {only}")
    set_flags = [name for name in values if name.startswith("pooling_mode_") and values[name] is True]
    said = [values.get("pooling_mode"), *(_FLAGS.get(name, name) for name in set_flags)]
    modes: list[str] = list(dict.fromkeys(str(mode) for mode in said if mode is not None))
    if len(modes) != 1 or modes[0] not in MODES:
        raise ModelError(f"{path} says {' and '.join(modes) or 'nothing'}; expected one of {MODES}")
    return modes[0]
