"""The base of layers that carry a state from token to token, that state, and the simplest such layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.channels import MOST_WIDTH
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.types import Array, ArrayLike, Ints, Rounding, Shape
from fastattn._args.values import MOST_SIZE, as_array, flag, integer, sequence_begins
from fastattn.layers import _computation
from fastattn.layers._computation import Made
from fastattn.layers._mixers import ConvolutionMixer, convolved, state_kinds
from fastattn.layers._state import Layer, Parameter, constant, lane_of, linear, uniform

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape
    from fastattn.layers._mixers import Carried, Sizes
    from fastattn.layers._state import Fields, Taken

    Held = dict[str, tuple[str, Parameter]]  # by name the field of a parameter, and what it is

ONES = constant(1.0)


class _Call(NamedTuple):
    """The tokens of a call: rows, in sequences that are equally long, or lie end to end."""

    sizes: Sizes
    sequences: int
    begins: Ints | None = None  # end to end
    counted: Array | None = None  # of rows that are more: which ones are tokens


class RecurrentState:
    """State of a recurrent layer, whose size does not depend on the number of tokens.

    Pass an empty one to a layer's first call, and the same one to later calls with as many sequences, which
    continue after it. A call that raises leaves it unchanged. ``copy.deepcopy`` makes a branch.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.layers import Mamba2, RecurrentState
    >>> layer, x, state = Mamba2(64, 4, 32, rng=0), np.ones((1, 9, 64), np.float32), RecurrentState()
    >>> steps = [layer(x[:, t : t + 1], state=state) for t in range(9)]  # token by token
    >>> bool(np.allclose(np.concatenate(steps, axis=1), layer(x), atol=1e-5))
    True
    """

    def __init__(self) -> None:
        self._held: list[Array] = []
        self._spare: list[Array] = []  # of the same shapes: the next call writes there

    def __repr__(self) -> str:
        shapes = " and ".join(f"{x.shape} in {x.dtype}" for x in self._held)
        return f"<RecurrentState: {shapes or 'empty'}>"

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the arrays."""
        return sum(x.nbytes for x in (*self._held, *self._spare))

    def _turn(self, kinds: Sequence[tuple[Shape, np.dtype[Any]]]) -> Carried:
        """Arguments of a call whose states are of `kinds`; it writes to other arrays than it reads."""
        if self._held and [(x.shape, x.dtype) for x in self._held] != kinds:
            expected = " and ".join(f"{shape} in {dtype}" for shape, dtype in kinds)
            raise ValueError(f"(): state is {self!r}; expected {expected}, or an empty one")
        before: Sequence[Array | None] = self._held or [None] * len(kinds)
        if not (self._held and self._spare):
            self._spare = [np.empty(shape, dtype) for shape, dtype in kinds]
        return [{"state": x, "out_state": y} for x, y in zip(before, self._spare, strict=True)]

    def _keep(self) -> None:
        """Hold what the call has written."""
        self._held, self._spare = self._spare, self._held


