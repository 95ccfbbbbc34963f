"""Decoders with mixers in place of attention in most layers: LFM2, Granite's hybrids, Qwen3-Next, Qwen3.5.

LFM2 has short convolutions, Granite Mamba 2, Qwen gated DeltaNets. Qwen's attention has a gate, too, of each
result, its norms multiply by 1 + weight, and a part of each head is rotated. Qwen3-Next and Qwen3.5-MoE have
experts, one of which takes every token.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate
from typing import Any, NamedTuple

from fastattn._args.channels import MOST_WIDTH
from fastattn._args.types import Array, Shape
from fastattn.layers._block import Projection
from fastattn.layers._delta_rules import DeltaMixer
from fastattn.layers._mixers import ConvolutionMixer, Mixer
from fastattn.layers._state_space import Mamba2Mixer
from fastattn.models._blocks import Keys, linear, projection
from fastattn.models._decoder import Decoder
from fastattn.models._families.llama import (
    EXPERTS,
    HEAD_NORMS,
    decoder_blocks,
    multiplied,
    qwen_experts,
    with_block,
    without_offset,
)
from fastattn.models._families.shared import ALL, expert_counts, frequencies, kinds_of, read_decoder
from fastattn.models._files import Config, ModelError
from fastattn.models._source import Rows, Source

_KEYS = Keys(eps="rms_norm_eps", activation=None)


def require_decoder(source: Source) -> None:
    """Raise if the folder is that of an encoder, or of another task."""
    config = source.config
    if config.architecture.endswith(("Classification", "QuestionAnswering")):
        raise config.wrong("architectures", config.values["architectures"], "a language model")
    if source.has_modules:
        came = f"{source.folder / 'modules.json'} makes an encoder of it"
        raise ModelError(f"{came}; expected a language model, where layers are recurrent")
    config.refuse(is_causal=True)


def convolved_tokens(config: Config, key: str, usual: int) -> int:
    """Tokens that a convolution reads."""
    width = config.size(key, usual)
    if width > MOST_WIDTH:
        raise config.wrong(key, width, f"at most {MOST_WIDTH}")
    return width


LFM2 = with_block(
    attention_norm="operator_norm",
    attended="self_attn.out_proj",
    inner_norm="ffn_norm",
    inner="feed_forward.w3",
    gate="feed_forward.w1",
    outer="feed_forward.w2",
    head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
)._replace(last_norm="embedding_norm")


class _Convolutions(NamedTuple):
    """Mixers' sizes and names; see `Mixing`."""

    width: int
    biased: bool
    flat: bool  # the convolution's weight has two axes, as in GGUF

    def __call__(self, source: Source, prefix: str, hidden: int) -> tuple[Projection, Mixer, Projection]:
        """Read one."""
        name, width = f"{prefix}conv.conv", self.width
        rows = Rows(f"{name}.weight", (hidden, width) if self.flat else (hidden, 1, width))
        taps = source.vector(rows, shape=(hidden, 1, width))
        first = linear(source, f"{prefix}conv.in_proj", 3 * hidden, hidden, self.biased)
        second = linear(source, f"{prefix}conv.out_proj", hidden, hidden, self.biased)
        bias = source.vector(Rows(f"{name}.bias", (hidden,))) if self.biased else None
        return first, ConvolutionMixer(taps, bias), second


def lfm2(source: Source) -> Decoder:
    """Build LFM2."""
    config = source.config
    require_decoder(source)
    layers, attends = source.depth("num_hidden_layers"), None
    if config.values.get("layer_types") is None:
        attends = config.values.get("full_attn_idxs")
    if attends is not None and not (isinstance(attends, list) and all(type(i) is int for i in attends)):
        raise config.wrong("full_attn_idxs", attends, "a list of numbers of layers")
    kinds = kinds_of(config, layers, lambda i: attends is not None and i not in attends, (ALL, "conv"))
    width, biased = convolved_tokens(config, "conv_L_cache", 3), config.get("conv_bias", bool, False)
    blocks = decoder_blocks(
        source,
        LFM2.block,
        _KEYS._replace(eps="norm_eps"),
        heads_kv=8,
        eps=1e-5,
        inner=_inner(config),
        biased=frozenset(),
        mixing=_Convolutions(width, biased, source.is_gguf),
        mixed=frozenset(i for i, kind in enumerate(kinds) if kind != ALL),
    )
    tied: Any = config.get("tie_word_embeddings", bool, True)
    return read_decoder(
        LFM2,
        blocks,
        frequencies=lambda: (frequencies(config, blocks.head_dim, 1e6),),
        tied=config.get("tie_embedding", bool, tied),
    )


