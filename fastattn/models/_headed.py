"""Models that are an encoder, and something else behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastattn.models._encoder import Encoder
    from fastattn.models._text import Text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Headed:
    """Their base."""

    encoder: Encoder

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return self.encoder.model_type

    @property
    def text(self) -> Text:
        """The tokenizer."""
        return self.encoder.text

    def _described(self, size: int) -> str:
        """What `repr` says of one that makes so many numbers."""
        return f"{repr(self.encoder)[:-1]}; {type(self).__name__} of {size}>"
