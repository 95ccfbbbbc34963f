"""One layer of an encoder and one of a decoder (Vaswani et al. 2017). `_stacks.py` puts them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.ops import rows
from fastattn._args.options import require_options
from fastattn._args.values import as_array, flag
from fastattn._args.words import not_an_argument
from fastattn._engine import recorded
from fastattn._engine.program import OUT, Program, Sequences, X, build
from fastattn.cache import DecoderCache, KVCache, restored_on_error
from fastattn.layers import _calls, _state
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._block import Block
from fastattn.layers._gradients import pulled, refuse_cache
from fastattn.layers._heads import HeadOptions
from fastattn.layers._residual import TransformerLayer
from fastattn.layers._scores import Names, padding_alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.options import NoOptions
    from fastattn._args.types import Array
    from fastattn._engine.tape import Tape, Value
    from fastattn.grad import Pullback
    from fastattn.layers._residual import Norm

_SRC = Names("TransformerEncoderLayer", "src", "src_mask", "src_key_padding_mask")
_TGT = Names("TransformerDecoderLayer", "tgt", "tgt_mask", "tgt_key_padding_mask")
_MEMORY = Names("TransformerDecoderLayer", "tgt", "memory_mask", "memory_key_padding_mask")


class OverMemoryOptions(TypedDict, total=False):
    """Options of a decoder's call that `TransformerDecoderLayer` documents."""

    tgt_mask: ArrayLike | None
    memory_mask: ArrayLike | None
    tgt_key_padding_mask: ArrayLike | None
    memory_key_padding_mask: ArrayLike | None
    tgt_is_causal: bool | None
    memory_is_causal: bool


class DecoderOptions(OverMemoryOptions, total=False):
    """The same, and what belongs to a cache."""

    lengths: ArrayLike | None


