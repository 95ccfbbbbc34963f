"""Dilated windows and strides: the cost of the keys attended, and the result of attention with the mask."""

import numpy as np
import pytest
from oracle import check, expect, spread_inputs

from fastattn import functional, masks
from fastattn._bench.cases import DTYPES, Shape

SHAPE = Shape("patterns", batch=2, heads_q=4, heads_kv=2, len_q=6, len_k=6, head_dim=16, head_dim_v=12)
LENGTHS = [0, 1, 5, 67, 200]


def inputs(length, dtype="float32", **how):
    shape = SHAPE._replace(len_q=length, len_k=length)
    return spread_inputs(shape, dtype, np.random.default_rng(0), **how)


def dilated(length, window, dilation):
    i, j = np.arange(length)[:, None], np.arange(length)
    return (abs(i - j) <= window * dilation) & ((i - j) % dilation == 0)


def strided(length, stride):
    i, j = np.arange(length)[:, None], np.arange(length)
    return (j <= i) & ((i - j <= stride) | ((i - j) % stride == 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_dilated_window(length, dtype, implementation):
    q, k, v = inputs(length, dtype)
    for window, dilation in ((0, 1), (3, 4), (2, 64), (100, 3)):
        for causal in (False, True):
            expected = expect(q, k, v, mask=dilated(length, window, dilation), causal=causal)
            how = {"window": window, "dilation": dilation, "causal": causal}
            check(functional.dilated_window_attention(q, k, v, **how, return_lse=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_strided(length, dtype, implementation):
    q, k, v = inputs(length, dtype)
    sinks = np.linspace(-1, 1, 4, dtype=np.float32)
    for stride in (1, 7, 64, 300):
        expected = expect(q, k, v, mask=strided(length, stride), sinks=sinks)
        check(functional.strided_attention(q, k, v, stride=stride, sinks=sinks, return_lse=True), expected)


def test_patterns_are_those_of_masks():
    np.testing.assert_array_equal(masks.dilated(3, 4).to_array(50), dilated(50, 3, 4))
    np.testing.assert_array_equal(masks.strided(7).to_array(50), strided(50, 7))


def test_patterns_write_where_they_are_told(implementation):
    q, k, v = inputs(90, layout="blhd")
    out = np.empty((2, 90, 4, 12), np.float32).swapaxes(1, 2)
    got = functional.dilated_window_attention(q, k, v, window=3, dilation=4, out=out)
    assert got is out
    np.testing.assert_array_equal(
        out, functional.dilated_window_attention(q.copy(), k, v, window=3, dilation=4)
    )
    assert functional.strided_attention(q, k, v, stride=4, out=out) is out
    np.testing.assert_array_equal(out, functional.strided_attention(q, k, v, stride=4))
    one = functional.strided_attention(q[0, 0], k[0, 0], v[0, 0], stride=4)
    np.testing.assert_allclose(one, out[0, 0], atol=1e-6)


Q, K, V = inputs(6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: functional.dilated_window_attention(
                Q, K[..., :5, :], V[..., :5, :], window=1, dilation=2
            ),
            ValueError,
            "k has a length of 5; expected q's, 6",
        ),
        (
            lambda: functional.dilated_window_attention(Q, K, V, window=-1, dilation=2),
            ValueError,
            "window is -1",
        ),
        (
            lambda: functional.dilated_window_attention(Q, K, V, window=1, dilation=0),
            ValueError,
            "dilation is 0",
        ),
        (lambda: functional.strided_attention(Q, K, V, stride=2, causal=True), TypeError, "causal is not an"),
        (
            lambda: functional.strided_attention(Q, K, V, stride=1.5),
            TypeError,
            "stride is 1.5; expected an int",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
