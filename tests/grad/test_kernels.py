"""Gradients of operations against float64, of every type, at the edges of the kernels' sizes."""

import math

import numpy as np
import pytest
from activations import ACTIVATIONS
from implementations import has_pairs
from precisions import BF16, EPS, close, each_dtype, lane

from fastattn import grad, ops
from fastattn._args.types import ACTIVATIONS as NAMES

RNG = np.random.default_rng(1)


def normal(*shape, dtype=np.float64):
    return RNG.standard_normal(shape).astype(dtype)


def wide(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def sum_bound(a, b, unit):
    """Rounding of the products and sums a @ b: eight standard deviations of a random walk."""
    return 8 * unit * math.sqrt(a.shape[1]) * (np.sqrt(np.square(a) @ np.square(b)) + 1e-30)


# Around strips (6, 12), panels (16, 32), pieces of rows (256, 512) and rows of which one task is made.
SHAPES = [(1, 1, 1), (2, 31, 13), (255, 33, 12), (257, 64, 25), (513, 17, 5), (640, 385, 100)]


@each_dtype
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(implementation, shape, weight_dtype, dtype):
    m, k, n = shape
    if dtype == np.float64:
        weight_dtype = "float64"
    x, dout = normal(m, k, dtype=dtype), normal(m, n, dtype=dtype)
    weight = ops.pack(normal(n, k).astype(lane(dtype)), dtype=weight_dtype)
    dx, dweight, dbias = grad.linear(dout, x, weight)
    x, dout, w = wide(x, dout, weight.unpack())
    unit = EPS[lane(dtype)]
    dx_bound, dweight_bound = sum_bound(dout, w, unit), sum_bound(dout.T, x, unit)
    if weight_dtype == "bfloat16" and dtype != BF16 and has_pairs(implementation):  # of x and dout, rounded
        dweight_bound += 2.0**-7 * np.abs(dout).T @ np.abs(x)
        dx_bound += (implementation == "amx") * 2.0**-8 * np.abs(dout) @ np.abs(w)
    close(dx, dout @ w, dx_bound, dtype)
    close(dweight, dout.T @ x, dweight_bound, lane(dtype))
    close(dbias, dout.sum(axis=0), sum_bound(dout.T, np.ones((m, 1)), unit)[:, 0], lane(dtype))


@pytest.mark.parametrize("weight_dtype", ["int8", "q8", "int4", "uint4", "nf4"])
@pytest.mark.parametrize("gated", [False, True])
def test_frozen_weights(implementation, weight_dtype, gated):
    x, dout = normal(5, 64, dtype=np.float32), normal(5, 40, dtype=np.float32)
    gate = normal(40, 64) if gated else None
    weight = ops.pack(normal(40, 64), gate=gate, dtype=weight_dtype)
    (dx,) = grad.linear(dout, x, weight, need=("dx",))
    exact = weight.unpack()
    plain = ops.pack(exact[1], gate=exact[0]) if gated else ops.pack(exact)
    np.testing.assert_allclose(dx, grad.linear(dout, x, plain, need=("dx",))[0], rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match=rf"need has 'dweight' for a weight in {weight_dtype}"):
        grad.linear(dout, x, weight)


@each_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_pre_is_what_the_activation_is_applied_to(implementation, activation, gated, dtype):
    weights = normal(2, 45, 20).astype(lane(dtype))
    weight = ops.pack(weights[1], gate=weights[0] if gated else None)
    x, bias = normal(2, 7, 20, dtype=dtype), normal(*((2, 45) if gated else (45,)))
    residual, dout = normal(2, 7, 45, dtype=dtype), normal(2, 7, 45, dtype=dtype)
    pre = np.empty((2, 7, 2, 45) if gated else (2, 7, 45), dtype)
    options = {"activation": activation, "residual": residual}
    out = ops.linear(x, weight, bias, pre=pre, **options)
    np.testing.assert_array_equal(out, ops.linear(x, weight, bias, **options))
    for i, w in enumerate(weights if gated else weights[1:]):
        exact = np.asarray(x, np.float64) @ w.astype(np.float64).T + (bias[i] if gated else bias)
        close(pre[..., i, :] if gated else pre, exact, 1e-4, dtype)
    saved = grad.linear(dout, x, weight, bias, activation=activation, pre=pre)
    for a, b in zip(saved, grad.linear(dout, x, weight, bias, activation=activation), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="pre has strides"):
        ops.linear(x, weight, pre=np.empty((*pre.shape[:-1], 90), dtype)[..., :45])


@each_dtype
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (17, 33), (300, 64), (2, 5, 100)], ids=str)
def test_norms(implementation, name, shape, dtype):
    x, dout, dsum, residual = (normal(*shape, dtype=dtype) for _ in range(4))
    n = shape[-1]
    weight = normal(n)
    need = ("dweight", "dx", "dbias") if name == "layer_norm" else ("dweight", "dx")
    dweight, dx, *dbias = getattr(grad, name)(
        dout, x, weight, eps=0.01, residual=residual, dsum=dsum, need=need
    )
    dout, dsum, z = wide(dout, dsum, np.asarray(x, np.float64) + np.asarray(residual, np.float64))
    y = z - z.mean(axis=-1, keepdims=True) if name == "layer_norm" else z
    factor = 1 / np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + 0.01)
    y *= factor
    g = dout * weight
    exact = g - y * (g * y).mean(axis=-1, keepdims=True)
    if name == "layer_norm":
        exact -= g.mean(axis=-1, keepdims=True)
    unit = EPS[lane(dtype)]
    error = 20 * unit * (factor * (np.abs(g) + np.abs(g * y).max()) * (1 + np.abs(y)) + np.abs(dsum))
    close(dx, exact * factor + dsum, error, dtype)
    flat = math.prod(shape[:-1])
    terms = np.abs(dout * y).reshape(flat, n).sum(axis=0), np.abs(dout).reshape(flat, n).sum(axis=0)
    close(dweight, (dout * y).reshape(flat, n).sum(axis=0), 20 * unit * (terms[0] + terms[1]), lane(dtype))
    for each in dbias:
        close(each, dout.reshape(flat, n).sum(axis=0), 20 * unit * terms[1], lane(dtype))


