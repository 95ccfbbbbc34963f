"""Feature maps, and what linear attention makes of them."""

import numpy as np
import pytest

from fastattn.functional import feature_maps, linear_attention

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 4, 80, 16)).astype(np.float32) for _ in range(3))


def test_elu(implementation):
    x = np.array([-np.inf, -80, -1, -1e-8, 0, 1e-8, 2, np.inf, np.nan])
    expected = np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    for dtype in (np.float16, np.float32, np.float64):
        y = feature_maps.elu(x.astype(dtype))
        assert y.dtype == dtype
        np.testing.assert_allclose(y, expected.astype(dtype), rtol=2 * np.finfo(dtype).eps, atol=1e-30)
    for function in (feature_maps.elu, feature_maps.unit, feature_maps.taylor):
        for dtype in (np.float32, np.float64):
            x = Q.astype(dtype)
            got = function(x.astype(x.dtype.newbyteorder()))  # as all other results, in native byte order
            assert got.dtype.isnative
            np.testing.assert_array_equal(got, function(x))


def test_softmax_free_attention_is_a_matrix_product(implementation):
    phi = feature_maps.elu
    scores = np.tril(phi(Q).astype(float) @ phi(K).astype(float).swapaxes(-1, -2))
    expected = scores / (scores.sum(-1, keepdims=True) + 1e-6) @ V
    out = linear_attention(phi(Q), phi(K), V, rule="linear", normalize=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    whole = linear_attention(phi(Q), phi(K), V, rule="linear", normalize=True, causal=False)
    np.testing.assert_allclose(whole[..., -1, :], out[..., -1, :], atol=2e-6)


def test_unit(implementation):
    expected = K / np.sqrt(np.square(K.astype(float)).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(feature_maps.unit(K), expected, rtol=1e-5, atol=1e-7)


def test_taylor(implementation):
    """The products of features are the polynomial of the products of what they are features of."""
    q, k = Q[..., :7].astype(np.float64), K[..., :7].astype(np.float64)
    s = (q * k).sum(-1) / np.sqrt(7)
    for dtype in (np.float64, np.float32, np.float16):
        phi_q, phi_k = (feature_maps.taylor(x.astype(dtype)) for x in (q, k))
        assert phi_q.dtype == dtype
        assert phi_q.shape == (*Q.shape[:-1], 1 + 7 + 28)
        products = np.abs(phi_q.astype(float) * phi_k).sum(-1)
        error = np.abs((phi_q.astype(float) * phi_k).sum(-1) - (1 + s + s * s / 2))
        assert (error <= 4 * np.finfo(dtype).eps * products).all()
    assert feature_maps.taylor(Q[0, 0, 0]).shape == (1 + 16 + 136,)
    np.testing.assert_array_equal(feature_maps.taylor(Q[..., :0]), np.ones((*Q.shape[:-1], 1)))
    assert feature_maps.taylor(np.float32([np.inf, 0]))[3:].tolist()[:1] == [np.inf]  # and no warning


def test_retention(implementation):
    gamma = 1 - 2.0 ** (-5 - np.arange(4))
    i, j = np.mgrid[:80, :80]
    decay = np.where(i >= j, gamma[:, None, None] ** (i - j), 0)  # the paper's parallel form
    expected = (Q.astype(float) @ K.astype(float).swapaxes(-1, -2) * decay) @ V / 4
    out = linear_attention(Q, K, V, rule="decay", log_decay=np.log(gamma))
    np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: feature_maps.elu([1, 2]), TypeError, r"^elu\(\): x has dtype int64"),
        (lambda: feature_maps.taylor([[1, 2]]), TypeError, r"^taylor\(\): x has dtype int64"),
        (lambda: feature_maps.taylor(np.float32(1)), ValueError, r"^taylor\(\): x has shape \(\)"),
        (lambda: feature_maps.unit(Q, eps="x"), TypeError, r"^unit\(\): eps is 'x'"),
        (lambda: feature_maps.unit(Q, eps=-1.0), ValueError, r"^unit\(\): eps is -1.0"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
