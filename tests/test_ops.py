"""The layers' operations against float64, on every instruction set and on the fallback."""

import math

import numpy as np
import precisions
import pytest
from activations import ACTIVATIONS
from implementations import each_isa, forced
from precisions import BF16, EPS, each_dtype, lane

from fastattn import grad, ops
from fastattn._args.types import ACTIVATIONS as NAMES
from fastattn._args.weight_types import INTEGERS, WEIGHT_DTYPES

# Types of weights, those of integers also with rows rounded to int8.
WEIGHTS = [*((dtype, None) for dtype in WEIGHT_DTYPES), *((dtype, "int8") for dtype in INTEGERS)]
each_weight = pytest.mark.parametrize(("weight_dtype", "activations"), WEIGHTS)
# Sizes around the kernels' rows (6, 12, 96), panels (16, 32) and depth (256).
SHAPES = [
    (1, 1, 1),
    (5, 33, 31),
    (6, 64, 32),
    (7, 65, 17),
    (12, 255, 65),
    (13, 257, 96),
    (97, 513, 40),
    (2, 700, 300),
]


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def close(actual, expected, bound, dtype):
    """`actual` is off by at most `bound`, absolute, and one rounding to its dtype, and is not all zero."""
    precisions.close(actual, expected, bound, dtype)
    assert expected.size == 0 or np.count_nonzero(actual) > actual.size // 3


def dot_bound(x, weight, dtype):
    """Rounding of a sum of k products: that of a random walk, eight standard deviations out."""
    terms = np.sqrt(np.square(x.astype(np.float64)) @ np.square(weight.astype(np.float64)).T)
    return 8 * EPS[lane(dtype)] * math.sqrt(x.shape[-1]) * (terms + 1)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(implementation, shape, dtype):
    rows, k, n = shape
    rng = np.random.default_rng(rows)
    weight_dtype = np.float64 if dtype == np.float64 else np.float32
    x, weight = normal(rng, rows, k, dtype=dtype), normal(rng, n, k, dtype=weight_dtype)
    bias = normal(rng, n, dtype=weight_dtype)
    actual = ops.linear(x, ops.pack(weight), bias)
    close(actual, x.astype(float) @ weight.astype(float).T + bias, dot_bound(x, weight, dtype), dtype)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_with_weights_in_bfloat16(implementation, shape, dtype):
    rows, k, n = shape
    rng = np.random.default_rng(rows)
    x, packed = normal(rng, rows, k, dtype=dtype), ops.pack(normal(rng, n, k), dtype="bfloat16")
    weight = packed.unpack()
    bound = dot_bound(x, weight, dtype)
    # x rounds to bfloat16 where there is a dot product of them
    bound += 4 * 2**-8 * np.sqrt(np.square(x.astype(float)) @ np.square(weight.astype(float)).T)
    close(ops.linear(x, packed), x.astype(float) @ weight.astype(float).T, bound, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, *NAMES])
def test_linear_epilogue(implementation, activation, gated, dtype):
    rng = np.random.default_rng(1)
    x, weight, gate = (normal(rng, n, 70, dtype=dtype) for n in (14, 45, 45))
    bias, residual = normal(rng, 1 + gated, 45, dtype=dtype), normal(rng, 14, 45, dtype=dtype)
    packed = ops.pack(weight, gate=gate if gated else None)
    first = x.astype(float) @ (gate if gated else weight).astype(float).T + bias[0]
    expected = ACTIVATIONS[activation].formula(first)
    bound = 2 * dot_bound(x, gate if gated else weight, dtype)
    if gated:
        second = x.astype(float) @ weight.astype(float).T + bias[1]
        bound = bound * (np.abs(second) + 1) + dot_bound(x, weight, dtype) * (np.abs(expected) + 1)
        expected = expected * second
    expected = expected + residual
    options = {"activation": activation, "residual": residual}
    actual = ops.linear(x, packed, bias if gated else bias[0], **options)
    close(actual, expected, bound, dtype)
    assert ops.linear(x, packed, bias if gated else bias[0], out=residual, **options) is residual
    np.testing.assert_array_equal(residual, actual)


