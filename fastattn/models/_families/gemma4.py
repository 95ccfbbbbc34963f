"""Gemma 4 and EmbeddingGemma 2: the names of their tensors, and the keys of config.json.

Layers with a window and those without have heads of other sizes, and rotary positions of their own. The last
layers attend the keys and values of the last one of their kind that has some. Values are normed as keys are,
and may be of the same product. At its end a layer adds a part of what the tokens' second vectors say, and
multiplies all by a number. Beside a feed-forward there may be experts. EmbeddingGemma 2 is an encoder of
such layers, whose second vectors are computed from the first ones alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastattn._args.types import Array
from fastattn._engine.experts import Experts
from fastattn._engine.steps import INPUTS, AddStep, LinearStep, NormStep, Step, X
from fastattn.layers._block import BesideExperts, Block, LayerInput, Norm, Window
from fastattn.models._blocks import Blocks, linear
from fastattn.models._decoder import Decoder
from fastattn.models._embeddings import Embeddings, Frequencies
from fastattn.models._encoder import Encoder, ProjectedEncoder
from fastattn.models._families.gpt import renamed
from fastattn.models._families.hybrid import require_decoder
from fastattn.models._families.llama import (
    HEAD_NORMS,
    KEYS,
    LLAMA,
    POST_NORMS,
    decoder_blocks,
    of_text,
    rounded_root,
)
from fastattn.models._families.shared import (
    ALL,
    NEAR,
    LayerInputs,
    expert_counts,
    kinds_of,
    read_decoder,
    read_encoder,
    scaled,
    tables_of_kinds,
    windows_of,
)
from fastattn.models._files import Config
from fastattn.models._sentences import Sentences
from fastattn.models._source import Rows, Source
from fastattn.models._tensors import Tensors

_NAMES = LLAMA.block._replace(
    inner_norm="pre_feedforward_layernorm",
    post_norms=POST_NORMS,
    head_norms=HEAD_NORMS,
)
GEMMA4 = LLAMA._replace(block=_NAMES)
_QUERIES, _KEYS, _VALUES = LLAMA.block.qkv
_TABLE, _MAP, _NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
_GATE, _OUTER, _POST = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
_SCALAR, _PROJECTION = "layer_scalar", "embedding_projection"
# Of the experts' input, of what the feed-forward gives, and of what the experts give.
_EXPERT_NORMS = tuple(
    f"{name}_layernorm_{i}"
    for name, i in (("pre_feedforward", 2), ("post_feedforward", 1), ("post_feedforward", 2))
)
_ROPE = {
    ALL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    NEAR: {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True, slots=True)
class _Blocks(Blocks):
    """Gemma 4's blocks, each with sizes and names of its own."""

    each: tuple[Blocks, ...] = ()
    givers: tuple[int | None, ...] = ()  # the block whose keys each one attends
    inputs: int = 0  # features of a block's part of the inputs
    # Experts beside each feed-forward: how many, how many for a token, and their features.
    beside: tuple[int, int, int] | None = None

    def _experts(self, prefix: str, count: int, chosen: int, inner: int) -> BesideExperts:
        source, hidden = self.source, self.hidden
        each = [f"{prefix}experts.{i}" for i in range(count)]
        firsts = [Rows(f"{name}.gate_up_proj.weight", (2 * inner, hidden)) for name in each]
        maps = (
            tuple(source.pack(*rows.halves(gate_first=True)) for rows in firsts),
            tuple(source.pack([Rows(f"{name}.down_proj.weight", (hidden, inner))]) for name in each),
        )
        router = Rows(f"{prefix}router.proj.weight", (count, hidden))
        experts = Experts(
            source.pack([router], stored=source.precision.lane.name),
            maps,
            chosen,
            True,
            source.precision.rounding(maps[0][0]),
            scales=source.vector(Rows(f"{prefix}router.per_expert_scale", (count,))),
        )
        scale = source.vector(Rows(f"{prefix}router.scale", (hidden,)), scale=hidden**-0.5)
        before, own, theirs = (self.norm(prefix + name) for name in _EXPERT_NORMS)
        return BesideExperts(experts, before, Norm("rms_norm", scale, None, self.eps), own, theirs)

    def _block(self, i: int, scale: float, window: Window, rotation: int | None) -> Block:
        own, source, prefix = self.each[i], self.source, self.names.prefix.format(i)
        block = own._block(i, scale, window, rotation)
        if self.givers[i] is None:
            ones = np.ones((own.heads_kv, own.head_dim), source.precision.lane)
            block = replace(block, head_norms=(*block.head_norms, Norm("rms_norm", ones, None, self.eps)))
        added = None
        if self.inputs:
            gate = linear(source, prefix + _GATE, self.inputs, self.hidden)
            outer = linear(source, prefix + _OUTER, self.hidden, self.inputs)
            added = LayerInput(gate, outer, self.norm(prefix + _POST), i * self.inputs)
        filled = partial(_filled, self.hidden, source.precision.dtype)
        scalar = source.computed(filled, Rows(prefix + _SCALAR, (1,)))
        beside = None if self.beside is None else self._experts(prefix, *self.beside)
        ending: Any = {"layer_input": added, "scale_of_all": scalar}
        return replace(block, keys_from=self.givers[i], beside=beside, **ending)

    def layer_inputs(self) -> LayerInputs:
        """The table of the tokens' second vectors, and what is added to it for all blocks."""
        source, half, name = self.source, 2**-0.5, "inputs of layers"
        vocab = source.config.size("vocab_size_per_layer_input", 262144)
        rows = Rows(f"{_TABLE}.weight", (vocab, self.all_inputs))
        table: Any = source.pack([rows]) if source.is_gguf else source.table(rows)  # which may be in blocks
        steps = [*self.computed_inputs(name, half), AddStep(name, INPUTS, INPUTS, self.all_inputs)]
        scale = float(source.precision.dtype.type(self.inputs**0.5)) * half
        return LayerInputs(Embeddings(table, scale=scale), steps)

    @property
    def all_inputs(self) -> int:
        """Features of the inputs of all blocks."""
        return self.num_layers * self.inputs

    def computed_inputs(self, out: str, scale: float = 1.0) -> list[Step]:
        """Steps that compute inputs of all blocks from the tokens' vectors, times `scale`, to a buffer."""
        shape = (self.num_layers, self.inputs)
        rows = Rows(f"{_NORM}.weight", (self.inputs,))
        norm = self.source.vector(*[rows] * self.num_layers, shape=shape, scale=scale)
        # The map's result is times hidden**-0.5, which a norm does not see but for its eps.
        return [
            LinearStep(X, out, *linear(self.source, _MAP, self.all_inputs, self.hidden)),
            NormStep(out, out, "rms_norm", norm, None, self.eps * self.hidden),
        ]


