"""The public functions: what they mean. `_args` checks, the kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from fastattn._args.attention import attention_args, partial_states
from fastattn._args.errors import named, put_name
from fastattn._args.options import AttentionOptions, Backend, NoOptions, WeightsOptions, require_options
from fastattn._args.types import ArrayLike, NDArray, Unpack
from fastattn._args.words import by_position, not_an_argument
from fastattn._engine import dispatch, settings
from fastattn._engine.tiles import count_tiles
from fastattn._reference import attention as reference

if TYPE_CHECKING:
    from fastattn._args.statistics import Statistics
    from fastattn.masks import Mask


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    stats: None = None,
    **options: Unpack[AttentionOptions],
) -> NDArray[Any]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    stats: None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    stats: Sequence[str],
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[Any], Statistics]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool,
    stats: Sequence[str] | None = None,
    **options: Unpack[AttentionOptions],
) -> Any: ...
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *more: object,
    mask: ArrayLike | Mask | None = None,
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
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    out: NDArray[Any] | None = None,
    return_lse: bool = False,
    stats: Sequence[str] | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
    **others: Unpack[NoOptions],
) -> Any:
    """Exact scaled dot-product attention, ``softmax(scale * q @ k.T) @ v``, fused.

    Every option combines with every other. To the scores happens, in this order: scale, softcap, bias and
    ALiBi, masks (mask, bias of -inf, causal, window, lengths, row ranges: a key must pass all of them),
    softmax with sinks.

    Parameters
    ----------
    q : array_like, (..., heads_q, len_q, head_dim)
        Queries: float32, float64, float16 or bfloat16 (of ml_dtypes). Any strides will do; only a head
        dimension that is not contiguous, unaligned elements and foreign byte order are copied. A 2-D array is
        one head.
    k : array_like, (..., heads_kv, len_k, head_dim)
        Keys. ``heads_q`` must be a multiple of ``heads_kv``: each key head serves as many consecutive query
        heads (grouped-query attention). Leading dimensions broadcast.
    v : array_like, (..., heads_kv, len_k, head_dim_v)
        Values. q, k and v have one dtype, or q is float32 and k and v are both float16 or both bfloat16, or
        k and v are both int8, with `k_scale` and `v_scale`.
    mask : array_like of bool or masks.Mask, optional
        True where a query attends a key. Broadcasts to ``(..., heads_q, len_q, len_k)``: one row of keys a
        sequence is ``mask[:, None, None, :]``, padding also `kv_lengths`. Tiles in which nobody attends are
        skipped. Or a structure from `fastattn.masks`, such as ``masks.causal() | masks.first_keys(9)``, which
        never becomes such an array: blocks of keys that a block of queries does not attend cost nothing.
    bias : array_like, optional
        Added to the scores; float32 or q's dtype; broadcasts as `mask`. An element of -inf hides its key, and
        no finite value does. Tiles that are all -inf are skipped.
    causal : bool, default False
        Let each query attend the keys up to its own position.
    window : (int or None, int or None), optional
        ``(left, right)``: keys from ``position - left`` to ``position + right``; None is unbounded.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    softcap : float, optional
        Positive; scores become ``softcap * tanh(scores / softcap)``.
    alibi_slopes : array_like, (..., heads_q), optional
        ``- slope * abs(position - j)`` is added to the score of key j. Integers, or any of the four
        dtypes, whatever q's.
    sinks : array_like, (..., heads_q), optional
        One logit a head that enters the softmax's denominator only, as a key without a value; -inf is none.
        Integers, or any of the four dtypes.
    kv_lengths : int or array_like of int, optional
        How many keys count, from the first: one number for all sequences, or one for each.
    q_offset : int or array_like of int, optional
        Position of the first query, from which causal, window and ALiBi count: one number for all sequences,
        or one for each. By default the last query has that of the last key, as with a KV cache:
        ``kv_lengths - len_q``, or ``len_k - len_q``. ``q_offset=0`` gives query i the position of key i.
    row_ranges : (array_like of int, array_like of int), optional
        ``(begin, end)``: query i attends keys ``begin[i] <= j < end[i]``. Both broadcast to
        ``(..., heads_q, len_q)`` and are clipped to ``[0, len_k]``; where end <= begin, the range is empty.
    k_scale, v_scale : array_like, (..., heads_kv, len_k), optional
        Both or neither: what each row of k and v, which are int8 then, is multiplied by. They stand for
        ``k * k_scale[..., None]`` and ``v * v_scale[..., None]``, and broadcast. Integers, or any of the four
        dtypes, but only float32 (float64 beside float64 queries) is read in place. `KVCache` makes them.
    dropout : float, default 0.0
        In [0, 1): each probability becomes 0 with this probability, and the others are divided by
        ``1 - dropout``. lse and `stats` are those before.
    seed : int, optional
        From 0 to 2**64 - 1; needed with `dropout`. It names the mask, which depends beside it on the number
        of query, key, head and batch item alone: docs/attention.md defines it. Gradients take the same two.
    out : ndarray, optional
        Where the result goes: its exact shape, q's dtype, last axis contiguous, no memory of an input.
    return_lse : bool, default False
        Return ``(out, lse)``, lse the natural logarithm of each row's softmax denominator, sink included.
    stats : sequence of str, optional
        Statistics of the probabilities p, by name, returned last, without ever holding p: ``"row_max"``, each
        row's largest score; ``"entropy"``, ``-sum p log p`` over its keys, in nats; ``"top_k:8"``, its 8 (or
        any number) largest probabilities and their keys; ``"key_sums"``, of each key the sum of p over all
        queries; ``"mean_weights"``, the mean of p over heads, which takes ``len_q * len_k`` numbers.
    num_threads : int, optional
        Threads of this call; default ``get_num_threads()``. Any number gives the same bits. No more are used
        than the machine has CPUs, or 64 if it has fewer. Where the system refuses to create so many
        (``ulimit -u``), there are fewer.
    backend : {"compiled", "numpy"}, optional
        Run this implementation and no other. By default the compiled one, or where it is missing, NumPy,
        which is said once by a `FallbackWarning`.
    *more, **others
        None: an error says by which name an argument is passed here.

    Returns
    -------
    out : ndarray, (..., heads_q, len_q, head_dim_v)
        In q's dtype; 2-D if q, k and v all are.
    lse : ndarray, (..., heads_q, len_q)
        Only with `return_lse`; float32, or float64 for float64.
    stats : dict
        Only with `stats`; in the dtype of lse: ``row_max`` and ``entropy`` (..., heads_q, len_q), ``top_k`` a
        pair (weights, keys), (..., heads_q, len_q, k) each, best first, of equal ones the first key,
        ``key_sums`` (..., heads_q, len_k), ``mean_weights`` (..., len_q, len_k).

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message says what came and what was expected; nothing was computed.

    See Also
    --------
    scaled_dot_product_attention : the same under torch's names, with its semantics.
    explain : which kernel would run on these arguments, what is skipped, what is copied.
    merge_states : join results over disjoint keys.

    Notes
    -----
    Time is O(len_q * len_k * (head_dim + head_dim_v)) a head, less what masks skip. Memory beyond inputs and
    output is O(threads) for the scores, one tile at a time, and 168 bytes a batch item;
    causal, window, lengths and row ranges take up to 48 bytes a query row, of each head where they differ by
    head; a structural mask 16 bytes a range. Products are accumulated in float32 (float64 for float64).

    A query that may attend nothing gets 0, and lse = -inf (with a sink, the sink). Whatever stands in keys
    and values that a query does not attend, NaN and Inf included, never reaches its result; NaN that it
    attends does.

    int8 keys and values are widened a block of 64 at a time, or with few query rows in registers alone. The
    error of the kernels is that of float32 on the widened arrays, and of rounding the result to q's dtype.
    Rounding k within ``abs(k_scale) / 2`` and v within ``abs(v_scale) / 2`` adds to it, over the keys that a
    query attends: with ``e = abs(scale) * abs(q).sum() * abs(k_scale).max() / 2``, at most e to each score
    and to the lse, and to each element of the result at most ``abs(v_scale).max() / 2 + tanh(e / 2) *
    (v.max() - v.min())``, where v is that element of the values. Softcap, biases, ALiBi and masks do not
    change that; a sink counts as a value of 0.

    Of `stats`, ``row_max``, ``entropy`` and ``top_k`` come with the result; the others compute the scores
    again. ``top_k`` keeps a sorted list a row, which a key enters in O(k): it is meant for tens of keys; of
    hundreds `attention_weights` and ``np.argpartition`` are faster. A sink takes its share of the
    probabilities and has no entry: not in the entropy, no key. Fewer keys than k give weights of 0 and keys
    of -1; a query that attends nothing has row_max -inf and entropy 0, one whose lse is NaN has NaN.

    The same input gives the same bits on one instruction set: run after run, and whatever else is in the
    batch. Up to 8 query rows of a key head have a kernel of their own. Padding may change the last
    bits of such rows in two ways: if it makes more than 8 rows of them, or if it adds keys that only a mask
    hides. Self-attention never is affected.

    Sources: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867;
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
    with IO-Awareness", 2022, arXiv:2205.14135.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k, v = np.ones((1, 8, 2, 64)), np.ones((1, 2, 5, 64)), np.ones((1, 2, 5, 64))
    >>> fastattn.attention(q, k, v, causal=True).shape
    (1, 8, 2, 64)
    """
    try:
        if more:
            raise by_position((q, k, v, *more), attention)
        if others:
            raise not_an_argument(others, attention)
        args = attention_args(
            q, k, v, mask, bias, causal, window, scale, softcap, alibi_slopes, sinks, kv_lengths,
            q_offset, row_ranges, out, return_lse, num_threads, backend, stats, ("q", "k", "v"),
            "k_scale and v_scale", k_scale, v_scale, dropout, seed,
        )  # fmt: skip
    except Exception as error:
        put_name("attention", error)
        raise
    dispatch.run(args, backend)
    return args.result


@named("attention_weights")
def attention_weights(q: ArrayLike, k: ArrayLike, **options: Unpack[WeightsOptions]) -> NDArray[Any]:
    """Compute the probabilities that `attention` averages the values with, for looking at them.

    The parameters and errors are those of `attention`. The result takes O(len_q * len_k) memory a head, which
    `attention` does not, and is computed in NumPy.

    Returns
    -------
    ndarray, (..., heads_q, len_q, len_k)
        In q's dtype. Rows sum to 1; with a sink to less, and to 0 where a query may attend nothing. 2-D if q
        and k are.
    """
    require_options(options, WeightsOptions)
    names, scale = ("q", "k", "k"), options.get("k_scale")
    args = attention_args(q, k, k, names=names, scales="k_scale", v_scale=scale, **options)
    probs = reference.weights(args)
    return probs[0] if args.result.ndim == 2 else probs


@named("merge_states")
def merge_states(
    outs: Sequence[ArrayLike] | NDArray[Any], lses: Sequence[ArrayLike] | NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Merge results of the same queries over disjoint keys: exact, as if all keys had been there at once.

    Parameters
    ----------
    outs : sequence of array_like, (..., len_q, head_dim_v) each
        Results of `attention`, or an array with the parts along its first axis.
    lses : sequence of array_like, (..., len_q) each
        Their lses. Where there are sinks, one part carries them, and the others are computed without.

    Returns
    -------
    out : ndarray, (..., len_q, head_dim_v)
        In the parts' dtype; merged in float32, or float64 for float64.
    lse : ndarray, (..., len_q)
        Of all keys; float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        If there are no parts, or shapes or dtypes differ.

    Notes
    -----
    O(parts * len_q * head_dim_v). A part whose lse is -inf has no weight, whatever stands in it.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> q, k, v = np.ones((2, 8)), np.ones((6, 8)), np.arange(48.0).reshape(6, 8)
    >>> parts = [fastattn.attention(q, k[j], v[j], return_lse=True) for j in (slice(0, 4), slice(4, 6))]
    >>> out, lse = fastattn.merge_states(*zip(*parts))
    >>> np.allclose(out, fastattn.attention(q, k, v))
    True
    """
    out_parts, lse_parts, out, lse = partial_states(outs, lses)
    reference.merge_states(out_parts, lse_parts, out, lse)
    return out, lse


