"""The public functions: what they mean. What they check is in `_check.py`, what they compute in the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn import _backend, reference
from fastattn._check import attention_args

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    row_ranges: tuple[ArrayLike, ArrayLike] | None = None,
    out: NDArray[Any] | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
    backend: str | None = None,
) -> Any:
    """Exact attention, softmax(scale * q @ k.T + ...) @ v, in O(length) memory."""
    if backend is not None:
        _backend.backend_name("attention", backend)
    args = attention_args("attention", q, k, v, mask, bias, causal, window, scale, softcap, alibi_slopes, sinks, kv_lengths,
                          q_offset, row_ranges, out, return_lse, num_threads)  # fmt: skip
    _backend.run(args, backend)
    return args.result


def attention_weights(q: ArrayLike, k: ArrayLike, **options: Any) -> NDArray[Any]:
    """Probabilities (..., heads_q, len_q, len_k)."""
    return reference.weights(attention_args("attention_weights", q, k, k, **options))
