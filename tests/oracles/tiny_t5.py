"""T5's encoder for `tiny_models`: configs, the shapes of its tensors, its result in plain NumPy."""

import math

import numpy as np
from tiny_numpy import attend, gelu_tanh, linear, rms_norm

VOCAB = 60
SIZES = {
    "vocab_size": VOCAB, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
CONFIGS = {
    "t5": SIZES,
    "mt5": {**SIZES, "relative_attention_max_distance": 20},
}  # mT5's feed-forward is gated
BIASES = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def shapes(kind, c):
    """Shape of every tensor by its name."""
    hidden, inner, heads = c["d_model"], c["d_ff"], c["num_heads"]
    found = {"shared.weight": (VOCAB, hidden), "encoder.final_layer_norm.weight": (hidden,)}
    found[BIASES] = (c["relative_attention_num_buckets"], heads)
    for layer in (f"encoder.block.{i}.layer." for i in range(c["num_layers"])):
        found |= {f"{layer}0.SelfAttention.{part}.weight": (heads * c["d_kv"], hidden) for part in "qkv"}
        found[f"{layer}0.SelfAttention.o.weight"] = (hidden, heads * c["d_kv"])
        for part in ("wi",) if kind == "t5" else ("wi_0", "wi_1"):
            found[f"{layer}1.DenseReluDense.{part}.weight"] = (inner, hidden)
        found[f"{layer}1.DenseReluDense.wo.weight"] = (hidden, inner)
        found |= {f"{layer}{i}.layer_norm.weight": (hidden,) for i in range(2)}
    return found


def result(kind, c, t, ids):
    """Hidden states (L, hidden); ids is (L,)."""
    n, heads = len(ids), c["num_heads"]

    def norm(x, name):
        return rms_norm(x, t[f"{name}.weight"], 1e-6)

    def bucket(distance):
        """Half of the buckets for keys behind the query; of these half for one distance each."""
        half = c["relative_attention_num_buckets"] // 2
        single, away = half // 2, abs(distance)
        if away >= single:
            most = math.log(c["relative_attention_max_distance"] / single)
            away = min(half - 1, single + int(math.log(away / single) / most * (half - single)))
        return away + half * (distance > 0)

    bias = np.array([[t[BIASES][bucket(j - i)] for j in range(n)] for i in range(n)]).transpose(2, 0, 1)
    x = t["shared.weight"][ids]
    for layer in (f"encoder.block.{i}.layer." for i in range(c["num_layers"])):
        y = norm(x, f"{layer}0.layer_norm")
        q, k, v = (linear(y, t, f"{layer}0.SelfAttention.{part}").reshape(n, heads, -1) for part in "qkv")
        y = attend(q, k, v, np.ones((n, n)), bias, scale=1.0)
        x = x + linear(y, t, f"{layer}0.SelfAttention.o")
        y, inner = norm(x, f"{layer}1.layer_norm"), f"{layer}1.DenseReluDense."
        if kind == "t5":
            z = np.maximum(linear(y, t, f"{inner}wi"), 0)
        else:
            z = gelu_tanh(linear(y, t, f"{inner}wi_0")) * linear(y, t, f"{inner}wi_1")
        x = x + linear(z, t, f"{inner}wo")
    return norm(x, "encoder.final_layer_norm")
