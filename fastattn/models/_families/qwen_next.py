"""Qwen3-Next and Qwen3.5: gated DeltaNets in place of attention in most layers.

Their attention has a gate, too, of each result, their norms multiply by 1 + weight, and a part of each head
is rotated. Qwen3-Next and Qwen3.5-MoE have experts, one of which takes every token.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from fastattn.layers._delta_rules import DeltaMixer
from fastattn.models import _gguf
from fastattn.models._blocks import Blocks, Keys, projection
from fastattn.models._families.hybrid import ATTENTION, convolved_tokens, require_decoder
from fastattn.models._families.llama import LLAMA
from fastattn.models._families.shared import frequencies, head_counts, read_decoder

if TYPE_CHECKING:
    from fastattn._args.types import Shape
    from fastattn.layers._block import Projection
    from fastattn.layers._mixers import Mixer
    from fastattn.models._decoder import Decoder
    from fastattn.models._source import Source

_QWEN = LLAMA._replace(
    block=LLAMA.block._replace(head_norms=("self_attn.q_norm", "self_attn.k_norm"), norm_offset=1.0)
)
_WITH_EXPERTS = _QWEN._replace(
    block=_QWEN.block._replace(
        router="mlp.gate",
        experts="mlp.experts.{}.",
        shared=("mlp.shared_expert_gate", "mlp.shared_expert."),
        gate="gate_proj",
        inner="up_proj",
        outer="down_proj",
    )
)


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
    together: frozenset[str]  # maps in which the rows of a key head and its values lie together
    of_file: bool
    tiled: bool  # the first value head of every key head comes first, then the second of each

    @property
    def channels(self) -> int:
        """Features that are convolved."""
        return 2 * self.key_heads * self.head_dim + self.heads * self.head_dim_v

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """The shapes of a mixer's tensors."""
        inner, both = self.heads * self.head_dim_v, self.channels
        maps = {"qkvz": both + inner} if "qkvz" in self.together else {"qkv": both, "z": inner}
        maps |= {"ba": 2 * self.heads} if "ba" in self.together else {"b": self.heads, "a": self.heads}
        shapes: dict[str, Shape] = {f"in_proj_{name}.weight": (n, hidden) for name, n in maps.items()}
        taps = (both, self.width) if self.of_file else (both, 1, self.width)
        shapes |= {"conv1d.weight": taps, "out_proj.weight": (hidden, inner)}
        shapes |= {"norm.weight": (self.head_dim_v,), **dict.fromkeys(("dt_bias", "A_log"), (self.heads,))}
        return {f"linear_attn.{name}": shape for name, shape in shapes.items()}

    def read(self, source: Source, prefix: str) -> tuple[Projection, Mixer, Projection]:
        """The map in, the mixer, and the map out."""
        prefix = f"{prefix}linear_attn."
        rows = [(f"{prefix}in_proj_{name}.weight", begin, n) for name, begin, n in self._rows()]
        taps = source.vector_rows(
            *self._channels(f"{prefix}conv1d.weight"), shape=(self.channels, 1, self.width)
        )
        bias = source.vector_rows(*self._values(f"{prefix}dt_bias"))
        rates = source.vector_rows(*self._values(f"{prefix}A_log"), of_rates=self.of_file)
        norm = source.vector(f"{prefix}norm.weight")
        mixer = DeltaMixer(taps, None, bias, rates, norm, self.key_heads, self.head_dim, self.eps)
        first = projection(source, source.pack_rows(*rows), None)
        tiles = (self.heads // self.key_heads, self.key_heads) if self.tiled else (1, 1)
        second = source.pack([f"{prefix}out_proj.weight"], tiles=tiles)
        return first, mixer, projection(source, second, None)

    def _rows(self) -> list[tuple[str, int, int]]:
        """Rows of the maps in: of all queries, keys and values, then of z, b and a."""
        each, dim_v = self.heads // self.key_heads, self.head_dim_v
        if "qkvz" in self.together:
            rows = self._by_key_head("qkvz", [self.head_dim] * 2 + [each * dim_v] * 2)
        else:
            rows = self._channels("qkv") + self._values("z", dim_v)
        if "ba" in self.together:
            return rows + self._by_key_head("ba", [each] * 2)
        return rows + self._values("b") + self._values("a")

    def _by_key_head(self, name: str, widths: list[int]) -> list[tuple[str, int, int]]:
        """Rows of a tensor that has these, one after another, for each key head."""
        begins = accumulate(widths, initial=0)
        return [
            (name, group * sum(widths) + begin, n)
            for begin, n in zip(begins, widths, strict=False)
            for group in range(self.key_heads)
        ]

    def _channels(self, name: str) -> list[tuple[str, int, int]]:
        """Rows of a tensor of what is convolved: queries and keys, and then values."""
        keys = 2 * self.key_heads * self.head_dim
        return [(name, 0, keys), *self._values(name, self.head_dim_v, keys)]

    def _values(self, name: str, n: int = 1, begin: int = 0) -> list[tuple[str, int, int]]:
        """Rows of the value heads in a tensor, `n` of each, from `begin` on."""
        if not self.tiled:
            return [(name, begin, self.heads * n)]
        each = self.heads // self.key_heads
        places = (i % each * self.key_heads + i // each for i in range(self.heads))
        return [(name, begin + place * n, n) for place in places]


def qwen_next(source: Source) -> Decoder:
    """Build Qwen3-Next, or the text model of Qwen3.5 or Qwen3.5-MoE."""
    config = source.config
    require_decoder(source)
    config.refuse(hidden_act="silu")
    kind = config.get("model_type", str)
    is_next, has_experts = kind == "qwen3_next", kind != "qwen3_5_text"
    names, of_file = _WITH_EXPERTS if has_experts else _QWEN, _gguf.is_file(source.folder)
    if of_file:  # its norms have 1 added
        names = names._replace(block=names.block._replace(norm_offset=0.0))
    heads, heads_kv = head_counts(config, 2 if has_experts else 4)
    head_dim = config.size("head_dim", 256)
    layers = source.depth("num_hidden_layers")
    kinds = config.words("layer_types", (ATTENTION, "linear_attention"), layers)
    if kinds is None:
        interval = config.size("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else ATTENTION for i in range(layers)]
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
        frozenset((("ba",) if of_file else ("qkvz", "ba")) if is_next else ()),
        of_file,
        of_file and not is_next and own != key_heads,
    )
    biased = config.get("attention_bias", bool, False)
    blocks = Blocks.of(
        source,
        names.block,
        Keys(eps="rms_norm_eps", activation=None),
        eps=1e-6,
        activation="silu",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        biased=frozenset((*names.block.qkv, names.block.attended) if biased else ()),
        gated=True,
        mixing=deltas,
        mixed=frozenset(i for i, kind in enumerate(kinds) if kind != ATTENTION),
        **(_experts(source, 10 if is_next else 8) if has_experts else {}),
    )
    return read_decoder(
        names,
        blocks,
        frequencies=lambda: (frequencies(config, head_dim, in_part=True, usual=0.25),),
        tied=config.get("tie_word_embeddings", bool, False),
    )


def _experts(source: Source, usual: int) -> dict[str, Any]:
    """The sizes of experts, `usual` of them for a token, as `Blocks` has them."""
    config = source.config
    config.refuse(mlp_only_layers=[], decoder_sparse_step=1)
    if config.get("model_type", str) != "qwen3_next":
        config.refuse(norm_topk_prob=True)  # transformers always divides
    experts, chosen = source.depth("num_experts"), config.size("num_experts_per_tok", usual)
    if chosen > experts:
        raise config.wrong("num_experts_per_tok", chosen, f"at most 'num_experts', {experts}")
    return {
        "experts": experts,
        "chosen": chosen,
        "normalised": config.get("norm_topk_prob", bool, True),
        "inner": config.size("moe_intermediate_size", 512),
        "shared": config.size("shared_expert_intermediate_size", 512),
    }
