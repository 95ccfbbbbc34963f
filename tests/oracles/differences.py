"""Gradients by finite differences in float64."""

import numpy as np


def numeric(function, x, dout, step=1e-5):
    """The gradient of ``sum(dout * function(x))`` at x, by central differences of each element."""
    x = np.array(x, np.float64)
    result = np.empty_like(x)
    for place in np.ndindex(x.shape):
        value = x[place]
        sums = []
        for changed in (value + step, value - step):
            x[place] = changed
            sums.append(np.sum(dout * np.asarray(function(x), np.float64)))
        x[place] = value
        result[place] = (sums[0] - sums[1]) / (2 * step)
    return result


def assert_gradient(got, function, x, dout, bound=1e-7):
    """`got` is the gradient at x, to `bound` of its largest element."""
    expected = numeric(function, x, dout)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max(initial=0) <= bound * max(1, np.abs(expected).max(initial=0))
    assert not expected.size or np.abs(expected).max() > 0
