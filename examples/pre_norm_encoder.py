"""Another published arrangement of the Transformer's encoder, in public calls.

EncoderLayer(x) = LayerNorm(x + MultiHead(LayerNorm(x))); one feed-forward follows the whole stack.

    python examples/pre_norm_encoder.py
"""

import numpy as np

from fastattn.layers import FeedForward, LayerNorm, MultiHeadAttention
from fastattn.positions import sinusoidal


def build(num_layers, d_model, num_heads, d_hidden, rng):
    """([(norm, attention, norm)] of each layer, feed-forward)."""
    layers = [
        (LayerNorm(d_model), MultiHeadAttention(d_model, num_heads, rng=rng), LayerNorm(d_model))
        for _ in range(num_layers)
    ]
    return layers, FeedForward(d_model, d_hidden, "gelu", rng=rng)


def encode(x, layers, feed_forward, padding=None):
    """x is (B, L, d_model); padding (B, L) is True where a token is padding, as torch has it."""
    for norm_in, attention, norm_out in layers:
        x, _ = attention(norm_in(x), residual=x, key_padding_mask=padding)
        x = norm_out(x)
    return feed_forward(x, residual=x)


def main():
    rng = np.random.default_rng(0)
    layers, feed_forward = build(num_layers=4, d_model=256, num_heads=8, d_hidden=1024, rng=rng)
    tokens = rng.standard_normal((2, 50, 256), np.float32) + sinusoidal(50, 256)
    padding = np.arange(50) >= np.array([[50], [30]])
    vectors = encode(tokens, layers, feed_forward, padding)
    print(f"{vectors.shape} in {vectors.dtype}, of {vectors.mean():.3f} ± {vectors.std():.3f}")


if __name__ == "__main__":
    main()
