"""Bodies of requests, checked: OpenAI's, and those of text-embeddings-inference."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fastattn.serve._service import MOST_ITEMS


class Body(BaseModel):
    """The base of all: no field is taken with which nothing would be done."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def no_other(cls, values: Any) -> Any:
        """Refuse the first field that there is not: a list of all would take seconds to make."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    values = {"name": name[:80], "expected": ", ".join(cls.model_fields)}
                    text = "there is no such field; expected {expected}"
                    raise PydanticCustomError("no_such_field", text, values)
        return values


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {type(value).__name__}; expected a text (token ids are not taken)")
    return value


def _texts(value: Any, several: str = "texts") -> list[Any]:
    """A text, or a list of them, as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_ITEMS:
        came = f"a list of {len(texts)}" if isinstance(texts, list) else type(texts).__name__
        raise ValueError(f"got {came}; expected a text, or a list of 1 to {MOST_ITEMS} {several}")
    return texts


def _several(value: Any) -> list[str]:
    if isinstance(value, str):
        raise ValueError("got a text; expected a list of texts")
    return [_text(text, f"item {i}") for i, text in enumerate(_texts(value))]


def _full(texts: list[str]) -> list[str]:
    if "" in texts:
        raise ValueError(f"item {texts.index('')} is empty; expected at least one character")
    return texts


class Embeddings(Body):
    """POST /v1/embeddings."""

    input: Any
    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None  # OpenAI's clients may send it; nothing is done with it

    @field_validator("input")
    @classmethod
    def texts(cls, value: Any) -> list[str]:
        return _full([_text(text, f"item {i}") for i, text in enumerate(_texts(value))])

    @field_validator("encoding_format")
    @classmethod
    def known(cls, value: str) -> str:
        if value not in ("float", "base64"):
            raise ValueError(f"got {value[:40]!r}; expected 'float' or 'base64'")
        return value


class Cut(Body):
    """Whether texts that are too long are cut: in all bodies of text-embeddings-inference."""

    truncate: bool | None = None
    truncation_direction: str = "Right"

    @field_validator("truncation_direction")
    @classmethod
    def right(cls, value: str) -> str:
        if value not in ("Right", "right"):
            raise ValueError(f"got {value[:40]!r}; expected 'Right': texts are cut as the model's files say")
        return value


class Embed(Cut):
    """POST /embed."""

    inputs: Any
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = Field(default=None, ge=1)

    @field_validator("inputs")
    @classmethod
    def texts(cls, value: Any) -> list[str]:
        return _full([_text(text, f"item {i}") for i, text in enumerate(_texts(value))])


class Sentences(Body):
    """The texts of `Similarity`."""

    source_sentence: str
    sentences: Any

    @field_validator("sentences")
    @classmethod
    def several(cls, value: Any) -> list[str]:
        return _several(value)


class Parameters(Cut):
    """Options of `Similarity`."""

    prompt_name: str | None = None


class Similarity(Body):
    """POST /similarity."""

    inputs: Sentences
    parameters: Parameters = Parameters()


class Rerank(Cut):
    """POST /rerank."""

    query: str
    texts: Any
    raw_scores: bool = False
    return_text: bool = False

    @field_validator("texts")
    @classmethod
    def several(cls, value: Any) -> list[str]:
        return _several(value)


class Predict(Cut):
    """POST /predict: of a text, a pair [text, text], or a list of these, each in a list."""

    inputs: Any
    raw_scores: bool = False

    @field_validator("inputs")
    @classmethod
    def pairs(cls, value: Any) -> tuple[bool, list[str | tuple[str, ...]]]:
        """Whether there is one item, and all of them."""
        one = isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value))
        items = [[value] if isinstance(value, str) else value] if one and value else _texts(value, "pairs")
        found: list[str | tuple[str, ...]] = []
        for i, item in enumerate(items):
            texts = [item] if isinstance(item, str) else item
            if not isinstance(texts, list) or len(texts) not in (1, 2):
                raise ValueError(f"item {i} is no text and no pair; expected [text] or [text, text]")
            checked = tuple(_text(text, f"item {i}") for text in texts)
            found.append(checked[0] if len(checked) == 1 else checked)
        return one, found