@each_dtype
@pytest.mark.parametrize("activation", NAMES)
def test_activate(implementation, activation, dtype):
    x = np.linspace(-9, 9, 1003).astype(dtype).reshape(17, 59)
    with np.errstate(under="ignore"):
        expected = ACTIVATIONS[activation].formula(x.astype(float))
    unit = EPS[lane(dtype)]
    bound = 2 * unit * (np.abs(x.astype(float)) + 1)
    close(ops.activate(x, activation), expected, bound, dtype)
    up = x[::-1]
    close(ops.activate(x, activation, up=up), expected * up.astype(float), 10 * bound, dtype)


@each_isa
def test_results_of_sigmoid_keep_their_digits(isa):
    """In 1 + tanh(y / 2), negative y would lose them."""
    x = np.linspace(-5, -1, 101).astype(np.float32)
    wide = x.astype(float)
    inner = {"silu": wide, "quick_gelu": 1.702 * wide}
    inner["gelu_tanh"] = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    with forced(isa):
        for name, y in inner.items():
            np.testing.assert_allclose(ops.activate(x, name), wide / (1 + np.exp(-y)), rtol=5e-6)


def test_activations_of_what_is_not_finite(implementation):
    x = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0]], np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(ops.activate(x, "relu"), [[np.nan, np.inf, 0, 0, 0]])
        np.testing.assert_array_equal(ops.activate(x, "sigmoid"), [[np.nan, 1, 0, 0.5, 0.5]])
        for name in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
            np.testing.assert_array_equal(ops.activate(x, name)[0, [0, 1, 3, 4]], [np.nan, np.inf, 0, 0])


@each_dtype
@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 65, 300, 1000])
def test_norms(implementation, n, dtype):
    rng = np.random.default_rng(n)
    x, residual = normal(rng, 9, n, dtype=dtype) + dtype.type(2), normal(rng, 9, n, dtype=dtype)
    weight, bias = normal(rng, n, dtype=np.float64), normal(rng, n, dtype=np.float64)
    if dtype != np.float64:
        weight, bias = weight.astype(np.float32), bias.astype(np.float32)
    z = x.astype(float) + residual.astype(float)
    unit = EPS[lane(dtype)]
    centered = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
    # z rounds once before its mean is taken away, relative to the standard deviation that divides it
    spread = np.abs(z).max(-1, keepdims=True) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
    bound = 8 * unit * (spread + np.abs(centered)) * np.abs(weight)
    out, total = ops.layer_norm(x, weight, bias, residual=residual, return_sum=True)
    if n > 1:
        close(out, centered * weight + bias, bound + 2 * unit * np.abs(bias), dtype)
    close(total, z, 0 * z, dtype)
    scaled = z / np.sqrt(np.square(z).mean(-1, keepdims=True) + 1e-6) * weight
    close(ops.rms_norm(x, weight, residual=residual), scaled, 8 * unit * np.abs(scaled), dtype)


@each_dtype
@pytest.mark.parametrize("n", [1, 3, 32, 100, 1000, 5003, 20_011])
@pytest.mark.parametrize("size", [7, 1e4])
def test_a_norm_of_equal_numbers_is_the_bias(implementation, n, size, dtype):
    # The mean of equal numbers is rounded, and 1 / sqrt(eps) makes hundreds of what is left of it.
    rng = np.random.default_rng(n)
    x = np.repeat(normal(rng, 200, 1, dtype=dtype) * dtype.type(size), n, axis=1)
    x = x[np.isfinite(x[:, 0])]
    bias = normal(rng, n, dtype=lane(dtype))
    out = ops.layer_norm(x, None, bias, eps=1e-12)
    np.testing.assert_array_equal(out, np.broadcast_to(bias.astype(dtype), x.shape))
    (dweight,) = grad.layer_norm(out, x, bias, eps=1e-12, need=["dweight"])
    np.testing.assert_array_equal(dweight, 0)


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("n", [1, 15, 64, 300])
def test_gated_norms(implementation, n, first, activation, dtype):
    rng = np.random.default_rng(n)
    x, gate = normal(rng, 2, 5, n, dtype=dtype), normal(rng, 2, 5, n, dtype=dtype)
    weight = normal(rng, n, dtype=np.float64).astype(np.float64 if dtype == np.float64 else np.float32)
    factor = 1 / (1 + np.exp(-gate.astype(float)))
    factor *= gate.astype(float) if activation == "silu" else 1
    z = x.astype(float) * (factor if first else 1)
    expected = z / np.sqrt(np.square(z).mean(-1, keepdims=True) + 1e-3) * weight * (1 if first else factor)
    unit = EPS[lane(dtype)]
    options = {"gate": gate, "activation": activation, "gate_first": first, "eps": 1e-3}
    out = ops.rms_norm(x, weight, **options)
    close(out, expected, 30 * unit * (1 + np.abs(gate.astype(float))) * np.abs(expected), dtype)
    np.testing.assert_array_equal(
        ops.rms_norm(x[:, 3:], weight, **options | {"gate": gate[:, 3:]}), out[:, 3:]
    )