@named("explain")
def explain(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool = False,
    stats: Sequence[str] | None = None,
    **options: Unpack[AttentionOptions],
) -> settings.Report:
    """Say how `attention` would run on these arguments, without running it.

    The parameters and errors are those of `attention`.

    Returns
    -------
    Report
        A dict that prints as a table. ``backend``, ``why_numpy`` (None if compiled); what the kernel plans,
        such as ``kernel`` ("tile", or "dot" for few query rows), ``isa``, ``block_q`` and ``block_k``: query
        rows, of all heads of a group, and keys of a tile; ``split_k``, into runs of how many keys the work on
        them is cut (None: it is not); ``tiles``, how many there are, of which ``tiles_skipped`` are never
        touched, ``tiles_full`` need no test and ``tiles_edge`` do; ``second_pass``, whether statistics need
        the scores once more; ``copies``, what is copied first and why; ``conversions``, what is converted or
        gathered by the kernel, a block at a time; ``num_threads``.

    Notes
    -----
    Tiles are counted from row ranges, the mask and the -inf of the bias, in one pass over the numbers that
    these two hold in memory: without them, any number of keys takes no time.
    """
    require_options(options, AttentionOptions, "return_lse", "stats")
    args = attention_args(
        q, k, v, return_lse=return_lse, stats=stats, scales="k_scale and v_scale", **options
    )
    backend = options.get("backend")
    plan = dispatch.plan(args, backend)
    conversions = plan.pop("conversions")
    tiles = count_tiles(args, plan["block_q"], plan["block_k"])
    return settings.Report(
        backend=backend or settings.default_backend(),
        why_numpy=settings.why_numpy(backend),
        **plan,
        tiles=tiles.total,
        tiles_skipped=tiles.skipped,
        tiles_full=tiles.full,
        tiles_edge=tiles.edge,
        second_pass=args.statistics is not None and args.statistics.second_pass,
        copies=args.copies,
        conversions=conversions,
        num_threads=args.num_threads,
    )
