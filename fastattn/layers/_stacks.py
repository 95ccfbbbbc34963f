"""Stacks of encoder and decoder layers, and the Transformer of both (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fastattn._args.cache import cache_args
from fastattn._args.errors import wrong_type
from fastattn._args.options import require_options
from fastattn._args.values import flag, float_array, integer, iterated
from fastattn._args.words import not_an_argument
from fastattn.cache import Caches, DecoderCache, KVCache, restored_on_error
from fastattn.layers import _calls
from fastattn.layers._basic import _Norm
from fastattn.layers._gradients import pulled, refuse_cache
from fastattn.layers._heads import HeadOptions
from fastattn.layers._residual import TransformerLayer, require_fields
from fastattn.layers._scores import padding_alone
from fastattn.layers._state import Layer, xavier_uniform
from fastattn.layers._transformer import (
    _SRC,
    DecoderOptions,
    OverMemoryOptions,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike
    from typing_extensions import Unpack

    from fastattn._args.options import NoOptions
    from fastattn._args.types import Array, Rounding
    from fastattn._engine.tape import Tape, Value
    from fastattn.grad import Pullback
    from fastattn.layers._residual import Norm


class _Stack(Layer):
    """Layers one after another, and an optional norm behind them."""

    layers: Sequence[Any]
    norm: Norm | None
    _kind: ClassVar[type[Layer]]  # of the layers
    _cache_kind: ClassVar[type]

    def _place(self) -> str:
        return f"a {type(self).__name__} of layers with d_model {self.layers[0].d_model}"

    def __post_init__(self) -> None:
        self._require_layers()
        self.weights_dtype = self.layers[0].weights_dtype
        self._set_up(None)

    def _replace(self, name: str, value: Any) -> None:
        """Set the layers or the norm, which may be None, unlike the parts of other layers."""
        if name not in ("layers", "norm"):
            super()._replace(name, value)
            return
        before = getattr(self, name)
        self._change({name: value})
        try:
            self._require_layers()
        except BaseException:
            self._change({name: before})
            raise

    def _require_layers(self) -> None:
        """Raise unless layers and norm fit together. The caller may have changed the list of layers."""
        func, kind = type(self).__name__, self._kind.__name__
        if not isinstance(self.layers, list):
            expected = f"a sequence of layers, each its own: [{kind}(...) for _ in range(6)]"
            self._change({"layers": list(iterated(func, "layers", self.layers, expected))})
        if not self.layers:
            raise ValueError(f"{func}(): layers is empty; expected at least one layer")
        for i, layer in enumerate(self.layers):
            _calls.require(func, f"layers[{i}]", layer, self._kind, kind)
        widths = {f"layers[{i}].d_model": layer.d_model for i, layer in enumerate(self.layers)}
        if self.norm is not None:
            _calls.require(func, "norm", self.norm, _Norm, "a LayerNorm, an RMSNorm or None")
            widths["norm.features"] = self.norm.features
        width = self.layers[0].d_model
        for name, other in widths.items():
            if other != width:
                raise ValueError(f"{func}(): {name} is {other}; expected {width}, as layers[0] has")

    def _children(self) -> dict[str, Layer]:
        parts = {f"layers.{i}.": layer for i, layer in enumerate(self.layers)}
        return parts if self.norm is None else {**parts, "norm.": self.norm}

    def _run(self, name: str, x: ArrayLike, cache: Sequence[Any] | None, **options: Any) -> Array:
        """One layer after another, on `x`, which is called `name`."""
        self._require_layers()
        result = float_array(type(self).__name__, name, x)
        caches = self._one_each(cache)
        with restored_on_error(caches):
            for layer, its_cache in zip(self.layers, caches, strict=True):
                result = layer(result, cache=its_cache, **options)
            return result if self.norm is None else self.norm(result)

    def _record(
        self, tape: Tape, x: Value, batch: int, memory: Sequence[Value], checkpoint: bool, options: Any
    ) -> Value:
        """One layer after another on a tape, over `memory`, which an encoder's layers do not have."""
        for layer in self.layers:

            def compute(tape: Tape, inputs: Sequence[Value], layer: Any = layer) -> Value:
                found: Value = layer._record(tape, *inputs, batch, **options)
                return found

            inputs = [x, *memory]
            x = tape.checkpoint(compute, inputs) if checkpoint else compute(tape, inputs)
        return x if self.norm is None else self.norm._record(tape, x)

    def _one_each(self, cache: Sequence[Any] | None) -> Sequence[Any]:
        """`cache`, one for each layer."""
        if cache is None:
            return [None] * len(self.layers)
        func, n, kind = type(self).__name__, len(self.layers), self._cache_kind.__name__
        if not isinstance(cache, (list, tuple)) or not all(isinstance(x, self._cache_kind) for x in cache):
            raise wrong_type(func, "cache", cache, f"a list of {kind}, of new_cache()")
        if len(cache) != n:
            expected = f"{n}, as new_cache() makes it"
            raise ValueError(f"{func}(): cache is for {len(cache)} layers; expected {expected}")
        return cache


