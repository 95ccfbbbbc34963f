"""Measure what threads gain, and where the rest of their time goes.

    python tools/threads.py {clocks,handing,pause,memory,runtimes,speedup,tasks} [--threads N] [--only WORD]

`clocks` compares the multiply-adds of registers on 1 to N threads, `handing` times calls with hardly any
work, `pause` times calls after pauses, `memory` compares results in new and in used memory, `runtimes`
OpenMP's threads and our own, in turn; with `--model FOLDER` also on one short text. The others need a build
that notes its tasks:

    FASTATTN_TRACE=1 FASTATTN_REQUIRE_EXT=1 pip install -e .

`speedup` divides what N threads lose into its causes, `tasks` shows how long the tasks of a call take.
`--busy N` starts programs beside it that compute without a pause. tools/threads_model.py tells from the same
tasks what more cores would do.
"""

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import fastattn
from fastattn import ops
from fastattn._engine import settings
from fastattn._engine.core import _core
from fastattn.layers import TransformerEncoderLayer

Call = Callable[[int], object]  # of a number of threads


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Standard normal numbers of a dtype that may be bfloat16."""
    numbers = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    import ml_dtypes

    return numbers.astype(ml_dtypes.bfloat16)


def attend(*shape: int, dtype: str = "float32", padded: bool = False, **options: object) -> Call:
    """Attention of shape (batch, heads_q, heads_kv, len_q, len_k, head_dim), into memory that is there."""
    b, heads, heads_kv, len_q, len_k, d = shape
    q, k = normal(b, heads, len_q, d, dtype=dtype), normal(b, heads_kv, len_k, d, dtype=dtype)
    v, out = k + k, np.ones_like(q)
    if padded:
        options |= {"kv_lengths": np.random.default_rng(0).integers(len_k // 2, len_k + 1, b)}
    return lambda n: fastattn.attention(q, k, v, out=out, num_threads=n, **options)


def product(rows: int, k: int, n: int, dtype: str = "float32") -> Call:
    """`ops.linear`, into memory that is there."""
    x, weight, out = normal(rows, k), ops.pack(normal(n, k), dtype=dtype), np.ones((rows, n), np.float32)
    return lambda threads: ops.linear(x, weight, out=out, num_threads=threads)


def norm(rows: int, n: int) -> Call:
    """`ops.layer_norm`."""
    x, out, weight = normal(rows, n), np.ones((rows, n), np.float32), np.ones(n, np.float32)
    return lambda threads: ops.layer_norm(x, weight, weight, out=out, num_threads=threads)


def encoder(batch: int, length: int) -> Call:
    """A layer of MiniLM: about ten loops in one call."""
    layer, x = TransformerEncoderLayer(384, 12, 1536, "gelu", rng=0), normal(batch, length, 384)

    def call(threads: int) -> object:
        with settings.forced(num_threads=threads):
            return layer(x)

    return call


def text(folder: str) -> Call:
    """One text of 16 words to its vector, by a model with int8 weights and inputs: some forty loops."""
    model = fastattn.models.load(folder, weights_dtype="int8", activations="int8")
    words = " ".join(["the", "quick", "brown", "fox"] * 4)

    def call(threads: int) -> object:
        with settings.forced(num_threads=threads):
            return model.encode(words)

    return call


CALLS: dict[str, Callable[[], Call]] = {
    "attention 12 x 128 x 64": lambda: attend(1, 12, 12, 128, 128, 64),
    "attention 8 x 12 x 128 x 32": lambda: attend(8, 12, 12, 128, 128, 32),
    "attention 12 x 512 x 64": lambda: attend(1, 12, 12, 512, 512, 64),
    "attention 8 x 2048 x 64": lambda: attend(1, 8, 8, 2048, 2048, 64),
    "bfloat16 8 x 2048 x 64": lambda: attend(1, 8, 8, 2048, 2048, 64, dtype="bfloat16"),
    "causal 12 x 128 x 64": lambda: attend(1, 12, 12, 128, 128, 64, causal=True),
    "causal 12 x 512 x 64": lambda: attend(1, 12, 12, 512, 512, 64, causal=True),
    "causal 8 x 2048 x 64": lambda: attend(1, 8, 8, 2048, 2048, 64, causal=True),
    "causal 4 x 8192 x 64": lambda: attend(1, 4, 4, 8192, 8192, 64, causal=True),
    "window 8 x 2048 x 64": lambda: attend(1, 8, 8, 2048, 2048, 64, window=(128, 128)),
    "padded 8 x 12 x 512 x 64": lambda: attend(8, 12, 12, 512, 512, 64, padded=True),
    "decode 32 x 4096 x 128": lambda: attend(1, 32, 32, 1, 4096, 128),
    "decode 32:8 x 4096 x 128": lambda: attend(1, 32, 8, 1, 4096, 128),
    "decode 8 x 12 x 1024 x 64": lambda: attend(8, 12, 12, 1, 1024, 64),
    "linear 128, 384, 1536": lambda: product(128, 384, 1536),
    "linear 1024, 768, 768": lambda: product(1024, 768, 768),
    "linear 2048, 2048, 2048": lambda: product(2048, 2048, 2048),
    "linear 4096, 384, 1536": lambda: product(4096, 384, 1536),
    "linear 1, 2048, 8192": lambda: product(1, 2048, 8192),
    "norm 4096, 384": lambda: norm(4096, 384),
    "layer 1 x 128": lambda: encoder(1, 128),
    "layer 32 x 128": lambda: encoder(32, 128),
}


class Runtime:
    """The events of a traced build."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(_core.__file__)
        if not hasattr(self.library, "fa_events"):
            sys.exit("this build notes no tasks: FASTATTN_TRACE=1 pip install -e . makes one that does")

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Run on the calling thread what was cut for any number of threads."""
        alone = ctypes.c_int.in_dll(self.library, "fa_alone")
        alone.value = True
        try:
            yield
        finally:
            alone.value = False

    def events(self) -> np.ndarray:
        """Return events noted since the last time: (begin, end, task, thread)."""
        count = ctypes.c_int64.in_dll(self.library, "fa_event_count")
        kinds = [("begin", "f8"), ("end", "f8"), ("task", "i8"), ("thread", "i8")]
        memory = (ctypes.c_char * (32 * count.value)).in_dll(self.library, "fa_events")
        noted = np.frombuffer(memory, kinds).copy()
        count.value = 0
        return noted


@dataclass
class Loop:
    """One loop over tasks: when it began and ended, for how many threads it was cut, and its tasks."""

    begin: float
    end: float
    threads: int
    tasks: np.ndarray  # events, by their numbers


def loops_of(events: np.ndarray) -> list[Loop]:
    """Tasks belong to the loop that is noted after them."""
    found, first = [], 0
    for i in np.flatnonzero(events["task"] < 0):
        begin, end, _, threads = events[i]
        tasks = events[first:i]
        found.append(Loop(begin, end, int(threads), tasks[np.argsort(tasks["task"])]))
        first = i + 1
    return found


@dataclass
class Run:
    """One call: its seconds, and its loops if they are noted."""

    seconds: float
    loops: list[Loop]


def runs_of(call: Call, threads: int, runtime: Runtime, seconds: float) -> list[Run]:
    """Calls for that long, the quickest first."""
    found, end = [], time.perf_counter() + seconds
    call(threads)
    runtime.events()
    while time.perf_counter() < end or len(found) < 3:
        begin = time.perf_counter()
        call(threads)
        found.append(Run(time.perf_counter() - begin, loops_of(runtime.events())))
    return sorted(found, key=lambda run: run.seconds)


def parts(run: Run) -> np.ndarray:
    """Seconds of a call: outside of loops, starting, between tasks, idle at the end, in tasks.

    They add up to its time. All but the first are means over threads.
    """
    found = np.zeros(5)
    found[0] = run.seconds
    for loop in run.loops:
        found[0] -= loop.end - loop.begin
        last = max(loop.tasks["end"], default=loop.begin)
        for thread in range(loop.threads):
            own = loop.tasks[loop.tasks["thread"] == thread]
            busy = sum(own["end"] - own["begin"])
            first, end = (min(own["begin"]), max(own["end"])) if len(own) else (last, last)
            starting = first - loop.begin + loop.end - last
            found[1:] += np.array((starting, end - first - busy, last - end, busy)) / loop.threads
    return found


def speedup(calls: dict[str, Call], threads: int) -> None:
    """One thread over N, and where N threads lose time, in percent of the time of the call."""
    runtime = Runtime()
    what = ("outside", "starting", "between", "idle at the end", "tasks slower")
    print(f"{'':28} {'1':>9} {threads:>9} threads   times;", ", ".join(what), "(% of the call); tasks")
    for name, call in calls.items():
        alone, together = [], []
        for _ in range(2):  # in turn
            with runtime.one_thread():
                alone += runs_of(call, threads, runtime, 0.2)
            together += runs_of(call, threads, runtime, 0.2)
        one, many = (min(runs, key=lambda run: run.seconds) for runs in (alone, together))
        quick = sorted(together, key=lambda run: run.seconds)[: max(1, len(together) // 4)]
        lost = np.mean([parts(run) for run in quick], axis=0)
        # All but its share is lost of the time that was not in loops on one thread either.
        lost[0] *= (threads - 1) / threads
        in_tasks = sum(float(np.sum(x.tasks["end"] - x.tasks["begin"])) for x in one.loops)
        lost[4] -= in_tasks / threads
        whole = np.mean([run.seconds for run in quick])
        share = "  ".join(f"{100 * x / whole:5.1f}" for x in lost)
        count = sum(len(x.tasks) for x in many.loops)
        print(
            f"{name:28} {1e3 * one.seconds:9.3f} {1e3 * many.seconds:9.3f} ms"
            f" {one.seconds / many.seconds:9.2f};  {share};  {count}",
            flush=True,
        )


def tasks(calls: dict[str, Call], threads: int) -> None:
    """Time single tasks on one thread, cut for N, and print the longest as a part of a thread's time."""
    runtime = Runtime()
    print(f"{'':28} loop  tasks   mean us   least   most   largest over a thread's share")
    for name, call in calls.items():
        with runtime.one_thread():
            runs = runs_of(call, threads, runtime, 0.5)
        for i in range(len(runs[0].loops)):
            times = 1e6 * task_seconds(runs, i)
            share = times.max() / (times.sum() / threads)
            spread = f"{times.mean():9.1f} {times.min():7.1f} {times.max():7.1f}   {share:.3f}"
            print(f"{name:28} {i:4} {len(times):6} {spread}", flush=True)


