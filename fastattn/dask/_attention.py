"""Attention over blocks: a task for each needed block of scores, and a tree of tasks that merges them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate, product
from operator import getitem
from typing import Any, Literal, overload

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from fastattn._args.errors import named
from fastattn._args.options import BlockOptions
from fastattn._args.types import Array, Shape, Unpack, lane_dtype
from fastattn._args.values import flag
from fastattn.dask._arrays import aligned, key, operand
from fastattn.dask._problem import Problem, chunk_sizes, problem
from fastattn.functional._attention import attention as attend
from fastattn.functional._attention import merge_states

State = tuple[Array, Array]

_CHILDREN = 4  # states that one task of the tree merges


@overload
def attention(
    q: Any, k: Any, v: Any, *, chunks: tuple[int, int], return_lse: Literal[False] = False,
    **options: Unpack[BlockOptions],
) -> da.Array: ...  # fmt: skip
@overload
def attention(
    q: Any, k: Any, v: Any, *, chunks: tuple[int, int], return_lse: Literal[True],
    **options: Unpack[BlockOptions],
) -> tuple[da.Array, da.Array]: ...  # fmt: skip
@named("attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    chunks: tuple[int, int],
    return_lse: bool = False,
    **options: Unpack[BlockOptions],
) -> Any:
    """Exact attention of Dask arrays, computed lazily in blocks by any number of workers.

    Each needed block of scores is one task, whose result is a part of `out` and `lse`. A fixed tree of tasks
    merges up to four of these at a time, so the bits do not depend on the workers.

    Parameters
    ----------
    q : dask.array.Array, (..., heads_q, len_q, head_dim)
        float32, float64, float16 or bfloat16.
    k : dask.array.Array, (..., heads_kv, len_k, head_dim)
        Keys; dtypes and shapes fit as in `fastattn.attention`.
    v : dask.array.Array, (..., heads_kv, len_k, head_dim_v)
        Values.
    chunks : (int, int)
        Queries and keys per block, ``(rows, keys)``. Batch axes are split as in q, heads as in k; other
        arrays are rechunked.
    return_lse : bool, default False
        Return ``(out, lse)``, as `fastattn.attention` does.
    **options
        Keyword arguments of `fastattn.attention` except mask, bias, row_ranges, k_scale, v_scale, dropout,
        seed, stats and out: numbers or arrays in memory.
        ``num_threads`` (default 1) applies to each task, whatever OMP_NUM_THREADS is: Dask sets that to 1. A
        worker runs as many tasks at a time as it has threads.

    Returns
    -------
    out : dask.array.Array, (..., heads_q, len_q, head_dim_v)
        In q's dtype, in chunks of `rows`.
    lse : dask.array.Array, (..., heads_q, len_q)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, before anything is computed.

    Notes
    -----
    Blocks masked by `causal`, a window or lengths are skipped. A task holds a block of each of q, k, v and
    out, and a merge five blocks of out. Results in 16 bits are rounded at each level of the tree.

    Examples
    --------
    >>> import dask.array as da, fastattn.dask, numpy as np
    >>> q = k = v = da.ones((8, 1000, 64), chunks=(8, 250, 64), dtype=np.float32)
    >>> fastattn.dask.attention(q, k, v, chunks=(250, 500), causal=True).compute().shape
    (8, 1000, 64)
    """
    rows, keys = chunk_sizes(chunks)
    with_lse = flag("return_lse", return_lse)
    arrays = [operand(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    one_head = all(x.ndim == 2 for x in arrays)
    arrays = [x if x.ndim > 2 else x[None] for x in arrays]
    checked = problem((arrays[0], arrays[1], arrays[2]), options)
    aligned_arrays = aligned(arrays[0], arrays[1], arrays[2], rows, keys)
    out, lse = _lazy(checked, aligned_arrays, with_lse)
    if one_head:
        out, lse = out[0], lse if lse is None else lse[0]
    return (out, lse) if with_lse else out


def _lazy(problem: Problem, arrays: tuple[Any, Any, Any], with_lse: bool) -> tuple[da.Array, da.Array | None]:
    """The graph of all tasks, as arrays."""
    q, k, v = arrays
    token = tokenize(problem, [x.name for x in arrays], with_lse)
    name, part = f"fastattn-attention-{token}", f"fastattn-part-{token}"
    batch_chunks = [
        next((x.chunks[axis] for x in arrays if x.ndim >= -axis and x.shape[axis] != 1), (1,))
        for axis in range(-3 - len(problem.batch_shape), -3)
    ]
    head_chunks, row_chunks = arrays[0].chunks[-3:-1]
    key_ranges = _ranges(arrays[1].chunks[-2])
    graph: dict[Any, Any] = {}
    lses: dict[Any, Any] = {}
    for blocks in product(*(enumerate(_ranges(sizes)) for sizes in (*batch_chunks, head_chunks, row_chunks))):
        where, ranges = zip(*blocks, strict=True)
        *batch, heads = (slice(x.start, x.stop) for x in ranges[:-1])
        rows, place = ranges[-1], (tuple(batch), heads)
        needed = [j for j, keys in enumerate(key_ranges) if problem.needs(place[0], rows, keys)]
        tasks: dict[int, Any] = {}
        for j in needed:
            options = problem.options(*place, rows, key_ranges[j], sinks=j == needed[0])
            index = (*where[:-1], j, 0)
            block = partial(attend, return_lse=with_lse or len(needed) > 1, **options)
            tasks[j] = (block, key(q, (*where, 0)), key(k, index), key(v, index))
        if not needed:
            options = problem.options(*place, rows, range(0), sinks=True)
            sizes = tuple(map(len, ranges[:-2]))
            empty = partial(attend_nothing, sizes, problem.head_dim_v, return_lse=with_lse, **options)
            tasks[0] = (empty, key(q, (*where, 0)))
        root = _tree(graph, tasks, (part, *where), with_lse)
        if with_lse:
            graph[(part, *where)] = root
            root = (getitem, (part, *where), 0)
            lses[(f"fastattn-lse-{token}", *where)] = (getitem, (part, *where), 1)
        graph[(name, *where, 0)] = root
    chunks = (*batch_chunks, head_chunks, row_chunks)
    layers = HighLevelGraph.from_collections(name, graph, dependencies=arrays)
    out = da.Array(layers, name, (*chunks, (problem.head_dim_v,)), dtype=problem.dtype)
    if not with_lse:
        return out, None
    name = f"fastattn-lse-{token}"
    layers = HighLevelGraph.from_collections(name, lses, dependencies=[out])
    return out, da.Array(layers, name, chunks, dtype=lane_dtype(problem.dtype))


def _ranges(sizes: Iterable[int]) -> list[range]:
    """Slices that chunks cover."""
    ends = [0, *accumulate(sizes)]
    return [range(*ends[i : i + 2]) for i in range(len(ends) - 1)]


def _tree(graph: dict[Any, Any], tasks: Mapping[int, Any], name: tuple[Any, ...], with_lse: bool) -> Any:
    """Add tasks that merge the states of `tasks`, by number of the block of keys, and return the last task.

    Which states meet depends on these numbers alone: at level n, those of the same ``number // 4**n``.
    """
    level = 0
    while len(tasks) > 1:
        groups: dict[int, list[int]] = {}
        for j in tasks:
            groups.setdefault(j // _CHILDREN, []).append(j)
        merged = {}
        for parent, children in groups.items():
            keys = [(*name, level, j) for j in children]
            if len(keys) > 1:
                graph.update(zip(keys, map(tasks.__getitem__, children), strict=True))
                merged[parent] = (merge, keys, with_lse or len(groups) > 1)
            else:
                merged[parent] = tasks[children[0]]
        tasks, level = merged, level + 1
    (task,) = tasks.values()
    return task


def attend_nothing(batch: Shape, head_dim_v: int, q: Array, **options: Any) -> Any:
    """Rows that attend no key; `batch` includes axes that k or v has and q lacks."""
    k, v = (np.empty((*batch, 1, 0, width), q.dtype) for width in (q.shape[-1], head_dim_v))
    return attend(q, k, v, **options)


def merge(states: Iterable[State], with_lse: bool) -> State | Array:
    """One level of the tree."""
    outs, lses = zip(*states, strict=True)
    out, lse = merge_states(outs, lses)
    return (out, lse) if with_lse else out
