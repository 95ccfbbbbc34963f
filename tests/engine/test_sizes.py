"""Sizes of tasks, src/tuning.inc: no bit of a result depends on any of them."""

import numpy as np
import pytest
from implementations import COMPILED, each_isa, forced
from sizes import forced_sizes

import fastattn
from fastattn import layers, ops
from fastattn._engine import settings

BFLOAT16 = pytest.importorskip("ml_dtypes").bfloat16
SIZES = settings.core.SIZES if COMPILED else {}
EXTREMES = [(name, value) for name, (*_, least, most) in SIZES.items() for value in (least, most)]

needs_kernels = pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def qkv(heads_q, heads_kv, len_q, len_k, head_dim, dtype=np.float32):
    kv = (heads_kv, len_k)
    return [draw(1, *shape, head_dim).astype(dtype) for shape in ((heads_q, len_q), kv, kv)]


def rows_apart(*arrays):
    """Copy the arrays with heads after the length in memory, so that rows lie apart."""
    return [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]


def attention_calls():
    long, bf16 = qkv(4, 2, 300, 700, 40), qkv(2, 2, 200, 400, 64, BFLOAT16)
    rounded = [np.clip(np.rint(x * 40), -127, 127).astype(np.int8) for x in long[1:]]
    scales = dict.fromkeys(("k_scale", "v_scale"), np.full((1, 2, 700), 0.025, np.float32))
    yield fastattn.attention(*long, return_lse=True)
    yield fastattn.attention(*long, causal=True, stats=("key_sums", "entropy"))
    yield fastattn.attention(*rows_apart(*long), causal=True)
    yield fastattn.attention(*rows_apart(*(x.astype(np.float16) for x in long)), window=(90, 20))
    yield fastattn.attention(long[0], *rounded, **scales)
    yield fastattn.attention(*rows_apart(*bf16))
    yield fastattn.attention(*qkv(2, 1, 150, 260, 24, np.float64), causal=True)
    yield fastattn.attention(*qkv(8, 2, 1, 3000, 64))
    yield fastattn.attention(*qkv(2, 2, 3, 1700, 64, BFLOAT16), causal=True)
    yield fastattn.functional.sparsemax_attention(*qkv(2, 2, 70, 90, 16))
    yield fastattn.functional.linear_attention(
        *qkv(2, 2, 130, 130, 16), rule="decay", log_decay=[-0.03, -0.02]
    )


def linear_calls():
    """Products of few rows and of many, with features that fill several blocks and that do not."""
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        for m, k, n in ((1, 1100, 70), (2, 1100, 70), (40, 1100, 70), (150, 2100, 330)):
            weight = ops.pack(draw(n, k), dtype=dtype)
            yield ops.linear(draw(m, k), weight, bias=draw(n), activation="gelu")
            if dtype in ("int8", "int4"):
                yield ops.linear(draw(m, k), weight, activations="int8")
    x = draw(300, 4096)  # rows that meet in one set of a cache, so that they are copied
    yield ops.linear(x, ops.pack(draw(40, 4096)))
    yield ops.linear(x.astype(np.float64), ops.pack(draw(40, 4096, dtype=np.float64)))
    yield ops.linear(draw(90, 64), ops.pack(draw(100, 64), gate=draw(100, 64)), activation="silu")


def row_calls():
    yield ops.layer_norm(draw(500, 300), draw(300), draw(300))
    yield ops.softmax(draw(70, 1000))
    yield ops.pack(draw(500, 300), dtype="int4").panels
    yield layers.TransformerEncoderLayer(64, 4, 128, rng=np.random.default_rng(0))(draw(2, 60, 64))


def arrays(result):
    if isinstance(result, np.ndarray):
        yield result
    else:
        for part in result.values() if isinstance(result, dict) else result:
            yield from arrays(part)


def bits(calls):
    return [np.ascontiguousarray(x).tobytes() for result in calls() for x in arrays(result)]


@pytest.fixture(scope="module")
def expected():
    """{(instruction set, calls): bits}, made when first needed."""
    return {}


@pytest.mark.parametrize("calls", [attention_calls, linear_calls, row_calls])
@pytest.mark.parametrize("size", EXTREMES, ids=lambda size: f"{size[0]}={size[1]}")
@each_isa
def test_no_bit_depends_on_a_size(isa, size, calls, expected):
    name, value = size
    with forced(isa, num_threads=3):
        if (isa, calls) not in expected:
            expected[isa, calls] = bits(calls)
        with forced_sizes(**{name: value}):
            assert bits(calls) == expected[isa, calls]


@needs_kernels
def test_sizes_cut_calls():
    """A task has as many of 10 blocks of rows as the size allows."""
    q, k, v = qkv(1, 1, 10 * 512, 64, 16)
    with forced(COMPILED[-1], num_threads=1), forced_sizes(attention_tasks=1):
        for tiles in (1, 4):
            with forced_sizes(attention_tiles=tiles):
                assert fastattn.explain(q, k, v)["blocks_q_per_task"] == tiles


@needs_kernels
def test_set_sizes_checks():
    before = settings.core.get_sizes()
    with pytest.raises(ValueError, match="linear_tasks is 65; expected 1 to 64"):
        settings.core.set_sizes({"attention_tasks": 3, "linear_tasks": 65})
    assert settings.core.get_sizes() == before


@needs_kernels
def test_defaults_follow_from_the_second_level_cache():
    """They lie within their ranges, whatever its size is; 0 is one that the system does not say."""
    level2 = settings.core.LEVEL2_CACHE or 1 << 20
    assert SIZES["head_copy_bytes"][0] == level2 // 2 or level2 > 1 << 27
    assert SIZES["far_bytes"][0] == level2
    assert SIZES["linear_copy_bytes"][0] == 4 * level2 or not 1 << 14 <= level2 <= 1 << 26
    assert all(least <= default <= most for default, least, most in SIZES.values())
    assert all(least < most for *_, least, most in SIZES.values())
    expected = {"attention_tasks": 24, "attention_tiles": 8, "linear_rows": 128, "linear_panels": 16}
    expected |= {"linear_tasks": 6, "narrow_rows": 64, "parallel_flops": 10**6, "parallel_few_flops": 10**5}
    assert {name: SIZES[name][0] for name in expected} == expected
