"""Every option of attention() alone and with every other, in every dtype, on every implementation."""

import inspect

import numpy as np
import pytest
from oracle import case, check

import fastattn
from fastattn._bench.cases import DTYPES, VARIANTS, Shape, pairs
from fastattn._engine import dispatch

# Neither a length nor a head dimension fits a vector or a tile; keys span several blocks.
CROSS = Shape("cross", batch=2, heads_q=4, heads_kv=2, len_q=37, len_k=200, head_dim=24, head_dim_v=20)
SQUARE = Shape("square", batch=2, heads_q=3, heads_kv=3, len_q=67, len_k=67, head_dim=16)
DECODE = Shape("decode", batch=2, heads_q=6, heads_kv=2, len_q=1, len_k=1100, head_dim=40)
LONGER_Q = Shape("longer_q", batch=1, heads_q=2, heads_kv=1, len_q=90, len_k=50, head_dim=33)
SHAPES = [CROSS, SQUARE, DECODE, LONGER_Q]
# Several blocks of queries and of keys even in the fallback, whose blocks are large.
LARGE = Shape("large", batch=1, heads_q=2, heads_kv=1, len_q=600, len_k=1100, head_dim=16)


def run(case):
    return fastattn.attention(case.q, case.k, case.v, **case.arguments, return_lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_alone(shape, variant, dtype, implementation):
    this = case(shape, (variant,), dtype)
    check(run(this), this.expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_alone_in_many_blocks(variant, dtype, implementation):
    this = case(LARGE, (variant,), dtype)
    check(run(this), this.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", pairs(), ids="+".join)
def test_pairwise(pair, dtype, implementation):
    this = case(CROSS, pair, dtype)
    check(run(this), this.expected)


@pytest.mark.parametrize("pair", pairs(), ids="+".join)
def test_pairwise_one_query(pair, implementation):
    this = case(DECODE, pair, "float32")
    check(run(this), this.expected)


@pytest.mark.parametrize("option", [
    name for name, x in inspect.signature(fastattn.attention).parameters.items() if x.default is not x.empty
])  # fmt: skip
def test_a_call_with_an_option_is_not_plain(option, monkeypatch):
    monkeypatch.delattr(dispatch, "plain_attention")
    x = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises((TypeError, ValueError), match=option):
        fastattn.attention(x, x, x, **{option: object()})
