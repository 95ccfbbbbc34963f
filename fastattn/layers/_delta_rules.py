"""Layers of the delta rules, with the parameters of transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import grad, ops
from fastattn._args.ops import epsilon
from fastattn._args.types import FLOAT32, Array, Shape
from fastattn._args.values import choice, number
from fastattn._reference.channels import softplus
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.functional._recurrent import linear_attention
from fastattn.functional._state_space import without_nan
from fastattn.functional.feature_maps import unit
from fastattn.layers._mixers import Mixer, convolved, split
from fastattn.layers._recurrent import ONES, RecurrentLayer, log_uniform, step_bias
from fastattn.layers._state import Parameter, linear

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape
    from fastattn.layers._mixers import Carried, Sizes
    from fastattn.layers._recurrent import Held


@differentiable("x", "dt_bias", "A_log")
def _decays(x: Array, dt_bias: Array, A_log: Array, *, lowest: float | None = None) -> Steps[Array]:
    """Logarithms of decays, of rows x (tokens, heads) or (tokens, heads * features).

    They are ``-exp(A_log) * softplus(x + dt_bias)`` or ``lowest * sigmoid(exp(A_log) * (x + dt_bias))``.
    """
    rate = np.repeat(np.exp(A_log), x.shape[1] // A_log.size)
    raw = x.astype(A_log.dtype, "C") + dt_bias
    decays = without_nan(-rate * softplus(raw) if lowest is None else lowest * _logistic(rate * raw))
    request = yield decays

    share = _logistic(raw if lowest is None else rate * raw)
    slope = -share if lowest is None else lowest * share * (1 - share)
    dx = request.dout * rate * slope
    dlog = (request.dout * decays if lowest is None else dx * raw).sum(0)
    return dx.astype(x.dtype, copy=False), dx.sum(0), dlog.reshape(A_log.size, -1).sum(1).reshape(A_log.shape)


def _logistic(x: Array) -> Array:
    found: Array = 0.5 + 0.5 * np.tanh(0.5 * x)
    return found


@differentiable("x")
def _sigmoid(x: Array, *, times: float = 1.0) -> Steps[Array]:
    factor = x.dtype.type(times)
    request = yield ops.activate(x, "sigmoid") * factor
    return grad.activate(request.dout * factor, x, "sigmoid")


def _read(
    tape: Tape, qkv: Sequence[Any], decays: Any, b: Any, rule: Any, carried: Carried, times: float = 1.0
) -> Any:
    """Results of a delta rule, a row for each head: of unit queries and keys, and ``times * sigmoid(b)``."""
    q, k, v = qkv
    given = {"q": tape.call(unit, {"x": q}), "k": tape.call(unit, {"x": k}), "v": v, "log_decay": decays}
    given["beta"] = tape.call(_sigmoid, {"x": b}, times=times)
    return tape.by_row(tape.call(linear_attention, given, rule=rule, **carried[1]))


@dataclass(frozen=True, slots=True, eq=False)
class DeltaMixer(Mixer):
    """`GatedDeltaNet`'s: rows have what is convolved, queries, keys and values; then z, b and a."""

    kind = "delta"

    dt_bias: Array  # (heads,), as A_log
    A_log: Array
    norm_weight: Array  # (head_dim_v,)
    key_heads: int
    head_dim: int
    eps: float
    beta_scale: float = 1.0

    @property
    def columns(self) -> int:
        return self.dt_bias.size * self.norm_weight.size

    @property
    def recurrences(self) -> tuple[Shape, ...]:
        return ((self.dt_bias.size, self.head_dim, self.norm_weight.size),)

    def decays(self, a: Array) -> tuple[Array, Array | None]:
        return _decays(a, self.dt_bias, self.A_log), None

    def mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        ((heads, dim, dim_v),), groups, inner = self.recurrences, self.key_heads, self.columns
        parts = [(len(self.conv_weight),), inner, (heads, None), heads]
        tokens, gate, b, a = split(tape, product, sizes, parts)
        mixed = convolved(tape, tokens, self.conv_weight, self.conv_bias, carried)
        qkv = split(tape, mixed, sizes, [(groups, dim), (groups, dim), (heads, dim_v)])
        rows = tape.call(_decays, {"x": a, "dt_bias": self.dt_bias, "A_log": self.A_log})
        (decays,) = split(tape, rows, sizes, [(heads, None)])
        read = _read(tape, qkv, decays, b, "gated_delta", carried, self.beta_scale)
        normed = tape.gated_norm(read, gate, self.norm_weight, self.eps, "silu")
        return split(tape, normed, sizes, [inner])[0]


