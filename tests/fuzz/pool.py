"""Run cases in child processes. A case that dies or hangs is a finding, and the others go on."""

import contextlib
import faulthandler
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

MEMORY = 4 << 30  # bytes of addresses that a process gets; a case that wants more has to say so


def run(arguments: list[str], cases: int, jobs: int) -> Iterator[tuple[int, str]]:
    """Run `cases` cases and yield the number and problem of each bad one. Children get `arguments`."""
    found: list[tuple[int, str]] = []
    shares = [range(n, cases, jobs) for n in range(jobs)]
    slots = [threading.Thread(target=_slot, args=(arguments, share, found)) for share in shares]
    for slot in slots:
        slot.start()
    for slot in slots:
        slot.join()
    yield from sorted(found)


def _slot(arguments: list[str], cases: range, found: list[tuple[int, str]]) -> None:
    """Carry out `cases` in a child, and in the next one when it dies."""
    while cases:
        case = cases[0]
        with tempfile.TemporaryFile("w+") as said:
            some = f"{cases.start}:{cases.stop}:{cases.step}"
            command = [sys.executable, str(Path(__file__).parent), *arguments, "--child", some]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
            for line in child.stdout:
                with contextlib.suppress(ValueError):  # of a line that is not ours
                    case, problem = json.loads(line)
                    if problem:
                        found.append((case, problem))
            if child.wait() == 0:
                return
            said.seek(0)
            found.append((case, f"the process ended with {child.returncode}: {said.read(4000)}"))
        cases = cases[cases.index(case) + 1 :]


def child(cases: range, problem: Callable[[int], str | None], seconds: float) -> None:
    """Say, in a child, which case begins and what was wrong with it. Exit if a case takes too long."""
    faulthandler.enable()
    if sys.platform == "linux" and "LD_PRELOAD" not in os.environ:  # sanitizers reserve terabytes
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Nobody but us writes to what was standard output.
    with os.fdopen(os.dup(1), "w", buffering=1) as output:
        os.dup2(2, 1)
        for case in cases:
            print(json.dumps([case, None]), file=output)
            faulthandler.dump_traceback_later(seconds, exit=True)
            if text := problem(case):
                print(json.dumps([case, text]), file=output)
        faulthandler.cancel_dump_traceback_later()
