"""Attention over blocks: what two processes cost beside one call, and what many workers would do.

python -m bench.scale overhead             # on this machine: ratios to one call with as many threads
python -m bench.scale simulate             # 64 and 1024 workers, from times of tasks measured here
python -m bench.scale simulate --causal --tokens 4194304 --workers 64,256,1024
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from dask.distributed import Client, LocalCluster, wait

import fastattn
import fastattn.dask
from bench.clock import Call, rounds_of

RNG = np.random.default_rng(0)


def local_cluster(workers: int) -> Any:
    return LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")


def overhead(
    heads: int, tokens: int, head_dim: int, grids: list[tuple[int, ...]], rounds: int, workers: int
) -> None:
    """One call with `workers` threads, and after it the same by as many processes; medians of ratios."""
    with tempfile.TemporaryDirectory() as folder, local_cluster(workers) as cluster, Client(cluster):
        arrays, mapped = [], []
        for name in "qkv":
            arrays.append(RNG.standard_normal((heads, tokens, head_dim), np.float32))
            np.save(f"{folder}/{name}.npy", arrays[-1])
            mapped.append(np.load(f"{folder}/{name}.npy", mmap_mode="r"))
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
                    lazy = fastattn.dask.attention(*mapped, chunks=grid, **options)
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


def best(call: Call, rounds: int) -> float:
    """The shortest of so many calls, in seconds."""
    return min(times[0] for times in rounds_of(rounds, call))


def measured(heads: int, head_dim: int, rounds: int = 5) -> tuple[float, float, float]:
    """Seconds of one thread for a product of a query and a key, for a merged row, and of Dask for a task."""
    n = 4096
    q, k, v = RNG.standard_normal((3, heads, n, head_dim), np.float32)
    states = [fastattn.attention(q, k, v, return_lse=True) for _ in range(4)]
    block = best(lambda: fastattn.attention(q, k, v, return_lse=True, num_threads=1), rounds)
    merge = best(lambda: fastattn.merge_states(*zip(*states, strict=True)), rounds)
    with local_cluster(2) as cluster, Client(cluster) as client:
        client.gather(client.map(abs, range(10)))
        begin = time.perf_counter()
        client.gather(client.map(int.__neg__, range(1000)))
        task = (time.perf_counter() - begin) / 1000
    return block / n**2, merge / n, task


def simulate(
    n: int,
    workers: int,
    times: tuple[float, float, float],
    bytes_: tuple[float, float],
    bandwidth: float,
    causal: bool,
) -> tuple[float, float, float]:
    """Seconds until all n x n blocks are computed and merged, bytes read, bytes moved.

    A worker takes the next block as soon as it is free, in order of rows. Who finishes the last of four
    states fetches the other three and merges them. The scheduler hands out one task after the other.
    """
    block, merge, task = times
    block_bytes, state_bytes = bytes_
    blocks = [(i, j) for i in range(n) for j in range(i + 1 if causal else n)]
    blocks.reverse()
    children = {}  # of each merge (row, level, parent), how many states are still to come
    for i in range(n):
        level, states = 0, i + 1 if causal else n
        while states > 1:
            parents = math.ceil(states / 4)
            for parent in range(parents):
                children[i, level, parent] = min(4, states - 4 * parent)
            level, states = level + 1, parents
    groups = dict(children)
    events = [(0.0, w, None) for w in range(workers)]
    heapq.heapify(events)
    scheduler = end = 0.0
    read = moved = 0
    while events:
        now, w, done = heapq.heappop(events)
        end = max(end, now)
        cost = None
        while done is not None:
            row, level, number = done
            group = (row, level, number // 4)
            if group not in groups:
                break
            children[group] -= 1
            if children[group]:
                break
            done = (row, level + 1, number // 4)
            if groups[group] > 1:
                moved += (groups[group] - 1) * state_bytes
                cost = (groups[group] - 1) * state_bytes / bandwidth + merge
                break
        if cost is None:
            if not blocks:
                continue
            i, j = blocks.pop()
            done = (i, 0, j)
            read += block_bytes
            cost = block_bytes / bandwidth + block * (0.5 if causal and i == j else 1)
        scheduler = max(scheduler, now) + task
        heapq.heappush(events, (scheduler + cost, w, done))
    return end, read, moved


def simulated(
    heads: int, tokens: int, head_dim: int, workers: list[int], gigabytes: float, causal: bool
) -> None:
    a_product, a_row, task = measured(heads, head_dim)
    print(
        f"measured here, one thread: {4 * heads * head_dim / a_product / 1e9:.0f} GFLOP/s, merging four"
        f" states {1e9 * a_row / heads:.0f} ns a row and head; a task {1e6 * task:.0f} us of the scheduler"
    )
    kind = "causal" if causal else "full"
    print(
        f"{heads} x {tokens} x {head_dim}, float32, {kind}; {gigabytes} GB/s a worker; MB are of one worker"
    )
    print("workers | blocks | seconds | ideal | efficiency | MB read | MB moved | ring, MB | all-to-all, MB")
    all_bytes = heads * tokens * head_dim * 4
    share = 0.5 * (1 + 1 / tokens) if causal else 1.0
    for p in workers:
        best = None
        for n in (2**i for i in range(3, 9)):
            size = tokens / n
            times = a_product * size**2, a_row * size, task
            bytes_ = 3 * all_bytes / n, all_bytes / n * (1 + 1 / head_dim)
            seconds, read, moved = simulate(n, p, times, bytes_, gigabytes * 1e9, causal)
            if best is None or seconds < best[0]:
                best = seconds, n, read, moved
        seconds, n, read, moved = best
        ideal = a_product * tokens**2 * share / p
        ring = 2 * all_bytes * (p - 1) / p
        ulysses = f"{4e-6 * all_bytes * (p - 1) / p**2:.0f}" if p <= heads else f"at most {heads} workers"
        print(
            f"{p:7} | {n:3}x{n:<3} | {seconds:7.1f} | {ideal:6.1f} | {ideal / seconds:9.0%} |"
            f" {read / p / 1e6:7.0f} | {moved / p / 1e6:8.0f} | {ring / 1e6:8.0f} | {ulysses}"
        )


def pairs(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in pair.split("x")) for pair in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["overhead", "simulate"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="default 16384, or 1048576 to simulate")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--grids", type=pairs, default=pairs("2048x8192,1024x8192,2048x4096"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=lambda x: [int(n) for n in x.split(",")])
    parser.add_argument("--gigabytes", type=float, default=1.25, help="a second, from and to each worker")
    parser.add_argument("--causal", action="store_true")
    a = parser.parse_args()
    if a.what == "overhead":
        (workers,) = a.workers or [2]
        overhead(a.heads, a.tokens or 16384, a.head_dim, a.grids, a.rounds, workers)
    else:
        workers = a.workers or [64, 1024]
        simulated(a.heads, a.tokens or 2**20, a.head_dim, workers, a.gigabytes, a.causal)


if __name__ == "__main__":
    main()
