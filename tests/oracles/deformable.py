"""Deformable attention by its definition in float64, dense: each place of a level has a share of a point."""

from typing import NamedTuple

import numpy as np


class Side(NamedTuple):
    """The share of each of n columns (or lines) in some points, (..., points, n), and its derivative."""

    share: np.ndarray
    slope: np.ndarray


def side(at, n, mode):
    places = np.arange(n)
    if mode == "discrete":
        share = np.clip(np.floor(at[..., None] * n + 0.5), 0, n - 1) == places
        return Side(share.astype(float), np.zeros(share.shape))
    distance = at[..., None] * n - 0.5 - places
    inside = np.abs(distance) < 1
    return Side(np.where(inside, 1 - np.abs(distance), 0), np.where(inside, -n * np.sign(distance), 0))


def levels(spatial_shapes, points, num_points):
    """Height and width, the slice of v and that of points of each level."""
    counts = [points // len(spatial_shapes)] * len(spatial_shapes) if num_points is None else num_points
    row = point = 0
    for (height, width), count in zip(spatial_shapes, counts, strict=True):
        yield height, width, slice(row, row + height * width), slice(point, point + count)
        row, point = row + height * width, point + count


def shares(a, b):
    """Products of the shares of lines and of columns: (..., points, places)."""
    return (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], a.shape[-1] * b.shape[-1])


def attention(v, spatial_shapes, locations, weights, num_points=None, mode="bilinear"):
    v, locations, weights = (np.asarray(x, np.float64) for x in (v, locations, weights))
    out = 0
    for height, width, rows, points in levels(spatial_shapes, weights.shape[-1], num_points):
        x, y = (side(locations[..., points, i], n, mode) for i, n in enumerate((width, height)))
        of_places = weights[..., points, None] * shares(y.share, x.share)
        out = out + of_places.sum(-2) @ v[..., rows, :]
    return out


def gradients(dout, v, spatial_shapes, locations, weights, num_points=None, mode="bilinear"):
    """Return dv, dlocations and dweights; without batch dimensions that broadcast."""
    dout, v, locations, weights = (np.asarray(x, np.float64) for x in (dout, v, locations, weights))
    dv, dlocations, dweights = (np.zeros(x.shape) for x in (v, locations, weights))
    for height, width, rows, points in levels(spatial_shapes, weights.shape[-1], num_points):
        x, y = (side(locations[..., points, i], n, mode) for i, n in enumerate((width, height)))
        w, of_places = weights[..., points, None], shares(y.share, x.share)
        dv[..., rows, :] = np.einsum("...qs,...qd->...sd", (w * of_places).sum(-2), dout)
        products = (dout @ v[..., rows, :].swapaxes(-1, -2))[..., None, :]
        dweights[..., points] = (of_places * products).sum(-1)
        dlocations[..., points, 0] = (w * shares(y.share, x.slope) * products).sum(-1)
        dlocations[..., points, 1] = (w * shares(y.slope, x.share) * products).sum(-1)
    return dv, dlocations, dweights
