"""Delta rules by their names: published recurrences token by token in float64, gradients by differences."""

import ml_dtypes
import numpy as np
import pytest
from pullbacks import gradients

from fastattn.functional import (
    comba,
    delta_product,
    feature_maps,
    gated_delta_net2,
    linear_attention,
    rwkv7,
)
from fastattn.grad import vjp

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, DIM, DIM_V, STEPS = 2, 6, 5, 3
LENGTHS = [
    0,
    1,
    2,
    5,
    9,
    20,
    33,
    70,
]  # around steps (4), chunks (16, 32), and what tokens of 2 and 3 steps make of them


def unit(x):
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)


# The formulas of the papers, of one head: S is (head_dim, head_dim_v), scale 1. Each yields a token's result
# and state, and then the last state.


def paper_gdn2(q, k, v, log_decay, erase_gate, write_gate, s):
    q, k = unit(q), unit(k)
    for t in range(len(q)):
        d = np.exp(log_decay[t])[:, None] * s
        s = d + np.outer(k[t], write_gate[t] * v[t] - d.T @ (erase_gate[t] * k[t]))
        yield s.T @ q[t], s
    yield s


def paper_comba(q, k, v, log_decay, beta, erase_strength, correction, s):
    q, k = unit(q), unit(k)
    for t in range(len(q)):
        w = s.T  # as the paper has it
        a = np.exp(log_decay[t]) * np.eye(len(s)) - erase_strength[t] * np.outer(k[t], k[t])
        w = w @ a + beta[t] * np.outer(v[t], k[t])
        s = w.T
        yield w @ (q[t] - correction[t] * k[t]), s
    yield s


def paper_delta_product(q, k, v, beta, log_decay, s):
    q, k = unit(q), unit(k)
    for t in range(len(q)):
        w = np.exp(log_decay[t]) * s.T
        for j in range(k.shape[1]):
            w = w @ (np.eye(len(s)) - beta[t, j] * np.outer(k[t, j], k[t, j])) + beta[t, j] * np.outer(
                v[t, j], k[t, j]
            )
        s = w.T
        yield w @ q[t], s
    yield s


def paper_rwkv7(r, log_decay, k, v, a, b, s):
    for t in range(len(r)):
        w = s.T @ (np.diag(np.exp(log_decay[t])) + np.outer(a[t], b[t])) + np.outer(v[t], k[t])
        s = w.T
        yield w @ r[t], s
    yield s


PAPERS = {
    "gated_delta_net2": paper_gdn2,
    "comba": paper_comba,
    "delta_product": paper_delta_product,
    "rwkv7": paper_rwkv7,
}
FUNCTIONS = {
    "gated_delta_net2": gated_delta_net2,
    "comba": comba,
    "delta_product": delta_product,
    "rwkv7": rwkv7,
}
NAMES = list(FUNCTIONS)


def inputs(name, n, dtype=np.float64, seed=0, batch=()):
    """The arrays of a call in order; gates and decays in lanes."""
    rng = np.random.default_rng(seed)
    lane = np.float64 if dtype == np.float64 else np.float32
    shape = (*batch, HEADS, n)

    def normal(*more):
        return rng.standard_normal((*shape, *more)).astype(dtype)

    def uniform(low, high, *more):
        return rng.uniform(low, high, (*shape, *more)).astype(lane)

    if name == "gated_delta_net2":
        gates = uniform(-1, 0, DIM), uniform(0, 1, DIM), uniform(0, 1, DIM_V)
        return [normal(DIM), normal(DIM), normal(DIM_V), *gates]
    if name == "comba":
        gates = uniform(-2, 0), uniform(0, 1), uniform(0, 0.5), uniform(-1, 1)
        return [normal(DIM), normal(DIM), normal(DIM_V), *gates]
    if name == "delta_product":
        steps = normal(STEPS, DIM), normal(STEPS, DIM_V)
        return [normal(DIM), *steps, uniform(0, 2, STEPS), uniform(-1, 0)]
    kappa = unit(normal(DIM).astype(float))
    b = kappa * rng.uniform(0, 1, kappa.shape)
    return [
        normal(DIM),
        uniform(-0.6, 0, DIM),
        normal(DIM),
        normal(DIM_V),
        (-kappa).astype(dtype),
        b.astype(dtype),
    ]


def published(name, arrays, state=None):
    """The paper's results and last states, of all heads."""
    outs, states = [], []
    for h in range(HEADS):
        s = np.zeros((DIM, DIM_V)) if state is None else state[h]
        *tokens, last = PAPERS[name](*(x[h].astype(np.float64) for x in arrays), s)
        outs.append([out for out, _ in tokens])
        states.append(last)
    return np.array(outs).reshape(HEADS, -1, DIM_V), np.array(states)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", LENGTHS)
