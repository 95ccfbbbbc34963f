"""Formats of GGUF's tensors: blocks of numbers, each ``scale * code``, some plus a minimum.

A format is described once. Its fields say what lies where in a block, and `Layout` what numbers they make:
the kernel that packs blocks of files reads it, too. A number is ``scale * code + minimum`` in float32, in
this order, as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.coded import Bits, Integers, Layout, Parts
from fastattn._args.types import Array
from fastattn._args.weight_types import FP4, IQ4

_FLOAT16, _BYTE, _SIGNED = "<f2", "u1", "i1"
_E2M1 = np.concatenate((FP4[8:], -FP4[8:]))  # the sign is the highest bit of a code


class Format(NamedTuple):
    """A type of tensors in which `features` numbers of a row make a block."""

    name: str
    number: int  # as files say it
    packed: str  # the type of packed weights that holds its codes
    fields: np.dtype[Any]  # of a block
    layout: Layout

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
    return Format(name, number, packed, dtype, layout)


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
