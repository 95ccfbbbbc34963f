"""The implementations that tests run on: each instruction set of this CPU, and the fallback, "numpy"."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn._engine import settings

THREADINGS = fastattn.show_config()["threading_available"]  # of a build; () without one
COMPILED = () if os.environ.get("FASTATTN_BACKEND") == "numpy" else fastattn.show_config()["isas_available"]
IMPLEMENTATIONS = (*COMPILED, "numpy")
NOTHING_COMPILED = pytest.param(None, marks=pytest.mark.skip("of compiled kernels, and there are none"))

each_isa = pytest.mark.parametrize("isa", COMPILED or [NOTHING_COMPILED])


def forced(implementation, **more):
    """A context in which `implementation`, the name of an instruction set or "numpy", computes."""
    if implementation == "numpy":
        return settings.forced(backend="numpy", **more)
    return settings.forced(isa=implementation, backend="compiled", **more)


def has_pairs(implementation):
    """Whether it has a dot product of bfloat16 pairs."""
    q = np.zeros((1, 1, 64, 16), ml_dtypes.bfloat16)
    with forced(implementation):
        return implementation != "numpy" and fastattn.explain(q, q, q)["bf16_dot"]


def child_environment(**changes):
    """os.environ with `changes`: a child imports the fastattn under test, and the modules of this folder.

    Tests read what a child prints: it prints UTF-8 without colours, whatever variables of Python's are set.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    folders = Path(fastattn.__file__).parents[1], Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    environment |= {"PYTHONIOENCODING": "utf-8", "PYTHON_COLORS": "0"}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = str(value)
    return environment


def assert_same_rows(got, expected):
    """Rows computed in other company: kernels give the same bits; NumPy's products round by their shapes."""
    if COMPILED:
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
