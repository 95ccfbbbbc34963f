"""What encoders and decoders have in common: their properties, and batches of sequences of any lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.values import as_array, integers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Ints, Rounding
    from fastattn._engine.program import Program
    from fastattn.models._text import Text
    from fastattn.models._weights import Precision


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The base of `Encoder` and `Decoder`."""

    model_type: str  # as in config.json
    hidden_size: int
    num_heads: int
    num_layers: int  # layers
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

    @property
    def activations(self) -> Rounding | None:
        """What the inputs of linear maps are rounded to."""
        return self.precision.activations

    def __repr__(self) -> str:
        return f"<{self.model_type}: {self.num_layers} layers of {self.hidden_size}, {self.precision}>"

    def _tokens(
        self, ids: ArrayLike, mask: ArrayLike | None, longest: int | None
    ) -> tuple[Ints, Ints | None, Ints | None]:
        """The ids (batch, length) of a call, checked, in the order of `align`; and what that returns."""
        tokens = token_ids(self.model_type, ids, self.vocab_size)
        if longest is not None and tokens.shape[1] > longest:
            came = f"{tokens.shape[1]} tokens in a sequence"
            raise ValueError(f"{self.model_type}(): {came}; expected at most {longest}")
        lengths, order = align(attended(self.model_type, mask, tokens))
        return reorder(tokens, order), lengths, order


def token_ids(func: str, ids: ArrayLike, vocab_size: int, name: str = "ids") -> Ints:
    """`ids`, the argument `name`, as (batch, length); a single sequence is a batch of one."""
    array = _rectangular(func, name, ids)
    if array.dtype.kind == "U":
        raise TypeError(f"{func}(): {name} is text; expected ids, as text.encode([...]) makes them")
    if array.size == 0:
        array = np.zeros(array.shape, np.int64)
    if array.ndim not in (1, 2):
        raise wrong_shape(func, name, array, "(batch, length) or (length,)")
    return np.atleast_2d(integers(func, name, array, low=0, high=vocab_size - 1))


def attended(func: str, mask: ArrayLike | None, ids: Ints) -> Bools | None:
    """`mask`, 1 or True for each token that counts, as (batch, length) of bool; None if all do."""
    if mask is None:
        return None
    array = _rectangular(func, "attention_mask", mask)
    if array.dtype.kind not in "biu" or (array.dtype.kind != "b" and not ((array == 0) | (array == 1)).all()):
        raise TypeError(f"{func}(): attention_mask is of {array.dtype}; expected bool, or integers 0 and 1")
    bools: Bools = np.atleast_2d(array).astype(np.bool_, copy=False)
    if bools.shape != ids.shape:
        raise wrong_shape(func, "attention_mask", bools, f"ids', {ids.shape}")
    return None if bools.all() else bools


def _rectangular(func: str, name: str, x: Any) -> Array:
    """`x` as an array; NumPy cannot make one of lists of different lengths."""
    try:
        return as_array(func, name, x)
    except TypeError:
        rows = x if isinstance(x, (list, tuple)) else ()
        if len({len(row) if hasattr(row, "__len__") else -1 for row in rows}) < 2:
            raise
        came = f"{name} has sequences of different lengths"
        expected = "one length: pad them, and pass an attention_mask that is 0 at the padding"
        raise ValueError(f"{func}(): {came}; expected {expected}") from None


def align(mask: Bools | None) -> tuple[Ints | None, Ints | None]:
    """How many tokens of each sequence count, (batch,), and the order that puts these before the others.

    The order, (batch, length), is for `reorder`. So padding on the left or between tokens becomes padding on
    the right, which is the only one that models know. Without a mask both are None; the order is None, too,
    if nothing has to move.
    """
    if mask is None:
        return None, None
    lengths: Ints = mask.sum(axis=1)
    if np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]):
        return lengths, None
    return lengths, np.argsort(~mask, axis=1, kind="stable")


def reorder(x: Array, order: Ints | None) -> Array:
    """The tokens of each sequence of x (batch, length, ...) in the order (batch, length)."""
    return x if order is None else x[np.arange(len(x))[:, None], order]


def restore(x: Array, order: Ints | None) -> Array:
    """Undo `reorder`."""
    return reorder(x, None if order is None else np.argsort(order, axis=1))


def pad(sequences: Sequence[Sequence[int] | Ints]) -> tuple[Ints, Bools]:
    """Sequences of ids as one array, padded on the right, and which of it counts; both (batch, length)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ids = np.zeros((len(sequences), max(lengths, default=0)), np.int64)
    mask: Bools = np.arange(ids.shape[1]) < lengths[:, None]
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, mask