@dataclass(eq=False)
class RecurrentLayer(Layer):
    """A layer of one map in, a convolution, perhaps a recurrence, and one map out.

    A subclass sets its sizes in `_derive`, and says by `_mixer` what lies between the maps. Maps of the
    same input are one, `in_map`: its rows are those of the parameters `_rows`, in the order `_order`.
    """

    d_model: int
    _: KW_ONLY
    kernel_size: int = 4
    weights_dtype: str = "float32"
    activations: Rounding | None = None
    rng: InitVar[np.random.Generator | int | None] = None
    in_map: ops.PackedLinear = field(init=False, repr=False)
    in_bias: Array | None = field(init=False, default=None, repr=False)
    conv_weight: Array = field(init=False, repr=False)
    conv_bias_vector: Array | None = field(init=False, default=None, repr=False)
    out_map: ops.PackedLinear = field(init=False, repr=False)
    out_bias: Array | None = field(init=False, default=None, repr=False)

    bias = False
    conv_bias = False
    _sizes: ClassVar[tuple[str, ...]] = ()  # fields that are sizes
    _names = "conv1d", "out_proj"  # of the convolution and the map out, in the state dict
    _mixer: ClassVar[Any] = None  # its mixer's class, if it has one, which takes its `_mixer_fields`
    _mixer_fields: ClassVar[tuple[str, ...]] = ("conv_weight", "conv_bias_vector")
    _words = ""  # the parameters in their order, without ".weight" and ".bias"

    def _place(self) -> str:
        return f"a {type(self).__name__} with d_model {self.d_model}"

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        for name in ("d_model", *self._sizes):
            if getattr(self, name) is not None or getattr(type(self), name, 0) is not None:
                setattr(self, name, integer(name, getattr(self, name), 1, MOST_SIZE))
        self.kernel_size = integer("kernel_size", self.kernel_size, 1, MOST_WIDTH)
        for name in ("bias", "conv_bias"):
            flag(name, getattr(self, name))
        self._inner = self._channels = 0  # features of the map out, and those that are convolved
        self._rows: dict[str, int] = {}
        self._order: Any = slice(None)
        self._recurrences: tuple[Shape, ...] = ()  # shapes of a sequence's state, one or none
        self._derive()
        self._set_up(rng)

    def _derive(self) -> None:
        """Check the sizes together, and set what follows from them."""
        raise NotImplementedError

    def _own(self) -> Held:
        """Parameters beside those of the convolution, of `in_map` and of the map out."""
        return {}

    def _mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        """Rows for the map out, computed from rows of `in_map` by the layer's mixer, if it has one."""
        mixer = self._mixer(*[getattr(self, name) for name in self._mixer_fields])
        return mixer.mixed(tape, product, sizes, carried)

    @_computation.computed()
    def __call__(
        self,
        x: ArrayLike,
        *,
        state: RecurrentState | None = None,
        key_padding_mask: ArrayLike | None = None,
        begins: ArrayLike | None = None,
    ) -> Made:
        """Mix tokens along a sequence: each reads itself and earlier ones.

        Parameters
        ----------
        x : array_like, (batch, length, d_model)
            Or (length, d_model), one sequence.
        state : RecurrentState, optional
            Continue after the tokens of earlier calls, and include these.
        key_padding_mask : array_like of bool, (batch, length), optional
            **True hides a token**, wherever it is: it does not affect others, and its result is 0.
        begins : array_like of int, (sequences + 1,), optional
            Packed sequences in x (tokens, d_model): sequence s has the tokens ``begins[s]`` to
            ``begins[s + 1]``. From 0 to the number of tokens.

        Returns
        -------
        ndarray, as x
        """
        array, call = self._checked(x, key_padding_mask, begins)
        carried: Carried = [{}, {}]
        if state is not None:
            _computation.require("state", state, RecurrentState, "a RecurrentState")
            kinds = state_kinds(array.dtype, self.kernel_size, self._channels, self._recurrences)
            carried = state._turn([((call.sequences, *shape), dtype) for shape, dtype in kinds])

        def run(tape: Tape, x: Any) -> Any:
            out = self._forward(tape, x, call, carried)
            if state is not None:
                state._keep()
            return out

        return [self], {"x": array}, run, array.shape

    def _checked(self, x: Any, key_padding_mask: Any, begins: Any) -> tuple[Array, _Call]:
        """`x`, and how its tokens make sequences."""
        self._require_parts()
        array = _computation.checked("x", x, self.d_model, self.weights_dtype)
        if begins is not None:
            if key_padding_mask is not None:
                raise ValueError("(): key_padding_mask and begins are given; expected one of them at most")
            if array.ndim != 2:
                raise wrong_shape("x", array, f"(tokens, {self.d_model}), as begins is given")
            found = sequence_begins("begins", begins, "x", len(array))
            return array, _Call((len(array),), len(found) - 1, found)
        batch, length, _ = _computation.batch_first("x", array).shape
        if key_padding_mask is None:
            return array, _Call((batch, length), batch)
        hidden = as_array("key_padding_mask", key_padding_mask)
        if hidden.dtype != np.bool_:
            raise wrong_dtype("key_padding_mask", hidden, "bool, True for a token that is hidden")
        if hidden.shape != array.shape[:-1]:
            raise wrong_shape("key_padding_mask", hidden, f"{array.shape[:-1]}, as x has tokens")
        counted = ~hidden.reshape(batch, length)
        found = np.append(0, np.cumsum(counted.sum(axis=1)))
        return array, _Call((int(found[-1]),), batch, found, counted.ravel())

    def _forward(self, tape: Tape, x: Any, call: _Call, carried: Carried) -> Any:
        sizes = call.sizes
        if call.begins is not None:
            carried = [{**given, "begins": call.begins} for given in carried]
        if call.counted is not None:
            x = tape.rows(x, call.counted)
        product = tape.linear(x, self.in_map, self.in_bias, self.activations, use="product")
        mixed = self._mixed(tape, product, sizes, carried)
        out = tape.linear(mixed, self.out_map, self.out_bias, self.activations)
        tape.done("product", product)
        return out if call.counted is None else tape.spread(out, call.counted)

    def _convolved(self, tape: Tape, x: Any, carried: Carried) -> Any:
        """``silu`` of the convolution of x (*sizes, channels)."""
        return convolved(tape, x, self.conv_weight, self.conv_bias_vector, carried)

    def _held(self) -> Held:
        """All parameters but those of `in_map`, each with its field, in which maps are packed."""
        taps, (conv, out) = uniform(self.kernel_size**-0.5), self._names
        found = {
            **self._own(),
            f"{conv}.weight": ("conv_weight", Parameter((self._channels, 1, self.kernel_size), taps)),
        }
        if self.conv_bias:
            found[f"{conv}.bias"] = "conv_bias_vector", Parameter((self._channels,), taps)
        maps = linear(out, self.d_model, self._inner, self.bias)
        return found | {name: (f"out_{'bias' if 'bias' in name else 'map'}", p) for name, p in maps.items()}

    def _parameters(self) -> dict[str, Parameter]:
        found = {name: parameter for name, (_, parameter) in self._held().items()}
        for name, many in self._rows.items():
            found |= linear(name, many, self.d_model, self.bias)
        names = (name for word in self._words.split() for name in (word, f"{word}.weight", f"{word}.bias"))
        return {name: found[name] for name in names if name in found}

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        lane, fields = lane_of(weights_dtype), dict[str, Any]()
        for name, (held, _) in self._held().items():
            packed = held.endswith("_map")
            fields[held] = (
                ops.pack(arrays[name], dtype=weights_dtype) if packed else arrays[name].astype(lane)
            )
        weights = np.concatenate([arrays[f"{name}.weight"] for name in self._rows])
        fields["in_map"] = ops.pack(weights[self._order], dtype=weights_dtype)
        if self.bias:
            biases = np.concatenate([arrays[f"{name}.bias"] for name in self._rows])
            fields["in_bias"] = biases[self._order].astype(lane)
        return fields

    def _named(self, plain: Taken) -> dict[str, Array]:
        taken = ((name, plain(getattr(self, held))) for name, (held, _) in self._held().items())
        arrays = {name: array for name, array in taken if array is not None}
        ends = np.cumsum([*self._rows.values()])[:-1]
        for kind, whole in (("weight", plain(self.in_map)), ("bias", plain(self.in_bias))):
            if whole is not None:
                lying = np.empty_like(whole)
                lying[self._order] = whole
                parts = zip(self._rows, np.split(lying, ends), strict=True)
                arrays |= {f"{name}.{kind}": part for name, part in parts}
        return arrays


