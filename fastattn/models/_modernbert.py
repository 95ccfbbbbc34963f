"""ModernBERT (Warner et al. 2024): the names of its tensors, and what its config.json says.

Every third block attends all tokens, the others a window around each; both kinds have rotary frequencies of
their own. Nothing has a bias unless config.json says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._args.values import short
from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._files import ModelError
from fastattn.models._rope import scaled

if TYPE_CHECKING:
    from fastattn.models._embeddings import Frequencies
    from fastattn.models._encoder import Encoder
    from fastattn.models._files import Config

_NAMES = EncoderNames(
    tokens="embeddings.tok_embeddings",
    first_norm="embeddings.norm",
    block=BlockNames(
        prefix="layers.{}.",
        attention_norm="attn_norm",
        qkv=("attn.Wqkv",),
        attended="attn.Wo",
        inner_norm="mlp_norm",
        inner="mlp.Wi",
        gate="mlp.Wi",
        outer="mlp.Wo",
        first_norm=False,  # the tokens' vectors have been normed
    ),
    last_norm="final_norm",
    prefixes=("model.",),
)
# Of attention, with the older name and the default of its theta.
_KINDS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}


def build(source: Source) -> Encoder:
    """The model that the folder's files describe."""
    config = source.config
    heads, longest = config.size("num_attention_heads"), config.size("max_position_embeddings", 8192)
    biased: tuple[str, ...] = ()
    if config.get("attention_bias", bool, False):
        biased += (*_NAMES.block.qkv, _NAMES.block.attended)
    if config.get("mlp_bias", bool, False):
        biased += (_NAMES.block.inner, _NAMES.block.outer)
    norm_bias = config.get("norm_bias", bool, False)
    names = _NAMES._replace(block=_NAMES.block._replace(norm_bias=norm_bias))
    blocks = Blocks(
        source,
        names.block,
        num_layers=source.tensors.depth(config, "num_hidden_layers"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("hidden_size", "num_attention_heads"),
        eps=config.number("norm_eps", 1e-5),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu"),
        biased=frozenset(biased),
    )
    kinds = config.words("layer_types", tuple(_KINDS), blocks.num_layers)
    if kinds is None:
        every = config.size("global_attn_every_n_layers", 3)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(blocks.num_layers)]
    side = config.optional_size("sliding_window") or config.size("local_attention", 128) // 2
    return read_encoder(
        names,
        blocks,
        longest=longest,
        windows=[(side, side) if kind == "sliding_attention" else None for kind in kinds],
        rotations=[list(_KINDS).index(kind) for kind in kinds],
        frequencies=lambda: tuple(_frequencies(config, kind, blocks.head_dim, longest) for kind in _KINDS),
    )


def _frequencies(config: Config, kind: str, head_dim: int, longest: int) -> Frequencies:
    """Those of a kind of attention; `rope_scaling` is of both kinds."""
    given = config.get("rope_parameters", dict, {})
    scaling: Any = given.get(kind)
    if scaling is not None and not isinstance(scaling, dict):
        raise ModelError(f"{config.path}: 'rope_parameters' has {kind}: {scaling!r}; expected a table")
    if not given.keys() <= set(_KINDS):
        expected = f"a table for each of {', '.join(_KINDS)}"
        raise ModelError(f"{config.path}: 'rope_parameters' is {short(given)}; expected {expected}")
    scaling = {**(scaling or {}), **config.get("rope_scaling", dict, {})}
    old, default = _KINDS[kind]
    if config.values.get(old, default) is None:  # null: that of the other kind
        old, default = _KINDS["full_attention"]
    theta = config.number(old, default)
    return scaled(config, head_dim, {"rope_theta": theta, **scaling}, longest)
