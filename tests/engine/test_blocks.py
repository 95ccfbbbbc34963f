"""NumPy handles large arrays a block at a time: with the same bits, and without temporaries of their size."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from implementations import forced
from oracle import assert_same_bits

import fastattn
from fastattn import functional, ops
from fastattn._args import blocks, packed
from fastattn._reference import pack
from fastattn.positions import apply_rope

BLOCK = 50


@pytest.fixture
def small(monkeypatch):
    """A function that makes all later blocks small."""

    def make():
        monkeypatch.setattr(blocks, "BLOCK", BLOCK)
        monkeypatch.setattr(packed, "_UNPACKED", BLOCK)
        for name, size in (("_BLOCK", 1), ("_BLOCK_FEATURES", 32)):
            monkeypatch.setattr(pack, name, size)

    return make


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (50,), (51,), (7, 8), (2, 3, 5, 7), (4, 0, 3), (3, 60), (99, 1, 2)], ids=str
)
@pytest.mark.parametrize("width", [0, 1, 3, 49, 1000])
def test_blocks_are_all_of_an_array_once(shape, width, small):
    small()
    times = np.zeros(shape, int)
    for block in blocks.blocks(shape, width):
        part = times[block]
        assert part.size <= max(1, BLOCK // max(1, width))
        part += 1
    assert (times == 1).all()


def merged():
    outs, lses = numbers(3, 2, 40, 7, dtype=ml_dtypes.bfloat16), numbers(3, 2, 40)
    lses[0, 0, :5] = lses[:, 1, 3] = -np.inf
    return fastattn.merge_states(list(outs), list(lses))


def embedded():
    table, ids = numbers(30, 7), np.random.default_rng(0).integers(0, 30, (4, 9))
    foreign, out = table.astype(">f4"), np.empty((8, 9, 7), np.float32)[::2]
    return [ops.embedding(ids, table), ops.embedding(ids, foreign), ops.embedding(ids, table, out=out)]


def normalised():
    x, weight = numbers(60, 11, dtype=np.float16), numbers(11)
    with forced("numpy"):
        return [ops.layer_norm(x, weight), ops.softmax(x), ops.activate(x, "silu")]


def rotated():
    x, cos, sin = numbers(2, 3, 20, 8), numbers(20, 3), numbers(20, 3)
    with forced("numpy"):
        return [apply_rope(x, cos, sin), apply_rope(x, cos, sin, interleaved=True)]


def copied():
    q, k = numbers(2, 3, 20, 8).astype(">f4"), numbers(2, 3, 8, 20).swapaxes(2, 3)
    return [fastattn.attention(q, k, k)]


@pytest.mark.parametrize("rule", ["linear", "gated", "gated_delta"])
def test_recurrences_have_the_bits_of_the_whole(rule, small):
    q, k, v = numbers(3, 2, 4, 40, 8), numbers(2, 2, 40, 8) / 9, numbers(3, 1, 1, 40, 5)
    decay = {"linear": None, "gated": -abs(numbers(1, 2, 1, 8)), "gated_delta": -abs(numbers(2))}[rule]
    options = {"rule": rule, "log_decay": decay, "normalize": "delta" not in rule, "return_state": True}
    if "delta" in rule:
        options["erase"] = numbers(1, 2, 40, 8) / 9
    with forced("numpy"):
        whole = functional.linear_attention(q, k, v, **options)
        again = functional.linear_attention(q, k, v, **options, state=whole[1])
        small()
        for expected, state in ((whole, None), (again, whole[1])):
            got = functional.linear_attention(q, k, v, **options, state=state)
            assert_same_bits(flat(got), flat(expected))


def flat(results):
    out, state = results
    return [out, *(state if isinstance(state, tuple) else [state])]


def packed_weights():
    weight = numbers(70, 33)
    weights = [ops.pack(weight, dtype=dtype, backend="numpy") for dtype in packed.WEIGHT_DTYPES]
    weights += [
        ops.pack(weight, gate=-weight, dtype=dtype, backend="numpy") for dtype in packed.WEIGHT_DTYPES
    ]
    return [array for w in weights for array in (w.panels, w.scales, w.sums, w.unpack()) if array is not None]


@pytest.mark.parametrize("results", [merged, embedded, normalised, rotated, copied, packed_weights])
def test_the_bits_are_those_of_the_whole(results, small):
    expected = results()
    small()
    assert_same_bits(results(), expected)


def extra(call):
    """The most bytes that NumPy held at one time during `call`, beyond those of its result."""
    tracemalloc.start()
    try:
        result = call()
        current, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return peak - current


def test_merging_keeps_no_copies():
    out, lse = np.ones((4, 1 << 16, 64), np.float32), np.ones((4, 1 << 16), np.float32)
    assert extra(lambda: fastattn.merge_states([out] * 3, [lse] * 3)) < out.nbytes / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_packing_keeps_no_copies(dtype, implementation):
    weight = np.ones((1 << 11, 1 << 13), np.float32)
    assert extra(lambda: ops.pack(weight, dtype=dtype)) < weight.nbytes / 10
