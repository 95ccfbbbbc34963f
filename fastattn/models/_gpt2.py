"""GPT-2 (Radford et al. 2019): the names of its tensors, and what its config.json says."""

from __future__ import annotations

import re

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._decoder import Decoder, DecoderNames, read_decoder

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


def build(source: Source) -> Decoder:
    """The model that the folder's files describe."""
    config = source.config
    hidden, heads = config.size("n_embd"), config.size("n_head")
    config.refuse_others(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    config.refuse_others(max_position_embeddings="n_positions")
    blocks = Blocks(
        source,
        _NAMES.block,
        num_layers=source.tensors.depth(config, "n_layer"),
        hidden=hidden,
        inner=config.optional_size("n_inner") or 4 * hidden,
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("n_embd", "n_head"),
        eps=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        biased=_NAMES.block.maps,
    )
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
