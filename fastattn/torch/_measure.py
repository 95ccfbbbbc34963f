"""Times of torch's kernels beside ours, measured before one takes the other's place.

A flag of the CPU is no promise: where torch has AMX, its products in bfloat16 are many times as fast.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fastattn._engine import settings
from fastattn._engine.settings import Report

Pair = tuple[Callable[[], Any], Callable[[], Any]]  # the same, by torch and by us

GAIN = 1.05  # from which ours takes the place of torch's
# Calls take turns until they settle or this time is over; calls longer than the second number have one turn.
_SECONDS, _LONG = 0.1, 0.01

_here = threading.local()
_lock = threading.Lock()
_ratios: dict[tuple[Any, ...], float] = {}
_refused: dict[tuple[str, str], list[Any]] = {}  # calls and the first reason, by function and kind of reason


def measured() -> Report:
    """Report what was measured in this process: ratios of torch's time to ours, and who computes such calls.

    Returns
    -------
    Report
        A dict that prints as a table. Keys name what was measured: operation, dtype, sizes (as powers of 2
        above them), number of threads, instruction set. Then functions of hybrid models whose calls were
        refused here and computed by transformers: number of calls, and the first reason. Reasons that differ
        only in numbers count as one.

    Notes
    -----
    Several ratios decide about an ``nn.Linear``: what `optimize` returns prints who computes it.
    """
    found = {}
    for (text, *key, threads, isa), ratio in list(_ratios.items()):
        said = f"{text(*key)} {threads} threads {isa}".replace("torch.", "")
        who = "" if said.startswith("linear ") else f", {'fastattn' if ratio >= GAIN else 'torch'}"
        found[said] = f"{ratio:.2f}{who}"
    for (name, _), (calls, why) in list(_refused.items()):
        found[f"{name} refused: {why}"] = f"{calls} call{'s' * (calls > 1)}, torch"
    return Report(found)


def refused(name: str, why: str) -> None:
    """Count a call of the function `name` that torch has computed, because `why`."""
    with _lock:
        _refused.setdefault((name, "".join(x for x in why if not x.isdigit())), [0, why])[0] += 1


def gains(key: tuple[Any, ...], pair: Callable[[], Pair]) -> bool:
    """Whether ours gains for what `key` says: measured once in a process, and the same answer ever after.

    The first item of `key` is a function that makes a text of the others, only for `measured`.
    """
    return ratio_of(key, pair) >= GAIN


def ratio_of(key: tuple[Any, ...], pair: Callable[[], Pair]) -> float:
    """Return torch's time over ours, as `gains` measures it."""
    key = (*key, torch.get_num_threads(), settings.core.get_isa())
    try:
        return _ratios[key]
    except KeyError:
        with _lock:  # measurements at once would disturb each other
            if key not in _ratios:
                _ratios[key] = torchs(_measure, pair)
    return _ratios[key]


def _measure(pair: Callable[[], Pair]) -> float:
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):  # the program's numbers stay its own
        return ratio(*pair())


def torchs(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function within which torch's functions are torch's, patched or not."""
    before, _here.measuring = measuring(), True
    try:
        return function(*args, **options)
    finally:
        _here.measuring = before


def measuring() -> bool:
    """Whether this thread is within `torchs`."""
    return getattr(_here, "measuring", False)


def ratio(torchs: Callable[[], Any], ours: Callable[[], Any]) -> float:
    """Return torch's time over ours: of the fastest call of each, which take turns."""
    torchs(), ours()
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        for found, call in zip(times, (torchs, ours), strict=True):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        if max(map(min, times)) > _LONG or all(map(_settled, times)):
            break
    return min(times[0]) / min(times[1])


def _settled(times: list[float]) -> bool:
    """Whether the three fastest of five and more calls agree: whatever else runs only makes calls slower."""
    return len(times) > 4 and heapq.nsmallest(3, times)[-1] <= GAIN * min(times)


def attention_key(kind: str, q: Any, k: Any, mask: Any, causal: bool) -> tuple[Any, ...]:
    """Return the kind of a call of attention, for `gains`; q is (batch, heads, len_q, head_dim), k as q."""
    batch, heads, len_q, head_dim = q.shape
    masked = "causal" if causal else "plain" if mask is None else mask.dtype
    sizes = len_q.bit_length(), k.shape[2].bit_length(), (batch * heads).bit_length()
    return _attention_text, kind, q.dtype, masked, head_dim, *sizes


def _attention_text(kind: str, dtype: Any, masked: Any, head_dim: int, *sizes: int) -> str:
    masked = masked if isinstance(masked, str) else f"mask {masked}"
    queries, keys, heads, *selected = (2**n for n in sizes)
    text = f"{kind} {dtype} {masked} head_dim {head_dim} queries < {queries} keys < {keys} heads < {heads}"
    return f"{text} selected < {selected[0]}" if selected else text


def sample(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """The first item of the batch, 512 queries and 2048 keys: a measurement is no longer than that."""
    len_q, len_k = min(q.shape[2], 512), min(k.shape[2], 2048)
    if mask is not None:
        mask = mask[:1] if mask.ndim == 4 else mask
        mask = mask[..., : len_q if mask.shape[-2] > 1 else 1, : len_k if mask.shape[-1] > 1 else 1]
    parts = q[:1, :, :len_q], k[:1, :, :len_k], v[:1, :, :len_k]
    return (*(x.detach() for x in parts), mask if mask is None else mask.detach())
