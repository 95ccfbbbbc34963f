"""Threads, processes and signals: many callers at once, a fork, Ctrl-C, the GIL, the environment."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from implementations import COMPILED, IMPLEMENTATIONS, child_environment, forced
from oracle import assert_same_bits, spread_inputs

import fastattn
from fastattn._bench.cases import Shape
from fastattn._engine import settings

SHAPE = Shape("threads", batch=2, heads_q=4, heads_kv=2, len_q=120, len_k=300, head_dim=32)

pytestmark = pytest.mark.usefixtures("threading_of")
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and forks")


def test_an_error_in_one_thread_is_that_thread_s_own(implementation):
    q, k, v = spread_inputs(SHAPE, "float32", np.random.default_rng(0))
    expected = fastattn.attention(q, k, v)
    raised = []

    def bad():
        for _ in range(50):
            with pytest.raises(ValueError, match="scale"):
                fastattn.attention(q, k, v, scale=np.nan)
            raised.append(True)

    worker = threading.Thread(target=bad)
    worker.start()
    for _ in range(10):
        assert_same_bits([fastattn.attention(q, k, v)], [expected])
    worker.join()
    assert len(raised) == 50


def test_the_gil_is_released(implementation):
    """Another thread sees half of a result, so it ran while attention() was computing."""
    n = 64
    q = np.ones((n, 1, 512, 64), np.float32)
    out = np.empty(q.shape, np.float32)

    def watch():
        while not (done.is_set() or seen):
            there = np.count_nonzero(out[:, 0, -1, -1] == 1)
            if 0 < there < n:
                seen.append(there)

    seen = []
    for _ in range(20):  # a call is short, and the machine may be busy
        out[...] = np.nan
        done = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        fastattn.attention(q, q, q, out=out, num_threads=1)
        done.set()
        watcher.join()
        if seen:
            return
    raise AssertionError("nothing else ran during the calls")


FORK = """
import os, signal, sys, time
import numpy as np
import fastattn
from fastattn._engine import settings

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 4

implementation = sys.argv[1]
kwargs = {"backend": "numpy"} if implementation == "numpy" else {"isa": implementation, "backend": "compiled"}
q = np.random.default_rng(0).standard_normal((8, 4, 200, 32), np.float32)
with settings.forced(**kwargs):
    before = fastattn.attention(q, q, q, num_threads=2)  # which has made threads
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends
        same = all((fastattn.attention(q, q, q, num_threads=n) == before).all() for n in (None, 1, 4))
        while implementation != "numpy" and threads() < 4:
            time.sleep(0.01)  # OpenMP's threads begin beside the call
        os._exit(0 if same else 3)
    assert os.waitpid(child, 0)[1] == 0, "the child hung or computed something else"
    assert (fastattn.attention(q, q, q, num_threads=2) == before).all(), "the parent afterwards"
"""


@posix
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_forked_child_computes(implementation):
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, implementation], timeout=120,
                         env=child_environment(), capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert not run.stderr


SOON = 2.0  # seconds, of which 0.1 are what it takes, and the rest for a machine that is busy


@posix
@pytest.mark.parametrize(
    ("implementation", "num_threads", "call"),
    [
        # One text is compiled for each instruction set: the first one stands for all.
        *((name, n, "attention") for name in (*COMPILED[:1], "numpy") for n in (1, 2)),
        *(
            (isa, n, name)
            for isa in COMPILED[:1]
            for n in (1, 2)
            for name in ("topk", "recurrent", "selection", "selected", "linear")
        ),
        *((isa, 1, name) for isa in COMPILED[:1] for name in ("program", "decode", "additive", "talking")),
        *(
            (isa, 1, name)
            for isa in COMPILED[:1]
            for name in ("keys", "state", "last_state", "recurrent_backward", "deformable_backward")
        ),
        *((isa, 2, "unequal") for isa in COMPILED[:1]),
        *((isa, 1, "rows") for isa in COMPILED[-1:]),  # the slowest
        *(
            ("numpy", 1, name)
            for name in ("topk", "recurrent", "linear", "program", "rows", "deformable_backward")
        ),
        *((IMPLEMENTATIONS[0], 1, name) for name in ("pack", "tokenize")),
    ],
)
def test_ctrl_c(implementation, num_threads, call):
    """Ctrl-C ends every kind of call soon, within a task and within a step, and later calls work."""
    script = Path(__file__).with_name("endless.py")
    command = [sys.executable, "-W", "ignore", script, implementation, str(num_threads), call]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=child_environment(), **pipes) as child:
        too_late = threading.Timer(60, child.kill)
        too_late.start()
        try:
            assert child.stdout.readline() == "computing\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.2)  # it is on its way, and not done soon
            child.send_signal(signal.SIGINT)
            sent = time.monotonic()
            assert child.stdout.readline() == "interrupted\n"
            waited = time.monotonic() - sent
            assert child.stdout.read() == "computed\n", child.stderr.read()
            assert child.wait() == 0
        finally:
            too_late.cancel()
            child.kill()
    assert waited < SOON


def test_set_num_threads_and_forced():
    before = fastattn.get_num_threads()
    try:
        fastattn.set_num_threads(3)
        assert fastattn.get_num_threads() == 3
        with settings.forced(num_threads=5):
            assert fastattn.get_num_threads() == 5
            q = np.ones((3, 4))
            assert fastattn.explain(q, q, q)["num_threads"] == 5
            assert fastattn.explain(q, q, q, num_threads=2)["num_threads"] == 2
        assert fastattn.get_num_threads() == 3
    finally:
        fastattn.set_num_threads(before)


def test_forced_is_undone_by_an_exception():
    before = dict(fastattn.show_config())
    with pytest.raises(KeyError), forced(IMPLEMENTATIONS[0], num_threads=7):
        raise KeyError
    assert dict(fastattn.show_config()) == before


FEW = """
import os, resource
import numpy as np
import fastattn

