"""The arguments of attention over blocks, checked, and the blocks of scores that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.attention import attention_args, lengths_of, raise_shapes, window_sides
from fastattn._args.options import BlockOptions, require_options
from fastattn._args.types import ARRAYS_OF_HEADS, Array, Ints, Shape
from fastattn._args.values import flag, integer, short

_PLACES = ("causal", "window", "kv_lengths", "q_offset")  # options that say where a block lies


@dataclass(frozen=True)
class Problem:
    """Sizes and options, the same for all blocks; arrays of options are broadcast to all items."""

    batch_shape: Shape
    head_dim_v: int
    dtype: np.dtype[Any]  # of q
    causal: bool
    left: int | None
    right: int | None
    offset: Ints  # (*batch,): the position of the first query
    lengths: Ints  # (*batch,)
    of_heads: Mapping[str, Array]  # (*batch, heads_q)
    plain: Mapping[str, Any]  # what every block is told as it is

    def needs(self, batch: tuple[slice, ...], rows: range, keys: range) -> bool:
        """Whether some row attends some key, in some item of the batch."""
        if not (rows and keys):
            return False
        offset, found = self.offset[batch], keys.start < self.lengths[batch]
        if self.causal:
            found = found & (keys.start <= offset + rows[-1])
        if self.right is not None:
            found = found & (keys.start <= offset + rows[-1] + self.right)
        if self.left is not None:
            found = found & (keys[-1] >= offset + rows.start - self.left)
        return bool(np.any(found))

    def options(
        self, batch: tuple[slice, ...], heads: slice, rows: range, keys: range, sinks: bool
    ) -> dict[str, Any]:
        """Options of `fastattn.attention` for one block; one block of each row carries the sinks."""
        options = dict(self.plain, causal=self.causal, window=(self.left, self.right))
        options["q_offset"] = self.offset[batch] + (rows.start - keys.start)
        lengths = np.clip(self.lengths[batch] - keys.start, 0, len(keys))
        if (lengths < len(keys)).any():
            options["kv_lengths"] = lengths
        for name, x in self.of_heads.items():
            if sinks or name != "sinks":
                options[name] = x[(*batch, heads)]
        return options


def problem(arrays: tuple[Any, Any, Any], options: Mapping[str, Any]) -> Problem:
    """Check how q, k and v, arrays of three dimensions or more, fit together, and all options."""
    require_options(options, BlockOptions)
    q, k, v = (x.shape for x in arrays)
    fits = k[-1] == q[-1] and v[-3:-1] == k[-3:-1]
    if not fits or 0 in (q[-3], k[-3], q[-1], v[-1]) or q[-3] % k[-3]:
        raise_shapes(("q", "k", "v"), (q, k, v))
    plain = {name: x for name, x in options.items() if name not in _PLACES and x is not None}
    # All but places is checked as for a call without queries and keys, whose arrays take no memory.
    empty: list[Any] = [np.empty((*x.shape[:-2], 0, x.shape[-1]), x.dtype) for x in arrays]
    args = attention_args(*empty, **plain)
    of_heads = {
        name: np.broadcast_to(getattr(args, name), (*args.batch_shape, args.heads_q))
        for name in ARRAYS_OF_HEADS
        if plain.pop(name, None) is not None
    }
    causal = flag("causal", options.get("causal", False))
    left, right = window_sides(options.get("window"))
    positional = causal or left is not None or right is not None or args.has_distances
    lengths, offset = (
        np.broadcast_to(x, args.batch_shape)
        for x in lengths_of(
            options.get("kv_lengths"), options.get("q_offset"), args.batch_shape, q[-2], k[-2], positional
        )
    )
    plain = {"num_threads": 1, **plain}
    dtype = args.q.dtype
    return Problem(args.batch_shape, v[-1], dtype, causal, left, right, offset, lengths, of_heads, plain)


def chunk_sizes(chunks: Any) -> tuple[int, int]:
    """Rows and keys of a block."""
    if not isinstance(chunks, (tuple, list)) or len(chunks) != 2:
        expected = "a pair (rows, keys) of integers"
        raise TypeError(f"(): chunks is {short(chunks)}; expected {expected}")
    rows, keys = (integer(f"chunks[{i}]", n, 1) for i, n in enumerate(chunks))
    return rows, keys
