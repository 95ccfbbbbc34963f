"""Layers of encoders and decoders (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.dtypes import dtype_choice
from fastattn._args.ops import epsilon, integer_activations
from fastattn._args.types import FLOAT32, Array, ArrayLike, Rounding
from fastattn._args.values import MOST_SIZE, choice, flag, integer, short
from fastattn._args.weight_types import WEIGHT_DTYPES
from fastattn._engine.steps import Sequences
from fastattn.layers import _computation, _state
from fastattn.layers._attention import MultiHeadAttention
from fastattn.layers._attention_parameters import HEAD_OPTIONS
from fastattn.layers._basic import ACTIVATIONS, FeedForward, LayerNorm, NormLayer, RMSNorm
from fastattn.layers._block import Block, Norm, Projection, program_of_blocks, visible
from fastattn.layers._cache import KVCache, restored_on_error
from fastattn.layers._computation import Made
from fastattn.layers._layer_caches import slots_of
from fastattn.layers._scores import padding_alone
from fastattn.layers._state import Layer

if TYPE_CHECKING:
    from fastattn._args.types import Bools, Ints
    from fastattn._engine.program import Program
    from fastattn._engine.tape import Tape
    from fastattn.layers._block import Window
    from fastattn.layers._rotary import Rope
    from fastattn.layers._scores import Masks

    # The last change, and the layers of a stack, when the program was made; and it.
    Kept = tuple[Any, "Prepared | None"]
    # A call of an encoder or a decoder: batch and length; masks of the attention to itself, and of that over
    # the memory; lengths; and with a cache, the memory as the caller gave it.
    LayerCall = tuple[tuple[int, int], Sequence[Masks], Any, Any]

_NEVER: Kept = ((), None)
_MOST_ROTATIONS = 4  # of a program: MAX_ROTATIONS in core/program.pxi
_SRC = ("src", "src_mask", "src_key_padding_mask")


class Prepared(NamedTuple):
    """A program of a layer or a stack."""

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
    _programs: dict[bool, Kept] = field(init=False, default_factory=dict, repr=False)

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

    def _block(self, name: str, own: bool, keys_from: int | None = None, rotation: int = 0) -> Block:
        """The attention `name` as a block, with the feed-forward if no other attention follows.

        With `own`, the attention's own steps are in the program; it may attend the keys of another block.
        """
        heads, number = getattr(self, name), 1 if name == "self_attn" else 2
        block = Block(
            norm_first=self.norm_first,
            attention_norm=getattr(self, f"norm{number}")._of_block(),
            keys_from=keys_from,
        )
        if f"norm{number + 1}" == self._parts[-1]:
            inner, outer = self.feed_forward._of_block()
            norm, function = getattr(self, f"norm{number + 1}")._of_block(), self.feed_forward._function
            block = replace(block, inner_norm=norm, inner=inner, activation=function, outer=outer)
        if not own:
            return replace(block, layer=heads, over_memory=number > 1)
        maps, norms = heads.query_maps if heads.query_only else heads.all_maps, heads.head_norms
        return replace(
            block,
            qkv=Projection(maps.weight, maps.bias, heads.activations),
            heads=heads.num_heads,
            heads_kv=heads._heads_kv,
            head_dim=heads._head_dim,
            modifiers=heads._modifiers,
            attended=heads.out_proj._projection(),
            head_norms=() if norms is None else (Norm("rms_norm", norms, None, heads.qk_norm_eps),),
            window=heads.window,
            rotation=None if heads.rope is None else rotation,
            sinks=heads.sink_logits,
        )

    def _blocks(self, own: bool, keys_from: int | None, rotation: int) -> list[Block]:
        """The layer's blocks, as `_block` makes them."""
        return [self._block("self_attn", own, keys_from, rotation)]

    def _one_each(self, cache: Any) -> Sequence[Any]:
        return (cache,)

    def _forward(self, tape: Tape, x: Any, memory: Any = None, *, call: LayerCall, cache: Any = None) -> Any:
        """The result of a layer or a stack, of rows x and over the rows `memory`, in rows."""
        if cache is None:
            return _run(self, tape, x, memory, call)
        with restored_on_error(caches := self._one_each(cache)):
            return _run(self, tape, x, memory, call, caches)

    def _given(
        self, call: LayerCall, cache: Any, position: Any, counted: Bools | None
    ) -> list[dict[str, Any]]:
        """What each attention of a call is given: see `LayerStep`."""
        sizes, (masks, *_), lengths, _ = call
        return [{"sizes": sizes, "masks": masks, "cache": cache, "lengths": lengths, "counted": counted}]

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


