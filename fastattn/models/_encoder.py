"""Encoders: models whose hidden states become vectors of texts; `_bert.py` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastattn import ops
from fastattn._args.errors import wrong_shape
from fastattn._engine.program import Sequences
from fastattn.models import _model
from fastattn.models._encode import Embedder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Ints


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Encoder(Embedder):
    """An encoder: call it for hidden states, or `encode` texts with it."""

    max_length: int  # tokens of a sequence
    tokens: Array  # (vocab_size, hidden_size), as in the file
    token_types: Array  # (types, hidden_size), like `positions` in the type of the computation
    positions: Array  # (max_length, hidden_size), the first token type's vector added

    def __call__(
        self, ids: ArrayLike, attention_mask: ArrayLike | None = None, token_type_ids: ArrayLike | None = None
    ) -> Array:
        """Hidden states of the last layer.

        Parameters
        ----------
        ids : array_like of int, (batch, length) or (length,)
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1: which tokens count. Padding may be on either side: positions are counted from the first
            token that counts.
        token_type_ids : array_like of int, (batch, length), optional
            0 for all by default.

        Returns
        -------
        ndarray, (batch, length, hidden_size)
            In the model's dtype; one sequence (length,) is a batch of one. Where a token does not count, the
            result has no meaning.
        """
        name, types = self.model_type, None
        tokens, lengths, order = self._tokens(ids, attention_mask, self.max_length)
        if token_type_ids is not None:
            types = _model.token_ids(name, token_type_ids, len(self.token_types), "token_type_ids")
            if types.shape != tokens.shape:
                raise wrong_shape(name, "token_type_ids", types, tokens.shape)
        batch, length = tokens.shape
        x = ops.embedding(tokens, self.tokens).astype(self.dtype, copy=False)
        x += self.positions[:length]
        if types is not None:
            x += (self.token_types - self.token_types[0])[_model.reorder(types, order)]
        ranges = (None, None if lengths is None else lengths[:, None, None])
        out = self.program.run(x.reshape(batch * length, self.hidden_size), Sequences(batch, (ranges,)))
        return _model.restore(out.reshape(batch, length, self.hidden_size), order)

    def hidden(self, sequences: Sequence[Ints], types: Sequence[Ints] | None = None) -> tuple[Array, Ints]:
        """Hidden states of sequences end to end; see `Embedder.hidden`."""
        given: Sequence[Ints | None] = [None] * len(sequences) if types is None else types
        rows = [self(ids, None, type_ids)[0] for ids, type_ids in zip(sequences, given, strict=True)]
        rows.append(np.empty((0, self.hidden_size), self.dtype))
        return np.concatenate(rows), np.cumsum([0, *map(len, sequences)])
