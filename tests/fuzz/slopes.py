"""Gradients against difference quotients, in float64."""

import numpy as np

STEP = 1e-5
# Rounding: a result of 1e2 is off by about 1e-14, and its quotient by 1e-9.
BOUND = 1e-7


def wrong_slope(function, at, gradients, rng):
    """Say what is wrong with the gradients of a scalar `function(at)`, arrays by name; None if nothing is.

    All are moved at once, each along a direction of its own. Two steps say how far a quotient is to be
    trusted. The function has no kinks, such as relu's.
    """
    at = {name: np.asarray(x, np.float64) for name, x in at.items()}
    directions = {name: rng.standard_normal(x.shape) for name, x in at.items()}
    parts = [np.asarray(gradients[name], np.float64) * x for name, x in directions.items()]
    got, scale = sum(x.sum() for x in parts), 1 + sum(abs(x).sum() for x in parts)
    quotients = []
    for step in (STEP, STEP / 2):
        above, below = (
            function({name: x + sign * step * directions[name] for name, x in at.items()}) for sign in (1, -1)
        )
        quotients.append((above - below) / (2 * step))
    doubt = abs(quotients[0] - quotients[1])
    if abs(got - quotients[1]) <= BOUND * scale + 10 * doubt:
        return None
    return f"the gradients of {', '.join(at)} have the slope {got}; the quotient is {quotients[1]} +- {doubt}"