@dataclass(eq=False)
class TransformerEncoderLayer(TransformerLayer):
    """Self-attention, then feed-forward, each with a residual and a norm: torch's layer, batch first.

    Its state has torch's names: ``self_attn.*``, ``linear1.*``, ``linear2.*``, ``norm1.*``, ``norm2.*``.

    Parameters
    ----------
    d_model, num_heads : int
        Width, and heads.
    dim_feedforward : int, default 2048
    activation : str, default "relu"
        One of `FeedForward`, gated ones included.
    norm_first : bool, default False
        Normalise the input of attention and of the feed-forward. By default, as in the paper, the norm comes
        after the sum with the residual.
    norm : {"layer_norm", "rms_norm"}
    layer_norm_eps : float, default 1e-5
    bias : bool, default True
        Of all projections and of LayerNorm.
    attention : dict, optional
        Options of `MultiHeadAttention`: num_kv_heads, rope, qk_norm, window and so on.
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.
    """

    # The program of calls without masks or cache, behind the last change to any layer when it was made: after
    # another change it is made anew. It is None if the attention has options that programs do not have.
    _plain: tuple[object, Program | None] = field(init=False, default=(None, None), repr=False)

    _parts = ("self_attn", "feed_forward", "norm1", "norm2")

    def __call__(
        self,
        src: ArrayLike,
        *,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        cache: KVCache | None = None,
        lengths: ArrayLike | None = None,
        **others: Unpack[NoOptions],
    ) -> Array:
        """The layer of src, (B, L, d_model) or (L, d_model); arguments as in `MultiHeadAttention`.

        In bool masks True hides. Rows that a bool `src_key_padding_mask` hides are 0 in the result if no
        other mask, `is_causal` or `cache` is given; what stands in them, NaN included, reaches nothing. With
        `is_causal` and a `cache` this is the layer of a decoder-only model.
        """
        if others:
            raise not_an_argument(_SRC.func, others, TransformerEncoderLayer.__call__)
        array, batched = self._input("src", src, cache, KVCache)
        if batched is not array:
            src_key_padding_mask = _calls.one_batch(_SRC.func, _SRC.key_padding_mask, src_key_padding_mask)
        batch, length, _ = batched.shape
        x, is_causal = rows(batched), flag(_SRC.func, "is_causal", is_causal)
        given = (is_causal, src_mask, cache, lengths)
        plain, padding = padding_alone(_SRC, src_key_padding_mask, (batch, length), *given)
        if plain and (program := self._program()) is not None:
            if padding is None:
                return program.run(x, Sequences(batch)).reshape(array.shape)
            counted, out = ~padding.ravel(), np.zeros(x.shape, x.dtype)
            begins = np.append(0, np.cumsum(length - padding.sum(axis=1)))
            out[counted] = program.run(x[counted], Sequences(batch, begins=begins))
            return out.reshape(array.shape)
        hidden = None if padding is None else padding.ravel()
        if hidden is not None and hidden.any():
            x = x.copy()
            x[hidden] = 0
        x = self._add_attention(
            self.norm1,
            x,
            self.self_attn,
            batch=batch,
            length=length,
            key_padding_mask=src_key_padding_mask,
            attn_mask=src_mask,
            is_causal=is_causal,
            cache=cache,
            lengths=lengths,
            names=_SRC,
        )
        out = self._add_feed_forward(self.norm2, x)
        if hidden is not None:
            out[hidden] = 0
        return out.reshape(array.shape)

    def _vjp(
        self,
        src: ArrayLike,
        *,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **others: Unpack[NoOptions],
    ) -> tuple[Array, Pullback]:
        """The layer of src, and what makes gradients: ``dsrc, grads = pullback(dout)``; see `Pullback`.

        Arguments are those of a call. Masks have no gradient. Where rows of the result are 0 because padding
        hides them, so are those of dsrc, and what stands there in dout reaches nothing. With `dropout`, that
        share becomes 0 of the probabilities, and of what attention and the feed-forward add to their input,
        as `seed` says.
        """
        if others:
            func = _SRC.func
            raise not_an_argument(func, others, TransformerEncoderLayer._vjp)
        array, batched = self._input("src", src, None, KVCache)
        if batched is not array:
            src_key_padding_mask = _calls.one_batch(_SRC.func, _SRC.key_padding_mask, src_key_padding_mask)
        options: dict[str, Any] = {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask}
        options["is_causal"] = flag(_SRC.func, "is_causal", is_causal)

        def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
            return self._record(tape, inputs[0], len(batched), **options)

        return pulled(self, compute, [array], array.shape, checkpoint, dropout, seed)

    def _record(
        self, tape: Tape, x: Value, batch: int, *, src_mask: Any, src_key_padding_mask: Any, is_causal: bool
    ) -> Value:
        """A call on a tape; what is computed is the same."""
        length = len(x.array) // max(1, batch)
        plain, padding = padding_alone(_SRC, src_key_padding_mask, (batch, length), is_causal, src_mask)
        if plain and (program := self._program()) is not None:
            if padding is None:
                return recorded.record(program, tape, x, Sequences(batch))
            counted = ~padding.ravel()
            ragged = Sequences(batch, begins=np.append(0, np.cumsum(length - padding.sum(axis=1))))
            return tape.spread(recorded.record(program, tape, tape.rows(x, counted), ragged), counted)
        hidden = None if padding is None else padding.ravel()
        x = x if hidden is None else tape.cleared(x, hidden)
        options = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        x = self._record_attention(tape, self.norm1, x, self.self_attn, batch=batch, names=_SRC, **options)
        x = self._record_feed_forward(tape, self.norm2, x)
        return x if hidden is None else tape.cleared(x, hidden)

    def _program(self) -> Program | None:
        """That of calls without masks."""
        if self._plain[0] is not (change := _state.last_change):
            block = self._block()
            program = None if block is None else build("layer", block.steps(X, OUT))
            self.__dict__["_plain"] = change, program
        return self._plain[1]

    def _block(self) -> Block | None:
        heads, forward = self.self_attn, self.feed_forward
        if heads.all_maps is None or not heads.is_plain():
            return None
        inner, outer = forward._projections()
        return Block(
            norm_first=self.norm_first,
            attention_norm=self.norm1._of_block(),
            qkv=heads._projection(heads.all_maps),
            heads=heads.num_heads,
            heads_kv=heads._heads_kv,
            head_dim=heads._head_dim,
            scale=heads._head_dim**-0.5,
            attended=heads.out_proj._projection(),
            inner_norm=self.norm2._of_block(),
            inner=inner,
            activation=forward._function,
            outer=outer,
        )


