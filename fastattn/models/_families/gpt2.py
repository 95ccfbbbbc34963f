"""GPT-2 (Radford et al. 2019): the names of its tensors, and the keys of its config.json."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastattn.models._blocks import BlockNames, Blocks, Keys
from fastattn.models._families.shared import DecoderNames, read_decoder

if TYPE_CHECKING:
    from fastattn.models._decoder import Decoder
    from fastattn.models._source import Source

_NAMES = DecoderNames(
    prefix="transformer.",
    tokens="wte",
    positions="wpe",
    block=BlockNames(
        prefix="h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        attended="attn.c_proj",
        inner_norm="ln_2",
        inner="mlp.c_fc",
        outer="mlp.c_proj",
        transposed=True,
    ),
    norm="ln_f",
    ignored=re.compile(r"\.attn\.(bias|masked_bias)$"),  # the causal mask, in old files
)
_KEYS = Keys("n_embd", "n_inner", "n_head", "n_layer", "layer_norm_epsilon", "activation_function")


def gpt2(source: Source) -> Decoder:
    """Build GPT-2."""
    config = source.config
    config.refuse_others(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    config.refuse_others(max_position_embeddings="n_positions")
    inner = config.optional_size("n_inner") or 4 * config.size("n_embd")
    blocks = Blocks.of(source, _NAMES.block, _KEYS, eps=1e-5, activation="gelu_new", inner=inner)
    config.refuse(add_cross_attention=False)
    scale = blocks.head_dim**-0.5 if config.get("scale_attn_weights", bool, True) else 1.0
    by_depth = config.get("scale_attn_by_inverse_layer_idx", bool, False)
    return read_decoder(
        _NAMES,
        blocks,
        scales=[scale / (i + 1) if by_depth else scale for i in range(blocks.num_layers)],
        max_length=config.size("n_positions"),
        tied=config.get("tie_word_embeddings", bool, True),
    )
