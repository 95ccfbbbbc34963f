"""Shapes at which tests of attention meet every kernel, and cases of them in every dtype."""

from itertools import product

import pytest

from fastattn._bench.cases import DTYPES, Shape

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


# Several blocks in the fallback, too, whose blocks do not depend on the dtype; it takes the longest.
BLOCKS = Shape("blocks", batch=2, heads_q=16, heads_kv=2, len_q=70, len_k=600, head_dim=8)


def by_shape(*shapes):
    return pytest.mark.parametrize("shape", [*shapes, BLOCKS], ids=lambda shape: shape.name)


def by_case(*shapes, more=()):
    """Parametrize by these shapes in every dtype, by BLOCKS in two, and by `more` pairs."""
    cases = [*product(shapes, DTYPES), (BLOCKS, "float32"), (BLOCKS, "bfloat16"), *more]
    return pytest.mark.parametrize(("shape", "dtype"), cases, ids=lambda x: getattr(x, "name", x))


# Few rows per KV head (the dot kernel) and many; one split or part of the keys and several; groups that
# divide a tile's rows and that do not; tails of everything.
EDGES = {
    "one query": Shape("", 2, 3, 3, 1, 1100, 24, 17),
    "few rows": Shape("", 1, 4, 2, 3, 130, 9),
    "one row block": Shape("", 2, 2, 1, 9, 1100, 16),
    "self": Shape("", 1, 4, 4, 131, 131, 33, 20),
    "grouped": Shape("", 2, 10, 2, 70, 300, 8, 8),
}
