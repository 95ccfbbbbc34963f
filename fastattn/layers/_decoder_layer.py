"""The layer of decoders (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.options import require_options
from fastattn._args.types import Array, ArrayLike, Unpack
from fastattn._args.values import as_array, flag
from fastattn.layers import _computation
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._basic import NormLayer
from fastattn.layers._computation import Made
from fastattn.layers._layer_caches import DecoderCache
from fastattn.layers._transformer import TransformerLayer

if TYPE_CHECKING:
    from fastattn._args.types import Bools
    from fastattn._engine.tape import Tape
    from fastattn.layers._block import Block
    from fastattn.layers._transformer import LayerCall

_TGT = ("tgt", "tgt_mask", "tgt_key_padding_mask")
_MEMORY = ("tgt", "memory_mask", "memory_key_padding_mask")


class DecoderOptions(TypedDict, total=False):
    """Options of a decoder's call that `TransformerDecoderLayer` documents."""

    tgt_mask: ArrayLike | None
    memory_mask: ArrayLike | None
    tgt_key_padding_mask: ArrayLike | None
    memory_key_padding_mask: ArrayLike | None
    tgt_is_causal: bool | None
    memory_is_causal: bool
    lengths: ArrayLike | None


@dataclass(eq=False)
class TransformerDecoderLayer(TransformerLayer):
    """Masked self-attention, then attention over the encoder's memory, then feed-forward.

    Options and state names are as in `TransformerEncoderLayer`; the state also has ``multihead_attn.*`` and
    ``norm3.*``.

    Parameters
    ----------
    attention, cross_attention : dict, optional
        Options of `MultiHeadAttention` for self-attention and for attention over the memory.
    """

    cross_attention: Mapping[str, Any] | None = field(default=None, kw_only=True)
    multihead_attn: MultiHeadAttention = field(init=False, repr=False)
    norm3: NormLayer = field(init=False, repr=False)

    _parts = ("self_attn", "multihead_attn", "feed_forward", "norm1", "norm2", "norm3")

    @_computation.computed("tgt_mask and memory_mask")
    def __call__(
        self,
        tgt: ArrayLike,
        memory: ArrayLike | None = None,
        *,
        cache: DecoderCache | None = None,
        **options: Unpack[DecoderOptions],
    ) -> Made:
        """Compute the layer of tgt, (B, L, d_model), over memory, (B, S, d_model), or of both without B.

        Parameters
        ----------
        tgt_mask, tgt_key_padding_mask, tgt_is_causal
            For self-attention, as in `MultiHeadAttention`: True hides, as in torch, the opposite of
            `attention`. By default causal only with a cache.
        memory_mask, memory_key_padding_mask, memory_is_causal
            For attention over the memory. With a cache, positions of tgt follow its tokens here, too.
        cache : DecoderCache, optional
            Append tgt's keys. The first call also stores the memory's keys and key padding mask; later calls
            may omit both, and must not pass others.
        lengths : array_like of int, (B,), optional
            With `cache`: number of tokens of this call in each sequence.
        """
        if cache is not None:
            _computation.require("cache", cache, DecoderCache, "a DecoderCache")
        return self._decoding(self, tgt, memory, cache, options)

    def _decoding(self, whole: Any, tgt: ArrayLike, memory: Any, cache: Any, options: Any) -> Made:
        """A call of `whole`, this layer or the stack that begins with it."""
        require_options(options, DecoderOptions)
        array, batched = self._input("tgt", tgt)
        if batched is not array:
            paddings = {names[2]: options.get(names[2]) for names in (_TGT, _MEMORY)}
            options |= {name: _computation.one_batch(name, mask) for name, mask in paddings.items()}
        is_causal = options.get("tgt_is_causal")
        causal = (
            cache is not None if is_causal is None else flag("tgt_is_causal", is_causal),
            flag("memory_is_causal", options.get("memory_is_causal", False)),
        )
        own, of_memory = (
            (names, options.get(names[1]), options.get(names[2]), each)
            for names, each in zip((_TGT, _MEMORY), causal, strict=True)
        )
        sizes, inputs = batched.shape[:2], {"tgt": array}
        call = sizes, (own, of_memory), options.get("lengths"), memory
        if cache is None:
            inputs["memory"] = self._memory(memory, sizes[0])

        def run(tape: Tape, x: Any, *over: Any) -> Any:
            return whole._forward(tape, x, *over, call=call, cache=cache)

        return [whole], inputs, run, array.shape, whole is not self

    def _blocks(self, own: bool, keys_from: int | None, rotation: int) -> list[Block]:
        return [*super()._blocks(own, keys_from, rotation), self._block("multihead_attn", False)]

    def _given(
        self, call: LayerCall, cache: DecoderCache | None, position: Any, counted: Bools | None
    ) -> list[dict[str, Any]]:
        sizes, (_, (names, mask, padding, is_causal)), _, memory = call
        keys = None
        if cache is not None:
            self._keep(memory, padding, sizes[0], cache)
            keys, padding = cache.keys_values, cache.key_padding_mask
        tokens = None if cache is None or self.self_attn.query_only else cache.tokens
        over = {"sizes": sizes, "masks": (names, mask, padding, is_causal), "keys_values": keys}
        return [*super()._given(call, tokens, position, None), {**over, "q_offset": position}]

    def _memory(self, memory: ArrayLike | None, batch: int) -> Array:
        """`memory`, (batch, S, width), checked; that of one sequence may lack the batch axis."""
        if memory is None:
            raise ValueError("(): memory is None; expected an array, or a cache that holds one")
        width = self.multihead_attn.kdim or self.d_model
        array = _computation.checked("memory", memory, width, self.weights_dtype)
        if len(batched := _computation.batch_first("memory", array)) != batch:
            raise wrong_shape("memory", batched, f"({batch}, length, {width}), tgt's batch")
        return array

    def _keep(self, memory: ArrayLike | None, padding: Any, batch: int, cache: DecoderCache) -> None:
        """Put the memory's keys, values and mask into `cache`, or check that it has the same ones."""
        padding = None if padding is None else as_array("memory_key_padding_mask", padding)
        if cache.keys_values is None:
            array = _computation.batch_first("memory", self._memory(memory, batch))
            cache.keys_values, cache.memory = self.multihead_attn.project_keys_values(array), memory
            cache.key_padding_mask = None if padding is None else padding.copy()
            return
        kept = "that of the first call with this cache; expected that one, or None (after select() None)"
        if memory is not None and memory is not cache.memory:
            raise ValueError(f"(): memory is not {kept}")
        if padding is not None:
            there = cache.key_padding_mask
            if there is None or not np.array_equal(padding, there):
                raise ValueError(f"(): memory_key_padding_mask is not {kept}")
        in_cache = len(cache.keys_values[0])
        if in_cache != batch:
            expected = f"{in_cache}, that of the memory in the cache (DecoderCache.select() selects in both)"
            raise ValueError(f"(): tgt has a batch of {batch}; expected {expected}")
