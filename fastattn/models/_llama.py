"""Llama, Mistral, Qwen2 and Qwen3: the names of their tensors, and what their config.json says.

They differ in which maps have biases (Llama as configured; Qwen2 those of queries, keys and values), in a
norm of each query and key head (Qwen3), and in which layers attend to a sliding window only. A folder with
modules.json is an encoder (Qwen3-Embedding, Qwen3-Reranker, E5-Mistral), so is one with a head that scores
texts, and any other is a decoder.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._decoder import Decoder, DecoderNames, read_decoder
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._files import ModelError
from fastattn.models._rope import frequencies

if TYPE_CHECKING:
    from fastattn.layers._block import Window
    from fastattn.models._encoder import Encoder
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
QWEN3 = _NAMES._replace(block=_NAMES.block._replace(head_norms=("self_attn.q_norm", "self_attn.k_norm")))


def build(source: Source) -> Decoder | Encoder:
    """The model that the folder's files describe."""
    config = source.config
    model_type = config.get("model_type", str)
    names = QWEN3 if model_type == "qwen3" else _NAMES
    heads, heads_kv = head_counts(config, 8 if model_type == "mistral" else None)
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
    rotary = partial(frequencies, config, head_dim)
    said = config.values.get("architectures")
    scores = isinstance(said, list) and str(next(iter(said), "")).endswith("ForSequenceClassification")
    if scores or (source.folder / "modules.json").is_file():
        causal = config.get("is_causal", bool, True)
        return read_encoder(
            encoder_names(names),
            blocks,
            longest=config.optional_size("max_position_embeddings"),
            windows=_windows(config, model_type, blocks.num_layers, causal),
            rotations=[0] * blocks.num_layers,
            causal=causal,
            frequencies=lambda: (rotary(),),
        )
    config.refuse(is_causal=True)
    return read_decoder(
        names,
        blocks,
        windows=_windows(config, model_type, blocks.num_layers),
        frequencies=rotary,
        tied=config.get("tie_word_embeddings", bool, False),
    )


def encoder_names(names: DecoderNames) -> EncoderNames:
    """The names of the same decoder's tensors as those of an encoder, without an output layer."""
    return EncoderNames(
        block=names.block,
        tokens=names.tokens,
        last_norm=names.norm,
        prefixes=(names.prefix,),
        ignored=names.ignored,
    )


def head_counts(config: Config, usual: int | None = None) -> tuple[int, int]:
    """How many heads queries have, and keys: without a number `usual` ones, or as many as queries."""
    heads = config.size("num_attention_heads")
    heads_kv = config.optional_size("num_key_value_heads") or usual or heads
    if heads % heads_kv:
        expected = f"a multiple of 'num_key_value_heads', {heads_kv}"
        raise ModelError(f"{config.path}: 'num_attention_heads' is {heads}; expected {expected}")
    return heads, heads_kv


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


def _windows(config: Config, model_type: str, num_layers: int, causal: bool = True) -> list[Window]:
    """Each layer's window: a token and the `sliding_window - 1` before it; None for all tokens.

    If the model is not causal, `sliding_window` tokens on either side, as in transformers.
    """
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
    if width is None:
        return [None] * num_layers
    window = (width - 1, 0) if causal else (width, width)
    return [window if sliding else None for sliding in slides]