def _filled(size: int, dtype: np.dtype[Any], tensors: Tensors, name: str) -> Array:
    """A vector of the one number of a tensor."""
    return np.full(size, tensors.whole(name).astype(dtype)[0], dtype)


def _text(source: Source) -> Source:
    """The source of the text model, of a model with towers, too."""
    model_type = source.config.get("model_type", str)
    return source if model_type.endswith("_text") else of_text(source, f"{model_type}_text")


def _base(source: Source, heads_kv: int) -> Blocks:
    """Blocks as if all were alike; so many key heads there are by default."""
    keys, activation = KEYS._replace(activation="hidden_activation"), "gelu_pytorch_tanh"
    return decoder_blocks(source, _NAMES, keys, activation=activation, heads_kv=heads_kv, head_dim=256)


def gemma4(source: Source) -> Decoder:
    """Build Gemma 4's text model; its towers for images and sound are left out."""
    source = _text(source)
    config = source.config
    require_decoder(source)
    config.refuse(attn_logit_softcapping=None)
    source.rename(_renamed)
    if config.values.get("use_bidirectional_attention") not in (None, "vision"):  # of the tokens of images
        came = config.values["use_bidirectional_attention"]
        raise config.wrong("use_bidirectional_attention", came, "null, or 'vision'")
    base = _base(source, 4)
    count, kinds = base.num_layers, _kinds(config, base.num_layers)
    first = count - config.size("num_kv_shared_layers", 0, low=0)
    givers = _givers(config, kinds, first)
    wide = config.get("use_double_wide_mlp", bool, False)
    sizes = _sizes_by_kind(config, kinds, base.heads)
    variants: dict[tuple[str, bool], Blocks] = {}
    for kind, (head_dim, heads_kv) in sizes.items():
        alike = kind == ALL and config.get("attention_k_eq_v", bool, False)
        names = _NAMES._replace(qkv=(_QUERIES, _KEYS, _KEYS)) if alike else _NAMES
        variants[kind, False] = replace(base, names=names, head_dim=head_dim, heads_kv=heads_kv)
        names = _NAMES._replace(qkv=(_QUERIES,), head_norms=(_NAMES.head_norms or ())[:1])
        inner = base.inner * 2 if wide else base.inner
        variants[kind, True] = replace(base, names=names, head_dim=head_dim, heads_kv=0, inner=inner)
    inputs = config.size("hidden_size_per_layer_input", 256, low=0)
    vocab, own_vocab = config.size("vocab_size"), config.size("vocab_size_per_layer_input", 262144)
    if inputs and own_vocab < vocab:
        raise config.wrong("vocab_size_per_layer_input", own_vocab, f"at least 'vocab_size', {vocab}")
    beside = None
    if config.get("enable_moe_block", bool, False):
        counts = expert_counts(source, "num_experts", None, "top_k_experts")
        beside = counts["experts"], counts["chosen"], config.size("moe_intermediate_size")
    widest = max(variants.values(), key=lambda own: own.heads * own.head_dim, default=base)
    blocks = _Blocks(
        **{name: getattr(widest, name) for name in Blocks.__dataclass_fields__ if name != "inner"},
        inner=base.inner * 2 if wide else base.inner,
        each=tuple(variants[kind, i >= first] for i, kind in enumerate(kinds)),
        givers=givers,
        inputs=inputs,
        beside=beside,
    )
    cap = config.values.get("final_logit_softcapping")
    unread = "|".join(str(i) for i in range(first, count)) or "(?!)"
    return read_decoder(
        GEMMA4._replace(
            ignored=re.compile(rf"layers\.({unread})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."),
        ),
        blocks,
        **_how(source, base, kinds, sizes, causal=True),
        logits_cap=None if cap is None else config.number("final_logit_softcapping"),
        inputs=blocks.layer_inputs if inputs else None,
        tied=config.get("tie_word_embeddings", bool, True),
    )


