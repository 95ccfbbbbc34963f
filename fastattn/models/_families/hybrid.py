"""Readers that families with mixers in place of attention share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._args.channels import MOST_WIDTH
from fastattn.models._blocks import projection
from fastattn.models._files import ModelError

if TYPE_CHECKING:
    from fastattn.layers._block import Projection
    from fastattn.models._files import Config
    from fastattn.models._source import Source

ATTENTION = "full_attention"  # a kind of layers


def linear(source: Source, name: str, biased: bool = False) -> Projection:
    """The linear map `name`."""
    bias = source.vector(f"{name}.bias") if biased else None
    return projection(source, source.pack([f"{name}.weight"]), bias)


def require_decoder(source: Source) -> None:
    """Raise if the folder is that of an encoder, or of another task."""
    config = source.config
    said = config.values.get("architectures")
    first = str(next(iter(said), "")) if isinstance(said, list) else ""
    if first.endswith(("Classification", "QuestionAnswering")):
        raise config.wrong("architectures", said, "a language model")
    if source.has_modules:
        came = f"{source.folder / 'modules.json'} makes an encoder of it"
        raise ModelError(f"{came}; expected a language model, where layers are recurrent")
    config.refuse(is_causal=True)


def convolved_tokens(config: Config, key: str, usual: int) -> int:
    """Tokens that a convolution reads."""
    width = config.size(key, usual)
    if width > MOST_WIDTH:
        raise config.wrong(key, width, f"at most {MOST_WIDTH}")
    return width