q = np.random.default_rng(0).standard_normal((8, 4, 200, 32), np.float32)
alone = fastattn.attention(q, q, q, num_threads=1)
held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (held + (100 << 20), -1))  # no room for the stacks of 63 threads
print((fastattn.attention(q, q, q, num_threads=64) == alone).all(), len(os.listdir("/proc/self/task")) < 60)
"""


linux_kernels = pytest.mark.skipif(
    not (COMPILED and os.path.isdir("/proc/self/task")),
    reason="compiled kernels have threads; Linux lists them",
)


@linux_kernels
@pytest.mark.parametrize("stack", [None, "64M"])
def test_fewer_threads_where_the_system_refuses_them(stack, python):
    """OpenMP's runtime would end the process."""
    code = FEW.replace("num_threads=64", "num_threads=6") if stack else FEW
    run = python(code, FASTATTN_BACKEND="compiled", OPENBLAS_NUM_THREADS=1, OMP_STACKSIZE=stack)
    assert run.stdout == "True True\n", run.stderr


REFUSED = """
import resource, threading
import numpy as np
import fastattn

q = np.random.default_rng(0).standard_normal((8, 4, 200, 32), np.float32)
alone = fastattn.attention(q, q, q, num_threads=1)
ready, go, same = threading.Barrier(7), threading.Event(), []

def call():
    fastattn.attention(q, q, q, num_threads=1)
    ready.wait(), go.wait()
    same.extend((fastattn.attention(q, q, q, num_threads=8) == alone).all() for _ in range(3))

callers = [threading.Thread(target=call) for _ in range(6)]
[caller.start() for caller in callers]
ready.wait()
held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (held + (170 << 20), -1))  # no room for the stacks of 48 threads
go.set()
[caller.join() for caller in callers]
print(len(same), all(same))
"""


@linux_kernels
def test_fewer_threads_where_the_system_refuses_them_to_several_callers(python):
    run = python(REFUSED, FASTATTN_BACKEND="compiled", OPENBLAS_NUM_THREADS=1)
    assert run.stdout == "18 True\n", run.stderr


KEPT = """
import os, time
import numpy as np
from fastattn import ops

few, many = np.ones((5, 1 << 14), np.float32), np.ones((200, 1 << 14), np.float32)  # rows, which are tasks
ops.activate(many, "relu", num_threads=6)
deadline = time.monotonic() + 30
while len(os.listdir("/proc/self/task")) < 6 and time.monotonic() < deadline:
    time.sleep(0.01)  # OpenMP's threads begin beside the call
time.sleep(0.1)
before = set(os.listdir("/proc/self/task"))
for x in (few, many, few[:1], few, many):
    assert (ops.activate(x, "relu", num_threads=6) == 1).all()
print(len(before), before == set(os.listdir("/proc/self/task")))
"""


@linux_kernels
def test_threads_stay_from_call_to_call(python):
    """Threads stay past calls with fewer tasks than threads, too."""
    count, same = python(KEPT, FASTATTN_BACKEND="compiled", OPENBLAS_NUM_THREADS=1).stdout.split()
    assert int(count) >= 6
    assert same == "True"


FOLLOW = """
import os, time
import numpy as np
import fastattn

q = np.ones((8, 4, 200, 32), np.float32)
every, one = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
for cores in (every, one, every):
    for task in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(task, cores)
    end, found = time.monotonic() + 20, None
    while found != cores and time.monotonic() < end:  # a helper that gets no CPU has not moved yet
        fastattn.attention(q, q, q, num_threads=3)
        time.sleep(0.1)  # helpers are asleep
        fastattn.attention(q, q, q, num_threads=3)
        found = set().union(*(os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")))
    print(found == cores)
"""


@linux_kernels
def test_helpers_use_the_cores_that_the_caller_may(python):
    run = python(FOLLOW, FASTATTN_BACKEND="compiled", OPENBLAS_NUM_THREADS=1)
    assert run.stdout == "True\nTrue\nTrue\n", run.stderr


ENDS = """
import sys, threading, time
import numpy as np
import fastattn

q = np.ones((1, 8, 8192, 64), np.float32)

def deep(n):  # calls from far down the stack, which is given back first when the thread ends
    if n:
        return list(map(deep, [n - 1]))
    while True:
        fastattn.attention(q, q, q, num_threads=2)

class Slow:
    def __del__(self):
        sum(range(2 * 10**7))

threading.Thread(target=deep, args=(150,), daemon=True).start()
time.sleep(0.3)
sys.kept = Slow()  # it goes when Python has ended other threads
"""


@linux_kernels
def test_python_ends_while_another_thread_computes(python):
    run = python(ENDS, FASTATTN_BACKEND="compiled", OPENBLAS_NUM_THREADS=1)
    assert (run.returncode, run.stderr) == (0, "")
