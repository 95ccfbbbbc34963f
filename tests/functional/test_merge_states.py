"""merge_states: partial results over disjoint keys make the whole; test_properties.py splits every option."""

from itertools import pairwise

import numpy as np
import pytest
from oracle import assert_same_bits, check, expect, spread_inputs

import fastattn
from fastattn._bench.cases import DTYPES, Shape

SHAPE = Shape("merge", batch=2, heads_q=4, heads_kv=2, len_q=21, len_k=90, head_dim=24)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, **arguments, return_lse=True)


def inputs(dtype="float32"):
    return spread_inputs(SHAPE, dtype, np.random.default_rng(0))


@every_dtype
@pytest.mark.parametrize("edges", [(0, 90), (0, 45, 90), (0, 1, 2, 90), (0, 0, 30, 30, 90, 90)], ids=str)
def test_parts_make_the_whole(edges, dtype, implementation):
    q, k, v = inputs(dtype)
    parts = [attention(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(edges)]
    outs, lses = zip(*parts, strict=True)
    got = fastattn.merge_states(outs, lses)
    check(got, expect(q, k, v))
    assert got[0].dtype == q.dtype
    assert_same_bits(fastattn.merge_states(np.stack(outs), np.stack(lses)), got)


def test_one_part_is_itself():
    out, lse = attention(*inputs())
    assert_same_bits(fastattn.merge_states([out], [lse]), (out, lse))


def test_parts_that_attend_nothing_have_no_weight():
    out, lse = (x.copy() for x in attention(*inputs()))
    nothing = np.full(out.shape, np.nan, np.float32), np.full(lse.shape, -np.inf, np.float32)
    assert_same_bits(fastattn.merge_states([nothing[0], out], [nothing[1], lse]), (out, lse))
    merged = fastattn.merge_states([nothing[0]] * 3, [nothing[1]] * 3)
    assert (merged[0] == 0).all()
    assert (merged[1] == -np.inf).all()


def test_lses_of_any_size():
    out = np.stack([np.full((3, 8), 1.0), np.full((3, 8), 3.0)])
    lse = np.array([[1e4, -1e4, 700.0], [1e4, 1e4, -700.0]])
    merged, merged_lse = fastattn.merge_states(out, lse)
    np.testing.assert_allclose(merged, np.repeat([[2.0], [3.0], [1.0]], 8, axis=1))
    np.testing.assert_allclose(merged_lse, [1e4 + np.log(2), 1e4, 700])


def test_nan_propagates_to_its_own_row():
    out, lse = attention(*inputs())
    broken, broken_lse = out.copy(), lse.copy()
    broken[0, 0, 3, 2] = broken_lse[1, 1, 4] = np.nan
    merged, merged_lse = fastattn.merge_states([out, broken], [lse, broken_lse])
    assert np.isnan(merged[0, 0, 3, 2])
    assert np.isnan(merged[1, 1, 4]).all()
    assert np.isnan(merged).sum() == 1 + out.shape[-1]
    assert np.isnan(merged_lse).sum() == 1


def test_inputs_are_not_written():
    out, lse = attention(*inputs())
    outs, lses = [out, out[:, :, ::-1]], [lse, lse[:, :, ::-1]]
    for array in (out, lse):
        array.flags.writeable = False
    merged = fastattn.merge_states(outs, lses)
    assert all(array.flags.writeable for array in merged)


def test_a_prefix_that_all_sequences_share(implementation):
    """Their queries as rows of one sequence attend it: as in docs/attention.md."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((9, 6, 1, 16), np.float32)
    prefix, own = (
        rng.standard_normal((2, 1, 2, 70, 16), np.float32),
        rng.standard_normal((2, 9, 2, 11, 16), np.float32),
    )
    shared, shared_lse = fastattn.attention(q.transpose(2, 1, 0, 3), *prefix, return_lse=True)
    rest, rest_lse = fastattn.attention(q, *own, return_lse=True)
    merged = fastattn.merge_states(
        [shared.transpose(2, 1, 0, 3), rest], [shared_lse.transpose(2, 1, 0), rest_lse]
    )
    keys = [np.concatenate([np.repeat(x, 9, axis=0), y], axis=2) for x, y in zip(prefix, own, strict=True)]
    for found, whole in zip(merged, fastattn.attention(q, *keys, return_lse=True), strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
