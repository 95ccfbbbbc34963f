"""Memory beyond inputs and output is O(threads x tile), whatever the lengths are."""

import subprocess
import sys

import pytest
from implementations import IMPLEMENTATIONS, child_environment

# Growth of the peak of a process of its own by one call. Linux gives the peak of this program alone; what a
# process inherits from its parent's counts in getrusage.
MEASURE = """
import resource, sys
import numpy as np
import fastattn
from fastattn._engine import settings

def peak():
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

implementation, len_q, len_k, variant, num_threads = sys.argv[1:]
kwargs = {"backend": "numpy"} if implementation == "numpy" else {"isa": implementation, "backend": "compiled"}
variants = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 100)},
    "all": {"causal": True, "sinks": np.zeros(2, np.float32), "alibi_slopes": np.ones(2, np.float32),
            "kv_lengths": 1000, "softcap": 5.0, "q_offset": 0, "return_lse": True},
}
def call(len_q, len_k, out=None):
    return fastattn.attention(q[:, :len_q], k[:, :len_k], v[:, :len_k], out=out, num_threads=int(num_threads),
                              **variants[variant])
q, k, v = (np.ones((2, int(n), 8), dtype) for n, dtype in ((len_q, "f4"), (len_k, "f2"), (len_k, "f2")))
q = q.astype(np.float32)
out = np.ones((2, int(len_q), 8), np.float32)
with settings.forced(**kwargs):
    call(300, 1000 if variant == "all" else 700)  # threads, buffers, code: what is there for any call
    before = peak()
    call(int(len_q), int(len_k), out)
    print(peak() - before)
"""


def extra_memory(*arguments):
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, *map(str, arguments)]
    run = subprocess.run(command, env=child_environment(), timeout=300, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.parametrize("variant", ["plain", "causal", "all"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_sequences(implementation, variant):
    """The scores of two heads would take 512 MB."""
    assert extra_memory(implementation, 8000, 8000, variant, 2) < 16e6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_caches(implementation):
    """A million keys in 16 bits are not widened in one piece."""
    assert extra_memory(implementation, 1, 1_000_000, "plain", 2) < 16e6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_threads_cost_a_tile_each(implementation):
    assert extra_memory(implementation, 4000, 4000, "window", 16) < 64e6
