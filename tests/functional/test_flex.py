"""flex_attention with a function of the scores, against the definition with an equal bias."""

import numpy as np
import pytest
from oracle import check, expect

import fastattn
from fastattn import functional, masks
from fastattn._bench.cases import DTYPES, Shape, make_inputs

SHAPE = Shape("", 2, 6, 2, 70, 1100, 24, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_a_bias(dtype):
    rng = np.random.default_rng(0)
    q, k, v = make_inputs(SHAPE, dtype, rng)
    i, j = np.arange(70)[:, None] + 1030, np.arange(1100)
    b, h = np.arange(2)[:, None, None, None], np.arange(6)[:, None, None]
    bias = (np.sin(i + 3 * h) * np.cos(j) * (1 + b)).astype(np.promote_types(np.float32, q.dtype))
    bias[..., 100:130] = -np.inf

    def score_mod(scores, b, h, i, j):
        return np.where((j >= 100) & (j < 130), -np.inf, scores + (np.sin(i + 3 * h) * np.cos(j) * (1 + b)))

    mask = masks.window(900) | masks.first_keys(3)
    got = functional.flex_attention(q, k, v, score_mod=score_mod, mask=mask, scale=0.3, return_lse=True)
    check(got, expect(q, k, v, bias=bias, mask=mask, scale=0.3))


def test_what_it_hides_never_shows():
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(1))
    v[:, :, :40] = np.nan
    out = functional.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: np.where(j < 40, -np.inf, s))
    np.testing.assert_allclose(out, fastattn.attention(q, k[:, :, 40:], v[:, :, 40:]), atol=1e-6)
    out = functional.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: -np.inf)
    assert (out == 0).all()


def test_without_a_function(implementation):
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(2))
    out = functional.flex_attention(q, k, v, mask=masks.causal(), q_offset=4)
    np.testing.assert_array_equal(out, fastattn.attention(q, k, v, causal=True, q_offset=4))


def test_positions_of_each_sequence():
    q = np.ones((2, 3, 5, 4))
    seen = []
    functional.flex_attention(
        q, q, q, q_offset=[3, 7], score_mod=lambda s, b, h, i, j: seen.append((b, h.ravel(), i.ravel())) or s
    )
    assert [b for b, _, _ in seen] == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal([h for _, h, _ in seen], [[0], [1], [2]] * 2)
    np.testing.assert_array_equal(seen[0][2], 3 + np.arange(5))
    np.testing.assert_array_equal(seen[3][2], 7 + np.arange(5))


def test_errors():
    q = np.ones((2, 5, 4))
    with pytest.raises(TypeError, match=r"flex_attention\(\): score_mod is of type int"):
        functional.flex_attention(q, q, q, score_mod=3)
    with pytest.raises(TypeError, match=r"flex_attention\(\): mask has dtype"):
        functional.flex_attention(q, q, q, mask=np.ones((5, 5)))
    assert functional.flex_attention(q[:, :0], q, q, score_mod=lambda s, *_: s).shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (None, TypeError, "is None"),
        (1j, TypeError, "has dtype complex128"),
        (True, TypeError, "has dtype bool"),
        (np.ones(7), ValueError, r"has shape \(7,\)"),
        (np.ones((1, 1, 1, 5)), ValueError, r"has shape \(1, 1, 1, 5\)"),
    ],
)
def test_what_the_function_returns_is_checked(found, error, message):
    q = np.ones((2, 5, 4))
    with pytest.raises(error, match=r"^flex_attention\(\): what score_mod returns " + message):
        functional.flex_attention(q, q, q, score_mod=lambda *_: found)
