"""What streaming statistics and sigmoid attention cost: the time of a call over that of the plain one.

python tools/streaming.py [ISA]
"""

import sys
import time
from statistics import median

import numpy as np

import fastattn
from fastattn import functional
from fastattn._engine import settings

ROUNDS = 15
SHAPES = ((1, 8, 2048, 64), (1, 12, 512, 64))
STATS = {
    "row_max": ("row_max",),
    "row_max, entropy": ("row_max", "entropy"),
    "top_k:8": ("top_k:8",),
    "key_sums": ("key_sums",),
    "mean_weights": ("mean_weights",),
}


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main():
    for shape in SHAPES:
        q, k, v = np.random.default_rng(0).standard_normal((3, *shape), np.float32)

        def plain(q=q, k=k, v=v, **options):
            return fastattn.attention(q, k, v, **options)

        calls = {"plain": plain} | {
            name: lambda plain=plain, stats=stats: plain(stats=stats) for name, stats in STATS.items()
        }
        calls["sigmoid_attention"] = lambda q=q, k=k, v=v: functional.sigmoid_attention(q, k, v)
        rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS + 1)][1:]
        for name in calls:
            ratio = median(took[name] / took["plain"] for took in rounds)
            print(f"{shape}  {name:<18} {ratio:.2f}", flush=True)


if __name__ == "__main__":
    with settings.forced(isa=sys.argv[1] if len(sys.argv) > 1 else None):
        main()
