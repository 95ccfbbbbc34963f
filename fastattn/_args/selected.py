"""The arguments of attention to selected keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.types import SelectedArgs
from fastattn._args.values import as_array, integer, require_broadcast

_DIMS = "(..., heads_kv, len_q, any number)"


def selected_args(
    q: Any, k: Any, v: Any, selected: Any, block_size: Any, return_lse: Any, options: Any
) -> SelectedArgs:
    """Check and normalise the arguments of `fastattn.functional.selected_attention`."""
    args = attention_args(
        q, k, v, return_lse=return_lse, names=("q", "k", "v"), scales="k_scale and v_scale", **options
    )
    size = integer("block_size", block_size, 1, 2**31 - 1)
    array = as_array("selected", selected)
    if array.dtype.kind not in "iu":
        raise wrong_dtype("selected", array, "integers: keys, or blocks of keys")
    one_head = args.result.ndim == 2 if args.lse is None else args.result[0].ndim == 2
    if array.ndim < (2 if one_head else 3):
        raise wrong_shape("selected", array, "(len_q, any number)" if one_head else _DIMS)
    if array.ndim == 2:
        array = array[None]
    shape = (*args.batch_shape, args.heads_kv, args.len_q, array.shape[-1])
    require_broadcast("selected", array.shape, shape, _DIMS)
    count = -(-args.len_k // size)
    if count >= 2**31:
        raise ValueError(f"(): k has {count} blocks of {size} keys; expected fewer than {2**31}")
    if array.size and not (array.min() >= -1 and array.max() < count):
        wrong = array.min() if array.min() < -1 else array.max()
        what = "keys" if size == 1 else f"blocks of {size} keys"
        some = f"0 to {count - 1}, as k has {count} {what}, or " if count else ""
        raise ValueError(f"(): selected has {wrong}; expected {some}-1 for none")
    return SelectedArgs(args, np.asarray(array, np.int64), size)
