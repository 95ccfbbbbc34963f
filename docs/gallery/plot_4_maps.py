"""
Attention maps
==============

``attention_weights`` returns the probabilities as an array, to be looked at. ``attention`` never holds them.
"""

import numpy as np
from matplotlib import pyplot as plt

import fastattn
from fastattn import plot, positions

rng = np.random.default_rng(0)
tokens = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "rug"]
words = sorted(set(tokens))
vectors = dict(zip(words, rng.standard_normal((len(words), 32)), strict=True))
x = np.stack([vectors[token] for token in tokens])  # one vector a word, without positions

# %%
# By content
# ----------
# Equal words attend each other: their products are the largest.

weights = fastattn.attention_weights(x[None], x[None])
figure, ax = plt.subplots(figsize=(4.6, 4.4), layout="constrained")
plot.attention_map(weights[0], tokens, ax=ax)

# %%
# By position
# -----------
# ALiBi takes away the more the farther a key is; each head has its own slope. With equal vectors,
# only that is seen.

slopes = positions.alibi_slopes(4)
equal = np.ones((4, 13, 32))
figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
plot.attention_map(fastattn.attention_weights(equal, equal, causal=True, alibi_slopes=slopes), ax=axes)
for ax, slope in zip(axes, slopes, strict=True):
    ax.set_title(f"slope {slope:.3g}", fontsize=8)

# %%
# Turned
# ------
# Rotary positions turn queries and keys by their places, so a product depends on their distance.

cos, sin = positions.rope_tables(np.arange(64), positions.rope_frequencies(32))
turned = positions.apply_rope(np.ones((1, 64, 32), np.float32), cos, sin)
figure, ax = plt.subplots(figsize=(4, 3.6), layout="constrained")
plot.attention_map(fastattn.attention_weights(turned, turned, scale=0.5)[0], ax=ax)

# %%
# How sharp heads are
# -------------------
# ``stats=("entropy",)`` computes each row's entropy on the way, without holding any weights.

entropies = []
for _ in range(6):
    sharpness = rng.uniform(0.1, 3, (8, 1, 1))
    q, k, v = rng.standard_normal((3, 8, 256, 32))
    _, stats = fastattn.attention(sharpness * q, k, v, stats=("entropy",))
    entropies.append(stats["entropy"].mean(axis=-1))
figure, ax = plt.subplots(figsize=(5, 3.2), layout="constrained")
plot.entropy(entropies, ax=ax)
plt.show()
