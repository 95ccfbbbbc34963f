"""
Sparse masks, and what they save
================================

Block-sparse patterns, global tokens, BigBird, and masks of your own. The kernel touches a tile of queries and
keys only if someone in it attends someone.
"""

import numpy as np
from matplotlib import pyplot as plt

import fastattn
from fastattn import masks, plot

# %%
# Patterns
# --------

bitmap = np.random.default_rng(1).random((8, 8)) < 0.25
tree = [-1, *((np.arange(1, 32) - 1) // 2)]  # guessed tokens: a binary tree, level by level
some = {
    "block_sparse(bitmap, 8)": masks.block_sparse(bitmap, 8),
    "window(6, 6) | global_tokens([0, 30])": masks.window(6, 6) | masks.global_tokens([0, 30]),
    "bigbird(4)": masks.bigbird(4),
    "strided(8)": masks.strided(8),
    "fixed(8, 2)": masks.fixed(8, 2),
    "tree(parents)": masks.tree(tree),
}
figure, axes = plt.subplots(2, 3, figsize=(7.5, 5.2), layout="constrained")
for ax, (title, mask) in zip(axes.ravel(), some.items(), strict=True):
    plot.mask(mask, 64, ax=ax)
    ax.set_title(title, fontsize=8)
    ax.set(xticks=[], yticks=[])

# %%
# A mask of your own
# ------------------
# Any rule of batch item, head, query and key becomes ranges of keys, once for many calls.


def knight(b, h, i, j):
    """Fields of a chess board that are a knight's move apart, or the same."""
    rows, columns = abs(i // 8 - j // 8), abs(i % 8 - j % 8)
    return ((rows == 1) & (columns == 2)) | ((rows == 2) & (columns == 1)) | (i == j)


mask = masks.compile(knight, (1, 1, 64, 64))
plot.mask(mask.to_array(64, batch_shape=(1,), num_heads=1)[0, 0], 64)

# %%
# Tiles that are left
# -------------------
# ``explain`` counts them. This is at 4096 tokens; what is skipped costs nothing.

q = k = v = np.zeros((1, 1, 4096, 64), np.float32)
shares = {}
for title, mask in {
    "none": masks.first_keys(4096),
    "causal": masks.causal(),
    "window of 512": masks.causal() & masks.window(511),
    "BigBird": masks.bigbird(64),
    "documents of 512": masks.documents(np.arange(4096) // 512),
}.items():
    said = fastattn.explain(q, k, v, mask=mask)
    shares[title] = 1 - said["tiles_skipped"] / said["tiles"]
figure, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
bars = ax.barh(list(shares), [100 * share for share in shares.values()], color="#2f6fb7")
ax.bar_label(bars, fmt="%.0f%%", padding=3, fontsize=8)
ax.invert_yaxis()
ax.set(xlabel="tiles that are computed, %", xlim=(0, 112))
ax.spines[["top", "right"]].set_visible(False)
plt.show()
