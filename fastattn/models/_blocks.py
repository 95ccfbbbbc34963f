"""From the tensors of a file to the blocks of a model: a family says how the tensors are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn._args.ops import integer_activations
from fastattn._args.types import ACTIVATIONS as OURS
from fastattn._args.types import Activation, lane_dtype
from fastattn.layers._block import Block, Norm, Projection
from fastattn.models._origins import Origin
from fastattn.models._tensors import pair_parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Shape
    from fastattn.layers._block import Window
    from fastattn.models._files import Config
    from fastattn.models._origins import Part
    from fastattn.models._tensors import Tensors
    from fastattn.models._weights import Precision

# What config.json calls activations, and what `fastattn.ops` calls them.
ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in OURS},
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}


class Source(NamedTuple):
    """A model's files, and how its weights are to be kept."""

    folder: Path
    config: Config
    tensors: Tensors
    precision: Precision
    outer: Path  # the folder of modules.json, in which `folder` may be

    def vector(self, *names: str) -> Array:
        """The tensors `names`, end to end, in the type that the kernels compute in."""
        arrays = [self.tensors[name] for name in names]
        lane = lane_dtype(self.precision.dtype)
        # A copy, even of one, which may be a single number.
        whole = np.concatenate([np.atleast_1d(array).astype(lane, copy=False) for array in arrays])
        parts: list[Part] = []
        for array in arrays:
            first = sum(part.rows for part in parts)
            parts += [part._replace(first=first) for part in self.tensors.origins.of(array)]
        self.tensors.origins.note(whole, parts)
        return whole

    def same(self, array: Array, as_array: Array) -> Array:
        """`array`, whose elements are those of `as_array`, or differ by constants."""
        self.tensors.origins.note(array, self.tensors.origins.of(as_array))
        return array

    def origin(self) -> Origin:
        """What the model keeps of this."""
        tensors = self.tensors
        return Origin(self.folder, self.outer, self.config, self.precision, tensors.origins, tensors.state)


