"""Llama, Mistral, Qwen2 and Qwen3: the names of their tensors, and what config.json says about them.

They differ in where there are biases (Llama as configured, Qwen2 at q, k and v), in a norm of each query and
key head (Qwen3), and in which layers attend a sliding window only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastattn.models._activations import ACTIVATIONS
from fastattn.models._decoder import Decoder
from fastattn.models._decoder_layers import Common, Layer, layers_program, logits_program
from fastattn.models._files import ModelError, stop_ids
from fastattn.models._text import Text
from fastattn.models._weights import joined
from fastattn.positions import rope_frequencies

if TYPE_CHECKING:
    from pathlib import Path

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Shape
    from fastattn.models._files import Config, Tensors
    from fastattn.models._weights import Precision
    from fastattn.positions import RopeFrequencies

_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$")  # computed from config.json; in old files
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")


def build(config: Config, tensors: Tensors, precision: Precision, folder: Path) -> Decoder:
    """The model that the folder's files describe."""
    model_type = config.text("model_type")
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    heads = config.size("num_attention_heads")
    heads_kv = config.optional_size("num_key_value_heads") or (8 if model_type == "mistral" else heads)
    vocab, depth = config.size("vocab_size"), tensors.depth(config, "num_hidden_layers")
    if heads % heads_kv:
        raise ModelError(f"{config.path}: {heads} query heads for {heads_kv} key heads; expected a multiple")
    head_dim = config.optional_size("head_dim") or (
        128 if model_type == "qwen3" else config.divided("hidden_size", "num_attention_heads")
    )
    attention_bias = model_type in ("llama", "qwen3") and config.flag("attention_bias", False)
    biased = set(_QKV) if attention_bias or model_type == "qwen2" else set()
    if attention_bias:
        biased.add("self_attn.o_proj")
    if model_type == "llama" and config.flag("mlp_bias", False):
        biased |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    norms = ["self_attn.q_norm", "self_attn.k_norm"] if model_type == "qwen3" else []

    tensors.drop_prefix("model.")
    tied = config.flag("tie_word_embeddings", False)
    shapes: dict[str, Shape] = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    q_size, kv_size = heads * head_dim, heads_kv * head_dim
    for i in range(depth):
        for name, (rows, columns) in {
            **dict(zip(_QKV, ((q_size, hidden), (kv_size, hidden), (kv_size, hidden)), strict=True)),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
            if name in biased:
                shapes[f"layers.{i}.{name}.bias"] = (rows,)
        shapes |= {f"layers.{i}.{name}.weight": (head_dim,) for name in norms}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (hidden,)
    tensors.expect(shapes, own=("layers.", "embed_tokens.", "norm."), ignored=_BUFFERS)

    def weight(name: str) -> Array:
        return tensors[f"{name}.weight"]

    def biases(*names: str) -> Array | None:
        if f"{names[0]}.bias" not in shapes:
            return None
        return precision.vector(*(tensors[f"{name}.bias"] for name in names))

    def linear(name: str) -> tuple[PackedLinear, Array | None]:
        return precision.pack(weight(name)), biases(name)

    def head_norms(q_name: str, k_name: str) -> Array | None:
        if not norms:
            return None
        vectors = [weight(q_name)] * heads + [weight(k_name)] * heads_kv
        return precision.vector(*vectors).reshape(-1, head_dim)

    def layer_of(name: str, window: tuple[int, int] | None) -> Layer:
        qkv = [f"{name}.{part}" for part in _QKV]
        gate, up = f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"
        inner_bias = biases(gate, up)
        return Layer(
            attention_norm=(precision.vector(weight(f"{name}.input_layernorm")), None),
            qkv=(precision.pack(joined(*(weight(part) for part in qkv))), biases(*qkv)),
            qk_norm=head_norms(f"{name}.self_attn.q_norm", f"{name}.self_attn.k_norm"),
            window=window,
            scale=head_dim**-0.5,
            attended=linear(f"{name}.self_attn.o_proj"),
            inner_norm=(precision.vector(weight(f"{name}.post_attention_layernorm")), None),
            inner=(
                precision.pack(weight(up), gate=weight(gate)),
                None if inner_bias is None else inner_bias.reshape(2, -1),
            ),
            outer=linear(f"{name}.mlp.down_proj"),
        )

    activation, eps = config.choice("hidden_act", ACTIVATIONS, "silu"), config.number("rms_norm_eps", 1e-6)
    common = Common(hidden, heads, heads_kv, head_dim, "rms_norm", eps, activation)
    layers = [layer_of(f"layers.{i}", window) for i, window in enumerate(_windows(config, model_type, depth))]
    program, windows = layers_program(common, layers)
    output = precision.pack(weight("embed_tokens" if tied else "lm_head"))
    return Decoder(
        model_type=model_type,
        hidden_size=hidden,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        vocab_size=vocab,
        max_length=None,
        tokens=output if tied else weight("embed_tokens"),
        positions=None,
        rope=_rope(config, head_dim),
        depth=depth,
        program=program,
        windows=windows,
        logits=logits_program(common, (precision.vector(weight("norm")), None), output),
        stop=stop_ids(config, folder),
        precision=precision,
        text=Text(folder),
    )


def _windows(config: Config, model_type: str, depth: int) -> list[tuple[int, int] | None]:
    """Each layer's window: a token, and those of `sliding_window - 1` positions before it; None for all."""
    if model_type == "llama":
        return [None] * depth
    width = config.optional_size("sliding_window", 4096)
    if model_type == "mistral":
        slides = [True] * depth
    else:
        if not config.flag("use_sliding_window", False):
            width = None
        kinds = config.words("layer_types", ("full_attention", "sliding_attention"), depth)
        if kinds is None:
            first = config.size("max_window_layers", 28, low=0)
            slides = [i >= first for i in range(depth)]
        else:
            slides = [kind == "sliding_attention" for kind in kinds]
    return [(width - 1, 0) if width is not None and sliding else None for sliding in slides]


@dataclass(frozen=True, slots=True, eq=False)
class _Rope:
    """Frequencies by the length of a sequence, which some scalings depend on."""

    head_dim: int
    scaling: dict[str, Any]
    longest: int | None
    fixed: RopeFrequencies | None  # those of any length

    def __call__(self, length: int) -> RopeFrequencies:
        if self.fixed is not None:
            return self.fixed
        return rope_frequencies(
            self.head_dim, scaling=self.scaling, max_position_embeddings=self.longest, seq_len=length
        )


def _rope(config: Config, head_dim: int) -> _Rope:
    """Frequencies by the length of a sequence, from `rope_parameters`, or as older files have it.

    Those say `rope_theta` and, if there is one, `rope_scaling`.
    """
    longest = config.optional_size("max_position_embeddings")
    scaling = {**config.table("rope_scaling"), **config.table("rope_parameters")}
    scaling.setdefault("rope_theta", config.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("yarn", "llama3", "longrope"):  # the trained length may be beside it, or the same
        trained = config.optional_size("original_max_position_embeddings")
        if trained is not None:
            scaling["original_max_position_embeddings"] = trained
        elif longest is not None:
            scaling.setdefault("original_max_position_embeddings", longest)
    for factor in (config.values.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if factor not in (None, 1.0):
            raise ModelError(f"{config.path}: 'partial_rotary_factor' is {factor!r}; only 1.0 is supported")

    rope = _Rope(head_dim, scaling, longest, None)
    try:
        frequencies = rope(0)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{config.path}: rotary positions: {error}") from error
    return rope if kind in ("dynamic", "longrope") else replace(rope, fixed=frequencies)