def logarithms(rng: np.random.Generator, shape: Shape) -> Array:
    """Logarithms of 1, 2, ... along the last axis, as in Mamba."""
    return np.broadcast_to(np.log(np.arange(1.0, 1 + shape[-1])), shape)


def log_uniform(low: float, high: float) -> Any:
    """Logarithms of numbers that are uniform in [low, high)."""
    return lambda rng, shape: np.log(rng.uniform(low, high, shape))


def step_bias(rng: np.random.Generator, shape: Shape) -> Array:
    """Biases whose softplus, the step of a token, is log-uniform from 0.001 to 0.1, as in Mamba."""
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
    found: Array = step + np.log(-np.expm1(-step))  # the inverse of softplus
    return found


@dataclass(eq=False)
class ShortConvolution(RecurrentLayer):
    r"""Gated causal convolution of LFM2: ``out_proj(C * conv(B * x))`` with ``B, C, x = in_proj(input)``.

    conv is a depthwise `fastattn.ops.causal_conv1d` along the tokens.

    Parameters
    ----------
    d_model : int
        Features of a token.
    bias : bool, default False
        Whether both maps and the convolution have a bias.
    kernel_size : int, default 3
        Width of the convolution, 1 to 8.
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.

    Notes
    -----
    Parameters are named as in transformers' ``Lfm2ShortConv``: ``conv.weight`` (d_model, 1, kernel_size),
    ``in_proj.weight`` (3 * d_model, d_model), ``out_proj.weight`` (d_model, d_model), and their biases. The
    state holds the last ``kernel_size - 1`` products B x of each channel. Source: Liquid AI, "LFM2 Technical
    Report", 2025, arXiv:2511.23404.
    """

    bias: bool = False
    _: KW_ONLY
    kernel_size: int = 3

    _mixer = ConvolutionMixer
    _names = "conv", "out_proj"
    _words = "conv in_proj out_proj"

    def _derive(self) -> None:
        self.conv_bias = self.bias
        self._inner = self._channels = self.d_model
        self._rows = {"in_proj": 3 * self.d_model}