@dataclass(eq=False)
class TransformerEncoder(_Stack):
    """Encoder layers one after another; with `is_causal` and a cache, the stack of a decoder-only model.

    Its state has torch's names: ``layers.0.*``, ``layers.1.*``, ..., ``norm.*``.

    Parameters
    ----------
    layers : sequence of TransformerEncoderLayer
        Each its own, where torch copies one: ``[TransformerEncoderLayer(...) for _ in range(6)]``.
    norm : LayerNorm or RMSNorm, optional
        Applied to the result; pre-norm layers want one.
    """

    layers: Sequence[TransformerEncoderLayer]
    norm: Norm | None = None
    _kind, _cache_kind = TransformerEncoderLayer, KVCache

    def __call__(
        self,
        src: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        cache: Sequence[KVCache] | None = None,
        lengths: ArrayLike | None = None,
        **others: Unpack[NoOptions],
    ) -> Array:
        """The stack's result for src, (B, L, d_model) or (L, d_model).

        Arguments are those of `TransformerEncoderLayer`, `mask` its src_mask: True hides in a bool mask.
        `cache` is of `new_cache`.
        """
        if others:
            raise not_an_argument("TransformerEncoder", others, TransformerEncoder.__call__)
        options = {"src_key_padding_mask": src_key_padding_mask, "is_causal": is_causal, "lengths": lengths}
        out = self._run("src", src, cache, src_mask=mask, **options)
        if self.norm is not None:  # it makes its bias of rows that are 0
            given = (is_causal, mask, cache, lengths)
            _, padding = padding_alone(_SRC, src_key_padding_mask, out.shape[:-1], *given)
            if padding is not None:
                out[padding] = 0
        return out

    def _vjp(
        self,
        src: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **others: Unpack[NoOptions],
    ) -> tuple[Array, Pullback]:
        """The stack's result, and what makes gradients: ``dsrc, grads = pullback(dout)``; see `Pullback`.

        Arguments are those of the layers. With `checkpoint`, only the input of each layer
        is kept.
        """
        if others:
            func = "TransformerEncoder"
            raise not_an_argument(func, others, TransformerEncoder._vjp)
        self._require_layers()
        checkpoint = flag("TransformerEncoder", "checkpoint", checkpoint)
        batched, options, array = self._encoded(src, mask, src_key_padding_mask, is_causal)

        def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
            return self._record(tape, inputs[0], batched, (), checkpoint, options)

        return pulled(self, compute, [array], array.shape, False, dropout, seed)

    def _record(
        self, tape: Tape, x: Value, batch: int, memory: Sequence[Value], checkpoint: bool, options: Any
    ) -> Value:
        out = super()._record(tape, x, batch, memory, checkpoint, options)
        if self.norm is None:
            return out
        shape = batch, len(x.array) // max(1, batch)
        others = (options["is_causal"], options["src_mask"])
        _, padding = padding_alone(_SRC, options["src_key_padding_mask"], shape, *others)
        return out if padding is None else tape.cleared(out, padding.ravel())

    def _encoded(
        self, src: ArrayLike, mask: Any, padding: Any, is_causal: bool
    ) -> tuple[int, dict[str, Any], Array]:
        """The batch, the options of the layers, and the input of a call."""
        func = type(self).__name__
        array, batched = self.layers[0]._input("src", src, None, KVCache)
        if batched is not array:
            padding = _calls.one_batch(func, "src_key_padding_mask", padding)
        options = {"src_mask": mask, "src_key_padding_mask": padding}
        return len(batched), {**options, "is_causal": flag(func, "is_causal", is_causal)}, array

    def new_cache(self, capacity: int = 0, dtype: DTypeLike | None = None) -> Caches[KVCache]:
        """Empty caches, one a layer: see `KVCache`."""
        room, kept = cache_args(f"{type(self).__name__}.new_cache", capacity, dtype)
        return Caches(KVCache(room, kept) for _ in self.layers)


