"""`linear_attention` under the names of its papers: what each fixes, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.options import DecayOptions, DeltaOptions, require_options
from fastattn._args.recurrent import recurrent_args
from fastattn._args.values import flag, float_array, real_array, short
from fastattn.functional._pieces import run
from fastattn.functional.feature_maps import unit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.options import ComputeOptions
    from fastattn._args.types import Array


def retention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, gamma: ArrayLike | None = None, **options: Unpack[DecayOptions]
) -> Any:
    """Retention (RetNet, Sun et al. 2023, arXiv:2307.08621): ``S_t = gamma S_{t-1} + k_t v_t^T``.

    Parameters
    ----------
    q, k, v : array_like
        As in `linear_attention`. RetNet turns q and k by their positions first (`positions.apply_rope`).
    gamma : array_like, (heads,), optional
        Each head's decay, above 0 and at most 1; the paper's ``1 - 2**(-5 - h)`` if left out.
    **options
        scale, normalize, eps, state, return_state, out_state, out, num_threads, backend: as in
        `linear_attention`, as what is returned and raised.
    """
    k, v = float_array("retention", "k", k), float_array("retention", "v", v)
    heads = max(k.shape[-3:-2] + v.shape[-3:-2], default=1)
    if gamma is None:
        log_gamma = np.log1p(-(2.0 ** (-5 - np.arange(heads))))
    else:
        decays = real_array("retention", "gamma", gamma).astype(np.float64)
        if not ((decays > 0) & (decays <= 1)).all():  # NaN is neither
            raise ValueError(f"retention(): gamma is {short(gamma)}; expected numbers above 0 and at most 1")
        if decays.shape not in ((), (1,), (heads,)):
            raise ValueError(f"retention(): gamma has shape {decays.shape}; expected (heads,) = {(heads,)}")
        log_gamma = np.log(decays)
    return _run("retention", q, k, v, options, DecayOptions, rule="decay", log_decay=log_gamma.reshape(-1))


def gated_linear_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, log_decay: ArrayLike, **options: Unpack[DecayOptions]
) -> Any:
    """GLA (Yang et al. 2024, arXiv:2312.06635): ``S_t = diag(a_t) S_{t-1} + k_t v_t^T``.

    Parameters
    ----------
    q, k, v : array_like
        As in `linear_attention`.
    log_decay : array_like, (..., heads, len, head_dim)
        log a_t: in the paper ``log_sigmoid(x W) / 16``.
    **options
        As in `retention`.
    """
    return _run("gated_linear_attention", q, k, v, options, DecayOptions, rule="gated", log_decay=log_decay)


def delta_net(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    *,
    unit_keys: bool = True,
    **options: Unpack[DeltaOptions],
) -> Any:
    """DeltaNet (Yang et al. 2024, arXiv:2406.06484): ``S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T``.

    Parameters
    ----------
    q, k, v : array_like
        As in `linear_attention`.
    beta : array_like, (..., heads, len)
    unit_keys : bool, default True
        Divide each query and key by its length first, as the paper does: `feature_maps.unit`.
    **options
        As in `retention`, but normalize and eps.
    """
    q, k = _unit("delta_net", q, k, unit_keys)
    return _run("delta_net", q, k, v, options, DeltaOptions, rule="delta", beta=beta)


def gated_delta_net(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    beta: ArrayLike,
    *,
    unit_keys: bool = True,
    **options: Unpack[DeltaOptions],
) -> Any:
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next: the delta rule on a_t S_{t-1}.

    Parameters
    ----------
    q, k, v : array_like
        As in `linear_attention`.
    log_decay, beta : array_like, (..., heads, len)
    unit_keys, **options
        As in `delta_net`.
    """
    q, k = _unit("gated_delta_net", q, k, unit_keys)
    return _run(
        "gated_delta_net", q, k, v, options, DeltaOptions, rule="gated_delta", log_decay=log_decay, beta=beta
    )


def _unit(func: str, q: ArrayLike, k: ArrayLike, wanted: bool) -> tuple[ArrayLike | Array, ArrayLike | Array]:
    """Queries and keys, of length 1 if `wanted`."""
    if not flag(func, "unit_keys", wanted):
        return q, k
    return unit(float_array(func, "q", q, 1)), unit(float_array(func, "k", k, 1))


def _run(func: str, q: Any, k: Any, v: Any, options: ComputeOptions, taken: type, **fixed: Any) -> Any:
    """`linear_attention` with what is `fixed`, for messages of `func`, which takes the options `taken`."""
    require_options(func, options, taken)
    return run(recurrent_args(func, q, k, v, **fixed, **options), options)
