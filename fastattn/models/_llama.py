"""Llama, Mistral, Qwen2 and Qwen3: the names of their tensors, and what their config.json says.

They differ in which maps have biases (Llama as configured; Qwen2 those of queries, keys and values), in a
norm of each query and key head (Qwen3), and in which layers attend to a sliding window only.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._decoder import Decoder, DecoderNames, read_decoder
from fastattn.models._files import ModelError
from fastattn.models._rope import frequencies

if TYPE_CHECKING:
    from fastattn.layers._block import Window
    from fastattn.models._files import Config

_NAMES = DecoderNames(
    prefix="model.",
    tokens="embed_tokens",
    block=BlockNames(
        prefix="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attended="self_attn.o_proj",
        inner_norm="post_attention_layernorm",
        inner="mlp.up_proj",
        gate="mlp.gate_proj",
        outer="mlp.down_proj",
        norm="rms_norm",
    ),
    norm="norm",
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),  # config.json gives them; old files hold them
)
_QWEN3 = _NAMES._replace(block=_NAMES.block._replace(head_norms=("self_attn.q_norm", "self_attn.k_norm")))


def build(source: Source) -> Decoder:
    """The model that the folder's files describe."""
    config = source.config
    model_type = config.get("model_type", str)
    names = _QWEN3 if model_type == "qwen3" else _NAMES
    heads = config.size("num_attention_heads")
    heads_kv = config.optional_size("num_key_value_heads") or (8 if model_type == "mistral" else heads)
    if heads % heads_kv:
        expected = f"a multiple of 'num_key_value_heads', {heads_kv}"
        raise ModelError(f"{config.path}: 'num_attention_heads' is {heads}; expected {expected}")
    head_dim = config.optional_size("head_dim") or (
        128 if model_type == "qwen3" else config.divided("hidden_size", "num_attention_heads")
    )
    blocks = Blocks(
        source,
        names.block,
        num_layers=source.tensors.depth(config, "num_hidden_layers"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        eps=config.number("rms_norm_eps", 1e-6),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        biased=_biased(config, model_type, names.block),
    )
    return read_decoder(
        names,
        blocks,
        windows=_windows(config, model_type, blocks.num_layers),
        frequencies=partial(frequencies, config, head_dim),
        tied=config.get("tie_word_embeddings", bool, False),
    )


def _biased(config: Config, model_type: str, names: BlockNames) -> frozenset[str]:
    """The maps that have a bias."""
    if model_type == "qwen2":
        return frozenset(names.qkv)
    biased: list[str | None] = []
    if model_type in ("llama", "qwen3") and config.get("attention_bias", bool, False):
        biased += [*names.qkv, names.attended]
    if model_type == "llama" and config.get("mlp_bias", bool, False):
        biased += [names.gate, names.inner, names.outer]
    return frozenset(name for name in biased if name is not None)


def _windows(config: Config, model_type: str, num_layers: int) -> list[Window]:
    """Each layer's window: a token and the `sliding_window - 1` before it; None for all tokens."""
    if model_type == "llama":
        return [None] * num_layers
    width = config.optional_size("sliding_window", 4096)
    if model_type == "mistral":
        slides = [True] * num_layers
    else:
        if not config.get("use_sliding_window", bool, False):
            width = None
        kinds = config.words("layer_types", ("full_attention", "sliding_attention"), num_layers)
        if kinds is None:
            first = config.size("max_window_layers", 28, low=0)
            slides = [i >= first for i in range(num_layers)]
        else:
            slides = [kind == "sliding_attention" for kind in kinds]
    return [(width - 1, 0) if width is not None and sliding else None for sliding in slides]
