"""Granite: Llama with multipliers of tokens, scores, logits and of what is added to the residual."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fastattn.models._blocks import Blocks
from fastattn.models._families.llama import KEYS, LLAMA, biased
from fastattn.models._families.shared import frequencies, head_counts, read_decoder

if TYPE_CHECKING:
    from fastattn.models._decoder import Decoder
    from fastattn.models._families.shared import DecoderNames
    from fastattn.models._source import Source


def granite(source: Source) -> Decoder:
    """Build Granite."""
    config = source.config
    heads, heads_kv = head_counts(config)
    blocks = Blocks.of(
        source,
        LLAMA.block,
        KEYS,
        eps=1e-6,
        activation="silu",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=config.optional_size("head_dim") or config.divided("hidden_size", "num_attention_heads"),
        biased=biased(source, "granite", LLAMA.block),
    )
    config.refuse(is_causal=True)
    return multiplied(LLAMA, blocks)


def multiplied(names: DecoderNames, blocks: Blocks, *, rotary: bool = True) -> Decoder:
    """The decoder of `blocks` with Granite's multipliers; heads are rotated if `rotary`.

    Without multiplying what is added: every reader of the residual is an RMS norm, whose result is the same
    for x / c and an eps of ``eps / c**2``. So the tokens' vectors are divided by that multiplier instead.
    """
    config = blocks.source.config
    added = config.number("residual_multiplier", 1.0)
    return read_decoder(
        names,
        replace(blocks, eps=blocks.eps / added**2),
        scales=[config.number("attention_multiplier", 1.0)] * blocks.num_layers,
        frequencies=(lambda: (frequencies(config, blocks.head_dim),)) if rotary else None,
        token_scale=config.number("embedding_multiplier", 1.0) / added,
        logit_scale=1 / config.number("logits_scaling", 1.0),
        tied=config.get("tie_word_embeddings", bool, False),
    )
