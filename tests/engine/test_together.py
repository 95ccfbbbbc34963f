"""Eight threads call everything at once: what belongs to the process is never half-changed.

Without the GIL, on free-threaded Python, they run at once in Python's and Cython's code, too.
"""

import sys
import sysconfig
import threading

import numpy as np
import pytest
from implementations import COMPILED
from oracle import assert_same_bits

import fastattn
from fastattn import functional, grad, masks, ops, positions
from fastattn._engine import memory, settings
from fastattn.layers import Rope, TransformerEncoderLayer

N_THREADS = 8

pytestmark = pytest.mark.usefixtures("threading_of")


def together(work):
    """Call work(n) in so many threads, which begin at the same time; raise what one of them raised."""
    start, errors = threading.Barrier(N_THREADS), []

    def run(n):
        try:
            start.wait()
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def make_calls():
    """{name: function without arguments} of calls that share layers, packed weights, tables and scratch."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 70, 32), np.float32)
    wide = rng.standard_normal((1200, 256), np.float32)  # kept memory begins with a quarter of a megabyte
    packed = {dtype: ops.pack(wide[:96], dtype=dtype) for dtype in ("float32", "bfloat16", "int8", "nf4")}
    layer = TransformerEncoderLayer(64, 4, 128, "gelu", rng=rng)
    x = rng.standard_normal((30, 40, 64), np.float32)
    rope = Rope(positions.rope_frequencies(32))
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    options = {
        "plain": {}, "causal": {"causal": True}, "mask": {"mask": masks.causal() & masks.window(9)},
        "dense mask": {"mask": rng.random((70, 70)) < 0.7}, "lengths": {"kv_lengths": [70, 3]},
        "lse": {"return_lse": True, "window": (9, 3)}, "dropout": {"dropout": 0.2, "seed": 1},
        "modifiers": {"alibi_slopes": np.ones(4), "sinks": np.ones(4), "bias": np.ones((70, 70), np.float32)},
        "threads": {"num_threads": 3},
    }  # fmt: skip
    calls = {
        name: lambda chosen=chosen: fastattn.attention(q, k, v, **chosen) for name, chosen in options.items()
    }
    for dtype, weight in packed.items():
        calls[f"linear {dtype}"] = lambda weight=weight: ops.linear(wide, weight)
    return calls | {
        "decode": lambda: fastattn.attention(q[:, :, :1], k, v),
        "float64": lambda: fastattn.attention(*(a.astype(np.float64) for a in (q, k, v))),
        "float16": lambda: fastattn.attention(*(a.astype(np.float16) for a in (q, k, v))),
        "sparsemax": lambda: functional.sparsemax_attention(q, k, v),
        "delta rule": lambda: functional.linear_attention(q / 6, k / 6, v, rule="delta", beta=q[..., 0]),
        "backward": lambda: functional.attention_backward(out, q, k, v, out, lse),
        "pack": lambda: ops.pack(wide, dtype="int8").scales,
        "norm": lambda: ops.layer_norm(wide, wide[0], wide[1]),
        "norm's gradients": lambda: grad.layer_norm(wide, wide, wide[0]),
        "rotary": lambda: rope.tables(50, 40, q.dtype),
        "layer": lambda: layer(x),
        "recycled": lambda: np.array(memory.recycled_empty((600, 500), q.dtype).shape),
    }


def arrays(result):
    return list(result) if isinstance(result, tuple) else [result]


def check_calls(change=lambda n: None):
    """Every thread gets the bits of a call alone, in an order of its own; before each, it calls change(n)."""
    calls = make_calls()
    expected = {name: arrays(call()) for name, call in calls.items()}
    calls = make_calls()  # whose tables and layers nobody has used

    def work(n):
        rng = np.random.default_rng(n)
        for name in rng.permutation(list(calls)):
            change(n)
            assert_same_bits(arrays(calls[name]()), expected[name])

    for _ in range(3):
        together(work)


def test_calls(implementation):
    check_calls()


@pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")
def test_settings_change_meanwhile():
    """Sizes and threads are the process's, and no bit depends on them."""
    before = settings.get_num_threads(), settings.core.get_sizes()
    sizes = {"attention_tiles": (1, 8), "linear_rows": (8, 1024), "parallel_flops": (0, 1 << 30)}

    def change(n):
        if n % 4 == 0:
            settings.set_num_threads(1 + n % 3)
        elif n % 4 == 1:
            settings.core.set_sizes({name: values[n // 4] for name, values in sizes.items()})
        else:
            fastattn.show_config()

    try:
        check_calls(change)
    finally:
        settings.set_num_threads(before[0])
        settings.core.set_sizes(before[1])


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="of Python without a GIL")
def test_the_gil_stays_off():
    assert not sys._is_gil_enabled()
