"""Parameters of a multi-head attention: its options, its stacked projections, and their names.

Maps of one input are stacked in one packed weight: one `linear` for all, or for some neighbours. Each map
begins at its own panel, so that neighbours are a slice of the panels and not a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.dtypes import dtype_choice
from fastattn._args.ops import epsilon, integer_activations
from fastattn._args.pack import blocks_args
from fastattn._args.packed import PackedLinear
from fastattn._args.types import FLOAT32, Array, ArrayLike, ModifiersArgs, Rounding
from fastattn._args.values import MOST_SIZE, flag, integer
from fastattn._args.weight_types import WEIGHT_DTYPES, columns
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads
from fastattn.layers import _computation
from fastattn.layers._basic import Linear
from fastattn.layers._rotary import Rope
from fastattn.layers._state import Layer, Parameter, constant, lane_of, normal, xavier_uniform

if TYPE_CHECKING:
    from fastattn._engine.values import Gradients
    from fastattn.layers._cache import KVCache
    from fastattn.layers._state import Fields, Taken

    KeysValues = tuple[Array, Array]


class StackedMaps(NamedTuple):
    """Maps one after another: feature ``begins[i]`` of the product is the first of map i.

    The product is cut into heads of `head_dim` features each. `places` are those of the maps: in heads if all
    maps and the whole product begin and end with a head (`in_heads`), else in features.
    """

    weight: PackedLinear
    bias: Array | None
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    head_dim: int
    places: tuple[slice, ...]
    in_heads: bool
    whole: bool  # no features lie between the maps

    def part(self, first: int, last: int) -> StackedMaps:
        """The maps from `first` up to `last`, in the same memory."""
        width = columns(self.weight.dtype)
        begin, end = self.begins[first], self.begins[last - 1] + self.sizes[last - 1]
        panels = slice(begin // width, -(-end // width))
        weight = self.weight
        arrays = (None if x is None else x[panels] for x in (weight.scales, weight.sums, weight.minima))
        features = weight.in_features, end - begin
        packed = PackedLinear(*features, False, weight.dtype, weight.panels[panels], *arrays)
        bias = None if self.bias is None else self.bias[begin:end]
        begins = [b - begin for b in self.begins[first:last]]
        return _stacked(packed, bias, begins, self.sizes[first:last], self.head_dim)

    def apart(self, whole: Array | None) -> list[Array]:
        """Each map's own part of the unpacked weight or of the bias; an empty list if that is None."""
        if whole is None:
            return []
        return [whole[b : b + n] for b, n in zip(self.begins, self.sizes, strict=True)]


def stack(weights: Sequence[Array], biases: Sequence[Array], dtype: str, head_dim: int) -> StackedMaps:
    """Stack the maps of `weights`, (out_features, in_features) each, and `biases`, which may be empty."""
    args = blocks_args([[("weight", weight) for weight in weights]], dtype, get_num_threads(), columns(dtype))
    dispatch.run(args)
    begins = [block.first for block in args.blocks]
    lane = np.float64 if dtype == "float64" else np.float32
    bias = np.zeros(args.out_features, lane) if biases else None
    for begin, part in zip(begins, biases, strict=bool(biases)):
        assert bias is not None
        bias[begin : begin + len(part)] = part
    sizes = tuple(len(weight) for weight in weights)
    return _stacked(args.packed(), bias, begins, sizes, head_dim)


