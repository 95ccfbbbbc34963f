"""OLMo 2 and 3: the names of their tensors, and the keys of config.json.

There are norms of what attention and the feed-forward give, not of their inputs; and one of all query heads
together, one of all key heads. In OLMo 3, layers with a window have rotary positions that no scaling changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn.models._blocks import Blocks
from fastattn.models._families.llama import ALL, KEYS, LLAMA, NEAR
from fastattn.models._families.shared import (
    frequencies,
    frequencies_by_kind,
    head_counts,
    read_decoder,
)

if TYPE_CHECKING:
    from fastattn.models._decoder import Decoder
    from fastattn.models._source import Source

_NAMES = LLAMA._replace(
    block=LLAMA.block._replace(
        attention_norm=None,
        inner_norm=None,
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        norms_of_all=True,
    )
)
_THETAS = {ALL: ("rope_theta", 5e5), NEAR: ("rope_theta", 5e5)}


def olmo(source: Source) -> Decoder:
    """Build OLMo 2 or 3."""
    config, names = source.config, _NAMES.block
    heads, heads_kv = head_counts(config)
    biased = (*names.qkv, names.attended) if config.get("attention_bias", bool, False) else ()
    blocks = Blocks.of(
        source,
        names,
        KEYS,
        eps=1e-5,
        activation="silu",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=config.optional_size("head_dim") or config.divided("hidden_size", "num_attention_heads"),
        biased=frozenset(biased),
    )
    config.refuse(is_causal=True)
    if config.get("model_type", str) == "olmo2":
        each: Any = {"frequencies": lambda: (frequencies(config, blocks.head_dim),)}
    else:
        kinds = config.words("layer_types", (ALL, NEAR), blocks.num_layers)
        if kinds is None:
            kinds = [NEAR if (i + 1) % 4 else ALL for i in range(blocks.num_layers)]
        width = config.optional_size("sliding_window", 4096)
        window = None if width is None else (width - 1, 0)
        longest = config.optional_size("max_position_embeddings")
        each = {
            "windows": [window if kind == NEAR else None for kind in kinds],
            "rotations": [list(_THETAS).index(kind) for kind in kinds],
            "frequencies": lambda: frequencies_by_kind(config, _THETAS, blocks.head_dim, longest, (ALL,)),
        }
    return read_decoder(_NAMES, blocks, **each, tied=config.get("tie_word_embeddings", bool, False))
