"""Deformable attention and its gradients against their definition in float64, on every implementation."""

import deformable as oracle
import ml_dtypes
import numpy as np
import precisions
import pytest
from differences import assert_gradient
from precisions import EPS, lane

from fastattn.functional import deformable_attention
from fastattn.grad import vjp

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16]
LEVELS = [(7, 5), (3, 6), (1, 1)]
NAMES = ("dv", "dlocations", "dweights")


def problem(levels=LEVELS, heads=2, queries=9, points=6, head_dim=20, dtype=np.float32, batch=(2,), seed=0):
    rng = np.random.default_rng(seed)
    lane = np.float64 if dtype == np.float64 else np.float32
    length = sum(height * width for height, width in levels)
    v = rng.standard_normal((*batch, heads, length, head_dim)).astype(dtype)
    locations = rng.uniform(-0.3, 1.3, (*batch, heads, queries, points, 2)).astype(lane)
    weights = rng.standard_normal((*batch, heads, queries, points)).astype(lane)
    return v, levels, locations, weights


def close(got, expected, dtype, most, factor=8):
    """To rounding in the lane type of sums whose terms add up to `most`, and once in the dtype."""
    precisions.close(got, expected, factor * EPS[lane(dtype)] * most, dtype)


def most_of(v, levels, weights):
    """Bound of a result's terms, times a side of the levels: a location's rounding is times that."""
    sides = max(1, *(max(level) for level in levels))
    return np.abs(v.astype(np.float64)).max(initial=0) * np.abs(weights).sum(-1).max(initial=0) * sides


@pytest.mark.parametrize("mode", ["bilinear", "discrete"])
@pytest.mark.parametrize("head_dim", [1, 3, 4, 16, 31, 32, 64, 100])
@pytest.mark.parametrize("points", [3, 6, 63, 66, 135])
def test_sizes(implementation, points, head_dim, mode):
    arrays = problem(points=points, head_dim=head_dim)
    expected = oracle.attention(*arrays, mode=mode)
    got = deformable_attention(*arrays, mode=mode)
    close(got, expected, np.float32, most_of(arrays[0], LEVELS, arrays[3]))


@pytest.mark.parametrize(
    "levels", [[(1, 1)], [(4, 0), (3, 2)], [(0, 0)], [(1, 9), (9, 1)], [(40, 50)]], ids=str
)
@pytest.mark.parametrize("queries", [0, 1, 33])
@pytest.mark.parametrize("mode", ["bilinear", "discrete"])
def test_levels(implementation, levels, queries, mode):
    arrays = problem(levels, queries=queries)
    out, pullback = vjp(deformable_attention, *arrays, mode=mode)
    most = most_of(arrays[0], levels, arrays[3])
    close(out, oracle.attention(*arrays, mode=mode), np.float32, most)
    for got, want in zip(pullback(out), oracle.gradients(out, *arrays, mode=mode), strict=True):
        close(got, want, np.float32, 20 * max(1, most) ** 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "discrete"])
@pytest.mark.parametrize("counts", [None, [4, 0, 2], [1, 5, 70]], ids=str)
def test_dtypes_and_gradients(implementation, dtype, mode, counts):
    points = 6 if counts is None else sum(counts)
    arrays = problem(points=points, dtype=dtype, queries=40)
    v, levels, locations, weights = arrays
    options = {"num_points": counts, "mode": mode}
    out, pullback = vjp(deformable_attention, *arrays, **options)
    most = most_of(v, levels, weights)
    close(out, oracle.attention(*arrays, **options), dtype, most)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(dtype)
    expected = oracle.gradients(dout, *arrays, **options)
    most *= np.abs(dout.astype(float)).max() * 20 * 7
    for name, got, want, like in zip(NAMES, pullback(dout), expected, (v, locations, weights), strict=True):
        close(got, want, like.dtype, most)
        assert np.abs(want).max() > 0 or (mode, name) == ("discrete", "dlocations")
        (alone,) = vjp(deformable_attention, *arrays, **options)[1](dout, need=(name,))
        np.testing.assert_array_equal(alone, got)


def test_gradients_are_those_of_finite_differences(implementation):
    v, levels, locations, weights = problem(queries=3, head_dim=2, dtype=np.float64, batch=())
    out, pullback = vjp(deformable_attention, v, levels, locations, weights)
    dout = np.random.default_rng(1).standard_normal(out.shape)
    dv, dlocations, dweights = pullback(dout)
    assert_gradient(dv, lambda x: deformable_attention(x, levels, locations, weights), v, dout)
    assert_gradient(dlocations, lambda x: deformable_attention(v, levels, x, weights), locations, dout)
    assert_gradient(dweights, lambda x: deformable_attention(v, levels, locations, x), weights, dout)