@dataclass(eq=False)
class TransformerDecoder(_Stack):
    """Decoder layers one after another, all over the same memory; its state is like `TransformerEncoder`'s.

    Parameters
    ----------
    layers : sequence of TransformerDecoderLayer
    norm : LayerNorm or RMSNorm, optional
    """

    layers: Sequence[TransformerDecoderLayer]
    norm: Norm | None = None
    _kind, _cache_kind = TransformerDecoderLayer, DecoderCache

    def __call__(
        self,
        tgt: ArrayLike,
        memory: ArrayLike | None = None,
        *,
        cache: Sequence[DecoderCache] | None = None,
        **options: Unpack[DecoderOptions],
    ) -> Array:
        """The stack's result for tgt, (B, L, d_model), over memory.

        Arguments are those of `TransformerDecoderLayer`; `cache` is of `new_cache`.
        """
        require_options("TransformerDecoder", options, DecoderOptions)
        return self._run("tgt", tgt, cache, memory=memory, **options)

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
        """The stack's result, and what makes gradients: ``dtgt, dmemory, grads = pullback(dout)``.

        See `Pullback`. Arguments are those of a call without a cache. With `checkpoint`, only the input of
        each layer is kept.
        """
        self._require_layers()
        checkpoint = flag("TransformerDecoder", "checkpoint", checkpoint)
        batch, masks, array = self._decoded("TransformerDecoder", tgt, options)
        over = self.layers[0]._memory(memory, batch)

        def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
            return self._record(tape, inputs[0], batch, inputs[1:], checkpoint, masks)

        inputs = [array, over if np.ndim(memory) == 3 else over[0]]
        return pulled(self, compute, inputs, array.shape, False, dropout, seed)

    def _decoded(self, func: str, tgt: ArrayLike, options: Any) -> tuple[int, dict[str, Any], Array]:
        """The batch, the options of the layers, and the input of a call without a cache."""
        require_options(func, options, DecoderOptions)
        refuse_cache(func, options)
        array, batched = self.layers[0]._input("tgt", tgt, None, DecoderCache)
        masks = dict(options)
        if batched is not array:
            for name in ("tgt_key_padding_mask", "memory_key_padding_mask"):
                masks[name] = _calls.one_batch(func, name, masks.get(name))
        return len(batched), masks, array

    def new_cache(self, capacity: int = 0, dtype: DTypeLike | None = None) -> Caches[DecoderCache]:
        """Empty caches, one a layer: see `KVCache` and `DecoderCache`."""
        room, kept = cache_args(f"{type(self).__name__}.new_cache", capacity, dtype)
        return Caches(DecoderCache(KVCache(room, kept)) for _ in self.layers)


# Fields of `Transformer` that it hands to all of its layers.
_SHARED = [field.name for field in fields(TransformerLayer) if field.init]


