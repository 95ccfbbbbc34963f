"""Layers of encoders and decoders (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.dtypes import dtype_choice
from fastattn._args.ops import epsilon, integer_activations
from fastattn._args.packed import WEIGHT_DTYPES
from fastattn._args.types import FLOAT32, Array, ArrayLike, Rounding
from fastattn._args.values import MOST_SIZE, choice, flag, integer, short
from fastattn._engine.steps import Sequences
from fastattn.layers import _computation, _state
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._attention_parameters import HEAD_OPTIONS
from fastattn.layers._basic import ACTIVATIONS, FeedForward, LayerNorm, NormLayer, RMSNorm
from fastattn.layers._block import Block, Norm, Projection, model_program, visible
from fastattn.layers._cache import KVCache, restored_on_error, slots_of
from fastattn.layers._computation import Made
from fastattn.layers._scores import padding_alone
from fastattn.layers._state import Layer

if TYPE_CHECKING:
    from fastattn._args.types import Bools, Ints
    from fastattn._engine.program import Program
    from fastattn._engine.tape import Tape
    from fastattn.layers._attention import Attended
    from fastattn.layers._block import Window
    from fastattn.layers._rotary import Rope
    from fastattn.layers._scores import Masks

    # The last change, and the layers of a stack, when the program was made; and it.
    Kept = tuple[Any, "Prepared | None"]
    # A call of an encoder or a decoder: batch and length; masks of the attention to itself, and of that over
    # the memory; lengths; and with a cache, the memory as the caller gave it.
    Call = tuple[tuple[int, int], Sequence[Masks], Any, Any]

_MOST_ROTATIONS = 4  # of a program: MAX_ROTATIONS in core/program.pxi
_SRC = ("src", "src_mask", "src_key_padding_mask")


class Prepared(NamedTuple):
    """The program of a layer or a stack, for calls without dense masks."""

    program: Program
    windows: tuple[Window, ...]
    ropes: list[Rope]  # of its rotations
    movable: bool  # hidden rows may be left out
    heads: list[tuple[int, int]]  # of keys, number and size, of each block that has some


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
        given, known = getattr(layer, name), ", ".join(HEAD_OPTIONS)
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"(): {name} is {short(given)}; expected a dict of {known}")
        options = given or {}
        if unknown := [key for key in options if key not in HEAD_OPTIONS]:
            raise TypeError(f"(): {name} has {short(unknown[0])}; expected {known}")
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
    attention: Mapping[str, Any] | None = None
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

    def _input(self, name: str, x: ArrayLike) -> tuple[Array, Array]:
        """`x`, the argument `name`, checked, and as a batch."""
        self._require_parts()
        array = _computation.checked(name, x, self.d_model, self.weights_dtype)
        return array, _computation.batch_first(name, array)

    def _add_attention(
        self, tape: Tape, x: Any, name: str, sizes: tuple[int, int], masks: Masks, **options: Any
    ) -> tuple[Any, Attended | None]:
        """Rows x plus the attention `name` of them, with its norm; the keys and values that it shares.

        `options` are those of `_attend`.
        """
        attention, norm = getattr(self, name), self.norm1 if name == "self_attn" else self.norm2
        normed = norm._forward(tape, x) if self.norm_first else x
        total, _, keys = attention._attend(tape, normed, sizes, masks, x, **options)
        return total if self.norm_first else norm._forward(tape, total, over=True), keys

    def _add_feed_forward(self, tape: Tape, norm: NormLayer, x: Any) -> Any:
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

    State names are torch's: ``self_attn.*``, ``linear1.*``, ``linear2.*``, ``norm1.*``, ``norm2.*``.

    Parameters
    ----------
    d_model, num_heads : int
    dim_feedforward : int, default 2048
    activation : str, default "relu"
        Any of `FeedForward`, including gated ones.
    norm_first : bool, default False
        Normalise the inputs of attention and feed-forward, instead of the sums with the residuals.
    norm : {"layer_norm", "rms_norm"}
    layer_norm_eps : float, default 1e-5
    bias : bool, default True
        Whether all projections and LayerNorm have a bias.
    attention : dict, optional
        Options of `MultiHeadAttention`: num_kv_heads, rope, qk_norm, window and so on.
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.
    """

    _plain: Kept = field(init=False, default=((), None), repr=False)

    _parts = ("self_attn", "feed_forward", "norm1", "norm2")

    @_computation.computed()
    def __call__(
        self,
        src: ArrayLike,
        src_mask: ArrayLike | None = None,
        src_key_padding_mask: ArrayLike | None = None,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
        lengths: ArrayLike | None = None,
    ) -> Made:
        """Compute the layer of src, (B, L, d_model) or (L, d_model).

        Arguments are as in `MultiHeadAttention`: True hides in a bool mask. Rows that a bool
        `src_key_padding_mask` hides are 0 in the result if no other mask, `is_causal` or `cache` is given;
        what is in them, NaN included, has no effect. With `is_causal` and a `cache` this is the layer of a
        decoder-only model.
        """
        if cache is not None:
            _computation.require("cache", cache, KVCache, "a KVCache")
        return self._encoding(self, src, (_SRC, src_mask, src_key_padding_mask, is_causal), cache, lengths)

    def _encoding(self, whole: Any, src: ArrayLike, masks: Masks, cache: Any, lengths: Any) -> Made:
        """A call of `whole`, this layer or the stack that begins with it."""
        array, batched = self._input("src", src)
        names, mask, padding, is_causal = masks
        if batched is not array:
            padding = _computation.one_batch(names[2], padding)
        if is_causal is not False:
            is_causal = flag("is_causal", is_causal)
        call = batched.shape[:2], ((names, mask, padding, is_causal),), lengths, None

        def run(tape: Tape, x: Any) -> Any:
            return whole._forward(tape, x, call=call, cache=cache)

        return [whole], {"src": array}, run, array.shape, whole is not self

    def _forward(
        self,
        tape: Tape,
        x: Any,
        *,
        call: Call,
        cache: KVCache | None = None,
        keys_values: Attended | None = None,
        share: bool = False,
    ) -> Any:
        """A call's result, of rows x and in rows; with `share`, also the keys and values that it attended.

        `keys_values` are those that an earlier layer shared.
        """
        sizes, (masks,), lengths, _ = call
        alone = not (share or self.self_attn.query_only)
        out, padding = by_program(self, tape, x, call, () if cache is None else (cache,), alone)
        if out is not None:
            return out
        counted = None if padding is None else ~padding.ravel()
        x = x if counted is None else tape.rows(x, counted)
        more: Any = {"cache": cache, "lengths": lengths, "keys_values": keys_values}
        more |= {"counted": counted, "share": share}
        x, keys = self._add_attention(tape, x, "self_attn", sizes, masks, **more)
        x = self._add_feed_forward(tape, self.norm2, x)
        x = x if counted is None else tape.spread(x, counted)
        return (x, keys) if share else x

    def _block(self, keys_from: int | None = None, rotation: int = 0) -> Block | None:
        """The layer as a block; None if it is not plain. It may attend the keys of another one of a stack."""
        heads, forward = self.self_attn, self.feed_forward
        maps = heads.query_maps if heads.query_only else heads.all_maps
        if maps is None or not heads.is_plain():
            return None
        norms = heads.head_norms
        return Block(
            norm_first=self.norm_first,
            attention_norm=self.norm1._of_block(),
            qkv=Projection(maps.weight, maps.bias, heads.activations),
            heads=heads.num_heads,
            heads_kv=heads._heads_kv,
            head_dim=heads._head_dim,
            scale=heads._head_dim**-0.5 if heads.scale is None else heads.scale,
            attended=heads.out_proj._projection(),
            inner_norm=self.norm2._of_block(),
            inner=Projection(forward.weight1, forward.bias1, forward.activations),
            activation=forward._function,
            outer=Projection(forward.weight2, forward.bias2, forward.activations),
            head_norms=() if norms is None else (Norm("rms_norm", norms, None, heads.qk_norm_eps),),
            window=heads.window,  # type: ignore[arg-type]
            rotation=None if heads.rope is None else rotation,
            softcap=heads.softcap or 0.0,
            sinks=heads.sink_logits,
            keys_from=keys_from,
        )


