"""``python -m fastattn tune``: which sizes of src/tuning.inc would suit this machine better.

Each size is measured by itself, at half and double its default, on shapes drawn at random where it matters.
All settings take turns, the default twice. The noise is how far the default's two minima differ, or twice the
standard error of the mean over the shapes, whichever is larger. What wins by more than that, and by more than
2%, is measured once more against the default, on other shapes. Only if it wins there, too, is it proposed.

Before, between and after the sizes, threads compute without a pause. Where other programs take much of the
CPU time, the result is not to be trusted: `main` says so, and writes nothing.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import fastattn
from fastattn import ops
from fastattn._atomic import destination
from fastattn._bench.busy import QUIET_SHARE, fma_peak
from fastattn._engine import settings, tuning

Call = Callable[[], Any]
Draw = Callable[[np.random.Generator, int], Call]  # a call for which a size of this value matters

WORTH = 0.02
SHAPES = 8  # drawn for each size, in both measurements; two of them, whatever the time
SHARE = 0.65  # of a size's time, for the first of them


def _floats(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def _between(rng: np.random.Generator, least: float, most: float) -> int:
    """An integer, as likely between 10 and 20 as between 100 and 200."""
    return round(exp(rng.uniform(log(least), log(most))))


def _attention(
    rng: np.random.Generator, heads: int, len_q: int, len_k: int, head_dim: int, turned: bool = False
) -> Call:
    def array(length: int) -> Any:
        shape = (1, length, heads, head_dim) if turned else (1, heads, length, head_dim)
        x = _floats(rng, *shape)
        return x.swapaxes(1, 2) if turned else x

    q, k, v = array(len_q), array(len_k), array(len_k)
    causal = bool(rng.integers(2)) and len_q > 1
    out = np.empty(q.shape, np.float32)
    return lambda: fastattn.attention(q, k, v, causal=causal, out=out)


def _prefill(rng: np.random.Generator, value: int) -> Call:
    length = _between(rng, 100, 700)
    return _attention(rng, int(rng.integers(4, 17)), length, length, _head_dim(rng))


def _head_dim(rng: np.random.Generator) -> int:
    return 8 * int(rng.integers(4, 17))


def _copied_head(rng: np.random.Generator, value: int) -> Call:
    """Keys and values of a head of about `value` bytes, which do not lie side by side."""
    head_dim = _head_dim(rng)
    length = _between(rng, value / 2, value * 2) // (8 * head_dim)
    return _attention(rng, 4, min(512, length), max(64, length), head_dim, turned=True)


def _far(rng: np.random.Generator, value: int) -> Call:
    """Keys and values of about `value` bytes, of all heads."""
    head_dim, heads = _head_dim(rng), int(rng.integers(4, 17))
    length = max(32, _between(rng, value / 2, value * 2) // (8 * head_dim * heads))
    return _attention(rng, heads, length, length, head_dim)


def _linear(rng: np.random.Generator, m: int, k: int, n: int, dtype: str = "float32") -> Call:
    x, weight = _floats(rng, m, k), ops.pack(_floats(rng, n, k), dtype=dtype)
    out = np.empty((m, n), np.float32)
    return lambda: ops.linear(x, weight, out=out)


def _product(rng: np.random.Generator, value: int) -> Call:
    return _linear(rng, _between(rng, 40, 600), _between(rng, 250, 1500), _between(rng, 250, 2500))


def _copied_rows(rng: np.random.Generator, value: int) -> Call:
    """Rows that are copied: 128 of them, as many as a task has, are about `value` bytes."""
    k = max(1, _between(rng, value / 2, value * 2) // (128 * 4096)) * 1024
    return _linear(rng, 256, k, _between(rng, 100, 300))


def _narrow(rng: np.random.Generator, value: int) -> Call:
    """About `value` rows in each of a few tasks' blocks of rows, times weights that have to be widened."""
    m = _between(rng, max(1, value / 2), max(2, value * 2))
    dtype = str(rng.choice(["int8", "int4"]))
    return _linear(rng, m, _between(rng, 300, 1500), _between(rng, 800, 3000), dtype)


