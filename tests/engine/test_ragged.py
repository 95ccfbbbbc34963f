"""Programs over sequences of different lengths: each has the bits that it has alone."""

import numpy as np
import pytest
from implementations import COMPILED, each_isa, forced

from fastattn import ops
from fastattn._args import key_ranges
from fastattn._args.types import ModifiersArgs
from fastattn._engine.program import build
from fastattn._engine.steps import OUT, AttendStep, LinearStep, Sequences, X
from fastattn.layers import KVCache
from fastattn.positions import rope_frequencies, rope_tables

HEADS, HEADS_KV, HEAD_DIM, WIDTH = 4, 2, 8, 20
LENGTHS = np.array([3, 0, 40, 1, 17, 17, 90])
ATTEND = {"rotation": 0, "ranges": 1, "bias": 0}


def program(steps_of_attention):
    rng = np.random.default_rng(0)
    columns = (HEADS + 2 * HEADS_KV) * HEAD_DIM
    qkv = ops.pack(rng.standard_normal((columns, WIDTH)).astype(np.float32))
    last = ops.pack(rng.standard_normal((WIDTH, HEADS * HEAD_DIM)).astype(np.float32))
    attend = AttendStep("qkv", "context", HEADS, HEADS_KV, HEAD_DIM, ModifiersArgs(0.3), **steps_of_attention)
    return build("ragged", [LinearStep(X, "qkv", qkv, None), attend, LinearStep("context", OUT, last, None)])


def told(lengths, window=(20, 0)):
    """Build what a program is told of sequences of these lengths."""
    begins = np.append(0, np.cumsum(lengths))
    places = np.concatenate([np.arange(n) for n in lengths])
    cos, sin = rope_tables(places, rope_frequencies(HEAD_DIM))
    within = key_ranges.intersect([key_ranges.window(places, *window)], np.repeat(lengths, lengths))
    bias = np.random.default_rng(1).standard_normal((HEADS, 2 * 100 - 1)).astype(np.float32)
    ranges = ((None, None), within)
    return Sequences(len(lengths), ranges, ((cos[None], sin[None]),), begins=begins, biases=(bias,))


def rows():
    return np.random.default_rng(2).standard_normal((LENGTHS.sum(), WIDTH)).astype(np.float32)


@each_isa
@pytest.mark.parametrize("options", [{}, *({name: i} for name, i in ATTEND.items()), ATTEND], ids=str)
def test_a_sequence_has_the_same_bits_alone(isa, options):
    steps, x = program(options), rows()
    for threads in (1, 3):
        with forced(isa, num_threads=threads):
            together = steps.run(x, told(LENGTHS))
            for length, end in zip(LENGTHS, np.cumsum(LENGTHS), strict=True):
                own = slice(end - length, end)
                alone = steps.run(x[own], told(np.array([length])))
                np.testing.assert_array_equal(together[own], alone)
                if length:  # neither does it matter whether its begins are told
                    equal = steps.run(x[own], told(np.array([length]))._replace(begins=None))
                    np.testing.assert_array_equal(equal, alone)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("options", [{}, {"rotation": 0, "ranges": 1}], ids=str)
@each_isa
def test_a_cache_takes_each_sequence_behind_its_own(isa, options, dtype):
    """Twice: to an empty cache, and after keys of different lengths."""
    steps, lengths = program(options), LENGTHS[LENGTHS > 0]
    caches = [KVCache(capacity=99, dtype=dtype) for _ in range(len(lengths) + 1)]
    keys = (HEADS_KV, HEAD_DIM)
    with forced(isa):
        for seed in (5, 6):
            x = np.random.default_rng(seed).standard_normal((lengths.sum(), WIDTH)).astype(np.float32)
            together, longest = caches[0], int(lengths.max())
            shape = (len(lengths), keys[0], longest, keys[1])
            out = steps.run(
                x,
                told(lengths)._replace(slots=(together._extend(shape, shape, x.dtype, lengths),), biases=()),
            )
            for i, (length, end) in enumerate(zip(lengths.tolist(), np.cumsum(lengths), strict=True)):
                own, shape = slice(end - length, end), (1, keys[0], length, keys[1])
                slots = (caches[i + 1]._extend(shape, shape, x.dtype, None),)
                alone = steps.run(
                    x[own], told(np.array([length]))._replace(slots=slots, begins=None, biases=())
                )
                np.testing.assert_array_equal(out[own], alone)
                for held, held_alone in zip(together._held, caches[i + 1]._held, strict=True):
                    count = caches[i + 1].length
                    np.testing.assert_array_equal(held[i, :, :count], held_alone[0, :, :count])


@pytest.mark.parametrize("options", [{}, ATTEND], ids=str)
def test_kernels_and_fallback_agree(options):
    steps, x = program(options), rows()
    with forced("numpy"):
        expected = steps.run(x, told(LENGTHS))
    for isa in COMPILED:
        with forced(isa):
            np.testing.assert_allclose(steps.run(x, told(LENGTHS)), expected, rtol=0, atol=2e-4)


def test_a_bias_is_of_the_distance(implementation):
    """A score of query i and key j has, by definition, what is at j - i from the middle."""
    n, table = 5, np.random.default_rng(3).standard_normal((HEADS, 13)).astype(np.float32)
    qkv = np.random.default_rng(4).standard_normal((n, (HEADS + 2 * HEADS_KV) * HEAD_DIM)).astype(np.float32)
    step = build("bias", [AttendStep(X, OUT, HEADS, HEADS_KV, HEAD_DIM, ModifiersArgs(0.3), bias=0)])
    got = step.run(qkv, Sequences(1, biases=(table,))).reshape(n, HEADS, HEAD_DIM)
    heads = qkv.reshape(n, -1, HEAD_DIM).astype(np.float64)
    for h in range(HEADS):
        q, k, v = heads[:, h], heads[:, HEADS + h // 2], heads[:, HEADS + HEADS_KV + h // 2]
        scores = 0.3 * q @ k.T + [[table[h, 6 + j - i] for j in range(n)] for i in range(n)]
        probs = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = probs / probs.sum(axis=1, keepdims=True) @ v
        np.testing.assert_allclose(got[:, h], expected, rtol=0, atol=1e-5)