def by_program(
    whole: Any, tape: Tape, x: Any, call: Call, caches: Sequence[KVCache], alone: bool = True
) -> tuple[Any, Bools | None]:
    """The result of a layer or a stack in one program, of rows x; and its padding, if that is the only mask.

    The result is None where programs lack a mask or an option, or the layer is not `alone`. `whole` keeps the
    program, which is made anew after a change. Rows of padding are 0. `caches` are of layers that have keys.
    """
    sizes, (masks,), lengths, _ = call
    if caches:
        plain, padding = masks[1] is masks[2] is None, None
    else:
        plain, padding = padding_alone(masks, sizes)
    if not (plain and alone and (lengths is None or caches)):
        return None, padding
    layers = whole.__dict__.get("layers")
    # A layer that referred to itself would be freed late; the caller of a stack may change its list.
    key = (_state.last_change,) if layers is None else (_state.last_change, *layers)
    kept, found = whole._plain
    if kept != key:
        found = _program(layers or (whole,), whole)
        whole.__dict__["_plain"] = key, found
    if found is None or not (padding is None or found.movable):
        return None, padding
    program, windows, ropes, _, heads = found
    batch, length = sizes
    start: Ints | int = 0
    if padding is not None:
        ragged = Sequences(batch, begins=np.append(0, np.cumsum(length - padding.sum(axis=1))))
        counted = ~padding.ravel()
        out = program.on(tape, tape.rows(x, counted), ragged, tape.by_block)
        return tape.spread(out, counted), padding
    with restored_on_error(caches):
        sequences, shared, len_k, causal = Sequences(batch), (), length, masks[3]
        if caches:
            start = caches[0].offset
            slots = slots_of(caches, heads, sizes, x.dtype, lengths)
            if slots is None:
                return None, None
            _, _, _, ends, len_k = slots[0][:5]
            sequences = sequences._replace(slots=slots)
            # A token after all others attends to all of them without `causal`.
            shared, causal = () if ends is None else (key_ranges.lengths(ends),), causal and length > 1
        if ropes:
            sequences = sequences._replace(rotations=_rotations(ropes, start, length, tape.array(x).dtype))
        if shared or causal or windows != (None,):
            positions = np.asarray(start)[..., None, None] + np.arange(length)[None]
            sequences = sequences._replace(ranges=visible(windows, positions, causal, shared, len_k))
        return program.on(tape, x, sequences, tape.by_block), None


