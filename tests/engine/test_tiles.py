"""The tiles that `explain` counts, against a count one by one; any number of keys takes no memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastattn
from fastattn import masks
from fastattn._args.attention import attention_args
from fastattn._engine.tiles import count_tiles

STRUCTURES = {
    "dilated": masks.dilated(2, 3),
    "strided": masks.strided(4),
    "window and first": masks.causal() & (masks.window(2) | masks.first_keys(2)),
    "global": masks.window(1, 1) | masks.global_tokens([3]),
}


def counted(args, block_q, block_k):
    """All tiles, and of these those that are skipped, full and neither, one after the other."""
    heads, len_q, len_k = args.heads_q, args.len_q, args.len_k
    group, rows_shape = heads // args.heads_kv, (*args.batch_shape, heads, len_q)
    begin = np.broadcast_to(0 if args.row_begin is None else args.row_begin, rows_shape)
    end = np.broadcast_to(len_k if args.row_end is None else args.row_end, rows_shape)
    found = {"total": 0, "skipped": 0, "full": 0, "edge": 0}
    dense = [np.broadcast_to(x, (*rows_shape, len_k)) for x in (args.mask,) if x is not None]
    dense += [np.broadcast_to(x != -np.inf, (*rows_shape, len_k)) for x in (args.bias,) if x is not None]
    if args.ranges is not None:
        first, last = (np.broadcast_to(x, rows_shape) for x in (args.range_first, args.range_last))
        listed = np.zeros((*rows_shape, len_k), bool)
        for row in np.ndindex(rows_shape):
            for low, high in args.ranges[first[row] : last[row]]:
                listed[row][max(low, begin[row]) : min(high, end[row])] = True
        dense.append(listed)
    for b in np.ndindex(args.batch_shape):
        for h in range(args.heads_kv):
            pairs = [(*b, h * group + g, i) for i in range(len_q) for g in range(group)]
            for r in range(0, len(pairs), block_q):
                rows = pairs[r : r + block_q]
                some = [(begin[row], end[row]) for row in rows if begin[row] < end[row]]
                for start in range(0, len_k, block_k):
                    stop = min(start + block_k, len_k)
                    touched = bool(some) and min(some)[0] < stop and max(e for _, e in some) > start
                    full = all(begin[row] <= start and stop <= end[row] for row in rows)
                    for x in dense:
                        tile = np.array([x[row][start:stop] for row in rows])
                        touched, full = touched and tile.any(), full and tile.all()
                    found["total"] += 1
                    found["full" if touched and full else "edge" if touched else "skipped"] += 1
    return tuple(found.values())


@st.composite
def calls(draw):
    """A call with any masks, each of its own shape, and the sizes of blocks."""
    batch, kv, group = (draw(st.integers(1, 3)) for _ in range(3))
    len_q, len_k, heads = draw(st.integers(0, 9)), draw(st.integers(0, 25)), kv * group
    rng = np.random.default_rng(draw(st.integers(0, 1000)))

    def shape(*full):
        """One that broadcasts to `full`, by a view of it or not."""
        own = tuple(n if draw(st.booleans()) else 1 for n in full)
        return own, draw(st.booleans())

    def array(make, *full):
        own, view = shape(*full)
        x = make(own)
        return np.broadcast_to(x, full) if view else x

    options = {}
    if draw(st.booleans()):
        begin = array(lambda own: rng.integers(0, len_k + 1, own), batch, heads, len_q)
        width = array(lambda own: rng.integers(0, len_k + 1, own), batch, heads, len_q)
        options["row_ranges"] = (begin, begin + width)
    if draw(st.booleans()):
        options |= {"kv_lengths": rng.integers(0, len_k + 1, batch), "q_offset": 0}
    if draw(st.booleans()):
        options |= {"causal": True, "q_offset": 0}
    kind = draw(st.sampled_from(["none", "dense", *STRUCTURES]))
    if kind == "dense":
        share = draw(st.sampled_from([0.1, 0.5, 0.95]))
        options["mask"] = array(lambda own: rng.random(own) < share, batch, heads, len_q, len_k)
    elif kind != "none":
        options["mask"] = STRUCTURES[kind]
    if draw(st.booleans()):
        bias = array(
            lambda own: np.where(rng.random(own) < 0.3, np.float32(-np.inf), np.float32(0)),
            batch,
            heads,
            len_q,
            len_k,
        )
        options["bias"] = bias
    q, k = (np.zeros((batch, h, n, 4), np.float32) for h, n in ((heads, len_q), (kv, len_k)))
    args = attention_args(q, k, k, **options)
    return args, draw(st.integers(1, 8)), draw(st.integers(1, 9))


@given(calls())
def test_tiles_are_those_that_one_finds_one_by_one(call):
    assert tuple(count_tiles(*call)) == counted(*call)


N = 2**36
LONG = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (1000, 3)},
    "kv_lengths": {"kv_lengths": [N // 3]},
    "row_ranges": {"row_ranges": (5, np.arange(N, N - 8, -1))},
    "documents": {"mask": masks.causal() & masks.chunked(N // 8)},
    "lists": {"mask": masks.window(10**6) | masks.first_keys(10**6)},
    "mask": {"mask": np.broadcast_to(np.array([[True]] * 7 + [[False]]), (8, N))},
    "bias": {"bias": np.broadcast_to(np.float32(0), (1, 1, 8, N))},
}


@pytest.mark.parametrize("options", LONG.values(), ids=LONG)
def test_any_number_of_keys_takes_no_memory(options, implementation):
    q, k = (np.broadcast_to(np.zeros(64, np.float32), (1, 2, n, 64)) for n in (8, N))
    tracemalloc.start()
    try:
        report = fastattn.explain(q, k, k, **options)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1e6  # a byte for each tile would be 2e9
    assert report["tiles"] == 2 * -(-8 // report["block_q"]) * N // report["block_k"]
    assert report["tiles"] == report["tiles_skipped"] + report["tiles_full"] + report["tiles_edge"]
