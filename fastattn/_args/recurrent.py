"""The arguments of linear attention and of its gradient, checked and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.attention import layout_hint
from fastattn._args.errors import wrong_dtype, wrong_shape, wrong_type
from fastattn._args.grad import needed
from fastattn._args.ops import epsilon, like
from fastattn._args.recurrent_types import RecurrentArgs, RecurrentBackwardArgs
from fastattn._args.results import result_array
from fastattn._args.types import Array, Shape, lane_dtype
from fastattn._args.values import (
    broadcast_batch,
    choice,
    flag,
    is_ready,
    number,
    operand,
    readable,
    real_array,
    require_broadcast,
    require_dtypes,
    sequence_begins,
)
from fastattn._engine.settings import require_backend, threads


class Rule(NamedTuple):
    """Rule by which a state changes from token to token."""

    decay: str = ""  # "scalar": a number a token; "vector": one for every dimension of the key
    delta: bool = False  # write what the state does not answer yet, with strength beta


RULES = {
    "linear": Rule(),
    "decay": Rule("scalar"),
    "gated": Rule("vector"),
    "delta": Rule(delta=True),
    "gated_delta": Rule("scalar", delta=True),
    "kimi_delta": Rule("vector", delta=True),
}


def _turned(arrays: list[Array]) -> str:
    return layout_hint(*(x.shape for x in arrays))


def recurrent_args(
    q: Any,
    k: Any,
    v: Any,
    rule: str,
    log_decay: Any = None,
    beta: Any = None,
    erase: Any = None,
    causal: bool = True,
    scale: float | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    state: Any = None,
    begins: Any = None,
    return_state: bool = False,
    out_state: Any = None,
    out: Array | None = None,
    num_threads: int | None = None,
    backend: str | None = None,
) -> RecurrentArgs:
    """Check the arguments of `fastattn.functional.linear_attention`."""
    decay, delta = RULES[choice("rule", rule, RULES)]
    copies: list[str] = []
    arrays = [operand(name, x, copies) for name, x in (("q", q), ("k", k), ("v", v))]
    for name, x in zip("qkv", arrays, strict=True):
        if x.ndim < 3 or 0 in (x.shape[-3], x.shape[-1]):
            expected = "(..., heads, length, head_dim), at least one head and one dimension"
            raise wrong_shape(name, x, expected)
    q_array, k_array, v_array = arrays
    dtype, lane = q_array.dtype, lane_dtype(q_array.dtype)
    if not (k_array.dtype is dtype and v_array.dtype is dtype):
        require_dtypes({"q": q_array, "k": k_array, "v": v_array})
    heads_q, len_q, head_dim = q_array.shape[-3:]
    heads_k, len_k, _ = k_array.shape[-3:]
    heads_v, len_v, head_dim_v = v_array.shape[-3:]
    causal, normalize = flag("causal", causal), flag("normalize", normalize)
    if k_array.shape[-1] != head_dim:
        raise ValueError(f"(): k has head_dim {k_array.shape[-1]}; expected q's, {head_dim}")
    if len_v != len_k:
        raise ValueError(f"(): v has a length of {len_v}; expected k's, {len_k}{_turned(arrays)}")
    if causal and len_q != len_k:
        raise ValueError(f"(): q has a length of {len_q}; expected k's, {len_k}, if causal{_turned(arrays)}")
    heads = max(heads_k, heads_v)
    if heads % heads_k or heads % heads_v or (heads_q % heads and heads % heads_q):
        raise ValueError(
            f"(): q, k and v have {heads_q}, {heads_k} and {heads_v} heads; expected the larger of k's and"
            " v's to be a multiple of the other, and q's a multiple or a divisor of it"
            f"{_turned(arrays)}"
        )
    starts = None
    batch_shape = q_array.shape[:-3]
    if not (batch_shape == k_array.shape[:-3] == v_array.shape[:-3]):
        batch_shape = broadcast_batch(q=batch_shape, k=k_array.shape[:-3], v=v_array.shape[:-3])
    if begins is not None:
        for name, x in zip("qkv", arrays, strict=True):
            if x.ndim != 3:
                raise wrong_shape(name, x, "(heads, tokens, head_dim), as begins is given")
        if len_q != len_k:
            raise ValueError(f"(): q has {len_q} tokens; expected k's, {len_k}, as begins is given")
        starts = sequence_begins("begins", begins, "k", len_k)
    if not causal and rule != "linear":
        raise ValueError(f"(): causal is False; expected True with rule {rule!r}")
    if normalize and delta:
        raise ValueError(f"(): normalize is True; expected False with rule {rule!r}")
    token_shape = (*batch_shape, heads, len_k)
    if (log_decay is None) != (not decay):
        expected = "None" if not decay else "an array"
        given = "None" if log_decay is None else "given"
        raise ValueError(f"(): log_decay is {given}; expected {expected} with rule {rule!r}")
    if beta is not None and not delta:
        raise ValueError(f"(): beta is given; expected None with rule {rule!r}")
    decays = log_decays(log_decay, token_shape, head_dim if decay == "vector" else 0, lane)
    strengths = None
    if delta:
        strengths = np.ones((1, 1), lane) if beta is None else per_token("beta", beta, token_shape, lane)
    erased = None if erase is None else _erase_keys(erase, rule, k_array, batch_shape)
    default = 1.0 if normalize else head_dim**-0.5
    factor = default if scale is None else number("scale", scale, lane)
    eps = epsilon("eps", eps, lane)
    require_backend(backend)
    n_threads = threads(num_threads)
    with_state = flag("return_state", return_state) or out_state is not None

    state_batch = batch_shape if starts is None else (len(starts) - 1,)
    shape = (*state_batch, heads, head_dim, head_dim_v)
    states = pair("state", state, normalize)
    before = like("state", states[0], shape, lane)
    norm = like("state[1]", states[1], shape[:-1], lane)
    inputs: list[tuple[str, Any, Any]] = list(zip("qkv", (q, k, v), arrays, strict=True))
    inputs += [("log_decay", log_decay, decays), ("beta", beta, strengths), ("erase", erase, erased)]
    out_shape = (*batch_shape, max(heads_q, heads), len_q, head_dim_v)
    others = [*inputs, ("state", states[0], before), ("state[1]", states[1], norm)]
    out = result_array(out, out_shape, dtype, "q", others)
    inputs.append(("out", out, out))
    after, after_norm = pair("out_state", out_state, normalize)
    others = [*inputs, ("state[1]", states[1], norm)]
    if not _same(after, before):
        others.append(("state", states[0], before))
    after = result_array(after, shape, lane, "the state", others, "out_state")
    if normalize:
        others = [*inputs, ("state", states[0], before), ("out_state[0]", after, after)]
        if after_norm is not None and norm is not None:
            norm = norm.copy()  # it may be after_norm, which one task writes
        after_norm = result_array(after_norm, shape[:-1], lane, "the state", others, "out_state[1]")
    new = (after, after_norm) if normalize else after
    return RecurrentArgs(
        state_batch, heads, heads_q, heads_k, heads_v, len_q, len_k, head_dim, head_dim_v, q_array, k_array,
        v_array, out, decays, strengths, erased, before, after, norm, after_norm, decay == "vector", causal,
        factor, eps, n_threads, (out, new) if with_state else out, begins=starts,
    )  # fmt: skip


def per_token(name: str, x: Any, shape: Shape, lane: np.dtype[Any]) -> Array:
    """`x`, numbers for every token, as `lane`; broadcasts to `shape`, (..., heads, length)."""
    if is_ready(x, 2) and x.dtype is lane and x.shape == shape:  # the usual case, in a tenth of the time
        return x
    array = real_array(name, x)
    if array.ndim < 2:
        raise wrong_shape(name, array, "(..., heads, length)")
    require_broadcast(name, array.shape, shape, "(..., heads, length)")
    return readable(np.asarray(array, lane), name, [])


def _erase_keys(erase: Any, rule: str, k: Array, batch_shape: Shape) -> Array:
    """`erase`, one key for each of k's."""
    if not RULES[rule].delta:
        raise ValueError(f"(): erase is given; expected None with rule {rule!r}")
    array = operand("erase", erase, [])
    if array.shape[-3:] != k.shape[-3:]:
        raise wrong_shape("erase", array, f"(..., heads_k, length, head_dim) = {(..., *k.shape[-3:])}, as k")
    require_broadcast("erase", array.shape, (*batch_shape, *k.shape[-3:]), "(..., heads_k, length, head_dim)")
    if array.dtype != k.dtype:
        raise wrong_dtype("erase", array, f"{k.dtype}, as k")
    return array


