"""Models that are an encoder, and something else behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fastattn.models import _training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike
    from typing_extensions import Self

    from fastattn._args.types import Array
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
