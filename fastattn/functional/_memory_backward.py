"""The gradients of attention over a memory, over latent vectors, and over projected keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.backward import like_result
from fastattn._args.options import InnerOptions, ScaledOptions
from fastattn._args.types import lane_dtype
from fastattn._args.variants import variant_args
from fastattn._engine import dispatch
from fastattn.functional._approximate import projected, projections_of
from fastattn.functional._chain import NEED, Chain, product_sums, shown
from fastattn.functional._memory import latent_args, memory_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


@np.errstate(all="ignore")  # as in the kernels
def memory_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    memory_k: ArrayLike,
    memory_v: ArrayLike,
    out: ArrayLike | None = None,
    lse: ArrayLike | None = None,
    *,
    gate: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = (*NEED, "dmemory_k", "dmemory_v"),
    **options: Unpack[InnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `memory_attention`.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, memory_k, memory_v, gate, **options
        As they were given to `memory_attention`, but for `out`.
    out, lse, dlse : array_like, optional
        As in `attention_backward`. Not with `gate`: then both results are computed again.
    need : tuple of str, default ("dq", "dk", "dv", "dmemory_k", "dmemory_v")
        As in `attention_backward`, with ``"dmemory_k"``, ``"dmemory_v"`` and ``"dgate"``.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Two calls of `attention_backward`, which share out and lse where there is one softmax over all keys.
    """
    func = "memory_attention_backward"
    args = variant_args(func, q, k, v, options, InnerOptions, True)
    given = {"q": q, "k": k, "v": v, "memory_k": memory_k, "memory_v": memory_v, "gate": gate}
    chain = Chain(func, need, given, options, InnerOptions)
    for name, x in (("out", out), ("lse", lse), ("dlse", dlse)):
        if gate is not None and x is not None:
            raise ValueError(f"{func}(): {name} is given with gate; expected None: there are two softmaxes")
    local, memory, weight = memory_parts(func, args, memory_k, memory_v, gate, options)
    if weight is None:
        cotangent, slope = chain.saved(args, dout, out, lse, dlse)
        for part in (local, memory):
            part.out, part.lse = args.out, args.lse
        shares: Any = (1, 1)
    else:
        cotangent, slope = like_result(func, "dout", dout, args, np.shape(args.result[0]), []), None
        for part in (local, memory):
            dispatch.run(part, options.get("backend"))
        cotangent = cotangent.astype(weight.dtype)
        shares = (1 - weight, weight)
        slopes = (weight * (1 - weight))[..., 0, 0]
        each = product_sums(memory.out, cotangent) - product_sums(local.out, cotangent)
        chain.add("dgate", slopes * each)
    names = (NEED, ("dq", "dmemory_k", "dmemory_v"))
    for part, share, of_part in zip((local, memory), shares, names, strict=True):
        uses = {inner: (name,) for inner, name in zip(NEED, of_part, strict=True)}
        call = chain.attend(part, cotangent * share, slope, uses=uses)
        for name, inner in zip(of_part, NEED, strict=True):
            chain.add(name, getattr(call, inner))
    return chain.results()


@np.errstate(all="ignore")  # as in the kernels
def latent_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    cache: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    need: Sequence[str] = ("dq", "dcache", "dkey_weight", "dvalue_weight"),
    **options: Unpack[InnerOptions],
) -> tuple[Any, ...]:
    """Gradients of `latent_attention`, DeepSeek's.

    Parameters
    ----------
    dout, out, lse, dlse
        As in `attention_backward`; out and lse are those of either form.
    q, cache, key_weight, value_weight, **options
        As they were given to `latent_attention`.
    need : tuple of str, default ("dq", "dcache", "dkey_weight", "dvalue_weight")
        As in `attention_backward`, of these arrays.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    Keys and values of all heads are made, as with ``absorbed=False``: then `attention_backward`, and the
    products of a linear map in NumPy.
    """
    func = "latent_attention_backward"
    x = latent_args(func, q, cache, key_weight, value_weight, False, options)
    given = {"q": q, "cache": cache, "key_weight": key_weight, "value_weight": value_weight}
    chain = Chain(func, need, given, options, InnerOptions)
    keys, values = x.expanded()
    args = attention_args(func, x.queries, keys, values, return_lse=True, **options)
    uses = {"dk": ("dcache", "dkey_weight"), "dv": ("dcache", "dvalue_weight")}
    call = chain.attend(args, *chain.saved(args, dout, out, lse, dlse), uses=uses)
    _, nope_dim, rank = x.of_keys.shape
    chain.add("dq", call.dq)
    dkeys = None if call.dk is None else call.dk[..., :nope_dim]
    if chain.wants("dcache"):
        dlatent = dkeys @ x.of_keys + call.dv @ x.of_values
        dshared = np.concatenate([dlatent, call.dk[..., nope_dim:]], axis=-1)
        chain.add("dcache", dshared.sum(axis=-3))
    latent = x.tokens[..., None, :, :rank]
    for name, dx in (("dkey_weight", dkeys), ("dvalue_weight", call.dv)):
        if dx is not None and chain.wants(name):
            chain.add(name, dx.swapaxes(-1, -2) @ shown(latent, dx))
    return chain.results()


@np.errstate(all="ignore")  # as in the kernels
def linformer_attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_projection: ArrayLike,
    value_projection: ArrayLike | None = None,
    *,
    need: Sequence[str] = (*NEED, "dkey_projection"),
    **options: Unpack[ScaledOptions],
) -> tuple[Any, ...]:
    """Gradients of `linformer_attention`.

    Parameters
    ----------
    dout : array_like, (..., heads_q, len_q, head_dim_v)
        The gradient of a scalar with respect to the result, in q's dtype.
    q, k, v, key_projection, value_projection, **options
        As they were given to `linformer_attention`, but for `out`.
    need : tuple of str, default ("dq", "dk", "dv", "dkey_projection")
        As in `attention_backward`, with ``"dkey_projection"`` and ``"dvalue_projection"``.

    Returns
    -------
    tuple
        A gradient for each name in `need`, with the shape and dtype of what it is the gradient of.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; nothing was computed.

    Notes
    -----
    The result is computed again, as `attention_backward` needs it; the projections are NumPy's products.
    """
    func = "linformer_attention_backward"
    arrays = (q, k, v, key_projection, value_projection)
    projections = projections_of(func, *arrays, options, ScaledOptions)
    named = dict(zip(("q", "k", "v", "key_projection", "value_projection"), arrays, strict=True))
    chain = Chain(func, need, named, options, ScaledOptions)
    keys, values = (projected(*each) for each in projections)
    args = attention_args(func, q, keys, values, return_lse=True, **options)
    cotangent = like_result(func, "dout", dout, args, np.shape(args.result[0]), [])
    dispatch.run(args, options.get("backend"))
    of_values = "dkey_projection" if value_projection is None else "dvalue_projection"
    uses = {"dk": ("dk", "dkey_projection"), "dv": ("dv", of_values)}
    call = chain.attend(args, cotangent, uses=uses)
    chain.add("dq", call.dq)
    lane = lane_dtype(args.q.dtype)
    for name, (matrix, x), dx in zip(("dk", "dv"), projections, (call.dk, call.dv), strict=True):
        if dx is not None:
            chain.add(name, np.swapaxes(matrix.astype(lane), -1, -2) @ dx)
            chain.add(uses[name][1], dx @ np.swapaxes(x.astype(lane), -1, -2))
    return chain.results()
