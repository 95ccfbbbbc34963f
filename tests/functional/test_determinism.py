"""Same input, same bits: for any thread count, run after run, whatever else is in the batch."""

import numpy as np
import pytest
from implementations import each_isa, forced
from oracle import assert_same_bits, spread_inputs

import fastattn
from fastattn._bench.cases import DTYPES, VARIANTS, Shape, combine
from fastattn._engine import settings

# Large enough for several tasks, key blocks and splits; more heads than threads, and fewer.
SHAPES = [
    Shape("prefill", batch=3, heads_q=4, heads_kv=2, len_q=150, len_k=333, head_dim=40),
    Shape("one_head", batch=1, heads_q=1, heads_kv=1, len_q=300, len_k=700, head_dim=64),
    Shape("decode", batch=3, heads_q=4, heads_kv=4, len_q=1, len_k=1700, head_dim=64),
    Shape("grouped_decode", batch=3, heads_q=16, heads_kv=2, len_q=1, len_k=1700, head_dim=64),
    Shape("wide_groups", batch=2, heads_q=32, heads_kv=1, len_q=1, len_k=1700, head_dim=64),
    Shape("long", batch=2, heads_q=2, heads_kv=2, len_q=60, len_k=9000, head_dim=8),
    Shape("one_long_decode", batch=1, heads_q=1, heads_kv=1, len_q=1, len_k=6000, head_dim=32),
]
SOME = ("plain", "causal", "kv_lengths", "block_mask", "bias_masking", "alibi", "sinks", "documents")

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, **arguments, return_lse=True)


def call(shape, variant, dtype="float32"):
    rng = np.random.default_rng(0)
    return *spread_inputs(shape, dtype, rng), combine((variant,), shape, rng)


@pytest.mark.parametrize("variant", SOME)
@every_shape
def test_threads(shape, variant, implementation):
    q, k, v, arguments = call(shape, variant)
    one = attention(q, k, v, **arguments, num_threads=1)
    for num_threads in (2, 3, 8):
        assert_same_bits(attention(q, k, v, **arguments, num_threads=num_threads), one)
    with settings.forced(num_threads=5):
        assert_same_bits(attention(q, k, v, **arguments), one)


@pytest.mark.parametrize(("variant", "dtype"), [("causal", "float32"), ("window", "float32"),
                                                *(("mask", dtype) for dtype in DTYPES)])  # fmt: skip
@every_shape
def test_threads_with_garbage_behind_masks(shape, variant, dtype, implementation):
    """Wherever work is cut, tiles in which some rows attend a NaN give the same bits."""
    q, k, v, arguments = call(shape, variant, dtype)
    v[:, :, 5::97, ::3] = np.nan
    v[:, :, 50::101, 1::3] = np.inf
    mask = np.arange(shape.len_k) % 7 > 0
    arguments["mask"] = arguments.get("mask", True) & (mask | (np.arange(shape.len_q) % 5 > 0)[:, None])
    one = attention(q, k, v, **arguments, num_threads=1)
    for num_threads in (2, 64):
        assert_same_bits(attention(q, k, v, **arguments, num_threads=num_threads), one)
    for b in range(shape.batch):
        row = {name: x[b : b + 1] if x.ndim == 4 else x for name, x in arguments.items() if name == "mask"}
        alone = attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], **{**arguments, **row})
        assert_same_bits(alone, (one[0][b : b + 1], one[1][b : b + 1]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.batch > 1], ids=lambda s: s.name)
def test_a_batch_of_one_is_a_row_of_the_batch(shape, variant, implementation):
    q, k, v, arguments = call(shape, variant)
    out, lse = attention(q, k, v, **arguments)
    for b in range(shape.batch):
        row = slice(b, b + 1)
        alone = {
            name: x[row] if name == "kv_lengths" or (name in ("mask", "bias") and x.ndim == 4) else x
            for name, x in arguments.items()
        }
        assert_same_bits(attention(q[row], k[row], v[row], **alone), (out[row], lse[row]))


@pytest.mark.parametrize("dtype", DTYPES)
@every_shape
def test_neighbours_do_not_matter(shape, dtype, implementation):
    """A sequence gives the same bits whatever the other sequences hold, and however long they are."""
    shape = shape._replace(batch=3)
    q, k, v, _ = call(shape, "plain", dtype)
    lengths = np.array([shape.len_k // 3, shape.len_k, 0])
    out, lse = attention(q, k, v, kv_lengths=lengths)
    q[1:], k[1:], v[1:] = 5, -3, np.nan
    for others in ([1, 7], [shape.len_k, shape.len_k], [0, 0]):
        changed = attention(q, k, v, kv_lengths=[lengths[0], *others])
        assert_same_bits((changed[0][0], changed[1][0]), (out[0], lse[0]))


@every_shape
@each_isa
def test_padding_does_not_matter(isa, shape):
    """Keys beyond kv_lengths do not matter: blocks and splits begin at the same places without them."""
    q, k, v, _ = call(shape, "plain")
    with forced(isa):
        for length in (1, 64, 333, 1000, 1699, 4096, 5000):
            padded = attention(q, k, v, kv_lengths=min(length, shape.len_k))
            assert_same_bits(padded, attention(q, k[:, :, :length], v[:, :, :length]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads_q", "heads_kv", "head_dim"), [(4, 4, 16), (4, 2, 40), (8, 1, 64)])
@each_isa
def test_a_padded_sequence_that_attends_itself(isa, heads_q, heads_kv, head_dim, dtype):
    """Padding adds queries, too. A short sequence's queries have the bits that they have alone."""
    rng = np.random.default_rng(0)
    with forced(isa):
        for length, own in [(2, 1), (5, 4), (8, 1), (8, 7), (9, 8), (12, 4), (40, 2), (40, 33), (70, 8)]:
            shape = Shape("padded", batch=2, heads_q=heads_q, heads_kv=heads_kv, len_q=length, len_k=length,
                          head_dim=head_dim)  # fmt: skip
            q, k, v = spread_inputs(shape, dtype, rng)
            mine = [x[:1, :, :own] for x in (q, k, v)]
            for options in ({}, {"causal": True, "q_offset": 0}, {"window": (2, 3), "q_offset": 0}):
                out, lse = attention(q, k, v, kv_lengths=[own, length], **options)
                assert_same_bits(attention(*mine, **options), (out[:1, :, :own], lse[:1, :, :own]))


@each_isa
def test_a_window_at_the_end_of_countless_keys(isa, python):
    """Keys that no row attends are never read, and cost nothing. All these keys are one row in memory."""
    code = """
import numpy as np, fastattn
k = np.ones((1, 2, 1, 16), np.float32)
q, endless = k[:, :, :1], np.broadcast_to(k, (1, 2, 1 << 50, 16))
for num_threads in (1, 3):
    out = fastattn.attention(q, endless, endless, window=(700, 0), num_threads=num_threads)
    assert (out == 1).all(), out
"""
    child = python(code, FASTATTN_ISA=isa, FASTATTN_BACKEND="compiled")
    assert child.returncode == 0, child.stderr


def test_lse_asked_for_or_not(implementation):
    for shape in SHAPES:
        q, k, v, _ = call(shape, "plain")
        assert_same_bits([fastattn.attention(q, k, v)], [attention(q, k, v)[0]])
