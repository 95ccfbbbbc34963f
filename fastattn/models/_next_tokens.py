"""Language models as functions: logits of the next token, their gradients, and steps over a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.attention import dropout_of
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import lane_dtype
from fastattn._args.values import as_array, flag, integers
from fastattn._engine.program import Program
from fastattn._engine.steps import Sequences
from fastattn._engine.tape import Drops, Tape
from fastattn._engine.values import Value
from fastattn.grad import cross_entropy, embedding
from fastattn.grad._loss import targets_of
from fastattn.models import _model
from fastattn.models._embeddings import of_length, token_rows
from fastattn.models._model import Recorded, pullback_of
from fastattn.models._model_cache import ModelCache
from fastattn.models._parameters import required
from fastattn.models._states import StateCache
from fastattn.positions import rope_tables

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Ints
    from fastattn._engine.slots import Slots
    from fastattn.grad import Pullback
    from fastattn.layers._block import Window
    from fastattn.layers._mixers import Kind
    from fastattn.models._embeddings import Frequencies
    from fastattn.models._model_cache import KeyHeads


class QueryGrowth(NamedTuple):
    """Growth of queries with their positions p: they are times ``1 + beta log(1 + floor(p / length))``."""

    beta: float
    length: int

    def __call__(self, positions: Ints) -> Array:
        """The factors of queries."""
        found: Array = 1 + self.beta * np.log1p(positions // self.length)
        return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NextTokens(_model.Model):
    """A language model; call it for the logits of all tokens."""

    num_kv_heads: int
    head_dim: int
    key_heads: tuple[KeyHeads, ...]  # of all layers together that have keys
    states: tuple[tuple[Kind, ...], ...]  # of a sequence, in each of the layers that carry some
    max_length: int | None  # tokens of a sequence; None without a table of positions
    tokens: Array | PackedLinear  # (vocab_size, hidden_size); the output layer itself, if the two are tied
    positions: Array | None  # (max_length, hidden_size)
    frequencies: tuple[Frequencies, ...]  # of which each attention may have one
    windows: tuple[Window, ...]  # of which each attention has one: see `model_program`
    logits: Program
    stop: tuple[int, ...]  # ids that end a text
    token_scale: float = 1.0  # what the tokens' vectors are multiplied by
    softcap: float | None = None  # logits x become ``cap * tanh(x / cap)``
    query_growth: QueryGrowth | None = None  # queries then have a rotation after the `frequencies`' own
    layer_tokens: Array | PackedLinear | None = None  # (vocab_size, n): `Sequences.inputs` of tokens
    layer_scale: float = 1.0  # what these are multiplied by

    @property
    def has_gradients(self) -> bool:
        """Whether `vjp`, and what trains a model, take it."""
        return self.program.has_gradients and self.softcap is None and self.layer_tokens is None

    @named("{self.model_type}")
    def __call__(self, ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
        """Logits of the token after each token.

        Parameters
        ----------
        ids, attention_mask
            As in a call of `Encoder`.

        Returns
        -------
        ndarray, (batch, length, vocab_size)
            In the model's dtype, as from `Encoder`.
        """
        tokens, lengths, mask = self._tokens(ids, attention_mask, self.max_length)
        hidden = self._hidden(tokens if mask is None else tokens[mask], lengths, int(lengths.max(initial=0)))
        logits = self._capped(self.logits.run(hidden, Sequences(1)))
        return _model.unpacked(logits, mask, (*tokens.shape, self.vocab_size))

    def _capped(self, logits: Array) -> Array:
        """The logits, which it may overwrite, kept within `softcap`."""
        if self.softcap is None:
            return logits
        cap = lane_dtype(logits.dtype).type(self.softcap)
        wide = logits.astype(cap.dtype, copy=False)
        np.divide(wide, cap, out=wide)
        np.tanh(wide, out=wide)
        np.multiply(wide, cap, out=wide)
        return wide.astype(logits.dtype, copy=False)

    def _vjp(
        self,
        ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        *,
        logits: bool = True,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Array, Pullback]:
        """Logits, or the hidden states that the output layer maps to them; and their pullback."""
        tokens, lengths, mask = self._tokens(ids, attention_mask, self.max_length)
        counted = tokens if mask is None else tokens[mask]
        recorded = self._record(counted, lengths, checkpoint, dropout, seed)
        if flag("logits", logits):
            output: Any = self.logits.steps[-1]
            recorded.out = recorded.tape.linear(recorded.out, output.weight, output.bias, output.activations)
        shape = (*tokens.shape, recorded.out.array.shape[1])
        pullback = pullback_of(recorded, mask, shape)
        return _model.unpacked(recorded.out.array, mask, shape), pullback

    @named("loss_and_gradients")
    def loss_and_gradients(
        self,
        ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        *,
        targets: ArrayLike | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """The mean cross-entropy of the next tokens, and its gradients by the names of the tensors.

        Parameters
        ----------
        ids, attention_mask
            As in a call.
        targets : array_like of int, (batch, length), optional
            What follows each token, or `ignore_index`; by default the next token that counts, and nothing
            after the last one.
        ignore_index, label_smoothing
            Of `fastattn.grad.cross_entropy`, which never holds all logits.
        checkpoint, dropout, seed
            As in `fastattn.grad.vjp`.

        Returns
        -------
        loss : float
        gradients : dict of str to ndarray
            Gradients of the tensors, by name.
        """
        tokens, lengths, mask = self._tokens(ids, attention_mask, self.max_length)
        ignored = int(integers("ignore_index", ignore_index, (), "one number"))
        flat = (tokens if mask is None else tokens[mask]).reshape(-1)
        if targets is None:
            expected = np.append(flat[1:], ignored)[: len(flat)]
            expected[np.cumsum(lengths)[lengths > 0] - 1] = ignored
        else:
            given = as_array("targets", targets)
            given = np.atleast_2d(integers("targets", given if given.size else given.astype(np.int64)))
            if given.shape != tokens.shape:
                raise wrong_shape("targets", given, f"ids', {tokens.shape}")
            expected = (given if mask is None else given[mask]).reshape(-1)
        targets_of(expected, flat.shape, self.vocab_size, ignore_index, label_smoothing)
        recorded = self._record(flat, lengths, checkpoint, dropout, seed)
        output: Any = self.logits.steps[-1]
        how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        found: Any = cross_entropy(recorded.out.array, output.weight, expected, bias=output.bias, **how)
        loss, dhidden, *others = found
        for parameter, gradient in zip((output.weight, output.bias), others, strict=False):
            recorded.tape.gradients.add(parameter, gradient)
        return float(loss), recorded.gradients(dhidden)

    def _record(
        self, tokens: Ints, lengths: Ints, checkpoint: bool, dropout: float, seed: int | None
    ) -> Recorded:
        """Hidden states after the last norm, on a tape, of sequences end to end."""
        if not self.has_gradients:
            raise NotImplementedError(f"(): models of type {self.model_type} have no gradients yet")
        origin, checkpoint = required(self.origin), flag("checkpoint", checkpoint)
        flat = tokens.reshape(-1)
        array, call, positions = self._inputs(flat, lengths, int(lengths.max(initial=0)))
        tape, x = Tape(drops=Drops(*dropout_of(dropout, seed))), Value(array)
        norm: Any = self.logits.steps[0]
        out = self.program.on(tape, x, call, checkpoint)
        out = tape.norm(out, norm.kind, norm.weight, norm.bias, norm.eps)

        def finish() -> None:
            dx, gradients = x.found(), tape.gradients
            scale = lane_dtype(dx.dtype).type(self.token_scale)
            gradients.add(self.tokens, embedding(dx if scale == 1 else dx * scale, flat, self.vocab_size))
            if self.positions is not None:
                rows = positions
                if rows.size != len(flat):  # those of each sequence
                    rows = np.broadcast_to(positions, (len(lengths), len(positions)))
                gradients.add(self.positions, embedding(dx, rows.reshape(-1), len(self.positions)))

        return Recorded(tape, out, finish, origin)

    def _hidden(
        self,
        tokens: Ints,
        lengths: Ints,
        longest: int,
        cache: ModelCache | None = None,
        program: Program | None = None,
    ) -> Array:
        """Hidden states (n, hidden_size) of new tokens (n,), before the last norm.

        Those of sequences are end to end, `lengths` (batch,) of each. A cache, one of `_cache`, holds the
        heads and states of all layers, and they follow the tokens in it. `longest` is the length of the
        longest sequence then: some scalings of rotary positions depend on it. A
        `program` in place of the model's is that of `by_rows`.
        """
        x, call, _ = self._inputs(tokens, lengths, longest, cache)
        if not self.num_layers:
            return x
        hidden = (program or self.program).run(x, call)
        if isinstance(cache, StateCache):
            cache.keep()
        return hidden

    def _cache(self, capacity: int = 0, dtype: DTypeLike | None = None) -> ModelCache:
        """An empty cache for `_hidden`."""
        if self.states:
            return StateCache(self.states, self.key_heads, capacity, dtype)
        return ModelCache(self.key_heads, capacity, dtype)

    def _inputs(
        self, tokens: Ints, lengths: Ints, longest: int, cache: ModelCache | None = None
    ) -> tuple[Array, Sequences, Ints]:
        """Inputs of the program (n, hidden_size), its `Sequences`, and the tokens' positions."""
        batch, length = len(lengths), int(lengths.max(initial=0))
        starts = 0 if cache is None else cache.offset
        begins = np.append(0, np.cumsum(lengths))
        ragged = begins[-1] != batch * length
        if ragged:
            positions = np.arange(begins[-1]) - np.repeat(begins[:-1] - starts, lengths)
        else:  # (length,), or (batch, length) where sequences begin at different positions
            positions = np.asarray(starts)[..., None] + np.arange(length)
        x = self._scaled(self.tokens, tokens.reshape(-1), self.token_scale)
        if self.positions is not None:
            rows = x if ragged else x.reshape(batch, length, self.hidden_size)
            rows += self.positions[positions]
        rotations = []
        for frequencies in self.frequencies:
            tables = rope_tables(positions, of_length(frequencies, longest), lane_dtype(self.dtype))
            rotations.append((tables[0][..., None, :, :], tables[1][..., None, :, :]))
        if self.query_growth is not None:
            growth = self.query_growth(positions)[..., None, :, None].astype(lane_dtype(self.dtype))
            cos, sin = rotations[0]
            rotations.append((cos * growth, sin * growth))
        slots: tuple[Slots, ...] = ()
        ends, len_k = None, length
        if cache is not None and self.num_layers:
            slots = cache.extend(batch, length, self.dtype, lengths if ragged else None)
            ends, len_k = slots[0].ends, cache.length
            if ends is not None:
                ends = ends + cache.firsts[0]
        if ragged:  # each sequence has its own keys alone
            ranges = self._ranges(positions, True, None, np.repeat(lengths + starts, lengths))
        else:
            ranges = self._ranges(positions[..., None, :], length > 1, ends, len_k)
        if cache is not None:
            ranges = cache.ranges(ranges, self.windows)
        call = Sequences(batch, ranges, tuple(rotations), slots, begins if ragged else None)
        if isinstance(cache, StateCache):
            call = call._replace(states=cache.carried(batch))
        if self.layer_tokens is not None:
            inputs = self._scaled(self.layer_tokens, tokens.reshape(-1), self.layer_scale)
            call = call._replace(inputs=inputs)
        return x, call, positions

    def _scaled(self, table: Array | PackedLinear, ids: Ints, scale: float) -> Array:
        """The vectors of tokens `ids` (n,), times `scale`, in new memory."""
        x = token_rows(table, ids, self.dtype)
        if scale == 1:
            return x
        lane = lane_dtype(self.dtype)
        found: Array = (x.astype(lane, copy=False) * lane.type(scale)).astype(self.dtype, copy=False)
        return found

    def _ranges(
        self, positions: Ints, causal: bool, ends: Ints | None, len_k: int | Ints
    ) -> tuple[key_ranges.Range, ...]:
        """Ranges of the `len_k` keys that the queries at `positions` attend, for each window.

        Of each sequence, the first `ends` (batch,) keys count; None: all. A token alone, the last of its
        sequence, sees all of them without being causal.
        """
        shared = [] if ends is None else [key_ranges.lengths(ends)]
        if causal:
            shared.append(key_ranges.causal(positions))
        sliding = ([key_ranges.window(positions, *w)] if w is not None else [] for w in self.windows)
        return tuple(key_ranges.intersect(shared + window, len_k) for window in sliding)