def test_heads_within_tokens_are_read_in_place_and_give_the_same_bits(implementation):
    v, levels, locations, weights = problem(head_dim=16)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (v, locations, weights)]
    out, pullback = vjp(deformable_attention, v, levels, locations, weights)
    again, pullback_again = vjp(deformable_attention, turned[0], levels, *turned[1:])
    np.testing.assert_array_equal(again, out)
    assert again.swapaxes(1, 2).flags.c_contiguous
    for dx, dy in zip(pullback(out), pullback_again(out), strict=True):
        np.testing.assert_array_equal(dy, dx)
        assert dy.swapaxes(1, 2).flags.c_contiguous


def test_any_strides_types_and_byte_order(implementation):
    v, levels, locations, weights = problem()
    expected = deformable_attention(v, levels, locations, weights)
    wide = np.zeros((*locations.shape[:-1], 5), np.float64)
    wide[..., 1::2] = locations
    got = deformable_attention(
        np.asfortranarray(v),
        np.array(levels, np.uint8),
        wide[..., 1::2],
        weights.astype(">f4")[..., ::-1][..., ::-1],
    )
    np.testing.assert_array_equal(got, expected)
    reversed_v = np.ascontiguousarray(v[..., ::-1, :])[..., ::-1, :]
    out = np.empty_like(expected)
    assert deformable_attention(reversed_v, levels, locations, weights, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_batches_broadcast(implementation):
    v, levels, locations, weights = problem(batch=(3, 1))
    shared = v[:1], levels, locations, weights[0]
    whole = np.broadcast_to(v[:1], v.shape), levels, locations, np.broadcast_to(weights[0], weights.shape)
    out, pullback = vjp(deformable_attention, *shared)
    expected, pullback_whole = vjp(deformable_attention, *map(np.ascontiguousarray, whole[:1]), *whole[1:])
    np.testing.assert_array_equal(out, expected)
    dout = np.ones_like(out)
    for dx, x, dy in zip(pullback(dout), (shared[0], *shared[2:]), pullback_whole(dout), strict=True):
        assert dx.shape == x.shape
        axes = tuple(i for i, n in enumerate((1,) * (dy.ndim - x.ndim) + x.shape) if n != dy.shape[i])
        np.testing.assert_allclose(dx, dy.sum(axes, keepdims=True).reshape(x.shape), rtol=1e-5, atol=1e-5)


def test_threads_and_company_change_no_bit(implementation):
    v, levels, locations, weights = problem([(30, 40), (9, 9)], heads=3, queries=300, points=8, head_dim=32)
    out, pullback = vjp(deformable_attention, v, levels, locations, weights, num_threads=1)
    again, pullback_again = vjp(deformable_attention, v, levels, locations, weights, num_threads=3)
    np.testing.assert_array_equal(again, out)
    found = pullback(out)
    for dx, dy in zip(found, pullback_again(out), strict=True):
        np.testing.assert_array_equal(dy, dx)
    if implementation == "numpy":
        return
    alone = deformable_attention(v[1, 2:], levels, locations[1, 2:, 17:], weights[1, 2:, 17:])
    np.testing.assert_array_equal(alone, out[1, 2:, 17:])


def sampled(levels, locations, weights):
    """Which rows of v have a share in which query: (batch, heads, queries, len_v)."""
    found = []
    for height, width, _, points in oracle.levels(levels, weights.shape[-1], None):
        x, y = (oracle.side(locations[..., points, i], n, "bilinear") for i, n in enumerate((width, height)))
        share = oracle.shares(y.share, x.share) * (weights[..., points, None] != 0)
        found.append((share != 0).any(-2))
    return np.concatenate(found, axis=-1)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_sampled_is_not_read(implementation, poison):
    v, levels, locations, weights = problem()
    weights[:, :, ::2, 1::2] = 0
    # At the centre of a pixel, its neighbours have no share.
    locations[:, 0, :, :2] = (np.array([3, 2], np.float32) + 0.5) / np.array([5, 7], np.float32)
    used = sampled(levels, np.float32(locations), weights)
    expected = deformable_attention(v, levels, locations, weights)
    row = 2 * 5 + 4
    assert not used[:, 0, :, row].all()
    v[..., row, :] = poison
    got = deformable_attention(v, levels, locations, weights)
    clean = ~used[..., row]
    np.testing.assert_array_equal(got[clean], expected[clean])
    assert not np.isfinite(got[~clean]).any()


def test_poison_nobody_samples_leaves_gradients_as_they_are(implementation):
    v, levels, locations, weights = problem()
    locations[..., :2, :] = locations[..., :2, :].clip(0, 0.5)  # of the first level, not its last line
    expected = vjp(deformable_attention, v, levels, locations, weights)[1](np.ones((2, 2, 9, 20), np.float32))
    v[..., 6 * 5 : 7 * 5, :] = np.nan
    found = vjp(deformable_attention, v, levels, locations, weights)[1](np.ones((2, 2, 9, 20), np.float32))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ["bilinear", "discrete"])