def task_seconds(runs: list[Run], loop: int) -> np.ndarray:
    """The median time of each task of a loop, of the quicker half of the calls."""
    quick = runs[: max(1, len(runs) // 2)]
    times = [run.loops[loop].tasks["end"] - run.loops[loop].tasks["begin"] for run in quick]
    return np.asarray(np.median(times, axis=0))


def clocks(threads: int) -> None:
    """FLOP/s of multiply-adds of registers, on one thread and on more, in turn."""
    for dtype in ("float32", "bfloat16"):
        rates: dict[int, list[float]] = {n: [] for n in range(1, threads + 1)}
        for _ in range(8):
            for n, found in rates.items():
                found.append(_core.fma_peak(dtype, n) / 1e9)
        for n, found in rates.items():
            best, middle = max(found) / max(rates[1]), np.median(found) / np.median(rates[1])
            print(
                f"{dtype} {n} threads: {max(found):.0f} GFLOP/s, {best:.2f} times one; medians {middle:.2f}"
            )


def timed(call: Callable[[], object], count: int, pause: float = 0) -> np.ndarray:
    """Microseconds of each of so many calls."""
    found = np.empty(count)
    for i in range(count):
        if pause:
            time.sleep(pause)
        begin = time.perf_counter()
        call()
        found[i] = 1e6 * (time.perf_counter() - begin)
    return found


def handing(threads: int) -> None:
    """Microseconds of the least that runs on several threads, on 1 to 2 N of them."""
    x, out = normal(64, 1024), np.ones((64, 1024), np.float32)
    for n in range(1, 2 * threads + 1):
        times = timed(lambda n=n: ops.activate(x, "relu", out=out, num_threads=n), 2000)
        print(f"relu of 65536 numbers, {n} threads: {times.min():.1f} us, median {np.median(times):.1f}")


def pause(threads: int) -> None:
    """Microseconds of short calls right after another and after pauses, on 1 and on N threads."""
    for name in ("attention 12 x 128 x 64", "layer 1 x 128"):
        call = CALLS[name]()
        print(f"{name}: least, median, mean, nine of ten")
        for n in (1, threads):
            timed(lambda n=n, call=call: call(n), 50)
            for seconds in (0, 0.001, 0.003, 0.01, 0.02, 0.1):
                times = timed(lambda n=n, call=call: call(n), 60, seconds)
                least, middle, most = np.quantile(times, (0, 0.5, 0.9))
                said = f"{least:.0f}, {middle:.0f}, {times.mean():.0f}, {most:.0f}"
                print(f"    {n} threads, {1e3 * seconds:3.0f} ms: {said}", flush=True)


def runtimes(calls: dict[str, Call], threads: int, pauses: list[float]) -> None:
    """Mean and median microseconds with OpenMP's threads and with our own, in turn, after pauses."""
    print(f"{'':28} pause ms: openmp mean, median; team mean, median; ratio of medians, of means")
    for name, call in calls.items():
        for seconds in pauses:
            found: dict[str, list[float]] = {"openmp": [], "team": []}
            for _ in range(8):
                for threading, times in found.items():
                    fastattn.set_threading(threading)
                    timed(lambda call=call: call(threads), 3)
                    times += list(timed(lambda call=call: call(threads), 8 if seconds else 25, seconds))
            means, medians = ([f(times) for times in found.values()] for f in (np.mean, np.median))
            said = "; ".join(
                f"{mean:8.0f} {median:8.0f}" for mean, median in zip(means, medians, strict=True)
            )
            ratios = f"{medians[0] / medians[1]:.2f} {means[0] / means[1]:.2f}"
            print(f"{name:28} {1e3 * seconds:5.0f}: {said}; {ratios}", flush=True)


def memory(threads: int) -> None:
    """Times with results in new memory over those in memory that is there, on 1 and on N threads."""
    for shape in ((1, 12, 128, 64), (8, 12, 128, 64), (1, 8, 2048, 64)):
        q, out = normal(*shape), np.ones(shape, np.float32)
        calls = {
            "there": lambda n, q=q, out=out: fastattn.attention(q, q, q, out=out, num_threads=n),
            "new": lambda n, q=q: fastattn.attention(q, q, q, num_threads=n),
        }
        compare(f"attention {shape}", calls, threads, 4 * q.size)
    for rows, k, n_out in ((128, 384, 1536), (1024, 768, 3072), (4096, 384, 1536)):
        x, weight, out = normal(rows, k), ops.pack(normal(n_out, k)), np.ones((rows, n_out), np.float32)
        calls = {
            "there": lambda n, x=x, w=weight, out=out: ops.linear(x, w, out=out, num_threads=n),
            "new": lambda n, x=x, w=weight: ops.linear(x, w, num_threads=n),
        }
        compare(f"linear {(rows, k, n_out)}", calls, threads, 4 * rows * n_out)


def compare(name: str, calls: dict[str, Call], threads: int, n_bytes: int) -> None:
    """Print the ratio of two calls, by threads."""
    found = []
    for n in (1, threads):
        times: dict[str, list[float]] = {kind: [] for kind in calls}
        for _ in range(30):
            for kind, call in calls.items():
                times[kind] += list(timed(lambda call=call, n=n: call(n), 5))
        there, new = np.median(times["there"]), np.median(times["new"])
        found.append(f"{n} threads: {there:.0f} us there, {new:.0f} new ({new / there:.2f})")
    print(f"{name}, {n_bytes / 2**20:.1f} MB:", "; ".join(found), flush=True)


def main() -> None:
    """Parse the command line and measure."""
    of_calls = {"speedup": speedup, "tasks": tasks}
    others = {"clocks": clocks, "handing": handing, "pause": pause, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=(*others, "runtimes", *of_calls))
    parser.add_argument("--threads", type=int, default=settings.get_num_threads())
    parser.add_argument("--only", default="", help="calls whose names contain this")
    parser.add_argument("--busy", type=int, default=0, help="programs that compute beside it")
    parser.add_argument("--pauses", type=float, nargs="+", default=[0, 0.001, 0.01, 0.1], help="seconds")
    parser.add_argument("--model", help="a folder with a model of sentences, for `runtimes`")
    arguments = parser.parse_args()
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    try:
        if arguments.what in others:
            others[arguments.what](arguments.threads)
        else:
            calls = {name: make() for name, make in CALLS.items() if arguments.only in name}
            if arguments.model:
                calls["one text"] = text(arguments.model)
            if arguments.what == "runtimes":
                runtimes(calls, arguments.threads, arguments.pauses)
            else:
                of_calls[arguments.what](calls, arguments.threads)
    finally:
        for process in beside:
            process.kill()


if __name__ == "__main__":
    main()
