"""Neighborhoods on a grid, whose queries are computed close together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.key_ranges import Resolved
from fastattn._args.options import NeighborhoodOptions, require_options
from fastattn._args.types import Array, ArrayLike, Shape, Unpack
from fastattn._args.values import operand
from fastattn._engine import dispatch
from fastattn.functional._composed_gradients import ComposedGradients, cotangents
from fastattn.functional._differentiable import Steps, differentiable
from fastattn.masks import Mask, neighborhood
from fastattn.masks._grid import neighborhood_sizes
from fastattn.masks._mask import ScoreShape

# Rows of the grid whose queries make up a tile: with 4, the 32 queries of a tile lie in 4 rows and 8 columns,
# and what they attend together is least. Of 2, 4, 6 and 8 the fastest: docs/dev/masks.md.
_STRIP = 4


@differentiable("q", "k", "v", options=NeighborhoodOptions)
def neighborhood_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    kernel: int | Shape,
    dilation: int | Shape = 1,
    causal: bool | tuple[bool, ...] = False,
    return_lse: bool = False,
    **options: Unpack[NeighborhoodOptions],
) -> Steps[Any]:
    """Attention of every place of a grid to those around it, as NATTEN defines it.

    What ``attention`` gives with ``mask=masks.neighborhood(...)`` on flattened grids, but faster: the queries
    of a tile lie close together on the grid, so that they attend much the same keys.

    Parameters
    ----------
    q : array_like, (..., heads_q, *spatial, head_dim)
        Queries; as many spatial axes as `kernel` has numbers.
    k, v : array_like, (..., heads_kv, *spatial, head_dim) and (..., heads_kv, *spatial, head_dim_v)
        Keys and values, on the same grid.
    kernel : int or tuple of int
        Places attended along each axis; an int is one axis. ``kernel * dilation`` is at most its length. At
        the borders the window moves inwards: as many keys everywhere.
    dilation : int or tuple of int, default 1
        Distance of neighbours along each axis.
    causal : bool or tuple of bool, default False
        Along such an axis only places up to the query's own, fewer at the border.
    return_lse : bool, default False
        As in `attention`.
    **options
        scale, softcap, sinks (..., heads_q), num_threads and backend of `attention`.

    Returns
    -------
    out : ndarray, (..., heads_q, *spatial, head_dim_v)
        In q's dtype.
    lse : ndarray, (..., heads_q, *spatial)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        As `attention`, and if the grids differ or the kernel does not fit.

    Notes
    -----
    Time is O(places * kernel places * head_dim) a head, more for small kernels: a tile attends what any of
    its queries does. No array is copied but keys and values where they are dilated. The ranges of
    keys take 16 bytes times the kernel's places along all axes but the last, a place. Sources: A. Hassani et
    al., "Neighborhood Attention Transformer", 2023, arXiv:2204.07143; A. Hassani, H. Shi, "Dilated
    Neighborhood Attention Transformer", 2022, arXiv:2209.15001.
    """
    require_options(options, NeighborhoodOptions)
    arrays, grid = _grid_of(q, k, v, kernel)
    n = len(grid)
    mask = neighborhood(*neighborhood_sizes(grid, kernel, dilation, causal))
    # How the rest fits together can be seen from one row of the grid.
    row: Any = (..., *(0,) * (n - 1), slice(None), slice(None))
    q_row, k_row, v_row = (x[row] for x in arrays)
    args = attention_args(q_row, k_row, v_row, return_lse=return_lse, **options)
    heads = (*args.batch_shape, args.heads_q)
    out = np.empty((*heads, *grid, args.head_dim_v), arrays[0].dtype)
    lse: Any = None if args.lse is None else np.empty((*heads, *grid), args.lse.dtype)
    groups = (args.heads_kv, args.heads_q // args.heads_kv)
    of_parts: Any = {**options}
    if args.sinks is not None:
        sinks = np.broadcast_to(args.sinks, heads)
        of_parts["sinks"] = sinks.reshape(*args.batch_shape, *groups, *(1,) * max(2, n))
    for part in _parts(mask):
        q_part, out_part = (part.queries(x, groups, 1) for x in (arrays[0], out))
        k_part, v_part = (part.keys(x) for x in arrays[1:])
        args = attention_args(
            q_part, k_part, v_part, part, out=out_part, return_lse=lse is not None, **of_parts
        )
        dispatch.run(args, options.get("backend"))
        if lse is not None:
            part.queries(lse, groups, 0)[...] = args.lse
    request = yield out if lse is None else (out, lse)

    # Unlike in the forward pass, the queries of a tile lie along the last axis of the grid.
    found = ComposedGradients(request, options)
    q_flat, k_flat, v_flat = (x.reshape(*x.shape[: -n - 1], prod(grid), x.shape[-1]) for x in arrays)
    args = attention_args(q_flat, k_flat, v_flat, mask, return_lse=True, **options)
    args.out, args.lse = out.reshape(args.out.shape), lse.reshape(args.out.shape[:-1])
    call = found.attend(args, *cotangents(args, request))
    for name, dx in (("dq", call.dq), ("dk", call.dk), ("dv", call.dv)):
        if dx is not None:
            found.add(name, dx.reshape(*dx.shape[:-2], *grid, dx.shape[-1]))
    return found.results()


def _grid_of(q: Any, k: Any, v: Any, kernel: Any) -> tuple[list[Array], Shape]:
    """Queries, keys and values as arrays, and the grid that all of them have."""
    n = len(kernel) if isinstance(kernel, (tuple, list)) else 1
    if not n:
        raise ValueError(f"(): kernel is {kernel}; expected an integer, or one for each spatial axis")
    copies: list[str] = []
    arrays = [operand(name, x, copies) for name, x in (("q", q), ("k", k), ("v", v))]
    grid = arrays[0].shape[-1 - n : -1]
    for name, x in zip("qkv", arrays, strict=True):
        if x.ndim < n + 2 or x.shape[-1 - n : -1] != grid:
            dims = "(..., heads, *spatial, head_dim)"
            expected = f"{dims} with {n} spatial axes, as kernel has, and q's grid, {grid}"
            raise wrong_shape(name, x, expected)
    if 0 in grid:
        shape = arrays[0].shape
        raise ValueError(f"(): q has shape {shape}, of a grid {grid}; expected at least one place")
    return arrays, grid


@dataclass(frozen=True, repr=False, eq=False)
class _Part(Mask):
    """Queries of one remainder by the dilation, and of strips of one height; the keys of that remainder.

    A strip's rows become the heads of a group, its columns their queries, everything else batch dimensions:
    views, and a tile, which takes the heads of a group query by query, is a compact piece of the grid.
    """

    remainder: tuple[slice, ...]  # along each axis
    rows: slice  # of the last axis but one, of those
    strip: int  # of so many rows
    grid: Shape  # of the remainder
    resolved: Resolved  # for its places, in order

    def queries(self, x: Array, groups: Shape, n_last: int) -> Array:
        """`x`, (*heads, *grid, ...), as (..., heads_kv, group, *outer, strips, strip, columns, ...)."""
        part: Any = (..., *self.remainder, *(slice(None),) * n_last)
        heads = x.ndim - len(self.grid) - n_last - 1
        return self.strips(x[part].reshape(*x.shape[:heads], *groups, *x[part].shape[heads + 1 :]), n_last)

    def strips(self, x: Array, n_last: int) -> Array:
        """`x`, (..., rows, columns, n_last axes), with its rows in strips; a single axis is a row."""
        row = None if len(self.grid) == 1 else self.rows
        part: Any = (..., row, *(slice(None),) * (n_last + 1))
        x = x[part]
        axis = x.ndim - n_last - 2
        return x.reshape(*x.shape[:axis], x.shape[axis] // self.strip, self.strip, *x.shape[axis + 1 :])

    def keys(self, x: Array) -> Array:
        """`x`, (..., heads, *grid, dim), as (..., heads, 1, ..., 1, places, dim): a head for each strip."""
        part: Any = (..., *self.remainder, slice(None))
        x = x[part]
        lead = x.shape[: -len(self.grid) - 1]
        ones = (1,) * (max(2, len(self.grid)) + 1)
        return x.reshape(*lead, *ones, int(np.prod(self.grid)), x.shape[-1])

    def resolve(self, shape: ScoreShape) -> Resolved:
        """The neighbours of every place."""
        begin, end, lists = self.resolved

        def of_strips(x: Any) -> Any:
            return None if x is None else self.strips(x.reshape(self.grid), 0)

        if lists is not None:
            lists = lists._replace(number=of_strips(lists.number))
        return Resolved(of_strips(begin), of_strips(end), lists)


def _parts(mask: neighborhood) -> Iterator[_Part]:
    """Parts, computed one after the other: for each remainder the strips, then the rows that are left."""
    resolved: dict[Shape, Resolved] = {}
    steps: Any = mask.dilation
    for offsets in product(*map(range, steps)):
        remainder = tuple(slice(offset, None, step) for offset, step in zip(offsets, steps, strict=True))
        grid = tuple(len(range(n)[part]) for n, part in zip(mask.shape, remainder, strict=True))
        if grid not in resolved:
            places = int(np.prod(grid))
            shape = ScoreShape((), 1, places, places, np.array(0))
            resolved[grid] = neighborhood(grid, mask.kernel, 1, mask.causal).resolve(shape)
        n_rows = grid[-2] if len(grid) > 1 else 1
        whole = n_rows - n_rows % _STRIP
        for rows, strip in ((slice(whole), _STRIP), (slice(whole, None), n_rows - whole)):
            if len(range(n_rows)[rows]):
                yield _Part(remainder, rows, strip, grid, resolved[grid])
