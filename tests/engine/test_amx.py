"""The instruction set `amx`: tiles of threads, children and signal handlers, and systems that refuse them."""

import os
import signal
import threading

import ml_dtypes
import numpy as np
import pytest
from oracle import assert_same_bits

import fastattn
from fastattn import grad, ops
from fastattn._engine import settings
from fastattn.functional import attention_backward

tiles = pytest.mark.skipif(
    "amx" not in fastattn.show_config()["isas_available"], reason="no tiles: of an Intel Xeon, or emulated"
)
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers")

BFLOAT16 = ml_dtypes.bfloat16


def draw(*shape):
    """Normal numbers in bfloat16."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(BFLOAT16)


def results(rows=70, keys=9000):
    """Results of each kernel that has tiles, long enough that calls of several threads meet."""
    q, k, x, weight = draw(1, 2, rows, 64), draw(1, 2, keys, 64), draw(rows, 600), draw(100, 600)
    wide = weight.astype(np.float32)
    out, lse = fastattn.attention(q, k, k, return_lse=True)
    packed = ops.pack(weight)
    return (
        out,
        *attention_backward(q, q, k, k, out, lse),
        ops.linear(x, packed),
        *grad.linear(x[:, :100], x, packed),
        ops.linear(x.astype(np.float32), ops.pack(wide, dtype="int8"), activations="int8"),
    )


@pytest.fixture(autouse=True)
def _use_amx():
    if "amx" not in fastattn.show_config()["isas_available"]:
        yield
        return
    with settings.forced(isa="amx", backend="compiled"):
        yield


def assert_same_results(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


@tiles
def test_threads_have_tiles_of_their_own():
    expected, got = results(), []
    threads = [threading.Thread(target=lambda: got.append(results())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(threads)
    for each in got:
        assert_same_results(each, expected)


@tiles
@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_have_tiles():
    expected = results()
    child = os.fork()
    if not child:
        same = all((one == other).all() for one, other in zip(results(), expected, strict=True))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@tiles
@timers
@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread"
)
def test_a_signal_handler_may_use_tiles_in_the_middle_of_a_call():
    """Handlers run between products; when they return, the call has lost its tiles and must take new ones."""
    expected, small = results(200, 60000), results(5, 100)
    again = []

    def interrupt(*_):
        again.append(results(5, 100))
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # once more, and not in the middle of this

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        for _ in range(5):
            assert_same_results(results(200, 60000), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert again
    for each in again:
        assert_same_results(each, small)


SMALL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.cast(memory, ctypes.c_void_p), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
"""
COMPUTE = """
import numpy as np, ml_dtypes, fastattn
q = np.ones((1, 1, 8, 8), ml_dtypes.bfloat16)
assert (fastattn.attention(q, q, q) == 1).all()
config = fastattn.show_config()
print(config["isa"], config["isa_refused"], sep=": ")
"""


@tiles
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only Linux refuses tiles")
def test_a_system_that_refuses_tiles(python):
    """The next instruction set computes, and `show_config` says why."""
    run = python(SMALL_STACK + COMPUTE, FASTATTN_ISA=None, FASTATTN_BACKEND=None)
    isa, why = run.stdout.strip().split(": ", 1)
    assert (isa, why) == ("amx", "None") or (isa != "amx" and "12 KB" in why), run.stderr
    forced = python(SMALL_STACK + COMPUTE, FASTATTN_ISA="amx", FASTATTN_BACKEND=None)
    assert forced.stdout == "amx: None\n" or "FASTATTN_ISA is 'amx'; the system refuses" in forced.stderr


@tiles
@pytest.mark.parametrize("panels", [1, 2, 17])
@pytest.mark.parametrize("features", [32, 64, 512, 1088, 3072])
@pytest.mark.parametrize("skipped", [1, 8, 24, 31])
def test_rows_may_begin_anywhere(skipped, features, panels):
    """Rows beside cache lines are copied while those before are multiplied; others are read in place."""
    x = draw(100, features).astype(ml_dtypes.bfloat16)
    packed = ops.pack(draw(32 * panels, features).astype(np.float32), dtype="bfloat16")
    memory = np.empty(100 * (features + 32) + 64, ml_dtypes.bfloat16)
    line = -memory.ctypes.data % 64 // 2
    results = []
    for begin, row in [(line, features + 32), (line + skipped, features), (line, features + skipped)]:
        rows = np.lib.stride_tricks.as_strided(memory[begin:], x.shape, (2 * row, 2))
        rows[...] = x
        results.append(ops.linear(rows, packed))
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert_same_bits(results[0][99:], ops.linear(x[99:], packed))


@tiles
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_of_bfloat16_weights_are_of_rounded_rows(dtype, gated):
    """By tiles; other kernels would not round dx's."""
    x, dout = draw(70, 100).astype(dtype), draw(*((70, 2, 60) if gated else (70, 60))).astype(dtype)
    packed = ops.pack(draw(60, 100), gate=-draw(60, 100) if gated else None)
    more = np.asarray(1 + 2.0**-10, dtype)  # which rounding takes away
    assert_same_bits(
        ops.linear(dout * more, packed, transposed=True), ops.linear(dout, packed, transposed=True)
    )
    if not gated:  # whose gradient is that of its activation first
        for need in ("dx", "dweight"):
            got, expected = (grad.linear(dout * m, x * m, packed, need=(need,)) for m in (more, dtype(1)))
            assert_same_bits(got[0], expected[0])


HIDDEN = [(64, 128), (64, 192), (64, 256), (0, 64)]


@tiles
@pytest.mark.parametrize("by", ["mask", "bias", "ranges"])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [32, 64])
def test_blocks_between_others_that_nobody_attends(rows, hidden, by):
    """Values of one block wait to be multiplied while the next one's are copied: whichever block that is."""
    q, k, v = draw(1, 1, rows, 64), draw(1, 1, 400, 64), draw(1, 1, 400, 64)
    begin, end = hidden
    mask = np.ones((rows, 400), bool)
    mask[:, begin:end] = False
    if by == "mask":
        options = {"mask": mask}
    elif by == "bias":
        options = {"bias": np.where(mask, 0, -np.inf).astype(np.float32)}
    else:  # of the first rows and of the last ones
        first = np.arange(rows) < 32
        mask = np.where(first[:, None], np.arange(400) < begin, np.arange(400) >= end)
        options = {"row_ranges": (np.where(first, 0, end), np.where(first, begin, 400))}
    got = fastattn.attention(q, k, v, **options).astype(np.float32)
    expected = fastattn.attention(q, k, v, mask=mask, backend="numpy").astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.02)


@tiles
def test_rows_do_not_depend_on_where_others_begin():
    """Keys are taken in steps of the sequence: a window's first key may lie in the middle of one."""
    q, k, v = draw(1, 2, 130, 40), draw(1, 2, 130, 40), draw(1, 2, 130, 24)
    whole = fastattn.attention(q, k, v, window=(45, 0))
    for row in (50, 77, 129):
        alone = fastattn.attention(
            q[..., row - 16 : row + 1, :], k[..., : row + 1, :], v[..., : row + 1, :], window=(45, 0)
        )
        assert_same_bits(alone[..., -1, :], whole[..., row, :])
