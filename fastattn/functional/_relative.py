"""Relative positions whose scores depend on the query's or the key's content, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fastattn._args.options import RelativeOptions, ShawOptions
from fastattn.functional._pieces import attend_by_rows, band_of, join, run
from fastattn.functional._relative_args import disentangled_args, shaw_args, transformer_xl_args

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array


@overload
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ShawOptions],
) -> Array: ...
@overload
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[ShawOptions],
) -> tuple[Array, Array]: ...
@np.errstate(all="ignore")  # as in the kernels
def shaw_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_table: ArrayLike,
    value_table: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[ShawOptions],
) -> Any:
    """Attention with Shaw's relative positions: to ``k_j + a_r``, of ``v_j + b_r``, r the clipped ``j - i``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    key_table : array_like, (2 * clip + 1, head_dim)
        a: of the distances -clip to clip of a key from the query, in this order; clip is at least 1.
    value_table : array_like, (2 * clip + 1, head_dim_v), optional
        b; 0 if left out.
    **options
        Keyword arguments of `attention`, but softcap, alibi_slopes and stats, with one q_offset for all.

    Notes
    -----
    Keys at a distance of clip and more have one row of the tables on either side: they are attended with that
    added to them, and what is between with a bias, of 128 queries at a time; three results that are joined by
    their lse. Beside `attention`'s cost O(len_q * (128 + clip) * head_dim) a head in NumPy, a copy of k and v
    for either side, and no array of len_q x len_k. Source: P. Shaw, J. Uszkoreit, A. Vaswani, "Self-Attention
    with Relative Position Representations", 2018, arXiv:1803.02155.
    """
    tables = (key_table, value_table)
    x = shaw_args("shaw_attention", q, k, v, *tables, options, ShawOptions, return_lse)
    parts = [x.near()]
    for piece in x.pieces(parts[0]):
        run(piece.args, options)
        if x.of_values is not None:
            weights = piece.probabilities()
            run(weights, options)
            probs = piece.columns(weights.out.shape[:-2], x.of_values.dtype)
            probs[..., piece.inside] = weights.out
            piece.args.out += (band_of(probs, piece.n) @ x.of_values[1:-1]).astype(piece.args.out.dtype)
    for _, part in x.far():
        run(part, options)
        parts.append(part)
    join(parts, x.args)
    return x.args.result


@overload
def transformer_xl_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RelativeOptions],
) -> Array: ...
@overload
def transformer_xl_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[RelativeOptions],
) -> tuple[Array, Array]: ...
def transformer_xl_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    relative_keys: ArrayLike,
    content_bias: ArrayLike | None = None,
    position_bias: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[RelativeOptions],
) -> Any:
    """Transformer-XL's attention: scores ``scale * ((q_i + u) @ k_j + (q_i + w) @ r_d)``, ``d = i - j``.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors; k and v begin with the memory of the segment before.
    relative_keys : array_like, (n, head_dim) or (..., heads_q, n, head_dim)
        r: projected vectors, one for each distance, in falling order from ``q_offset + len_q - 1``, that of
        the last query and the first key: ``len_q + len_k - 1`` of them. With causal those down to distance 0
        are enough, by default len_k of them, as in the paper.
    content_bias, position_bias : array_like, (heads_q, head_dim), optional
        u and w (the paper's v); 0 if left out.
    **options
        Keyword arguments of `attention`, but softcap and stats, with one q_offset for all.

    Notes
    -----
    The relative shift is a view with another stride, and the term of positions is made for a run of queries
    at a time, about 2**18 scores a head. Time is that of a dense bias and of ``q @ relative_keys.T`` in
    NumPy, O(len_q * (len_q + len_k) * head_dim) a head. Source: Z. Dai et al., "Transformer-XL: Attentive
    Language Models beyond a Fixed-Length Context", 2019, arXiv:1901.02860.
    """
    x = transformer_xl_args(
        "transformer_xl_attention",
        q,
        k,
        v,
        relative_keys,
        content_bias,
        position_bias,
        options,
        RelativeOptions,
        return_lse,
    )
    attend_by_rows(x.args, options.get("backend"), x.bias_of)
    return x.args.result


@overload
def disentangled_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RelativeOptions],
) -> Array: ...
@overload
def disentangled_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    return_lse: Literal[True],
    **options: Unpack[RelativeOptions],
) -> tuple[Array, Array]: ...
def disentangled_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position_keys: ArrayLike | None = None,
    position_queries: ArrayLike | None = None,
    *,
    max_distance: int | None = None,
    return_lse: bool = False,
    **options: Unpack[RelativeOptions],
) -> Any:
    """DeBERTa's attention: scores ``scale * (q_i @ k_j + q_i @ kr_b + k_j @ qr_b)``, b of i - j.

    Parameters
    ----------
    q, k, v, return_lse
        As in `attention`, like the results and errors.
    position_keys, position_queries : array_like, (heads_q, 2 * span, head_dim)
        kr (content to position) and qr (position to content): the projected embeddings of relative
        positions, by their bucket b. At least one of both.
    max_distance : int, optional
        With it distances beyond ``span // 2`` share buckets, logarithmically up to this one, as in version 2
        (``max_relative_positions``, where span is ``position_buckets``). Without, distance d is in bucket
        ``clip(d + span, 0, 2 * span - 1)``.
    **options
        Keyword arguments of `attention`, but softcap and stats, with one q_offset for all.
        Scale is by default ``1 / sqrt(head_dim * terms)``, of 2 or 3 terms.

    Notes
    -----
    Both terms depend on content and position: they are gathered into a bias for a run of queries at a time,
    about 2**18 scores a head. Time is that of a dense bias, of two gathers of len_q * len_k numbers a head,
    and of the products with the tables. Source: P. He et al., "DeBERTa: Decoding-enhanced BERT with
    Disentangled Attention", 2020, arXiv:2006.03654.
    """
    x = disentangled_args(
        "disentangled_attention",
        q,
        k,
        v,
        position_keys,
        position_queries,
        max_distance,
        options,
        RelativeOptions,
        return_lse,
    )
    attend_by_rows(x.args, options.get("backend"), x.bias_of)
    return x.args.result
