"""How models keep their tensors: in which types, vectors, tables of token vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args.dtypes import dtype_choice
from fastattn._args.ops import integer_activations
from fastattn.models._files import require

if TYPE_CHECKING:
    from fastattn._args.packed import PackedLinear
    from fastattn._args.types import Array, Ints, Rounding

DTYPES = ("float32", "float64", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16", "int8", "int4", "nf4")


@dataclass(frozen=True, slots=True)
class Precision:
    """The type between a model's layers, how it keeps their weights, and what it rounds their inputs to."""

    dtype: np.dtype[Any]
    weights: str
    activations: Rounding | None

    @classmethod
    def of(cls, func: str, dtype: Any, weights_dtype: Any, activations: Any) -> Precision:
        """From the names or types that a caller gives."""
        name = dtype_choice(func, "dtype", dtype, DTYPES)
        fitting = ("float64",) if name == "float64" else WEIGHT_DTYPES
        weights = name if weights_dtype is None else weights_dtype
        hint = "" if name == "float64" else "; float64 comes with dtype='float64'"
        weights = dtype_choice(func, "weights_dtype", weights, fitting, f" for dtype {name}{hint}")
        integer_activations(func, activations, weights)
        kind = np.dtype(require("ml_dtypes").bfloat16 if name == "bfloat16" else name)
        return cls(kind, weights, activations)

    def __str__(self) -> str:
        kept = "" if self.weights == self.dtype.name else f", weights in {self.weights}"
        rounded = "" if self.activations is None else f", activations in {self.activations}"
        return f"{self.dtype}{kept}{rounded}"


def token_rows(table: Array | PackedLinear, ids: Ints, dtype: np.dtype[Any]) -> Array:
    """The vectors (n, features), in `dtype`, of tokens `ids` (n,).

    `table` is the packed weight of the output layer where a model uses it for its tokens, too.
    """
    if isinstance(table, np.ndarray):
        return ops.embedding(ids, table).astype(dtype, copy=False)
    return table.rows(ids).astype(dtype, copy=False)
