"""GPT-2 (Radford et al. 2019) and GPT-OSS: the names of their tensors, and the keys of config.json.

In GPT-OSS each head has a sink in the denominator of its softmax. All layers have experts, whose gate and up
are kept within bounds, and every other layer a window.
"""

from __future__ import annotations

import re

from fastattn.models._blocks import BlockNames, Blocks, Keys
from fastattn.models._decoder import Decoder
from fastattn.models._families.llama import EXPERTS, KEYS, decoder_blocks, with_block
from fastattn.models._families.shared import (
    ModelNames,
    expert_counts,
    frequencies,
    kinds_of,
    read_decoder,
    windows_of,
)
from fastattn.models._files import Config
from fastattn.models._source import Source

_GPT2 = ModelNames(
    prefixes=("transformer.",),
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
    last_norm="ln_f",
    ignored=re.compile(r"\.attn\.(bias|masked_bias)$"),  # the causal mask, in old files
)
_GPT2_KEYS = Keys("n_embd", "n_inner", "n_head", "n_layer", "layer_norm_epsilon", "activation_function")


def gpt2(source: Source) -> Decoder:
    """Build GPT-2."""
    config = source.config
    config.refuse_others(max_position_embeddings="n_positions")
    inner = config.optional_size("n_inner") or 4 * config.size("n_embd")
    blocks = Blocks.of(source, _GPT2.block, _GPT2_KEYS, eps=1e-5, activation="gelu_new", inner=inner)
    config.refuse(add_cross_attention=False)
    scale = blocks.head_dim**-0.5 if config.get("scale_attn_weights", bool, True) else 1.0
    by_depth = config.get("scale_attn_by_inverse_layer_idx", bool, False)
    return read_decoder(
        _GPT2,
        blocks,
        scales=[scale / (i + 1) if by_depth else scale for i in range(blocks.num_layers)],
        max_length=config.size("n_positions"),
        tied=config.get("tie_word_embeddings", bool, True),
    )


_OF_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias|)\.(\d+)$")
# In GGUF files; in folders, gate and up of an expert are one tensor, in turns.
GPT_OSS = with_block(router="mlp.router", sinks="self_attn.sinks.weight", **EXPERTS)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss(source: Source) -> Decoder:
    """Build GPT-OSS."""
    config, all_names = source.config, GPT_OSS
    if not source.is_gguf:
        source.rename(renamed)
        both, transposed = "gate_up_proj", "MXFP4" not in map(source.tensors.kind, source.tensors.names)
        all_names = with_block(
            GPT_OSS,
            gate=both,
            inner=both,
            transposed_experts=(both, GPT_OSS.block.outer) if transposed else (),
            sinks="self_attn.sinks",
        )
    names = all_names.block
    counts = expert_counts(source, "num_local_experts", 4)
    config.refuse(is_causal=True, swiglu_alpha=1.702)  # the factor of quick_gelu
    biased = [f"{names.experts.format(i)}{name}" for i in range(counts["experts"])
              for name in (names.gate, names.inner, names.outer)]  # fmt: skip
    if config.get("attention_bias", bool, True):
        biased += [*names.qkv, names.attended]
    blocks = decoder_blocks(
        source,
        names,
        KEYS._replace(activation=None),
        eps=1e-5,
        activation="quick_gelu",
        heads_kv=8,
        head_dim=64,
        biased=frozenset([*biased, "mlp.router"]),
        limit=config.number("swiglu_limit", 7.0),
        **counts,
    )
    kinds = kinds_of(config, blocks.num_layers, lambda i: i % 2 == 0)
    if config.values.get("rope_scaling") is None and config.values.get("rope_parameters") is None:
        config = Config.of(config.path, {**config.values, "rope_scaling": _YARN})
    return read_decoder(
        all_names,
        blocks,
        windows=windows_of(kinds, config.optional_size("sliding_window", 128)),
        frequencies=lambda: (frequencies(config, blocks.head_dim, 150000.0),),
        tied=config.get("tie_word_embeddings", bool, False),
    )


def renamed(name: str) -> str:
    """The name of a folder's tensor, that of an expert with its number where other models have it."""
    return _OF_EXPERTS.sub(lambda x: f".experts.{x[3]}.{x[1]}.{'bias' if x[2] else 'weight'}", name)
