"""
Masks of images and grids
=========================

Tokens of an 8 x 8 grid, line by line: 64 queries and keys.
"""

from matplotlib import pyplot as plt

from fastattn import masks, plot

GRID = (8, 8)


def draw(some):
    _, axes = plt.subplots(1, len(some), figsize=(2.3 * len(some), 2.6), layout="constrained")
    for ax, (title, mask) in zip(axes, some.items(), strict=True):
        plot.mask(mask, 64, ax=ax)
        ax.set_title(title, fontsize=8)
        ax.set(xticks=[], yticks=[])


# %%
# Along one axis, and in windows
# ------------------------------
# Axial attention sees its row or its column. Swin's windows are shifted in every other layer.

draw(
    {
        "axial(GRID, 0)": masks.axial(GRID, 0),
        "axial(GRID, 1)": masks.axial(GRID, 1),
        "swin(GRID, (4, 4))": masks.swin(GRID, (4, 4)),
        "swin(GRID, (4, 4), (2, 2))": masks.swin(GRID, (4, 4), (2, 2)),
    }
)

# %%
# The nearest places
# ------------------
# A neighbourhood moves inwards at a border, so that every query has as many keys.

draw(
    {
        "neighborhood(GRID, (3, 3))": masks.neighborhood(GRID, (3, 3)),
        "neighborhood(GRID, (3, 3), 2)": masks.neighborhood(GRID, (3, 3), 2),
        "neighborhood((64,), 15)": masks.neighborhood((64,), 15),
    }
)

# %%
# Keys of one query
# -----------------
# The first mask, as one token sees it: its keys, on the grid.

mask = masks.neighborhood(GRID, (3, 3)).to_array(64)
figure, axes = plt.subplots(1, 3, figsize=(6.5, 2.4), layout="constrained")
for ax, (row, column) in zip(axes, [(0, 0), (4, 3), (7, 5)], strict=True):
    seen = mask[8 * row + column].reshape(GRID)
    ax.imshow(seen, cmap="Blues", vmin=0, vmax=1.4)
    ax.plot(column, row, "o", color="#e4572e")
    ax.set_title(f"query at ({row}, {column})", fontsize=8)
    ax.set(xticks=[], yticks=[])
plt.show()