def embedding_gemma2(source: Source) -> Encoder:
    """Build EmbeddingGemma 2's text model; its towers for images and sound are left out."""
    source = _text(source)
    config = source.config
    source.rename(lambda name: name.replace(".ple_block.", ".").removeprefix("ple."))
    base = _base(source, 2)
    count, kinds = base.num_layers, _kinds(config, base.num_layers)
    sizes = _sizes_by_kind(config, kinds, base.heads)
    own = {kind: replace(base, head_dim=d, heads_kv=heads_kv) for kind, (d, heads_kv) in sizes.items()}
    widest = max(own.values(), key=lambda each: each.head_dim, default=base)
    blocks = _Blocks(
        **{name: getattr(widest, name) for name in Blocks.__dataclass_fields__},
        each=tuple(own[kind] for kind in kinds),
        givers=(None,) * count,
        inputs=config.size("hidden_size_per_layer_input", 512),
    )
    features = config.size("embedding_dim", 768)
    return read_encoder(
        GEMMA4,
        blocks,
        longest=config.optional_size("max_position_embeddings"),
        **_how(source, base, kinds, sizes, causal=False),
        others=lambda: {
            "projection": linear(source, _PROJECTION, features, base.hidden),
            "hidden_size": features,
        },
        kind=ProjectedEncoder,
        sentences=Sentences.of(source, features),
        before=lambda: blocks.computed_inputs(INPUTS),
        inputs=blocks.all_inputs,
    )