def test_published_recurrences(implementation, name, n):
    before = np.random.default_rng(1).standard_normal((HEADS, DIM, DIM_V))
    for state in (None, before):
        arrays = inputs(name, n)
        out, last = FUNCTIONS[name](*arrays, scale=1.0, state=state, return_state=True)
        expected, s = published(name, arrays, state)
        np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(last, s, rtol=1e-10, atol=1e-11)
        assert out.flags.c_contiguous


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
def test_dtypes(implementation, name, dtype):
    arrays = inputs(name, 40, dtype)
    out, last = FUNCTIONS[name](*arrays, return_state=True)
    assert (out.dtype, last.dtype) == (dtype, np.float32)
    scale = 1.0 if name == "rwkv7" else DIM**-0.5
    expected, s = published(name, arrays)
    # Keys and values that gates change, and those divided by their lengths, are rounded once more.
    bound = {np.dtype(np.float32): 2e-5, np.dtype(np.float16): 2e-2, BF16: 0.16}[dtype]
    assert np.abs(out.astype(float) - scale * expected).max() <= bound * np.abs(scale * expected).max()
    assert np.abs(last - s).max() <= bound * np.abs(s).max()
    dout = np.ones_like(out)
    for x, dx in zip(arrays, gradients(FUNCTIONS[name], dout, *arrays), strict=True):
        assert (dx.shape, dx.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_in_pieces(implementation, name):
    """Chunks, single tokens and states that go on, in place, give what one call gives."""
    arrays = inputs(name, 70, np.float32, batch=(2,))
    whole, last = FUNCTIONS[name](*arrays, return_state=True)
    state, parts, begin = np.zeros_like(last), [], 0
    for end in (1, 4, 40, 41, 41, 70):
        piece = [x[:, :, begin:end] for x in arrays]
        out, same = FUNCTIONS[name](*piece, state=state, out_state=state)
        assert same is state
        parts.append(out)
        begin = end
    np.testing.assert_allclose(np.concatenate(parts, axis=2), whole, rtol=0, atol=2e-5 * np.abs(whole).max())
    np.testing.assert_allclose(state, last, rtol=0, atol=2e-5 * np.abs(last).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 3, 40])
def test_gradients_by_finite_differences(implementation, name, n):
    function, arrays, rng = FUNCTIONS[name], inputs(name, n), np.random.default_rng(2)
    state, dstate = rng.standard_normal((2, HEADS, DIM, DIM_V))
    dout = rng.standard_normal((HEADS, n, DIM_V))
    names = [f"d{x}" for x in list(function.__annotations__)[: len(arrays)]]
    options = {"state": state, "scale": 0.7}
    found = gradients(function, dout, *arrays, dmore=dstate, need=(*names, "dstate", "dscale"), **options)
    assert [x.dtype for x in found[:-1]] == [np.float64] * (len(arrays) + 1)

    def loss(i, x):
        moved = [*arrays, state, 0.7]
        moved[i] = x
        *rest, s, scale = moved
        out, last = function(*rest, state=s, scale=scale, return_state=True)
        return (out * dout).sum() + (last * dstate).sum()

    for i, x in enumerate([*arrays, state, 0.7]):
        direction, small = rng.standard_normal(np.shape(x)), 1e-6
        if i < len(arrays) and names[i] == "dlog_decay":  # which is 0 at most
            x = np.minimum(x, -2 * small * np.abs(direction))
        slope = (loss(i, x + small * direction) - loss(i, x - small * direction)) / (2 * small)
        np.testing.assert_allclose(np.sum(found[i] * direction), slope, rtol=1e-5, atol=1e-5, err_msg=str(i))
    some = gradients(function, dout, *arrays, dmore=dstate, need=(names[-1], names[1]), **options)
    for name_of, got in zip((names[-1], names[1]), some, strict=True):
        np.testing.assert_array_equal(got, found[names.index(name_of)])


