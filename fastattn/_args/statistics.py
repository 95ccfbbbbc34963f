"""What `stats=` asks for: its names, checked, and the arrays that the kernels fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from fastattn._args.types import StatisticsArgs
from fastattn._args.values import short

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastattn._args.types import Array, Shape

NAMES = ("row_max", "entropy", "topk:k", "key_sums", "mean_weights")


class TopK(NamedTuple):
    """The largest weights of each row, best first, and the keys that have them."""

    weights: NDArray[Any]  # (..., heads_q, len_q, k), 0 where fewer keys have a weight
    keys: NDArray[np.int64]  # the same shape, -1 there


class Statistics(TypedDict, total=False):
    """What `attention` returns for `stats`: the entries that were asked for."""

    row_max: NDArray[Any]
    entropy: NDArray[Any]
    topk: TopK
    key_sums: NDArray[Any]
    mean_weights: NDArray[Any]


def statistics_args(
    func: str, stats: Any, heads: Shape, len_q: int, len_k: int, lane: np.dtype[Any], one_head: bool
) -> tuple[StatisticsArgs, Statistics]:
    """Check the names in `stats`; `heads` is (*batch_shape, heads_q). Arrays, and as a caller sees them."""
    if isinstance(stats, str) or not isinstance(stats, Sequence):
        raise TypeError(f"{func}(): stats is {short(stats)}; expected a tuple of {', '.join(NAMES)}")
    args, result = StatisticsArgs(), Statistics()

    def seen(x: Array) -> Array:
        return x[0] if one_head else x

    for text in stats:
        name, k = _name(func, text)
        if name in result:
            raise ValueError(f"{func}(): stats has {name} twice, in {tuple(stats)!r}; expected it once")
        if name == "topk":
            weights, keys = np.zeros((*heads, len_q, k), lane), np.full((*heads, len_q, k), -1, np.int64)
            args.top_weights, args.top_keys = weights[..., :len_k], keys[..., :len_k]
            result["topk"] = TopK(seen(weights), seen(keys))
        elif name == "row_max":
            args.row_max = np.empty((*heads, len_q), lane)
            result["row_max"] = seen(args.row_max)
        elif name == "entropy":
            args.entropy = np.empty((*heads, len_q), lane)
            result["entropy"] = seen(args.entropy)
        elif name == "key_sums":
            args.key_sums = np.zeros((*heads, len_k), lane)
            result["key_sums"] = seen(args.key_sums)
        else:
            args.mean_weights = np.zeros((*heads[:-1], 1, len_q, len_k), lane)
            result["mean_weights"] = args.mean_weights[..., 0, :, :]
    if args.second_pass:
        args.norm = np.empty((*heads, len_q, 2), lane)
    return args, result


def _name(func: str, text: Any) -> tuple[str, int]:
    """The statistic's name, and the k of topk."""
    if not isinstance(text, str):
        raise TypeError(f"{func}(): stats has an entry {short(text)}; expected one of {', '.join(NAMES)}")
    name, colon, number = text.partition(":")
    if name == "topk" and number.isdecimal() and len(number) < 10 and int(number) > 0:
        return name, int(number)
    if name == "topk":
        raise ValueError(
            f"{func}(): stats has an entry {text[:40]!r}; expected topk:k with k from 1 to 999999999, as"
            f" topk:8"
        )
    if colon or name not in NAMES:
        raise ValueError(f"{func}(): stats has an entry {short(text)}; expected one of {', '.join(NAMES)}")
    return name, 0
