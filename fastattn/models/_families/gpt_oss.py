"""GPT-OSS: the names of its tensors, and the keys of config.json.

Each head has a sink in the denominator of its softmax. All layers have experts, whose gate and up are kept
within bounds, and every other layer a window.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastattn.models import _gguf
from fastattn.models._blocks import Blocks
from fastattn.models._families.llama import ALL, KEYS, LLAMA, NEAR
from fastattn.models._families.shared import frequencies, head_counts, read_decoder
from fastattn.models._files import Config

if TYPE_CHECKING:
    from fastattn.models._decoder import Decoder
    from fastattn.models._source import Source

_OF_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias|)\.(\d+)$")
# In GGUF files; in folders, gate and up of an expert are one tensor, in turns.
_NAMES = LLAMA._replace(
    block=LLAMA.block._replace(
        router="mlp.router",
        experts="mlp.experts.{}.",
        gate="gate_proj",
        inner="up_proj",
        outer="down_proj",
        sinks="self_attn.sinks.weight",
    )
)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss(source: Source) -> Decoder:
    """Build GPT-OSS."""
    config, all_names = source.config, _NAMES
    if not _gguf.is_file(source.folder):
        source.rename(renamed)
        both, transposed = "gate_up_proj", not source.has_kind("MXFP4")
        block = _NAMES.block._replace(
            gate=both,
            inner=both,
            transposed_experts=(both, _NAMES.block.outer) if transposed else (),
            sinks="self_attn.sinks",
        )
        all_names = _NAMES._replace(block=block)
    names = all_names.block
    heads, heads_kv = head_counts(config, 8)
    experts, chosen = source.depth("num_local_experts"), config.size("num_experts_per_tok", 4)
    if chosen > experts:
        raise config.wrong("num_experts_per_tok", chosen, f"at most 'num_local_experts', {experts}")
    config.refuse(is_causal=True, swiglu_alpha=1.702)  # the factor of quick_gelu
    biased = [f"{names.experts.format(i)}{name}" for i in range(experts)
              for name in (names.gate, names.inner, names.outer)]  # fmt: skip
    if config.get("attention_bias", bool, True):
        biased += [*names.qkv, names.attended]
    blocks = Blocks.of(
        source,
        names,
        KEYS._replace(activation=None),
        eps=1e-5,
        activation="quick_gelu",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=config.size("head_dim", 64),
        biased=frozenset([*biased, "mlp.router"]),
        experts=experts,
        chosen=chosen,
        limit=config.number("swiglu_limit", 7.0),
    )
    kinds = config.words("layer_types", (ALL, NEAR), blocks.num_layers)
    if kinds is None:
        kinds = [ALL if i % 2 else NEAR for i in range(blocks.num_layers)]
    width = config.optional_size("sliding_window", 128)
    window = None if width is None else (width - 1, 0)
    if config.values.get("rope_scaling") is None and config.values.get("rope_parameters") is None:
        config = Config.of(config.path, {**config.values, "rope_scaling": _YARN})
    return read_decoder(
        all_names,
        blocks,
        windows=[window if kind == NEAR else None for kind in kinds],
        frequencies=lambda: (frequencies(config, blocks.head_dim, 150000.0),),
        tied=config.get("tie_word_embeddings", bool, False),
    )


def renamed(name: str) -> str:
    """The name of a folder's tensor, that of an expert with its number where other models have it."""
    return _OF_EXPERTS.sub(lambda x: f".experts.{x[3]}.{x[1]}.{'bias' if x[2] else 'weight'}", name)
