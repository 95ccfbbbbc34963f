"""Set Transformer's blocks and Perceiver's, by the papers' formulas in float64, with the layers' weights."""

import numpy as np
import pytest
from formulas import feed_forward, set_attention

from fastattn import layers
from fastattn.layers import FeedForward, TransformerEncoder, TransformerEncoderLayer

RNG = np.random.default_rng(0)
D, HEADS, WIDE = 24, 4, 40


def layer(**options):
    made = TransformerEncoderLayer(D, HEADS, WIDE, rng=np.random.default_rng(1), **options)
    state = {
        name: x + 0.1 * RNG.standard_normal(x.shape).astype("f") for name, x in made.state_dict().items()
    }
    made.load_state_dict(state)
    return made


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


X, Y, POINTS = normal(3, 50, D), normal(3, 70, D), normal(6, D)
HIDDEN = np.arange(50) >= np.array([50, 20, 1])[:, None]


@pytest.mark.parametrize("norm_first", [False, True])
def test_set_attention(norm_first, implementation):
    this = layer(norm_first=norm_first)
    np.testing.assert_allclose(layers.set_attention(this, X, Y), set_attention(this, X, Y), atol=2e-5)
    np.testing.assert_allclose(
        layers.set_attention(this, X[0], Y[0]), set_attention(this, X[:1], Y[:1])[0], atol=2e-5
    )
    out = layers.set_attention(this, POINTS, X, key_padding_mask=HIDDEN)
    np.testing.assert_allclose(out, set_attention(this, POINTS, X, HIDDEN), atol=2e-5)
    if not norm_first:
        np.testing.assert_allclose(layers.set_attention(this, X, X), this(X), atol=2e-6)


def test_induced(implementation):
    first, second = layer(), layer()
    expected = set_attention(second, X, set_attention(first, POINTS, X, HIDDEN))
    out = layers.induced_set_attention(first, second, POINTS, X, key_padding_mask=HIDDEN)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    order = RNG.permutation(50)
    turned = layers.induced_set_attention(first, second, POINTS, X[:, order])
    whole = layers.induced_set_attention(first, second, POINTS, X)
    np.testing.assert_allclose(turned, whole[:, order], atol=2e-5)


def test_pooling(implementation):
    this, forward = layer(), FeedForward(D, WIDE, "relu", rng=np.random.default_rng(2))
    parameters = {name: x.astype(float) for name, x in forward.state_dict().items()}
    out = layers.pooling_by_attention(this, POINTS, X, feed_forward=forward)
    np.testing.assert_allclose(
        out, set_attention(this, POINTS, feed_forward(X.astype(float), parameters)), atol=2e-5
    )
    alone = layers.pooling_by_attention(this, POINTS[:1], X, key_padding_mask=HIDDEN)
    np.testing.assert_allclose(alone, set_attention(this, POINTS[:1], X, HIDDEN), atol=2e-5)


def test_perceiver(implementation):
    cross, inner = layer(norm_first=True), layer(norm_first=True)
    expected = set_attention(cross, POINTS, X, HIDDEN)
    latents = layers.perceiver(cross, None, POINTS, X, key_padding_mask=HIDDEN)
    np.testing.assert_allclose(latents, expected, atol=2e-5)
    out = layers.perceiver(cross, TransformerEncoder([inner]), POINTS, X, key_padding_mask=HIDDEN)
    np.testing.assert_array_equal(out, inner(latents))
    np.testing.assert_array_equal(
        layers.perceiver(cross, inner, latents, Y), inner(layers.set_attention(cross, latents, Y))
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: layers.set_attention(None, X, Y),
            TypeError,
            r"^set_attention\(\): layer is of type NoneType",
        ),
        (
            lambda: layers.set_attention(layer(), X, Y[..., :3]),
            ValueError,
            r"y has shape \(3, 70, 3\); expected",
        ),
        (
            lambda: layers.induced_set_attention(layer(), layer(), X[0, 0], X),
            ValueError,
            "inducing has shape",
        ),
        (
            lambda: layers.induced_set_attention(None, layer(), POINTS, X),
            TypeError,
            r"\(\): first is of type",
        ),
        (
            lambda: layers.induced_set_attention(layer(), 1, POINTS, X),
            TypeError,
            r"\(\): second is of type",
        ),
        (lambda: layers.perceiver(None, None, POINTS, X), TypeError, r"^perceiver\(\): cross is of type"),
        (lambda: layers.pooling_by_attention(layer(), X[0, 0], X), ValueError, r"\(\): seeds has shape"),
        (
            lambda: layers.perceiver(layer(), None, POINTS, X, key_padding_mask=HIDDEN[:1]),
            ValueError,
            r"^perceiver\(\): key_padding_mask has shape .*; expected \(batch, length\)",
        ),
        (
            lambda: layers.set_attention(layer(), X[:2], Y),
            ValueError,
            r"x and y have batch dimensions \(2,\) and \(3,\)",
        ),
        (
            lambda: layers.pooling_by_attention(layer(), POINTS, X, feed_forward=len),
            TypeError,
            r"^pooling_by_attention\(\): feed_forward is of type builtin",
        ),
        (
            lambda: layers.perceiver(layer(), len, POINTS, X),
            TypeError,
            r"^perceiver\(\): latent is of type",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_batch_dimensions_broadcast():
    mab = layer()
    out = layers.set_attention(mab, X[:1], Y)
    whole = np.broadcast_to(X[:1], (len(Y), *X.shape[1:]))
    np.testing.assert_array_equal(out, layers.set_attention(mab, whole, Y))