@dataclass(eq=False)
class Transformer(Layer):
    """An encoder, and a decoder over its result: torch's ``nn.Transformer``, batch first.

    Its state has torch's names: ``encoder.*``, ``decoder.*``. Embeddings and positions are the caller's.

    Parameters
    ----------
    d_model, num_heads : int, default 512 and 8
    num_encoder_layers, num_decoder_layers : int, default 6
    dim_feedforward, activation, norm_first, norm, layer_norm_eps, bias, weights_dtype, activations
        As in `TransformerEncoderLayer`.
    attention, cross_attention : dict, optional
        Options of `MultiHeadAttention` for the attention to itself, on both sides, and over the memory.
    rng : Generator or int, optional
        Draws the parameters, all matrices from Xavier's uniform distribution, as torch does here.
    """

    d_model: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
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
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    encoder: TransformerEncoder = field(init=False, repr=False)
    decoder: TransformerDecoder = field(init=False, repr=False)

    _parts = ("encoder", "decoder")

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        require_fields(self)
        for name in ("num_encoder_layers", "num_decoder_layers"):
            setattr(self, name, integer("Transformer", name, getattr(self, name), 1))
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        encoder = [TransformerEncoderLayer(**shared) for _ in range(self.num_encoder_layers)]
        shared["cross_attention"] = self.cross_attention
        decoder = [TransformerDecoderLayer(**shared) for _ in range(self.num_decoder_layers)]
        self.encoder = TransformerEncoder(encoder, encoder[0]._new_norm())
        self.decoder = TransformerDecoder(decoder, decoder[0]._new_norm())
        self._set_up(None)
        source = self._source(rng)
        if source is not None:
            parameters = self.parameters().items()
            draws = {name: xavier_uniform if len(p.shape) == 2 else p.draw for name, p in parameters}
            self.load_state_dict({name: draws[name](source, p.shape) for name, p in parameters})

    def __call__(
        self,
        src: ArrayLike,
        tgt: ArrayLike,
        *,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        src_is_causal: bool = False,
        **options: Unpack[OverMemoryOptions],
    ) -> Array:
        """Encode src (B, S, d_model), decode tgt (B, T, d_model) over it: (B, T, d_model).

        Arguments are those of `MultiHeadAttention` and of `TransformerDecoderLayer`. True hides in a bool
        mask. The decoder is causal if `tgt_mask` or `tgt_is_causal` says so. Step by step:
        ``memory = model.encoder(src)`` once, then ``model.decoder(tgt, memory, cache=...)``.
        """
        require_options("Transformer", options, OverMemoryOptions)
        memory = self.encoder(
            src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal
        )
        return self.decoder(tgt, memory, **options)

    def _vjp(
        self,
        src: ArrayLike,
        tgt: ArrayLike,
        *,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        src_is_causal: bool = False,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Unpack[OverMemoryOptions],
    ) -> tuple[Array, Pullback]:
        """The decoder's result, and what makes gradients: ``dsrc, dtgt, grads = pullback(dout)``.

        See `Pullback`. Arguments are those of a call. With `checkpoint`, only the input of each layer is
        kept.
        """
        func = "Transformer"
        require_options(func, options, OverMemoryOptions)
        checkpoint = flag(func, "checkpoint", checkpoint)
        encoder, decoder = self.encoder, self.decoder
        batch, own, ours = encoder._encoded(src, src_mask, src_key_padding_mask, src_is_causal)
        _, masks, theirs = decoder._decoded(func, tgt, options)
        decoder.layers[0]._memory(ours, 1 if theirs.ndim == 2 else len(theirs))

        def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
            memory = encoder._record(tape, inputs[0], batch, (), checkpoint, own)
            return decoder._record(tape, inputs[1], batch, (memory,), checkpoint, masks)

        return pulled(self, compute, [ours, theirs], theirs.shape, False, dropout, seed)
