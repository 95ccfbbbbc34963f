"""Calls that take seconds to years, for a test to interrupt: `python endless.py IMPLEMENTATION THREADS CALL`.

Most arrays are one block, seen as very many by strides of 0.
"""

import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
from implementations import forced

import fastattn
from fastattn import functional, ops
from fastattn._args.deformable import deformable_args, deformable_grad_args
from fastattn._engine import dispatch
from fastattn._engine.program import build
from fastattn._engine.steps import OUT, LinearStep, Sequences, X


def repeated(*shape, dtype=np.float32):
    return np.broadcast_to(np.full(shape[-1], 0.5, dtype), shape)


def attention():
    q, k = repeated(100_000, 4, 256, 64), repeated(100_000, 4, 2048, 64)
    return lambda: fastattn.attention(q, k, k[..., :1])


def keys():
    """With one thread it is one task of a few tiles of rows."""
    q, k = repeated(1, 1, 256, 128), repeated(1, 1, 1 << 36, 128)
    return lambda: fastattn.attention(q, k, k)


def unequal():
    """Three tasks: the calling thread has the first and the last, short ones, another thread the long one."""
    k = repeated(1, 1, 1 << 36, 128)
    few = k[:, :, :1024]  # `explain` counts the tiles of all
    block = fastattn.explain(repeated(1, 1, 256, 128), few, few)["block_q"]
    q, begin, end = repeated(1, 1, 3 * block, 128), np.zeros(3 * block, np.int64), np.full(3 * block, 1 << 14)
    end[block : 2 * block] = k.shape[2]
    assert fastattn.explain(q, few, few, num_threads=2)["blocks_q_per_task"] == 1
    return lambda: fastattn.attention(q, k, k, row_ranges=(begin, end))


def decode():
    """With one thread it is one task."""
    q, k = repeated(1, 1, 8, 64), repeated(1, 1, 1 << 36, 64)
    return lambda: fastattn.attention(q, k, k)


def topk():
    q, k = repeated(100_000, 4, 256, 64), repeated(100_000, 4, 2048, 64)
    return lambda: functional.top_k_attention(q, k, k[..., :1], top_k=3)


def additive():
    """It is one task."""
    q, k, weight = repeated(1, 1, 32, 1024), repeated(1, 1, 1 << 20, 1024), np.ones((1, 1024), np.float32)
    return lambda: functional.additive_attention(q, k, k[..., :1], weight)


def talking():
    """It is one task."""
    q, k, mix = repeated(1, 8, 32, 64), repeated(1, 8, 1 << 36, 64), np.ones((8, 8), np.float32)
    return lambda: functional.talking_heads_attention(q, k, k, pre=mix, post=mix)


def selection():
    """With one thread it is one task."""
    q, k = repeated(1, 512, 1, 128), repeated(1, 1, 1 << 24, 128)
    return lambda: functional.select_keys(q, k, 3)


def selected():
    """Many sequences, and for each query 4096 keys."""
    q, k = repeated(100_000, 4, 256, 64), repeated(1, 1, 4096, 64)
    lists = np.broadcast_to(np.arange(4096), (1, 1, 256, 4096))
    return lambda: functional.selected_attention(q, k, k[..., :1], lists)


def recurrent():
    q = repeated(100_000, 4, 256, 64)
    return lambda: functional.linear_attention(q, q, q[..., :1], rule="linear")


def recurrent_backward():
    """It is one task."""
    q = repeated(1, 1, 1 << 26, 256)
    gradients = functional._recurrent.linear_attention_backward
    return lambda: gradients(q[..., :1], q, q, q[..., :1], rule="linear", need=("dstate",))


def state():
    """It is one task, since a state cannot be cut."""
    q = repeated(1, 1, 1 << 26, 256)
    return lambda: functional.linear_attention(q, q, q[..., :1], rule="linear")


def last_state():
    """It is one task of queries that are not causal."""
    q, k = repeated(1, 1, 1 << 28, 256), repeated(1, 1, 1, 256)
    return lambda: functional.linear_attention(q, k, k[..., :1], rule="linear", causal=False)


def deformable_backward():
    """It is one task."""
    n, points = 1 << 20, 4096
    places = np.broadcast_to(np.full((points, 2), 0.5, np.float32), (1, 1, n, points, 2))
    args = deformable_args(np.ones((1, 1, 1, 1), np.float32), [(1, 1)], places, repeated(1, 1, n, points))
    back = deformable_grad_args(args, repeated(1, 1, n, 1), {"dv"})
    return lambda: dispatch.run_grad(back)


def linear():
    x, weight = repeated(1 << 24, 1 << 13), ops.pack(np.ones((64, 1 << 13), np.float32))
    return lambda: ops.linear(x, weight)


def program():
    """It is one step of a model."""
    x, weight = repeated(1 << 24, 1 << 13), ops.pack(np.ones((64, 1 << 13), np.float32))
    steps = [LinearStep(X, OUT, weight, None)]
    return lambda: build("endless", steps).run(x, Sequences(1))


def rows():
    x = repeated(1 << 20, 1 << 9, dtype=np.float64)
    return lambda: ops.activate(x, "gelu_tanh")


def pack():
    weight = repeated(1 << 15, 1 << 15)
    return lambda: ops.pack(weight, dtype="int8")


def tokenize():
    """It is one text."""
    from tiny_tokenizers import write_tokenizer

    from fastattn.models._text import Text

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        text = Text(Path(folder), 32)
        text.encode(["the cat"])  # the file has been read
    return lambda: text.encode(["the cat " * (1 << 20)])


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    implementation, num_threads, name = sys.argv[1:]
    call = globals()[name]()
    with forced(implementation, num_threads=int(num_threads)):
        print("computing", flush=True)
        try:
            call()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            q = np.ones((2, 100, 16), np.float32)
            assert (fastattn.attention(q, q, q, num_threads=2) == 1).all()  # as if nothing had happened
            print("computed", flush=True)


if __name__ == "__main__":
    main()
