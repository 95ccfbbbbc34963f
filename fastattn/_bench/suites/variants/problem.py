"""The problems of the suite "variants", and which of them are measured."""

from __future__ import annotations

import numpy as np

from fastattn._bench.cases import Array, as_dtype, shape_of
from fastattn._bench.suite import CallProblem, Request, Section
from fastattn._bench.suites.variants.calls import CALLS, Call, Inputs
from fastattn._engine import settings


class VariantProblem(CallProblem):
    """A shape whose lengths are equal and whose number of heads is even."""

    @property
    def name(self) -> str:
        return self.variant

    def call(self, dtype: str | None = None) -> Call:
        """The call on inputs in `dtype`, whose values are those that the problem's own dtype holds."""
        held, wanted = as_dtype(self.dtype), as_dtype(dtype or self.dtype)
        rng = self.rng(1)

        def draw(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32).astype(held).astype(wanted)

        q, k, v = (x.astype(wanted) for x in self.arrays())
        return CALLS[self.variant](Inputs(self.shape, q, k, v, draw))

    def reference(self) -> tuple[Array, Array]:
        """All rows, by the fallback in float64; the tests compare the fallback with the formulas."""
        with settings.forced(backend="numpy"):
            out = self.call("float64")()
        out = out.reshape(-1, out.shape[-1])
        return np.arange(len(out)), out

    @property
    def work(self) -> float:
        """Operations of plain attention with this shape, so that rates compare as times do."""
        return self.shape.flops


LONG = shape_of(1, 8, 2048, 2048, 64)
SHORT = shape_of(8, 12, 128, 128, 64)


def plan(request: Request) -> list[Section]:
    """The first variants on a long text, or with `full` all variants on a long text and on short ones."""
    dtype = request.dtype or "float32"
    shapes, names = ((LONG, SHORT), list(CALLS)) if request.full else ((LONG,), list(CALLS)[:8])
    return [request.section(VariantProblem, shape.name, [shape], dtype, names) for shape in shapes]
