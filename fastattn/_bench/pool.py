"""The bench's side of a worker process: ask it, wait, and stop it while other engines are timed."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastattn._engine.settings import CPUS

# Threads that spin while they wait for work would disturb the engine that is timed next. Those of a stopped
# process cannot.
CAN_STOP = hasattr(signal, "SIGSTOP")
PAUSE = 0.2  # seconds in which threads fall asleep, on systems that cannot stop a process


def _environment(threads: int) -> dict[str, str]:
    count = str(threads)
    chosen = {name: value for name, value in os.environ.items() if name != "FASTATTN_BACKEND"}
    return {
        **chosen,
        **dict.fromkeys(
            (
                "FASTATTN_NUM_THREADS",
                "OMP_NUM_THREADS",
                "OPENBLAS_NUM_THREADS",
                "MKL_NUM_THREADS",
                "VECLIB_MAXIMUM_THREADS",
                "PJRT_NPROC",
            ),
            count,
        ),
        "JAX_PLATFORMS": "cpu",
        # With these, malloc keeps freed memory. Otherwise a result of a few megabytes would take as long to
        # get its pages from the system as to compute, and not every engine can reuse its output.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    }


@contextmanager
def _on_cpus(count: int) -> Iterator[None]:
    """Let this thread run on the first CPUs of this process: what it starts inherits them."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CPUS[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Crash(Exception):
    """The worker died or took too long."""


class WorkerProcess:
    """One engine in a process of its own."""

    def __init__(self, suite: str, engine: str, threads: int) -> None:
        self.arguments = (suite, engine, threads)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        with _on_cpus(threads):  # some libraries start as many threads as the process has CPUs
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fastattn._bench.worker", suite, engine, str(threads)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env=_environment(threads),
            )
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._pipe("stdout"), selectors.EVENT_READ)

    def _pipe(self, name: str) -> Any:
        return getattr(self.process, name)

    def ask(self, do: str, *, timeout: float = 600, **arguments: Any) -> dict[str, Any]:
        """Wake the worker up, wait for its answer to one request, and stop it again."""
        if CAN_STOP:
            self.process.send_signal(signal.SIGCONT)
        try:
            self._pipe("stdin").write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            reply = self._read_line(time.monotonic() + timeout)
        except BrokenPipeError:
            reply = b""
        if not reply:
            raise Crash(self._last_words())
        if CAN_STOP:
            self.process.send_signal(signal.SIGSTOP)
        else:
            time.sleep(PAUSE)
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _read_line(self, deadline: float) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise Crash("took too long")
            piece = os.read(self._pipe("stdout").fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def _last_words(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"process ended with code {code}. {last}"[:200].strip()

    def another(self) -> WorkerProcess:
        """A new process that takes the place of this one."""
        self.close()
        return WorkerProcess(*self.arguments)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for resource in (self.selector, self._pipe("stdin"), self._pipe("stdout"), self.log):
            resource.close()
