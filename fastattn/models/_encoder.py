"""Encoders: models whose hidden states become vectors of texts; `_bert.py` and its like build them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import dropout_of
from fastattn._args.errors import wrong_shape
from fastattn._args.values import flag
from fastattn._engine.tape import Drops, Tape, Value
from fastattn.models import _model
from fastattn.models._encode import Embedder
from fastattn.models._training import Recorded, pullback_of, required

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Ints
    from fastattn.grad import Pullback
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
        tokens, lengths, mask, types = self._arguments(input_ids, attention_mask, token_type_ids)
        rows = self._rows(tokens[_counted(mask)].reshape(-1), lengths, types)
        return _model.unpacked(rows, mask, (*tokens.shape, self.hidden_size))

    def _vjp(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        *,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Array, Pullback]:
        """Hidden states, as from a call, and their pullback: see `fastattn.grad.vjp`."""
        tokens, lengths, mask, types = self._arguments(input_ids, attention_mask, token_type_ids)
        drops = Drops(*dropout_of(self.model_type, dropout, seed))
        recorded = self._record(tokens[_counted(mask)].reshape(-1), lengths, types, checkpoint, drops)
        shape = (*tokens.shape, self.hidden_size)
        pullback = pullback_of(self.model_type, recorded, mask, shape)
        return _model.unpacked(recorded.out.array, mask, shape), pullback

    def _record(
        self, tokens: Ints, lengths: Ints, types: Ints | None, checkpoint: bool, drops: Drops
    ) -> Recorded:
        """`_rows` on a tape."""
        func = self.model_type
        if not self.program.has_gradients:
            raise NotImplementedError(f"{func}(): models of type {self.model_type} have no gradients yet")
        origin, checkpoint = required(func, self.origin), flag(func, "checkpoint", checkpoint)
        sequences, places = self.places(lengths, self.dtype, None)
        tape, x = Tape(drops=drops), Value(self.embeddings(tokens, places, types, self.dtype))
        out = self.program.on(tape, x, sequences, checkpoint)

        def finish() -> None:
            self.embeddings.add_gradients(tape.gradients, x.found(), tokens, places, types)
            self.places.add_gradients(tape.gradients, sequences)

        return Recorded(tape, out, finish, origin)

    def _arguments(
        self, input_ids: ArrayLike, attention_mask: ArrayLike | None, token_type_ids: ArrayLike | None
    ) -> tuple[Ints, Ints, Bools | None, Ints | None]:
        """Tokens, lengths and mask of a call, and the types of the tokens that count, end to end."""
        name, types = self.model_type, None
        tokens, lengths, mask = self._tokens(input_ids, attention_mask, self.max_length, "input_ids")
        if token_type_ids is not None:
            n_types = 1 if self.embeddings.types is None else len(self.embeddings.types)
            types = _model.token_ids(name, token_type_ids, n_types, "token_type_ids")
            if types.shape != tokens.shape:
                raise wrong_shape(name, "token_type_ids", types, tokens.shape)
        return tokens, lengths, mask, None if types is None else types[_counted(mask)].reshape(-1)

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


def _counted(mask: Bools | None) -> Any:
    return slice(None) if mask is None else mask
