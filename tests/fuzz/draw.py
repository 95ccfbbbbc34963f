"""Random values of one case: arrays in any memory layout, and wrong values of all kinds."""

from contextlib import suppress

import ml_dtypes
import numpy as np

from fastattn._bench.cases import DTYPES, as_dtype


class Draw:
    """All random choices of one case, from one generator. `dtype` is that of its arrays."""

    def __init__(self, rng):
        self.rng = rng
        self.dtype = as_dtype(DTYPES[rng.choice(4, p=(0.55, 0.15, 0.15, 0.15))])

    def chance(self, p):
        return self.rng.random() < p

    def choose(self, *values):
        return values[self.rng.integers(len(values))]

    def some(self, p, **values):
        """Call each of `values`, functions without arguments, with probability p."""
        return {name: make() for name, make in values.items() if self.chance(p)}

    def size(self, low=1, high=9):
        """A length: mostly small, sometimes at the edge of a vector or a tile."""
        if self.chance(0.12):
            return self.choose(15, 16, 17, 31, 33, 64, 65, 130)
        return int(self.rng.integers(low, high + 1))

    def length(self):
        return self.size(0, 12)

    def batch(self):
        return self.choose((), (), (1,), (2,), (3,), (2, 2), (0,))

    def floats(self, *shape, dtype=None):
        x = np.asarray(self.rng.standard_normal(shape)).astype(self.dtype if dtype is None else dtype)
        return self.laid_out(x)

    def integers(self, low, high, *shape):
        """Integers from `low` to below `high`, of any integer type."""
        x = self.rng.integers(low, max(high, low + 1), shape)
        return x.astype(self.choose("i8", "i8", "i4", "i2", "u1" if low >= 0 else "i8"))

    def broadcast(self, *shape):
        """A shape that broadcasts to this one: axes become 1, or are left out in front."""
        shape = tuple(n if self.chance(0.6) else 1 for n in shape)
        return shape[int(self.rng.integers(len(shape) + 1)) :] if self.chance(0.4) else shape

    def laid_out(self, x):
        """Copy x to another layout, now and then; more often it stays in plain memory."""
        how = self.rng.integers(20)
        if x.ndim == 0 or how > 8:
            return x
        if how == 0:  # rows apart
            wide = np.full((*x.shape[:-1], x.shape[-1] + 3), 7, x.dtype)
            wide[..., :-3] = x
            return wide[..., :-3]
        if how == 1:  # every second element
            return np.repeat(x, 2, axis=-1)[..., ::2]
        if how == 2 and x.ndim > 1:
            return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        if how == 3 and x.ndim > 2:  # as a projection leaves heads
            return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
        if how == 4:
            axis = int(self.rng.integers(x.ndim))
            return np.flip(np.flip(x, axis).copy(), axis)
        if how == 5:
            memory = np.empty(x.nbytes + 1, np.uint8)
            unaligned = memory[1:].view(x.dtype).reshape(x.shape)
            unaligned[...] = x
            return unaligned
        if how == 6 and x.dtype.isbuiltin == 1:
            return x.astype(x.dtype.newbyteorder())
        if how == 7:
            x.flags.writeable = False
        if how == 8 and x.dtype.isbuiltin == 1:
            return memoryview(x)
        return x

    def laid_out_to_write(self, x):
        """`x`, or rows of a larger array."""
        if x.ndim and self.chance(0.3):
            return np.repeat(x, 2, axis=0)[::2]
        return x

    def wrong(self, value):
        """A wrong value in place of `value`, which may by chance still be right."""
        if isinstance(value, memoryview):
            value = np.asarray(value)
        if isinstance(value, np.ndarray) and self.chance(0.75):
            with suppress(TypeError, ValueError, OverflowError):  # of types that do not become others
                return self.wrong_array(value)
        if isinstance(value, (bool, np.bool_)) and self.chance(0.5):
            return self.choose(0, 1, None, np.bool_(value), not value, "yes", np.array([value]))
        if isinstance(value, (int, np.integer)) and abs(value) < 2**63 and self.chance(0.7):
            return self.choose(
                -1, 0, 1, 2, 5, 13, 100, value + 1, value - 1, -value, float(value), np.int8(3), np.uint64(5),
                np.array(value), np.array([value]), 2**33 + 1, 2**63, -(2**63), 2**200, True, str(value)
            )  # fmt: skip
        if isinstance(value, (float, np.floating)) and self.chance(0.7):
            return self.choose(
                0, 0.0, -1.0, -value, 1e-30, 1e30, 1e300, 5e-324, np.nan, np.inf, -np.inf, np.float16(2),
                np.longdouble(2), np.array(value), np.array([value, value]), 10**400, 1j, str(value), False
            )  # fmt: skip
        if isinstance(value, str) and self.chance(0.6):
            return self.choose("", value.upper(), value + "x", value.encode(), [value], np.str_(value), "sum")
        if isinstance(value, (tuple, list)) and value and self.chance(0.7):
            at = int(self.rng.integers(len(value)))
            changed = [*value[:at], self.wrong(value[at]), *value[at + 1 :]]
            return self.choose(changed, tuple(changed), value[:-1], [*value, value[0]], value[::-1])
        if isinstance(value, dict) and value and self.chance(0.7):
            key = self.choose(*value)
            return {**value, self.choose(key, "other", 3): self.wrong(value[key])}
        return self.junk()

    def wrong_array(self, x):
        """An array of another shape, type or memory, or with other numbers in it."""
        axis = int(self.rng.integers(x.ndim)) if x.ndim else 0
        how = self.rng.integers(19)
        if how == 0:
            return x.astype(
                self.choose("f4", "f8", "f2", "i4", "i8", "u1", "?", "c8", "O", "S3", "longdouble")
            )
        if how == 1:
            narrow = self.choose(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
            return x.astype(np.float32).astype(narrow) if x.dtype.kind in "fV" else x
        if how == 2:
            return x[..., None] if self.chance(0.5) else x[None]
        if how == 3 and x.ndim:
            return x[(slice(None),) * axis + (0,)] if x.shape[axis] else x
        if how == 4 and x.ndim:
            return np.take(x, np.arange(x.shape[axis] - 1), axis) if x.shape[axis] else x
        if how == 5 and x.ndim:
            return np.concatenate([x, x], axis)
        if how == 6 and x.ndim:
            return np.take(x, [], axis)
        if how == 7:
            return x.T
        if how == 8 and x.size:
            return self.spotted(x)
        if how == 9:
            return x.tolist()
        if how == 10:
            return np.ma.masked_array(x)
        if how == 11:
            return np.broadcast_to(x, (2, *x.shape))
        if how == 12 and x.ndim:  # one element seen as many
            return np.broadcast_to(x.reshape(-1)[:1] if x.size else np.zeros(1, x.dtype), x.shape)
        if how == 13 and x.ndim:
            return x[(slice(None),) * axis + (slice(None, None, -1),)]
        if how == 14 and x.dtype.kind in "iu":
            with np.errstate(all="ignore"):
                return x + self.choose(1, -1, 2**33, 2**62)
        if how == 15 and x.dtype.kind == "b":
            return ~x
        if how == 16 and x.ndim == 2:
            return np.asmatrix(x)
        if how == 17:
            return np.array(x.reshape(-1)[0]) if x.size else x
        if how == 18:
            return x.view(Subclass)
        return self.laid_out(x.copy())

    def spotted(self, x):
        """A copy in which a few numbers are different."""
        x = np.array(x)
        if x.dtype.kind in "fV":
            least = ml_dtypes.finfo(x.dtype)
            value = self.choose(
                np.nan, np.inf, -np.inf, float(least.max), -float(least.max), float(least.tiny)
            )
        elif x.dtype.kind in "iu":
            value = self.choose(0, 1, np.iinfo(x.dtype).max, np.iinfo(x.dtype).min)
        else:
            return ~x if x.dtype == bool else x
        x.reshape(-1)[self.rng.integers(x.size)] = value
        return x

    def junk(self):
        return self.choose(
            None, True, 0, -1, 3, 2.5, np.nan, "x", "", b"x", 1j, [], (), {}, [[1.0], [1.0, 2.0]], [None],
            (1, 2, 3), NOTHING, Nothing, len, range(3), np.float32(1), np.zeros(0), Breaking(),
            np.zeros((2, 0, 3), np.float32), np.array("x"), np.array(None), np.datetime64("2020-01-01"),
            np.ones((1,) * 20, np.float32)
        )  # fmt: skip


class Subclass(np.ndarray):
    """A subclass of ndarray."""


class Nothing:
    """An object that is neither an array nor a number."""

    def __repr__(self):
        return "NOTHING"


NOTHING = Nothing()


class Breaking(Nothing):
    """An object like a tensor that cannot become an array."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no array of it")