def _run(
    whole: Any, tape: Tape, x: Any, memory: Any, call: LayerCall, caches: Sequence[Any] | None = None
) -> Any:
    """As `_forward`; `caches` are of each layer, or None where it has none.

    `whole` keeps its programs, which are made anew after a change. Rows are 0 that a key_padding_mask hides,
    if that is the only mask of an encoder.
    """
    sizes, each, lengths, _ = call
    masks, decodes, sequences, given = each[0], len(each) > 1, None, None
    padding: Bools | None = None
    if caches is None and not decodes:
        own, padding = padding_alone(masks, sizes)
    else:
        own = masks[1] is masks[2] is None
    counted = None if padding is None else ~padding.ravel()
    if decodes:  # before tokens are counted
        given = _given(whole, call, caches, None)
    if own and (lengths is None or caches is not None) and (found := _program(whole, True)) is not None:
        tokens: list[KVCache] = []
        if caches is not None:
            tokens = [cache.tokens if decodes else cache for cache in caches if cache is not None]
            tokens = tokens if not decodes else [x for i, x in enumerate(tokens) if i not in _borrowed(whole)]
        sequences = _sequences(found, call, tokens, padding, tape.array(x).dtype)
    if sequences is None:
        found, given = _program(whole, False), given or _given(whole, call, caches, counted)
        sequences = Sequences(1, attentions=given, memory=memory)
    elif given is not None:
        sequences = sequences._replace(attentions=given, memory=memory)
    assert found is not None
    if counted is None:
        return found.program.run_on(tape, x, sequences, tape.by_block)
    return tape.spread(found.program.run_on(tape, tape.rows(x, counted), sequences, tape.by_block), counted)


def _borrowed(whole: Any) -> Mapping[int, int]:
    """The layers of a stack that attend the keys of another, and that one."""
    return whole.__dict__.get("_borrowed", {})  # type: ignore[no-any-return]


def _given(
    whole: Any, call: LayerCall, caches: Sequence[Any] | None, counted: Bools | None
) -> list[dict[str, Any]]:
    """What each attention of a call is given: see `LayerStep`."""
    found, borrowed = [], _borrowed(whole)
    for i, layer in enumerate(whole.__dict__.get("layers") or (whole,)):
        cache, first = (None, None) if caches is None else (caches[i], caches[borrowed.get(i, i)])
        start = 0 if first is None else getattr(first, "tokens", first).offset
        found += layer._given(call, cache, start, counted)
    return found


def _sequences(
    found: Prepared, call: LayerCall, caches: Sequence[KVCache], padding: Bools | None, dtype: np.dtype[Any]
) -> Sequences | None:
    """What the program is told of a call's rows; None where attention has to run in Python."""
    (batch, length), each, lengths, _ = call
    _, windows, ropes, movable, heads = found
    if padding is not None:
        if not movable:
            return None
        return Sequences(batch, begins=np.append(0, np.cumsum(length - padding.sum(axis=1))))
    sequences, len_k, causal = Sequences(batch), length, each[0][3]
    start: Ints | int = 0
    held: Ints | int = 0  # before the first new token; fewer than its position if the cache dropped some
    shared: tuple[key_ranges.Range, ...] = ()
    if caches:
        start, held = caches[0].offset, caches[0]._rows
        slots = slots_of(caches, heads, (batch, length), dtype, lengths)
        if slots is None:
            return None
        sequences, len_k = sequences._replace(slots=slots), slots[0].length
        # A token after all others attends to all of them without `causal`.
        causal = causal and length > 1
        if (ends := slots[0].ends) is not None:
            shared = (key_ranges.lengths(ends),)
    if ropes:
        tables = [rope.tables(start, length, dtype) for rope in ropes]
        rotations = tuple((cos[..., None, :, :], sin[..., None, :, :]) for cos, sin in tables)
        sequences = sequences._replace(rotations=rotations)
    if causal or shared or windows != (None,):
        positions = np.arange(length)[None, None]
        if caches:
            positions = positions + np.reshape(held, (-1, 1, 1))
        sequences = sequences._replace(ranges=visible(windows, positions, causal, shared, len_k))
    return sequences


def _program(whole: Any, own: bool) -> Prepared | None:
    """The program of a layer or a stack.

    With attention's `own` steps, or None if they lack an option; else layers compute attention.
    """
    layers = whole.__dict__.get("layers")
    # A layer that referred to itself would be freed late; the caller of a stack may change its list.
    key: tuple[Any, ...] = (_state.last_change,)
    if layers is not None:
        key = (*key, *layers, *_borrowed(whole).items())
    made: Prepared | None
    kept, made = whole._programs.get(own, _NEVER)
    if kept == key:
        return made
    layers, borrowed, norm = layers or (whole,), _borrowed(whole), whole.__dict__.get("norm")
    heads = [layer.self_attn for layer in layers]
    ropes = list(dict.fromkeys(each.rope for each in heads if each.rope is not None))
    made = None
    if not own or (
        len(ropes) <= _MOST_ROTATIONS
        and all(each.is_plain() and each.query_only == (i in borrowed) for i, each in enumerate(heads))
    ):
        rotations = [0 if each.rope is None or not own else ropes.index(each.rope) for each in heads]
        blocks: list[Block] = []
        for i, layer in enumerate(layers):
            source = None if i not in borrowed else borrowed[i] * len(blocks) // i
            blocks += layer._blocks(own, source, rotations[i])
        last = norm._of_block() if isinstance(norm, NormLayer) else None  # a layer's is a kind's name
        program, windows = program_of_blocks(blocks, last=last, keeps_input=True, shares_cache=False)
        keys = [each for each in blocks if each.layer is None and each.keys_from is None]
        sizes = [(each.heads_kv, each.head_dim) for each in keys]
        made = Prepared(program, windows, ropes, all(each._movable for each in heads), sizes)
    whole.__dict__["_programs"] = {**whole._programs, own: (key, made)}
    return made
