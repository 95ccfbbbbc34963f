"""What structural masks cost: the time of a call over that of the full one, and f, the share of pairs met.

python tools/structures.py [length [heads]]      the masks of fastattn._bench.cases, and a window of 512
python tools/structures.py neighborhood          13 x 13 on 64 x 64, and others
"""

import sys
import time
from statistics import median

import numpy as np

import fastattn
from fastattn import functional, masks
from fastattn._args.key_ranges import as_lists
from fastattn._bench.cases import STRUCTURES, Shape, make_inputs

ROUNDS = 5


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(call, full):
    """Median over rounds of `call`'s time by that of `full`, right before it."""
    call()
    rounds = [(seconds(full), seconds(call)) for _ in range(ROUNDS)]
    return median(mine / whole for whole, mine in rounds)


def share(mask):
    """Of all pairs, those that a compiled mask attends."""
    shape = mask.shape
    lists = as_lists(mask.resolved, shape.len_q, shape.len_k)
    sizes = np.append(0, np.cumsum(np.diff(lists.ranges).ravel()))
    rows = sizes[lists.last] - sizes[lists.first]
    return np.broadcast_to(rows, (shape.heads, shape.len_q)).mean() / shape.len_k


def structures(length, heads):
    shape, rng = Shape("", 1, heads, heads, length, length, 64), np.random.default_rng(0)
    q, k, v = make_inputs(shape, "float32", rng)
    out = np.empty_like(q)
    chosen = {name: make(shape, rng) for name, make in STRUCTURES.items()}
    chosen["window of 512"] = masks.window(511)
    chosen["causal"] = masks.causal()
    print(
        f"length {length}, {heads} heads of 64, float32{'f':>17}  of full  of f  1.15 f + 5%  compiling, ms"
    )
    for name, mask in chosen.items():
        start = time.perf_counter()
        compiled = masks.compile(mask, (1, heads, length, length))
        compiling = time.perf_counter() - start
        took = ratio(
            lambda mask=compiled: fastattn.attention(q, k, v, mask=mask, out=out),
            lambda: fastattn.attention(q, k, v, out=out),
        )
        f = share(compiled)
        fits = "kept" if took <= 1.15 * f + 0.05 else "missed"
        print(
            f"  {name:<48}{f:7.4f}  {took:7.4f}  {took / f:4.2f}  {fits:>11}  {1e3 * compiling:8.1f}",
            flush=True,
        )


def neighborhoods():
    print(f"{'grid, kernel, dilation; 8 heads of 64, float32':<50}{'f':>7}  of full  of f")
    for grid, kernel, dilation in [((64, 64), (13, 13), 1), ((64, 64), (7, 7), 1), ((64, 64), (7, 7), 4),
                                   ((4096,), (169,), 1), ((16, 16, 16), (5, 5, 5), 1)]:  # fmt: skip
        places = int(np.prod(grid))
        flat = make_inputs(Shape("", 1, 8, 8, places, places, 64), "float32", np.random.default_rng(0))
        q, k, v = (x.reshape(1, 8, *grid, 64) for x in flat)
        took = ratio(
            lambda q=q, k=k, v=v, kernel=kernel, dilation=dilation: functional.neighborhood_attention(
                q, k, v, kernel=kernel, dilation=dilation
            ),
            lambda flat=flat: fastattn.attention(*flat),
        )
        f = np.prod(kernel) / places
        print(f"  {f'{grid}, {kernel}, {dilation}':<48}{f:7.4f}  {took:7.4f}  {took / f:4.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["neighborhood"]:
        neighborhoods()
    else:
        length, heads = (*map(int, sys.argv[1:]), *(4096, 4)[len(sys.argv) - 1 :])
        structures(length, heads)