def log_decays(x: Any, shape: Shape, head_dim: int, lane: np.dtype[Any]) -> Array | None:
    """`x` as logarithms of decays for `shape`, (..., heads, length), or with `head_dim`, one more axis."""
    if x is None:
        return None
    array = x if type(x) is np.ndarray and x.dtype is lane else real_array("log_decay", x)
    dims = "(..., heads, length, head_dim)"
    if head_dim:
        if array.ndim < 3 or array.shape[-1] != head_dim:
            raise wrong_shape("log_decay", array, f"{dims}, as {(*shape[-2:], head_dim)}")
        require_broadcast("log_decay", array.shape, (*shape, head_dim), dims)
    elif array.ndim == 1:
        require_broadcast("log_decay", array.shape, shape[-2:-1], "(heads,) or (..., heads, length)")
        array = array[:, None]
    else:
        array = per_token("log_decay", array, shape, lane)
    array = readable(np.asarray(array, lane), "log_decay", [], "the last axis" if head_dim else "")
    if array.size and not array.max() <= 0:  # NaN is not
        raise ValueError(f"(): log_decay has {array.max()}; expected 0 or less, -inf for a reset")
    return array


def pair(name: str, x: Any, normalize: bool) -> tuple[Any, Any]:
    """`x` as (state, sum of keys), the latter only with `normalize`; None is (None, None)."""
    if x is None or not normalize:
        return x, None
    if not isinstance(x, tuple) or len(x) != 2:
        raise wrong_type(name, x, "a pair (state, sum of keys), as normalize is True")
    return x


