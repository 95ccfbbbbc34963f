"""Keys and values in pages: the argument `block_table`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.types import Array, Ints, Shape
from fastattn._args.values import integer_array, require_broadcast


def page_table(x: Any, k: Shape, v: Shape, batch_shape: Shape, names: tuple[str, ...] = ("k", "v")) -> Array:
    """`x`, (*batch_shape, n): the pages of each sequence, of keys and values with these shapes."""
    for name, shape in zip(names, (k, v), strict=True):
        if len(shape) != 4 or not shape[0] or not shape[2]:
            expected = "(pages, heads_kv, page, head_dim), none of them 0, as block_table is given"
            raise ValueError(f"(): {name} has shape {shape}; expected {expected}")
    if k[0] != v[0]:
        raise ValueError(f"(): {names[1]} has {v[0]} pages; expected {k[0]}, as {names[0]} has")
    table = integer_array("block_table", x)
    if not table.ndim:
        raise wrong_shape("block_table", table, "(..., pages of a sequence)")
    shape = (*batch_shape, table.shape[-1])
    require_broadcast("block_table", table.shape, shape, "(..., pages of a sequence)")
    return np.broadcast_to(table, shape)


def read_pages(table: Array, first: Ints | None, last: Ints, pages: int, page: int, name: str = "k") -> Array:
    """`table` as int32, with 0 for each page that is not read; raise if one that is read does not exist.

    Of each sequence, keys first <= j < last are read; both broadcast to its batch dimensions.
    """
    begins = np.arange(0, table.shape[-1] * page, page)
    some = begins < last[..., None]
    if first is not None:
        some &= begins + page > first[..., None]
    used = np.where(some, table, 0)
    if used.view(f"u{used.itemsize}").max(initial=0) >= pages:  # a negative number, too
        place = tuple(int(x[0]) for x in np.nonzero((used < 0) | (used >= pages)))
        came = f"block_table[{', '.join(map(str, place))}] is {used[place]}"
        raise ValueError(f"(): {came}; expected 0 to {pages - 1}, the pages of {name}")
    return used.astype(np.int32)
