"""Granite's hybrids: Mamba 2 in place of attention in most layers."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from fastattn.layers._state_space import Mamba2Mixer
from fastattn.models import _gguf
from fastattn.models._blocks import Blocks, Keys
from fastattn.models._families.granite import multiplied
from fastattn.models._families.hybrid import ATTENTION, convolved_tokens, linear, require_decoder
from fastattn.models._families.llama import LLAMA
from fastattn.models._families.shared import head_counts

if TYPE_CHECKING:
    from fastattn._args.types import Shape
    from fastattn.layers._block import Projection
    from fastattn.layers._mixers import Mixer
    from fastattn.models._decoder import Decoder
    from fastattn.models._files import Config
    from fastattn.models._source import Source

_NAMES = LLAMA._replace(
    block=LLAMA.block._replace(
        inner="shared_mlp.input_linear", gate="shared_mlp.input_linear", outer="shared_mlp.output_linear"
    )
)
_WITH_EXPERTS = _NAMES._replace(
    block=_NAMES.block._replace(
        inner="input_linear",
        gate="input_linear",
        outer="output_linear",
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe.experts.{}.",
        shared=(None, "shared_mlp."),
    )
)
_OF_EXPERTS = re.compile(r"\.block_sparse_moe\.(\w+)_linear\.weight\.(\d+)")


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

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """The shapes of a mixer's tensors."""
        inner = self.heads * self.head_dim
        mixed = inner + 2 * self.groups * self.states
        rows = {"in_proj": inner + mixed + self.heads, "out_proj": hidden}
        shapes: dict[str, Shape] = {f"{name}.bias": (n,) for name, n in rows.items() if self.biased}
        shapes |= {"in_proj.weight": (rows["in_proj"], hidden), "out_proj.weight": (hidden, inner)}
        shapes |= {"conv1d.weight": (mixed, 1, self.width), "norm.weight": (inner,)}
        shapes |= {"conv1d.bias": (mixed,)} if self.conv_biased else {}
        shapes |= dict.fromkeys(("dt_bias", "A_log", "D"), (self.heads,))
        if self.of_file:
            norm = self.groups, inner // self.groups
            shapes |= {"conv1d.weight": (mixed, self.width), "norm.weight": norm}
            shapes |= dict.fromkeys(("A_log", "D"), (self.heads, 1))
        return {f"mamba.{name}": shape for name, shape in shapes.items()}

    def read(self, source: Source, prefix: str) -> tuple[Projection, Mixer, Projection]:
        """The map in, the mixer, and the map out."""
        prefix = f"{prefix}mamba."
        inner = self.heads * self.head_dim
        shape = inner + 2 * self.groups * self.states, 1, self.width
        taps = source.vector(f"{prefix}conv1d.weight", shape=shape)
        bias, skip = (source.vector(f"{prefix}{name}", shape=(self.heads,)) for name in ("dt_bias", "D"))
        rates = source.vector(f"{prefix}A_log", shape=(self.heads,), of_rates=self.of_file)
        norm = source.vector(f"{prefix}norm.weight", shape=(self.groups, inner // self.groups))
        own = source.vector(f"{prefix}conv1d.bias") if self.conv_biased else None
        sizes = self.groups, self.states, self.eps, self.limits
        mixer = Mamba2Mixer(taps, own, bias, rates, skip, norm, *sizes)
        first, second = (linear(source, f"{prefix}{name}", self.biased) for name in ("in_proj", "out_proj"))
        return first, mixer, second


def granite_hybrid(source: Source) -> Decoder:
    """Build Granite's hybrids."""
    config = source.config
    require_decoder(source)
    config.refuse(hidden_act="silu")
    experts = config.size("num_local_experts", 8, low=0)
    forward: dict[str, Any] = {"inner": config.size("shared_intermediate_size", 1024)}
    if experts:
        source.rename(lambda name: _OF_EXPERTS.sub(r".block_sparse_moe.experts.\2.\1_linear.weight", name))
        chosen = config.size("num_experts_per_tok", 2)
        if chosen > experts:
            raise config.wrong("num_experts_per_tok", chosen, f"at most 'num_local_experts', {experts}")
        forward |= {"shared": forward["inner"], "inner": config.size("intermediate_size", 11008)}
        if "num_local_experts" in config.values:
            source.depth("num_local_experts")
        forward |= {"experts": experts, "chosen": chosen}
    all_names, of_file = _WITH_EXPERTS if experts else _NAMES, _gguf.is_file(source.folder)
    if of_file:  # it has the halves of gated pairs apart
        inner, gate, outer = (
            f"{'' if experts else 'shared_mlp.'}{name}_proj" for name in ("up", "gate", "down")
        )
        block = all_names.block._replace(inner=inner, gate=gate, outer=outer)
        all_names = all_names._replace(block=block)
    heads, heads_kv = head_counts(config)
    layers = source.depth("num_hidden_layers")
    name = "layers_block_type" if "layers_block_type" in config.values else "layer_types"
    kinds = config.words(name, (ATTENTION, "attention", "linear_attention", "mamba"), layers)
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
    names = all_names.block
    biased = config.get("attention_bias", bool, False)
    blocks = Blocks.of(
        source,
        names,
        Keys(eps="rms_norm_eps", activation=None),
        eps=1e-6,
        activation="silu",
        heads=heads,
        heads_kv=heads_kv,
        head_dim=config.optional_size("head_dim") or config.divided("hidden_size", "num_attention_heads"),
        biased=frozenset((*names.qkv, names.attended) if biased else ()),
        mixing=mambas,
        mixed=frozenset(
            i for i in range(layers) if kinds is None or kinds[i] in ("mamba", "linear_attention")
        ),
        **forward,
    )
    kind = config.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.wrong("position_embedding_type", kind, "rope, nope or null")
    return multiplied(all_names, blocks, rotary=kind == "rope")


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
