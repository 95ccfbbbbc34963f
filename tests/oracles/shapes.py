"""Shapes at which tests of attention meet every kernel, and cases of them in every dtype."""

from itertools import product

import pytest

from fastattn._bench.cases import DTYPES, Shape

# Many query rows a head, and one; keys over several blocks; and what is several blocks in the fallback, too.
PREFILL = Shape("prefill", batch=2, heads_q=4, heads_kv=2, len_q=45, len_k=200, head_dim=24)
DECODE = Shape("decode", batch=2, heads_q=2, heads_kv=2, len_q=1, len_k=1500, head_dim=24)
BLOCKS = Shape("blocks", batch=2, heads_q=16, heads_kv=2, len_q=70, len_k=600, head_dim=8)

SHAPES = [PREFILL, DECODE, BLOCKS]
# BLOCKS is there for the fallback, whose blocks do not depend on the dtype, and takes the longest.
CASES = [*product([PREFILL, DECODE], DTYPES), (BLOCKS, "float32"), (BLOCKS, "bfloat16")]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
every_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda x: getattr(x, "name", x))

# Few rows per KV head (the dot kernel) and many; one split or part of the keys and several; groups that
# divide a tile's rows and that do not; tails of everything.
EDGES = {
    "one query": Shape("", 2, 3, 3, 1, 1100, 24, 17),
    "few rows": Shape("", 1, 4, 2, 3, 130, 9),
    "one row block": Shape("", 2, 2, 1, 9, 1100, 16),
    "self": Shape("", 1, 4, 4, 131, 131, 33, 20),
    "grouped": Shape("", 2, 10, 2, 70, 300, 8, 8),
}
