"""Formats of GGUF's tensors: blocks of numbers, each ``scale * code``, some plus a minimum.

A format is described once. Its fields say what lies where in a block, and `Layout` what numbers they make:
the kernel that packs blocks of files reads it, too. A number is ``scale * code + minimum`` in float32, in
this order, as in ggml. A format with a writer is made of numbers, too: scales and minima are fitted to them,
and they get the nearest codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.coded import Bits, Integers, Layout, Parts
from fastattn._args.packed import FP4, IQ4
from fastattn._least_squares import nearest
from fastattn._writers import WRITERS, Writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._args.types import Array

_FLOAT16, _BYTE, _SIGNED = "<f2", "u1", "i1"
_PIECE = 1 << 18  # numbers that are encoded at once, by a few hundred calls of NumPy
_DAMPING = 0.01
_E2M1 = np.concatenate((FP4[8:], -FP4[8:]))  # the sign is the highest bit of a code


class Format(NamedTuple):
    """A type of tensors in which `features` numbers of a row make a block."""

    name: str
    number: int  # as files say it
    packed: str  # the type of packed weights that holds its codes
    fields: np.dtype[Any]  # of a block
    layout: Layout
    writer: Writer | None = None  # None: such blocks are only read

    @property
    def features(self) -> int:
        """Numbers of a block."""
        return self.layout.features

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.layout.nbytes

    def parts(self, blocks: Array) -> Parts:
        """Codes, scales and minima of blocks (n,), as `fields` says."""
        return self.layout.parts(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1, self.nbytes))

    def decoded(self, data: Array) -> Array:
        """Numbers of `data`, bytes of whole blocks end to end, as float32."""
        with np.errstate(all="ignore"):  # a scale may be anything
            codes, scales, minima = self.parts(data.view(self.fields))
            shared = codes.reshape(*scales.shape, -1)
            numbers = scales[..., None] * shared
            if minima is not None:
                numbers += minima[..., None]
        found: Array = numbers.reshape(-1)
        return found

    def encoded(self, rows: Array) -> Array:
        """Blocks (n, m), as `fields` says, of rows (n, m * features), with least squares of errors.

        The format has a writer. A ValueError says what is wrong with the numbers, after "has".
        """
        width = rows.shape[1]
        if width % self.features:
            raise ValueError(f"rows of {width} in {self.name}; expected multiples of {self.features}")
        blocks, numbers = np.zeros(rows.size // self.features, self.fields), rows.reshape(-1, self.features)
        step = _PIECE // self.features
        for begin in range(0, len(blocks), step):
            x = numbers[begin : begin + step].astype(np.float32)
            self.put(x, self.fitted(x, np.ones_like(x), blocks[begin : begin + step]))
        return blocks.reshape(len(rows), width // self.features)

    def compensated(self, rows: Array, feedback: Array) -> Array:
        """Blocks as of `encoded`, in which columns make up for the errors of those before them.

        `feedback` is what `feedback_of` makes of the inputs. The columns after one that errs by e change by
        ``-e * feedback[j, j + 1 :] / feedback[j, j]``, which leaves the least error of products.
        """
        assert self.writer is not None
        rest, size, features = rows.astype(np.float32), rows.shape[1] // self.features, self.features
        blocks, own = np.zeros((len(rows), size), self.fields), np.diag(feedback)
        if not np.isfinite(rest).all():
            raise ValueError(f"values that are not finite as {self.name}; expected finite ones")
        for i in range(size):
            here = slice(i * features, (i + 1) * features)
            x, b = rest[:, here].copy(), blocks[:, i].copy()
            _, scales, minima = self.parts(self.fitted(x, np.tile(own[here] ** -2, (len(x), 1)), b))
            shared = features // scales.shape[1]
            for j, step in enumerate(feedback[here, here]):
                scale = scales[:, j // shared, None]
                minimum = np.zeros_like(scale) if minima is None else minima[:, j // shared, None]
                column = x[:, j, None].copy()
                x[:, j, None] = scale * nearest(column, scale, minimum, *self.writer.codes) + minimum
                column -= x[:, j, None]
                column /= step[j]
                x[:, j + 1 :] -= column * step[j + 1 :]
                rest[:, i * features + j] = column[:, 0]
            rest[:, here.stop :] -= rest[:, here] @ feedback[here, here.stop :]
            self.put(x, b)
            blocks[:, i] = b
        return blocks

    def fitted(self, x: Array, w: Array, blocks: Array) -> Array:
        """The `blocks` (n,) with scales and minima for numbers x, with weights w, both (n, features)."""
        assert self.writer is not None
        with np.errstate(all="ignore"):  # what is not finite is refused
            self.writer.fit(x, w, blocks)
            _, scales, minima = self.parts(blocks)
        if not (
            np.isfinite(x).all()
            and np.isfinite(scales).all()
            and (minima is None or np.isfinite(minima).all())
        ):
            raise ValueError(f"values that are not finite as {self.name}; expected finite ones")
        return blocks

    def put(self, x: Array, blocks: Array) -> None:
        """Give numbers x (n, features) the nearest codes of the `blocks` (n,), which have scales."""
        assert self.writer is not None
        _, scales, minima = self.parts(blocks)
        shared = x.reshape(*scales.shape, -1)
        codes = nearest(
            shared, scales[..., None], 0.0 if minima is None else minima[..., None], *self.writer.codes
        )
        self.writer.put(blocks, codes.reshape(x.shape).astype(np.int8))


def feedback_of(moments: Array) -> Array:
    """U (n, n), upper, of sums x x^T of inputs x (n,): their inverse is U^T U (GPTQ, arXiv:2210.17323).

    An error e of a row of weights is one of e^T M e in products, where M are the sums. With some columns of e
    given, the rest that is best follows from the inverse of M without the rows and columns of those. A
    hundredth of the mean of M's diagonal is added to it, so that an inverse is there.
    """
    wide = moments.astype(float)
    mean = np.diag(wide).mean()
    wide /= mean or 1.0
    wide[np.diag_indices(len(wide))] += _DAMPING
    found: Array = np.linalg.cholesky(np.linalg.inv(wide)).T.astype(np.float32)
    return found


class _Fields:
    """Fields of a block, by whose names its bits are found."""

    def __init__(self, dtype: np.dtype[Any]):
        self._fields: Any = dtype.fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def at(self, name: str) -> int:
        """The first byte of a field."""
        return int(self._fields[name][1])

    def bits(self, name: str, width: int, groups: int = 1) -> Bits:
        """Numbers of `width` bits: in each of `groups` of bytes the lowest bits of all bytes come first."""
        each = self._fields[name][0].itemsize // groups
        firsts = [self.at(name) + i * each for i in range(groups)]
        return Bits(width, tuple((first, bit, each) for first in firsts for bit in range(0, 8, width)))


def _six_bits(at: int) -> dict[str, Integers]:
    """Eight scales and eight minima of 6 bits, in twelve bytes: the last four lend bits to half of each."""
    return {
        name: Integers(Bits(4, ((first, 0, 4), (at + 8, bit, 4))), Bits(2, ((first, 4, 4), (first, 6, 4))))
        for name, first, bit in (("scales", at, 0), ("minima", at + 4, 4))
    }


def _of_q2_k(f: _Fields) -> dict[str, Integers]:
    scales, minima = (Integers(Bits(4, (run,))) for run in f.bits("scales", 4).runs)
    return {"codes": Integers(f.bits("qs", 2, 2)), "scales": scales, "minima": minima}


def _format(
    name: str,
    number: int,
    features: int,
    packed: str,
    shared: int,
    integers: Callable[[_Fields], dict[str, Integers]],
    **fields: tuple[str, int] | str,
) -> Format:
    kinds = [(key, kind) if isinstance(kind, str) else (key, *kind) for key, kind in fields.items()]
    dtype = np.dtype(kinds)
    f = _Fields(dtype)
    minimum = next((f.at(name) for name in ("m", "dmin") if name in f), None)
    layout = Layout(
        features, dtype.itemsize, shared, unit=f.at("e" if "e" in f else "d"), exponent="e" in f,
        minimum=minimum, **integers(f),
    )  # fmt: skip
    return Format(name, number, packed, dtype, layout, WRITERS.get(name))


FORMATS = {
    x.name: x
    for x in (
        _format(
            "Q4_0", 2, 32, "int4", 32, lambda f: {"codes": Integers(f.bits("qs", 4), below=8)},
            d=_FLOAT16, qs=(_BYTE, 16),
        ),
        _format(
            "Q4_1", 3, 32, "uint4", 32, lambda f: {"codes": Integers(f.bits("qs", 4))},
            d=_FLOAT16, m=_FLOAT16, qs=(_BYTE, 16),
        ),
        _format(
            "Q5_0", 6, 32, "q8", 32,
            lambda f: {"codes": Integers(f.bits("qs", 4), f.bits("qh", 1, 4), below=16)},
            d=_FLOAT16, qh=(_BYTE, 4), qs=(_BYTE, 16),
        ),
        _format(
            "Q5_1", 7, 32, "q8", 32, lambda f: {"codes": Integers(f.bits("qs", 4), f.bits("qh", 1, 4))},
            d=_FLOAT16, m=_FLOAT16, qh=(_BYTE, 4), qs=(_BYTE, 16),
        ),
        _format(
            "Q8_0", 8, 32, "q8", 32, lambda f: {"codes": Integers(f.bits("qs", 8))},
            d=_FLOAT16, qs=(_SIGNED, 32),
        ),
        _format(
            "Q2_K", 10, 256, "uint4", 16, _of_q2_k,
            scales=(_BYTE, 16), qs=(_BYTE, 64), d=_FLOAT16, dmin=_FLOAT16,
        ),
        _format(
            "Q3_K", 11, 256, "int4", 16,
            lambda f: {
                "codes": Integers(f.bits("qs", 2, 2), f.bits("hmask", 1), below=4),
                "scales": Integers(f.bits("scales_l", 4), f.bits("scales_h", 2), below=32),
            },
            hmask=(_BYTE, 32), qs=(_BYTE, 64), scales_l=(_BYTE, 8), scales_h=(_BYTE, 4), d=_FLOAT16,
        ),
        _format(
            "Q4_K", 12, 256, "uint4", 32,
            lambda f: {"codes": Integers(f.bits("qs", 4, 4)), **_six_bits(f.at("scales"))},
            d=_FLOAT16, dmin=_FLOAT16, scales=(_BYTE, 12), qs=(_BYTE, 128),
        ),
        _format(
            "Q5_K", 13, 256, "q8", 32,
            lambda f: {
                "codes": Integers(f.bits("qs", 4, 4), f.bits("qh", 1)), **_six_bits(f.at("scales"))
            },
            d=_FLOAT16, dmin=_FLOAT16, scales=(_BYTE, 12), qh=(_BYTE, 32), qs=(_BYTE, 128),
        ),
        _format(
            "Q6_K", 14, 256, "q8", 16,
            lambda f: {
                "codes": Integers(f.bits("ql", 4, 2), f.bits("qh", 2, 2), below=32),
                "scales": Integers(f.bits("scales", 8)),
            },
            ql=(_BYTE, 128), qh=(_BYTE, 64), scales=(_SIGNED, 16), d=_FLOAT16,
        ),
        _format(
            "IQ4_NL", 20, 32, "iq4", 32, lambda f: {"codes": Integers(f.bits("qs", 4), table=IQ4)},
            d=_FLOAT16, qs=(_BYTE, 16),
        ),
        _format(
            "IQ4_XS", 23, 256, "iq4", 32,
            lambda f: {
                "codes": Integers(f.bits("qs", 4, 8), table=IQ4),
                "scales": Integers(f.bits("scales_l", 4, 4), f.bits("scales_h", 2, 2), below=32),
            },
            d=_FLOAT16, scales_h="<u2", scales_l=(_BYTE, 4), qs=(_BYTE, 128),
        ),
        _format(
            "MXFP4", 39, 32, "fp4", 32, lambda f: {"codes": Integers(f.bits("qs", 4), table=_E2M1)},
            e=_BYTE, qs=(_BYTE, 16),
        ),
    )
}  # fmt: skip
