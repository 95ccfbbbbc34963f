"""Formats of GGUF's tensors: blocks of numbers, each ``scale * code``, some plus a minimum.

A format is described once. Its fields say what lies where in a block; `parts` makes codes, scales and minima
of them, and a number is ``scale * code + minimum`` in float32, in this order, as in ggml. A format with a
writer is made of numbers, too: scales and minima are fitted to them, and they get the nearest codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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


class Parts(NamedTuple):
    """Numbers of n blocks: those of a block that share a scale lie side by side."""

    codes: Array  # (n, features), int8
    scales: Array  # (n, scales of a block), float32
    minima: Array | None = None  # as scales


class Format(NamedTuple):
    """A type of tensors in which `features` numbers of a row make a block."""

    name: str
    number: int  # as files say it
    features: int
    packed: str  # the type of packed weights that holds its codes
    block: int  # numbers that share a scale
    fields: np.dtype[Any]  # of a block
    parts: Callable[[Any], Parts]  # of blocks (n,), as `fields` says
    writer: Writer | None = None  # None: such blocks are only read

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.fields.itemsize

    @property
    def has_minima(self) -> bool:
        """Whether numbers are a minimum and a multiple of the scale."""
        return self.parts(np.zeros(1, self.fields)).minima is not None

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


def _float(x: Any) -> Array:
    """float16 (n,) as float32 (n, 1)."""
    found: Array = x.astype(np.float32)[:, None]
    return found


def _bits(x: Array, width: int, groups: int = 1) -> Array:
    """Fields of `width` bits of bytes (n, m): in each of `groups` the lowest of all bytes come first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    apart = x.reshape(len(x), groups, 1, -1) >> shifts & ((1 << width) - 1)
    return apart.reshape(len(x), -1).view(np.int8)


def _fifth(x: Array, groups: int = 1) -> Array:
    """Bits of bytes (n, m), times 16: in each of `groups` those of all bytes of lowest bits first."""
    return _bits(x, 1, groups) << 4