def _small(rng: np.random.Generator, value: int) -> Call:
    """Attention or a product of about `value` FLOP."""
    flops, n = _between(rng, value / 2, value * 2), 8 * int(rng.integers(4, 13))
    if rng.integers(2):
        length = max(9, round((flops / (4 * 4 * n)) ** 0.5))  # four heads
        return _attention(rng, 4, length, length, n)
    return _linear(rng, max(1, flops // (2 * n * 2 * n)), n, 2 * n)


def _small_decode(rng: np.random.Generator, value: int) -> Call:
    head_dim, heads = _head_dim(rng), int(rng.integers(2, 9))
    length = max(2, _between(rng, value / 2, value * 2) // (4 * heads * head_dim))
    return _attention(rng, heads, 1, length, head_dim)


def _rows(rng: np.random.Generator, elements: int) -> Call:
    width = _between(rng, 100, 1000)
    x = _floats(rng, max(1, elements // width), width)
    weight, out = _floats(rng, width), np.empty(x.shape, np.float32)
    return lambda: ops.rms_norm(x, weight, out=out)


def _small_rows(rng: np.random.Generator, value: int) -> Call:
    return _rows(rng, _between(rng, value / 2, value * 2))


def _many_rows(rng: np.random.Generator, value: int) -> Call:
    return _rows(rng, _between(rng, 8 * value, 64 * value))


DRAWS: dict[str, Draw] = {
    "attention_tasks": _prefill,
    "attention_tiles": _prefill,
    "head_copy_bytes": _copied_head,
    "far_bytes": _far,
    "linear_rows": _product,
    "linear_panels": _product,
    "linear_tasks": _product,
    "linear_copy_bytes": _copied_rows,
    "narrow_rows": _narrow,
    "parallel_flops": _small,
    "parallel_dot_flops": _small_decode,
    "parallel_elements": _small_rows,
    "row_task_elements": _many_rows,
}
NEED_THREADS = ("parallel_flops", "parallel_dot_flops", "parallel_elements", "row_task_elements")


@dataclass(slots=True)
class Gain:
    """The share of the default's time that a value saves, the mean of all shapes."""

    mean: float
    noise: float

    def wins(self) -> bool:
        """Whether it is worth a change."""
        return self.mean > max(WORTH, self.noise)

    def __str__(self) -> str:
        return f"{self.mean:+.1%} (noise {self.noise:.1%})"


@dataclass(slots=True)
class Result:
    """What was measured of one size."""

    name: str
    unit: str
    default: int
    gains: dict[int, Gain]  # of each candidate
    best: int  # the default, or what won twice
    why: str = ""  # it is not measured; or, of a candidate that won once, what the other measurement said


def candidates(name: str) -> list[int]:
    """Half and double of the default, where the range allows them."""
    _, default, least, most = settings.core.SIZES[name]
    return [value for value in (default // 2, default * 2) if least <= value <= most and value != default]


def _sample(name: str, value: int, call: Call, repeat: int) -> float:
    with tuning.forced(**{name: value}):
        begin = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - begin) / repeat


def _minima(name: str, values: list[int], call: Call, seconds: float) -> list[float]:
    """The shortest time of the call at each of `values`, which take turns; each goes first equally often."""
    end = time.perf_counter() + seconds
    call()
    once = min(_sample(name, values[0], call, 1) for _ in range(3))
    repeat, rounds = max(1, round(5e-4 / max(once, 1e-7))), 0
    best = [float("inf")] * len(values)
    while not rounds or time.perf_counter() < end:
        for i in range(len(values)):
            j = (i + rounds) % len(values)
            best[j] = min(best[j], _sample(name, values[j], call, repeat))
        rounds += 1
    return best


def _measure(name: str, others: list[int], rng: np.random.Generator, seconds: float) -> dict[int, Gain]:
    """The gain of each of `others` over the default."""
    default = settings.core.SIZES[name][1]
    begin, noise, gains = time.perf_counter(), [], []
    for i in range(SHAPES):
        left = begin + seconds - time.perf_counter()
        if i >= 2 and left < 0:
            break
        call = DRAWS[name](rng, default)
        first, *times, again = _minima(name, [default, *others, default], call, left / (SHAPES - i))
        noise.append(abs(again - first) / first)
        gains.append(1 - np.array(times) / min(first, again))
    mean, error = np.mean(gains, axis=0), 2 * np.std(gains, axis=0, ddof=1) / len(gains) ** 0.5
    return {
        value: Gain(float(mean[j]), float(max(np.mean(noise), error[j]))) for j, value in enumerate(others)
    }


def measure(name: str, seed: int, seconds: float) -> Result:
    """Measure one size for about so many seconds."""
    unit, default, _, _ = settings.core.SIZES[name]
    if name in NEED_THREADS and fastattn.get_num_threads() == 1:
        return Result(name, unit, default, {}, default, "there is one thread")
    rng = np.random.default_rng([seed, *name.encode()])
    gains = _measure(name, candidates(name), rng, SHARE * seconds)
    best = max(gains, key=lambda value: gains[value].mean)
    if not gains[best].wins():
        return Result(name, unit, default, gains, default)
    again = _measure(name, [best], rng, (1 - SHARE) * seconds)[best]
    if not again.wins():
        return Result(name, unit, default, gains, default, f"on other shapes, {best}: {again}")
    return Result(name, unit, default, gains | {best: again}, best)


def run(seconds: float, seed: int) -> Iterator[Result]:
    """Measure all sizes, each against the defaults of all others."""
    with tuning.forced(**tuning.defaults()):
        for name in settings.core.SIZES:
            yield measure(name, seed, seconds / len(settings.core.SIZES))


def cpu_share() -> float:
    """The share of the CPU time that threads get which compute without a pause."""
    return fma_peak("float32", fastattn.get_num_threads())[1]


def line(result: Result) -> str:
    """One size, as the command prints it."""
    found = f"change to {result.best}" if result.best != result.default else "keep"
    gains = ", ".join(f"{value}: {gain}" for value, gain in sorted(result.gains.items()))
    parts = (found, gains, result.why)
    text = "; ".join(part for part in parts if part)
    return f"{result.name:<18} {result.default:>8} {result.unit:<14} {text}"


def main(seconds: float, seed: int | None, write: Path | None, reset: bool) -> int:
    """Measure, print, and write to `write`, of which ``Path()`` is the usual place; the exit status."""
    file = write if write and write != Path() else tuning.path() or tuning.usual_path()
    if reset:
        there = file.exists()
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            return _refuse(f"cannot remove {file}: {error.strerror}")
        print(f"{file} was removed." if there else f"There is no {file}: the defaults hold.")
        return 0
    if settings.default_backend() != "compiled":
        return _refuse("There is nothing to tune: no compiled kernels are in use.")
    if write == Path() and tuning.path() is None:
        return _refuse(f"{tuning.VARIABLE} is off, so that no file is read: unset it, or name a file")
    if write is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file = destination(file)
        except OSError as error:
            return _refuse(f"cannot write {file}: {error.strerror or error}")
        except ValueError as error:
            return _refuse(f"cannot write: {error}")
        if not os.access(file.parent, os.W_OK):
            return _refuse(f"cannot write {file}: its folder is read-only")
    seed = secrets.randbelow(10**6) if seed is None else seed
    machine = ", ".join(f"{name} {value}" for name, value in tuning.machine().items())
    print(f"About {seconds} seconds, seed {seed}. This machine: {machine}.")
    print("Beside each value: the share of the default's time that it saves.\n")
    changes, shares = {}, [cpu_share()]
    for result in run(seconds, seed):
        print(line(result), flush=True)
        shares.append(cpu_share())
        if result.best != result.default:
            changes[result.name] = result.best
    would = ", ".join(f"{name} to {value}" for name, value in changes.items())
    print(f"\nWould change: {would or 'nothing'}")
    if (share := mean(shares)) < QUIET_SHARE:
        print(
            f"BUSY MACHINE: threads that computed without a pause got {share:.0%} of the CPU time.\n"
            "Do not trust what is said above. Run this again when nothing else runs, or with fewer threads."
        )
        return 0 if write is None else _refuse(f"Nothing was written to {file}")
    if write is None:
        print(f"Nothing was written; --write writes to {file}")
        return 0
    try:
        tuning.write(file, changes)
    except OSError as error:
        return _refuse(f"cannot write {file}: {error.strerror or error}")
    print(f"Written to {file}")
    return 0


def _refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2
