"""Layers of state spaces, with the parameters of transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.channels import step_limits
from fastattn._args.ops import epsilon
from fastattn._args.types import FLOAT32, Array, Shape
from fastattn._reference.channels import softplus
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._state_space import mamba2_scan, selective_scan, without_nan
from fastattn.layers._mixers import Mixer, convolved, split
from fastattn.layers._recurrent import ONES, RecurrentLayer, logarithms, step_bias
from fastattn.layers._state import Parameter, linear

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape
    from fastattn.layers._mixers import Carried, Sizes
    from fastattn.layers._recurrent import Held
    from fastattn.layers._state import Fields, Taken


@differentiable("A_log")
def _rates(A_log: Array) -> Steps[Array]:
    """``-exp(A_log)``."""
    rates = -np.exp(A_log)
    request = yield rates
    return (request.dout * rates,)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Mixer(Mixer):
    """`Mamba2`'s: rows have z; x, B and C, which are convolved; then dt."""

    kind = "mamba2"

    dt_bias: Array  # (heads,), as A_log and D
    A_log: Array
    D: Array
    norm_weights: Array  # (parts, features) of those that are normed together
    groups: int
    state_size: int
    eps: float
    dt_limits: tuple[float, float] = (0.0, np.inf)

    @property
    def columns(self) -> int:
        return self.norm_weights.size

    @property
    def recurrences(self) -> tuple[Shape, ...]:
        return ((self.D.size, self.state_size, self.columns // self.D.size),)

    def decays(self, a: Array) -> tuple[Array, Array | None]:
        lane = self.A_log.dtype
        with np.errstate(all="ignore"):
            steps = np.clip(
                softplus(a.astype(lane, copy=False) + self.dt_bias), *map(lane.type, self.dt_limits)
            )
            return without_nan(steps * -np.exp(self.A_log)), steps

    def mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        ((heads, states, dim),), inner = self.recurrences, self.columns
        gate, tokens, dt = split(tape, product, sizes, [inner, (len(self.conv_weight),), (heads, None)])
        mixed = convolved(tape, tokens, self.conv_weight, self.conv_bias, carried)
        x, keys, queries = split(tape, mixed, sizes, [(heads, dim), *[(self.groups, states)] * 2])
        given = {"x": x, "dt": dt, "A": tape.call(_rates, {"A_log": self.A_log}), "B": keys, "C": queries}
        given |= {"D": self.D, "dt_bias": self.dt_bias}
        options = {"dt_softplus": True, "dt_limits": self.dt_limits, **carried[1]}
        scanned = tape.call(mamba2_scan, given, **options)
        (rows,) = split(tape, tape.by_row(scanned), sizes, [inner])
        return tape.gated_norm(rows, gate, self.norm_weights, self.eps, "silu", gate_first=True)


@dataclass(eq=False)
class Mamba2(RecurrentLayer):
    r"""Mamba-2's mixer: the scan of a state space after a convolution, gated and normed.

    .. math::
        S_t = e^{s_t A} S_{t-1} + B_t (s_t x_t)^T,\quad y_t = S_t^T C_t + D x_t,\quad
        out_t = W\,norm(y_t \cdot silu(z_t))

    One map of the token gives z, the input of ``silu(conv(...))`` for x, B and C, and dt. Steps are ``s =
    softplus(dt + dt_bias)``, and ``A = -exp(A_log)``.

    Parameters
    ----------
    d_model, num_heads, head_dim : int
        In models, ``num_heads * head_dim`` is 2 d_model.
    state_size : int, default 128
        Rows of a head's state.
    num_groups : int, default 1
        Groups of heads that share B and C, and are normed together; a divisor of num_heads.
    bias : bool, default False
        Whether both maps have a bias.
    conv_bias : bool, default True
    dt_limits : (float, float), default (0, inf)
        Range that steps are clipped to.
    eps : float, default 1e-5
    kernel_size, weights_dtype, activations, rng
        As in `GatedDeltaNet`.

    Notes
    -----
    Parameters are named as in transformers' ``Mamba2Mixer``: ``dt_bias``, ``A_log``, ``D``,
    ``conv1d.weight``, ``conv1d.bias``, ``in_proj.weight``, ``norm.weight``, ``out_proj.weight``; the same in
    Bamba, Granite, Zamba 2 and Nemotron H. The state is (batch, num_heads, state_size, head_dim). Source: T.
    Dao and A. Gu, "Transformers are SSMs", 2024, arXiv:2405.21060.
    """

    num_heads: int
    head_dim: int
    state_size: int = 128
    num_groups: int = 1
    bias: bool = False
    _: KW_ONLY
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, np.inf)
    eps: float = 1e-5
    dt_bias: Array = field(init=False, repr=False)
    A_log: Array = field(init=False, repr=False)
    D: Array = field(init=False, repr=False)
    norm_weights: Array = field(init=False, repr=False)  # (num_groups, features)

    _mixer = Mamba2Mixer
    _mixer_fields = (
        *RecurrentLayer._mixer_fields, "dt_bias", "A_log", "D", "norm_weights", "num_groups", "state_size",
        "eps", "dt_limits",
    )  # fmt: skip
    _sizes = ("num_heads", "head_dim", "state_size", "num_groups")
    _words = "dt_bias A_log D conv1d in_proj norm out_proj"

    def _derive(self) -> None:
        self.eps = epsilon("eps", self.eps, FLOAT32)
        if self.num_heads % self.num_groups:
            expected = f"a multiple of num_groups, {self.num_groups}"
            raise ValueError(f"(): num_heads is {self.num_heads}; expected {expected}")
        self.dt_limits = step_limits(self.dt_limits)
        self._inner = self.num_heads * self.head_dim
        self._channels = self._inner + 2 * self.num_groups * self.state_size
        self._rows = {"in_proj": self._inner + self._channels + self.num_heads}
        self._recurrences = ((self.num_heads, self.state_size, self.head_dim),)

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        grouped = arrays["norm.weight"].reshape(self.num_groups, -1)
        return super()._pack({**arrays, "norm.weight": grouped}, weights_dtype)

    def _named(self, plain: Taken) -> dict[str, Array]:
        arrays = super()._named(plain)
        return arrays | {name: x.reshape(-1) for name, x in arrays.items() if name == "norm.weight"}

    def _own(self) -> Held:
        heads = (self.num_heads,)
        return {
            "dt_bias": ("dt_bias", Parameter(heads, step_bias)),
            "A_log": ("A_log", Parameter(heads, logarithms)),
            "D": ("D", Parameter(heads, ONES)),
            "norm.weight": ("norm_weights", Parameter((self._inner,), ONES)),
        }


@dataclass(eq=False)
class Mamba(RecurrentLayer):
    r"""Mamba's mixer: the selective scan after a convolution, gated.

    .. math::
        h_t = e^{s_t A} h_{t-1} + s_t x_t B_t,\quad y_t = h_t \cdot C_t + D x_t,\quad
        out_t = W\,(y_t \cdot silu(z_t))

    One map of the token gives the input of ``x = silu(conv(...))``, and z. A map of x gives B, C and dt_rank
    numbers, from which dt_proj computes steps: ``s = softplus(dt_proj(...))``. ``A = -exp(A_log)``.

    Parameters
    ----------
    d_model : int
        Features of a token.
    d_inner : int, optional
        Channels; default 2 d_model.
    state_size : int, default 16
        Size of a channel's state.
    dt_rank : int, optional
        Default ``ceil(d_model / 16)``.
    bias : bool, default False
        Whether the maps in and out have a bias.
    conv_bias : bool, default True
    kernel_size, weights_dtype, activations, rng
        As in `GatedDeltaNet`.

    Notes
    -----
    Parameters are named as in transformers' ``MambaMixer``: ``A_log``, ``D``, ``conv1d.weight``,
    ``conv1d.bias``, ``in_proj.weight``, ``x_proj.weight``, ``dt_proj.weight``, ``dt_proj.bias``,
    ``out_proj.weight``. The state is (batch, d_inner, state_size). Source: A. Gu and T. Dao, "Mamba:
    Linear-Time Sequence Modeling with Selective State Spaces", 2023, arXiv:2312.00752.
    """

    d_inner: int | None = None
    state_size: int = 16
    dt_rank: int | None = None
    bias: bool = False
    _: KW_ONLY
    conv_bias: bool = True
    A_log: Array = field(init=False, repr=False)
    D: Array = field(init=False, repr=False)
    x_map: ops.PackedLinear = field(init=False, repr=False)
    dt_map: ops.PackedLinear = field(init=False, repr=False)
    dt_bias: Array = field(init=False, repr=False)

    _sizes = ("d_inner", "state_size", "dt_rank")
    _words = "A_log D conv1d in_proj x_proj dt_proj out_proj"

    def _derive(self) -> None:
        self._inner = self._channels = self.d_inner or 2 * self.d_model
        self._rank = self.dt_rank or -(-self.d_model // 16)
        self._rows = {"in_proj": 2 * self._inner}
        self._recurrences = ((self._inner, self.state_size),)

    def _own(self) -> Held:
        inner, states, rank = self._inner, self.state_size, self._rank
        maps = linear("x_proj", rank + 2 * states, inner) | linear("dt_proj", inner, rank)
        return {
            "A_log": ("A_log", Parameter((inner, states), logarithms)),
            "D": ("D", Parameter((inner,), ONES)),
            "x_proj.weight": ("x_map", maps["x_proj.weight"]),
            "dt_proj.weight": ("dt_map", maps["dt_proj.weight"]),
            "dt_proj.bias": ("dt_bias", Parameter((inner,), step_bias)),
        }

    def _mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        inner, states, rank = (self._inner,), (self.state_size,), self._rank
        tokens, gate = split(tape, product, sizes, [inner, inner])
        x = self._convolved(tape, tokens, carried)
        (rows,) = split(tape, x, sizes, [self._inner])
        selected = tape.linear(rows, self.x_map, None, self.activations)
        low, b, c = split(tape, selected, sizes, [rank, states, states])
        (dt,) = split(tape, tape.linear(low, self.dt_map, None, self.activations), sizes, [inner])
        given = {"x": x, "dt": dt, "A": tape.call(_rates, {"A_log": self.A_log}), "B": b, "C": c, "D": self.D}
        given |= {"z": gate, "dt_bias": self.dt_bias}
        scanned = tape.call(selective_scan, given, dt_softplus=True, **carried[1])
        return split(tape, scanned, sizes, [self._inner])[0]
