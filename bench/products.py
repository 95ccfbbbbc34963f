"""Measure `ops.linear` in every type: many rows against the peak, few rows against the read bandwidth.

    python -m bench products {many,few} [--threads 2] [--isa ISA] [--transposed]

Each time is the shortest of many. The limit is measured in the same seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle

import numpy as np

import fastattn
from bench.clock import Call, normal, seconds
from fastattn import ops
from fastattn._engine import settings
from fastattn._engine.core import _core

# Rows, input features, output features: those of MiniLM and of larger encoders, and a cube.
MANY = (
    (128, 384, 1536), (1024, 768, 768), (1024, 768, 3072), (2048, 2048, 2048), (4096, 384, 384),
    (4096, 384, 1536), (4096, 1536, 384), (128, 384, 384), (128, 1536, 384),
)  # fmt: skip
FEW = tuple((rows, 2048, 8192) for rows in (1, 4, 8, 16, 64))
# Name: types of weights and inputs, how the latter are rounded, and whose multiply-adds are the limit.
KINDS = {
    "float32": ("float32", "float32", None, "float32"),
    "bfloat16": ("bfloat16", "float32", None, "bfloat16"),
    "bfloat16, inputs too": ("bfloat16", "bfloat16", None, "bfloat16"),
    "int8": ("int8", "float32", None, "float32"),
    "int8 by int8": ("int8", "float32", "int8", "int8"),
    "q8": ("q8", "float32", None, "float32"),
    "q8 by int8": ("q8", "float32", "int8", "int8"),
    "uint4": ("uint4", "float32", None, "float32"),
    "uint4 by int8": ("uint4", "float32", "int8", "int8"),
    "nf4": ("nf4", "float32", None, "float32"),
    "int4": ("int4", "float32", None, "float32"),
    "int4 by int8": ("int4", "float32", "int8", "int8"),
}
# The limit relative to float32's where the instruction set has no such dot product: bfloat16 is widened.
WITHOUT = {"float32": 1, "bfloat16": 1, "int8": 4}


def best(call: Call, limit: Callable[[], float], during: float = 0.4) -> tuple[float, float]:
    """The shortest time of a call, and the largest of the limits measured between."""
    shortest, most, end = float("inf"), 0.0, time.perf_counter() + during
    while time.perf_counter() < end:
        most = max(most, limit())
        shortest = min(shortest, *(seconds(call) for _ in range(3)))
    return shortest, most


def measure(
    kind: str, shape: tuple[int, int, int], threads: int, far: bool, transposed: bool
) -> tuple[float, int, float]:
    """Seconds, bytes of weights, and the limit: of multiply-adds or, with weights from memory, of reading."""
    stored, dtype, activations, by = KINDS[kind]
    if transposed and not (dtype == "bfloat16" and fastattn.show_config()["isa"] == "amx"):
        by = "float32"  # widened
    rows, k, n = shape
    rng = np.random.default_rng(0)
    x = normal((rows, n if transposed else k), dtype)
    weight = rng.standard_normal((n, k), dtype=np.float32)
    first = ops.pack(weight, dtype=stored)
    copies = [
        first,
        *(ops.pack(weight, dtype=stored) for _ in range((256 << 20) // first.nbytes if far else 0)),
    ]
    turn, out = cycle(copies), np.empty((rows, k if transposed else n), x.dtype)

    def call() -> None:
        ops.linear(
            x, next(turn), activations=activations, transposed=transposed, out=out, num_threads=threads
        )

    def limit() -> float:
        if far:
            return float(_core.read_bandwidth(threads))
        return float(_core.fma_peak(by, threads) or WITHOUT[by] * _core.fma_peak("float32", threads))

    call()
    took, most = best(call, limit)
    return took, first.nbytes, most


def main(words: list[str]) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench products", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("what", choices=("many", "few"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=fastattn.show_config()["isas_available"])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument(
        "--transposed", action="store_true", help="products with the weight, not its transpose"
    )
    arguments = parser.parse_args(words)
    far = arguments.what == "few"
    with settings.forced(isa=arguments.isa):
        for kind in arguments.kinds:
            one_row = 0.0
            for shape in FEW if far else MANY:
                took, n_bytes, limit = measure(kind, shape, arguments.threads, far, arguments.transposed)
                one_row = one_row or took
                if far:
                    share = f"{n_bytes / took / limit:.0%} of {limit / 1e9:.1f} GB/s"
                    share += f", {took / one_row:.2f} times one row"
                else:
                    flops = 2.0 * np.prod(shape)
                    share = f"{flops / took / limit:.0%} of {limit / 1e9:.0f} GFLOP/s"
                print(f"{kind:22} {shape!s:20} {1e3 * took:8.3f} ms  {share}", flush=True)
