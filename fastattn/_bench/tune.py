"""``python -m fastattn tune``: which sizes of src/tuning.inc would suit this machine better.

Each size is measured by itself, at half and double its default, on shapes drawn at random where it matters.
All settings take turns, the default twice. The noise is how far the default's two minima differ, or twice the
standard error of the mean over the shapes, whichever is larger. A value that wins by more than that, and by
more than 2%, is measured once more against the default, on other shapes. Only if it wins there, too, is it
proposed. Where other programs take much of the CPU time, `main` says so, and writes nothing.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import fastattn
from fastattn import layers, ops
from fastattn._atomic import destination
from fastattn._bench.harness import QUIET_SHARE, fma_peak, sample
from fastattn._engine import settings, tuning

Call = Callable[[], Any]

WORTH = 0.02
SHAPES = 8  # drawn for each size, in both measurements; two of them, whatever the time
SHARE = 0.65  # of a size's time, for the first of them
# For each size the calls that it matters for, and what they count about as many of as the size's value says,
# from the first of the two numbers times that value to the second.
DRAWS = {
    "attention_tasks": ("prefill", 1, 1),
    "attention_tiles": ("prefill", 1, 1),
    "head_copy_bytes": ("head", 0.5, 2),
    "far_bytes": ("keys", 0.5, 2),
    "linear_rows": ("product", 1, 1),
    "linear_panels": ("product", 1, 1),
    "linear_tasks": ("product", 1, 1),
    "linear_copy_bytes": ("copied", 0.5, 2),
    "narrow_rows": ("narrow", 0.5, 2),
    "chain_rows": ("layer", 1, 1),
    "chain_bytes": ("wide layer", 0.5, 2),
    "parallel_flops": ("small", 0.5, 2),
    "parallel_dot_flops": ("decode", 0.5, 2),
    "parallel_elements": ("rows", 0.5, 2),
    "row_task_elements": ("rows", 8, 64),
}
NEED_THREADS = ("parallel_flops", "parallel_dot_flops", "parallel_elements", "row_task_elements")


def draw(kind: str, near: float, rng: np.random.Generator) -> Call:
    """A random call.

    `near` counts its bytes of keys and values ("keys", or "head" of one head, which do not lie side by side),
    of 128 of its rows ("copied"), of the inner features of 64 ("wide layer"), its rows ("narrow"), its
    operations ("small" and "decode") or its elements ("rows").
    """

    def between(least: float, most: float) -> int:
        """An integer, as likely between 10 and 20 as between 100 and 200."""
        return round(exp(rng.uniform(log(least), log(most))))

    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    dim, heads, length, n = (
        8 * int(rng.integers(4, 17)),
        int(rng.integers(4, 17)),
        between(100, 700),
        round(near),
    )
    if kind == "small" and rng.integers(2):
        kind, dim, heads = "attention", 8 * int(rng.integers(4, 13)), 4
    if kind in ("layer", "wide layer"):
        width = 32 * (max(1, n // (64 * 4 * 4 * 32)) if kind == "wide layer" else int(rng.integers(6, 20)))
        layer = layers.TransformerEncoderLayer(width, width // 32, 4 * width, "gelu", rng=rng)
        return partial(layer, floats(1, 2 * length, width))
    if kind == "rows":
        x = floats(max(1, n // length), length)
        return partial(ops.rms_norm, x, floats(length), out=np.empty_like(x))
    products = {  # rows, input and output features
        "product": (between(40, 600), between(250, 1500), between(250, 2500)),
        "copied": (256, max(1, n // (128 * 4096)) * 1024, between(100, 300)),
        "narrow": (
            max(1, n),
            between(300, 1500),
            between(800, 3000),
        ),  # times weights that have to be widened
        "small": (max(1, n // (4 * dim * dim)), dim, 2 * dim),
    }
    if kind in products:
        m, k, outs = products[kind]
        weight = ops.pack(
            floats(outs, k), dtype=str(rng.choice(["int8", "int4"])) if kind == "narrow" else "float32"
        )
        return partial(ops.linear, floats(m, k), weight, out=np.empty((m, outs), np.float32))
    heads, len_q, len_k = {
        "prefill": (heads, length, length),
        "head": (4, min(512, n // (8 * dim)), max(64, n // (8 * dim))),
        "keys": (heads, *(max(32, n // (8 * dim * heads)),) * 2),
        "attention": (heads, *(max(9, round((n / (4 * heads * dim)) ** 0.5)),) * 2),
        "decode": (heads, 1, max(2, n // (4 * heads * dim))),
    }[kind]
    arrays = [floats(1, heads, rows, dim) for rows in (len_q, len_k, len_k)]
    if kind == "head":
        arrays = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in arrays]
    causal = bool(rng.integers(2)) and len_q > 1
    return partial(fastattn.attention, *arrays, causal=causal, out=np.empty(arrays[0].shape, np.float32))


@dataclass(slots=True)
class Gain:
    """The share of the default's time that a value saves, the mean of all shapes."""

    mean: float
    noise: float

    def wins(self) -> bool:
        """Tell whether it is worth a change."""
        return self.mean > max(WORTH, self.noise)

    def __str__(self) -> str:
        return f"{self.mean:+.1%} (noise {self.noise:.1%})"