def _program(layers: Sequence[TransformerEncoderLayer], whole: Any) -> Prepared | None:
    """The program of a call without dense masks; None if a layer has options that programs lack."""
    borrowed, norm = (whole._borrowed, whole.norm) if whole is not layers[0] else ({}, None)
    heads = [layer.self_attn for layer in layers]
    ropes = list(dict.fromkeys(own.rope for own in heads if own.rope is not None))
    if len(ropes) > _MOST_ROTATIONS:
        return None
    rotations = [0 if own.rope is None else ropes.index(own.rope) for own in heads]
    blocks = [layer._block(borrowed.get(i), rotations[i]) for i, layer in enumerate(layers)]
    plain = [block for block in blocks if block is not None]
    if plain != blocks:
        return None
    last = None if norm is None else norm._of_block()
    made = model_program(plain, last=last, keeps_input=True, shares_cache=False)
    held = [(block.heads_kv, block.head_dim) for block in plain if block.keys_from is None]
    return Prepared(*made, ropes, all(own._movable for own in heads), held)


def _rotations(
    ropes: Sequence[Rope], start: Ints | int, length: int, dtype: np.dtype[Any]
) -> tuple[tuple[Array, Array], ...]:
    tables = (rope.tables(start, length, dtype) for rope in ropes)
    return tuple((cos[..., None, :, :], sin[..., None, :, :]) for cos, sin in tables)
