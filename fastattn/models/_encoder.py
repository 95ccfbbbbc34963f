"""Encoders: models whose hidden states become vectors of texts; `_bert.py` and its like build them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn.models import _model
from fastattn.models._encode import Embedder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Ints
    from fastattn.models._embeddings import Embeddings, Places


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Encoder(Embedder):
    """An encoder: call it for hidden states, or `encode` texts with it."""

    max_length: int | None  # tokens of a sequence
    embeddings: Embeddings
    places: Places

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
    ) -> Array:
        """Hidden states of the last layer.

        Parameters
        ----------
        input_ids : array_like of int, (batch, length) or (length,)
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1: which tokens count. Padding may be on either side: positions are counted from the first
            token that counts.
        token_type_ids : array_like of int, (batch, length), optional
            0 for all by default.

        Returns
        -------
        ndarray, (batch, length, hidden_size)
            In the model's dtype; one sequence (length,) is a batch of one. 0 where a token does not count.
        """
        name, types = self.model_type, None
        tokens, lengths, mask = self._tokens(input_ids, attention_mask, self.max_length, "input_ids")
        if token_type_ids is not None:
            n_types = 1 if self.embeddings.types is None else len(self.embeddings.types)
            types = _model.token_ids(name, token_type_ids, n_types, "token_type_ids")
            if types.shape != tokens.shape:
                raise wrong_shape(name, "token_type_ids", types, tokens.shape)
        counted = slice(None) if mask is None else mask
        types = None if types is None else types[counted].reshape(-1)
        rows = self._rows(tokens[counted].reshape(-1), lengths, types)
        return _model.unpacked(rows, mask, (*tokens.shape, self.hidden_size))

    def hidden(
        self,
        sequences: Sequence[Ints],
        types: Sequence[Ints] | None = None,
        attended: Sequence[int] | None = None,
    ) -> tuple[Array, Ints]:
        """Hidden states of sequences end to end; see `Embedder.hidden`."""
        lengths = np.array([len(ids) for ids in sequences], np.int64)
        none = np.zeros(0, np.int64)
        tokens = np.concatenate([*sequences, none])
        counts = None if attended is None else np.array(attended, np.int64)
        rows = self._rows(tokens, lengths, None if types is None else np.concatenate([*types, none]), counts)
        return rows, np.append(0, np.cumsum(lengths))

    def _rows(self, tokens: Ints, lengths: Ints, types: Ints | None, attended: Ints | None = None) -> Array:
        """Hidden states (tokens, hidden_size) of sequences of `lengths` end to end."""
        sequences, places = self.places(lengths, self.dtype, attended)
        return self.program.run(self.embeddings(tokens, places, types, self.dtype), sequences)
