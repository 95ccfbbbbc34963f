"""Draw every mask of fastattn.masks into one picture: python tools/variant_pictures.py docs/masks.png."""

import sys
import textwrap

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from fastattn import masks, plot

N = 64  # queries and keys; 8 x 8 where they are a grid
ARGUMENTS = {
    "ids": np.repeat([0, 1, 2, 3], [20, 9, 25, 10]),
    "mixed_ids": np.tile(np.repeat([0, 1, 2], 6), 4)[:N],
    "bitmap": np.random.default_rng(1).random((8, 8)) < 0.25,
    "parents": [-1, *((np.arange(1, 32) - 1) // 2)],  # a binary tree, level by level
}
MASKS = """
causal()
first_keys(40)
causal() | first_keys(20)
window(12)
window(8, 8)
dilated(4, 4)
causal() & chunked(16)
documents(ids)
causal() & documents(ids)
causal() & (first_keys(20) | documents(ids))
documents(mixed_ids)
causal() & (window(8) | first_keys(3))
strided(8)
fixed(8, 2)
block_sparse(bitmap, 8)
window(6, 6) | global_tokens([0, 30])
bigbird(4)
tree(parents)
axial((8, 8), 0)
axial((8, 8), 1)
swin((8, 8), (4, 4))
swin((8, 8), (4, 4), (2, 2))
neighborhood((64,), 15)
neighborhood((8, 8), (3, 3))
neighborhood((8, 8), (3, 3), 2)
block_sparse(neighborhood((4, 4), 3).to_array(16), 4)
causal() | chunked(8)
""".strip().splitlines()  # each is the title of its picture, and its code


def main(path, columns=5):
    rows = -(-len(MASKS) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(2 * columns, 2.15 * rows), layout="constrained")
    for ax, name in zip(grid.ravel(), MASKS, strict=False):
        plot.mask(eval(name, vars(masks) | ARGUMENTS), N, ax=ax)
        ax.set_title(textwrap.fill(name, 36), fontsize=6.5)
        ax.set_xticks([])
        ax.set_yticks([])
    for unused in grid.ravel()[len(MASKS) :]:
        unused.remove()
    figure.savefig(path, dpi=100, metadata={"Description": "\n".join(MASKS)})  # for the test


if __name__ == "__main__":
    main(*sys.argv[1:])
