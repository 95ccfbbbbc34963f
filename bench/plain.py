"""Layers and models by definition, in NumPy. In float64 results are compared with them.

In float32 they are what the bench times as plain NumPy. Every function computes in the dtype of its arrays.
Weights are dicts whose names are those of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastattn._bench.cases import Array

Weights = Mapping[str, Array]
TABLES = ("word", "position", "token_type")  # of BERT


def linear(x: Array, weights: Weights, name: str) -> Array:
    """x is (..., in), result (..., out)."""
    y: Array = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def layer_norm(x: Array, weights: Weights, name: str, eps: float = 1e-5) -> Array:
    """x is (..., n), result the same."""
    x = x - x.mean(-1, keepdims=True)
    x /= np.sqrt(np.mean(x * x, -1, keepdims=True) + x.dtype.type(eps))
    y: Array = x * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return y


def rms_norm(x: Array, weights: Weights, name: str, eps: float) -> Array:
    """x is (..., n), result the same."""
    y: Array = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + x.dtype.type(eps)) * weights[f"{name}.weight"]
    return y


def gelu(x: Array) -> Array:
    """The exact GELU; in float32 by Abramowitz and Stegun 7.1.26, whose error is 1.5e-7."""
    if x.dtype == np.float64:
        erf = np.fromiter(map(math.erf, (x * math.sqrt(0.5)).ravel().tolist()), float, x.size)
        y: Array = x * 0.5 * (1 + erf.reshape(x.shape))
        return y
    z = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = np.float32(1.061405429) * t
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series += np.float32(coefficient)
        series *= t
    y = np.float32(0.5) * x * (1 + np.copysign(1 - series * np.exp(-z * z), x))
    return y


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """x is (..., L, D), cos and sin (L, D / 2): feature i of a head is rotated with feature i + D / 2."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rope_tables(length: int, head_dim: int, theta: float, dtype: Any) -> tuple[Array, Array]:
    """Cos and sin, (L, D / 2)."""
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def split_heads(x: Array, heads: int) -> Array:
    """(B, L, H * D) to (B, H, L, D)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """q is (B, H, L, D), k and v (B, Hkv, S, D), result (B, L, H * D)."""
    batch, heads, length, head_dim = q.shape
    scores = q.reshape(batch, k.shape[1], -1, head_dim) @ k.swapaxes(-1, -2)
    scores *= q.dtype.type(head_dim**-0.5)
    if causal:
        future = np.triu(np.full((length, k.shape[2]), -np.inf, q.dtype), 1 + k.shape[2] - length)
        scores.reshape(batch, heads, length, -1)[...] += future
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return (scores @ v).reshape(batch, heads, length, -1).swapaxes(1, 2).reshape(batch, length, -1)


def project(x: Array, weights: Weights, name: str, part: int, heads: int) -> Array:
    """Part 0, 1 or 2 (q, k, v) of an in_proj: x is (B, L, D), result (B, H, L, D / H)."""
    width = x.shape[-1]
    rows = slice(part * width, (part + 1) * width)
    y = x @ weights[f"{name}.in_proj_weight"][rows].T + weights[f"{name}.in_proj_bias"][rows]
    return split_heads(y, heads)


def multi_head(
    x: Array, memory: Array, weights: Weights, name: str, heads: int, causal: bool = False
) -> Array:
    """x is (B, L, D), memory (B, S, D), result (B, L, D)."""
    q = project(x, weights, name, 0, heads)
    k, v = (project(memory, weights, name, part, heads) for part in (1, 2))
    return linear(attention(q, k, v, causal), weights, f"{name}.out_proj")


def encoder_layer(x: Array, weights: Weights, heads: int, eps: float = 1e-5) -> Array:
    """x is (B, L, D), result the same; post-norm, GELU."""
    x = layer_norm(x + multi_head(x, x, weights, "self_attn", heads), weights, "norm1", eps)
    inner = gelu(linear(x, weights, "linear1"))
    return layer_norm(x + linear(inner, weights, "linear2"), weights, "norm2", eps)


def decoder_layer(x: Array, memory: Array, weights: Weights, heads: int) -> Array:
    """x is (B, L, D), memory (B, S, D), result (B, L, D); post-norm, GELU, causal."""
    x = layer_norm(x + multi_head(x, x, weights, "self_attn", heads, causal=True), weights, "norm1")
    x = layer_norm(x + multi_head(x, memory, weights, "multihead_attn", heads), weights, "norm2")
    inner = gelu(linear(x, weights, "linear1"))
    return layer_norm(x + linear(inner, weights, "linear2"), weights, "norm3")


def bert(ids: Array, weights: Weights, config: Mapping[str, Any]) -> Array:
    """ids is (B, L), result (B, L, hidden)."""
    eps = config["layer_norm_eps"]
    words, positions, types = (weights[f"embeddings.{name}_embeddings.weight"] for name in TABLES)
    x = layer_norm(words[ids] + positions[: ids.shape[1]] + types[0], weights, "embeddings.LayerNorm", eps)
    for i in range(config["num_hidden_layers"]):
        x = encoder_layer(x, bert_layer(weights, f"encoder.layer.{i}"), config["num_attention_heads"], eps)
    return x


def bert_layer(weights: Weights, prefix: str) -> dict[str, Array]:
    """The weights of one layer of BERT, by the names that `encoder_layer` uses."""
    names = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    layer: dict[str, Array] = {}
    for p in ("weight", "bias"):
        layer |= {f"{new}.{p}": weights[f"{prefix}.{old}.{p}"] for new, old in names.items()}
        parts = [weights[f"{prefix}.attention.self.{part}.{p}"] for part in ("query", "key", "value")]
        layer[f"self_attn.in_proj_{p}"] = np.concatenate(parts)
    return layer


def llama(ids: Array, weights: Weights, config: Mapping[str, Any], dtype: Any) -> Array:
    """ids is (B, L), result (B, vocab): the logits after the last token, computed in `dtype`."""
    heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    cos, sin = rope_tables(ids.shape[1], config["hidden_size"] // heads, theta, dtype)
    x = weights["model.embed_tokens.weight"][ids].astype(dtype)
    for i in range(config["num_hidden_layers"]):
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        layer = Widened(weights, f"model.layers.{i}.", dtype)
        y = rms_norm(x, layer, "input_layernorm", eps)
        q, k, v = (
            split_heads(linear(y, layer, f"self_attn.{name}"), n)
            for name, n in zip(names, (heads, heads_kv, heads_kv), strict=False)
        )
        context = attention(rope(q, cos, sin), rope(k, cos, sin), v, causal=True)
        x = x + linear(context, layer, "self_attn.o_proj")
        y = rms_norm(x, layer, "post_attention_layernorm", eps)
        gate = linear(y, layer, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, layer, "mlp.up_proj"), layer, "mlp.down_proj")
    x = rms_norm(x[:, -1], Widened(weights, "model.", dtype), "norm", eps)
    logits: Array = x @ weights["model.embed_tokens.weight"].astype(dtype).T
    return logits


class Widened(Mapping[str, Array]):
    """The weights whose names begin with `prefix`, each converted to `dtype` when it is looked up.

    A whole model in float64 may not fit into memory.
    """

    def __init__(self, weights: Weights, prefix: str, dtype: Any) -> None:
        self.weights, self.prefix, self.dtype = weights, prefix, dtype

    def __getitem__(self, name: str) -> Array:
        return self.weights[self.prefix + name].astype(self.dtype)

    def __iter__(self) -> Any:
        return (name.removeprefix(self.prefix) for name in self.weights if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
