"""Attention over blocks by two processes, beside one call with as many threads: ``python -m bench.scale``."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import dask.array as da
import numpy as np
from dask.distributed import Client, LocalCluster, wait

import fastattn
import fastattn.dask

RNG = np.random.default_rng(0)


def overhead(
    heads: int, tokens: int, head_dim: int, grids: list[tuple[int, ...]], rounds: int, workers: int
) -> None:
    """One call with `workers` threads, and after it the same by as many processes; medians of ratios."""
    local = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
    with tempfile.TemporaryDirectory() as folder, local as cluster, Client(cluster):
        arrays, stored = [], []
        for name in "qkv":
            arrays.append(RNG.standard_normal((heads, tokens, head_dim), np.float32))
            da.to_npy_stack(f"{folder}/{name}", da.from_array(arrays[-1], (heads, 1024, head_dim)), axis=1)
            stored.append(da.from_npy_stack(f"{folder}/{name}"))
        print("ratios: on the cluster, and with the result in this process; ms: of the one call")
        for causal in (False, True):
            ratios = {grid: ([], []) for grid in grids}
            alone = []
            for round_ in range(rounds + 1):
                for number, grid in enumerate(grids):
                    # Another scale makes other tasks: what a cluster still holds, it does not compute.
                    scale = head_dim**-0.5 * (1 + 1e-7 * (len(grids) * round_ + number))
                    options = {"causal": causal, "scale": scale}
                    begin = time.perf_counter()
                    out = fastattn.attention(*arrays, num_threads=workers, **options)
                    one = time.perf_counter() - begin
                    lazy = fastattn.dask.attention(*stored, chunks=grid, **options)
                    begin = time.perf_counter()
                    held = lazy.persist()
                    wait(held)
                    there = time.perf_counter() - begin
                    got = held.compute()
                    here = time.perf_counter() - begin
                    np.testing.assert_allclose(got, out, rtol=0, atol=1e-5)
                    del held, got
                    if round_:  # the first one warms up
                        alone.append(one)
                        ratios[grid][0].append(there / one)
                        ratios[grid][1].append(here / one)
            for grid, (there, here) in ratios.items():
                medians = statistics.median(there), statistics.median(here), min(there)
                print(
                    f"{'causal' if causal else 'full':6} {grid!s:14} {medians[0]:.3f} {medians[1]:.3f}"
                    f"   best {medians[2]:.3f}   {1e3 * statistics.median(alone):.0f} ms"
                )


def pairs(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in pair.split("x")) for pair in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--grids", type=pairs, default=pairs("2048x8192,1024x8192,2048x4096"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    a = parser.parse_args()
    overhead(a.heads, a.tokens, a.head_dim, a.grids, a.rounds, a.workers)


if __name__ == "__main__":
    main()