@each_dtype
def test_softmax(implementation, dtype):
    x = (3 * np.random.default_rng(0).standard_normal((3, 11, 37))).astype(dtype)
    x[0, 0] = -np.inf
    x[0, 1, 5:] = -np.inf
    x[0, 2, 3] = np.nan
    z = x.astype(float)
    with np.errstate(invalid="ignore"):
        expected = np.exp(z - z.max(-1, keepdims=True))
        expected /= expected.sum(-1, keepdims=True)
    expected[0, 0] = 0
    actual = ops.softmax(x)
    assert np.isnan(actual[0, 2].astype(float)).all()
    expected[0, 2] = actual[0, 2] = 1
    unit = EPS[lane(dtype)]
    close(actual, expected, 16 * unit * expected, dtype)


@each_weight
def test_any_strides_and_leading_dimensions(implementation, weight_dtype, activations):
    rng = np.random.default_rng(2)
    dtype = np.float64 if weight_dtype == "float64" else np.float32
    whole = normal(rng, 4, 6, 82, dtype=dtype)
    packed = ops.pack(normal(rng, 24, 41), dtype=weight_dtype)
    for x in (whole[:, :, :41], whole[::-1, 1::2, 41:], whole[..., ::2], whole[0, 0, :41], whole[:0, :, :41]):
        expected = ops.linear(np.ascontiguousarray(x), packed, activations=activations)
        np.testing.assert_array_equal(ops.linear(x, packed, activations=activations), expected)
        assert expected.shape == (*x.shape[:-1], 24)
    wide, x = np.zeros((4, 6, 64), dtype), whole[:, :, :41]
    result = ops.linear(x, packed, activations=activations, out=wide[..., 8:32])
    np.testing.assert_array_equal(result, ops.linear(x, packed, activations=activations))
    assert np.shares_memory(result, wide)
    assert not wide[..., :8].any()
    assert not wide[..., 32:].any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_rows_of_many_blocks(dtype, implementation):
    """Long rows are computed a block at a time, so that Ctrl-C need not wait for their end."""
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 2, 300_011)).astype(dtype)
    weight, bias = rng.standard_normal((2, 300_011)).astype("float64" if dtype == "float64" else "float32")
    exact, total = x.astype(np.float64), (x + residual).astype(np.float64)
    spread = np.exp(exact - exact.max(axis=1, keepdims=True))
    centred = total - total.mean(axis=1, keepdims=True)
    tolerance = {"float32": 1e-5, "float64": 1e-12, "float16": 2e-2}[dtype]
    got, summed = ops.layer_norm(x, weight, bias, residual=residual, return_sum=True)
    want = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(summed.astype(np.float64), total, atol=tolerance)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    softmax = ops.softmax(x).astype(np.float64) * x.shape[1]
    want = spread / spread.sum(axis=1, keepdims=True) * x.shape[1]
    # One accumulator of a vector sums a row: of 4 lanes of float32, 75 thousand numbers in turn.
    np.testing.assert_allclose(softmax, want, rtol=5 * tolerance, atol=tolerance if dtype == "float16" else 0)
    want = exact / (1 + np.exp(-exact)) * residual
    np.testing.assert_allclose(ops.activate(x, "silu", up=residual).astype(np.float64), want, atol=tolerance)


