"""Models that are an encoder, and something else behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fastattn.models import _model, _training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike
    from typing_extensions import Self

    from fastattn._args.types import Array
    from fastattn.models._encoder import Encoder
    from fastattn.models._text import Text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Headed(_model.Fixed):
    """Their base."""

    encoder: Encoder
    _pairs: ClassVar[bool] = False  # whether two texts may become one sequence

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return self.encoder.model_type

    @property
    def text(self) -> Text:
        """The tokenizer."""
        return self.encoder.text

    @property
    def max_seq_length(self) -> int | None:
        """The most tokens of a text, or of a pair; it can be set: see `Encoder.max_seq_length`."""
        return self.text.limit

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        self._replace_text(self.text.shortened(type(self).__name__, tokens, self._pairs))

    def _replace_text(self, text: Text) -> None:
        object.__setattr__(self.encoder, "text", text)

    def state_dict(self) -> dict[str, Array]:
        """The tensors of encoder and head; see `Encoder.state_dict`."""
        return self.encoder.state_dict()

    def with_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> Self:
        """The same model with other tensors; see `Encoder.with_state_dict`."""
        from fastattn.models._load import rebuilt  # it imports all models

        func = "with_state_dict"
        origin = _training.required(func, self.encoder.origin)
        state = _training.checked_state(func, origin, state_dict)
        model = rebuilt(origin, state, headed=True)
        found: Self = replace(model, encoder=replace(model.encoder, text=self.text))
        return found

    def _described(self, size: int) -> str:
        """What `repr` says of one that makes so many numbers."""
        return f"{repr(self.encoder)[:-1]}; {type(self).__name__} of {size}>"
