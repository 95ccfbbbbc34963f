"""Every gradient against finite differences of the forward function, in float64."""

import numpy as np
import pytest
from differences import assert_gradient

from fastattn import grad, ops
from fastattn._args.types import ACTIVATIONS
from fastattn.positions import apply_rope

RNG = np.random.default_rng(1)


def normal(*shape):
    return RNG.standard_normal(shape)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear(implementation, activation, gated):
    maps = (2,) if gated else ()
    x, weight, bias = normal(2, 3, 5), normal(*maps, 19, 5), normal(*maps, 19)
    residual, dout = normal(2, 3, 19), normal(2, 3, 19)

    def packed(weight):
        return ops.pack(weight[1], gate=weight[0]) if gated else ops.pack(weight)

    def forward(x=x, weight=weight, bias=bias):
        return ops.linear(x, packed(weight), bias, activation=activation, residual=residual)

    got = grad.linear(dout, x, packed(weight), bias, activation=activation)
    for gradient, name, value in zip(got, ("x", "weight", "bias"), (x, weight, bias), strict=True):
        assert_gradient(gradient, lambda v, name=name: forward(**{name: v}), value, dout)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms(implementation, name):
    x, residual, weight, bias = normal(2, 3, 7), normal(2, 3, 7), normal(7), normal(7)
    dout, dsum = normal(2, 3, 7), normal(2, 3, 7)
    norm, places = getattr(ops, name), ((weight, bias) if name == "layer_norm" else (weight,))

    def forward(x=x, residual=residual, places=places):
        return np.concatenate(norm(x, *places, eps=0.1, residual=residual, return_sum=True), -1)

    both = np.concatenate((dout, dsum), -1)
    got = getattr(grad, name)(dout, x, weight, eps=0.1, residual=residual, dsum=dsum)
    assert_gradient(got[0], lambda v: forward(x=v), x, both)
    assert_gradient(got[0], lambda v: forward(residual=v), residual, both)
    for i, value in enumerate(places):
        assert_gradient(
            got[1 + i], lambda v, i=i: forward(places=(*places[:i], v, *places[i + 1 :])), value, both
        )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_norm(implementation, activation, first):
    given = {"x": normal(2, 3, 7), "weight": normal(7), "gate": normal(2, 3, 7)}
    options, dout = {"activation": activation, "gate_first": first, "eps": 0.1}, normal(2, 3, 7)
    got = grad.rms_norm(dout, **given, **options, need=("dx", "dweight", "dgate"))
    for gradient, name in zip(got, given, strict=True):
        forward = lambda v, name=name: ops.rms_norm(**given | {name: v}, **options)  # noqa: E731
        assert_gradient(gradient, forward, given[name], dout)


@pytest.mark.parametrize("with_up", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(implementation, activation, with_up):
    x, up, dout = 2 * normal(3, 9), normal(3, 9), normal(3, 9)
    up = up if with_up else None
    got = grad.activate(dout, x, activation, up=up)
    assert_gradient(got[0], lambda x: ops.activate(x, activation, up=up), x, dout)
    if with_up:
        assert_gradient(got[1], lambda up: ops.activate(x, activation, up=up), up, dout)
    assert len(got) == 1 + with_up


def test_softmax(implementation):
    x, dout = normal(2, 3, 8), normal(2, 3, 8)
    assert_gradient(grad.softmax(dout, ops.softmax(x)), ops.softmax, x, dout)


def test_embedding(implementation):
    ids, table, dout = RNG.integers(0, 5, (2, 3)), normal(6, 4), normal(2, 3, 4)
    got = grad.embedding(dout, ids, len(table))
    assert_gradient(got, lambda table: ops.embedding(ids, table), table, dout)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(implementation, interleaved):
    x, dout, cos, sin = normal(2, 3, 8), normal(2, 3, 8), normal(3, 3), normal(3, 3)
    got = grad.rope(dout, cos, sin, interleaved=interleaved)
    assert_gradient(got, lambda x: apply_rope(x, cos, sin, interleaved=interleaved), x, dout)


def test_dropout(implementation):
    x, dout = normal(3, 70), normal(3, 70)
    got = grad.dropout(dout, 0.3, seed=5)
    assert_gradient(got, lambda x: grad.dropout(x, 0.3, seed=5), x, dout)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("with_weight", [False, True])
def test_cross_entropy(implementation, with_weight, smoothing, reduction):
    x, weight, bias = normal(2, 4, 5), normal(7, 5), normal(7)
    if not with_weight:
        x, weight, bias = normal(2, 4, 7), None, None
    targets = np.array([[1, 2, -1, 0], [6, 6, 3, -1]])
    dloss = normal(2, 4) if reduction == "none" else 0.7
    options = {"ignore_index": -1, "label_smoothing": smoothing, "reduction": reduction}

    def loss(x=x, weight=weight, bias=bias):
        packed = None if weight is None else ops.pack(weight)
        return grad.cross_entropy(x, packed, targets, bias=bias, need=(), **options)[0]

    packed = None if weight is None else ops.pack(weight)
    value, *got = grad.cross_entropy(x, packed, targets, bias=bias, dloss=dloss, **options)
    np.testing.assert_allclose(value, loss())
    assert len(got) == (3 if with_weight else 1)
    for gradient, name, at in zip(got, ("x", "weight", "bias"), (x, weight, bias), strict=False):
        assert_gradient(gradient, lambda v, name=name: loss(**{name: v}), at, dloss)
