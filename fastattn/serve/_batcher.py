"""The thread that computes what requests ask for, those that wait together."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastattn._args.types import Array

Item: TypeAlias = "str | tuple[str, ...]"  # a text, or the texts of a pair


@dataclass(eq=False)
class Job:
    """The items of one request, how many tokens each has, and where their rows go."""

    items: Sequence[Item]
    tokens: list[int]
    prompt: str  # what is put before each; one call of the model has one prompt
    rows: Future[Array] = field(default_factory=Future)  # (items, n)
    parts: list[Array] = field(default_factory=list)
    taken: int = 0  # items that are computed, or are being so


class Batcher:
    """The thread that computes. It takes items that wait, in order, up to `batch_tokens` at a time.

    Nothing waits for a batch to fill up. A large job takes several calls of ``compute(items, prompt)``;
    between them others have their turn, and it is dropped if nobody waits for it any more.
    """

    def __init__(self, compute: Callable[[list[Item], str], Array], batch_tokens: int):
        self.compute, self.batch_tokens = compute, batch_tokens
        self.calls = self.items = 0
        self._jobs: deque[Job] = deque()
        self._closed, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Append a job to those that wait."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Compute what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _batch(self) -> list[tuple[Job, Sequence[Item]]] | None:
        """The items of the next call, as (job, its items); None when no more will come."""
        batch: list[tuple[Job, Sequence[Item]]] = []
        tokens = 0
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            while self._jobs:
                job = self._jobs[0]
                if not job.rows.done():  # neither given up nor failed
                    if batch and job.prompt != batch[0][0].prompt:
                        break
                    begin = job.taken
                    while job.taken < len(job.items):
                        if tokens and tokens + job.tokens[job.taken] > self.batch_tokens:
                            break
                        tokens += job.tokens[job.taken]
                        job.taken += 1
                    if begin < job.taken:
                        batch.append((job, job.items[begin : job.taken]))
                    if job.taken < len(job.items):
                        if begin < job.taken:  # others come before the rest of it
                            self._jobs.rotate(-1)
                        break
                self._jobs.popleft()
        return batch

    def _work(self) -> None:
        while (batch := self._batch()) is not None:
            if batch:
                self._compute(batch)

    def _compute(self, batch: list[tuple[Job, Sequence[Item]]]) -> None:
        items = [item for _, part in batch for item in part]
        self.calls, self.items = self.calls + 1, self.items + len(items)
        try:
            rows, done, whole = self.compute(items, batch[0][0].prompt), 0, []
            for job, part in batch:
                job.parts.append(rows[done : done + len(part)])
                done += len(part)
                if job.taken == len(job.items):
                    whole.append((job, np.concatenate(job.parts)))
        except Exception as error:
            for job, _ in batch:
                if job.rows.set_running_or_notify_cancel():
                    job.rows.set_exception(error)
            return
        for job, found in whole:
            if job.rows.set_running_or_notify_cancel():
                job.rows.set_result(found)