class BlockNames(NamedTuple):
    """What a family calls the tensors of one block, without ".weight" and ".bias"; see `Block`."""

    prefix: str  # of block i: prefix.format(i)
    attention_norm: str  # the first block has none where `first_norm` is False
    qkv: tuple[str, ...]  # one map for all, or one each for queries, keys and values
    attended: str
    inner_norm: str
    inner: str
    outer: str
    gate: str | None = None  # multiplies `inner`; if that is its name, too, one tensor holds both
    gate_first: bool = True  # in such a tensor
    head_norms: tuple[str, str] | None = None  # of query heads and of key heads
    norm: str = "layer_norm"  # or "rms_norm"
    norm_bias: bool = True  # of a "layer_norm"
    norm_offset: float = 0.0  # added to the weights of norms
    post_norms: tuple[str, str] | None = None  # of what attention and the feed-forward give
    norm_first: bool = True
    first_norm: bool = True
    transposed: bool = False  # weights are (in, out), where torch's Linear has (out, in)

    @property
    def maps(self) -> frozenset[str]:
        """All linear maps."""
        maps = (*self.qkv, self.attended, self.inner, self.outer, self.gate)
        return frozenset(name for name in maps if name is not None)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks in a model's files: their sizes, the shapes of their tensors, and the blocks themselves."""

    source: Source
    names: BlockNames
    num_layers: int  # how many
    hidden: int
    inner: int
    heads: int
    heads_kv: int
    head_dim: int
    eps: float
    activation: Activation
    biased: frozenset[str]  # the maps that have a bias
    bias: int | None = None  # of all blocks' scores: see `AttendStep`

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor of every block, by its name."""
        names, q, kv = self.names, self.heads * self.head_dim, self.heads_kv * self.head_dim
        rows = zip(names.qkv, (q, kv, kv) if len(names.qkv) == 3 else (q + 2 * kv,), strict=True)
        maps = {name: (size, self.hidden) for name, size in rows}
        for name in (names.gate, names.inner):
            if name is not None:
                maps[name] = (self.inner * (2 if names.gate == names.inner else 1), self.hidden)
        maps |= {names.attended: (self.hidden, q), names.outer: (self.hidden, self.inner)}
        shapes: dict[str, Shape] = {}
        for name, shape in maps.items():
            shapes[f"{name}.weight"] = shape[::-1] if names.transposed else shape
            if name in self.biased:
                shapes[f"{name}.bias"] = shape[:1]
        shapes |= {f"{name}.weight": (self.head_dim,) for name in names.head_norms or ()}
        for name in (names.attention_norm, names.inner_norm, *(names.post_norms or ())):
            shapes |= self.norm_shapes(name)
        prefixes = [names.prefix.format(i) for i in range(self.num_layers)]
        every = {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}
        if prefixes and not names.first_norm:
            for name in self.norm_shapes(prefixes[0] + names.attention_norm):
                del every[name]
        return every

    def norm_shapes(self, name: str, features: int | None = None) -> dict[str, Shape]:
        """The tensors of the norm `name`, which may stand outside of the blocks, of other `features`."""
        biased = self.names.norm == "layer_norm" and self.names.norm_bias
        parts = ("weight", "bias") if biased else ("weight",)
        return {f"{name}.{part}": (features or self.hidden,) for part in parts}

    def norm(self, name: str) -> Norm:
        """The norm `name`."""
        weight, *bias = (self.source.vector(part) for part in self.norm_shapes(name))
        if self.names.norm_offset:
            weight = self.source.same(weight + weight.dtype.type(self.names.norm_offset), weight)
        return Norm(self.names.norm, weight, bias[0] if bias else None, self.eps)

    def map(self, name: str) -> Projection:
        """The linear map `name`, with a bias, which stands outside of the blocks."""
        source = self.source
        weight = source.tensors.pack([f"{name}.weight"], transposed=self.names.transposed)
        return Projection(weight, source.vector(f"{name}.bias"), source.precision.activations)

    def read(
        self,
        scales: Sequence[float] | None = None,
        windows: Sequence[Window] | None = None,
        rotations: Sequence[int | None] | None = None,
    ) -> list[Block]:
        """The blocks, each with its scale of scores, by default ``head_dim**-0.5``, window and rotation."""
        precision, widest = self.source.precision, max(self.hidden, self.inner, self.heads * self.head_dim)
        integer_activations("load", precision.activations, precision.weights, widest)
        scales = scales or [self.head_dim**-0.5] * self.num_layers
        windows = windows or [None] * self.num_layers
        rotations = rotations or [None] * self.num_layers
        return [self._block(i, scales[i], windows[i], rotations[i]) for i in range(self.num_layers)]

    def _block(self, i: int, scale: float, window: Window, rotation: int | None) -> Block:
        names, source = self.names, self.source
        prefix, rounded = names.prefix.format(i), source.precision.activations

        def packed(*parts: str, gate: str | None = None) -> PackedLinear:
            maps = [[f"{prefix}{part}.weight" for part in parts]]
            if gate is not None:
                maps.append([f"{prefix}{gate}.weight"])
            return source.tensors.pack(*maps, transposed=names.transposed)

        def bias(*parts: str) -> Array | None:
            if parts[0] not in self.biased:
                return None
            return source.vector(*(f"{prefix}{part}.bias" for part in parts))

        def linear(*parts: str) -> Projection:
            return Projection(packed(*parts), bias(*parts), rounded)

        def inner() -> Projection:
            if names.gate is None:
                return linear(names.inner)
            if names.gate == names.inner:
                pair, both = (
                    source.tensors.pack_pair(f"{prefix}{names.inner}.weight", names.gate_first),
                    bias(names.inner),
                )
                if both is not None:
                    (whole,) = source.tensors.origins.of(both)
                    both = both.reshape(2, -1)[:: 1 if names.gate_first else -1].copy()
                    halves = pair_parts(whole.name, whole.shape, names.gate_first)
                    source.tensors.origins.note(both, halves)
                return Projection(pair, both, rounded)
            both = bias(names.gate, names.inner)
            pair = packed(names.inner, gate=names.gate)
            both = None if both is None else source.same(both.reshape(2, -1), both)
            return Projection(pair, both, rounded)

        def head_norm() -> Norm | None:
            if names.head_norms is None:
                return None
            q_norm, k_norm = (f"{prefix}{name}.weight" for name in names.head_norms)
            weights = source.vector(*[q_norm] * self.heads, *[k_norm] * self.heads_kv)
            weights += weights.dtype.type(names.norm_offset)
            by_head = source.same(weights.reshape(-1, self.head_dim), weights)
            return Norm("rms_norm", by_head, None, self.eps)

        def post_norms() -> tuple[Norm, Norm] | None:
            if names.post_norms is None:
                return None
            attention, inner = (self.norm(prefix + name) for name in names.post_norms)
            return attention, inner

        return Block(
            norm_first=names.norm_first,
            attention_norm=self.norm(prefix + names.attention_norm) if i or names.first_norm else None,
            qkv=linear(*names.qkv),
            heads=self.heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            scale=scale,
            attended=linear(names.attended),
            inner_norm=self.norm(prefix + names.inner_norm),
            inner=inner(),
            activation=self.activation,
            outer=linear(names.outer),
            head_norm=head_norm(),
            window=window,
            rotation=rotation,
            bias=self.bias,
            post_norms=post_norms(),
        )