@each_dtype
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (300, 64), (2, 5, 100)], ids=str)
def test_gated_norms(implementation, shape, first, dtype):
    x, dout, gate = (normal(*shape, dtype=dtype) for _ in range(3))
    weight, n = normal(shape[-1]), shape[-1]
    need, options = ("dgate", "dweight", "dx"), {"gate": gate, "gate_first": first, "eps": 0.01}
    dgate, dweight, dx = grad.rms_norm(dout, x, weight, **options, need=need)
    x, dout, u = wide(x, dout, gate)
    s = u / (1 + np.exp(-u))
    z, g = (x * s, dout) if first else (x, dout * s)
    factor = 1 / np.sqrt(np.square(z).mean(axis=-1, keepdims=True) + 0.01)
    y, h = z * factor, g * weight
    dz = factor * (h - y * (h * y).mean(axis=-1, keepdims=True))
    unit, flat = EPS[lane(dtype)], (math.prod(shape[:-1]), n)
    most = np.abs(dout * weight * (1 if first else 1 + np.abs(u)))
    error = 40 * unit * factor * (most + (most * (1 + np.abs(y))).max(-1, keepdims=True)) * (1 + np.abs(y))
    close(dx, dz * (s if first else 1), error * (1 + np.abs(u) if first else 1), dtype)
    slopes = ACTIVATIONS["silu"].slope(u)
    expected = dz * x * slopes if first else dout * y * weight * slopes
    bound = error * np.abs(x) if first else 40 * unit * np.abs(dout * weight) * (1 + np.abs(y))
    close(dgate, expected, (1 + np.abs(u)) * bound, dtype)
    terms = np.abs(dout) * (1 + np.abs(y)) * (1 + np.abs(u))
    close(dweight, (g * y).reshape(flat).sum(0), 40 * unit * terms.reshape(flat).sum(0), lane(dtype))


@each_dtype
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("n", [1, 15, 33, 2100])
def test_activations(implementation, n, activation, dtype):
    x, dout, up = 4 * normal(3, n), normal(3, n, dtype=dtype), normal(3, n, dtype=dtype)
    x = x.astype(dtype)
    dx, dup = grad.activate(dout, x, activation, up=up)
    z, g, u = wide(x, dout, up)
    unit = EPS[lane(dtype)]
    close(dx, g * u * ACTIVATIONS[activation].slope(z), 8 * unit * np.abs(g * u) * (1 + np.abs(z)), dtype)
    close(dup, g * wide(ops.activate(z, activation))[0], 4 * unit * np.abs(g) * (1 + np.abs(z)), dtype)
    (alone,) = grad.activate(dout, x, activation)
    close(alone, g * ACTIVATIONS[activation].slope(z), 8 * unit * np.abs(g) * (1 + np.abs(z)), dtype)


