"""Blocks of a model, read from the tensors of its files under the names that a family has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastattn._args.packed import PackedLinear
from fastattn._args.types import ACTIVATIONS as OURS
from fastattn._args.types import Activation, Array, ModifiersArgs, Rounding, Shape
from fastattn._engine.experts import Bounds, Experts, Shared
from fastattn.layers._block import Block, Norm, Projection, Window
from fastattn.layers._mixers import Mixer
from fastattn.models._source import Rows, Source

# Names of activations in config.json, and in `fastattn.ops`.
ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in OURS},
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}


class Keys(NamedTuple):
    """Keys of config.json for the sizes of blocks; None where a family has always the default."""

    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    eps: str | None = "layer_norm_eps"
    activation: str | None = "hidden_act"


_KEYS = Keys()


class BlockNames(NamedTuple):
    """Names of the tensors of one block, without ".weight" and ".bias"; see `Block`."""

    prefix: str  # of block i: prefix.format(i)
    attention_norm: str | None  # the first block has none where `first_norm` is False
    qkv: tuple[str, ...]  # one map for all, or one each for queries, keys and values
    attended: str
    inner_norm: str | None
    inner: str
    outer: str
    gate: str | None = None  # multiplies `inner`; if that is its name, too, one tensor holds both
    gate_first: bool = True  # in such a tensor
    head_norms: tuple[str, ...] | None = None  # of each query head and, if there are keys, of each key head
    norms_of_all: bool = False  # these are of all query heads together, and of all key heads
    head_norm: str = "rms_norm"  # or "layer_norm", with a bias, which has to be of all heads
    norm: str = "layer_norm"  # or "rms_norm"
    norm_bias: bool = True  # of a "layer_norm"
    norm_offset: float = 0.0  # added to the weights of norms
    post_norms: tuple[str, str] | None = None  # of what attention and the feed-forward give
    second_norm: str | None = None  # see `Block`
    norm_first: bool = True
    first_norm: bool = True
    transposed: bool = False  # weights are (in, out), where torch's Linear has (out, in)
    router: str | None = None  # of experts, which have `inner`, `gate` and `outer` each
    experts: str = "{}."  # the prefix of an expert's: experts.format(number)
    # The map to the weight of the expert that takes every row, None for 1, and the prefix of that one's maps.
    shared: tuple[str | None, str] | None = None
    transposed_experts: tuple[str, ...] = ()  # maps of experts of which that is true
    experts_bias: str | None = None  # the whole name of what is added to the experts' sum
    sinks: str | None = None  # the whole name of logits that enter the denominator alone, one for each head

    def is_transposed(self, name: str) -> bool:
        """Tell whether the weight of the map `name` is (in, out)."""
        of_experts = name.startswith(self.experts.partition("{")[0])
        return self.transposed or (of_experts and name.endswith(self.transposed_experts))

    @property
    def maps(self) -> frozenset[str]:
        """Names of all linear maps."""
        maps = (*self.qkv, self.attended, self.inner, self.outer, self.gate)
        return frozenset(name for name in maps if name is not None)


def projection(source: Source, weight: PackedLinear, bias: Array | None) -> Projection:
    """A linear map with parameters of `source`."""
    return Projection(weight, bias, source.precision.rounding(weight))


def linear(source: Source, name: str, out: int, features: int, biased: bool = False) -> Projection:
    """The linear map `name`."""
    bias = source.vector(Rows(f"{name}.bias", (out,))) if biased else None
    return projection(source, source.pack([Rows(f"{name}.weight", (out, features))]), bias)


# A family's mixers: of a source, a prefix and the features of a row, the map in, the mixer, and the map out.
Mixing = Callable[[Source, str, int], tuple[Projection, Mixer, Projection]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks in a model's files: their sizes, the shapes of their tensors, and the blocks themselves."""

    source: Source
    names: BlockNames
    num_layers: int
    hidden: int
    inner: int
    heads: int
    heads_kv: int
    head_dim: int
    eps: float
    activation: Activation
    biased: frozenset[str]  # the maps that have a bias, those of experts with their prefix
    bias: int | None = None  # of all blocks' scores: see `AttendStep`
    modifiers: Mapping[str, float] = field(default_factory=dict)  # of `ModifiersArgs`, but for the scale
    query_rotation: int | None = None  # as `bias`
    experts: int = 0  # where there is a router: how many, how many for a token, and whether those weigh 1
    chosen: int = 0
    routed: frozenset[int] | None = None  # the blocks that have experts; None: all
    normalised: bool = True
    limit: float | None = None  # of what experts' first maps give: see `Bounds`
    shared: int = 0  # features within the expert of every row
    gated: bool = False  # the queries' map has, after each head's, a gate of its results
    mixing: Mixing | None = None  # in place of attention
    mixed: frozenset[int] = frozenset()  # the blocks that have it

    @classmethod
    def of(
        cls,
        source: Source,
        names: BlockNames,
        keys: Keys = _KEYS,
        *,
        eps: float | None = 1e-12,
        activation: str | None = "gelu",
        activations: Mapping[str, Activation] = ACTIVATIONS,
        **others: Any,
    ) -> Blocks:
        """Read the sizes from config.json under `keys`; `eps` and `activation` are the defaults of theirs.

        `others` are fields that it says in another way; by default all maps have a bias.
        """
        config = source.config
        usual = Keys()
        for size in ("hidden", "heads", "layers"):
            config.refuse_others(**{getattr(usual, size): getattr(keys, size)})

        def said(read: Callable[..., Any], key: str | None, *how: Any, default: Any) -> Any:
            if key is None:
                return default
            return read(key, *how) if default is None else read(key, *how, default)

        sizes: dict[str, Callable[[], Any]] = {
            "num_layers": lambda: source.depth(keys.layers),
            "hidden": lambda: config.size(keys.hidden),
            "inner": lambda: config.size(keys.inner),
            "heads": lambda: config.size(keys.heads),
            "head_dim": lambda: config.divided(keys.hidden, keys.heads),
            "eps": lambda: said(config.number, keys.eps, default=eps),
            "activation": lambda: said(config.choice, keys.activation, activations, default=activation),
            "biased": lambda: names.maps,
        }
        found = {name: others.pop(name) if name in others else size() for name, size in sizes.items()}
        return cls(source, names, **found, heads_kv=others.pop("heads_kv", found["heads"]), **others)

    def sizes(self, routed: bool) -> dict[str, tuple[int, int]]:
        """Features that the maps of a block make and take, by their names; `routed`: of one with experts."""
        names, q, kv = self.names, self.heads * self.head_dim, self.heads_kv * self.head_dim
        first = q * (2 if self.gated else 1)
        rows = (first, kv, kv) if len(names.qkv) == 3 else (first + 2 * kv,)
        found = {name: (n, self.hidden) for name, n in zip(names.qkv, rows, strict=True)}
        found[names.attended] = self.hidden, q
        inner = dict.fromkeys(self._feed_forwards(routed), self.inner)
        if routed and names.router is not None:
            found[names.router] = self.experts, self.hidden
        if names.shared is not None:
            share, prefix = names.shared
            inner[prefix] = self.shared
            if share is not None:
                found[share] = 1, self.hidden
        for prefix, features in inner.items():
            for name in (names.gate, names.inner):
                if name is not None:
                    found[f"{prefix}{name}"] = features * (2 if names.gate == names.inner else 1), self.hidden
            found[f"{prefix}{names.outer}"] = self.hidden, features
        return found

    def _has_experts(self, i: int) -> bool:
        """Tell whether block i has experts in the place of a feed-forward."""
        return self.names.router is not None and (self.routed is None or i in self.routed)

    def _feed_forwards(self, routed: bool) -> list[str]:
        """The prefixes of the names of each feed-forward of a block: one, or one for each expert."""
        return [self.names.experts.format(i) for i in range(self.experts)] if routed else [""]

    def norm(self, name: str, scale: float = 1.0, features: int | None = None) -> Norm:
        """The norm `name`, which may stand outside of the blocks, of other `features`.

        Its result is times `scale`.
        """
        names, shape = self.names, (features or self.hidden,)
        weight = self.source.vector(Rows(f"{name}.weight", shape), offset=names.norm_offset, scale=scale)
        bias = None
        if names.norm == "layer_norm" and names.norm_bias:
            bias = self.source.vector(Rows(f"{name}.bias", shape), scale=scale)
        return Norm(names.norm, weight, bias, self.eps)

    def read(
        self,
        scales: Sequence[float] | None = None,
        windows: Sequence[Window] | None = None,
        rotations: Sequence[int | None] | None = None,
    ) -> list[Block]:
        """The blocks, each with its scale of scores, by default ``head_dim**-0.5``, window and rotation."""
        scales = scales or [self.head_dim**-0.5] * self.num_layers
        windows = windows or [None] * self.num_layers
        rotations = rotations or [None] * self.num_layers
        return [self._block(i, scales[i], windows[i], rotations[i]) for i in range(self.num_layers)]

    def _block(self, i: int, scale: float, window: Window, rotation: int | None) -> Block:
        names, source, precision = self.names, self.source, self.source.precision
        prefix, routed = names.prefix.format(i), self._has_experts(i)
        sizes = self.sizes(routed)

        def weight(part: str) -> Rows:
            shape = sizes[part][::-1] if names.is_transposed(part) else sizes[part]
            return Rows(f"{prefix}{part}.weight", shape)

        def packed(*parts: str, gate: str | None = None, stored: str | None = None) -> PackedLinear:
            maps = [[weight(part) for part in parts], *([] if gate is None else [[weight(gate)]])]
            return source.pack(*maps, transposed=names.is_transposed(parts[0]), stored=stored)

        def bias_of(part: str) -> Rows:
            return Rows(f"{prefix}{part}.bias", sizes[part][:1])

        def bias(*parts: str, shape: Shape | None = None) -> Array | None:
            return source.vector(*map(bias_of, parts), shape=shape) if parts[0] in self.biased else None

        def linear(*parts: str) -> Projection:
            return projection(source, packed(*parts), bias(*parts))

        def gated() -> Projection:
            first, *others = names.qkv
            d, end = self.head_dim, 2 * self.heads * self.head_dim

            def rows(of: Callable[[str], Rows]) -> list[Rows]:
                heads = [[of(first).part(at, d) for at in range(begin, end, 2 * d)] for begin in (0, d)]
                return [*heads[0], *map(of, others), *heads[1]]

            bias = source.vector(*rows(bias_of)) if first in self.biased else None
            return projection(source, source.pack(rows(weight)), bias)

        def inner() -> Projection:
            first, both = first_map(""), None
            if names.gate is None:
                both = bias(names.inner)
            elif names.gate != names.inner:
                both = bias(names.gate, names.inner, shape=(2, self.inner))
            elif names.inner in self.biased:
                up, gate = bias_of(names.inner).halves(names.gate_first)
                both = source.vector(*gate, *up, shape=(2, self.inner))
            return projection(source, first, both)

        def rounding(maps: Sequence[Sequence[PackedLinear]]) -> Rounding | None:
            found = {precision.rounding(weight) for each in maps for weight in each}
            return found.pop() if len(found) == 1 else None  # they are computed together

        def first_map(part: str) -> PackedLinear:
            if names.gate is None:
                return packed(f"{part}{names.inner}")
            if names.gate == names.inner:
                return source.pack(*weight(f"{part}{names.inner}").halves(names.gate_first))
            return packed(f"{part}{names.inner}", gate=f"{part}{names.gate}")

        def experts() -> Experts:
            assert names.router is not None
            parts = self._feed_forwards(True)
            lane = precision.lane.name
            router = packed(names.router, stored=lane)
            outer = [f"{part}{names.outer}" for part in parts]
            if self.limit is None:
                maps, shared = (tuple(map(first_map, parts)), tuple(map(packed, outer))), None
                if names.shared is not None:
                    share, part = names.shared
                    own = None if share is None else packed(share, stored=lane)
                    shared = Shared(own, first_map(part), packed(f"{part}{names.outer}"))
                how = self.chosen, self.normalised, rounding([*maps, shared[1:] if shared else ()])
                added = None
                if names.experts_bias is not None:
                    added = source.vector(Rows(f"{prefix}{names.experts_bias}", (self.hidden,)))
                return Experts(router, maps, *how, shared=shared, added=added)
            # A product cannot keep gate and up within bounds: both are one plain map.
            both = dict.fromkeys(name for name in (names.gate, names.inner) if name is not None)
            inner = [[f"{part}{name}" for name in both] for part in parts]
            first = tuple(packed(*each) for each in inner)
            biases = tuple(bias(*each) for each in inner), tuple(map(bias, outer))
            bounds = Bounds(self.limit, names.gate == names.inner)
            maps = first, tuple(map(packed, outer))
            how = self.chosen, self.normalised, rounding(maps)
            return Experts(router, maps, *how, bias(names.router), biases, bounds)

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self.norm(prefix + name)

        def post_norms(attended: str, inner: str) -> tuple[Norm, Norm]:
            return self.norm(prefix + attended), self.norm(prefix + inner)

        def head_norms() -> Iterator[Norm]:
            counts, d, offset = (self.heads, self.heads_kv), self.head_dim, names.norm_offset
            pairs = list(zip(names.head_norms or (), counts, strict=False))
            if names.norms_of_all:
                for name, count in pairs:
                    rows = Rows(f"{prefix}{name}.weight", (count * d,))
                    weight, bias = source.vector(rows, shape=(1, count * d), offset=offset), None
                    if names.head_norm == "layer_norm":
                        bias = source.vector(Rows(f"{prefix}{name}.bias", (count * d,)))
                    yield Norm(names.head_norm, weight, bias, self.eps)
            elif pairs:
                each = [Rows(f"{prefix}{name}.weight", (d,)) for name, n in pairs for _ in range(n)]
                weight = source.vector(*each, shape=(sum(counts), d), offset=offset)
                yield Norm(names.head_norm, weight, None, self.eps)

        if self.mixing is not None and i in self.mixed:
            first, mixer, second = self.mixing(source, prefix, self.hidden)
        else:
            first, mixer = gated() if self.gated else linear(*names.qkv), None
            second = linear(names.attended)
        sinks = None if mixer or names.sinks is None else Rows(f"{prefix}{names.sinks}", (self.heads,))
        return Block(
            norm_first=names.norm_first,
            attention_norm=norm(names.attention_norm) if i or names.first_norm else None,
            qkv=first,
            heads=self.heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            modifiers=ModifiersArgs(scale, **self.modifiers),
            attended=second,
            inner_norm=norm(names.inner_norm),
            inner=experts() if routed else inner(),
            activation=self.activation,
            outer=None if routed else linear(names.outer),
            head_norms=() if mixer else tuple(head_norms()),
            window=window,
            rotation=rotation,
            bias=self.bias,
            post_norms=post_norms(*names.post_norms) if names.post_norms else None,
            second_norm=norm(names.second_norm),
            query_rotation=self.query_rotation,
            sinks=None if sinks is None else source.vector(sinks),
            mixer=mixer,
            gated=self.gated,
        )
