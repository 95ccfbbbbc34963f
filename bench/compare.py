"""Two builds of fastattn, interleaved: how long each takes for the same calls, as a ratio.

    python bench/compare.py OLD_PYTHON NEW_PYTHON [--rounds 9] [--only decode]
    FASTATTN_NUM_THREADS=1 python bench/compare.py GCC_PYTHON CLANG_PYTHON --products

Each build is what its interpreter imports, in a process of its own. Only functions that both have are called.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

Call = Callable[[], Any]


def calls() -> dict[str, Call]:
    """The calls by name, as functions without arguments."""
    import ml_dtypes
    import numpy as np

    import fastattn
    from fastattn import functional, grad, layers, ops

    rng = np.random.default_rng(0)

    def draw(*shape: int, dtype: Any = np.float32) -> Any:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    def attention(
        batch: int,
        heads_q: int,
        heads_kv: int,
        len_q: int,
        len_k: int,
        head_dim: int,
        dtype: Any = np.float32,
        **options: Any,
    ) -> Call:
        q = draw(batch, heads_q, len_q, head_dim, dtype=dtype)
        k, v = (draw(batch, heads_kv, len_k, head_dim, dtype=dtype) for _ in range(2))
        return lambda: fastattn.attention(q, k, v, **options)

    def linear(rows: int, features_in: int, features_out: int, dtype: Any) -> Call:
        x, weight = draw(rows, features_in), ops.pack(draw(features_out, features_in), dtype=dtype)
        return lambda: ops.linear(x, weight, activation="gelu")

    ones, rows = np.ones(768, np.float32), draw(512, 768)
    encoder = layers.TransformerEncoderLayer(384, 12, 1536, "gelu", rng=np.random.default_rng(0))
    small, large = draw(1, 16, 384), draw(8, 128, 384)
    q, k, v, gate = draw(4, 1, 2, 4, 16)
    rates = -abs(draw(1, 2, 4))
    variants: dict[str, tuple[Any, ...]] = {
        "gated": (functional.gated_attention, q, k, v, gate),
        "sparsemax": (functional.sparsemax_attention, q, k, v),
        "sigmoid": (functional.sigmoid_attention, q, k, v),
        "linear": (partial(functional.linear_attention, rule="linear"), q, k, v),
        "delta rule": (partial(functional.linear_attention, rule="delta", beta=-rates), q, k, v),
    }
    slopes, bias, mask = 0.5 ** np.arange(8), draw(8, 1024, 1024), rng.random((1024, 1024)) < 0.7
    return {
        "tiny": attention(1, 1, 1, 8, 8, 16),
        "tiny, causal": attention(1, 1, 1, 8, 8, 16, causal=True),
        **{f"tiny, {name}": partial(*call) for name, call in variants.items()},
        "128": attention(1, 12, 12, 128, 128, 64),
        "512": attention(1, 12, 12, 512, 512, 64),
        "2048": attention(1, 8, 8, 2048, 2048, 64),
        "512, causal": attention(1, 12, 12, 512, 512, 64, causal=True),
        "grouped": attention(1, 32, 8, 512, 512, 64),
        "decode": attention(1, 32, 32, 1, 4096, 128),
        "decode, grouped": attention(1, 32, 8, 1, 4096, 128),
        "bfloat16": attention(1, 8, 8, 2048, 2048, 64, dtype=ml_dtypes.bfloat16),
        "softcap": attention(1, 8, 8, 1024, 1024, 64, softcap=20.0),
        "alibi": attention(1, 8, 8, 1024, 1024, 64, alibi_slopes=slopes),
        "bias": attention(1, 8, 8, 1024, 1024, 64, bias=bias),
        "mask": attention(1, 8, 8, 1024, 1024, 64, mask=mask),
        "linear, 1 row": linear(1, 2048, 2048, "float32"),
        "linear, 1 row, int8": linear(1, 2048, 2048, "int8"),
        "linear, 512 rows": linear(512, 1024, 1024, "float32"),
        "layer_norm": lambda: ops.layer_norm(rows, ones, ones),
        "layer_norm, gradients": lambda: grad.layer_norm(rows, rows, ones),
        "gelu, gradient": lambda: grad.activate(rows, rows, "gelu"),
        "softmax": lambda: ops.softmax(rows),
        "encoder layer, 16": lambda: encoder(small),
        "encoder layer, 8 x 128": lambda: encoder(large),
    }


def products() -> dict[str, Call]:
    """The products of bench/products.py, most with many rows; weights of few rows stay in the caches here."""
    import ml_dtypes
    import numpy as np

    from bench.products import KINDS, MANY
    from fastattn import ops

    rng, found = np.random.default_rng(0), {}
    for kind, (stored, dtype, activations, _) in KINDS.items():
        for rows, features_in, features_out in (*MANY, *((rows, 384, 1536) for rows in (1, 4, 8, 16, 64))):
            x = rng.standard_normal((rows, features_in), np.float32)
            x = x.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x
            weight = ops.pack(rng.standard_normal((features_out, features_in), np.float32), dtype=stored)
            call = partial(ops.linear, x, weight, out=np.empty((rows, features_out), x.dtype))
            name = f"{kind}, {rows} {features_in} {features_out}"
            found[name] = partial(call, activations=activations)
    return found


def serve(functions: dict[str, Call]) -> None:
    """Answer each name that comes in with the shortest of five times, in seconds."""
    print(json.dumps(list(functions)), flush=True)
    for line in sys.stdin:
        function = functions[json.loads(line)]
        function()
        start = time.perf_counter()
        function()
        count = max(1, int(0.01 / max(time.perf_counter() - start, 1e-7)))
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(count):
                function()
            best = min(best, (time.perf_counter() - start) / count)
        print(json.dumps(best), flush=True)


class Build:
    """The process of one interpreter."""

    def __init__(self, python: str, what: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([python, __file__, "--serve", what], text=True, **pipes)
        self.names = json.loads(self.process.stdout.readline())

    def seconds(self, name: str) -> float:
        self.process.stdin.write(json.dumps(name) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--products", action="store_true", help="linear in every type, many rows")
    options = parser.parse_args()
    what = "products" if options.products else "calls"
    old, new = Build(options.old, what), Build(options.new, what)
    print(f"{'':32} {'old':>12} {'new':>12} {'shortest':>9} {'median':>7}   (new / old)")
    for name in old.names:
        if options.only in name:
            pairs = [(old.seconds(name), new.seconds(name)) for _ in range(options.rounds)]
            olds, news = zip(*pairs, strict=True)
            ratio = median(b / a for a, b in pairs)
            shortest = min(news) / min(olds)
            print(
                f"{name:32} {min(olds) * 1e6:9.1f} us {min(news) * 1e6:9.1f} us {shortest:9.3f} {ratio:7.3f}"
            )


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    sys.path.append(sys.path.pop(0))  # of bench/, last: each build is what its interpreter imports
    if sys.argv[1:2] == ["--serve"]:
        serve(products() if sys.argv[2] == "products" else calls())
    else:
        main()
