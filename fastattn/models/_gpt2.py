"""GPT-2 (Radford et al. 2019): the names of its tensors, and what config.json says about it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastattn.models._activations import ACTIVATIONS
from fastattn.models._decoder import Decoder
from fastattn.models._decoder_layers import Common, Layer, layers_program, logits_program
from fastattn.models._files import stop_ids
from fastattn.models._text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Shape
    from fastattn.models._files import Config, Tensors
    from fastattn.models._weights import Precision

_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")  # the causal mask, in old files


def build(config: Config, tensors: Tensors, precision: Precision, folder: Path) -> Decoder:
    """The model that the folder's files describe."""
    hidden, heads = config.size("n_embd"), config.size("n_head")
    inner = config.optional_size("n_inner") or 4 * hidden
    vocab, length = config.size("vocab_size"), config.size("n_positions")
    depth = tensors.depth(config, "n_layer")
    head_dim = config.divided("n_embd", "n_head")
    config.refuse(add_cross_attention=False)

    tensors.drop_prefix("transformer.")
    tied = config.flag("tie_word_embeddings", True)
    shapes: dict[str, Shape] = {"wte.weight": (vocab, hidden), "wpe.weight": (length, hidden)}
    shapes |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(depth):
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.weight": (hidden,), f"h.{i}.{name}.bias": (hidden,)}
        for name, (columns, rows) in {  # (in, out), where torch's linear has (out, in)
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }.items():
            shapes |= {f"h.{i}.{name}.weight": (columns, rows), f"h.{i}.{name}.bias": (rows,)}
    tensors.expect(shapes, own=("h.", "wte.", "wpe.", "ln_f."), ignored=_BUFFERS)

    def norm(name: str) -> tuple[Array, Array]:
        return precision.vector(tensors[f"{name}.weight"]), precision.vector(tensors[f"{name}.bias"])

    def linear(name: str) -> tuple[PackedLinear, Array]:
        return precision.pack(tensors[f"{name}.weight"].T), precision.vector(tensors[f"{name}.bias"])

    def layer_of(i: int) -> Layer:
        scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
        if config.flag("scale_attn_by_inverse_layer_idx", False):
            scale /= i + 1
        return Layer(
            attention_norm=norm(f"h.{i}.ln_1"),
            qkv=linear(f"h.{i}.attn.c_attn"),
            qk_norm=None,
            window=None,
            scale=scale,
            attended=linear(f"h.{i}.attn.c_proj"),
            inner_norm=norm(f"h.{i}.ln_2"),
            inner=linear(f"h.{i}.mlp.c_fc"),
            outer=linear(f"h.{i}.mlp.c_proj"),
        )

    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    eps = config.number("layer_norm_epsilon", 1e-5)
    common = Common(hidden, heads, heads, head_dim, "layer_norm", eps, activation)
    program, windows = layers_program(common, [layer_of(i) for i in range(depth)])
    output = precision.pack(tensors["wte.weight" if tied else "lm_head.weight"])
    return Decoder(
        model_type=config.text("model_type"),
        hidden_size=hidden,
        heads=heads,
        heads_kv=heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_length=length,
        tokens=output if tied else tensors["wte.weight"],
        positions=precision.vector(tensors["wpe.weight"]).astype(precision.dtype),
        rope=None,
        depth=depth,
        program=program,
        windows=windows,
        logits=logits_program(common, norm("ln_f"), output),
        stop=stop_ids(config, folder),
        precision=precision,
        text=Text(folder, length),
    )
