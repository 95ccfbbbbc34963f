"""One layer of an encoder and one of a decoder (Vaswani et al. 2017); `_stacks.py` puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.ops import rows
from fastattn._args.values import as_array, flag, short
from fastattn._engine.program import Sequences
from fastattn.cache import DecoderCache, KVCache, restored_on_error
from fastattn.layers import _calls
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._basic import FeedForward, LayerNorm, RMSNorm, make_norm
from fastattn.layers._heads import HeadOptions
from fastattn.layers._plain import PlainEncoder, plain_encoder
from fastattn.layers._scores import Names
from fastattn.layers._state import Layer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array

    Norm = LayerNorm | RMSNorm

_SRC = Names("TransformerEncoderLayer", "src", "src_mask", "src_key_padding_mask")
_TGT = Names("TransformerDecoderLayer", "tgt", "tgt_mask", "tgt_key_padding_mask")
_MEMORY = Names("TransformerDecoderLayer", "tgt", "memory_mask", "memory_key_padding_mask")


@dataclass(eq=False)
class TransformerEncoderLayer(Layer):
    """Self-attention, then feed-forward, each with a residual and a norm: torch's layer, batch first.

    Parameters
    ----------
    d_model, nhead : int
        Width, and heads.
    dim_feedforward : int, default 2048
    activation : str, default "relu"
        One of `FeedForward`, gated ones included.
    norm_first : bool, default False
        Normalise what goes into attention and feed-forward, and not, as in the paper, each sum behind them.
    norm : {"layer_norm", "rms_norm"}
    layer_norm_eps : float, default 1e-5
    bias : bool, default True
        Of all projections and of LayerNorm.
    attention : dict, optional
        Options of `MultiHeadAttention`: num_kv_heads, rope, qk_norm, window and so on.
    weights_dtype, rng
        As in `MultiHeadAttention`.

    Notes
    -----
    The parameters are those of torch: ``self_attn.*``, ``linear1.*``, ``linear2.*``, ``norm1.*``,
    ``norm2.*``.
    """

    d_model: int
    nhead: int
    dim_feedforward: int = 2048
    activation: str = "relu"
    _: KW_ONLY
    norm_first: bool = False
    norm: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    bias: bool = True
    attention: HeadOptions | None = None
    weights_dtype: str = "float32"
    rng: InitVar[np.random.Generator | None] = None
    self_attn: MultiHeadAttention = field(init=False, repr=False)
    feed_forward: FeedForward = field(init=False, repr=False)
    norm1: Norm = field(init=False, repr=False)
    norm2: Norm = field(init=False, repr=False)
    _plain: PlainEncoder | None = field(init=False, default=None, repr=False)

    def __post_init__(self, rng: np.random.Generator | None) -> None:
        _require_flags(self)
        self.self_attn = _attention(self, "attention", rng)
        self.feed_forward = _feed_forward(self, rng)
        self.norm1, self.norm2 = _norm(self), _norm(self)
        self._set_up(None)

    def __call__(
        self,
        src: ArrayLike,
        *,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        cache: KVCache | None = None,
        lengths: ArrayLike | None = None,
    ) -> Array:
        """The layer of src, (B, L, d_model) or (L, d_model); arguments as in `MultiHeadAttention`.

        In bool masks True hides. With `is_causal` and a `cache` this is the layer of a decoder-only model.
        """
        func = type(self).__name__
        _calls.require_cache(func, cache, KVCache)
        self._require_parts()
        array = _calls.checked(func, "src", src, self.d_model, self.weights_dtype)
        batched = _calls.batch_first(func, "src", array)
        if batched is not array:
            src_key_padding_mask = _calls.one_batch(func, "src_key_padding_mask", src_key_padding_mask)
        batch, length, _ = batched.shape
        x = rows(batched)
        options = (src_mask, src_key_padding_mask, cache, lengths)
        if is_causal is False and all(option is None for option in options):
            plain = self.__dict__["_plain"] = plain_encoder(self, self._plain)
            if plain.program is not None:
                return plain.program.run(x, Sequences(batch)).reshape(array.shape)
        normed = self.norm1._of_rows(x) if self.norm_first else x
        total, _ = self.self_attn._attend(
            normed,
            batch,
            length,
            residual=x,
            key_padding_mask=src_key_padding_mask,
            attn_mask=src_mask,
            is_causal=is_causal,
            cache=cache,
            lengths=lengths,
            names=_SRC,
        )
        if self.norm_first:
            out = self.feed_forward._of_rows(self.norm2._of_rows(total), total, total)
        else:
            x = self.norm1._of_rows(total)
            out = self.norm2._of_rows(self.feed_forward._of_rows(x, x, total), x)
        return out.reshape(array.shape)

    def _children(self) -> dict[str, Layer]:
        parts: dict[str, Layer] = {"self_attn.": self.self_attn, "": self.feed_forward}
        return {**parts, "norm1.": self.norm1, "norm2.": self.norm2}


@dataclass(eq=False)
class TransformerDecoderLayer(Layer):
    """Masked self-attention, then attention over the encoder's memory, then feed-forward.

    Parameters
    ----------
    d_model, nhead, dim_feedforward, activation, norm_first, norm, layer_norm_eps, bias, weights_dtype, rng
        As in `TransformerEncoderLayer`.
    attention, cross_attention : dict, optional
        Options of `MultiHeadAttention` for the attention to itself, and for that over the memory.

    Notes
    -----
    The parameters are those of torch: ``self_attn.*``, ``multihead_attn.*`` (over the memory), ``linear1.*``,
    ``linear2.*``, ``norm1.*``, ``norm2.*``, ``norm3.*``.
    """

    d_model: int
    nhead: int
    dim_feedforward: int = 2048
    activation: str = "relu"
    _: KW_ONLY
    norm_first: bool = False
    norm: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    bias: bool = True
    attention: HeadOptions | None = None
    cross_attention: HeadOptions | None = None
    weights_dtype: str = "float32"
    rng: InitVar[np.random.Generator | None] = None
    self_attn: MultiHeadAttention = field(init=False, repr=False)
    multihead_attn: MultiHeadAttention = field(init=False, repr=False)
    feed_forward: FeedForward = field(init=False, repr=False)
    norm1: Norm = field(init=False, repr=False)
    norm2: Norm = field(init=False, repr=False)
    norm3: Norm = field(init=False, repr=False)

    def __post_init__(self, rng: np.random.Generator | None) -> None:
        _require_flags(self)
        self.self_attn = _attention(self, "attention", rng)
        self.multihead_attn = _attention(self, "cross_attention", rng)
        self.feed_forward = _feed_forward(self, rng)
        self.norm1, self.norm2, self.norm3 = _norm(self), _norm(self), _norm(self)
        self._set_up(None)

    def __call__(
        self,
        tgt: ArrayLike,
        memory: ArrayLike | None = None,
        *,
        tgt_mask: ArrayLike | None = None,
        memory_mask: ArrayLike | None = None,
        tgt_key_padding_mask: ArrayLike | None = None,
        memory_key_padding_mask: ArrayLike | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        cache: DecoderCache | None = None,
        lengths: ArrayLike | None = None,
    ) -> Array:
        """The layer of tgt, (B, L, d_model), over memory, (B, S, d_model); both may lack the batch axis.

        Parameters
        ----------
        tgt_mask, tgt_key_padding_mask, tgt_is_causal
            Of the attention to itself, as in `MultiHeadAttention`; by default causal only with a cache.
        memory_mask, memory_key_padding_mask, memory_is_causal
            Of the attention over the memory. With a cache, tgt stands behind the tokens in it here, too.
        cache : DecoderCache, optional
            From step to step: tgt's keys are appended, and the memory's kept from the first call on, with its
            key padding mask; later ones may leave both out, and must not bring others.
        lengths : array_like of int, (B,), optional
            With `cache`: how many of these tokens count in each sequence.
        """
        func = type(self).__name__
        _calls.require_cache(func, cache, DecoderCache)
        self._require_parts()
        array = _calls.checked(func, "tgt", tgt, self.d_model, self.weights_dtype)
        batched = _calls.batch_first(func, "tgt", array)
        if batched is not array:
            tgt_key_padding_mask = _calls.one_batch(func, "tgt_key_padding_mask", tgt_key_padding_mask)
            memory_key_padding_mask = _calls.one_batch(
                func, "memory_key_padding_mask", memory_key_padding_mask
            )
        batch, length, _ = batched.shape
        over = keys_values = None
        with restored_on_error((cache,)):
            if cache is None:
                over = self._memory(memory, batch)
            else:
                self._keep(memory, memory_key_padding_mask, batch, cache)
                keys_values, memory_key_padding_mask = cache.keys_values, cache.key_padding_mask
            position = 0 if cache is None else cache.tokens.offset  # before tgt is appended
            x = rows(batched)
            first, (self_norm, cross_norm, last_norm) = self.norm_first, (self.norm1, self.norm2, self.norm3)
            total, _ = self.self_attn._attend(
                self_norm._of_rows(x) if first else x,
                batch,
                length,
                residual=x,
                key_padding_mask=tgt_key_padding_mask,
                attn_mask=tgt_mask,
                is_causal=cache is not None if tgt_is_causal is None else tgt_is_causal,
                cache=None if cache is None else cache.tokens,
                lengths=lengths,
                names=_TGT,
            )
            x = total if first else self_norm._of_rows(total)
            total, _ = self.multihead_attn._attend(
                cross_norm._of_rows(x) if first else x,
                batch,
                length,
                over,
                residual=x,
                key_padding_mask=memory_key_padding_mask,
                attn_mask=memory_mask,
                is_causal=memory_is_causal,
                keys_values=keys_values,
                q_offset=position,
                names=_MEMORY,
            )
            if first:
                out = self.feed_forward._of_rows(last_norm._of_rows(total), total, total)
            else:
                x = cross_norm._of_rows(total, x)
                out = last_norm._of_rows(self.feed_forward._of_rows(x, x, total), x)
        return out.reshape(array.shape)

    def _memory(self, memory: ArrayLike | None, batch: int) -> Array:
        """`memory` as (batch, S, width); that of one sequence may lack the batch axis."""
        func = type(self).__name__
        if memory is None:
            raise ValueError(f"{func}(): memory is None; expected an array, or a cache that holds one")
        width = self.multihead_attn.kdim or self.d_model
        array = _calls.checked(func, "memory", memory, width, self.weights_dtype)
        array = _calls.batch_first(func, "memory", array)
        if len(array) != batch:
            raise ValueError(
                f"{func}(): memory has shape {array.shape}; expected ({batch}, length, {width}), tgt's batch"
            )
        return array

    def _keep(self, memory: ArrayLike | None, padding: Any, batch: int, cache: DecoderCache) -> None:
        """Put keys and values of the memory and its mask into `cache`, or see that they are those in it."""
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
            raise ValueError(
                f"{func}(): tgt has a batch of {batch}; expected {in_cache}, that of the memory in the cache"
                f" (DecoderCache.select() selects in both)"
            )

    def _children(self) -> dict[str, Layer]:
        parts: dict[str, Layer] = {"self_attn.": self.self_attn, "multihead_attn.": self.multihead_attn}
        parts[""] = self.feed_forward
        return {**parts, "norm1.": self.norm1, "norm2.": self.norm2, "norm3.": self.norm3}


def _require_flags(layer: TransformerEncoderLayer | TransformerDecoderLayer) -> None:
    for name in ("norm_first", "bias"):
        flag(type(layer).__name__, name, getattr(layer, name))


def _attention(
    layer: TransformerEncoderLayer | TransformerDecoderLayer, name: str, rng: np.random.Generator | None
) -> MultiHeadAttention:
    """Attention with the options in the field `name`."""
    func, options, known = type(layer).__name__, getattr(layer, name), HeadOptions.__annotations__
    more = {} if options is None else options
    if not isinstance(more, Mapping):
        raise TypeError(f"{func}(): {name} is {short(more)}; expected a dict of {', '.join(known)}")
    if unknown := [key for key in more if key not in known]:
        raise TypeError(f"{func}(): {name} has {short(unknown[0])}; expected {', '.join(known)}")
    return MultiHeadAttention(
        layer.d_model, layer.nhead, bias=layer.bias, weights_dtype=layer.weights_dtype, rng=rng, **more
    )


def _feed_forward(
    layer: TransformerEncoderLayer | TransformerDecoderLayer, rng: np.random.Generator | None
) -> FeedForward:
    return FeedForward(
        layer.d_model,
        layer.dim_feedforward,
        layer.activation,
        layer.bias,
        weights_dtype=layer.weights_dtype,
        rng=rng,
    )


def _norm(layer: TransformerEncoderLayer | TransformerDecoderLayer) -> Norm:
    func = type(layer).__name__
    return make_norm(func, layer.norm, layer.d_model, layer.layer_norm_eps, layer.bias, layer.weights_dtype)