@pytest.mark.parametrize("activation", NAMES)
def test_slopes_far_out(implementation, activation):
    """Large numbers make no NaN, and NaN stays one."""
    x = np.array([-3e38, -1e20, -100, -20, 20, 100, 1e20, 3e38, np.nan], np.float32)
    (got,) = grad.activate(np.ones_like(x), x, activation)
    np.testing.assert_allclose(got[:-1], ACTIVATIONS[activation].slope(x[:-1].astype(float)), atol=1e-6)
    assert np.isnan(got[-1])


@each_dtype
@pytest.mark.parametrize("n", [1, 16, 33, 500])
def test_softmax(implementation, n, dtype):
    x, dout = normal(4, n, dtype=dtype), normal(4, n, dtype=dtype)
    x[2] = -np.inf
    out = ops.softmax(x)
    got = grad.softmax(dout, out)
    p, g = wide(out, dout)
    exact = p * (g - (p * g).sum(axis=-1, keepdims=True))
    close(got, exact, 8 * EPS[lane(dtype)] * p * (np.abs(g) + np.abs(p * g).sum(-1, keepdims=True)), dtype)
    assert not got[2].any()


@each_dtype
def test_embedding(implementation, dtype):
    """Places that get no row, one, some, and more than a run of 256."""
    ids = np.concatenate((np.full(300, 4), RNG.integers(0, 9, 100)))
    dout, before = normal(20, 20, 33, dtype=dtype), normal(12, 33).astype(lane(dtype))
    ids = RNG.permutation(ids).reshape(20, 20)
    exact = np.zeros((12, 33))
    np.add.at(exact, ids, dout.astype(np.float64))
    close(grad.embedding(dout, ids, 12), exact, 1e-4, lane(dtype))
    table = before.copy()
    assert grad.embedding(dout, ids, 12, add_to=table) is table
    close(table, before.astype(np.float64) + exact, 1e-4, lane(dtype))
    assert not grad.embedding(dout[:0], ids[:0], 12).any()