def test_locations_that_are_not_finite(implementation, mode):
    v, levels, locations, weights = problem(batch=())
    clean = deformable_attention(v, levels, locations, weights, mode=mode)
    locations[0, 3, 1, 0], locations[1, 5, 2, 1] = np.nan, np.nan
    weights[1, 5, 2] = 0
    out, pullback = vjp(deformable_attention, v, levels, locations, weights, mode=mode)
    assert np.isnan(out[0, 3]).all()
    assert np.isfinite(np.delete(out.reshape(-1, 20), 3, axis=0)).all()
    np.testing.assert_array_equal(out[0, :3], clean[0, :3])
    dv, dlocations, dweights = pullback(np.ones_like(out))
    assert np.isfinite(dv).all()
    assert np.isnan(dlocations[0, 3, 1]).all()
    assert np.isnan(dweights).sum() == 1
    assert not dlocations[1, 5, 2].any()
    for far in (np.inf, -np.inf, 3e38, -3e38):
        locations[...] = far
        found = deformable_attention(v, levels, locations, weights, mode=mode)
        assert np.isfinite(found).all()
        assert mode == "discrete" or not found.any()


@pytest.mark.parametrize("mode", ["bilinear", "discrete"])
@pytest.mark.parametrize("empty", [(0, 3), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("far", [np.inf, -np.inf])
def test_an_infinite_location_on_an_empty_level_adds_nothing(implementation, far, empty, mode):
    locations, weights = np.array([[[[0.5, 0.5], [far, far]]]], np.float32), np.ones((1, 1, 2), np.float32)
    v = np.ones((1, 1, 1), np.float32)
    out, pullback = vjp(deformable_attention, v, [(1, 1), empty], locations, weights, mode=mode)
    assert out.item() == 1
    dv, dlocations, dweights = pullback(np.ones_like(out))
    assert dv.item() == 1
    assert not dlocations[..., 1, :].any()
    np.testing.assert_array_equal(dweights.ravel(), [1, 0])


def test_the_gradient_on_a_line_between_pixels_is_the_right_one(implementation):
    v = np.array([1, 3, 7, 2], np.float32).reshape(1, 4, 1)
    at = np.array([1.5 / 4, 0.5], np.float32).reshape(1, 1, 1, 2)  # the centre of the second pixel
    out, pullback = vjp(deformable_attention, v, [(1, 4)], at, np.ones((1, 1, 1), np.float32))
    assert out.item() == 3
    _, dlocations, _ = pullback(np.ones_like(out))
    np.testing.assert_array_equal(dlocations.ravel(), [(7 - 3) * 4, -3])  # below there is nothing: 0 - 3


GOOD = dict(zip(("v", "spatial_shapes", "locations", "weights"), problem(), strict=True))
BAD = [
    (ValueError, r"v has shape .*; expected \(..., heads, len_v, head_dim\)", {"v": GOOD["v"][0, 0]}),
    (TypeError, "v has dtype int64", {"v": GOOD["v"].astype(int)}),
    (ValueError, r"spatial_shapes has shape \(2,\); expected \(levels, 2\)", {"spatial_shapes": [7, 5]}),
    (ValueError, "spatial_shapes has -1; expected 0 to 16777216", {"spatial_shapes": [(-1, 5)]}),
    (TypeError, "spatial_shapes has dtype float64; expected integers", {"spatial_shapes": [(7.0, 5.0)]}),
    (ValueError, "spatial_shapes has levels of 35 places; expected 54", {"spatial_shapes": [(7, 5)]}),
    (ValueError, r"locations has shape .*; expected \(..., heads, len_q, points, 2\) with 2 heads",
     {"locations": GOOD["locations"][:, :1]}),
    (ValueError, r"locations has shape", {"locations": GOOD["locations"][..., :1]}),
    (ValueError, r"weights has shape .*; expected \(..., heads, len_q, points\) = \(..., 2, 9, 6\)",
     {"weights": GOOD["weights"][..., 1:]}),
    (ValueError, "v, locations and weights have batch dimensions", {"v": np.concatenate([GOOD["v"]] * 2)}),
    (ValueError, r"num_points has shape \(2,\); expected \(3,\)", {"num_points": [3, 3]}),
    (ValueError, "num_points has 7 points in all; expected 6", {"num_points": [3, 3, 1]}),
    (ValueError, "num_points has -1", {"num_points": [4, 3, -1]}),
    (ValueError, "locations has 5 points, and spatial_shapes 3 levels; expected a multiple, or num_points=",
     {"locations": GOOD["locations"][..., 1:, :], "weights": GOOD["weights"][..., 1:]}),
    (ValueError, "mode is 'nearest'; expected one of bilinear, discrete", {"mode": "nearest"}),
    (ValueError, "out has shape", {"out": np.empty((2, 2, 9, 21), np.float32)}),
    (ValueError, "out shares memory with v", {"out": GOOD["v"][:, :, :9]}),
    (ValueError, "num_threads is 0", {"num_threads": 0}),
    (TypeError, "window is not an argument", {"window": None}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "wrong"), BAD, ids=[message[:50] for _, message, _ in BAD])
def test_errors(error, message, wrong):
    with pytest.raises(error, match=rf"^deformable_attention\(\): {message}"):
        deformable_attention(**{**GOOD, **wrong})
