"""Times of torch's kernels beside ours, measured before one takes the other's place.

A flag of the CPU is no promise: where torch has AMX, its products in bfloat16 are many times as fast.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from fastattn._engine import settings
from fastattn._engine.settings import Report

if TYPE_CHECKING:
    Pair = tuple[Callable[[], Any], Callable[[], Any]]  # the same, by torch and by us

# Ours takes the place of torch's from this gain on, the geometric mean over sizes, and if no size loses more
# than the second number says. Between 1 and that, a measurement says nothing.
_GAIN, _LEAST = 1.05, 0.95
# Calls take turns until they settle or this time is over; calls longer than the second number have one turn.
_SECONDS, _LONG = 0.1, 0.01

_here = threading.local()
_lock = threading.Lock()
_ratios: dict[tuple[Any, ...], float] = {}
_refused: dict[tuple[str, str], list[Any]] = {}  # calls and the first reason, by function and kind of reason


def measured() -> Report:
    """Report what was measured in this process: torch's time over ours, and whose kernels compute it since.

    Returns
    -------
    Report
        A dict that prints as a table. Its keys say what was measured: operation, dtype, sizes as powers of 2
        that they are less than, number of threads, instruction set. At the end come the functions of hybrid
        models of which transformers computed calls that are refused here: how many, and why the first one.
        Reasons that differ in their numbers alone are one.
    """
    found = {
        " ".join(map(str, key)): f"{ratio:.2f}, {_winner(ratio)}" for key, ratio in list(_ratios.items())
    }
    for (name, _), (calls, why) in list(_refused.items()):
        found[f"{name} refused: {why}"] = f"{calls} call{'s' * (calls > 1)}, torch"
    return Report(found)


def refused(name: str, why: str) -> None:
    """Count a call of the function `name` that torch has computed, because `why`."""
    with _lock:
        _refused.setdefault((name, "".join(x for x in why if not x.isdigit())), [0, why])[0] += 1


def gains(key: tuple[Any, ...], pairs: Callable[[], Iterable[Pair]]) -> bool:
    """Whether ours gains for what `key` says: measured once in a process, and the same answer ever after."""
    key = (*key, f"{torch.get_num_threads()} threads", settings.core.get_isa())
    if key not in _ratios:
        with _lock:  # measurements at once would disturb each other
            if key not in _ratios:
                _ratios[key] = _measure(pairs)
    return _winner(_ratios[key]) == "fastattn"


def _measure(pairs: Callable[[], Iterable[Pair]]) -> float:
    _here.measuring = True
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):  # the program's numbers stay its own
            found = [ratio(*pair) for pair in pairs()]
    finally:
        _here.measuring = False
    mean = math.exp(sum(map(math.log, found)) / len(found))
    return mean if min(found) >= _LEAST else min(found)


def measuring() -> bool:
    """Whether this thread is measuring: then torch's functions are to be torch's."""
    return getattr(_here, "measuring", False)


def _winner(ratio: float) -> str:
    return "fastattn" if ratio >= _GAIN else "torch"


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
    return len(times) > 4 and heapq.nsmallest(3, times)[-1] <= _GAIN * min(times)


def attention_key(kind: str, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> tuple[Any, ...]:
    """Return the kind of a call of attention; q is (batch, heads, len_q, head_dim), k and v likewise."""
    queries, keys = (2 ** int(x.shape[2]).bit_length() for x in (q, k))
    masked = "causal" if causal else "plain" if mask is None else f"mask {_short(mask.dtype)}"
    return (
        kind, _short(q.dtype), masked, f"head_dim {q.shape[3]}", f"queries < {queries}", f"keys < {keys}",
        f"heads < {2 ** int(q.shape[0] * q.shape[1]).bit_length()}",
    )  # fmt: skip


def sample(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """The first item of the batch, 512 queries and 2048 keys: a measurement is no longer than that."""
    len_q, len_k = min(q.shape[2], 512), min(k.shape[2], 2048)
    if mask is not None:
        mask = mask[:1] if mask.ndim == 4 else mask
        mask = mask[..., : len_q if mask.shape[-2] > 1 else 1, : len_k if mask.shape[-1] > 1 else 1]
    parts = q[:1, :, :len_q], k[:1, :, :len_k], v[:1, :, :len_k]
    return (*(x.detach() for x in parts), mask if mask is None else mask.detach())


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
