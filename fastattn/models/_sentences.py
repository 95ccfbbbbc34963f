"""What a sentence-transformers folder does with a text before it is cut into tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastattn.models._files import Config, ModelError, read_json

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sentences:
    """Texts as sentence-transformers hands them to the tokenizer: in this order prompt, strip, lower."""

    prompt: str = ""
    lower: bool = False

    @classmethod
    def of(cls, folder: Path) -> Sentences:
        """What the folder's two files say; the defaults where there are none."""
        lower = _config(folder / "sentence_bert_config.json").flag("do_lower_case", False)
        config = _config(folder / "config_sentence_transformers.json")
        name: Any = config.values.get("default_prompt_name")
        if name is None:
            return cls(lower=lower)
        prompt = config.table("prompts").get(name) if isinstance(name, str) else None
        if not isinstance(prompt, str):
            raise ModelError(f"{config.path}: 'default_prompt_name' is {name!r}; expected one of 'prompts'")
        return cls(prompt, lower)

    def __call__(self, text: str) -> str:
        """The text as the tokenizer gets it."""
        stripped = (self.prompt + text).strip()
        return stripped.lower() if self.lower else stripped


def _config(path: Path) -> Config:
    return Config(path, read_json(path) if path.is_file() else {})
