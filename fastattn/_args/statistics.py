"""The argument `stats`: its names, and the arrays for the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from fastattn._args.types import NDArray, Shape, StatisticsArgs
from fastattn._args.values import short

NAMES = ("row_max", "entropy", "top_k:k", "key_sums", "mean_weights")


class TopK(NamedTuple):
    """The largest weights of each row, in descending order, and their keys."""

    weights: NDArray[Any]  # (..., heads_q, len_q, k); 0 after the last key that the row attends
    keys: NDArray[np.int64]  # the same shape; -1 there


class Statistics(TypedDict, total=False):
    """Statistics that `attention` returns for `stats`; only the requested entries exist."""

    row_max: NDArray[Any]
    entropy: NDArray[Any]
    top_k: TopK
    key_sums: NDArray[Any]
    mean_weights: NDArray[Any]


def statistics_args(
    stats: Any, heads: Shape, len_q: int, len_k: int, lane: np.dtype[Any], one_head: bool
) -> tuple[StatisticsArgs, Statistics]:
    """Check the names in `stats`, and make the arrays: for the kernels, and as the caller sees them.

    `heads` is (*batch_shape, heads_q).
    """
    if isinstance(stats, str) or not isinstance(stats, Sequence):
        raise TypeError(f"(): stats is {short(stats)}; expected a tuple of {', '.join(NAMES)}")
    args, result = StatisticsArgs(), Statistics()

    seen: Any = 0 if one_head else ...
    shapes = {"row_max": (*heads, len_q), "entropy": (*heads, len_q), "key_sums": (*heads, len_k)}
    for text in stats:
        name, k = _name(text)
        if name in result:
            raise ValueError(f"(): stats has {name} twice, in {tuple(stats)!r}; expected it once")
        if name == "top_k":
            weights, keys = np.zeros((*heads, len_q, k), lane), np.full((*heads, len_q, k), -1, np.int64)
            args.top_weights, args.top_keys = weights[..., :len_k], keys[..., :len_k]
            args.n_top = min(k, len_k)
            result["top_k"] = TopK(weights[seen], keys[seen])
        elif name == "mean_weights":
            args.mean_weights = np.zeros((*heads[:-1], 1, len_q, len_k), lane)
            result["mean_weights"] = args.mean_weights[..., 0, :, :]
        else:
            array = np.zeros(shapes[name], lane)
            setattr(args, name, array)
            result[name] = array[seen]  # type: ignore[literal-required]
    if args.second_pass:
        args.norm = np.empty((*heads, len_q, 2), lane)
    return args, result


def _name(text: Any) -> tuple[str, int]:
    """Check one entry of `stats`; return its name, and k for "top_k:k"."""
    if not isinstance(text, str):
        raise TypeError(f"(): an entry of stats is {short(text)}; expected one of {', '.join(NAMES)}")
    name, colon, number = text.partition(":")
    if name == "top_k" and number.isdecimal() and len(number) < 10 and int(number) > 0:
        return name, int(number)
    if name == "top_k":
        expected = "top_k:k with k from 1 to 999999999, as top_k:8"
        raise ValueError(f"(): an entry of stats is {short(text)}; expected {expected}")
    if colon or name not in NAMES:
        raise ValueError(f"(): an entry of stats is {short(text)}; expected one of {', '.join(NAMES)}")
    return name, 0
