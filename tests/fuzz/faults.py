"""Cases with one fault each. They show that the fuzzer finds faults."""

import ctypes
import time
import warnings

import numpy as np
from judge import Case, Like

from fastattn import get_num_threads
from fastattn._engine import settings

READ = np.zeros(2)


def raised(error):
    raise error


# The last two are right.
FAULTS = {
    "crash": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(600),
    "warning": lambda: warnings.warn("of something", RuntimeWarning, stacklevel=1),
    "type of error": lambda: raised(KeyError("fault(): nothing there")),
    "message": lambda: raised(ValueError("operands could not be broadcast")),
    "shape": lambda: np.zeros(3),
    "NaN": lambda: np.full(2, np.nan),
    "numbers of NumPy": lambda: np.full(2, float(settings.default_backend() == "numpy")),
    "bits in other threads": lambda: np.full(2, 1e-12 * get_num_threads()),
    "write": lambda: np.add(READ, 1, out=READ) * 0,
    "none": lambda: np.zeros(2),
    "none, an error": lambda: raised(ValueError("fault(): x is 3; expected 4")),
}


def draw(d):
    name = d.choose(*FAULTS)
    return Case(("fault",), FAULTS[name], [name], lambda: [Like((2,), np.float64)], kept=READ)
