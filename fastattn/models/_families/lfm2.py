"""LFM2: short convolutions in place of attention in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fastattn.layers._mixers import ConvolutionMixer
from fastattn.models import _gguf
from fastattn.models._blocks import Blocks, Keys
from fastattn.models._families.hybrid import ATTENTION, convolved_tokens, linear, require_decoder
from fastattn.models._families.llama import LLAMA
from fastattn.models._families.shared import frequencies, head_counts, read_decoder

if TYPE_CHECKING:
    from fastattn._args.types import Shape
    from fastattn.layers._block import Projection
    from fastattn.layers._mixers import Mixer
    from fastattn.models._decoder import Decoder
    from fastattn.models._files import Config
    from fastattn.models._source import Source

_LFM2 = LLAMA._replace(
    block=LLAMA.block._replace(
        attention_norm="operator_norm",
        attended="self_attn.out_proj",
        inner_norm="ffn_norm",
        inner="feed_forward.w3",
        gate="feed_forward.w1",
        outer="feed_forward.w2",
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    ),
    norm="embedding_norm",
)


class _Convolutions(NamedTuple):
    """Mixers' sizes and names; see `Mixing`."""

    width: int
    biased: bool
    flat: bool  # the convolution's weight has two axes, as in GGUF

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """The shapes of a mixer's tensors."""
        rows = {"conv.conv": hidden, "conv.in_proj": 3 * hidden, "conv.out_proj": hidden}
        shapes: dict[str, Shape] = {f"{name}.weight": (n, hidden) for name, n in rows.items()}
        shapes["conv.conv.weight"] = (hidden, self.width) if self.flat else (hidden, 1, self.width)
        return shapes | {f"{name}.bias": (n,) for name, n in rows.items() if self.biased}

    def read(self, source: Source, prefix: str) -> tuple[Projection, Mixer, Projection]:
        """The map in, the mixer, and the map out."""
        convolution, *maps = (f"{prefix}conv.{name}" for name in ("conv", "in_proj", "out_proj"))
        channels = source.shape(f"{convolution}.weight")[0]
        taps = source.vector(f"{convolution}.weight", shape=(channels, 1, self.width))
        first, second = (linear(source, name, self.biased) for name in maps)
        bias = source.vector(f"{convolution}.bias") if self.biased else None
        return first, ConvolutionMixer(taps, bias), second


def lfm2(source: Source) -> Decoder:
    """Build LFM2."""
    config = source.config
    require_decoder(source)
    heads, heads_kv = head_counts(config, 8)
    head_dim = config.optional_size("head_dim") or config.divided("hidden_size", "num_attention_heads")
    width = convolved_tokens(config, "conv_L_cache", 3)
    layers = source.depth("num_hidden_layers")
    kinds = config.words("layer_types", (ATTENTION, "conv"), layers)
    if kinds is None:
        attends = config.values.get("full_attn_idxs")
        if attends is not None and not (isinstance(attends, list) and all(type(i) is int for i in attends)):
            raise config.wrong("full_attn_idxs", attends, "a list of numbers of layers")
        kinds = [ATTENTION if attends is None or i in attends else "conv" for i in range(layers)]
    blocks = Blocks.of(
        source,
        _LFM2.block,
        Keys(eps="norm_eps", activation=None),
        eps=1e-5,
        activation="silu",
        inner=_inner(config),
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        biased=frozenset(),
        mixing=_Convolutions(width, config.get("conv_bias", bool, False), _gguf.is_file(source.folder)),
        mixed=frozenset(i for i, kind in enumerate(kinds) if kind != ATTENTION),
    )
    tied: Any = config.get("tie_word_embeddings", bool, True)
    return read_decoder(
        _LFM2,
        blocks,
        frequencies=lambda: (frequencies(config, head_dim, 1e6),),
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
