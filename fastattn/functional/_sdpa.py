"""`attention` as torch calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._args.attention import sdpa_args
from fastattn._engine import dispatch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> NDArray[Any]:
    """`attention` with the name, arguments and semantics of torch's function, on NumPy arrays.

    Parameters
    ----------
    query : array_like, (..., heads, len_q, head_dim)
        Queries; float32, float64, float16 or bfloat16. All leading dimensions broadcast, heads included.
    key : array_like, (..., heads, len_k, head_dim)
        Keys.
    value : array_like, (..., heads, len_k, head_dim_v)
        Values.
    attn_mask : array_like, optional
        Broadcasts to ``(..., heads, len_q, len_k)``. Bool: True where a query attends. Float: added to the
        scores.
    dropout_p : float, default 0.0
        Only 0.0: this is inference.
    is_causal : bool, default False
        Query i attends the keys up to key i: counted from the first key (top-left), where `attention` by
        default counts from the last. Not together with `attn_mask`.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    enable_gqa : bool, default False
        Allow fewer key and value heads than query heads: query's number a multiple of key's. Key and value
        have the same number, as torch's documentation asks; its code also takes two different ones.

    Returns
    -------
    ndarray, (..., heads, len_q, head_dim_v)
        In query's dtype.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or `dropout_p` is not 0. Messages on how query, key and value fit
        together call them q, k and v.

    Notes
    -----
    Where torch leaves things open, or does otherwise, the contract of `attention` holds: a query that may
    attend nothing gets 0 and not NaN; NaN and Inf in masked keys and values have no effect; of a float mask,
    -inf masks.
    """
    args = sdpa_args(
        "scaled_dot_product_attention", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    dispatch.run(args, None)
    result: NDArray[Any] = args.result
    return result
