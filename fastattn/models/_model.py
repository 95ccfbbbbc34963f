"""Base of encoders and decoders: their properties, batches of sequences of any lengths, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastattn._args.attention import dropout_of
from fastattn._args.errors import named, wrong_shape
from fastattn._args.ops import cotangent, rows
from fastattn._args.types import Array, ArrayLike, Bools, Ints, Rounding, Self, Shape
from fastattn._args.values import as_array, flag, integers
from fastattn._engine.program import Program
from fastattn._engine.recorder import Drops
from fastattn._engine.steps import Sequences
from fastattn._engine.tape import Tape
from fastattn._engine.values import Gradients, Value
from fastattn.grad import Pullback
from fastattn.models._embeddings import Embeddings
from fastattn.models._parameters import Origin, Precision, required
from fastattn.models._text import Text


class Fixed:
    """The base of all models: of their attributes, only properties with a setter can be set."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        if "__setattr__" in vars(cls):  # by dataclass, before it makes the class with slots: this message
            cls.__setattr__, cls.__delattr__ = Fixed._set, Fixed._delete  # type: ignore[assignment]

    def _set(self, name: str, value: Any) -> None:
        kind = type(self)
        known = {each: getattr(kind, each, None) for each in dir(kind)}
        free = [each for each, x in known.items() if isinstance(x, property) and x.fset is not None]
        if name not in free:
            also = f", {' and '.join(free)} can be set" if free else ""
            why = f"weights change by with_state_dict(){also}, and the rest is what the folder says"
            raise AttributeError(f"{kind.__name__}.{name} cannot be set: {why}")
        object.__setattr__(self, name, value)

    def _delete(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")


@dataclass(frozen=True, slots=True, eq=False)
class Model(Fixed):
    """The base of `Encoder` and `Decoder`."""

    model_type: str  # as in config.json
    hidden_size: int
    num_heads: int
    num_layers: int  # layers
    vocab_size: int
    program: Program  # of the layers
    precision: Precision
    text: Text
    max_length: int | None  # tokens of a sequence; None without a table of positions
    embeddings: Embeddings
    origin: Origin | None = field(default=None, kw_only=True)  # the files, for what trains the model

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type between layers."""
        return self.precision.dtype

    @property
    def weights_dtype(self) -> str:
        """Storage type of the weights of linear maps."""
        return self.precision.weights

    @property
    def activations(self) -> Rounding | None:
        """Type to which inputs of linear maps are rounded, or None."""
        return self.precision.activations

    @property
    def has_gradients(self) -> bool:
        """Whether `vjp` and training support the model."""
        return self.program.has_gradients

    def __repr__(self) -> str:
        return f"<{self.model_type}: {self.num_layers} layers of {self.hidden_size}, {self.precision}>"

    @named("state_dict")
    def state_dict(self) -> dict[str, Array]:
        """Return copies of the model's tensors, in float32 or float64, by their names in its files.

        They are the values of the files, not rounded to `weights_dtype`.
        """
        return required(self.origin).state_dict()

    @named("with_state_dict")
    def with_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> Self:
        """Return a copy of the model with other tensors, for example after an optimizer step.

        Parameters
        ----------
        state_dict : mapping of str to array_like
            All names and shapes of `state_dict`. The arrays are copied.

        Raises
        ------
        TypeError, ValueError
            If names are missing or unknown, or arrays have the wrong shape or dtype.
        """
        model: Self = required(self.origin).changed(self, state_dict)
        return model

    def _tokens(
        self, ids: ArrayLike, attention_mask: ArrayLike | None, longest: int | None, argument: str = "ids"
    ) -> tuple[Ints, Ints, Bools | None]:
        """The ids (batch, length) of a call, how many of each sequence count, and if not all do, which."""
        name = self.model_type
        tokens = token_ids(ids, self.vocab_size, argument)
        mask = attended(attention_mask, tokens)
        lengths: Ints = np.full(len(tokens), tokens.shape[1]) if mask is None else mask.sum(axis=1)
        most = lengths.max(initial=0)
        if longest is not None and most > longest:
            raise ValueError(f"{name}(): {most} tokens in a sequence; expected at most {longest}")
        return tokens, lengths, mask

    def _record(
        self,
        tokens: Ints,
        positions: Ints,
        types: Ints | None,
        call: Sequences,
        checkpoint: bool,
        dropout: float,
        seed: int | None,
    ) -> Recorded:
        """Hidden states of the last layer on a tape, of the tokens of sequences end to end."""
        if not self.has_gradients:
            raise NotImplementedError(f"(): models of type {self.model_type} have no gradients yet")
        origin, checkpoint = required(self.origin), flag("checkpoint", checkpoint)
        tape = Tape(drops=Drops(*dropout_of(dropout, seed)))
        x = Value(self.embeddings(tokens, positions, types, self.dtype))
        out = self.program.run_on(tape, x, call, checkpoint)

        def finish() -> None:
            self.embeddings.add_gradients(tape.gradients, x.found(), tokens, positions, types)
            self._add_gradients(tape.gradients, call)

        return Recorded(tape, out, finish, origin)

    def _add_gradients(self, gradients: Gradients, call: Sequences) -> None:
        """Add the gradients of what else made the arguments of a call."""


@dataclass(slots=True, eq=False)
class Recorded:
    """A forward pass on a tape, of the tokens that count, end to end."""

    tape: Tape
    out: Value  # hidden states (tokens, hidden_size)
    finish: Callable[[], None]  # adds the gradients of what made the program's input
    origin: Origin

    def gradients(self, dout: Array) -> dict[str, Array]:
        """Gradients of the tensors, from the gradient of `out`."""
        self.tape.pull(self.out, dout)
        self.finish()
        return self.origin.parameters.gradients(self.tape.gradients)


def pulled(recorded: Recorded, mask: Bools | None, shape: Shape) -> tuple[Array, Pullback]:
    """A result of `shape`, and the map from its gradient to the gradients of a model's tensors, by name.

    That does not read its argument where a token does not count.
    """
    dtype = recorded.out.array.dtype

    def check(dout: ArrayLike, **others: Any) -> tuple[Array]:
        return (cotangent(dout, others, shape, dtype),)

    def back(dout: Array) -> dict[str, Array]:
        return recorded.gradients(rows(dout) if mask is None else dout[mask])

    return unpacked(recorded.out.array, mask, shape), Pullback(check, back)


def unpacked(counted: Array, mask: Bools | None, shape: Shape) -> Array:
    """Rows (n, features) of the tokens that count, `mask` (batch, length), in `shape`; 0 at the others."""
    if mask is None:
        return counted.reshape(shape)
    out = np.zeros(shape, counted.dtype)
    out[mask] = counted
    return out


def token_ids(ids: ArrayLike, vocab_size: int, name: str = "ids") -> Ints:
    """`ids`, the argument `name`, as (batch, length); a single sequence is a batch of one."""
    array = _rectangular(name, ids)
    if array.dtype.kind in "US":
        raise TypeError(f"(): {name} is text; expected ids, as model.text.encode([text]) makes them")
    if array.size == 0:
        array = np.zeros(array.shape, np.int64)
    if array.ndim not in (1, 2):
        raise wrong_shape(name, array, "(batch, length) or (length,)")
    return np.atleast_2d(integers(name, array, low=0, high=vocab_size - 1))


def one_sequence(name: str, ids: ArrayLike, vocab_size: int) -> Ints:
    """`ids`, the argument `name`, as (length,)."""
    found = token_ids(ids, vocab_size, name)
    if np.ndim(ids) != 1:
        raise wrong_shape(name, found, "(length,)")
    row: Ints = found[0]
    return row


def attended(mask: ArrayLike | None, ids: Ints) -> Bools | None:
    """`mask`, 1 or True for each token that counts, as (batch, length) of bool; None if all do."""
    if mask is None:
        return None
    array = _rectangular("attention_mask", mask)
    if array.dtype.kind not in "biu" or (array.dtype.kind != "b" and not ((array == 0) | (array == 1)).all()):
        raise TypeError(f"(): attention_mask has dtype {array.dtype}; expected bool, or integers 0 and 1")
    bools: Bools = np.atleast_2d(array).astype(np.bool_, copy=False)
    if bools.shape != ids.shape:
        raise wrong_shape("attention_mask", bools, f"ids', {ids.shape}")
    return None if bools.all() else bools


def _rectangular(name: str, x: Any) -> Array:
    """`x` as an array; NumPy cannot make one of lists of different lengths."""
    try:
        return as_array(name, x)
    except TypeError:
        rows = x if isinstance(x, (list, tuple)) else ()
        if len({_length(row) for row in rows}) < 2:
            raise
        came = f"{name} has sequences of different lengths"
        expected = "one length: pad them, and pass an attention_mask that is 0 at the padding"
        raise ValueError(f"(): {came}; expected {expected}") from None


def _length(row: Any) -> int:
    """Number of elements of `row`; -1 for what has no length, as an array of no dimensions."""
    try:
        return len(row)
    except TypeError:
        return -1


def pad(sequences: Sequence[Sequence[int] | Ints]) -> tuple[Ints, Bools]:
    """Sequences of ids as one array, padded on the right, and which of it counts; both (batch, length)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ids = np.zeros((len(sequences), max(lengths, default=0)), np.int64)
    mask: Bools = np.arange(ids.shape[1]) < lengths[:, None]
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, mask
