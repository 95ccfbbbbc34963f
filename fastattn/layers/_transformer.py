"""The layer of encoders, and what it shares with that of decoders (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import put_name
from fastattn._args.ops import epsilon, integer_activations, rows
from fastattn._args.packed import WEIGHT_DTYPES
from fastattn._args.types import FLOAT32, Array, ArrayLike, Rounding, Unpack
from fastattn._args.values import MOST_SIZE, choice, flag, integer, short
from fastattn._args.words import not_an_argument
from fastattn._engine.plain import PLAIN
from fastattn._engine.program import Program, build
from fastattn._engine.steps import OUT, Sequences, X
from fastattn.layers import _computation, _state
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._attention_parameters import HeadOptions
from fastattn.layers._basic import ACTIVATIONS, FeedForward, LayerNorm, NormLayer, RMSNorm
from fastattn.layers._block import Block, Norm, Projection
from fastattn.layers._cache import KVCache
from fastattn.layers._computation import Computation
from fastattn.layers._scores import Names, padding_alone
from fastattn.layers._state import Layer

if TYPE_CHECKING:
    from fastattn._args.options import NoOptions
    from fastattn._args.types import Bools
    from fastattn._engine.plain import Plain
    from fastattn.layers._attention import Attended
    from fastattn.layers._rotary import Rope

_SRC = Names("src", "src_mask", "src_key_padding_mask")


def require_head_options(name: str, given: Any) -> None:
    """Raise unless `given` is None or has options of `MultiHeadAttention`, by their names alone."""
    known = HeadOptions.__annotations__
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"(): {name} is {short(given)}; expected a dict of {', '.join(known)}")
    if unknown := [key for key in given or () if key not in known]:
        raise TypeError(f"(): {name} has {short(unknown[0])}; expected {', '.join(known)}")


def require_fields(layer: Any) -> None:
    """Raise unless the fields of `layer`, a `TransformerLayer` or a `Transformer`, make a layer.

    Its parts check them once more, but their messages would call them by other names.
    """
    for name in ("d_model", "num_heads", "dim_feedforward"):
        setattr(layer, name, integer(name, getattr(layer, name), 1, MOST_SIZE))
    for name in ("norm_first", "bias"):
        flag(name, getattr(layer, name))
    choice("activation", layer.activation, ACTIVATIONS)
    choice("norm", layer.norm, ("layer_norm", "rms_norm"))
    layer.weights_dtype = dtype_choice("weights_dtype", layer.weights_dtype, WEIGHT_DTYPES)
    integer_activations(layer.activations, layer.weights_dtype)
    epsilon("layer_norm_eps", layer.layer_norm_eps, FLOAT32)
    for name in ("attention", "cross_attention"):
        if not hasattr(layer, name):
            continue  # an encoder layer
        require_head_options(name, getattr(layer, name))
        options = getattr(layer, name) or {}
        if name == "cross_attention" and options.get("query_only"):
            raise ValueError(
                "(): cross_attention has query_only; expected it in attention, which can share keys"
            )
        if options.get("head_dim") is None and layer.d_model % layer.num_heads:
            expected = f"a multiple of num_heads, {layer.num_heads}, or head_dim in {name}"
            raise ValueError(f"(): d_model is {layer.d_model}; expected {expected}")


@dataclass(eq=False)
class TransformerLayer(Layer):
    """The base of both layers: options, attention to itself, feed-forward and two norms."""

    d_model: int
    num_heads: int
    dim_feedforward: int = 2048
    activation: str = "relu"
    _: KW_ONLY
    norm_first: bool = False
    norm: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    bias: bool = True
    attention: HeadOptions | None = None
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    self_attn: MultiHeadAttention = field(init=False, repr=False)
    feed_forward: FeedForward = field(init=False, repr=False)
    norm1: NormLayer = field(init=False, repr=False)
    norm2: NormLayer = field(init=False, repr=False)

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        require_fields(self)
        source = self._source(rng)
        for name in self._parts:  # in the order in which they draw their parameters
            setattr(self, name, self._made(name, source))
        self._set_up(None)

    def _made(self, name: str, rng: np.random.Generator | None) -> Layer:
        """The part `name`, new."""
        common: Any = {"weights_dtype": self.weights_dtype, "activations": self.activations, "rng": rng}
        if name == "feed_forward":
            return FeedForward(self.d_model, self.dim_feedforward, self.activation, self.bias, **common)
        if name.startswith("norm"):
            return self._new_norm()
        options = getattr(self, "attention" if name == "self_attn" else "cross_attention") or {}
        return MultiHeadAttention(self.d_model, self.num_heads, bias=self.bias, **common, **options)

    def _new_norm(self) -> NormLayer:
        """A norm of the kind that the field `norm` names."""
        dtype = self.weights_dtype
        if self.norm == "rms_norm":
            return RMSNorm(self.d_model, self.layer_norm_eps, weights_dtype=dtype)
        return LayerNorm(self.d_model, self.layer_norm_eps, self.bias, weights_dtype=dtype)

    def _input(self, name: str, x: ArrayLike, cache: Any, kind: type) -> tuple[Array, Array]:
        """`x`, the argument `name`, as it is, and (batch, length, d_model); `cache` is None or of `kind`."""
        if cache is not None:
            _computation.require("cache", cache, kind, f"a {kind.__name__}")
        self._require_parts()
        array = _computation.checked(name, x, self.d_model, self.weights_dtype)
        return array, _computation.batch_first(name, array)

    def _add_attention(
        self, tape: Plain, norm: NormLayer, x: Any, attention: MultiHeadAttention, sizes: Any, **options: Any
    ) -> tuple[Any, Attended | None]:
        """Rows x plus attention of them, with the norm; the keys and values that it shares.

        `options` are those of `_attend`.
        """
        normed = norm._forward(tape, x) if self.norm_first else x
        total, _, keys = attention._attend(tape, normed, sizes, residual=x, **options)
        return total if self.norm_first else norm._forward(tape, total, over=True), keys

    def _add_feed_forward(self, tape: Plain, norm: NormLayer, x: Any) -> Any:
        """Rows x plus the feed-forward of them, with the norm. It may overwrite x."""
        if self.norm_first:
            return self.feed_forward._forward(tape, norm._forward(tape, x), residual=x, over=True)
        total = self.feed_forward._forward(tape, x, residual=x)
        return norm._forward(tape, total, over=True)

    def _children(self) -> dict[str, Layer]:
        # A feed-forward's parameters have no prefix: torch's layers hold its maps themselves.
        return {"" if name == "feed_forward" else f"{name}.": getattr(self, name) for name in self._parts}


@dataclass(eq=False)
class TransformerEncoderLayer(TransformerLayer):
    """Self-attention, then feed-forward, each with a residual and a norm: torch's layer, batch first.

    Its state has torch's names: ``self_attn.*``, ``linear1.*``, ``linear2.*``, ``norm1.*``, ``norm2.*``.

    Parameters
    ----------
    d_model, num_heads : int
        Width, and heads.
    dim_feedforward : int, default 2048
    activation : str, default "relu"
        One of `FeedForward`, gated ones included.
    norm_first : bool, default False
        Normalise the input of attention and of the feed-forward. By default, as in the paper, the norm comes
        after the sum with the residual.
    norm : {"layer_norm", "rms_norm"}
    layer_norm_eps : float, default 1e-5
    bias : bool, default True
        Whether all projections and LayerNorm have one.
    attention : dict, optional
        Options of `MultiHeadAttention`: num_kv_heads, rope, qk_norm, window and so on.
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.
    """

    # (last change to any layer, program) for calls without masks or cache; rebuilt when a layer has changed.
    # The program is None if the attention has options that programs do not have.
    _plain: tuple[object, Program | None] = field(init=False, default=(None, None), repr=False)

    _parts = ("self_attn", "feed_forward", "norm1", "norm2")

    def __call__(
        self,
        src: ArrayLike,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
        lengths: ArrayLike | None = None,
        **others: Unpack[NoOptions],
    ) -> Array:
        """The layer of src, (B, L, d_model) or (L, d_model); arguments as in `MultiHeadAttention`.

        In bool masks True hides. Rows that a bool `src_key_padding_mask` hides are 0 in the result if no
        other mask, `is_causal` or `cache` is given; what stands in them, NaN included, reaches nothing. With
        `is_causal` and a `cache` this is the layer of a decoder-only model.
        """
        try:
            if others:
                raise not_an_argument(others, TransformerEncoderLayer.__call__)
            array, sizes, padding = self._checked(src, src_key_padding_mask, cache)
            out: Array = self._forward(
                PLAIN, rows(array), sizes, src_mask, padding, is_causal, cache, lengths
            )
        except Exception as error:
            put_name(type(self).__name__, error)
            raise
        return out.reshape(array.shape)

    def _computation(
        self,
        src: ArrayLike,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
        **others: Any,
    ) -> Computation:
        if others:
            raise not_an_argument(others, TransformerEncoderLayer._computation)
        array, sizes, padding = self._checked(src, src_key_padding_mask)

        def run(tape: Plain, x: Any) -> Any:
            return self._forward(tape, x, sizes, src_mask, padding, is_causal)

        return Computation([self], {"src": array}, run, array.shape)

    def _checked(
        self, src: ArrayLike, padding: Any, cache: KVCache | None = None
    ) -> tuple[Array, tuple[int, int], Any]:
        """The input of a call, its batch and length, and its padding mask as a batch."""
        array, batched = self._input("src", src, cache, KVCache)
        if batched is not array:
            padding = _computation.one_batch(_SRC.key_padding_mask, padding)
        batch, length, _ = batched.shape
        return array, (batch, length), padding

    def _forward(
        self,
        tape: Plain,
        x: Any,
        sizes: tuple[int, int],
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
        cache: KVCache | None = None,
        lengths: Any = None,
        keys_values: Attended | None = None,
        share: bool = False,
        names: Names = _SRC,
    ) -> Any:
        """A call's result, of rows x and in rows; with `share`, also the keys and values that it attended.

        `keys_values` are those that an earlier layer shared.
        """
        if is_causal is not False:
            is_causal = flag("is_causal", is_causal)
        plain, padding = False, None
        if not is_causal and src_mask is None and cache is None and lengths is None:
            plain, padding = padding_alone(names, src_key_padding_mask, sizes)
        heads = self.self_attn
        placed = heads.rope is not None or heads.q_norm is not None
        counted = None if padding is None else ~padding.ravel()
        # Leaving hidden rows out moves the blocks of keys, and with them the last bits.
        plain = plain and not (share or heads.query_only or (placed and padding is not None))
        if plain and (program := self._program()) is not None:
            return run_plain(program, [] if heads.rope is None else [heads.rope], tape, x, sizes, padding)
        x = x if counted is None else tape.rows(x, counted)
        x, keys = self._add_attention(
            tape,
            self.norm1,
            x,
            self.self_attn,
            sizes,
            key_padding_mask=src_key_padding_mask,
            attn_mask=src_mask,
            is_causal=is_causal,
            cache=cache,
            lengths=lengths,
            keys_values=keys_values,
            counted=counted,
            names=names,
            share=share,
        )
        x = self._add_feed_forward(tape, self.norm2, x)
        x = x if counted is None else tape.spread(x, counted)
        return (x, keys) if share else x

    def _program(self) -> Program | None:
        """The program of calls without masks."""
        if self._plain[0] is not (change := _state.last_change):
            block = self._block()
            program = None if block is None else build("layer", block.steps(X, OUT))
            self.__dict__["_plain"] = change, program
        return self._plain[1]

    def _block(self, keys_from: int | None = None, rotation: int = 0) -> Block | None:
        """The layer as a block; None if it is not plain. It may attend the keys of another one of a stack."""
        heads, forward = self.self_attn, self.feed_forward
        maps = heads.query_maps if heads.query_only else heads.all_maps
        if maps is None or not heads.is_plain():
            return None
        inner, outer = forward._projections()
        norms = heads.head_norms
        return Block(
            norm_first=self.norm_first,
            attention_norm=self.norm1._of_block(),
            qkv=Projection(maps.weight, maps.bias, heads.activations),
            heads=heads.num_heads,
            heads_kv=heads._heads_kv,
            head_dim=heads._head_dim,
            scale=heads._head_dim**-0.5,
            attended=heads.out_proj._projection(),
            inner_norm=self.norm2._of_block(),
            inner=inner,
            activation=forward._function,
            outer=outer,
            head_norms=() if norms is None else (Norm("rms_norm", norms, None, heads.qk_norm_eps),),
            rotation=None if heads.rope is None else rotation,
            keys_from=keys_from,
        )


def run_plain(
    program: Program,
    ropes: Sequence[Rope],
    tape: Plain,
    x: Any,
    sizes: tuple[int, int],
    padding: Bools | None,
) -> Any:
    """The result of a program without masks, of rows x; those that are `padding` are left out, and 0."""
    batch, length = sizes
    if padding is None:
        tables = (rope.tables(0, length, tape.array(x).dtype) for rope in ropes)
        rotations = tuple((cos[None], sin[None]) for cos, sin in tables)
        return program.on(tape, x, Sequences(batch, rotations=rotations), tape.by_block)
    ragged = Sequences(batch, begins=np.append(0, np.cumsum(length - padding.sum(axis=1))))
    counted = ~padding.ravel()
    return tape.spread(program.on(tape, tape.rows(x, counted), ragged, tape.by_block), counted)
