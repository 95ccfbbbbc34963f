"""What models keep of their tensors: packed linear maps, vectors, tables of token vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args import lane_dtype
from fastattn.models.files import require
from fastattn.packed import from_bfloat16_bits

if TYPE_CHECKING:
    from fastattn._args import Array, Ints
    from fastattn.packed import PackedLinear

DTYPES = ("float32", "float64", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Precision:
    """In what a model computes between its layers, and how it keeps their weights."""

    dtype: np.dtype[Any]
    weights: str

    @classmethod
    def of(cls, func: str, dtype: str, weights_dtype: str | None) -> Precision:
        """From the names that a caller gives."""
        if dtype not in DTYPES:
            raise ValueError(f"{func}(): dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
        weights = dtype if weights_dtype is None else weights_dtype
        fitting = ("float64",) if dtype == "float64" else WEIGHT_DTYPES
        if weights not in fitting:
            raise ValueError(
                f"{func}(): weights_dtype is {weights!r}; expected {' or '.join(fitting)} for dtype {dtype}"
            )
        return cls(np.dtype(require("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype), weights)

    def pack(self, weight: Array, gate: Array | None = None) -> PackedLinear:
        """The weight of a linear map (out, in), or of a gated pair, as `ops.linear` takes it."""
        return ops.pack(weight, gate=gate, dtype=self.weights)

    def vector(self, *parts: Array) -> Array:
        """Biases or a norm's weights, end to end, in the type that the kernels compute in."""
        return np.concatenate(parts).astype(lane_dtype(self.dtype))


def token_rows(table: Array | PackedLinear, ids: Ints, dtype: np.dtype[Any]) -> Array:
    """The vectors of tokens `ids` (n,), (n, features) in `dtype`, from a table or from a packed output layer.

    Where a model ties its output layer to its embedding, the packed weight is the only copy of both.
    """
    if isinstance(table, np.ndarray):
        return ops.embedding(ids, table).astype(dtype, copy=False)
    panel, column = np.divmod(ids, table.panels.shape[2])
    rows = table.panels[panel, :, column]
    if table.dtype == "bfloat16":
        rows = from_bfloat16_bits(rows.reshape(len(ids), -1)[:, : table.in_features])
    elif table.scales is not None:
        rows = rows * table.scales[panel, column][:, None]
    return rows.astype(dtype, copy=False)
