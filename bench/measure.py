"""Measure what docs/dev/ says of one thread, and how much of a layer or a step is Python.

    python -m bench.measure {peak,strided,padding,decode,int8,linear,pack,load,layer,shared,session,experts,
                             step,maxsim,select,selected,tensors,scaling,gated_norm,deberta}
                            [--isa ISA] [--dtype D]

Each time is the shortest of many, in CPU time of the thread; those of `load` are seconds of one call each,
those of `int8` and `session` medians. `maxsim`, `tensors` and `scaling` take all threads.
The limit or the counterpart that it is compared with is measured in the same seconds.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import time
import tracemalloc
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import fastattn
from bench import files as model_files
from bench import hybrid_models
from bench.clock import Call, normal, shortest
from bench.clock import seconds as time_of
from fastattn import functional, grad, models, ops
from fastattn._args.pack import pack_args
from fastattn._args.packed import WEIGHT_DTYPES
from fastattn._engine import dispatch, settings
from fastattn._engine.core import _core
from fastattn._engine.experts import Experts, ExpertsStep
from fastattn._engine.plain import PLAIN
from fastattn._engine.program import build
from fastattn._engine.steps import OUT, AttendStep, Sequences, X
from fastattn.functional import mamba2_scan, selective_scan
from fastattn.grad import vjp
from fastattn.layers import KVCache, TransformerEncoder, TransformerEncoderLayer
from fastattn.models import _vectors
from fastattn.models._families.deberta import DisentangledStep


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
    """Keys and values in int8, in turns with bfloat16 and `dtype`, which queries have, too."""
    decoding, grouped, square = (32, 32, 1, 8192, 128), (32, 8, 1, 4096, 128), (8, 8, 2048, 2048, 64)
    for heads, heads_kv, len_q, len_k, d in (decoding, grouped, square):
        q, k = normal((1, heads, len_q, d), dtype), normal((1, heads_kv, len_k, d), dtype)
        cached = KVCache(dtype="int8").append(k, k)
        held = {"int8": cached._asdict() | {"kv_lengths": None, "q_offset": None}}
        for kind in ("bfloat16", dtype):
            held[kind] = {name: normal(k.shape, kind) for name in "kv"}
        for threads in sorted({1, fastattn.get_num_threads()}):
            calls = {
                kind: partial(fastattn.attention, q, **arrays, num_threads=threads)
                for kind, arrays in held.items()
            }
            times: dict[str, list[float]] = {kind: [] for kind in calls}
            end = time.perf_counter() + 5
            while time.perf_counter() < end:
                for kind, call in calls.items():
                    start = time.perf_counter()
                    call()
                    times[kind].append(time.perf_counter() - start)
            median = {kind: float(np.median(seconds)) for kind, seconds in times.items()}
            for kind, seconds in median.items():
                share = f"int8 takes {median['int8'] / seconds:.2f} of that"
                print((heads, heads_kv, len_q, len_k, d), threads, f"{kind} {seconds * 1e3:.2f} ms, {share}")


def linear(dtype: str) -> None:
    """`ops.linear` as a share of the peak, with weights from the caches (near) and from memory (far)."""
    shapes = ((128, 384, 1536), (1024, 768, 768), (1024, 768, 3072), (2048, 2048, 2048), (16, 384, 1536))
    for rows, k, n in shapes:
        x, out = normal((rows, k), dtype), np.empty((rows, n), normal((1,), dtype).dtype)
        weights = [ops.pack(normal((n, k), dtype)) for _ in range(2 + (48 << 20) // (4 * n * k))]
        limit = max(_core.fma_peak(dtype, 1) for _ in range(10))
        near, far = best(
            *(
                lambda x=x, out=out, turn=turn: ops.linear(x, next(turn), out=out, num_threads=1)
                for turn in (cycle(weights[:1]), cycle(weights))
            )
        )
        limit = max(limit, *(_core.fma_peak(dtype, 1) for _ in range(10)))
        shares = [2 * rows * k * n / seconds / limit for seconds in (near, far)]
        print((rows, k, n), "near {:.0%}, far {:.0%}".format(*shares), f"of {limit / 1e9:.0f} GFLOP/s")


def pack(dtype: str) -> None:
    """Packing rows of `dtype`, and unpacking: bytes read and written per second, beside those of a copy.

    First into memory that is there, then into new memory, which the system fills with 0 before.
    """
    source = np.ones(1 << 26, np.uint8)
    copy = source.copy()
    for k, n in ((2048, 8192), (8192, 2048)):
        rows = normal((n, k), dtype)
        for kind in WEIGHT_DTYPES:
            args = pack_args(rows, None, kind, 1, None)
            dispatch.run(args)
            packed = args.packed()
            args.out.flags.writeable = True
            for array in (args.scales, args.sums):
                if array is not None:
                    array.flags.writeable = True
            copied, *seconds = best(
                lambda: np.copyto(copy, source),
                lambda args=args: dispatch.run(args),
                lambda rows=rows, kind=kind: ops.pack(rows, dtype=kind, num_threads=1),
                packed.unpack,
            )
            limit = 2 * copy.nbytes / copied
            n_bytes = [rows.nbytes + packed.nbytes] * 2 + [packed.nbytes + packed.unpack().nbytes]
            shares = [limit * s / b for b, s in zip(n_bytes, seconds, strict=True)]
            print((n, k), f"{dtype} to {kind}: {seconds[0] * 1e3:.1f} ms,", end=" ")
            what = "{:.1f} times a copy at {:.0f} GB/s; into new memory {:.1f}; unpack {:.1f}"
            print(what.format(shares[0], limit / 1e9, *shares[1:]))


def load(dtype: str) -> None:
    """Seconds of loading a Llama of 1.2e9 weights, beside those of reading its file and of new memory.

    And how much memory it has at its peak, and after it.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = model_files.llama(Path(folder), 16, 128256)
        path = made / "model.safetensors"
        for _ in range(3):
            for kind in ("bfloat16", "int8"):
                times = []
                size = path.stat().st_size // (1 if kind == "bfloat16" else 2)
                for call in (
                    lambda: np.fromfile(path, np.uint8),
                    lambda size=size: np.empty(size, np.uint8).fill(1),
                    lambda kind=kind: models.load(made, dtype=dtype, weights_dtype=kind),
                ):
                    start = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - start)
                print(kind, "read {:.2f} s, new memory {:.2f} s, load {:.2f} s".format(*times))
        for kind in ("bfloat16", "int8"):
            tracemalloc.start()
            model = models.load(made, dtype=dtype, weights_dtype=kind)
            stays, most = (n / 1e6 for n in tracemalloc.get_traced_memory())
            tracemalloc.stop()
            print(model, f"{stays:,.1f} MB, {most:,.1f} at its peak")


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
            _, program = each._plain
            program._compiled = [timed(part, inside) for part in program._compiled]
        for _ in range(100 if batch * length < 1000 else 5):
            for each in layers:
                start = time.perf_counter()
                each(x)
                whole.append(time.perf_counter() - start)
        outside = np.median(np.subtract(whole, inside))
        for each in layers:
            each.__dict__["_plain"] = None, None
        micro, share = np.array([np.median(whole), outside]) * 1e6, outside / np.median(whole)
        print((batch, length), "{:.0f} us, {:.0f} of them Python".format(*micro), f"({share:.1%})")


