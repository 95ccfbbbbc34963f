"""What variants cost: the time of a call over that of plain attention on the same arrays.

python tools/variants.py [length [heads [NAME ...]]]      the calls of fastattn._bench.suites.variants
"""

import sys
import time
from statistics import median

from fastattn._bench.cases import Shape
from fastattn._bench.suites.variants.calls import CALLS
from fastattn._bench.suites.variants.problem import VariantProblem

ROUNDS = 9
# What the scores alone are changed by is to cost at most this much more.
TARGETS = {"alibi": 1.15, "softcap": 1.15, "sinks": 1.15, "t5_bias": 1.15, "dense_bias": 1.25}


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(length=2048, heads=8, *names):
    shape = Shape("", 1, int(heads), int(heads), int(length), int(length), 64)
    plain = VariantProblem(shape, "plain", "float32", 0).call()
    plain()
    print(f"length {length}, {heads} heads of 64, float32{'of plain':>20}")
    for name in names or CALLS:
        call = VariantProblem(shape, name, "float32", 0).call()
        call()
        rounds = [(seconds(plain), seconds(call)) for _ in range(ROUNDS)]
        ratio = median(mine / whole for whole, mine in rounds)
        target = TARGETS.get(name)
        said = "" if target is None else f"  at most {target}: {'kept' if ratio <= target else 'missed'}"
        print(f"  {name:<40}{ratio:10.2f}{said}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
