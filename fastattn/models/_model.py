"""What encoders and decoders have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from fastattn._engine.program import Program
    from fastattn.models._text import Text
    from fastattn.models._weights import Precision


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The base of `Bert` and `Decoder`."""

    model_type: str  # as in config.json
    hidden_size: int
    heads: int
    depth: int  # layers
    vocab_size: int
    program: Program  # of the layers
    precision: Precision
    text: Text

    @property
    def dtype(self) -> np.dtype[Any]:
        """What is computed in."""
        return self.precision.dtype

    @property
    def weights_dtype(self) -> str:
        """How the weights of linear maps are kept."""
        return self.precision.weights

    def __repr__(self) -> str:
        return f"<{self.model_type}: {self.depth} layers of {self.hidden_size}, {self.precision}>"