def shared(dtype: str) -> None:
    """Time of four layers of which two attend the keys of another, and of four with keys of their own."""

    def stack(width: int, sources: tuple[int, ...]) -> TransformerEncoder:
        makes = [{"query_only": i != j} for i, j in enumerate(sources)]
        kind: Any = partial(TransformerEncoderLayer, width, width // 32, 4 * width, "gelu", rng=0)
        return TransformerEncoder([kind(attention=options) for options in makes])

    shapes = ((1, 16, 64), (1, 64, 64), (32, 16, 64), (1, 128, 256), (8, 128, 384), (1, 512, 768))
    for batch, length, width in shapes:
        x, padding = normal((batch, length, width), dtype), np.zeros((batch, length), bool)
        padding[:, length // 2 :] = True
        models = [stack(width, sources) for sources in ((0, 1, 2, 3), (0, 0, 2, 2))]
        for name, how in (
            ("plain", {}),
            ("half hidden", {"src_key_padding_mask": padding}),
            ("causal", {"is_causal": True}),
        ):
            own, other = shortest(*(partial(model, x, **how) for model in models))
            print(
                (batch, length, width),
                name,
                f"{own * 1e3:.3g} ms, shared {other * 1e3:.3g}",
                f"{other / own:.2f}",
            )


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


def session(dtype: str) -> None:
    """Time to the next turn's first token behind 4,000 tokens, of its 64 tokens alone, and of all tokens.

    A Llama and, where torch and transformers are installed, two models more.
    """
    ids, names = np.random.default_rng(0).integers(0, 8000, 4064), ["llama", "gemma-3-1b", "qwen3.5-0.8b"]
    for name in names if find_spec("transformers") else names[:1]:
        with tempfile.TemporaryDirectory() as scratch:
            to = Path(scratch)
            is_llama = name == "llama"
            folder = model_files.llama(to, 2, 8000) if is_llama else hybrid_models.write_model(to, name)
            model: Any = models.load(folder, dtype=dtype)
        kept = model.session()
        list(model.generate(ids[:4000], 1, stop=(), cache=kept))

        def turn(kept: Any, model: Any = model) -> int:
            return next(model.generate(ids, 1, stop=(), cache=kept))

        def alone(kept: Any, model: Any = model) -> Any:
            hidden = model._hidden(ids[4000:], np.array([64]), 4064, kept._cache)
            return model.logits.run(hidden[-1:], Sequences(1))

        times: Any = {turn: [], alone: []}
        for _ in range(9):
            for call, found in times.items():
                copied = kept.copy(4000)
                found.append(time_of(partial(call, copied)))
        one, other = (1e3 * np.median(found) for found in times.values())
        whole = 1e3 * time_of(lambda model=model: next(model.generate(ids, 1, stop=())))
        print(f"{name}: next turn {one:.1f} ms, its tokens alone {other:.1f}, all tokens {whole:.0f}")


def experts(dtype: str) -> None:
    """One row by 32 weights of 4 MB and by one of 128 MB; one token of four experts, and its products."""
    one, many = normal((1, 1024), dtype), [ops.pack(normal((1024, 1024), dtype)) for _ in range(32)]
    big, first = (
        ops.pack(normal((32768, 1024), dtype)),
        [ops.pack(normal((512, 1024), dtype)) for _ in range(32)],
    )
    second, router = (
        [ops.pack(normal((1024, 512), dtype)) for _ in range(32)],
        ops.pack(normal((32, 1024), dtype)),
    )
    step = ExpertsStep("x", "out", Experts(router, (tuple(first), tuple(second)), 4, True), "silu", "x")
    out, counts = np.empty_like(one), np.arange(32) < 4
    row, inner = np.repeat(one, 4, axis=0), normal((4, 512), dtype)

    def products() -> None:
        ops.linear(one, router)
        ops.grouped_linear(row, first, counts.astype(int), activation="silu")
        ops.grouped_linear(inner, second, counts.astype(int))

    calls = (
        lambda: [ops.linear(one, weight) for weight in many],
        lambda: ops.linear(one, big),
        lambda: step.run(PLAIN, {"x": one}, Sequences(1), out),
        products,
    )
    times = np.array(shortest(*calls))
    print("{:.1f} and {:.1f} GB/s".format(*(big.nbytes / times[:2] / 1e9)))
    print("one token of four experts {:.0f} us, its products {:.0f}".format(*times[2:] * 1e6))


def maxsim(dtype: str) -> None:
    """1 and 32 queries of 32 tokens with 1000 documents of 60 to 300: ms, and of sentence-transformers."""
    rng = np.random.default_rng(0)
    documents = [rng.standard_normal((n, 128), np.float32) for n in rng.integers(60, 301, 1000)]
    try:
        import torch
        from sentence_transformers.util.similarity import maxsim as theirs
    except ImportError:
        torch = None
    for n in (1, 32):
        queries = [rng.standard_normal((32, 128), np.float32) for _ in range(n)]
        calls = [partial(_vectors.maxsim, "maxsim", queries, documents, mean=False)]
        if torch is not None:
            torch.set_num_threads(fastattn.get_num_threads())
            texts = [list(map(torch.from_numpy, side)) for side in (queries, documents)]
            calls.append(partial(theirs, *texts))
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(8):
            for call, found in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                found.append(1e3 * (time.perf_counter() - start))
        print(f"{n} queries: {', '.join(f'{min(found):.0f} ms' for found in times)}")


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
    if find_spec("torch"):
        _beside_masks(rng, dtype, 16, 1, 512, 2048, 1)
        _beside_masks(rng, dtype, 64, 4, 256, 16, 64)


def _beside_masks(
    rng: Any, dtype: str, heads: int, heads_kv: int, len_q: int, number: int, size: int
) -> None:
    """Attention to selected keys beside a dense mask: here, in torch's SDPA, compiled in FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.set_num_threads(1)
    len_k, group = 16384, heads // heads_kv
    q, k, v = (normal((1, h, n, 128), dtype) for h, n in ((heads, len_q), *[(heads_kv, len_k)] * 2))
    draws = rng.permuted(np.tile(np.arange(len_k // size), (1, heads_kv, len_q, 1)), axis=-1)[..., :number]
    lists = np.where(rng.random(draws.shape) < 0.9, draws[:, :, :1], draws)
    table = np.zeros((heads_kv, len_q, len_k // size), bool)
    np.put_along_axis(table, lists[0], True, axis=-1)
    mask = np.repeat(np.repeat(table, size, axis=-1), group, axis=0)[None]
    tq, tk, tv, tmask, chosen = (torch.from_numpy(x) for x in (q, k, v, mask, table))
    blocks = create_block_mask(
        lambda b, h, i, j: chosen[h // group, i, j // size], 1, heads, len_q, len_k, device="cpu"
    )
    flex = torch.compile(flex_attention, dynamic=False)
    times = best(
        lambda: functional.selected_attention(q, k, v, lists, block_size=size),
        lambda: fastattn.attention(q, k, v, mask=mask),
        lambda: torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, tmask, enable_gqa=True),
        lambda: flex(tq, tk, tv, block_mask=blocks, enable_gqa=True),
    )
    names = "lists", "mask", "torch's SDPA", "FlexAttention"
    text = ", ".join(f"{name} {1e3 * x:.0f} ms" for name, x in zip(names, times, strict=True))
    print(f"{heads} heads, {number} of {len_k // size} blocks of {size}, 90% alike: {text}")


def tensors(dtype: str) -> None:
    """Functions of hybrid models on tensors: transformers' own in turn with those of `register`."""
    from importlib import import_module

    import torch

    from fastattn.torch._hybrids import FUNCTIONS

    torch.manual_seed(0)
    torch.set_num_threads(fastattn.get_num_threads())

    def random(*shape: int) -> Any:
        return torch.randn(shape).to(getattr(torch, dtype))

    for length, training in ((512, True), (1024, False), (8192, False)):
        heads = (1, length, 32)
        q, k = (torch.nn.functional.normalize(random(1, length, 16, 128), dim=-1) for _ in "qk")
        v, beta, decays = random(*heads, 128), torch.rand(heads), -torch.rand(*heads, 128)
        x, weight, bias = random(1, length, 8192), random(8192, 4), random(8192)
        wide, dt, group = random(1, length, 80, 64), random(1, length, 80), random(1, length, 1, 128)
        scan = (-torch.rand(80), group, group)
        many = [y.repeat_interleave(2, dim=2) for y in (q, k)]
        calls: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
            "gated_delta, 16 and 32 heads": (
                "qwen3_next", "torch_chunk_gated_delta_rule", (q, k, v, decays[..., 0], beta), {},
            ),
            "kimi_delta, 32 heads": (
                "kimi_linear", "chunk_kimi_delta_attention", (*many, v, decays, beta), {},
            ),
            "convolution, channels side by side": (
                "mamba2", "causal_conv1d_fn", (x.transpose(1, 2), weight, bias, "silu"), {},
            ),
            "convolution, tokens side by side": (
                "mamba2", "causal_conv1d_fn", (x.transpose(1, 2).contiguous(), weight, bias, "silu"), {},
            ),
            "Mamba-2, 80 heads": (
                "mamba2", "mamba2_chunk_scan", (wide, dt, *scan, 256),
                {"D": torch.ones(80), "dt_bias": torch.ones(80), "dt_softplus": True},
            ),
        }  # fmt: skip
        for title, (family, name, given, options) in calls.items():
            if length > 1024 and title.startswith(("kimi", "Mamba")):
                continue  # theirs takes 25 GB and more
            own = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
            parts = inspect.signature(own).parameters
            taken = dict(zip(parts, given, strict=False)) | options

            def call(function: Any, taken: Any = taken, training: bool = training) -> None:
                with torch.set_grad_enabled(training):
                    tensors = {n: y.detach() for n, y in taken.items() if isinstance(y, torch.Tensor)}
                    wanted = [y.requires_grad_(training) for y in tensors.values()]
                    out = function(**taken | tensors)
                    out = out[0] if isinstance(out, tuple) else out
                    if training:
                        torch.autograd.grad(out, wanted, torch.ones_like(out))

            theirs, ours = shortest(partial(call, own), partial(call, FUNCTIONS[name]))
            what = "forth and back" if training else "forth"
            print(f"{title}, {length} tokens, {what}: {theirs * 1e3:.1f} and {ours * 1e3:.1f} ms,", end=" ")
            print(f"{theirs / ours:.2f}x")


def scaling(dtype: str) -> None:
    """Convolutions and scans by the number of threads, in turn: ms."""
    length, rng = 1024, np.random.default_rng(0)
    x, wide, taps = (normal(shape, dtype) for shape in ((length, 8192), (length, 5120), (8192, 4)))
    rates, group = -rng.uniform(0.1, 2, (5120, 16)).astype(np.float32), normal((length, 16), dtype)
    heads, steps = normal((80, length, 64), dtype), normal((80, length))
    groups, decays = normal((1, length, 128), dtype), -rng.uniform(0.1, 2, 80).astype(np.float32)
    many, one = normal((64, 1, 5120), dtype), normal((64, 1, 16), dtype)
    state, turned = np.zeros((64, 5120, 16), np.float32), np.zeros((64, 80, 128, 64), np.float32)
    step, keys = normal((64, 80, 1, 64), dtype), normal((64, 1, 1, 128), dtype)

    def back(n: int) -> Any:
        scanned, pullback = vjp(
            selective_scan, wide, wide, rates, group, group, dt_softplus=True, num_threads=n
        )
        return pullback(scanned)

    calls: dict[str, Any] = {
        "convolution, 1024 x 8192": lambda n: ops.causal_conv1d(x, taps, num_threads=n),
        "its gradients": lambda n: grad.causal_conv1d(x, x, taps, num_threads=n, need=("dx", "dweight")),
        "Mamba, 1024 x 5120, 16 states": lambda n: selective_scan(
            wide, wide, rates, group, group, dt_softplus=True, num_threads=n
        ),
        "with its gradients": back,
        "one token of 64, 42 MB": lambda n: selective_scan(
            many, many, rates, one, one, dt_softplus=True, state=state, out_state=state, num_threads=n
        ),
        "Mamba-2, 1024 tokens, 80 heads": lambda n: mamba2_scan(
            heads, steps, decays, groups, groups, dt_softplus=True, num_threads=n
        ),
        "one token of 64, 336 MB": lambda n: mamba2_scan(
            step, step[..., 0], decays, keys, keys, dt_softplus=True, state=turned, out_state=turned,
            num_threads=n
        ),
    }  # fmt: skip
    counts = [n for n in (1, 2, 4, 8, 16) if n <= fastattn.get_num_threads()]
    print("threads:", *counts)
    for title, call in calls.items():
        print(title, *(f"{1e3 * s:.3g}" for s in shortest(*(partial(call, n) for n in counts))))


def gated_norm(dtype: str) -> None:
    """A norm and its gate in one pass, and in two; and their gradients."""
    one: Any = {"num_threads": 1}

    def two(x: Any, gate: Any, w: Any, first: bool) -> Any:
        if first:
            return ops.rms_norm(ops.activate(gate, "silu", up=x, **one), w, **one)
        return ops.activate(gate, "silu", up=ops.rms_norm(x, w, **one), **one)

    def back(dout: Any, x: Any, gate: Any, w: Any, first: bool) -> Any:
        if first:
            z = ops.activate(gate, "silu", up=x, **one)
            dz, dweight = grad.rms_norm(dout, z, w, **one)
            return grad.activate(dz, gate, "silu", up=x, **one), dweight
        dgate, dy = grad.activate(dout, gate, "silu", up=ops.rms_norm(x, w, **one), **one)
        return dgate, grad.rms_norm(dy, x, w, **one)

    for rows, n in ((1, 128), (32, 128), (1024, 128), (32768, 128), (1024, 5120)):
        x, gate, dout = (normal((rows, n), dtype, seed) for seed in range(3))
        w, need = normal((n,)), ("dx", "dweight", "dgate")
        for first in (False, True):
            gated: Any = {"gate": gate, "gate_first": first, **one}
            a, b, c, d = best(
                partial(two, x, gate, w, first),
                partial(ops.rms_norm, x, w, **gated),
                partial(back, dout, x, gate, w, first),
                partial(grad.rms_norm, dout, x, w, need=need, **gated),
            )
            order = "gate, norm" if first else "norm, gate"
            print((rows, n), f"{order}: one pass {1e6 * b:.1f} us, two take {a / b:.2f} of that;", end=" ")
            print(f"gradients {1e6 * d:.1f} us, {c / d:.2f}")


def deberta(dtype: str) -> None:
    """Time of DeBERTa's attention (12 heads of 64) over that of plain attention, and of NumPy's."""
    heads, dim, tables = 12, 64, normal((2, 12, 512, 64), "float64" if dtype == "float64" else "float32")
    sizes = X, OUT, heads, heads, dim
    places: dict[str, Any] = {"position_keys": tables[0], "position_queries": tables[1]}
    step = DisentangledStep(*sizes, scale=(3 * dim) ** -0.5, max_distance=512, longest=512, **places)
    programs = [build("deberta", [each]) for each in (AttendStep(*sizes, scale=dim**-0.5), step)]
    mixed = np.random.default_rng(0).integers(8, 129, 32).tolist()
    for name, lengths in (
        ("32 x 64", [64] * 32),
        ("1 x 16", [16]),
        ("32 x 8 to 128", mixed),
        ("1 x 512", [512]),
    ):
        x = normal((sum(lengths), 3 * heads * dim), dtype)
        out, call = (
            np.empty((len(x), heads * dim), x.dtype),
            Sequences(len(lengths), begins=np.cumsum([0, *lengths])),
        )
        with settings.forced(num_threads=1):
            plain, compiled, in_numpy = best(
                *(partial(program.run, x, call) for program in programs),
                partial(step.run, PLAIN, {X: x}, call, out),
            )
        print(name, f"{compiled / plain:.2f} of plain attention; NumPy {in_numpy / compiled:.1f} times that")


def main() -> None:
    """Parse the command line and measure."""
    functions = (
        peak, strided, padding, decode, int8, linear, pack, load, layer, shared, session, experts, step,
        maxsim, select, selected, tensors, scaling, gated_norm, deberta,
    )  # fmt: skip
    measures = {f.__name__: f for f in functions}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=measures)
    parser.add_argument("--isa", choices=fastattn.show_config()["isas_available"])
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "float16", "bfloat16"))
    arguments = parser.parse_args()
    with settings.forced(isa=arguments.isa):
        measures[arguments.what](arguments.dtype)


if __name__ == "__main__":
    main()
