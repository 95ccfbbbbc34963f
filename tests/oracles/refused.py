"""Tables of calls that raise: a row is ``call -> Error: pattern of its message``; it may go on, indented."""

import re

import numpy as np
import pytest

from fastattn import layers, models, positions, train
from fastattn.grad import vjp

NAMES = {**vars(train), **vars(positions), **vars(layers), "models": models, "np": np, "vjp": vjp}


def refused(text):
    """Decorate a test of `code` and `error` with the rows of a table."""
    rows = [re.sub(r"\n\s+", " ", row).split(" -> ") for row in re.split(r"\n(?=\S)", text.strip())]
    return pytest.mark.parametrize(("code", "error"), rows, ids=[code for code, _ in rows])


def assert_refused(code, error, **names):
    """Evaluate `code` with `names` and the public ones; it has to raise the `error` of its row."""
    kind, match = error.split(": ", 1)
    with pytest.raises((TypeError, ValueError, AttributeError), match=match) as raised:
        eval(code, {**NAMES, **names})
    assert type(raised.value).__name__ == kind
