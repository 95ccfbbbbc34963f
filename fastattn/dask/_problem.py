"""The arguments of attention over blocks, checked, and the blocks of scores that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.attention import raise_shapes, window_sides
from fastattn._args.options import BlockOptions, require_options
from fastattn._args.types import Array, Ints, Shape, lane_dtype
from fastattn._args.values import (
    MAX_POSITION,
    broadcast_batch,
    flag,
    head_values,
    integer,
    number,
    of_sequences,
    require_dtypes,
    short,
)
from fastattn._engine.settings import require_backend

_NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Problem:
    """Sizes and options, the same for all blocks; arrays of options are broadcast to all items."""

    batch_shape: Shape
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim_v: int
    dtype: np.dtype[Any]  # of q
    causal: bool
    left: int | None
    right: int | None
    offset: Ints  # (*batch,): the position of the first query
    lengths: Ints  # (*batch,)
    of_heads: Mapping[str, Array]  # sinks, alibi_slopes: (*batch, heads_q)
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
    require_dtypes(dict(zip(_NAMES, arrays, strict=True)))
    q, k, v = (x.shape for x in arrays)
    fits = k[-1] == q[-1] and v[-3:-1] == k[-3:-1]
    if not fits or 0 in (q[-3], k[-3], q[-1], v[-1]) or q[-3] % k[-3]:
        raise_shapes(_NAMES, (q, k, v))
    batch_shape = broadcast_batch(q=q[:-3], k=k[:-3], v=v[:-3])
    (heads_q, len_q, _), (heads_kv, len_k, _) = q[-3:], k[-3:]
    dtype, lane = arrays[0].dtype, lane_dtype(arrays[0].dtype)

    causal = flag("causal", options.get("causal", False))
    left, right = window_sides(options.get("window"))
    plain: dict[str, Any] = {"num_threads": 1}
    if options.get("num_threads") is not None:
        plain["num_threads"] = integer("num_threads", options["num_threads"], 1)
    for name in ("scale", "softcap"):
        if options.get(name) is not None:
            plain[name] = number(name, options[name], lane, positive=name == "softcap")
    if options.get("backend") is not None:
        require_backend(options["backend"])
        plain["backend"] = options["backend"]
    of_heads = {
        name: np.broadcast_to(
            head_values(name, options[name], (*batch_shape, heads_q), lane, []),
            (*batch_shape, heads_q),
        )
        for name in ("sinks", "alibi_slopes")
        if options.get(name) is not None
    }
    lengths = offset = None
    if options.get("kv_lengths") is not None:
        lengths = of_sequences("kv_lengths", options["kv_lengths"], batch_shape, 0, len_k)
    if options.get("q_offset") is not None:
        offset = of_sequences("q_offset", options["q_offset"], batch_shape, -MAX_POSITION, MAX_POSITION)
    else:
        offset = np.asarray((len_k if lengths is None else lengths) - len_q)
        positional = causal or left is not None or right is not None or "alibi_slopes" in of_heads
        if lengths is not None and positional and (offset < 0).any():
            raise ValueError(
                f"(): kv_lengths has {lengths.min()} for {len_q} queries, and without q_offset the"
                f" last query is at the last key; expected q_offset=0 (query i is at key i), or another"
            )
    return Problem(
        batch_shape=batch_shape,
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=len_q,
        len_k=len_k,
        head_dim_v=v[-1],
        dtype=dtype,
        causal=causal,
        left=left,
        right=right,
        offset=np.broadcast_to(offset, batch_shape),
        lengths=np.broadcast_to(len_k if lengths is None else lengths, batch_shape),
        of_heads=of_heads,
        plain=plain,
    )


def chunk_sizes(chunks: Any) -> tuple[int, int]:
    """Rows and keys of a block."""
    if not isinstance(chunks, (tuple, list)) or len(chunks) != 2:
        expected = "a pair (rows, keys) of integers"
        raise TypeError(f"(): chunks is {short(chunks)}; expected {expected}")
    rows, keys = (integer(f"chunks[{i}]", n, 1) for i, n in enumerate(chunks))
    return rows, keys
