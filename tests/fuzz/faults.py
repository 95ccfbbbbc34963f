"""Cases with one fault each. They show that the fuzzer finds faults."""

import ctypes
import time
import warnings

import numpy as np
from judge import Case, Like

from fastattn import get_num_threads
from fastattn._engine import settings


def crash():
    ctypes.string_at(0)


def hang():
    time.sleep(600)


def warn():
    warnings.warn("of something", RuntimeWarning, stacklevel=1)


def raise_another_type():
    raise KeyError("fault(): nothing there")


def raise_another_message():
    raise ValueError("operands could not be broadcast")


def return_another_shape():
    return np.zeros(3)


def return_nan():
    return np.full(2, np.nan)


def return_other_numbers():
    """Change numbers on NumPy."""
    return np.full(2, float(settings.default_backend() == "numpy"))


def return_other_bits():
    """Change bits in another number of threads."""
    return np.full(2, 1e-12 * get_num_threads())


READ = np.zeros(2)


def write_to_what_it_reads():
    READ[0] += 1
    return np.zeros(2)


def return_what_is_right():
    return np.zeros(2)


def raise_what_is_right():
    raise ValueError("fault(): x is 3; expected 4")


FAULTS = (crash, hang, warn, raise_another_type, raise_another_message, return_another_shape, return_nan,
          return_other_numbers, return_other_bits, write_to_what_it_reads, return_what_is_right,
          raise_what_is_right)  # fmt: skip


def draw(d):
    fault = d.choose(*FAULTS)
    return Case(("fault",), fault, [fault.__name__], lambda: [Like((2,), np.float64)], kept=READ)