# By family the parameters in their order, the maps in, and the names of the norm and the map out.
_DELTA_NAMES = {
    "qwen3_next": (
        "dt_bias A_log conv1d in_proj_qkvz in_proj_ba norm out_proj", "in_proj_qkvz in_proj_ba",
        "norm", "out_proj",
    ),
    "qwen3_5": (
        "dt_bias A_log conv1d norm out_proj in_proj_qkv in_proj_z in_proj_b in_proj_a",
        "in_proj_qkv in_proj_z in_proj_b in_proj_a", "norm", "out_proj",
    ),
    "olmo_hybrid": (
        "A_log dt_bias q_proj k_proj v_proj a_proj b_proj g_proj o_proj conv1d o_norm",
        "q_proj k_proj v_proj g_proj b_proj a_proj", "o_norm", "o_proj",
    ),
}  # fmt: skip


@dataclass(eq=False)
class GatedDeltaNet(RecurrentLayer):
    r"""Gated DeltaNet, as in Qwen3-Next: the delta rule after a convolution, normed and gated.

    .. math::
        S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,\quad
        o_t = S_t^T q_t / \sqrt{head\_dim},\quad
        out_t = W\,(norm(o_t) \cdot silu(z_t))

    q, k and v are ``silu(conv(...))`` of one map of the token, with q and k normalised to length 1; z is from
    the same map. ``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, with a and b from
    another map.

    Parameters
    ----------
    d_model : int
        Features of a token.
    num_heads, num_key_heads : int
        Heads of values, each with a state; heads of queries and keys, a divisor of num_heads.
    head_dim, head_dim_v : int
        Features of a query or key, and of a value.
    kernel_size : int, default 4
        Width of the convolution, 1 to 8.
    eps : float, default 1e-6
        Of the norm of a head's results; 1e-5 in OLMo.
    beta_scale : float, default 1
        Factor of beta; 2 in OLMo.
    names : {"qwen3_next", "qwen3_5", "olmo_hybrid"}
        Family that the names and maps of the parameters follow.
    weights_dtype, activations, rng
        As in `MultiHeadAttention`.

    Notes
    -----
    Parameters are named as in transformers' ``Qwen3NextGatedDeltaNet``: ``dt_bias``, ``A_log``,
    ``conv1d.weight``, ``in_proj_qkvz.weight``, ``in_proj_ba.weight``, ``norm.weight``, ``out_proj.weight``;
    or as in ``Qwen3_5GatedDeltaNet`` or ``OlmoHybridGatedDeltaNet``. All maps in are one `linear` here. The
    state is (batch, num_heads, head_dim, head_dim_v). Source: S. Yang, J. Kautz and A. Hatamizadeh, "Gated
    Delta Networks: Improving Mamba2 with Delta Rule", 2024, arXiv:2412.06464.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    head_dim_v: int
    _: KW_ONLY
    eps: float = 1e-6
    beta_scale: float = 1.0
    names: str = "qwen3_next"
    dt_bias: Array = field(init=False, repr=False)
    A_log: Array = field(init=False, repr=False)
    norm_weight: Array = field(init=False, repr=False)

    _mixer = DeltaMixer
    _mixer_fields = (
        *RecurrentLayer._mixer_fields, "dt_bias", "A_log", "norm_weight", "num_key_heads", "head_dim", "eps",
        "beta_scale",
    )  # fmt: skip
    _sizes = ("num_heads", "num_key_heads", "head_dim", "head_dim_v")

    def _derive(self) -> None:
        self.eps = epsilon("eps", self.eps, FLOAT32)
        groups, each = self.num_key_heads, self.num_heads // self.num_key_heads
        if self.num_heads % groups:
            expected = f"a multiple of num_key_heads, {groups}"
            raise ValueError(f"(): num_heads is {self.num_heads}; expected {expected}")
        self.beta_scale = number("beta_scale", self.beta_scale, FLOAT32)
        self._inner = self.num_heads * self.head_dim_v
        self._channels = 2 * groups * self.head_dim + self._inner
        self._recurrences = ((self.num_heads, self.head_dim, self.head_dim_v),)
        self._words, maps, self._norm, out = _DELTA_NAMES[choice("names", self.names, _DELTA_NAMES)]
        self._names = "conv1d", out
        widths = [self._channels + self._inner, 2 * self.num_heads]
        if self.names != "qwen3_next":
            keys, heads = groups * self.head_dim, self.num_heads
            mixed = [keys, keys, self._inner] if self.names == "olmo_hybrid" else [self._channels]
            widths = [*mixed, self._inner, heads, heads]
        self._rows = dict(zip(maps.split(), widths, strict=True))
        if self.names != "qwen3_next":
            return
        # A key head's rows lie together in the parameters. Here all queries come first, then keys, ...
        first, second = widths
        values = each * self.head_dim_v
        qkvz = np.arange(first).reshape(groups, -1)
        ba = np.arange(first, first + second).reshape(groups, -1)
        ends = np.cumsum([self.head_dim, self.head_dim, values])
        parts = [*np.split(qkvz, ends, axis=1), *np.split(ba, 2, axis=1)]
        self._order = np.concatenate([part.ravel() for part in parts])

    def _own(self) -> Held:
        heads = (self.num_heads,)
        return {
            "dt_bias": ("dt_bias", Parameter(heads, ONES)),
            "A_log": ("A_log", Parameter(heads, log_uniform(0.01, 16))),
            f"{self._norm}.weight": ("norm_weight", Parameter((self.head_dim_v,), ONES)),
        }


# By family the parameters in their order, and the maps of decays and of gates: of head_dim numbers, or one.
_KIMI_NAMES = {
    "kimi_linear": (
        "q_proj k_proj v_proj conv1d forget_gate.dt_bias forget_gate.A_log forget_gate.f_a_proj"
        " forget_gate.f_b_proj b_proj g_a_proj g_b_proj o_norm o_proj",
        ("forget_gate.f_a_proj", "forget_gate.f_b_proj"), ("g_a_proj", "g_b_proj"),
    ),
    "bailing_hybrid": (
        "q_proj k_proj v_proj conv1d forget_gate.A_log forget_gate.dt_bias forget_gate.f_proj b_proj o_norm"
        " o_proj g_proj",
        ("forget_gate.f_proj",), ("g_proj",),
    ),
}  # fmt: skip


@dataclass(eq=False)
class KimiDeltaAttention(RecurrentLayer):
    r"""Kimi Delta Attention, as in Kimi Linear: a delta rule with per-feature decay.

    .. math::
        S_t = diag(e^{g_t}) S_{t-1} + \beta_t k_t (v_t - (diag(e^{g_t}) S_{t-1})^T k_t)^T,\quad
        o_t = S_t^T q_t / \sqrt{head\_dim},\quad
        out_t = W\,(norm(o_t) \cdot sigmoid(z_t))

    q, k and v are ``silu(conv(...))`` of maps of the token, with q and k normalised to length 1. ``g =
    -exp(A_log) * softplus(f + dt_bias)``, with low-rank maps for f and z, and ``beta = sigmoid(b)``.

    Parameters
    ----------
    d_model, num_heads, head_dim : int
        head_dim is also the rank of the maps for f and z.
    eps : float, default 1e-5
        Of the norm of a head's results.
    lowest_decay : float, optional
        Below 0: then ``g = lowest_decay * sigmoid(exp(A_log) * (f + dt_bias))``; -5 in Bailing.
    names : {"kimi_linear", "bailing_hybrid"}
        Family that the names and maps of the parameters follow; the latter has one full map each for f and z.
    kernel_size, weights_dtype, activations, rng
        As in `GatedDeltaNet`.

    Notes
    -----
    Parameters are named as in transformers' ``BailingHybridDeltaAttention``, or as in
    ``KimiLinearDeltaAttention``: ``q_proj.weight``, ``k_proj.weight``, ``v_proj.weight``, ``conv1d.weight``,
    ``forget_gate.dt_bias``, ``forget_gate.A_log``, ``forget_gate.f_a_proj.weight``,
    ``forget_gate.f_b_proj.weight``, ``b_proj.weight``, ``g_a_proj.weight``, ``g_b_proj.weight``,
    ``o_norm.weight``, ``o_proj.weight``. Maps of a token are one `linear` here. The state is (batch,
    num_heads, head_dim, head_dim). Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention
    Architecture", 2025, arXiv:2510.26692.
    """

    num_heads: int
    head_dim: int
    _: KW_ONLY
    eps: float = 1e-5
    lowest_decay: float | None = None
    names: str = "kimi_linear"
    dt_bias: Array = field(init=False, repr=False)
    A_log: Array = field(init=False, repr=False)
    norm_weight: Array = field(init=False, repr=False)
    forget_map: ops.PackedLinear | None = field(init=False, default=None, repr=False)
    gate_map: ops.PackedLinear | None = field(init=False, default=None, repr=False)

    _names = "conv1d", "o_proj"
    _sizes = ("num_heads", "head_dim")

    def _derive(self) -> None:
        self.eps = epsilon("eps", self.eps, FLOAT32)
        heads, dim = self.num_heads, self.head_dim
        self._inner, self._channels = heads * dim, 3 * heads * dim
        if self.lowest_decay is not None:
            self.lowest_decay = number("lowest_decay", self.lowest_decay, FLOAT32)
            if not self.lowest_decay < 0:
                raise ValueError(f"(): lowest_decay is {self.lowest_decay}; expected one below 0, or None")
        self._words, self._forget, self._gate = _KIMI_NAMES[choice("names", self.names, _KIMI_NAMES)]
        self._low = self._inner if len(self._gate) == 1 else dim
        self._rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self._inner)
        self._rows |= {self._forget[0]: self._low, "b_proj": heads, self._gate[0]: self._low}
        self._recurrences = ((heads, dim, dim),)

    def _own(self) -> Held:
        heads, dim, inner = self.num_heads, self.head_dim, self._inner
        two = len(self._gate) > 1
        rates = Parameter((1, 1, heads, 1) if two else (heads,), log_uniform(1, 16))
        found = {
            "forget_gate.dt_bias": ("dt_bias", Parameter((inner,), step_bias)),
            "forget_gate.A_log": ("A_log", rates),
            "o_norm.weight": ("norm_weight", Parameter((dim,), ONES)),
        }
        if two:
            for to, name in (("forget_map", self._forget[1]), ("gate_map", self._gate[1])):
                found[f"{name}.weight"] = to, linear(name, inner, dim)[f"{name}.weight"]
        return found

    def _mixed(self, tape: Tape, product: Any, sizes: Sizes, carried: Carried) -> Any:
        heads, dim, inner = self.num_heads, self.head_dim, self._inner
        tokens, low, b, gate = split(
            tape, product, sizes, [(self._channels,), self._low, (heads, None), self._low]
        )
        qkv = split(tape, self._convolved(tape, tokens, carried), sizes, [(heads, dim)] * 3)
        if self.forget_map is not None:
            low = tape.linear(low, self.forget_map, None, self.activations)
        inputs = {"x": low, "dt_bias": self.dt_bias, "A_log": self.A_log}
        (decays,) = split(tape, tape.call(_decays, inputs, lowest=self.lowest_decay), sizes, [(heads, dim)])
        read = _read(tape, qkv, decays, b, "kimi_delta", carried)
        if self.gate_map is not None:
            gate = tape.linear(gate, self.gate_map, None, self.activations)
        normed = tape.gated_norm(read, gate, self.norm_weight, self.eps, "sigmoid")
        return split(tape, normed, sizes, [inner])[0]
