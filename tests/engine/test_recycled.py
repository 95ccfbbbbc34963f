"""Memory that goes from one training step to the next."""

import gc

import numpy as np

from fastattn._engine import memory
from fastattn._engine.memory import recycled_empty

FLOAT32 = np.dtype(np.float32)


def address(x):
    return x.__array_interface__["data"][0]


def test_memory_is_used_again_when_its_last_view_is_gone():
    x = recycled_empty((1 << 10, 1 << 9), FLOAT32)
    before, view = address(x), x[3:, ::2]
    del x
    gc.collect()
    other = recycled_empty((1 << 10, 1 << 9), FLOAT32)
    assert not np.may_share_memory(other, view)
    del view
    gc.collect()
    again = recycled_empty((1 << 9, 1 << 9), np.dtype(np.float64))  # as many bytes
    assert address(again) == before
    assert again.flags.c_contiguous
    assert again.flags.writeable


def test_what_is_kept_goes_when_other_sizes_come():
    x = recycled_empty((1 << 19,), FLOAT32)
    del x
    gc.collect()
    assert 1 << 21 in memory._kept
    recycled_empty((1 << 20,), FLOAT32)
    assert not memory._kept.get(1 << 21)


def test_small_arrays_are_numpy_s():
    assert recycled_empty((5, 0), FLOAT32).shape == (5, 0)
    assert recycled_empty((5, 3), FLOAT32).flags.owndata
