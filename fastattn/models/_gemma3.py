"""Gemma 3's text model as an encoder (EmbeddingGemma): names of tensors, and what its config.json says.

Norms stand before and behind attention and feed-forward, and multiply by 1 + weight. Query and key heads have
norms. Layers with a window have rotary positions of their own. Vectors of tokens are scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._args.values import short
from fastattn.models._blocks import ACTIVATIONS, Blocks, Source
from fastattn.models._families import read_encoder
from fastattn.models._files import ModelError
from fastattn.models._llama import QWEN3, encoder_names, head_counts
from fastattn.models._rope import scaled

if TYPE_CHECKING:
    from fastattn.layers._block import Window
    from fastattn.models._embeddings import Frequencies
    from fastattn.models._encoder import Encoder
    from fastattn.models._files import Config

_NAMES = encoder_names(QWEN3)._replace(
    block=QWEN3.block._replace(
        inner_norm="pre_feedforward_layernorm",
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        norm_offset=1.0,
    )
)
_ALL, _NEAR = "full_attention", "sliding_attention"  # kinds of layers
# Of each kind: where older files have the base of its rotary positions, and what it is by default.
_THETAS = {_ALL: ("rope_theta", 1e6), _NEAR: ("rope_local_base_freq", 1e4)}


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    causal = not config.get("use_bidirectional_attention", bool, False)
    modules = source.folder / "modules.json"
    if causal and not modules.is_file():
        what = "Gemma 3 makes vectors here, and generates no text"
        raise ModelError(f"{modules} is missing, and the model is causal; {what}")
    config.refuse(attn_logit_softcapping=None, is_causal=True)  # `use_bidirectional_attention` says otherwise
    heads, heads_kv = head_counts(config, 4)
    blocks = Blocks(
        source,
        _NAMES.block,
        num_layers=source.tensors.depth(config, "num_hidden_layers"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads_kv,
        head_dim=config.size("head_dim", 256),
        eps=config.number("rms_norm_eps", 1e-6),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        biased=frozenset(_biased(config)),
    )
    kinds = config.words("layer_types", (_ALL, _NEAR), blocks.num_layers)
    if kinds is None:
        pattern = config.size("sliding_window_pattern", 6)
        kinds = [_NEAR if (i + 1) % pattern else _ALL for i in range(blocks.num_layers)]
    window = _window(config, causal)
    return read_encoder(
        _NAMES,
        blocks,
        longest=config.optional_size("max_position_embeddings"),
        scales=[config.number("query_pre_attn_scalar", 256) ** -0.5] * blocks.num_layers,
        windows=[window if kind == _NEAR else None for kind in kinds],
        rotations=[list(_THETAS).index(kind) for kind in kinds],
        causal=causal,
        token_scale=blocks.hidden**0.5,
        frequencies=lambda: _frequencies(config, blocks.head_dim),
    )


def _biased(config: Config) -> tuple[str, ...]:
    """The maps that have a bias."""
    return (*_NAMES.block.qkv, _NAMES.block.attended) if config.get("attention_bias", bool, False) else ()


def _window(config: Config, causal: bool) -> Window:
    """Keys before and after a query; half of `sliding_window` to either side if they may be after it."""
    width = config.optional_size("sliding_window", 4096)
    if width is None:
        return None
    return (width - 1, 0) if causal else (width // 2, width // 2)


def _frequencies(config: Config, head_dim: int) -> tuple[Frequencies, ...]:
    """The frequencies of rotary positions of each kind of layer, in the order of `_THETAS`.

    `rope_parameters` describes them; in older files `rope_scaling` is of layers that attend to all tokens.
    """
    given = config.get("rope_parameters", dict, {})
    if not (given.keys() <= set(_THETAS) and all(isinstance(x, dict) for x in given.values())):
        expected = f"a table for each of {', '.join(_THETAS)}"
        raise ModelError(f"{config.path}: 'rope_parameters' is {short(given)}; expected {expected}")
    longest = config.optional_size("max_position_embeddings")
    frequencies = []
    for kind, (base, theta) in _THETAS.items():
        scaling: dict[str, Any] = {**given.get(kind, {})}
        if kind == _ALL:
            scaling |= config.get("rope_scaling", dict, {})
        scaling.setdefault("rope_theta", config.number(base, theta))
        frequencies.append(scaled(config, head_dim, scaling, longest))
    return tuple(frequencies)