def plain_loss(logits, targets, smoothing):
    """Losses and their gradients, by their definition."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    wanted = np.full(logits.shape, smoothing / logits.shape[-1])
    wanted[np.arange(len(targets)), targets] += 1 - smoothing
    return -(wanted * log_probs).sum(axis=-1), np.exp(log_probs) - wanted


@each_dtype
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [1, 17, 70, 1000])
def test_logits(implementation, classes, smoothing, dtype):
    x, targets = 3 * normal(9, classes), RNG.integers(0, classes, 9)
    x = x.astype(dtype)
    losses, dx = grad.cross_entropy(x, None, targets, label_smoothing=smoothing, reduction="none")
    expected, gradient = plain_loss(*wide(x), targets, smoothing)
    unit = EPS[lane(dtype)]
    close(losses, expected, 40 * unit * (1 + np.abs(expected)), lane(dtype))
    close(dx, gradient, 40 * unit, dtype)
    total, mean_dx = grad.cross_entropy(x, None, targets, label_smoothing=smoothing, dloss=2.0)
    assert total == pytest.approx(expected.mean(), rel=40 * unit, abs=unit)
    close(mean_dx, 2 * gradient / 9, 40 * unit, dtype)


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 1e300), (np.float16, 1e300), (np.float16, 1e30)])
def test_a_dloss_beyond_the_type_is_infinite(implementation, dtype, large):
    x, targets = normal(3, 7, dtype=dtype), [0, 1, 2]
    got, expected = (
        grad.cross_entropy(x, None, targets, dloss=[slope, 0, 1], reduction="none")[1]
        for slope in (large, np.inf)
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "int8"])
def test_chunks_of_rows(implementation, weight_dtype, monkeypatch):
    """Cut into chunks, with rows that are ignored, whatever these hold."""
    monkeypatch.setattr("fastattn.grad._loss._LOGITS", 50 * 4)
    x, targets = normal(3, 7, 20, dtype=np.float32), RNG.integers(0, 50, (3, 7))
    weight, bias = ops.pack(normal(50, 20), dtype=weight_dtype), normal(50).astype(np.float32)
    targets[1, 2] = targets[2] = -100
    x[1, 2] = np.nan
    loss, dx, *others = grad.cross_entropy(x, weight, targets, bias=bias)
    counted = targets.ravel() >= 0
    rows = x.reshape(21, 20)[counted].astype(np.float64)
    w = weight.unpack().astype(np.float64)
    losses, gradient = plain_loss(rows @ w.T + bias, targets.ravel()[counted], 0)
    gradient /= counted.sum()
    error = 0.02 if weight_dtype == "bfloat16" else 1e-5  # x and the gradient may round to bfloat16
    assert loss == pytest.approx(losses.mean(), rel=error)
    exact = np.zeros((21, 20))
    exact[counted] = gradient @ w
    np.testing.assert_allclose(dx.reshape(21, 20), exact, atol=error)
    assert not dx.reshape(21, 20)[~counted].any()
    if weight_dtype == "int8":
        (dbias,) = others
    else:
        dweight, dbias = others
        np.testing.assert_allclose(dweight, gradient.T @ rows, atol=error)
    np.testing.assert_allclose(dbias, gradient.sum(axis=0), atol=error)


@each_dtype
def test_rows_that_are_the_same_memory(implementation, dtype):
    weight = ops.pack(normal(5, 33), dtype="float64" if dtype == np.float64 else "float32")
    x = np.broadcast_to(normal(33).astype(dtype), (2, 33))
    got, expected = (grad.cross_entropy(each, weight, [0, 1]) for each in (x, x.copy()))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_more_logits_than_a_block_holds(implementation):
    x, targets = normal(600, 2500, dtype=np.float32), RNG.integers(0, 2500, 600)
    loss, dx = grad.cross_entropy(x, None, targets)
    losses, gradient = plain_loss(x.astype(float), targets, 0)
    assert loss == pytest.approx(losses.mean(), rel=1e-5)
    np.testing.assert_allclose(dx, gradient / 600, atol=1e-6)


def test_nothing_counts(implementation):
    weight = ops.pack(normal(5, 4))
    loss, *gradients = grad.cross_entropy(normal(3, 4), weight, [-100] * 3)
    assert loss == 0.0
    assert not any(g.any() for g in gradients)
    loss, dx, dweight = grad.cross_entropy(np.zeros((0, 4)), weight, [])
    assert (loss, dx.shape, dweight.any()) == (0.0, (0, 4), False)


@each_dtype
@pytest.mark.parametrize("n", [1, 63, 130])
def test_dropout(implementation, n, dtype):
    from fastattn._reference.philox import kept

    x = normal(2, 5, n, dtype=dtype)
    x[0, 0] = np.nan
    out = grad.dropout(x, 0.25, seed=2**63 + 5, stream=7)
    keeps = kept(0.25, 2**63 + 5, 7, np.arange(10), slice(0, n)).reshape(x.shape)
    expected = np.where(keeps, wide(x)[0] / 0.75, 0)
    assert np.isnan(out[0, 0]).sum() == keeps[0, 0].sum()
    close(out[0, 1:], expected[0, 1:], np.abs(expected[0, 1:]) * EPS[lane(dtype)], dtype)
    inplace = x.copy()
    assert grad.dropout(inplace, 0.25, seed=2**63 + 5, stream=7, out=inplace) is inplace
    assert inplace.tobytes() == out.tobytes()
    np.testing.assert_array_equal(grad.dropout(x[1], 0.0, seed=1), x[1])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 2, 5), (0,)])
def test_dropout_of_nothing(implementation, shape):
    assert grad.dropout(np.empty(shape, np.float32), 0.5, seed=1).shape == shape


def test_dropout_beyond_the_type_is_infinite(implementation):
    out = grad.dropout(np.full((4, 50), 3e38, np.float32), 0.5, seed=1)
    assert set(out.ravel()) == {0, np.inf}


def calls():
    """Calls of every function, big enough that several threads share them."""
    x, dout = normal(700, 200, dtype=np.float32), normal(700, 200, dtype=np.float32)
    weight, ids = ops.pack(normal(200, 200, dtype=np.float32)), RNG.integers(0, 50, 700)
    narrow = x.astype(BF16), dout.astype(BF16)
    return {
        "linear": lambda **o: grad.linear(dout, x, weight, activation="gelu", **o),
        "bfloat16": lambda **o: grad.linear(narrow[1], narrow[0], weight, **o),
        "layer_norm": lambda **o: grad.layer_norm(dout, x, **o),
        "rms_norm": lambda **o: grad.rms_norm(dout, x, **o),
        "activate": lambda **o: grad.activate(dout, x, "silu", up=x, **o),
        "softmax": lambda **o: (grad.softmax(dout, x, **o),),
        "cross_entropy": lambda **o: grad.cross_entropy(x, weight, ids, **o),
        "dropout": lambda **o: (grad.dropout(x, 0.5, seed=1, **o),),
    }


@pytest.mark.parametrize("name", calls())
def test_threads_change_no_bit(implementation, name):
    call = calls()[name]
    expected = call(num_threads=1)
    for threads in (2, 3, 7):
        for got, want in zip(call(num_threads=threads), expected, strict=True):
            np.testing.assert_array_equal(got, want)
