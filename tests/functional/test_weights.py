"""attention_weights: the probabilities themselves."""

import naive
import numpy as np
import pytest
from oracle import case, eps

import fastattn
from fastattn._bench.cases import DTYPES, VARIANTS, Shape, pairs

SHAPE = Shape("weights", batch=2, heads_q=4, heads_kv=2, len_q=21, len_k=70, head_dim=24)


def check(variants, dtype):
    this = case(SHAPE, variants, dtype)
    probs = fastattn.attention_weights(this.q, this.k, **this.arguments)
    _, _, expected, attend = naive.attention(this.q, this.k, this.v, **this.arguments)
    _, _, plain, _ = naive.attention(this.q, this.k, this.v, **this.arguments, dtype=this.q.dtype)
    assert probs.dtype == this.q.dtype
    assert np.median(expected[attend]) > 0
    tolerance = 2 * abs(plain.astype(float) - expected).max() + 4 * eps(probs.dtype)
    np.testing.assert_allclose(probs.astype(float), expected, rtol=0, atol=tolerance)
    assert (probs[~attend] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_alone(variant, dtype):
    check((variant,), dtype)


@pytest.mark.parametrize("pair", pairs(), ids="+".join)
def test_pairwise(pair):
    check(pair, "float32")


def test_rows_sum_to_one_or_with_a_sink_to_less():
    q, k = (x.astype(float) for x in case(SHAPE, ("plain",), "float32")[:2])
    mask = np.arange(21)[:, None] != 3
    sums = fastattn.attention_weights(q, k, mask=mask).sum(-1)
    np.testing.assert_allclose(sums, np.broadcast_to(mask[:, 0], sums.shape), rtol=1e-14)
    sums = fastattn.attention_weights(q, k, sinks=np.zeros(4)).sum(-1)
    assert ((sums > 0.5) & (sums < 1)).all()


def test_shapes():
    q, k = np.ones((3, 8)), np.ones((5, 8))
    assert fastattn.attention_weights(q, k).shape == (3, 5)
    assert fastattn.attention_weights(q[None], k[None]).shape == (1, 3, 5)
    assert fastattn.attention_weights(q[:0], k).shape == (0, 5)
    assert fastattn.attention_weights(q, k[:0]).shape == (3, 0)
    assert fastattn.attention_weights(np.ones((2, 4, 3, 8)), np.ones((2, 2, 5, 8))).shape == (2, 4, 3, 5)


def test_they_are_what_attention_averages_with():
    this = case(SHAPE, ("causal", "sinks"), "float64")
    probs = fastattn.attention_weights(this.q, this.k, **this.arguments)
    out = probs @ np.repeat(this.v, 2, axis=1)
    np.testing.assert_allclose(out, fastattn.attention(this.q, this.k, this.v, **this.arguments), rtol=1e-12)


def test_scores_computed_as_minus_infinity_are_no_mask():
    """As in attention, attended keys of NaN give NaN, and what is masked stays 0."""
    q, k = np.full((2, 2), -1e30, np.float32), np.full((3, 2), 1e30, np.float32)
    mask = np.array([[True, True, False], [False, False, False]])
    probs = fastattn.attention_weights(q, k, mask=mask)
    np.testing.assert_array_equal(probs, [[np.nan, np.nan, 0], [0, 0, 0]])
    np.testing.assert_array_equal(fastattn.attention(q, k, k, mask=mask), [[np.nan] * 2, [0] * 2])
    assert (fastattn.attention_weights(q, k, sinks=np.zeros(1)) == 0).all()