def _inner(config: Config) -> int:
    """Features within LFM2's feed-forward, of which config.json has what they are made of."""
    inner = config.size("block_ff_dim" if "block_ff_dim" in config.values else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return inner
    inner = int(2 * inner / 3)
    if config.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    unit = config.size("block_multiple_of", 256)
    inner = int(config.number("block_ffn_dim_multiplier", 1.0) * inner)
    return unit * ((inner + unit - 1) // unit)


_GRANITE = with_block(
    inner="shared_mlp.input_linear", gate="shared_mlp.input_linear", outer="shared_mlp.output_linear"
)
_GRANITE_EXPERTS = with_block(
    inner="input_linear",
    gate="input_linear",
    outer="output_linear",
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts.{}.",
    shared=(None, "shared_mlp."),
)
_OF_EXPERTS = re.compile(r"\.block_sparse_moe\.(\w+)_linear\.weight\.(\d+)")
# A GGUF file has the halves of gated pairs apart.
GRANITE_FILES = with_block(_GRANITE_EXPERTS, inner="up_proj", gate="gate_proj", outer="down_proj")


class _Mambas(NamedTuple):
    """Mixers' sizes and names; see `Mixing`."""

    heads: int
    head_dim: int
    groups: int
    states: int
    width: int
    eps: float
    conv_biased: bool
    biased: bool  # both maps
    limits: tuple[float, float]
    of_file: bool  # a GGUF file has -exp(A_log), an axis more of A_log, D and norms, one less of convolutions

    def __call__(self, source: Source, prefix: str, hidden: int) -> tuple[Projection, Mixer, Projection]:
        """Read one."""
        prefix, of_file = f"{prefix}mamba.", self.of_file
        inner, heads = self.heads * self.head_dim, (self.heads,)
        mixed, norm = inner + 2 * self.groups * self.states, (self.groups, inner // self.groups)

        def vector(name: str, shape: Shape, in_file: Shape, out: Shape, of_rates: bool = False) -> Array:
            there = in_file if of_file else shape
            return source.vector(Rows(f"{prefix}{name}", there), shape=out, of_rates=of_rates and of_file)

        conv, flat, by_head = (mixed, 1, self.width), (mixed, self.width), (self.heads, 1)
        taps = vector("conv1d.weight", conv, flat, conv)
        bias = vector("dt_bias", heads, heads, heads)
        skip = vector("D", heads, by_head, heads)
        rates = vector("A_log", heads, by_head, heads, of_rates=True)
        norms = vector("norm.weight", (inner,), norm, norm)
        own = source.vector(Rows(f"{prefix}conv1d.bias", (mixed,))) if self.conv_biased else None
        sizes = self.groups, self.states, self.eps, self.limits
        mixer = Mamba2Mixer(taps, own, bias, rates, skip, norms, *sizes)
        first = linear(source, f"{prefix}in_proj", inner + mixed + self.heads, hidden, self.biased)
        return first, mixer, linear(source, f"{prefix}out_proj", hidden, inner, self.biased)


def granite_hybrid(source: Source) -> Decoder:
    """Build Granite's hybrids."""
    config = source.config
    require_decoder(source)
    config.refuse(hidden_act="silu")
    forward: dict[str, Any] = {"inner": config.size("shared_intermediate_size", 1024)}
    experts = config.size("num_local_experts", 8, low=0)
    if experts:
        source.rename(lambda name: _OF_EXPERTS.sub(r".block_sparse_moe.experts.\2.\1_linear.weight", name))
        config.values["num_local_experts"] = experts
        forward = {"shared": forward["inner"], "inner": config.size("intermediate_size", 11008)}
        forward |= expert_counts(source, "num_local_experts", 2)
    all_names, of_file = _GRANITE_EXPERTS if experts else _GRANITE, source.is_gguf
    if of_file:
        files = GRANITE_FILES.block
        maps = {"inner": files.inner, "gate": files.gate, "outer": files.outer}
        prefix = "" if experts else "shared_mlp."
        all_names = with_block(all_names, **{part: f"{prefix}{name}" for part, name in maps.items()})
    layers = source.depth("num_hidden_layers")
    name = "layers_block_type" if "layers_block_type" in config.values else "layer_types"
    kinds = config.words(name, (ALL, "attention", "linear_attention", "mamba"), layers)
    own, hidden = config.size("mamba_n_heads", 128), config.size("hidden_size")
    features = config.size("mamba_expand", 2) * hidden
    head_dim = features // own
    if config.values.get("mamba_d_head", "auto") != "auto":
        head_dim = config.size("mamba_d_head")
    groups = config.size("mamba_n_groups", 1)
    if head_dim * own != features:
        raise config.wrong("mamba_n_heads", own, f"as many as make {features} features, of {head_dim} each")
    if own % groups:
        raise config.wrong("mamba_n_heads", own, f"a multiple of 'mamba_n_groups', {groups}")
    mambas = _Mambas(
        own,
        head_dim,
        groups,
        config.size("mamba_d_state", 256),
        convolved_tokens(config, "mamba_d_conv", 4),
        config.number("rms_norm_eps", 1e-6),
        config.get("mamba_conv_bias", bool, True),
        config.get("mamba_proj_bias", bool, False),
        _limits(config),
        of_file,
    )
    blocks = decoder_blocks(
        source,
        all_names.block,
        _KEYS,
        mixing=mambas,
        mixed=frozenset(
            i for i in range(layers) if kinds is None or kinds[i] in ("mamba", "linear_attention")
        ),
        **forward,
    )
    kind = config.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.wrong("position_embedding_type", kind, "rope, nope or null")
    rotary = (lambda: (frequencies(config, blocks.head_dim),)) if kind == "rope" else None
    return multiplied(all_names, blocks, frequencies=rotary)


def _limits(config: Config) -> tuple[float, float]:
    """The range of Mamba's steps."""
    said = config.values.get("time_step_limit")
    found = [0.0, math.inf] if said is None else said
    if isinstance(found, list):  # transformers writes infinity as a table
        found = [float(x["__float__"]) if x == {"__float__": "Infinity"} else x for x in found]
    if not (isinstance(found, list) and len(found) == 2 and all(type(x) in (int, float) for x in found)):
        raise config.wrong("time_step_limit", said, "two numbers")
    low, high = map(float, found)
    if not 0 <= low <= high:
        raise config.wrong("time_step_limit", said, "two numbers, 0 or more, the larger one last")
    return low, high


QWEN = with_block(head_norms=HEAD_NORMS, norm_offset=1.0)
QWEN_EXPERTS = with_block(
    QWEN, router="mlp.gate", shared=("mlp.shared_expert_gate", "mlp.shared_expert."), **EXPERTS
)


class _Qwen(NamedTuple):
    """A row of `_QWENS`."""

    heads_kv: int = 2
    chosen: int = 8  # experts for a token; 0: there are none
    together: tuple[str, ...] = ()  # see `_Deltas`: in folders, and in GGUF files
    together_in_file: tuple[str, ...] = ()
    tiled: bool = True  # in GGUF files
    divides: bool = True  # the experts' weights, whatever config.json says


_QWENS = {
    "qwen3_5_text": _Qwen(heads_kv=4, chosen=0),
    "qwen3_5_moe_text": _Qwen(),
    "qwen3_next": _Qwen(2, 10, ("qkvz", "ba"), ("ba",), tiled=False, divides=False),
}


class _Deltas(NamedTuple):
    """Gated DeltaNets of Qwen; see `Mixing`.

    A GGUF file has ``-exp(A_log)`` as A_log, and convolutions of two axes.
    """

    heads: int
    key_heads: int
    head_dim: int
    head_dim_v: int
    width: int
    eps: float
    together: tuple[str, ...]  # maps in which the rows of a key head and its values lie together
    of_file: bool
    tiled: bool  # the first value head of every key head comes first, then the second of each

    def __call__(self, source: Source, prefix: str, hidden: int) -> tuple[Projection, Mixer, Projection]:
        """Read one."""
        prefix, heads, d, width = f"{prefix}linear_attn.", self.heads, self.head_dim, self.width
        keys, inner, each = 2 * self.key_heads * d, heads * self.head_dim_v, heads // self.key_heads
        channels = keys + inner

        def values(rows: Rows, n: int = 1, begin: int = 0) -> list[Rows]:
            """Rows of the value heads, `n` of each, from `begin` on."""
            if not self.tiled:
                return [rows.part(begin, heads * n)]
            places = (i % each * self.key_heads + i // each for i in range(heads))
            return [rows.part(begin + place * n, n) for place in places]

        def convolved(rows: Rows) -> list[Rows]:
            """Rows of what is convolved: queries and keys, and then values."""
            return [rows.part(0, keys), *values(rows, self.head_dim_v, keys)]

        def by_key_head(rows: Rows, *widths: int) -> list[Rows]:
            """Rows of a tensor that has so many, one after another, for each key head."""
            begins = zip(accumulate(widths, initial=0), widths, strict=False)
            return [rows.part(i * sum(widths) + at, n) for at, n in begins for i in range(self.key_heads)]

        def map_in(name: str, out: int) -> Rows:
            return Rows(f"{prefix}in_proj_{name}.weight", (out, hidden))

        def vector(name: str) -> Rows:
            return Rows(f"{prefix}{name}", (heads,))

        taps = Rows(f"{prefix}conv1d.weight", (channels, width) if self.of_file else (channels, 1, width))
        mixer = DeltaMixer(
            source.vector(*convolved(taps), shape=(channels, 1, width)),
            None,
            source.vector(*values(vector("dt_bias"))),
            source.vector(*values(vector("A_log")), of_rates=self.of_file),
            source.vector(Rows(f"{prefix}norm.weight", (self.head_dim_v,))),
            self.key_heads,
            d,
            self.eps,
        )
        if "qkvz" in self.together:
            wide = each * self.head_dim_v
            rows = by_key_head(map_in("qkvz", channels + inner), d, d, wide, wide)
        else:
            rows = convolved(map_in("qkv", channels)) + values(map_in("z", inner), self.head_dim_v)
        if "ba" in self.together:
            rows += by_key_head(map_in("ba", 2 * heads), each, each)
        else:
            rows += values(map_in("b", heads)) + values(map_in("a", heads))
        first = projection(source, source.pack(rows), None)
        tiles = (each, self.key_heads) if self.tiled else (1, 1)
        second = source.pack([Rows(f"{prefix}out_proj.weight", (hidden, inner))], tiles=tiles)
        return first, mixer, projection(source, second, None)


def qwen_next(source: Source) -> Decoder:
    """Build Qwen3-Next, or the text model of Qwen3.5 or Qwen3.5-MoE."""
    config = source.config
    require_decoder(source)
    config.refuse(hidden_act="silu")
    family = config.choice("model_type", _QWENS)
    of_file = source.is_gguf
    names = without_offset(source, QWEN_EXPERTS if family.chosen else QWEN)

    def mixes(i: int) -> bool:
        return (i + 1) % config.size("full_attention_interval", 4) > 0

    kinds = kinds_of(config, source.depth("num_hidden_layers"), mixes, (ALL, "linear_attention"))
    key_heads, own = config.size("linear_num_key_heads", 16), config.size("linear_num_value_heads", 32)
    if own % key_heads:
        expected = f"a multiple of 'linear_num_key_heads', {key_heads}"
        raise config.wrong("linear_num_value_heads", own, expected)
    deltas = _Deltas(
        own,
        key_heads,
        config.size("linear_key_head_dim", 128),
        config.size("linear_value_head_dim", 128),
        convolved_tokens(config, "linear_conv_kernel_dim", 4),
        config.number("rms_norm_eps", 1e-6),
        family.together_in_file if of_file else family.together,
        of_file,
        of_file and family.tiled and own != key_heads,
    )
    experts: dict[str, Any] = {}
    if family.chosen:
        source.depth("num_experts")  # the one name of it here
        if family.divides:
            config.refuse(norm_topk_prob=True)  # transformers always divides
        experts = qwen_experts(source, 512, family.chosen, divides=True)
        experts["shared"] = config.size("shared_expert_intermediate_size", 512)
    blocks = decoder_blocks(
        source,
        names.block,
        _KEYS,
        heads_kv=family.heads_kv,
        head_dim=256,
        gated=True,
        mixing=deltas,
        mixed=frozenset(i for i, kind in enumerate(kinds) if kind != ALL),
        **experts,
    )
    return read_decoder(
        names,
        blocks,
        frequencies=lambda: (frequencies(config, blocks.head_dim, in_part=True, usual=0.25),),
        tied=config.get("tie_word_embeddings", bool, False),
    )
