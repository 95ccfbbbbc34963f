"""neighborhood_attention, against the mask, which tests/masks holds against NATTEN's definition."""

import numpy as np
import pytest
from oracle import check, eps, expect

from fastattn import functional, masks
from fastattn._bench.cases import DTYPES, as_dtype
from fastattn.grad import vjp

# grid, kernel, dilation, causal: rows that do and do not fill strips, one axis to four.
CASES = [
    ((70,), (5,), 1, False),
    ((70,), (5,), (3,), (True,)),
    ((1,), (1,), 1, False),
    ((3, 5), (3, 3), 1, False),
    ((16, 20), (7, 7), 1, False),
    ((13, 70), (5, 6), 1, (False, True)),
    ((9, 33), (3, 33), 1, True),
    ((13, 21), (3, 4), (2, 3), False),
    ((4, 6, 10), (3, 3, 5), 1, False),
    ((3, 9, 8), (2, 3, 3), (1, 2, 2), (True, False, False)),
    ((2, 2, 5, 5), (2, 1, 3, 3), 1, False),
]


def inputs(grid, dtype, rng, batch=(2,), heads=(4, 2), dims=(12, 9)):
    """q, k and v on the grid. k and v are views of arrays with the heads last."""
    q = rng.standard_normal((*batch, heads[0], *grid, dims[0])).astype(as_dtype(dtype))
    k, v = (rng.standard_normal((*batch, *grid, heads[1], dim)).astype(as_dtype(dtype)) for dim in dims)
    return q, np.moveaxis(k, -2, len(batch)), np.moveaxis(v, -2, len(batch))


def flat(x, n):
    return x.reshape(*x.shape[: -1 - n], -1, x.shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_against_the_mask(case, dtype, implementation):
    grid, kernel, dilation, causal = case
    q, k, v = inputs(grid, dtype, np.random.default_rng(0))
    n, places = len(grid), int(np.prod(grid))
    attend = masks.neighborhood(grid, kernel, dilation, causal).to_array(places)
    expected = expect(*(flat(x, n) for x in (q, k, v)), mask=attend)
    how = {"kernel": kernel, "dilation": dilation, "causal": causal}
    out, lse = functional.neighborhood_attention(q, k, v, **how, return_lse=True)
    assert out.shape == (*q.shape[:-1], 9)
    assert lse.shape == q.shape[:-1]
    check((flat(out, n), lse.reshape(*lse.shape[:-n], -1)), expected, telling=False)
    np.testing.assert_array_equal(functional.neighborhood_attention(q, k, v, **how), out)


@pytest.mark.parametrize("batch", [(), (2, 1, 3)])
def test_options_and_batches(batch, implementation):
    rng = np.random.default_rng(1)
    q, k, v = inputs((6, 9), "float32", rng, batch)
    k, v = k[:1], v[:1] if batch else v  # broadcast
    if not batch:
        k = inputs((6, 9), "float32", np.random.default_rng(1), batch)[1]
    sinks = rng.standard_normal(4).astype(np.float32)
    attend = masks.neighborhood((6, 9), 3).to_array(54)
    options = {"scale": 0.2, "softcap": 2.0, "sinks": sinks}
    expected = expect(*(flat(x, 2) for x in (q, k, v)), mask=attend, **options)
    out, lse = functional.neighborhood_attention(q, k, v, kernel=(3, 3), **options, return_lse=True)
    check((flat(out, 2), lse.reshape(*lse.shape[:-2], -1)), expected)


def test_nan_shows_where_it_is_attended(implementation):
    q, k, v = inputs((12, 20), "float32", np.random.default_rng(2), (), (2, 2))
    clean = functional.neighborhood_attention(q, k, v, kernel=(5, 5))
    v[:, 6, 10] = np.nan
    out = functional.neighborhood_attention(q, k, v, kernel=(5, 5))
    hit = np.zeros((12, 20), bool)
    hit[4:9, 8:13] = True
    assert np.isnan(out[:, hit]).all()
    np.testing.assert_allclose(out[:, ~hit], clean[:, ~hit], atol=8 * eps(np.float32))


def test_threads_change_no_bit(implementation):
    q, k, v = inputs((12, 40), "float32", np.random.default_rng(3))
    one = functional.neighborhood_attention(q, k, v, kernel=(5, 7), num_threads=1)
    many = functional.neighborhood_attention(q, k, v, kernel=(5, 7), num_threads=5)
    np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"kernel": (5, 3)}, ValueError, r"neighborhood_attention\(\): kernel \(5, 3\)"),
        ({"kernel": 3}, ValueError, None),
        ({"kernel": ()}, ValueError, r"neighborhood_attention\(\): kernel is \(\)"),
        (
            {"kernel": (3, "3")},
            TypeError,
            r"neighborhood_attention\(\): kernel\[1\] is '3'; expected an integer",
        ),
        ({"kernel": (3, 3), "dilation": 2}, ValueError, "dilation"),
        ({"kernel": (3, 3), "causal": (True,)}, ValueError, "causal"),
        ({"kernel": (3, 3, 3, 3)}, ValueError, r"neighborhood_attention\(\): q has shape"),
        ({"kernel": (3, 3), "sinks": np.ones(3)}, ValueError, r"neighborhood_attention\(\): sinks"),
        ({"kernel": (3, 3), "scale": "a"}, TypeError, r"neighborhood_attention\(\): scale"),
        ({"kernel": (3, 3), "backend": "x"}, ValueError, r"neighborhood_attention\(\): backend"),
    ],
)
def test_errors(how, error, message):
    x = np.ones((2, 4, 5, 8), np.float32)
    if message is None:
        x = x[..., :2, :]  # a single axis of 2 places
    with pytest.raises(error, match=message):
        functional.neighborhood_attention(x, x, x, **how)


def test_grids_must_agree():
    q, k = np.ones((2, 4, 5, 8)), np.ones((2, 5, 5, 8))
    with pytest.raises(ValueError, match=r"neighborhood_attention\(\): k has shape \(2, 5, 5, 8\)"):
        functional.neighborhood_attention(q, k, k, kernel=(3, 3))
    nowhere = np.ones((2, 4, 0, 5, 8))
    with pytest.raises(ValueError, match=r"neighborhood_attention\(\): q has shape .*, of a grid"):
        functional.neighborhood_attention(nowhere, nowhere, nowhere, kernel=(1, 3))


def test_one_axis_with_sinks(implementation):
    rng = np.random.default_rng(4)
    q, k, v = inputs((10,), "float32", rng)
    sinks = rng.standard_normal(4).astype(np.float32)
    attend = masks.neighborhood(10, 3).to_array(10)
    out = functional.neighborhood_attention(q, k, v, kernel=3, sinks=sinks, return_lse=True)
    check(out, expect(q, k, v, mask=attend, sinks=sinks))


@pytest.mark.parametrize("shape", [(0, 2, 9, 4), (3, 0, 2, 9, 9, 4)])
def test_empty_batch(shape, implementation):
    x = np.ones(shape, np.float32)
    out, lse = functional.neighborhood_attention(
        x, x, x, kernel=(3,) * (len(shape) // 2 - 1), return_lse=True
    )
    assert out.shape == shape
    assert lse.shape == shape[:-1]
    out, pullback = vjp(functional.neighborhood_attention, x, x, x, kernel=(3,) * (len(shape) // 2 - 1))
    assert [dx.shape for dx in pullback(out)] == [shape] * 3
