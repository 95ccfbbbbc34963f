"""Delta rules by the names of their papers: what a token erases, what it writes, and in how many steps.

All run the kernel of `linear_attention`. Gates are multiplied into keys and values first, and several steps
of one token become tokens of their own, of which the last alone has a query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.options import DeltaOptions, StepOptions, require_options
from fastattn._args.recurrent import log_decays, per_token
from fastattn._args.types import Array, ArrayLike, Shape, Unpack, lane_dtype
from fastattn._args.values import (
    broadcast_batch,
    flag,
    operand,
    real_array,
    require_broadcast,
    sequence_begins,
)
from fastattn.functional._differentiable import Request, Steps, differentiable
from fastattn.functional._recurrent import gradients_of, run_rule, summed_like
from fastattn.functional.feature_maps import unit
from fastattn.grad import vjp

if TYPE_CHECKING:
    from fastattn.functional._recurrent import Result

# The kernel decays the state first. Rules that erase before that divide their keys by the decay, here at
# least exp(-10): elements of a key of length 1 then stay below 22027, which float16 holds.
_LEAST_LOG_DECAY = -10.0


@differentiable("q", "k", "v", "log_decay", "erase_gate", "write_gate", "state", options=DeltaOptions)
def gated_delta_net2(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    erase_gate: ArrayLike,
    write_gate: ArrayLike,
    *,
    unit_keys: bool = True,
    **options: Unpack[DeltaOptions],
) -> Steps[Result]:
    """Gated DeltaNet-2 (Hatamizadeh et al. 2026, arXiv:2605.22791): gates for what it erases and writes.

    ``S_t = D_t + k_t (w_t * v_t - D_t^T (b_t * k_t))^T`` with ``D_t = diag(a_t) S_{t-1}``. Gates that are the
    same beta_t for every dimension make it rule "kimi_delta" of `linear_attention`.

    Parameters
    ----------
    q, k, v : array_like
        As in `linear_attention`.
    log_decay : array_like, (..., heads, len, head_dim)
        log a_t.
    erase_gate : array_like, (..., heads_k, len, head_dim)
        b_t, from 0 to 1. It broadcasts to k.
    write_gate : array_like, (..., heads_v, len, head_dim_v)
        w_t, from 0 to 1. It broadcasts to v.
    unit_keys : bool, default True
        Divide each query and key by its length first, as the paper does: `feature_maps.unit`.
    **options
        scale, state, begins, return_state, out_state, out, num_threads, backend: as in `linear_attention`, as
        what is returned and raised.

    Notes
    -----
    The cost is that of "kimi_delta", and a pass over k and v each. In 16 bits b_t k_t and w_t v_t are
    rounded, as k and v were.
    """
    require_options(options, DeltaOptions)
    q, k, v = operand("q", q, []), operand("k", k, []), operand("v", v, [])
    queries, keys = _units(q, k, unit_keys)
    erases = _gate("erase_gate", erase_gate, k, "(..., heads_k, len, head_dim)")
    writes = _gate("write_gate", write_gate, v, "(..., heads_v, len, head_dim_v)")
    values = _scaled(v, writes)
    fixed: Any = {"rule": "kimi_delta", "log_decay": log_decay, "erase": _scaled(keys, erases)}
    request = yield run_rule(queries, keys, values, options, DeltaOptions, fixed)

    found = _parts(request, queries, keys, values, fixed | options)
    found["derase_gate"] = summed_like(erase_gate, _wide(found["derase"]) * _wide(keys), 2)
    found["dwrite_gate"] = summed_like(write_gate, _wide(found["dv"]) * _wide(v), 2)
    found["dk"] = found["dk"] + found["derase"] * erases
    found["dv"] = found["dv"] * writes
    return _before_unit(request, found, q, k, unit_keys, {"dv": v})


@differentiable(
    "q", "k", "v", "log_decay", "beta", "erase_strength", "correction", "state", options=DeltaOptions
)
def comba(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    beta: ArrayLike,
    erase_strength: ArrayLike,
    correction: ArrayLike | None = None,
    *,
    unit_keys: bool = True,
    **options: Unpack[DeltaOptions],
) -> Steps[Result]:
    """Comba (Hu et al. 2025, arXiv:2506.02475): the delta rule with two strengths, and corrected queries.

    ``S_t = a_t S_{t-1} - e_t k_t (S_{t-1}^T k_t)^T + beta_t k_t v_t^T``: what is erased is what stood there
    before the decay. ``out_t = scale S_t^T (q_t - d k_t)``.

    Parameters
    ----------
    q, k, v : array_like
        As in `linear_attention`, but of one dtype, one batch and one number of heads.
    log_decay : array_like, (heads,) or (..., heads, len)
        log a_t, at least -10.
    beta, erase_strength : array_like, (..., heads, len)
        How much is written, and e_t: how much is erased, in the paper a part of beta.
    correction : array_like, (heads,) or (..., heads, len), optional
        d; 0 if left out.
    unit_keys, **options
        As in `gated_delta_net2`.

    Notes
    -----
    The kernel erases from ``a_t S_{t-1}``, by the key ``e_t k_t / a_t``, and so log_decay is bounded. The
    cost is that of rule "gated_delta", and some passes over q, k and v. In 16 bits these keys, ``beta_t v_t``
    and ``q_t - d k_t`` are rounded, as k, v and q were.
    """
    require_options(options, DeltaOptions)
    q, k, v = _tokens_alike({"q": q, "k": k, "v": v}, "k", "v")
    queries, keys = _units(q, k, unit_keys)
    lane, shape = lane_dtype(k.dtype), k.shape[:-1]
    decays = _bounded(log_decays(log_decay, shape, 0, lane))
    rates = np.exp(-decays)
    strengths = _scaled(per_token("erase_strength", erase_strength, shape, lane), rates)
    writes = per_token("beta", beta, shape, lane)[..., None]
    factor = np.zeros((1, 1, 1), lane)
    if correction is not None:
        given = real_array("correction", correction)
        factor = per_token("correction", given[:, None] if given.ndim == 1 else given, shape, lane)[..., None]
    values = _scaled(v, writes)
    corrected = queries if correction is None else _scaled(keys, -factor, queries)
    fixed: Any = {"rule": "gated_delta", "log_decay": log_decay, "erase": _scaled(keys, strengths[..., None])}
    request = yield run_rule(corrected, keys, values, options, DeltaOptions, fixed)

    found = _parts(request, corrected, keys, values, fixed | options)
    by_key = (_wide(found["derase"]) * _wide(keys)).sum(-1)
    found["derase_strength"] = summed_like(erase_strength, by_key * rates)
    if "dlog_decay" in found:
        found["dlog_decay"] = found["dlog_decay"] - summed_like(log_decay, by_key * strengths)
    if correction is not None:
        found["dcorrection"] = summed_like(correction, -(_wide(found["dq"]) * _wide(keys)).sum(-1))
    found["dbeta"] = summed_like(beta, (_wide(found["dv"]) * _wide(v)).sum(-1))
    found["dk"] = found["dk"] + found["derase"] * strengths[..., None] - factor * found["dq"]
    found["dv"] = found["dv"] * writes
    return _before_unit(request, found, q, k, unit_keys, {"dv": v})


@differentiable("q", "k", "v", "beta", "log_decay", "state", options=StepOptions)
def delta_product(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    log_decay: ArrayLike | None = None,
    *,
    unit_keys: bool = True,
    **options: Unpack[StepOptions],
) -> Steps[Result]:
    """DeltaProduct (Siems et al. 2025, arXiv:2502.10297): each token takes several steps of the delta rule.

    From ``S = a_t S_{t-1}`` on, for each step j: ``S = S + beta_tj k_tj (v_tj - S^T k_tj)^T``. The result is
    read after the last one. A beta of 2 reflects the state: two such steps can turn it in a plane.

    Parameters
    ----------
    q : array_like, (..., heads_q, len, head_dim)
        As in `linear_attention`.
    k : array_like, (..., heads_k, len, steps, head_dim)
    v : array_like, (..., heads_v, len, steps, head_dim_v)
    beta : array_like, (..., heads, len, steps)
    log_decay : array_like, (heads,) or (..., heads, len), optional
        log a_t; there are no decays if left out.
    unit_keys : bool, default True
        As in `gated_delta_net2`.
    **options
        scale, state, begins, return_state, out_state, num_threads, backend: as in `linear_attention`, as what
        is returned and raised.

    Notes
    -----
    The cost in time is that of rule "delta", or with decays of "gated_delta", for ``steps * len`` tokens.
    Queries and results of all steps are in memory, too: before the last step, queries are 0, and results are
    dropped.
    """
    require_options(options, StepOptions)
    q, k, v = operand("q", q, []), operand("k", k, []), operand("v", v, [])
    if k.ndim < 4 or not k.shape[-2]:
        raise wrong_shape("k", k, "(..., heads_k, len, steps, head_dim), at least one step")
    length, steps = k.shape[-3:-1]
    if v.ndim < 4 or v.shape[-3:-1] != (length, steps):
        raise wrong_shape("v", v, f"(..., heads_v, len, steps, head_dim_v), {length} and {steps} as k")
    if q.ndim < 3 or q.shape[-2] != length:
        raise wrong_shape("q", q, f"(..., heads_q, len, head_dim), {length} as k")
    _by_steps(options, "k", k, 1, "(heads, len, steps, head_dim)")
    options = _by_steps(options, "q", q, steps, "(heads, len, head_dim)")
    batch = broadcast_batch(q=q.shape[:-3], k=k.shape[:-4], v=v.shape[:-4])
    shape, lane = (*batch, max(k.shape[-4], v.shape[-4]), length), lane_dtype(k.dtype)
    strengths = real_array("beta", beta)
    if strengths.ndim < 3 or strengths.shape[-2:] != (length, steps):
        raise wrong_shape("beta", strengths, f"(..., heads, len, steps), {length} and {steps} as k")
    require_broadcast("beta", strengths.shape, (*shape, steps), "(..., heads, len, steps)")
    queries, keys = _units(q, k, unit_keys)
    fixed: Any = {"rule": "delta", "beta": strengths.reshape(*strengths.shape[:-2], length * steps)}
    if log_decay is not None:
        decays: Any = log_decays(log_decay, shape, 0, lane)
        every = np.zeros((*decays.shape[:-1], length, steps), lane)
        every[..., 0] = decays
        fixed |= {"rule": "gated_delta", "log_decay": every.reshape(*decays.shape[:-1], length * steps)}
    inputs = _at_step(queries, steps, -1), _as_tokens(keys), _as_tokens(v)
    request = yield _at_last_step(run_rule(*inputs, options, StepOptions, fixed), steps)

    request = request._replace(dout=_at_step(request.dout, steps, -1))
    found = _parts(request, *inputs, fixed | options, "derase")
    found["dq"] = _of_step(found["dq"], steps, -1)
    found["dk"], found["dv"] = found["dk"].reshape(k.shape), found["dv"].reshape(v.shape)
    if "dbeta" in found:
        found["dbeta"] = found["dbeta"].reshape(strengths.shape)
    if "dlog_decay" in found:
        found["dlog_decay"] = summed_like(log_decay, found["dlog_decay"][..., ::steps])
    return _before_unit(request, found, q, k, unit_keys)


@differentiable("r", "log_decay", "k", "v", "read_by", "write_by", "state", options=StepOptions)
def rwkv7(
    r: ArrayLike,
    log_decay: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    read_by: ArrayLike,
    write_by: ArrayLike,
    **options: Unpack[StepOptions],
) -> Steps[Result]:
    """RWKV-7 (Peng et al. 2025, arXiv:2503.14456), whose decay and whose rank-one erasure share a token.

    ``S_t = diag(w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T`` and ``out_t = scale S_t^T r_t``, where a_t
    is `read_by` and b_t `write_by`. The paper writes the state transposed.

    Parameters
    ----------
    r : array_like, (..., heads, len, head_dim)
        Queries; k, v, `read_by` and `write_by` are in its dtype, and have its heads and batch.
    log_decay : array_like, (..., heads, len, head_dim)
        log w_t, at least -10; the paper's is at least ``-exp(-0.5)``.
    k : array_like, (..., heads, len, head_dim)
    v : array_like, (..., heads, len, head_dim_v)
    read_by, write_by : array_like, (..., heads, len, head_dim)
        In the paper's words ``-kappa``, of length 1, and kappa times the learning rate in context; a and b of
        flash-linear-attention.
    **options
        scale (1 if left out), state, begins, return_state, out_state, num_threads, backend: as in
        `linear_attention`, as what is returned and raised.

    Notes
    -----
    Each token takes two steps of rule "kimi_delta": one erases by the key ``-a_t / w_t``, and writes no value
    by b_t; one erases nothing, and writes v_t by k_t. So the cost in time and in memory is that of twice as
    many tokens. In 16 bits ``a_t / w_t`` is rounded, as a_t was.
    """
    require_options(options, StepOptions)
    r, k, v, read_by, write_by = _tokens_alike(
        {"r": r, "k": k, "v": v, "read_by": read_by, "write_by": write_by}, "k", "v"
    )
    stepped: Any = _by_steps(options, "r", r, 2, "(heads, len, head_dim)")
    lane = lane_dtype(k.dtype)
    decays = _bounded(log_decays(log_decay, k.shape[:-1], k.shape[-1], lane))
    rates = np.exp(-decays)
    erase = _scaled(read_by, -rates)
    inputs = _at_step(r, 2, 1), _as_tokens(np.stack([write_by, k], axis=-2)), _at_step(v, 2, 1)
    every = _at_step(np.broadcast_to(decays, k.shape), 2, 0)
    fixed: Any = {"rule": "kimi_delta", "log_decay": every, "erase": _at_step(erase, 2, 0)}
    if options.get("scale") is None:
        fixed["scale"] = 1.0
    given: Any = {name: x for name, x in stepped.items() if name not in fixed}
    request = yield _at_last_step(run_rule(*inputs, given, StepOptions, fixed), 2)

    request = request._replace(dout=_at_step(request.dout, 2, 1))
    found = _parts(request, *inputs, fixed | given)
    derase = _of_step(found["derase"], 2, 0)
    found |= {"dr": _of_step(found["dq"], 2, 1), "dv": _of_step(found["dv"], 2, 1)}
    found |= {"dwrite_by": _of_step(found["dk"], 2, 0), "dk": _of_step(found["dk"], 2, 1)}
    found["dread_by"] = -derase * rates
    if "dlog_decay" in found:
        total = _of_step(found["dlog_decay"], 2, 0) - derase * erase.astype(lane)
        found["dlog_decay"] = summed_like(log_decay, total, 2)
    return _in_dtypes(request, found, {"dread_by": read_by})


def _units(q: Array, k: Array, unit_keys: bool) -> tuple[Array, Array]:
    """Queries and keys, of length 1 if `unit_keys`."""
    return (unit(q), unit(k)) if flag("unit_keys", unit_keys) else (q, k)


def _gate(name: str, given: Any, x: Array, dims: str) -> Array:
    """The gate `given` of x, `dims`, in lanes."""
    array = real_array(name, given)
    require_broadcast(name, array.shape, x.shape, dims)
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes infinite
        return np.asarray(array, lane_dtype(x.dtype))


@np.errstate(all="ignore")
def _scaled(x: Array, factor: Array, more: Array | None = None) -> Array:
    """``x * factor``, plus `more` if there is some, taken in lanes, in x's dtype."""
    product = x * factor
    return np.asarray(product if more is None else product + more, x.dtype)


def _wide(x: Array) -> Array:
    """`x` in lanes, for products whose sums have more digits than a 16-bit type."""
    return x.astype(lane_dtype(x.dtype), copy=False)


def _tokens_alike(given: dict[str, Any], of: str, values: str) -> list[Array]:
    """The arrays `given`, all of the shape of the one called `of`; that called `values` may be wider."""
    arrays = {name: operand(name, x, []) for name, x in given.items()}
    like = arrays[of]
    if like.ndim < 3:
        raise wrong_shape(of, like, "(..., heads, len, head_dim)")
    for name, x in arrays.items():
        width: Shape = x.shape[-1:] if name == values else like.shape[-1:]
        if x.shape != (*like.shape[:-1], *width):
            raise wrong_shape(name, x, f"{(*like.shape[:-1], *width)}, as {of}")
        if x.dtype != like.dtype:
            raise TypeError(f"(): {name} has dtype {x.dtype}; expected that of {of}, {like.dtype}")
    return list(arrays.values())


def _bounded(decays: Array | None) -> Array:
    """`decays`, logarithms that are not too low to divide by what they are logarithms of."""
    if decays is None:
        raise ValueError("(): log_decay is None; expected an array")
    least = decays.min(initial=0)
    if least < _LEAST_LOG_DECAY:
        raise ValueError(f"(): log_decay has {least}; expected {_LEAST_LOG_DECAY} or more")
    return decays


def _by_steps(options: StepOptions, name: str, tokens: Array, steps: int, dims: str) -> StepOptions:
    """The options of a call whose tokens are the steps of the argument `name`, `dims`."""
    if options.get("begins") is None:
        return options
    if tokens.ndim != dims.count(",") + 1:
        raise wrong_shape(name, tokens, f"{dims}, as begins is given")
    found = sequence_begins("begins", options["begins"], name, tokens.shape[1])
    return {**options, "begins": found * steps}


def _as_tokens(x: Array) -> Array:
    """x (..., len, steps, dim) as (..., len * steps, dim)."""
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _at_step(x: Array, steps: int, step: int) -> Array:
    """x (..., len, dim) as (..., len * steps, dim): every token at one of its steps, and 0 at the others."""
    every = np.zeros((*x.shape[:-1], steps, x.shape[-1]), x.dtype)
    every[..., step, :] = x
    return _as_tokens(every)


def _of_step(x: Array, steps: int, step: int) -> Array:
    """One step of every token of x (..., len * steps, dim)."""
    return np.ascontiguousarray(x[..., step % steps :: steps, :])


def _at_last_step(result: Any, steps: int) -> Any:
    """The result of a call, of whose steps the last one of each token counts."""
    if isinstance(result, tuple):
        return _of_step(result[0], steps, -1), result[1]
    return _of_step(result, steps, -1)


def _parts(
    request: Request, q: Array, k: Array, v: Array, forward: dict[str, Any], *without: str
) -> dict[str, Any]:
    """Gradients of `linear_attention` by name: of q, k, v and erase in any case, but not those `without`."""
    own: list[str] = [name for name in ("dlog_decay", "dstate", "dscale") if name in request.need]
    own += ["dbeta"] if "beta" in forward and "dbeta" in request.need else []
    need = tuple(name for name in ("dq", "dk", "dv", "derase", *own) if name not in without)
    inner = Request(request.dout, request.dmore, need)
    return dict(zip(need, gradients_of(inner, q, k, v, forward), strict=True))


def _before_unit(
    request: Request, found: dict[str, Any], q: Array, k: Array, unit_keys: bool, like: Any = None
) -> tuple[Any, ...]:
    """The gradients that are needed, in the dtypes of q, of k and of arrays `like`; q and k before `unit`."""
    for name, x in (("dq", q), ("dk", k)):
        if name in request.need and unit_keys:
            _, pullback = vjp(unit, x)
            (found[name],) = pullback(np.asarray(found[name], x.dtype.newbyteorder("=")))
    return _in_dtypes(request, found, {"dq": q, "dk": k, **(like or {})})


def _in_dtypes(request: Request, found: dict[str, Any], like: dict[str, Array]) -> tuple[Any, ...]:
    """The gradients that are needed; those with an array `like` them in its dtype."""
    for name in {*like} & {*request.need}:
        found[name] = np.asarray(found[name], like[name].dtype.newbyteorder("="))
    return tuple(found[name] for name in request.need)