@dataclass(eq=False)
class TransformerDecoderLayer(TransformerLayer):
    """Masked self-attention, then attention over the encoder's memory, then feed-forward.

    Its options and the names in its state are those of `TransformerEncoderLayer`, and in the state also
    ``multihead_attn.*`` and ``norm3.*``.

    Parameters
    ----------
    attention, cross_attention : dict, optional
        Options of `MultiHeadAttention` for the attention to itself, and for that over the memory.
    """

    cross_attention: HeadOptions | None = field(default=None, kw_only=True)
    multihead_attn: MultiHeadAttention = field(init=False, repr=False)
    norm3: Norm = field(init=False, repr=False)

    _parts = ("self_attn", "multihead_attn", "feed_forward", "norm1", "norm2", "norm3")

    def __call__(
        self,
        tgt: ArrayLike,
        memory: ArrayLike | None = None,
        *,
        cache: DecoderCache | None = None,
        **options: Unpack[DecoderOptions],
    ) -> Array:
        """The layer of tgt, (B, L, d_model), over memory, (B, S, d_model); both may lack the batch axis.

        Parameters
        ----------
        tgt_mask, tgt_key_padding_mask, tgt_is_causal
            Of the attention to itself, as in `MultiHeadAttention`: True hides, as in torch, the opposite of
            `attention`. By default causal only with a cache.
        memory_mask, memory_key_padding_mask, memory_is_causal
            Of the attention over the memory. With a cache, tgt stands behind the tokens in it here, too.
        cache : DecoderCache, optional
            Takes tgt's keys. The first call also puts the memory's keys and its key padding mask there; later
            calls may leave both out, and must not bring others.
        lengths : array_like of int, (B,), optional
            With `cache`: how many of these tokens count in each sequence.
        """
        func = type(self).__name__
        require_options(func, options, DecoderOptions)
        array, batched = self._input("tgt", tgt, cache, DecoderCache)
        padding, memory_padding = options.get("tgt_key_padding_mask"), options.get("memory_key_padding_mask")
        if batched is not array:
            padding = _calls.one_batch(func, _TGT.key_padding_mask, padding)
            memory_padding = _calls.one_batch(func, _MEMORY.key_padding_mask, memory_padding)
        batch, length, _ = batched.shape
        is_causal = options.get("tgt_is_causal")
        over = keys_values = None
        with restored_on_error((cache,)):
            if cache is None:
                over = self._memory(memory, batch)
            else:
                self._keep(memory, memory_padding, batch, cache)
                keys_values, memory_padding = cache.keys_values, cache.key_padding_mask
            position = 0 if cache is None else cache.tokens.offset  # before tgt is appended
            x = self._add_attention(
                self.norm1,
                rows(batched),
                self.self_attn,
                batch=batch,
                length=length,
                key_padding_mask=padding,
                attn_mask=options.get("tgt_mask"),
                is_causal=cache is not None if is_causal is None else is_causal,
                cache=None if cache is None else cache.tokens,
                lengths=options.get("lengths"),
                names=_TGT,
            )
            x = self._add_attention(
                self.norm2,
                x,
                self.multihead_attn,
                batch=batch,
                length=length,
                key=over,
                key_padding_mask=memory_padding,
                attn_mask=options.get("memory_mask"),
                is_causal=options.get("memory_is_causal", False),
                keys_values=keys_values,
                q_offset=position,
                names=_MEMORY,
            )
            out = self._add_feed_forward(self.norm3, x)
        return out.reshape(array.shape)

    def _vjp(
        self,
        tgt: ArrayLike,
        memory: ArrayLike,
        *,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Unpack[DecoderOptions],
    ) -> tuple[Array, Pullback]:
        """The layer of tgt, and what makes gradients: ``dtgt, dmemory, grads = pullback(dout)``.

        See `Pullback`. Arguments are those of a call without a cache, and those of an encoder layer's.
        """
        func = type(self).__name__
        require_options(func, options, DecoderOptions)
        refuse_cache(func, options)
        array, batched = self._input("tgt", tgt, None, DecoderCache)
        over = self._memory(memory, len(batched))
        masks: dict[str, Any] = {**options}
        if batched is not array:
            for name in (_TGT.key_padding_mask, _MEMORY.key_padding_mask):
                masks[name] = _calls.one_batch(func, name, masks.get(name))

        def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
            return self._record(tape, inputs[0], inputs[1], len(batched), **masks)

        inputs = [array, over if np.ndim(memory) == 3 else over[0]]
        return pulled(self, compute, inputs, array.shape, checkpoint, dropout, seed)

    def _record(
        self,
        tape: Tape,
        x: Value,
        memory: Value,
        batch: int,
        *,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        lengths: None = None,
    ) -> Value:
        """A call on a tape, without a cache."""
        own: dict[str, Any] = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
        own["is_causal"] = tgt_is_causal is not None and flag(_TGT.func, "tgt_is_causal", tgt_is_causal)
        over: dict[str, Any] = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
        over["is_causal"] = flag(_MEMORY.func, "memory_is_causal", memory_is_causal)
        x = self._record_attention(tape, self.norm1, x, self.self_attn, batch=batch, names=_TGT, **own)
        x = self._record_attention(
            tape, self.norm2, x, self.multihead_attn, batch=batch, key=memory, names=_MEMORY, **over
        )
        return self._record_feed_forward(tape, self.norm3, x)

    def _memory(self, memory: ArrayLike | None, batch: int) -> Array:
        """`memory` as (batch, S, width); that of one sequence may lack the batch axis."""
        func = type(self).__name__
        if memory is None:
            raise ValueError(f"{func}(): memory is None; expected an array, or a cache that holds one")
        width = self.multihead_attn.kdim or self.d_model
        array = _calls.checked(func, "memory", memory, width, self.weights_dtype)
        array = _calls.batch_first(func, "memory", array)
        if len(array) != batch:
            raise wrong_shape(func, "memory", array, f"({batch}, length, {width}), tgt's batch")
        return array

    def _keep(self, memory: ArrayLike | None, padding: Any, batch: int, cache: DecoderCache) -> None:
        """Put the memory's keys, values and mask into `cache`, or check that they are those in it."""
        func = type(self).__name__
        padding = None if padding is None else as_array(func, "memory_key_padding_mask", padding)
        if cache.keys_values is None:
            array = self._memory(memory, batch)
            cache.keys_values, cache.memory = self.multihead_attn.project_keys_values(array), memory
            cache.key_padding_mask = None if padding is None else padding.copy()
            return
        kept = "that of the first call with this cache; expected that one, or None (after select() None)"
        if memory is not None and memory is not cache.memory:
            raise ValueError(f"{func}(): memory is not {kept}")
        if padding is not None:
            there = cache.key_padding_mask
            if there is None or not np.array_equal(padding, there):
                raise ValueError(f"{func}(): memory_key_padding_mask is not {kept}")
        in_cache = len(cache.keys_values[0])
        if in_cache != batch:
            expected = f"{in_cache}, that of the memory in the cache (DecoderCache.select() selects in both)"
            raise ValueError(f"{func}(): tgt has a batch of {batch}; expected {expected}")
