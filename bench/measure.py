"""Measure what docs/dev/ says of one thread, and how much of a layer or a step is Python.

    python -m bench measure WHAT [--isa ISA] [--dtype D]

WHAT is peak, strided, padding, decode, int8, caches, layer, step, select, selected or blocks.

Each time is the shortest of many, in CPU time of the thread; of int8 and caches in all threads, by the clock.
The limit or the counterpart that it is compared with is measured in the same seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import fastattn
from bench import files as model_files
from bench.clock import Call, normal, shortest
from fastattn import functional, models
from fastattn._engine import settings
from fastattn._engine.core import _core
from fastattn.layers import KVCache, TransformerEncoderLayer


def best(*calls: Call) -> list[float]:
    """The shortest CPU time of the thread in each call."""
    return shortest(*calls, clock=time.thread_time)


def peak(dtype: str) -> None:
    """FLOP/s as a share of the peak, which multiply-adds of registers reach."""
    square = ((1, 12, 128, 64), (8, 12, 128, 32), (1, 12, 512, 64), (1, 1, 2048, 64), (1, 1, 2048, 128))
    odd = ((8, 12, 77, 64), (4, 12, 197, 64), (1, 8, 1500, 64))
    for b, h, length, len_k, d in [*((b, h, n, n, d) for b, h, n, d in square + odd), (2, 8, 1024, 77, 40)]:
        q, k = normal((b, h, length, d), dtype), normal((b, h, len_k, d), dtype)
        for causal in (False, True)[: 1 + (length == len_k)]:
            limit = max(_core.fma_peak(dtype, 1) for _ in range(10))
            (seconds,) = best(lambda q=q, k=k, c=causal: fastattn.attention(q, k, k, causal=c, num_threads=1))
            limit = max(limit, *(_core.fma_peak(dtype, 1) for _ in range(10)))
            flops = 4 * b * h * length * len_k * d / (2 if causal else 1)
            name = "causal" if causal else "no mask"
            share = f"{flops / seconds / limit:.0%} of {limit / 1e9:.0f} GFLOP/s"
            print((b, h, length, len_k, d), name, share)


def strided(dtype: str) -> None:
    """(B, L, H, D) arrays as transposed views, relative to contiguous ones."""
    for heads, length, d in ((6, 1024, 64), (12, 1024, 64), (16, 1024, 64), (8, 1024, 128), (64, 512, 64)):
        view = normal((1, length, heads, d), dtype).swapaxes(1, 2)
        dense = np.ascontiguousarray(view)
        a, b = best(*(lambda x=x: fastattn.attention(x, x, x, num_threads=1) for x in (view, dense)))
        print(f"H * D = {heads * d}, length {length}: {a / b:.2f}")


def padding(dtype: str) -> None:
    """A padding mask and kv_lengths, relative to no padding."""
    for shape in ((8, 12, 128, 32), (8, 12, 512, 64)):
        q, length = normal(shape, dtype), shape[2]
        lengths = np.random.default_rng(0).integers(length // 2, length + 1, shape[0])
        mask = (np.arange(length) < lengths[:, None])[:, None, None, :]
        plain, masked, short = best(
            lambda q=q: fastattn.attention(q, q, q, num_threads=1),
            lambda q=q, m=mask: fastattn.attention(q, q, q, mask=m, num_threads=1),
            lambda q=q, n=lengths: fastattn.attention(q, q, q, kv_lengths=n, num_threads=1),
        )
        left = lengths.mean() / length
        print(shape, f"work left {left:.2f}, mask {masked / plain:.2f}, kv_lengths {short / plain:.2f}")


def decode(dtype: str) -> None:
    """Bytes of k and v per second, as a share of the read bandwidth."""
    shapes = ((1, 32, 32, 4096, 128), (8, 12, 12, 1024, 64), (1, 32, 8, 4096, 128))
    for b, heads, heads_kv, length, d in shapes:
        q = normal((b, heads, 1, d), dtype)
        k, v = normal((b, heads_kv, length, d), dtype), normal((b, heads_kv, length, d), dtype)
        limit = max(_core.read_bandwidth(1) for _ in range(2))
        (seconds,) = best(lambda q=q, k=k, v=v: fastattn.attention(q, k, v, num_threads=1))
        limit = max(limit, _core.read_bandwidth(1))
        share = 2 * k.nbytes / seconds / limit
        print((b, f"{heads}/{heads_kv}", length, d), f"{share:.0%} of {limit / 1e9:.1f} GB/s")
    for length in (256, 1 << 15, 1 << 20):  # the last 256 keys of longer and longer caches
        q, k = normal((1, 8, 1, 64), dtype), normal((1, 8, length, 64), dtype)
        (seconds,) = best(lambda q=q, k=k: fastattn.attention(q, k, k, window=(255, 0), num_threads=1))
        print((1, 8, length, 64), f"window of 256: {1e6 * seconds:.0f} us")


def int8(dtype: str) -> None:
    """A cache in int8, and products of int8, also of arrays that are rounded first, beside other types.

    Queries of the cache are in `dtype`.
    """
    ints: dict[str, Any] = {"products": "int8"}
    one_row = ((32, 32, 1, 8192, 128), (32, 8, 1, 4096, 128))
    square = (
        (8, 8, 4096, 4096, 64),
        (12, 12, 1024, 1024, 64),
        (8, 8, 2048, 2048, 128),
        (96, 96, 128, 128, 64),
    )
    print(f"queries of caches in {dtype}; heads, heads_kv, len_q, len_k, head_dim:")
    print("ms in float32, bfloat16, of a cache in int8;")
    print("products of int8: of the cache, of float32, of bfloat16; bfloat16 / products of the cache")
    for heads, heads_kv, len_q, len_k, d in (*one_row, *square):
        shapes = (1, heads, len_q, d), *[(1, heads_kv, len_k, d)] * 2
        floats, pairs = (
            [normal(x, to, seed) for seed, x in enumerate(shapes)] for to in ("float32", "bfloat16")
        )
        cached = {"q": normal(shapes[0], dtype), **KVCache(dtype="int8").append(*floats[1:])._asdict()}
        for causal in (False, True)[: 1 + (len_q > 1)]:
            calls = [
                partial(fastattn.attention, *floats),
                partial(fastattn.attention, *pairs),
                partial(fastattn.attention, **cached),
                partial(fastattn.attention, **cached, **ints),
                partial(fastattn.attention, *floats, **ints),
                partial(fastattn.attention, *pairs, **ints),
            ]
            each = shortest(*(partial(call, causal=causal) for call in calls))
            times = ", ".join(f"{1e3 * seconds:.2f}" for seconds in each)
            shape = (heads, heads_kv, len_q, len_k, d)
            print(shape, "causal:" if causal else "no mask:", f"{times}; {each[1] / each[3]:.2f}", flush=True)


def caches(dtype: str) -> None:
    """One token after 8,000 others, of caches in 16, 8 and 4 bits; and 512 queries against 4,096 keys."""
    kinds = ("bfloat16", "int8", "int4")
    one = ((1, 32, 32, 1, 8000, 64), (1, 32, 32, 1, 8000, 128), (1, 32, 8, 1, 8000, 128))
    print(f"queries in {dtype}; batch, heads, heads_kv, len_q, len_k, head_dim: ms of caches in", *kinds)
    print("int8 / int4, in the median of interleaved rounds; gigabytes a second of int4")
    for b, heads, heads_kv, len_q, len_k, d in (*one, (1, 8, 8, 512, 4096, 64)):
        q = normal((b, heads, len_q, d), dtype)
        k, v = (normal((b, heads_kv, len_k, d), "float32", seed) for seed in (1, 2))
        held = {kind: KVCache(len_k, kind).append(k, v)._asdict() for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(30):
            for kind, arrays in held.items():
                begin = time.perf_counter()
                fastattn.attention(q, **arrays)
                times[kind].append(time.perf_counter() - begin)
        int8, int4 = np.array(times["int8"]), np.array(times["int4"])
        read = (held["int4"]["k"].nbytes + held["int4"]["v"].nbytes) / int4.min() / 1e9
        each = ", ".join(f"{1e3 * min(values):.2f}" for values in times.values())
        shape = (b, heads, heads_kv, len_q, len_k, d)
        print(shape, f"{each}; {np.median(int8 / int4):.2f}; {read:.1f}", flush=True)


def timed(program: Any, inside: list[float]) -> Any:
    """A compiled program that appends the time of each call to `inside`."""

    def run(*arguments: Any) -> None:
        start = time.perf_counter()
        program.run(*arguments)
        inside.append(time.perf_counter() - start)

    return SimpleNamespace(run=run)


def layer(dtype: str) -> None:
    """Time of an encoder layer outside its kernels; six layers run in turn, as in a model."""
    rngs = (np.random.default_rng(i) for i in range(6))
    layers = [TransformerEncoderLayer(384, 12, 1536, "gelu", rng=rng) for rng in rngs]
    for batch, length in ((1, 16), (1, 128), (32, 128)):
        x, inside, whole = normal((batch, length, 384), dtype), [], []
        for each in layers:
            each(x)
        for each in layers:  # the compiled call, timed from outside
            for layout in each._programs[True][1].program.layouts:
                layout.compiled = [timed(part, inside) for part in layout.compiled]
        for _ in range(100 if batch * length < 1000 else 5):
            for each in layers:
                start = time.perf_counter()
                each(x)
                whole.append(time.perf_counter() - start)
        outside = np.median(np.subtract(whole, inside))
        for each in layers:
            each._programs.clear()
        micro, share = np.array([np.median(whole), outside]) * 1e6, outside / np.median(whole)
        print((batch, length), "{:.0f} us, {:.0f} of them Python".format(*micro), f"({share:.1%})")


def step(dtype: str) -> None:
    """Time of one cached step of a decoder, and how much of it is Python, with float32 and int8 weights."""
    small = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
    kinds = ("float32", "int8")
    for layers, vocab, changes in (
        (8, 8000, small),
        (4, 32000, {}),
    ):  # the second is a quarter of Llama 3.2 1B
        config = model_files.LLAMA | changes | {"num_hidden_layers": layers, "vocab_size": vocab}
        with tempfile.TemporaryDirectory() as folder:
            made = model_files.write(Path(folder, "llama"), config, model_files.llama_shapes(config))
            loaded = [models.load(made, dtype=dtype, weights_dtype=kind) for kind in kinds]
        generated = [model.generate(range(16), 10**6, stop=()) for model in loaded]
        inside: list[float] = []
        for model, tokens in zip(loaded, generated, strict=True):
            next(tokens), next(tokens)
            for program in (model.program, model.logits):
                program._compiled = [timed(part, inside) for part in program._compiled]
        whole = {kind: [] for kind in kinds}
        outside = {kind: [] for kind in kinds}
        end = time.perf_counter() + 5
        while time.perf_counter() < end:
            for kind, tokens in zip(kinds, generated, strict=True):
                for _ in range(10):  # until the threads of the other model rest
                    inside.clear()
                    start = time.perf_counter()
                    next(tokens)
                    whole[kind].append(time.perf_counter() - start)
                    outside[kind].append(whole[kind][-1] - sum(inside))
        for kind in kinds:
            all_of_it, python = (np.median(times[kind]) * 1e6 for times in (whole, outside))
            size = f"{layers} x {config['hidden_size']}, {kind}"
            print(f"{size}: {all_of_it:.0f} us, {python:.0f} of them Python")


def select(dtype: str) -> None:
    """`select_keys`: shares of the peak, and of one query the bytes of its keys as one of the bandwidth."""
    relu = {"activation": "relu", "causal": True}
    shapes = (
        ("DeepSeek-V3.2", (64, 1, 1024, 16384, 128), 2048, relu),
        ("the first 4096", (64, 1, 4096, 4096, 128), 2048, relu),
        *(
            (
                f"MoBA, {n} blocks",
                (8, 8, 4096, n, 128),
                8,
                {"causal": True, "last": 1, "block_size": 4096 // n},
            )
            for n in (64, 256, 1024)
        ),
        ("one query", (64, 1, 1, 1 << 17, 128), 2048, relu),
        ("one query and head", (1, 1, 1, 1 << 17, 128), 2048, {}),
    )
    for name, (heads, heads_kv, len_q, blocks, d), top_k, options in shapes:
        q, k = normal((heads, len_q, d), dtype), normal((heads_kv, blocks, d), dtype)
        if "activation" in options:
            options = {**options, "weights": normal((heads, len_q))}
        limits = (
            max(_core.fma_peak(dtype, 1) for _ in range(10)),
            max(_core.read_bandwidth(1) for _ in range(2)),
        )
        (seconds,) = best(
            lambda q=q, k=k, n=top_k, o=options: functional.select_keys(q, k, n, num_threads=1, **o)
        )
        size = options.get("block_size", 1)
        allowed = np.full(len_q, blocks)
        if "causal" in options:
            allowed = (blocks * size - len_q + np.arange(len_q)) // size + 1
        speed = 2 * heads * d * allowed[allowed > top_k].sum() / seconds
        text = f"{speed / limits[0]:.0%} of {limits[0] / 1e9:.0f} GFLOP/s"
        if len_q == 1:
            text += f", {k.nbytes / seconds / limits[1]:.0%} of {limits[1] / 1e9:.1f} GB/s"
        print(f"{name} {q.shape} {k.shape}, {top_k} selected: {1e3 * seconds:.2f} ms, {text}")


def selected(dtype: str) -> None:
    """Attention to selected keys, over attention of the same queries to as many keys side by side.

    Lists of neighbouring queries have nothing to do with one another, or 9 keys of 10 in common, or all.
    """
    fastattn.set_num_threads(1)
    rng = np.random.default_rng(0)
    shapes = (
        ("latent, as DeepSeek-V3.2", (128, 1, 64, 16384, 576, 512), 2048, 1),
        ("16 heads a key head", (16, 1, 512, 16384, 128, 128), 2048, 1),
        ("blocks, as NSA", (64, 4, 256, 16384, 128, 128), 16, 64),
        ("blocks, as MoBA", (8, 8, 512, 16384, 128, 128), 3, 512),
        ("a key head each", (8, 8, 256, 16384, 128, 128), 2048, 1),
        ("one query", (32, 8, 1, 131072, 128, 128), 2048, 1),
        ("one query, pages, as Quest", (32, 8, 1, 131072, 128, 128), 128, 16),
    )
    for name, (heads, heads_kv, len_q, len_k, d, d_v), number, size in shapes:
        q, k = normal((heads, len_q, d), dtype), normal((heads_kv, len_k, d), dtype)
        v = k[..., :d_v] if d != d_v else normal((heads_kv, len_k, d_v), dtype)
        keys, values = (np.ascontiguousarray(x[:, : number * size]) for x in (k, v))
        draws = rng.permuted(np.tile(np.arange(len_k // size), (heads_kv, len_q, 1)), axis=-1)[..., :number]
        for alike in (0.0, 0.9, 1.0) if len_q > 1 else (0.0,):
            common = rng.random(draws.shape) < alike
            lists = np.where(common, draws[:, :1], draws)
            ours, dense = best(
                lambda q=q, k=k, v=v, x=lists, n=size: functional.selected_attention(
                    q, k, v, x, block_size=n
                ),
                lambda q=q, k=keys, v=values: fastattn.attention(q, k, v),
            )
            print(f"{name}, {number * size} keys, {alike:.0%} alike: {1e3 * ours:.2f} ms, {ours / dense:.2f}")


def blocks(dtype: str) -> None:
    """A prompt with a fifth of the blocks, and how many keys are lost that some queries of a block need.

    They have most of these queries' weight, among random keys.
    """
    fastattn.set_num_threads(1)
    heads, length, width, size = 8, 16384, 64, 64
    n, rng = length // size, np.random.default_rng(0)
    q, k, v = (normal((heads, length, width), dtype) for _ in range(3))
    (exact,) = best(lambda: fastattn.attention(q, k, v, causal=True))
    for rule, stride in (("antidiagonal", 4), ("antidiagonal", 8), ("mean", 16)):
        options = {"keep": 0.2, "rule": rule, "stride": stride, "causal": True}
        lists = functional.select_blocks(q, k, **options)
        times = best(
            lambda o=options: functional.select_blocks(q, k, **o),
            lambda x=lists: functional.selected_attention(q, k, v, x, block_size=size, causal=True),
        )
        lost = []
        for needing in (64, 16, 4):
            rows, keys = np.array(q, np.float32), np.array(k, np.float32)
            places = [
                (h, b, int(rng.integers(size, size * b - size)))
                for h in range(heads)
                for b in range(n // 2, n)
            ]
            for head, block, key in places:
                direction = rng.standard_normal(width)
                direction *= 12**0.5 * width**0.25 / np.linalg.norm(direction)  # a score of 12
                rows[head, size * block : size * block + needing] += direction
                keys[head, key] = direction
            found = functional.select_blocks(rows, keys, **options)
            lost.append(
                np.mean([key // size not in found[head, size * block] for head, block, key in places])
            )
        shares = ", ".join(f"{share:.1%}" for share in lost)
        parts = ", ".join(f"{seconds / exact:.2f}" for seconds in times)
        print(
            f"{rule}, stride {stride}: {exact / sum(times):.2f} times exact attention ({parts} of its time)"
        )
        print(f"  lost, of keys that 64, 16 and 4 queries of a block need: {shares}", flush=True)


def main(words: list[str]) -> None:
    """Parse the command line and measure."""
    measures = {
        f.__name__: f
        for f in (peak, strided, padding, decode, int8, caches, layer, step, select, selected, blocks)
    }
    parser = argparse.ArgumentParser(
        prog="python -m bench measure", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("what", choices=measures)
    parser.add_argument("--isa", choices=fastattn.show_config()["isas_available"])
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "float16", "bfloat16"))
    arguments = parser.parse_args(words)
    with settings.forced(isa=arguments.isa):
        measures[arguments.what](arguments.dtype)