@dataclass(slots=True)
class Result:
    """The measurements of one size."""

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
        return sample(call, repeat)


def _minima(name: str, values: list[int], call: Call, seconds: float) -> list[float]:
    """The shortest time of the call at each of `values`, which take turns; each goes first equally often."""
    end = time.perf_counter() + seconds
    call()
    once = min(_sample(name, values[0], call, 1) for _ in range(3))
    repeat, rounds, best = max(1, round(5e-4 / max(once, 1e-7))), 0, [float("inf")] * len(values)
    while not rounds or time.perf_counter() < end:
        for i in range(len(values)):
            j = (i + rounds) % len(values)
            best[j] = min(best[j], _sample(name, values[j], call, repeat))
        rounds += 1
    return best


def _measure(name: str, others: list[int], rng: np.random.Generator, seconds: float) -> dict[int, Gain]:
    """The gain of each of `others` over the default."""
    default, (kind, least, most) = settings.core.SIZES[name][1], DRAWS[name]
    begin, noise, gains = time.perf_counter(), [], []
    for i in range(SHAPES):
        left = begin + seconds - time.perf_counter()
        if i >= 2 and left < 0:
            break
        call = draw(kind, default * exp(rng.uniform(log(least), log(most))), rng)
        first, *times, again = _minima(name, [default, *others, default], call, left / (SHAPES - i))
        noise.append(abs(again - first) / first)
        gains.append(1 - np.array(times) / min(first, again))
    mean, error = np.mean(gains, axis=0), 2 * np.std(gains, axis=0, ddof=1) / len(gains) ** 0.5
    found = zip(others, mean.tolist(), np.maximum(np.mean(noise), error).tolist(), strict=True)
    return {value: Gain(gain, uncertain) for value, gain, uncertain in found}


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
    text = "; ".join(part for part in (found, gains, result.why) if part)
    return f"{result.name:<18} {result.default:>8} {result.unit:<14} {text}"


def main(seconds: float, seed: int | None, write: Path | None, reset: bool) -> int:
    """Measure, print, and write to `write`, of which ``Path()`` is the usual place; the exit status."""
    file = write if write and write != Path() else tuning.path() or tuning.usual_path()
    there, doing = file.exists(), "remove" if reset else "write"
    try:
        if reset:
            file.unlink(missing_ok=True)
            print(f"{file} was removed." if there else f"There is no {file}: the defaults hold.")
            return 0
        if settings.default_backend() != "compiled":
            return _refuse("There is nothing to tune: no compiled kernels are in use.")
        if write == Path() and tuning.path() is None:
            return _refuse(f"{tuning.VARIABLE} is off, so that no file is read: unset it, or name a file")
        if write is not None:
            missing = [folder for folder in file.absolute().parents if not folder.exists()]
            file.parent.mkdir(parents=True, exist_ok=True)
            file = destination(file)
            writable = os.access(file.parent, os.W_OK)
            for folder in missing:  # it was an attempt: whatever is not written leaves none
                folder.rmdir()
            if not writable:
                return _refuse(f"cannot write {file}: its folder is read-only")
    except OSError as error:
        return _refuse(f"cannot {doing} {file}: {error.strerror or error}")
    except ValueError as error:
        return _refuse(f"cannot write: {error}")
    changes, trusted = _propose(seconds, secrets.randbelow(10**6) if seed is None else seed)
    if write is None:
        if trusted:
            print(f"Nothing was written; --write writes to {file}")
        return 0
    if not trusted:
        return _refuse(f"Nothing was written to {file}")
    try:
        tuning.write(file, changes)
    except OSError as error:
        return _refuse(f"cannot write {file}: {error.strerror or error}")
    print(f"Written to {file}")
    return 0


def _propose(seconds: float, seed: int) -> tuple[dict[str, int], bool]:
    """Measure and print; the values that would change, and whether the machine was quiet enough."""
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
    trusted = (share := mean(shares)) >= QUIET_SHARE
    if not trusted:
        print(
            f"BUSY MACHINE: threads that computed without a pause got {share:.0%} of the CPU time.\n"
            "Do not trust what is said above. Run this again when nothing else runs, or with fewer threads."
        )
    return changes, trusted


def _refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2
