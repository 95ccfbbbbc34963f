"""Draw every mask of fastattn.masks into one picture: python tools/variant_pictures.py docs/masks.png."""

import sys

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from fastattn import masks, plot

N = 64  # queries and keys; 8 x 8 where they are a grid
GRID = (8, 8)
IDS = np.repeat([0, 1, 2, 3], [20, 9, 25, 10])
BITMAP = np.random.default_rng(1).random((8, 8)) < 0.25
TREE = [-1, *((np.arange(1, 32) - 1) // 2)]  # a binary one, level by level

MASKS = {
    "all_keys()": masks.all_keys(),
    "causal()": masks.causal(),
    "first_keys(40)": masks.first_keys(40),
    "causal() | first_keys(20)": masks.causal() | masks.first_keys(20),
    "window(12)": masks.window(12),
    "window(8, 8)": masks.window(8, 8),
    "dilated(4, 4)": masks.dilated(4, 4),
    "causal() & chunked(16)": masks.causal() & masks.chunked(16),
    "documents(ids)": masks.documents(IDS),
    "causal() & documents(ids)": masks.causal() & masks.documents(IDS),
    "documents(mixed ids)": masks.documents(np.tile(np.repeat([0, 1, 2], 6), 4)[:N]),
    "causal() & (window(8) | first_keys(3))": masks.causal() & (masks.window(8) | masks.first_keys(3)),
    "strided(8)": masks.strided(8),
    "fixed(8, 2)": masks.fixed(8, 2),
    "block_sparse(bitmap, 8)": masks.block_sparse(BITMAP, 8),
    "window(6, 6) | global_tokens([0, 30])": masks.window(6, 6) | masks.global_tokens([0, 30]),
    "bigbird(4)": masks.bigbird(4),
    "tree(parents)": masks.tree(TREE),
    "axial((8, 8), 0)": masks.axial(GRID, 0),
    "axial((8, 8), 1)": masks.axial(GRID, 1),
    "swin((8, 8), (4, 4))": masks.swin(GRID, (4, 4)),
    "swin((8, 8), (4, 4), (2, 2))": masks.swin(GRID, (4, 4), (2, 2)),
    "neighborhood((64,), 15)": masks.neighborhood((N,), 15),
    "neighborhood((8, 8), (3, 3))": masks.neighborhood(GRID, (3, 3)),
    "neighborhood((8, 8), (3, 3), 2)": masks.neighborhood(GRID, (3, 3), 2),
}


def main(path, columns=5):
    rows = -(-len(MASKS) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(2 * columns, 2.15 * rows), layout="constrained")
    for ax, (name, mask) in zip(grid.ravel(), MASKS.items(), strict=False):
        plot.mask(mask, N, ax=ax)
        ax.set_title(name, fontsize=6.5)
        ax.set_xticks([])
        ax.set_yticks([])
    for unused in grid.ravel()[len(MASKS) :]:
        unused.remove()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