def unaligned(x):
    """Copy x to memory that begins one byte off alignment."""
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    memory[...] = x
    return memory


def apart(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


def foreign(x):
    return x.astype(x.dtype.newbyteorder())


@pytest.mark.parametrize("how", [unaligned, apart, foreign])
def test_parameters_in_any_memory(implementation, how):
    rng = np.random.default_rng(2)
    x, weight, bias = normal(rng, 3, 40), normal(rng, 40), normal(rng, 40)
    np.testing.assert_array_equal(ops.layer_norm(x, how(weight), how(bias)), ops.layer_norm(x, weight, bias))
    np.testing.assert_array_equal(ops.rms_norm(x, how(weight)), ops.rms_norm(x, weight))
    packed, gated = ops.pack(normal(rng, 40, 40)), ops.pack(normal(rng, 40, 40), gate=normal(rng, 40, 40))
    for map_, its_bias in ((packed, bias), (gated, np.stack([bias, weight]))):
        np.testing.assert_array_equal(ops.linear(x, map_, how(its_bias)), ops.linear(x, map_, its_bias))


@each_weight
def test_empty(implementation, weight_dtype, activations):
    ones = np.ones((3, 5), np.float64 if weight_dtype == "float64" else np.float32)

    def product(x, weight, *bias):
        return ops.linear(x, ops.pack(weight, dtype=weight_dtype), *bias, activations=activations)

    np.testing.assert_array_equal(product(ones[:2, :0], ones[:, :0], [1.0, 2, 3]), [[1, 2, 3]] * 2)
    assert product(ones, ones[:0]).shape == (3, 0)
    assert product(ones[:0], ones).shape == (0, 3)
    assert product(ones[:0, :0], ones[:0, :0]).shape == (0, 0)
    assert ops.layer_norm(ones[:, :0]).shape == (3, 0)
    assert ops.softmax(ones[:0]).shape == (0, 5)


@pytest.mark.parametrize("n", [65, 66, 68, 1001])  # rows that end between vectors and cache lines
def test_threads_keep_their_rows_apart(implementation, n):
    """There are rows for several threads, whose scratch has to be rounded up at these widths."""
    rng = np.random.default_rng(n)
    x, up = normal(rng, 2**20 // n, n), normal(rng, 2**20 // n, n)
    whole = ops.activate(x, "silu", up=up, num_threads=1)
    for _ in range(5):
        np.testing.assert_array_equal(ops.activate(x, "silu", up=up, num_threads=2), whole)
    bound = 1e-6 * (1 + np.abs(whole))
    with forced("numpy"):
        assert (np.abs(whole - ops.activate(x, "silu", up=up)) <= bound).all()


@each_weight
def test_bits_depend_on_the_row_alone(implementation, weight_dtype, activations):
    rng = np.random.default_rng(4)
    dtype = np.float64 if weight_dtype == "float64" else np.float32
    k = 4203 if weight_dtype in INTEGERS else 2105  # several blocks and runs
    x, packed = normal(rng, 150, k, dtype=dtype), ops.pack(normal(rng, 70, k), dtype=weight_dtype)
    options = {"activations": activations}
    whole = ops.linear(x, packed, num_threads=1, **options)
    for threads in (3, 8, 64):  # which cut the rows, where panels are few
        np.testing.assert_array_equal(ops.linear(x, packed, num_threads=threads, **options), whole)
    if implementation != "numpy" or activations:  # whose BLAS chooses by shape; integers are exact
        for size in (1, 2, 3, 5, 13, 64, 80):  # 1 and 2 go through several runs; up to 64, registers widen
            rows = slice(7, 7 + size)
            np.testing.assert_array_equal(ops.linear(x[rows], packed, **options), whole[rows])
        x[:7], x[8:] = 1e3 * x[:7], np.nan
        np.testing.assert_array_equal(ops.linear(x, packed, **options)[7], whole[7])


def test_bits_of_a_norm_depend_on_the_row_alone(implementation):
    x = normal(np.random.default_rng(4), 150, 2105)
    norm = ops.layer_norm(x, num_threads=1)
    np.testing.assert_array_equal(ops.layer_norm(x, num_threads=3), norm)
    np.testing.assert_array_equal(ops.layer_norm(x[5]), norm[5])


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64), BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (31, 7), (64, 33), (0, 4), (3, 0)], ids=str)
def test_packing_loses_nothing_but_what_rounds(shape, dtype):
    rng = np.random.default_rng(5)
    weight, gate = normal(rng, *shape), normal(rng, *shape)
    packed = ops.pack(weight, gate=gate, dtype=dtype)
    np.testing.assert_array_equal(packed.unpack(), np.stack([gate, weight]).astype(dtype).astype(np.float64))
    assert not packed.panels.flags.writeable
    assert packed.nbytes >= packed.panels.nbytes