def _same(a: Any, b: Array | None) -> bool:
    """Whether two arrays of one shape are the same elements of memory."""
    if a is b or not isinstance(a, np.ndarray) or b is None:
        return a is b
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides and a.shape == b.shape


GRADIENTS = ("dq", "dk", "dv", "dlog_decay", "dbeta", "derase", "dstate", "dscale")


def recurrent_backward_args(
    dout: Any, args: RecurrentArgs, need: Any, dstate_out: Any, given: Mapping[str, Any]
) -> RecurrentBackwardArgs:
    """Check the arguments of the gradient of `args`, of which some were `given` so."""
    normalize = args.norm_out is not None
    wanted = needed(need, GRADIENTS)
    for name in ("dlog_decay", "dbeta", "derase"):
        if name in wanted and given.get(name[1:]) is None:
            raise ValueError(f"(): need has {name}, but {name[1:]} is not given")
    lane, dtype = lane_dtype(args.q.dtype), args.out.dtype
    cotangent = operand("dout", dout, [])
    if cotangent.dtype != dtype:
        raise wrong_dtype("dout", cotangent, f"{dtype}, that of the result")
    if cotangent.shape != args.out.shape:
        raise wrong_shape("dout", cotangent, args.out.shape)
    states = pair("dmore", dstate_out, normalize)
    shape = args.state_out.shape
    dstate = like("dmore", states[0], shape, lane)
    dnorm = like("dmore[1]", states[1], shape[:-1], lane)

    scaled = "dscale" not in wanted

    def room(name: str, x: Array | None, heads: int, *sizes: int) -> Array | None:
        """Memory for a gradient of each state: in x's dtype if nothing is to be added up, else in lanes."""
        full = (*(args.batch_shape if name == "dstate" else args.out.shape[:-3]), heads, *sizes)
        if name not in wanted and (name != "dq" or scaled):
            return None
        return np.empty(full, x.dtype if x is not None and x.shape == full else lane)

    heads, len_k = args.heads, args.len_k
    return RecurrentBackwardArgs(
        args, cotangent, dstate, dnorm,
        room("dq", args.q if scaled else None, max(args.heads_q, heads), args.len_q, args.head_dim),
        room("dk", args.k, heads, len_k, args.head_dim),
        room("dv", args.v, heads, len_k, args.head_dim_v),
        room("dlog_decay", None, heads, len_k, *((args.head_dim,) if args.gated else ())),
        room("dbeta", None, heads, len_k),
        room("derase", args.erase, heads, len_k, args.head_dim),
        room("dstate", None, heads, args.head_dim, args.head_dim_v),
        room("dstate", None, heads, args.head_dim) if normalize else None,
        args.scale if scaled else 1.0,
    )  # fmt: skip