def _stacked(
    weight: PackedLinear, bias: Array | None, begins: list[int], sizes: tuple[int, ...], head_dim: int
) -> StackedMaps:
    in_heads = not any(n % head_dim for n in (*begins, *sizes, weight.out_features))
    unit = head_dim if in_heads else 1
    places = tuple(slice(b // unit, (b + n) // unit) for b, n in zip(begins, sizes, strict=True))
    whole = sum(sizes) == weight.out_features
    return StackedMaps(weight, bias, tuple(begins), sizes, head_dim, places, in_heads, whole)


_PARTS = ("query_maps", "key_value_maps", "key_map", "value_map")


def _parts(maps: StackedMaps) -> Fields:
    """The fields that are views of `maps`, whose order is (gate,) query, key, value."""
    n = len(maps.sizes)
    runs = ((0, n - 2), (n - 2, n), (n - 2, n - 1), (n - 1, n))
    return {name: maps.part(*run) for name, run in zip(_PARTS, runs, strict=True)}


def _norms(head_norms: Array, num_heads: int) -> Fields:
    """The fields of both norms, which cannot be written: a change of one head's would be lost in others."""
    head_norms.flags.writeable = False
    k_norm = head_norms[num_heads] if len(head_norms) > num_heads else None
    return {"head_norms": head_norms, "q_norm": head_norms[0], "k_norm": k_norm}


class CallOptions(TypedDict, total=False):
    """Keyword arguments of a `MultiHeadAttention`'s call, but for `need_weights`."""

    key_padding_mask: ArrayLike | None
    attn_mask: ArrayLike | None
    is_causal: bool
    average_attn_weights: bool
    residual: ArrayLike | None
    cache: KVCache | None
    lengths: ArrayLike | None
    keys_values: KeysValues | None


@dataclass(eq=False)
class AttentionParameters(Layer):
    """Fields of `MultiHeadAttention`, which documents them, and their names in a state dict."""

    embed_dim: int
    num_heads: int
    _: KW_ONLY
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    query_only: bool = False
    rope: Rope | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    output_gate: bool = False
    sinks: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi_slopes: ArrayLike | None = None
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    out_proj: Linear = field(init=False, repr=False)
    # The maps of the query, (gate,) q; of key and value, if torch stacks them; of all three, in this order.
    query_maps: StackedMaps = field(init=False, repr=False)
    key_value_maps: StackedMaps | None = field(init=False, default=None, repr=False)
    all_maps: StackedMaps | None = field(init=False, default=None, repr=False)
    # None, as the two before, with `query_only`.
    key_map: StackedMaps | None = field(init=False, default=None, repr=False)
    value_map: StackedMaps | None = field(init=False, default=None, repr=False)
    bias_k: Array | None = field(init=False, default=None, repr=False)
    bias_v: Array | None = field(init=False, default=None, repr=False)
    q_norm: Array | None = field(init=False, default=None, repr=False)
    k_norm: Array | None = field(init=False, default=None, repr=False)
    sink_logits: Array | None = field(init=False, default=None, repr=False)
    # Its norms, once for each head, (num_heads + num_kv_heads, head_dim), as programs take them.
    head_norms: Array | None = field(init=False, default=None, repr=False)

    _parts = ("out_proj",)
    _vectors = (("q_norm.weight", "q_norm"), ("k_norm.weight", "k_norm"), ("sinks", "sink_logits"))

    def _place(self) -> str:
        if self.query_only:
            return f"a MultiHeadAttention of queries of {self.embed_dim} features"
        widths = self.embed_dim, self.kdim or self.embed_dim, self.vdim or self.embed_dim
        return "a MultiHeadAttention of queries, keys and values of {}, {} and {} features".format(*widths)

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim"):
            value = getattr(self, name)
            if value is not None or name in ("embed_dim", "num_heads"):
                setattr(self, name, integer(name, value, 1, MOST_SIZE))
        flags = ("bias", "add_bias_kv", "add_zero_attn", "query_only", "qk_norm", "output_gate", "sinks")
        for name in flags:
            flag(name, getattr(self, name))
        for name in ("kdim", "vdim"):
            if self.query_only and (width := getattr(self, name)) is not None:
                raise ValueError(f"(): {name} is {width}; expected None, as query_only makes no keys")
        epsilon("qk_norm_eps", self.qk_norm_eps, FLOAT32)
        self.weights_dtype = dtype_choice("weights_dtype", self.weights_dtype, WEIGHT_DTYPES)
        integer_activations(self.activations, self.weights_dtype)
        heads, heads_kv = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % heads_kv:
            expected = f"a multiple of num_kv_heads, {heads_kv}"
            raise ValueError(f"(): num_heads is {heads}; expected {expected}")
        if self.head_dim is None and self.embed_dim % heads:
            expected = f"a multiple of num_heads, {heads}, or head_dim="
            raise ValueError(f"(): embed_dim is {self.embed_dim}; expected {expected}")
        self._heads_kv, self._head_dim = heads_kv, self.head_dim or self.embed_dim // heads
        self._width, self._width_kv = heads * self._head_dim, heads_kv * self._head_dim
        self._projected = "q" if self.query_only else "qkv"
        widths = self.kdim or self.embed_dim, self.vdim or self.embed_dim
        self._stacked = not self.query_only and widths == (self.embed_dim, self.embed_dim)
        names = ("window", *ModifiersArgs._fields, "alibi_slopes")
        self._options = {name: x for name in names if (x := getattr(self, name, None)) is not None}
        nothing = np.empty((1, heads, 0, self._head_dim), lane_of(self.weights_dtype))
        args = attention_args(nothing, nothing, nothing, **self._options)
        self._modifiers = ModifiersArgs(*(getattr(args, name) for name in ModifiersArgs._fields))
        if self.rope is not None:
            _computation.require("rope", self.rope, Rope, "a Rope, Rope(frequencies)")
            rotated = 2 * len(self.rope.frequencies.inv_freq)
            if rotated > self._head_dim:
                expected = f"at most head_dim, {self._head_dim}"
                raise ValueError(f"(): rope rotates {rotated} dimensions; expected {expected}")
        self._extra = self.add_bias_kv or self.add_zero_attn
        # To leave hidden rows out moves the blocks of keys, and with them the last bits of what is placed.
        self._movable = not (self.rope or self.qk_norm or self.sinks or self._options)
        self._positional = self.window is not None or self.alibi_slopes is not None
        how: Any = {"weights_dtype": self.weights_dtype, "activations": self.activations}
        self.out_proj = Linear(self._width, self.embed_dim, self.bias, **how)
        self.out_proj._zero_bias = True
        source = self._source(rng)
        self._set_up(source)
        self.out_proj._set_up(source)

    def is_plain(self) -> bool:
        """Whether a program can compute it: options that `Block` has, too, and maps side by side."""
        more = self._options.keys() - {"window", *ModifiersArgs._fields} or self._extra or self.output_gate
        interleaved = self.rope is not None and self.rope.interleaved
        maps = self.query_maps if self.query_only else self.all_maps
        return not more and not interleaved and maps is not None and maps.whole

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the views of `all_maps`: a pickle would hold the weights twice."""
        state = self.__dict__.copy()
        if self.all_maps is not None:
            for name in _PARTS:
                del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.all_maps is not None:
            self.__dict__.update(_parts(self.all_maps))
        if self.head_norms is not None:
            self.__dict__.update(_norms(self.head_norms, self.num_heads))

    def _parameters(self) -> dict[str, Parameter]:
        width, width_kv, head_dim = self._width, self._width_kv, self._head_dim
        parameters: dict[str, Parameter] = {}
        if self._stacked:
            parameters["in_proj_weight"] = Parameter((width + 2 * width_kv, self.embed_dim), xavier_uniform)
        else:
            inputs = self.embed_dim, self.kdim or self.embed_dim, self.vdim or self.embed_dim
            for x, rows, columns in zip(self._projected, (width, width_kv, width_kv), inputs, strict=False):
                parameters[f"{x}_proj_weight"] = Parameter((rows, columns), xavier_uniform)
        if self.bias:
            rows = width if self.query_only else width + 2 * width_kv
            parameters["in_proj_bias"] = Parameter((rows,), constant(0.0))
        if self.add_bias_kv:
            parameters |= {f"bias_{x}": Parameter((1, 1, width_kv), normal(width_kv**-0.5)) for x in "kv"}
        if self.qk_norm:
            normed = self._projected[:2]
            parameters |= {f"{x}_norm.weight": Parameter((head_dim,), constant(1.0)) for x in normed}
        if self.output_gate:
            parameters["gate_proj.weight"] = Parameter((width, self.embed_dim), xavier_uniform)
            if self.bias:
                parameters["gate_proj.bias"] = Parameter((width,), constant(0.0))
        if self.sinks:
            parameters["sinks"] = Parameter((self.num_heads,), constant(0.0), or_none=True)
        return parameters

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        lane = lane_of(weights_dtype)
        ends = [] if self.query_only else [self._width, self._width + self._width_kv]
        if self._stacked:
            weights = np.split(arrays["in_proj_weight"], ends)
        else:
            weights = [arrays[f"{name}_proj_weight"] for name in self._projected]
        biases = np.split(arrays["in_proj_bias"], ends) if self.bias else []
        if self.output_gate:
            weights = [arrays["gate_proj.weight"], *weights]
            biases = [arrays["gate_proj.bias"], *biases] if self.bias else []
        fields: Fields
        if self._stacked:
            maps = stack(weights, biases, weights_dtype, self._head_dim)
            fields = {"all_maps": maps, **_parts(maps)}
        else:
            fields = {"all_maps": None, "key_value_maps": None}
            n = 1 + self.output_gate  # maps of the query
            runs = {"query_maps": slice(n), "key_map": slice(n, n + 1), "value_map": slice(n + 1, n + 2)}
            for name, run in list(runs.items())[: len(self._projected)]:
                fields[name] = stack(weights[run], biases[run], weights_dtype, self._head_dim)
        for name in ("bias_k", "bias_v"):
            bias = arrays.get(name)
            fields[name] = None if bias is None else bias.astype(lane).reshape(self._heads_kv, -1)
        fields |= super()._pack(arrays, weights_dtype)
        if self.qk_norm:
            counts = zip(self._projected, (self.num_heads, self._heads_kv), strict=False)
            each = [np.tile(fields[f"{x}_norm"], (n, 1)) for x, n in counts]
            fields |= _norms(np.concatenate(each), self.num_heads)
        return fields

    def _settle(self, gradients: Gradients) -> None:
        wholes: Any = (
            (self.all_maps, (self.query_maps, self.key_map, self.value_map)),
            (self.key_value_maps, (self.key_map, self.value_map)),
        )
        for whole, parts in wholes:
            if whole is not None:
                begins = (0, *whole.begins[1 - len(parts) :])  # a gate comes with the queries
                rows = [slice(b, b + p.weight.out_features) for b, p in zip(begins, parts, strict=True)]
                for kind in ("weight", "bias"):
                    own = [(getattr(p, kind), r) for p, r in zip(parts, rows, strict=True)]
                    gradients.move(getattr(whole, kind), own)
        if (norms := gradients.pop(self.head_norms)) is not None:
            assert self.q_norm is not None
            gradients.add(self.q_norm, norms[: self.num_heads].sum(axis=0))
            if self.k_norm is not None:
                gradients.add(self.k_norm, norms[self.num_heads :].sum(axis=0))

    def _named(self, plain: Taken) -> dict[str, Array]:
        stacks = [maps for maps in (self.query_maps, self.key_map, self.value_map) if maps is not None]
        weights = [weight for maps in stacks for weight in maps.apart(plain(maps.weight))]
        biases = [bias for maps in stacks for bias in maps.apart(plain(maps.bias))]
        arrays: dict[str, Array] = {}
        if self.output_gate:
            for kind, parts in (("weight", weights), ("bias", biases)):
                if parts:
                    arrays[f"gate_proj.{kind}"] = parts.pop(0)
        if weights and self._stacked:
            arrays["in_proj_weight"] = np.concatenate(weights)
        elif weights:
            arrays |= {f"{name}_proj_weight": w for name, w in zip(self._projected, weights, strict=True)}
        if biases:
            arrays["in_proj_bias"] = np.concatenate(biases)
        for name, held in (("bias_k", self.bias_k), ("bias_v", self.bias_v)):
            if (x := plain(held)) is not None:
                arrays[name] = x.reshape(1, 1, -1)
        return {**arrays, **super()._named(plain)}


# Fields that Transformer layers pass on as options of their attentions; the others are their own.
_OF_LAYERS = {"embed_dim", "num_heads", "bias", "weights_dtype", "activations"}
HEAD_OPTIONS = [x.name for x in fields(AttentionParameters) if x.init and x.name not in _OF_LAYERS]