def _fifth_in_order(x: Array) -> Array:
    """Bits of bytes (n, m), byte by byte, times 16."""
    return np.unpackbits(x, axis=1, bitorder="little").view(np.int8) << 4


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of 6 bits, of twelve bytes (n, 12)."""
    low, middle, high = np.split(packed, 3, axis=1)
    scales = low & 63, high & 15 | low >> 2 & 48
    minima = middle & 63, high >> 4 | middle >> 2 & 48
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def _with_minima(b: Any, codes: Array, scales: Array, minima: Array) -> Parts:
    """Parts of blocks with a scale of their scales, and one of their minima, which are subtracted."""
    return Parts(codes, _float(b["d"]) * scales, -(_float(b["dmin"]) * minima))


def _q3_k(b: Any) -> Parts:
    codes = _bits(b["qs"], 2, 2) - ((1 - _bits(b["hmask"], 1)) << 2)
    low, high = _bits(b["scales"][:, :8], 4), _bits(b["scales"][:, 8:], 2)
    return Parts(codes, _float(b["d"]) * ((low | high << 4) - np.int8(32)))


def _q6_k(b: Any) -> Parts:
    codes = (_bits(b["ql"], 4, 2) | _bits(b["qh"], 2, 2) << 4) - np.int8(32)
    return Parts(codes, _float(b["d"]) * b["scales"])


def _iq4_xs(b: Any) -> Parts:
    low = _bits(b["scales_l"], 4, 4)
    high = (b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.int8)
    return Parts(IQ4[_bits(b["qs"], 4, 8)], _float(b["d"]) * ((low | high << 4) - np.int8(32)))


def _mxfp4(b: Any) -> Parts:
    scales = np.ldexp(np.float32(1), b["e"].astype(np.int32) - 128)[:, None]
    return Parts(_E2M1[_bits(b["qs"], 4)], scales)


def _format(
    name: str,
    number: int,
    features: int,
    packed: str,
    block: int,
    parts: Callable[[Any], Parts],
    **fields: tuple[str, int] | str,
) -> Format:
    kinds = [(key, kind) if isinstance(kind, str) else (key, *kind) for key, kind in fields.items()]
    return Format(name, number, features, packed, block, np.dtype(kinds), parts, WRITERS.get(name))


FORMATS = {
    x.name: x
    for x in (
        _format(
            "Q4_0", 2, 32, "int4", 32, lambda b: Parts(_bits(b["qs"], 4) - np.int8(8), _float(b["d"])),
            d=_FLOAT16, qs=(_BYTE, 16),
        ),
        _format(
            "Q4_1", 3, 32, "uint4", 32, lambda b: Parts(_bits(b["qs"], 4), _float(b["d"]), _float(b["m"])),
            d=_FLOAT16, m=_FLOAT16, qs=(_BYTE, 16),
        ),
        _format(
            "Q5_0", 6, 32, "q8", 32,
            lambda b: Parts((_bits(b["qs"], 4) | _fifth_in_order(b["qh"])) - np.int8(16), _float(b["d"])),
            d=_FLOAT16, qh=(_BYTE, 4), qs=(_BYTE, 16),
        ),
        _format(
            "Q5_1", 7, 32, "q8", 32,
            lambda b: Parts(_bits(b["qs"], 4) | _fifth_in_order(b["qh"]), _float(b["d"]), _float(b["m"])),
            d=_FLOAT16, m=_FLOAT16, qh=(_BYTE, 4), qs=(_BYTE, 16),
        ),
        _format(
            "Q8_0", 8, 32, "q8", 32, lambda b: Parts(b["qs"], _float(b["d"])),
            d=_FLOAT16, qs=(_SIGNED, 32),
        ),
        _format(
            "Q2_K", 10, 256, "uint4", 16,
            lambda b: _with_minima(b, _bits(b["qs"], 2, 2), b["scales"] & 15, b["scales"] >> 4),
            scales=(_BYTE, 16), qs=(_BYTE, 64), d=_FLOAT16, dmin=_FLOAT16,
        ),
        _format(
            "Q3_K", 11, 256, "int4", 16, _q3_k,
            hmask=(_BYTE, 32), qs=(_BYTE, 64), scales=(_BYTE, 12), d=_FLOAT16,
        ),
        _format(
            "Q4_K", 12, 256, "uint4", 32,
            lambda b: _with_minima(b, _bits(b["qs"], 4, 4), *_six_bits(b["scales"])),
            d=_FLOAT16, dmin=_FLOAT16, scales=(_BYTE, 12), qs=(_BYTE, 128),
        ),
        _format(
            "Q5_K", 13, 256, "q8", 32,
            lambda b: _with_minima(b, _bits(b["qs"], 4, 4) | _fifth(b["qh"]), *_six_bits(b["scales"])),
            d=_FLOAT16, dmin=_FLOAT16, scales=(_BYTE, 12), qh=(_BYTE, 32), qs=(_BYTE, 128),
        ),
        _format(
            "Q6_K", 14, 256, "q8", 16, _q6_k,
            ql=(_BYTE, 128), qh=(_BYTE, 64), scales=(_SIGNED, 16), d=_FLOAT16,
        ),
        _format(
            "IQ4_NL", 20, 32, "iq4", 32, lambda b: Parts(IQ4[_bits(b["qs"], 4)], _float(b["d"])),
            d=_FLOAT16, qs=(_BYTE, 16),
        ),
        _format(
            "IQ4_XS", 23, 256, "iq4", 32, _iq4_xs,
            d=_FLOAT16, scales_h="<u2", scales_l=(_BYTE, 4), qs=(_BYTE, 128),
        ),
        _format("MXFP4", 39, 32, "fp4", 32, _mxfp4, e=_BYTE, qs=(_BYTE, 16)),
    )
}  # fmt: skip