def test_embedding():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(ops.embedding([[3, 0], [1, 1]], table), table[[[3, 0], [1, 1]]])
    out = np.empty((2, 3), np.float32)
    assert ops.embedding([2, 2], table, out=out) is out
    np.testing.assert_array_equal(out, table[[2, 2]])
    foreign = ops.embedding([1, 3], table.astype(">f4"))
    assert foreign.dtype.isnative
    np.testing.assert_array_equal(foreign, table[[1, 3]])
    assert ops.embedding([], table).shape == (0, 3)
    assert ops.embedding(np.zeros((2, 0), complex), table).shape == (2, 0, 3)  # nothing to warn of
    assert ops.embedding([[], []], table).shape == (2, 0, 3)


@pytest.mark.parametrize("largest", [1, 63, 64, 100, 185, 190, 191, 300, 1000])
def test_int8_of_denormal_rows(largest):
    """Where the scale is itself denormal, what does not fit is cut off, and no sign changes."""
    unit = float(np.finfo(np.float32).smallest_subnormal)
    weight = unit * np.array([[largest, -largest, largest // 2, 0]], np.float32)
    back = ops.pack(weight, dtype="int8").unpack()
    assert (back * np.sign(weight) >= 0).all()
    assert (abs(back) <= 1.5 * abs(weight)).all()


X, W = np.ones((2, 4), np.float32), ops.pack(np.ones((3, 4), np.float32))
VALUES = {
    r"x has shape \(2, 3\); expected \(..., 4\)": lambda: ops.linear(X[:, :3], W),
    r"x has shape \(\); expected \(..., features\)": lambda: ops.linear(np.float32(1), W),
    r"bias has shape \(4,\); expected \(3,\)": lambda: ops.linear(X, W, np.ones(4, np.float32)),
    "activation is 'swish'; expected one of relu": lambda: ops.linear(X, W, activation="swish"),
    r"residual has shape \(2, 4\); expected the result's": lambda: ops.linear(X, W, residual=X),
    r"out has shape \(2, 4\); expected": lambda: ops.linear(X, W, out=np.ones((2, 4), np.float32)),
    "num_threads is 0; expected 1 to": lambda: ops.linear(X, W, num_threads=0),
    "backend is 'cuda'; expected one of": lambda: ops.linear(X, W, backend="cuda"),
    r"weight has shape \(3,\); expected \(out_features, in": lambda: ops.pack(np.ones(3)),
    r"gate has shape \(1, 4\); expected weight's, \(2, 4\)": lambda: ops.pack(X, gate=X[:1]),
    "dtype is 'int3'; expected one of float32": lambda: ops.pack(X, dtype="int3"),
    r"weight has shape \(3,\); expected \(4,\)": lambda: ops.layer_norm(X, np.ones(3)),
    "eps is -1; expected 0 or more": lambda: ops.layer_norm(X, eps=-1),
    "gate has shape": lambda: ops.rms_norm(X, gate=X[:1]),
    "residual is given; expected none with a gate": lambda: ops.rms_norm(X, gate=X, residual=X),
    "return_sum is given; expected none": lambda: ops.rms_norm(X, gate=X, return_sum=True),
    "activation is None; expected one of relu": lambda: ops.rms_norm(X, gate=X, activation=None),
    "gate_first is True, but gate is None": lambda: ops.rms_norm(X, gate_first=True),
    "activation is 'tanh'; expected one of relu": lambda: ops.activate(X, "tanh"),
    "out shares memory with x": lambda: ops.softmax(X, out=X),
    "ids has 4; expected 0 to 1": lambda: ops.embedding([4], X),
    "ids has -1; expected 0 to 1": lambda: ops.embedding([-1], X),
}
TYPES = {
    r"weight is of type ndarray; expected what pack\(\)": lambda: ops.linear(X, np.ones((3, 4))),
    "x has dtype int64; expected float32": lambda: ops.linear(X.astype(int), W),
    "x has dtype float64; expected float32, float16": lambda: ops.linear(X.astype(float), W),
    "gate has dtype float64; expected weight's, float32": lambda: ops.pack(X, gate=X.astype(float)),
    "eps is None; expected a real number": lambda: ops.layer_norm(X, eps=None),
    "eps is False; expected a real number": lambda: ops.layer_norm(X, eps=False),
    r"eps is \[\]; expected a real number": lambda: ops.rms_norm(X, eps=[]),
    "eps is ''; expected a real number": lambda: ops.rms_norm(X, eps=""),
    "residual has dtype float64; expected x's": lambda: ops.rms_norm(X, residual=X.astype(float)),
    "ids has dtype float64; expected integers": lambda: ops.embedding([0.5], X),
}


@pytest.mark.parametrize("message", VALUES | TYPES)
def test_errors(message):
    with pytest.raises(ValueError if message in VALUES else TypeError, match=message):
        (VALUES | TYPES)[message]()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "int8", "uint4"])
@pytest.mark.parametrize("counts", [(3, 0, 1, 9, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0, 40)], ids=str)
def test_rows_in_groups_are_those_of_each_weight(counts, weight_dtype, gated, implementation):
    rng = np.random.default_rng(0)
    x = normal(rng, sum(counts), 70)
    gates = [normal(rng, 33, 70) for _ in counts] if gated else [None] * len(counts)
    weights = [ops.pack(normal(rng, 33, 70), gate=gate, dtype=weight_dtype) for gate in gates]
    got = ops.grouped_linear(x, weights, counts, activation="silu")
    parts = np.split(x, np.cumsum(counts)[:-1])
    expected = [ops.linear(part, w, activation="silu") for part, w in zip(parts, weights, strict=True)]
    np.testing.assert_array_equal(got, np.concatenate(expected))
    out = np.empty_like(got)
    assert ops.grouped_linear(x, tuple(weights), np.array(counts), activation="silu", out=out) is out
    np.testing.assert_array_equal(out, got)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, [], []), ValueError, "weights is empty; expected at least one"),
        ((X, W, [2]), TypeError, "weights is .*; expected a list of what pack"),
        ((X, [W, X], [2, 0]), TypeError, r"weights\[1\] is of type ndarray; expected what pack"),
        (
            (X, [W, ops.pack(X, dtype="int8")], [2, 0]),
            ValueError,
            r"weights\[1\] has \(in_features, out_features, gated, dtype\) \(4, 2, False, 'int8'\); expected",
        ),
        ((X, [W, W], [2]), ValueError, r"counts has shape \(1,\); expected \(2,\), the rows of each weight"),
        ((X, [W, W], [1, -1]), ValueError, "counts has -1; expected 0 or more rows"),
        ((X, [W, W], [0.5, 1]), TypeError, "counts has dtype float64; expected integers"),
        ((X, [W, W], [1, 2]), ValueError, r"x has shape \(2, 4\); expected \(3, 4\): counts' rows"),
        ((X[None], [W, W], [1, 1]), ValueError, r"x has shape \(1, 2, 4\); expected \(2, 4\)"),
        ((X.astype(float), [W], [2]), TypeError, "x has dtype float64; expected float32"),
    ],
)
def test_wrong_groups(arguments, error, message):
    with pytest.raises(error, match=rf"^grouped_linear\(\): {message}"):
        ops.grouped_linear(*arguments)
