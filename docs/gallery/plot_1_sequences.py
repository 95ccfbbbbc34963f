"""
Masks of sequences
==================

What ``causal``, windows, prefixes and documents let through. Masks combine with ``&``, ``|`` and ``~``, and
print as they were made.
"""

import numpy as np
from matplotlib import pyplot as plt

from fastattn import masks, plot

# %%
# The plain ones
# --------------
# A causal mask, a window of 12 keys before each query, one on both sides, and the first keys alone, as
# padding has them.


def draw(some, length=64, columns=4, **how):
    rows = -(-len(some) // columns)
    _, axes = plt.subplots(rows, columns, figsize=(2.2 * columns, 2.4 * rows), layout="constrained")
    for ax, mask in zip(np.ravel(axes), some, strict=True):
        plot.mask(mask, length, ax=ax, **how)
        ax.set_title(str(mask).replace("masks.", ""), fontsize=8)
        ax.set(xticks=[], yticks=[])


draw([masks.causal(), masks.window(12), masks.window(8, 8), masks.first_keys(40)])

# %%
# Combined
# --------
# A prefix that is read in both directions, chunks, and the window with attention sinks of StreamingLLM.

draw(
    [
        masks.causal() | masks.first_keys(20),
        masks.causal() & masks.chunked(16),
        masks.causal() & (masks.window(8) | masks.first_keys(3)),
        masks.causal() & ~masks.window(8),
    ]
)

# %%
# Documents that share a sequence
# -------------------------------
# Each token has the number of its document. The second picture has documents that are mixed.

ids = np.repeat([0, 1, 2, 3], [20, 9, 25, 10])
mixed = np.tile(np.repeat([0, 1, 2], 6), 4)[:64]
figure, axes = plt.subplots(1, 3, figsize=(7, 2.6), layout="constrained")
for ax, title, mask in zip(
    axes,
    ["documents(ids)", "causal() & documents(ids)", "documents(mixed)"],
    [masks.documents(ids), masks.causal() & masks.documents(ids), masks.documents(mixed)],
    strict=True,
):
    plot.mask(mask, 64, ax=ax)
    ax.set_title(title, fontsize=8)
    ax.set(xticks=[], yticks=[])
plt.show()
