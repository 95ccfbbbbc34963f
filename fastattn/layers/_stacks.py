"""Stacks of encoder layers and of decoder layers, and the Transformer of both (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fastattn._args.cache import cache_args, require_blocks
from fastattn._args.errors import named, wrong_shape, wrong_type
from fastattn._args.options import require_options
from fastattn._args.types import Array, ArrayLike, DTypeLike, Rounding, Unpack
from fastattn._args.values import integer, integers, iterated, mask_array
from fastattn._args.words import MEANINGS
from fastattn.layers import _computation
from fastattn.layers._basic import NormLayer
from fastattn.layers._cache import KVCache
from fastattn.layers._computation import Made
from fastattn.layers._decoder_layer import DecoderOptions, TransformerDecoderLayer
from fastattn.layers._layer_caches import Caches, DecoderCache
from fastattn.layers._state import Layer, xavier_uniform
from fastattn.layers._transformer import (
    TransformerEncoderLayer,
    TransformerLayer,
    require_fields,
)

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape
    from fastattn.layers._transformer import Kept


_NAMES = ("src", "mask", "src_key_padding_mask")  # of an encoder's arguments
# What attentions that share keys have in common: fields, and the options that set them.
_OF_KEYS = {"_heads_kv": "num_kv_heads", "_head_dim": "head_dim", "rope": "rope"}


@dataclass(eq=False)
class LayerStack(Layer):
    """Layers one after another, and an optional norm after them."""

    layers: Sequence[Any]
    norm: NormLayer | None = None
    keys_from: Sequence[int] | None = None
    # Layers that attend the keys of another, and that one.
    _borrowed: dict[int, int] = field(init=False, default_factory=dict, repr=False)
    _programs: dict[bool, Kept] = field(init=False, default_factory=dict, repr=False)
    _kind: ClassVar[type[Layer]]  # of the layers
    _cache_kind: ClassVar[type]

    def _place(self) -> str:
        return f"a {type(self).__name__} of layers with d_model {self.layers[0].d_model}"

    def __post_init__(self) -> None:
        self._require_layers()
        self.weights_dtype = self.layers[0].weights_dtype
        self._set_up(None)

    @named("{cls}")
    def _replace(self, name: str, value: Any) -> None:
        """Set the layers, whose keys they attend, or the norm, which may be None, unlike parts of others."""
        if name not in ("layers", "norm", "keys_from"):
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
        kind = self._kind.__name__
        if not isinstance(self.layers, list):
            expected = MEANINGS["layers"].format(kind=kind)
            self._change({"layers": list(iterated("layers", self.layers, expected))})
        if not self.layers:
            raise ValueError("(): layers is empty; expected at least one layer")
        for i, layer in enumerate(self.layers):
            _computation.require(f"layers[{i}]", layer, self._kind, kind)
        widths = {f"layers[{i}].d_model": layer.d_model for i, layer in enumerate(self.layers)}
        if self.norm is not None:
            _computation.require("norm", self.norm, NormLayer, "a LayerNorm, an RMSNorm or None")
            widths["norm.features"] = self.norm.features
        width = self.layers[0].d_model
        for name, other in widths.items():
            if other != width:
                raise ValueError(f"(): {name} is {other}; expected {width}, as layers[0] has")
        self.__dict__["_borrowed"] = self._sources()

    def _sources(self) -> dict[int, int]:
        """The layer whose keys and values each one attends that has none, checked."""
        attentions = [layer.self_attn for layer in self.layers]
        if self.keys_from is None:
            sources = list(accumulate((0 if own.query_only else i for i, own in enumerate(attentions)), max))
        else:
            given = integers("keys_from", self.keys_from)
            if given.shape != (count := len(attentions),):
                raise wrong_shape("keys_from", given, f"({count},), a number for each layer")
            sources = given.tolist()
        borrowed: dict[int, int] = {}
        for i, (own, source) in enumerate(zip(attentions, sources, strict=True)):
            if not 0 <= source <= i:
                raise ValueError(f"(): keys_from[{i}] is {source}; expected {i}, or a layer before it")
            if own.query_only == (source == i):
                expected = "False, to have keys" if source == i else f"True, for the keys of layers[{source}]"
                came = f"layers[{i}].self_attn.query_only is {own.query_only}"
                raise ValueError(f"(): {came}; expected {expected}")
            if source == i:
                continue
            if source in borrowed:
                came = f"keys_from[{i}] is {source}, which attends the keys of {borrowed[source]}"
                raise ValueError(f"(): {came}; expected a layer that has keys")
            borrowed[i] = source
            for field_name, option in _OF_KEYS.items():
                mine, theirs = (getattr(x, field_name) for x in (own, attentions[source]))
                if mine != theirs:
                    came = f"layers[{i}].self_attn has {option}={mine}"
                    raise ValueError(
                        f"(): {came}; expected {theirs}, that of layers[{source}], whose keys it attends"
                    )
        return borrowed

    def _children(self) -> dict[str, Layer]:
        parts = {f"layers.{i}.": layer for i, layer in enumerate(self.layers)}
        return parts if self.norm is None else {**parts, "norm.": self.norm}

    _forward = TransformerLayer._forward

    def _cache_args(self, capacity: int, dtype: DTypeLike | None) -> tuple[int, np.dtype[Any] | None]:
        """Check the arguments of `new_cache`."""
        room, kept = cache_args(capacity, dtype)
        for i, layer in enumerate(self.layers):
            require_blocks(f"layers[{i}] has a head_dim of", layer.self_attn._head_dim, kept)
        return room, kept

    def _holders(self) -> Sequence[int]:
        """The layers that have a cache."""
        return range(len(self.layers))

    def _one_each(self, cache: Sequence[Any]) -> Sequence[Any]:
        """`cache`, one for each layer, None for those without."""
        kind, holders = self._cache_kind.__name__, self._holders()
        if not isinstance(cache, (list, tuple)) or not all(isinstance(x, self._cache_kind) for x in cache):
            raise wrong_type("cache", cache, f"a list of {kind}, of new_cache()")
        if len(cache) != len(holders):
            expected = f"{len(holders)}, as new_cache() makes it"
            raise ValueError(f"(): cache is for {len(cache)} layers; expected {expected}")
        if len(set(map(id, cache))) < len(cache):
            raise ValueError(
                "(): cache has one cache for several layers; expected one for each, as new_cache() makes"
            )
        own = dict(zip(holders, cache, strict=True))
        return [own.get(i) for i in range(len(self.layers))]


@dataclass(eq=False)
class TransformerEncoder(LayerStack):
    """Stack of encoder layers; with `is_causal` and a cache, of a decoder-only model.

    State names are torch's: ``layers.0.*``, ``layers.1.*``, ..., ``norm.*``.

    Parameters
    ----------
    layers : sequence of TransformerEncoderLayer
        Separate layers, where torch copies one: ``[TransformerEncoderLayer(...) for _ in range(6)]``.
    norm : LayerNorm or RMSNorm, optional
        Applied to the result; for pre-norm layers.
    keys_from : sequence of int, optional
        For each layer the index of the layer whose keys and values it attends: its own, or an earlier one.
        Layers that attend another's keys are built with ``attention={"query_only": True}`` and its rope,
        head_dim and num_kv_heads. Default: the nearest earlier layer with keys.

    Notes
    -----
    ``keys_from=[0, 0, 2, 2]`` is the cross-layer attention of Brandon et al. 2024 (arXiv:2405.12981) and
    MLKV (Zuhri et al. 2024, arXiv:2406.09297); ``[0, 1, 2, 2, 2]`` is YOCO (Sun et al. 2024,
    arXiv:2405.05254). Models with two kinds of layers (Gemma 3n) share within each kind. A cache has no keys
    for layers that share.
    """

    layers: Sequence[TransformerEncoderLayer]
    _kind, _cache_kind = TransformerEncoderLayer, KVCache

    @_computation.computed()
    def __call__(
        self,
        src: ArrayLike,
        mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        *,
        cache: Sequence[KVCache] | None = None,
        lengths: ArrayLike | None = None,
    ) -> Made:
        """Compute the stack of src, (B, L, d_model) or (L, d_model).

        Arguments are as in `TransformerEncoderLayer`, its src_mask as `mask`; `cache` is from `new_cache`.
        """
        self._require_layers()
        self._require_parts()
        masks = _NAMES, mask, src_key_padding_mask, is_causal
        return self.layers[0]._encoding(self, src, masks, cache, lengths)

    def _holders(self) -> Sequence[int]:
        return [i for i in range(len(self.layers)) if i not in self._borrowed]

    @named("{cls}.new_cache")
    def new_cache(self, capacity: int = 0, dtype: DTypeLike | None = None) -> Caches[KVCache]:
        """Make empty caches, one for each layer that has keys: see `KVCache`."""
        room, kept = self._cache_args(capacity, dtype)
        self._require_layers()
        return Caches(KVCache(room, kept) for _ in self._holders())


@dataclass(eq=False)
class TransformerDecoder(LayerStack):
    """Stack of decoder layers over one memory; state names are as in `TransformerEncoder`.

    Parameters
    ----------
    layers : sequence of TransformerDecoderLayer
    norm : LayerNorm or RMSNorm, optional
    keys_from : sequence of int, optional
        As in `TransformerEncoder`, for self-attention. Each layer has its own keys of the memory.
    """

    layers: Sequence[TransformerDecoderLayer]
    _kind, _cache_kind = TransformerDecoderLayer, DecoderCache

    @_computation.computed("tgt_mask and memory_mask")
    def __call__(
        self,
        tgt: ArrayLike,
        memory: ArrayLike | None = None,
        *,
        cache: Sequence[DecoderCache] | None = None,
        **options: Unpack[DecoderOptions],
    ) -> Made:
        """Compute the stack of tgt, (B, L, d_model), over memory.

        Arguments are as in `TransformerDecoderLayer`; `cache` is of `new_cache`.
        """
        self._require_layers()
        self._require_parts()
        return self.layers[0]._decoding(self, tgt, memory, cache, options)

    @named("{cls}.new_cache")
    def new_cache(self, capacity: int = 0, dtype: DTypeLike | None = None) -> Caches[DecoderCache]:
        """Make empty caches, one for each layer: see `KVCache` and `DecoderCache`."""
        room, kept = self._cache_args(capacity, dtype)
        return Caches(DecoderCache(KVCache(room, kept)) for _ in self.layers)


# Fields of `Transformer` that it hands to all of its layers.
_SHARED = [field.name for field in fields(TransformerLayer) if field.init]


@dataclass(eq=False)
class Transformer(Layer):
    """Encoder, and decoder over its result: torch's ``nn.Transformer``, batch first.

    State names are torch's: ``encoder.*``, ``decoder.*``. Embeddings and positions are not included.

    Parameters
    ----------
    d_model, num_heads : int, default 512 and 8
    num_encoder_layers, num_decoder_layers : int, default 6
    dim_feedforward, activation, norm_first, norm, layer_norm_eps, bias, weights_dtype, activations
        As in `TransformerEncoderLayer`.
    attention, cross_attention : dict, optional
        Options of `MultiHeadAttention` for self-attention, on both sides, and for attention over the memory.
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
    attention: Mapping[str, Any] | None = None
    cross_attention: Mapping[str, Any] | None = None
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    encoder: TransformerEncoder = field(init=False, repr=False)
    decoder: TransformerDecoder = field(init=False, repr=False)

    _parts = ("encoder", "decoder")

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        require_fields(self)
        for name in ("num_encoder_layers", "num_decoder_layers"):
            setattr(self, name, integer(name, getattr(self, name), 1))
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

    @_computation.computed("src_mask and tgt_mask")
    def __call__(
        self,
        src: ArrayLike,
        tgt: ArrayLike,
        *,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        src_is_causal: bool = False,
        **options: Unpack[DecoderOptions],
    ) -> Made:
        """Encode src (B, S, d_model), decode tgt (B, T, d_model) over it: (B, T, d_model).

        Arguments are as in `MultiHeadAttention` and `TransformerDecoderLayer`: True hides in a bool mask. The
        decoder is causal with `tgt_is_causal` or a causal `tgt_mask`. As in torch, it attends all rows of src
        that `memory_key_padding_mask` does not hide, even if `src_key_padding_mask` does. Step by step: once
        ``memory = model.encoder(src, src_key_padding_mask=padding)``, whose rows of padding are 0, then
        ``model.decoder(tgt, memory, memory_key_padding_mask=padding, cache=...)``.
        """
        require_options(options, DecoderOptions)
        self._require_parts()
        padding = src_key_padding_mask
        if padding is not None:
            padding = mask_array("src_key_padding_mask", padding)
            if padding.dtype == np.bool_ and not _hides(options.get("memory_key_padding_mask"), padding):
                padding = np.where(padding, -np.inf, 0)  # as floats: the encoder computes rows to attend
        masks: dict[str, Any] = {"mask": src_mask, "src_key_padding_mask": padding}
        _, sources, encode, *_ = self.encoder._computation(src, is_causal=src_is_causal, **masks)
        _, targets, decode, shape, _ = self.decoder._computation(tgt, sources["src"], **options)

        def run(tape: Tape, x: Any, y: Any) -> Any:
            return decode(tape, y, encode(tape, x))

        return [self], {**sources, "tgt": targets["tgt"]}, run, shape, True


def _hides(memory_padding: ArrayLike | None, padding: Array) -> bool:
    """Whether `memory_padding` hides all that the bool mask `padding` hides."""
    if memory_padding is None:
        return False
    mask = mask_array("memory_key_padding_mask", memory_padding)
    hidden = mask if mask.dtype == np.bool_ else mask == -np.inf
    return hidden.shape == padding.shape and bool(hidden[padding].all())
