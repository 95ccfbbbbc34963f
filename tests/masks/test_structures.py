"""Every structural mask of `cases.STRUCTURES`: alone and with every other option, on every implementation."""

import numpy as np
import pytest
from oracle import check, expect, spread_inputs

import fastattn
from fastattn._bench.cases import DTYPES, STRUCTURES, VARIANTS, Shape, combine

SELF = Shape("", batch=2, heads_q=4, heads_kv=2, len_q=197, len_k=197, head_dim=24)
CROSS = Shape("", batch=2, heads_q=4, heads_kv=1, len_q=70, len_k=300, head_dim=16, head_dim_v=11)
DECODE = Shape("", batch=2, heads_q=4, heads_kv=2, len_q=1, len_k=700, head_dim=16)
# The other variants that a mask can come with.
OTHERS = [name for name in VARIANTS if name not in ("plain", "mask", "padding_mask", "block_mask")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SELF, CROSS, DECODE], ids=["self", "cross", "decode"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_alone(name, shape, dtype, implementation):
    rng = np.random.default_rng(0)
    q, k, v = spread_inputs(shape, dtype, rng)
    mask = STRUCTURES[name](shape, rng)
    got = fastattn.attention(q, k, v, mask=mask, return_lse=True)
    check(got, expect(q, k, v, mask=mask), telling=False)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["streaming", "mixed_documents", "block_sparse", "dilated"])
def test_with_other_options(name, other, implementation):
    rng = np.random.default_rng(1)
    q, k, v = spread_inputs(CROSS, "float32", rng)
    arguments = combine((other,), CROSS, rng)
    if "kv_lengths" in arguments:
        arguments.setdefault("q_offset", 0)
    mask = STRUCTURES[name](CROSS, rng)
    got = fastattn.attention(q, k, v, mask=mask, return_lse=True, **arguments)
    check(got, expect(q, k, v, mask=mask, **arguments), telling=False)


def test_padding_needs_positions():
    """A structure counts from positions, and padded queries have no default position, as with causal."""
    rng = np.random.default_rng(2)
    q, k, v = spread_inputs(SELF, "float32", rng)
    with pytest.raises(ValueError, match="q_offset=0"):
        fastattn.attention(q, k, v, mask=STRUCTURES["streaming"](SELF, rng), kv_lengths=[9, 197])
