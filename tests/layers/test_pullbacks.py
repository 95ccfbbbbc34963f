"""Pullbacks may be called while the weights are those of their forward pass."""

import numpy as np
import pytest
from layer_oracle import HEADS, WIDTH, randomized

from fastattn.grad import vjp
from fastattn.layers import (
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.train import SGD

X = np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)
ENCODER = TransformerEncoderLayer, WIDTH, HEADS, 40
LAYERS = {
    "linear": (Linear, WIDTH, WIDTH),
    "norm": (LayerNorm, WIDTH),
    "feed-forward": (FeedForward, WIDTH, 40),
    "attention": (MultiHeadAttention, WIDTH, HEADS),
    "encoder layer": ENCODER,
    "decoder layer": (TransformerDecoderLayer, WIDTH, HEADS, 40),
}


def made(kind, *sizes, **options):
    return randomized(kind(*sizes, **options))


def stepped(layer):
    SGD(layer).step({name: np.ones_like(x) for name, x in layer.state_dict().items()})


def loaded(layer):
    layer.load_state_dict(layer.state_dict())


def assert_stale(pullback, out):
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"^pullback of \w+\(\): the weights have changed since; call vjp"
        ):
            pullback(np.ones_like(out))


@pytest.mark.parametrize("change", [stepped, loaded])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_another_step_are_refused(name, checkpoint, change):
    layer = made(*LAYERS[name])
    inputs = (X, X) if name == "decoder layer" else (X,)
    _, pullback = vjp(layer, *inputs, checkpoint=checkpoint)
    change(layer)
    assert_stale(pullback, X)
    _, pullback = vjp(layer, *inputs, checkpoint=checkpoint)
    assert list(pullback(np.ones_like(X))[-1]) == list(layer.state_dict())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_parts_that_changed_are_refused(checkpoint):
    def passed():
        return vjp(stack, X, checkpoint=checkpoint)

    stack = TransformerEncoder([made(*ENCODER), made(*ENCODER)])
    out, pullback = passed()
    loaded(stack.layers[1].self_attn.out_proj)
    assert_stale(pullback, out)
    out, pullback = passed()
    stack.layers[0] = made(*ENCODER)
    assert_stale(pullback, out)
    out, pullback = passed()
    stack.layers[0].norm1 = made(LayerNorm, WIDTH)
    assert_stale(pullback, out)
    zeros = {name: np.zeros_like(x) for name, x in stack.state_dict().items()}
    optimizer = SGD(stack, frozen="layers.0.*")
    out, pullback = passed()
    optimizer.step(zeros)
    assert_stale(pullback, out)


def test_what_others_change_counts_not():
    generator, critic = made(Linear, WIDTH, WIDTH), made(*ENCODER)
    (y, back), (z, first), (_, second) = (
        vjp(generator, X),
        *(vjp(critic, X) for _ in range(2)),
    )
    expected = first(np.ones_like(z))  # two batches of one step
    for name, x in second(np.ones_like(z))[1].items():
        np.testing.assert_array_equal(x, expected[1][name])
    stepped(critic)
    again, other = vjp(generator, X)
    for x, at in zip(back(np.ones_like(y)), other(np.ones_like(again)), strict=True):
        np.testing.assert_equal(x, at)
