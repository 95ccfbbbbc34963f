"""Measure what calls cost relative to plain attention on the same arrays: medians of interleaved rounds.

    python -m bench ratios variants [NAME ...]   calls of the bench's suite "variants" (default: all)
    python -m bench ratios statistics            stats= and sigmoid_attention
    python -m bench ratios structures            masks of the bench, beside their share of all pairs
    python -m bench ratios neighborhood          13 x 13 on 64 x 64, and others
    python -m bench ratios pages                 keys in shuffled pages beside one piece, steps and prompts

Options: --length, --heads (of 64 dimensions), --isa.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import fastattn
from bench.clock import Call, rounds_of
from bench.variants import CALLS, NORMALISERS, VariantProblem
from fastattn import functional, masks
from fastattn._args.key_ranges import as_lists
from fastattn._bench.attention import shape_of
from fastattn._bench.cases import STRUCTURES, Array, Shape, make_inputs
from fastattn._engine import settings

ROUNDS = 9
# The most that changes of the scores alone may cost.
TARGETS = {"alibi": 1.15, "softcap": 1.15, "sinks": 1.15, "t5_bias": 1.15, "dense_bias": 1.25, "dropout": 1.3}
STATISTICS = ("row_max", "entropy", "top_k:8", "key_sums", "mean_weights")


def ratio(call: Call, plain: Call) -> float:
    """Median over rounds of the time of `call` divided by that of `plain`, right before it."""
    return median(mine / whole for whole, mine in rounds_of(ROUNDS, plain, call))


def row(name: str, took: float, *more: str) -> None:
    print(f"  {name:<48}{took:8.4f}", *more, flush=True)


def arrays(shape: Shape) -> tuple[Array, Array, Array]:
    return make_inputs(shape, "float32", np.random.default_rng(0))


def variants(shape: Shape, names: list[str]) -> None:
    plain = VariantProblem(shape, "plain", "float32", 0).timed()
    for name in names or (*CALLS, *NORMALISERS):
        took = ratio(VariantProblem(shape, name, "float32", 0).timed(), plain)
        target = TARGETS.get(name, np.inf)
        row(
            name,
            took,
            f"at most {target}: {'kept' if took <= target else 'missed'}" if name in TARGETS else "",
        )


def statistics(shape: Shape) -> None:
    q, k, v = arrays(shape)
    asked = {name: (name,) for name in STATISTICS} | {"row_max, entropy": STATISTICS[:2]}
    calls = {name: lambda s=s: fastattn.attention(q, k, v, stats=s) for name, s in asked.items()}
    calls["sigmoid_attention"] = lambda: functional.sigmoid_attention(q, k, v)
    for name, call in calls.items():
        row(name, ratio(call, lambda: fastattn.attention(q, k, v)))


def share(mask: Any) -> float:
    """Share of all pairs that a compiled mask attends."""
    shape = mask.shape
    lists = as_lists(mask.resolved, shape.len_q, shape.len_k)
    sizes = np.append(0, np.cumsum(np.diff(lists.ranges).ravel()))
    rows = sizes[lists.last] - sizes[lists.first]
    return np.broadcast_to(rows, (shape.heads, shape.len_q)).mean() / shape.len_k


def structures(shape: Shape) -> None:
    q, k, v = arrays(shape)
    out, rng = np.empty_like(q), np.random.default_rng(0)
    chosen = {name: make(shape, rng) for name, make in STRUCTURES.items()}
    chosen |= {"window of 512": masks.window(511), "causal": masks.causal()}
    print("f is the share of pairs; the aim is at most 1.15 f + 5%")
    for name, mask in chosen.items():
        start = time.perf_counter()
        compiled = masks.compile(mask, (1, shape.heads_q, shape.len_q, shape.len_k))
        compiling = time.perf_counter() - start
        took = ratio(
            lambda mask=compiled: fastattn.attention(q, k, v, mask=mask, out=out),
            lambda: fastattn.attention(q, k, v, out=out),
        )
        f = share(compiled)
        kept = "kept" if took <= 1.15 * f + 0.05 else "missed"
        row(name, took, f"f {f:.4f}, {took / f:5.2f} of f, {kept}; compiled in {1e3 * compiling:.1f} ms")


def neighborhood(shape: Shape) -> None:
    for grid, kernel, dilation in (
        ((64, 64), (13, 13), 1), ((64, 64), (7, 7), 1), ((64, 64), (7, 7), 4), ((4096,), (169,), 1),
        ((16, 16, 16), (5, 5, 5), 1),
    ):  # fmt: skip
        tokens = int(np.prod(grid))
        q, k, v = arrays(shape_of(1, shape.heads_q, tokens, tokens, 64))
        mask = masks.compile(masks.neighborhood(grid, kernel, dilation), (1, shape.heads_q, tokens, tokens))
        took = ratio(
            lambda q=q, k=k, v=v, mask=mask: fastattn.attention(q, k, v, mask=mask),
            lambda q=q, k=k, v=v: fastattn.attention(q, k, v),
        )
        f = np.prod(kernel) / tokens
        row(f"grid {grid}, kernel {kernel}, dilation {dilation}", took, f"f {f:.4f}, {took / f:5.2f} of f")


def in_pages(x: Array, table: Array, page: int) -> Array:
    """x (batch, heads, keys, head_dim) as (pages, heads, page, head_dim), in the order of `table`."""
    batch, heads, keys, width = x.shape
    pages = np.empty((table.size, heads, page, width), x.dtype)
    pages[table.ravel()] = (
        x.reshape(batch, heads, keys // page, page, width).swapaxes(1, 2).reshape(pages.shape)
    )
    return pages


def pages(shape: Shape) -> None:
    rng = np.random.default_rng(0)
    for batch, len_q in ((16, 1), (1, shape.len_q)):
        for dtype in ("float32", "bfloat16"):
            own = shape_of(
                batch, shape.heads_q, len_q, shape.len_k // 64 * 64, 64, max(1, shape.heads_q // 4)
            )
            q, k, v = make_inputs(own, dtype, rng)
            for page in (16, 64, 128):
                table = rng.permutation(batch * own.len_k // page).reshape(batch, -1)
                k_pages, v_pages = (in_pages(x, table, page) for x in (k, v))
                paged = partial(fastattn.attention, q, k_pages, v_pages, block_table=table, causal=True)
                took = ratio(paged, partial(fastattn.attention, q, k, v, causal=True))
                row(f"{own.name} in {dtype}, pages of {page}", took)


def main(words: list[str]) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench ratios", description=(__doc__ or "").splitlines()[0]
    )
    measures = {f.__name__: f for f in (variants, statistics, structures, neighborhood, pages)}
    parser.add_argument("what", choices=measures)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of variants")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--isa", choices=fastattn.show_config()["isas_available"])
    options = parser.parse_args(words)
    shape = shape_of(1, options.heads, options.length, options.length, 64)
    with settings.forced(isa=options.isa):
        measures[options.what](shape, *[options.names] * (options.what == "variants"))
