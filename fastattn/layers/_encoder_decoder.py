"""The Transformer: an encoder, and a decoder over its result (Vaswani et al. 2017)."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.options import require_options
from fastattn._args.types import Array, ArrayLike, Rounding, Unpack
from fastattn._args.values import integer, mask_array
from fastattn.layers import _computation
from fastattn.layers._attention_parameters import HeadOptions
from fastattn.layers._computation import Made
from fastattn.layers._decoder_layer import DecoderOptions, TransformerDecoderLayer
from fastattn.layers._stacks import TransformerDecoder, TransformerEncoder
from fastattn.layers._state import Layer, xavier_uniform
from fastattn.layers._transformer import (
    TransformerEncoderLayer,
    TransformerLayer,
    require_fields,
)

if TYPE_CHECKING:
    from fastattn._engine.plain import Plain


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

        Arguments are those of `MultiHeadAttention` and of `TransformerDecoderLayer`. True hides in a bool
        mask. The decoder is causal if `tgt_mask` or `tgt_is_causal` says so. It attends all rows of src that
        `memory_key_padding_mask` does not hide, also those that `src_key_padding_mask` hides, as in torch.
        Step by step: ``memory = model.encoder(src, src_key_padding_mask=padding)`` once, then
        ``model.decoder(tgt, memory, memory_key_padding_mask=padding, cache=...)``: the rows of padding are 0
        in such a memory.
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

        def run(tape: Plain, x: Any, y: Any) -> Any:
            return decode(tape, y, encode(tape, x))

        return [self], {**sources, "tgt": targets["tgt"]}, run, shape, True


def _hides(memory_padding: ArrayLike | None, padding: Array) -> bool:
    """Whether `memory_padding` hides all that the bool mask `padding` hides."""
    if memory_padding is None:
        return False
    mask = mask_array("memory_key_padding_mask", memory_padding)
    hidden = mask if mask.dtype == np.bool_ else mask == -np.inf
    return hidden.shape == padding.shape and bool(hidden[padding].all())