def _how(
    source: Source, base: Blocks, kinds: Sequence[str], sizes: dict[str, tuple[int, int]], causal: bool
) -> dict[str, Any]:
    """Options of both readers."""
    config = source.config
    longest = config.optional_size("max_position_embeddings")
    return {
        "scales": [1.0] * len(kinds),
        "windows": windows_of(kinds, config.size("sliding_window", 512), causal),
        "rotations": [list(sizes).index(kind) for kind in kinds],
        "token_scale": rounded_root(source, base.hidden),
        "frequencies": lambda: tuple(_frequencies(config, x, sizes[x][0], longest) for x in sizes),
    }


def _renamed(name: str) -> str:
    """The name of a tensor: an expert's with its number before, a layer's scalar as in folders."""
    name = renamed(name)
    return name.removesuffix(".weight") if name.endswith(f".{_SCALAR}.weight") else name


def _kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer: the last one has no window."""
    kinds = kinds_of(config, count, lambda i: (i + 1) % 6 > 0 and i + 1 < count)
    if kinds and kinds[-1] != ALL:
        raise config.wrong("layer_types", kinds, f"{ALL} for the last layer")
    return kinds


def _givers(config: Config, kinds: Sequence[str], first: int) -> tuple[int | None, ...]:
    """The layer whose keys each one attends: from the `first` on, the last one of its kind before that."""
    if first < len(kinds) and not (first > 0 and set(kinds[:first]) == set(kinds)):
        came, expected = len(kinds) - first, "a layer of each kind in 'layer_types' before those"
        raise config.wrong("num_kv_shared_layers", came, expected)
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return tuple(None if i < first else last[kind] for i, kind in enumerate(kinds))


def _sizes_by_kind(config: Config, kinds: Sequence[str], heads: int) -> dict[str, tuple[int, int]]:
    return {kind: _sizes(config, kinds, kind, heads) for kind in (ALL, NEAR) if kind in kinds}


def _sizes(config: Config, kinds: Sequence[str], kind: str, heads: int) -> tuple[int, int]:
    """The size and the number of the heads of keys, in layers of a kind."""
    usual = {
        "head_dim": config.size("head_dim", 256),
        "num_key_value_heads": config.size("num_key_value_heads", 4),
    }
    of_all = {**usual, "head_dim": config.size("global_head_dim", 512)}
    if config.get("attention_k_eq_v", bool, False):
        count = config.optional_size("num_global_key_value_heads")
        of_all |= {} if count is None else {"num_key_value_heads": count}
    told = config.values.get("per_layer_config")
    if told is None:
        told = {str(i): of_all for i, each in enumerate(kinds) if each == ALL}
    if not isinstance(told, dict) or not all(
        isinstance(x, dict) and x.keys() <= usual.keys() for x in told.values()
    ):
        raise config.wrong(
            "per_layer_config", told, f"tables of {' and '.join(usual)}, by the layers' numbers"
        )
    found = [{**usual, **told.get(str(i), {})} for i, each in enumerate(kinds) if each == kind]
    if any(each != found[0] for each in found):
        raise config.wrong("per_layer_config", told, f"the same for all layers of {kind}")
    own = config.of(f"{config.path}: 'per_layer_config'", found[0])
    heads_kv = own.size("num_key_value_heads")
    if heads % heads_kv:
        raise own.wrong("num_key_value_heads", heads_kv, f"a divisor of 'num_attention_heads', {heads}")
    return own.size("head_dim"), heads_kv


def _frequencies(config: Config, kind: str, head_dim: int, longest: int | None) -> Frequencies:
    """The frequencies of rotary positions in layers of a kind."""
    given = tables_of_kinds(config, _ROPE).get(kind)
    return scaled(config, head_dim, {**(given or _ROPE[kind])}, longest)