def test_broadcast_gates_get_sums(implementation):
    """One decay a head, one correction a head, gates for all heads: their gradients are added up."""
    rng, dout = np.random.default_rng(3), np.random.default_rng(4).standard_normal((HEADS, 9, DIM_V))
    q, k, v, decay, beta, strength, _ = inputs("comba", 9)
    decay, correction = decay[:, 0], rng.uniform(-1, 1, HEADS)
    need = ("dlog_decay", "dbeta", "dcorrection")
    call = q, k, v, decay, beta[:1], strength, correction
    full = np.broadcast_to(decay[:, None], (HEADS, 9)), np.broadcast_to(beta[:1], (HEADS, 9)), strength
    whole = gradients(comba, dout, q, k, v, *full, np.repeat(correction[:, None], 9, 1), need=need)
    some = gradients(comba, dout, *call, need=need)
    np.testing.assert_allclose(some[0], whole[0].sum(-1), atol=1e-12)
    np.testing.assert_allclose(some[1], whole[1].sum(0, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(some[2], whole[2].sum(-1), atol=1e-12)
    without = comba(*call[:-1])
    np.testing.assert_array_equal(without, comba(*call[:-1], np.zeros(HEADS)))

    q, k, v, decay, erase, write = inputs("gated_delta_net2", 9)
    need = ("derase_gate", "dwrite_gate")
    shared = gradients(gated_delta_net2, dout, q, k, v, decay, erase[:, :, :1], write[0], need=need)
    full = np.broadcast_to(erase[:, :, :1], k.shape), np.broadcast_to(write[0], v.shape)
    whole = gradients(gated_delta_net2, dout, q, k, v, decay, *full, need=need)
    np.testing.assert_allclose(shared[0], whole[0].sum(-1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(shared[1], whole[1].sum(0), atol=1e-12)

    q, k, v, beta, decay = inputs("delta_product", 9)
    whole = gradients(
        delta_product, dout, q, k, v, beta, np.repeat(decay[:, :1], 9, 1), need=("dlog_decay",)
    )[0]
    for one in (decay[:, :1], decay[:, 0]):
        (got,) = gradients(delta_product, dout, q, k, v, beta, one, need=("dlog_decay",))
        np.testing.assert_allclose(got, whole.sum(-1).reshape(one.shape), atol=1e-12)


def test_scalar_gates_are_kimi_delta(implementation):
    q, k, v, decay, _, _ = inputs("gated_delta_net2", 40)
    beta = np.random.default_rng(5).uniform(0, 1, (HEADS, 40))
    gate = beta[..., None]
    out = gated_delta_net2(q, k, v, decay, gate, gate)
    units = feature_maps.unit(q), feature_maps.unit(k)
    expected = linear_attention(*units, v, rule="kimi_delta", log_decay=decay, beta=beta)
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-12)


def test_special_cases(implementation):
    """Gated DeltaNet is Comba that erases as much as it writes, and a product of one step."""
    q, k, v, decay, beta, _, _ = inputs("comba", 40)
    units = feature_maps.unit(q), feature_maps.unit(k)
    expected = linear_attention(*units, v, rule="gated_delta", log_decay=decay, beta=beta)
    np.testing.assert_allclose(
        comba(q, k, v, decay, beta, beta * np.exp(decay)), expected, rtol=1e-11, atol=1e-12
    )
    one = k[:, :, None], v[:, :, None], beta[..., None]
    np.testing.assert_array_equal(delta_product(q, *one, decay), expected)
    np.testing.assert_array_equal(
        delta_product(q, *one), linear_attention(*units, v, rule="delta", beta=beta)
    )
    heads = [np.repeat(x, 2, axis=0) for x in (q, beta[..., None], decay)]
    expected = linear_attention(
        feature_maps.unit(heads[0]), units[1], v, rule="gated_delta", log_decay=decay, beta=beta
    )
    np.testing.assert_array_equal(delta_product(heads[0], *one, decay), expected)
    zeros = np.zeros_like(k)
    w = np.broadcast_to(decay[..., None], k.shape) / 4
    plain = linear_attention(q, k, v, rule="gated", log_decay=w, scale=1.0)
    np.testing.assert_allclose(rwkv7(q, w, k, v, zeros, zeros), plain, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(
        rwkv7(q, w, k, v, zeros, zeros, scale=None), rwkv7(q, w, k, v, zeros, zeros)
    )


@pytest.mark.parametrize("name", ["gated_delta_net2", "comba", "delta_product"])
def test_keys_as_they_are(implementation, name):
    arrays = inputs(name, 20)
    expected = FUNCTIONS[name](*arrays)
    units = [unit(arrays[0]), unit(arrays[1]), *arrays[2:]]
    np.testing.assert_allclose(FUNCTIONS[name](*units, unit_keys=False), expected, rtol=1e-10, atol=1e-11)
    dout = np.ones_like(expected)
    inner = gradients(FUNCTIONS[name], dout, *units, unit_keys=False)
    outer = gradients(FUNCTIONS[name], dout, *arrays)
    _, pullback = vjp(feature_maps.unit, arrays[1])
    np.testing.assert_allclose(pullback(inner[1])[0], outer[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["comba", "rwkv7"])
def test_decays_near_their_bound(implementation, name):
    """Division by the smallest decay that is allowed costs no digits."""
    for dtype, bound in ((np.float64, 1e-12), (np.float32, 2e-5)):
        arrays = inputs(name, 70, dtype)
        at = 3 if name == "comba" else 1
        arrays[at][..., ::3] = -10
        out = FUNCTIONS[name](*arrays, scale=1.0)
        expected, _ = published(name, arrays)
        assert np.abs(out - expected).max() <= bound * np.abs(expected).max()


X = np.ones((2, 5, 4), np.float32)
GATE = np.full((2, 5), -1, np.float32)
K = np.ones((2, 5, 3, 4), np.float32)
STRENGTH = np.ones((2, 5, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: gated_delta_net2(X, X, X, -X, X[:, :3], X),
            ValueError,
            r"gated_delta_net2\(\): erase_gate has shape",
        ),
        (lambda: gated_delta_net2(X, X, X, -X, X, X[..., :2]), ValueError, "write_gate has shape"),
        (lambda: gated_delta_net2(X, X, X, -X, "x", X), TypeError, "erase_gate has dtype"),
        (lambda: gated_delta_net2(X, X, X, X, X, X), ValueError, "log_decay has 1.0; expected 0 or less"),
        (lambda: gated_delta_net2(X, X, X, GATE, X, X), ValueError, "log_decay has shape"),
        (lambda: gated_delta_net2(X, X, X, -X, X, X, erase=X), TypeError, "erase is not an argument"),
        (lambda: gated_delta_net2(X, X, X, -X, X, X, unit_keys=1), TypeError, "unit_keys is 1"),
        (
            lambda: comba(X, X, X, 11 * GATE, -GATE, -GATE),
            ValueError,
            r"comba\(\): log_decay has -11.0; expected -10",
        ),
        (lambda: comba(X, X, X, None, -GATE, -GATE), ValueError, "log_decay is None"),
        (lambda: comba(X, X, X, GATE, GATE[0], GATE), ValueError, "beta has shape"),
        (lambda: comba(X, X, X, GATE, GATE, GATE[:, :2]), ValueError, "erase_strength has shape"),
        (lambda: comba(X, X, X, GATE, GATE, GATE, GATE[:, :2]), ValueError, "correction has shape"),
        (
            lambda: comba(X[:1], X, X, GATE, GATE, GATE),
            ValueError,
            r"q has shape \(1, 5, 4\); expected \(2, 5, 4\)",
        ),
        (
            lambda: comba(X, X[0], X, GATE, GATE, GATE),
            ValueError,
            r"k has shape \(5, 4\); expected \(..., heads",
        ),
        (
            lambda: comba(X, X, X.astype(float), GATE, GATE, GATE),
            TypeError,
            "v has dtype float64; expected that of k",
        ),
        (lambda: delta_product(X, X, K, STRENGTH), ValueError, r"delta_product\(\): k has shape \(2, 5, 4\)"),
        (lambda: delta_product(X, K, K[:, :, :2], STRENGTH), ValueError, "v has shape"),
        (lambda: delta_product(X[:, :3], K, K, STRENGTH), ValueError, "q has shape"),
        (lambda: delta_product(X, K[:, :, :0], K, STRENGTH), ValueError, "k has shape .* at least one step"),
        (lambda: delta_product(X, K, K, GATE), ValueError, "beta has shape"),
        (lambda: delta_product(X, K, K, np.ones((3, 5, 3))), ValueError, "beta has shape"),
        (lambda: delta_product(X, K, K, STRENGTH, GATE[:, :2]), ValueError, "log_decay has shape"),
        (lambda: delta_product(X, K, K, STRENGTH, out=X.copy()), TypeError, "out is not an argument"),
        (lambda: rwkv7(X, -X, X, X, X[:1], X), ValueError, r"rwkv7\(\): read_by has shape"),
        (
            lambda: rwkv7(X, -X, X, X, X, X.astype(np.float16)),
            TypeError,
            "write_by has dtype float16; expected that of k",
        ),
        (lambda: rwkv7(X, -20 * X, X, X, X, X), ValueError, "log_decay has -20.0; expected -10.0 or more"),
        (lambda: rwkv7(X, X, X, X, X, X), ValueError, "log_decay has 1.0; expected 0 or less"),
        (lambda: rwkv7(X, -X, X, X, X, X, beta=1), TypeError, "beta is not an argument"),
        (
            lambda: gradients(rwkv7, X, X, -X, X, X, X, X, need=("dq",)),
            ValueError,
            "need has 'dq'; expected dr, dlog",
        ),
        (
            lambda: gradients(comba, X, X, X, X, GATE, GATE, GATE, need=("dcorrection",)),
            ValueError,
            "correction",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
