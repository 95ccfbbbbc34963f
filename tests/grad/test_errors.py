"""Errors that name the argument that does not fit, before anything is written."""

import numpy as np
import pytest

from fastattn import grad, ops

X = np.ones((3, 4), np.float32)
WEIGHT = ops.pack(np.ones((5, 4), np.float32))
DOUT = np.ones((3, 5), np.float32)
GATED = ops.pack(np.ones((5, 4), np.float32), gate=np.ones((5, 4), np.float32))

WRONG = [
    (lambda: grad.linear(DOUT, X, X), TypeError, r"linear\(\): weight is of type ndarray"),
    (lambda: grad.linear(X, X, WEIGHT), ValueError, r"dout has shape \(3, 4\); expected .*\(3, 5\)"),
    (lambda: grad.linear(DOUT, DOUT, WEIGHT), ValueError, r"x has shape \(3, 5\); expected \(\.\.\., 4\)"),
    (lambda: grad.linear(DOUT, X.astype(float), WEIGHT), TypeError, "x has dtype float64"),
    (lambda: grad.linear(DOUT.astype(float), X, WEIGHT), TypeError, "dout has dtype float64"),
    (lambda: grad.linear(DOUT, X, WEIGHT, activation="selu"), ValueError, "activation is 'selu'"),
    (lambda: grad.linear(DOUT, X, GATED, pre=DOUT), ValueError, r"pre has shape .* \(3, 2, 5\)"),
    (lambda: grad.linear(DOUT, X, WEIGHT, need="dx"), TypeError, "need is 'dx'; expected a tuple"),
    (lambda: grad.linear(DOUT, X, WEIGHT, need=("dq",)), ValueError, "need is 'dq'; expected one of dx"),
    (lambda: grad.linear(DOUT, X, WEIGHT, need=("dx", "dx")), ValueError, "expected each name once"),
    (lambda: grad.linear(DOUT, X, WEIGHT, into=(None,)), ValueError, "into has length 1; expected 3"),
    (lambda: grad.linear(DOUT, X, WEIGHT, into=X), TypeError, "into is of type ndarray"),
    (
        lambda: grad.linear(DOUT, X, WEIGHT, into=(DOUT, None, None)),
        ValueError,
        r"into, for dx, has shape \(3, 5\); expected \(3, 4\)",
    ),
    (
        lambda: grad.layer_norm(X, X, into=(X, None, None)),
        ValueError,
        "into, for dx, shares memory with x",
    ),
    (lambda: grad.layer_norm(X, X, eps=-1), ValueError, "eps is -1"),
    (lambda: grad.layer_norm(X, X, X), ValueError, r"weight has shape \(3, 4\)"),
    (lambda: grad.layer_norm(DOUT, X), ValueError, "dout has shape"),
    (lambda: grad.rms_norm(X, X, need=("dbias",)), ValueError, "rms_norm.*need is 'dbias'"),
    (lambda: grad.rms_norm(X, X, dsum=DOUT), ValueError, "dsum has shape"),
    (lambda: grad.rms_norm(X, X, need=("dgate",)), ValueError, "need has 'dgate', but gate is None"),
    (lambda: grad.rms_norm(X, X, gate=X, dsum=X), ValueError, "dsum is given; expected none with a gate"),
    (lambda: grad.activate(X, X, "relu", need=("dup",)), ValueError, "need has 'dup', but up is None"),
    (lambda: grad.activate(X, X, "gelu", up=DOUT), ValueError, "up has shape"),
    (lambda: grad.softmax(DOUT, X), ValueError, "dout has shape"),
    (lambda: grad.embedding(X, [0, 1, 3], 3), ValueError, "ids has 3; expected 0 to 2"),
    (lambda: grad.embedding(X, [0, 1], 3), ValueError, r"dout has shape \(3, 4\); expected \(2, features\)"),
    (lambda: grad.embedding(X, [0, 1, 2], 3, add_to=DOUT), ValueError, "add_to has shape"),
    (lambda: grad.dropout(X, 1.0, seed=0), ValueError, "rate is 1.0; expected at least 0 and less than 1"),
    (lambda: grad.dropout(X, 0.1, seed=-1), ValueError, "seed is -1"),
    (lambda: grad.dropout(X, 0.1, seed=0, stream=2**32), ValueError, "stream is 4294967296"),
    (lambda: grad.cross_entropy(X, GATED, [0] * 3), ValueError, "weight is a gated pair"),
    (lambda: grad.cross_entropy(X, WEIGHT, [0, 1, 5]), ValueError, "targets has 5; expected 0 to 4, or -100"),
    (lambda: grad.cross_entropy(X, WEIGHT, [0, 1]), ValueError, r"targets has shape \(2,\)"),
    (lambda: grad.cross_entropy(X, WEIGHT, [0.0] * 3), TypeError, "targets has dtype float64"),
    (lambda: grad.cross_entropy(X, None, [0] * 3, label_smoothing=2), ValueError, "label_smoothing is 2"),
    (lambda: grad.cross_entropy(X, None, [0] * 3, reduction="max"), ValueError, "reduction is 'max'"),
    (lambda: grad.cross_entropy(X, None, [0] * 3, dloss=[1, 2, 3]), ValueError, "dloss has shape"),
    (lambda: grad.cross_entropy(X, None, [0] * 3, need=("dweight",)), ValueError, "need is 'dweight'"),
    (lambda: ops.linear(X, WEIGHT, pre=X), ValueError, r"pre has shape \(3, 4\); expected \(3, 5\)"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_errors(number):
    call, error, message = WRONG[number]
    with pytest.raises(error, match=message):
        call()


def test_into(implementation):
    """Results go where they are told to, into every second column or row, too."""
    room = np.zeros((6, 8), np.float32)
    dweight = np.empty((5, 4), np.float32)
    got = grad.linear(DOUT, X, WEIGHT, need=("dweight", "dx"), into=(dweight, room[::2, 2:6]))
    assert got[0] is dweight
    np.testing.assert_array_equal(room[::2, 2:6], 5)
    np.testing.assert_array_equal(dweight, 3)
    assert room.sum() == 3 * 4 * 5
