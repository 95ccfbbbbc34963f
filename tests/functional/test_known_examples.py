"""Two worked examples that people know, to the digits that they are printed with."""

import numpy as np
import pytest

import fastattn

DTYPES = ("float32", "float64")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_dtype
def test_four_tokens_as_columns(dtype, implementation):
    """Columns a1..a4; the scores of q1 with k1..k4 are 16, 20, 41 and 37."""
    a = np.array([(1, 0, 1), (1, 2, 0), (3, 1, 1), (2, 1, 2)], dtype).T
    w_q = np.array([[3, 2, 0], [1, 1, 2], [2, 1, 0]], dtype)
    w_k = np.array([[1, 0, 1], [1, 1, 1], [2, 1, 0]], dtype)
    q, k = (w_q @ a).T, (w_k @ a).T
    scores = np.array([16, 20, 41, 37], float)
    probs = np.exp(scores - 41) / np.exp(scores - 41).sum()
    # With an identity for V, the output is the probabilities.
    out, lse = fastattn.attention(q, k, np.eye(4, dtype=dtype), scale=1, return_lse=True)
    np.testing.assert_allclose(out[0], probs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.log(out[0]) + lse[0], scores, rtol=1e-6)
    np.testing.assert_allclose(fastattn.attention_weights(q, k, scale=1)[0], probs, rtol=0, atol=1e-6)


INPUT = [[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]]
W_K = [[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]]
W_Q = [[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]]
W_V = [[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]]
PROBS = [
    [0.1361257976, 0.4319371012, 0.4319371012],
    [0.0008904474, 0.9088426472, 0.0902669054],
    [0.0074448924, 0.7547075806, 0.2378475270],
]
OUT = [
    [1.8638742024, 6.3193710122, 1.7041886963],
    [1.9991095526, 7.8141235049, 0.2734720584],
    [1.9925551076, 7.4796355918, 0.7358772581],
]


@every_dtype
def test_three_tokens_as_rows(dtype, implementation):
    x, w_q, w_k, w_v = (np.array(matrix, dtype) for matrix in (INPUT, W_Q, W_K, W_V))
    tolerance = 1e-6 if dtype == "float32" else 1e-10
    out = fastattn.attention(x @ w_q, x @ w_k, x @ w_v)  # the scale is 1 / sqrt(3) by default
    np.testing.assert_allclose(out, OUT, rtol=0, atol=tolerance)
    probs = fastattn.attention_weights(x @ w_q, x @ w_k, scale=1 / np.sqrt(3))
    np.testing.assert_allclose(probs, PROBS, rtol=0, atol=tolerance)
    out = fastattn.scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v)
    np.testing.assert_allclose(out, OUT, rtol=0, atol=tolerance)
