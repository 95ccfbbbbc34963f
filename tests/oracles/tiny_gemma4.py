"""Gemma 4's text model for `tiny_models`: config, shapes of tensors, result in plain NumPy.

Its last two layers attend the keys of the two before them.
"""

import math

import numpy as np
from tiny_numpy import attend, capped, gelu_tanh

VOCAB = 60
NEAR, ALL = "sliding_attention", "full_attention"
CONFIGS = {
    "gemma4_text": {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "global_head_dim": 10,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "sliding_window": 5, "layer_types": [NEAR, ALL, NEAR, ALL],
        "hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": VOCAB + 1,
        "final_logit_softcapping": 2.5, "rope_parameters": {
            ALL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
            NEAR: {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}  # fmt: skip
CONFIGS["gemma4-experts"] = {
    **CONFIGS["gemma4_text"], "model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 5,
    "top_k_experts": 2, "moe_intermediate_size": 20, "use_double_wide_mlp": False,
}  # fmt: skip
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def giver(c, i):
    """The layer whose keys layer i attends."""
    first, kinds = c["num_hidden_layers"] - c["num_kv_shared_layers"], c["layer_types"]
    return i if i < first else max(j for j in range(first) if kinds[j] == kinds[i])


def sizes(c, i):
    """Features of a head, heads of keys, and features of the feed-forward."""
    near = c["layer_types"][i] == NEAR
    heads = c["num_key_value_heads" if near or not c["attention_k_eq_v"] else "num_global_key_value_heads"]
    wide = c["use_double_wide_mlp"] and giver(c, i) != i
    return c["head_dim" if near else "global_head_dim"], heads, c["intermediate_size"] * (2 if wide else 1)


def shapes(kind, c):
    """Shape of every tensor by its name."""
    h, layers, n = c["hidden_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"]
    found = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    if n:
        found["model.embed_tokens_per_layer.weight"] = (c["vocab_size_per_layer_input"], layers * n)
        found["model.per_layer_model_projection.weight"] = (layers * n, h)
        found["model.per_layer_projection_norm.weight"] = (n,)
    for i in range(layers):
        layer, (head_dim, heads_kv, inner) = f"model.layers.{i}.", sizes(c, i)
        q, kv = c["num_attention_heads"] * head_dim, heads_kv * head_dim
        found |= {f"{layer}self_attn.q_proj.weight": (q, h), f"{layer}self_attn.o_proj.weight": (h, q)}
        found[f"{layer}self_attn.q_norm.weight"] = (head_dim,)
        if giver(c, i) == i:
            found |= {
                f"{layer}self_attn.k_proj.weight": (kv, h),
                f"{layer}self_attn.k_norm.weight": (head_dim,),
            }
            if c["layer_types"][i] == NEAR or not c["attention_k_eq_v"]:
                found[f"{layer}self_attn.v_proj.weight"] = (kv, h)
        found |= {f"{layer}mlp.{part}_proj.weight": (inner, h) for part in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = (h, inner)
        found |= {f"{layer}{part}_layernorm.weight": (h,) for part in NORMS}
        found[f"{layer}layer_scalar"] = (1,)
        if c.get("enable_moe_block"):
            count, inner = c["num_experts"], c["moe_intermediate_size"]
            found[f"{layer}router.proj.weight"] = (count, h)
            found |= {f"{layer}router.scale": (h,), f"{layer}router.per_expert_scale": (count,)}
            found[f"{layer}experts.gate_up_proj"] = (count, 2 * inner, h)
            found[f"{layer}experts.down_proj"] = (count, h, inner)
            for part in (
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            ):
                found[f"{layer}{part}.weight"] = (h,)
        if n:
            found[f"{layer}per_layer_input_gate.weight"] = (n, h)
            found[f"{layer}per_layer_projection.weight"] = (h, n)
            found[f"{layer}post_per_layer_input_norm.weight"] = (h,)
    return found


def rotated(x, scaling):
    """x (L, heads, features), of which a part of the pairs is rotated."""
    n, _, size = x.shape
    frequencies = scaling["rope_theta"] ** -(np.arange(0, size, 2) / size)
    if scaling["rope_type"] == "proportional":
        frequencies[int(scaling["partial_rotary_factor"] * (size // 2)) :] = 0
    angles, half = np.outer(np.arange(n), frequencies)[:, None], size // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def result(kind, c, t, ids):
    """Logits (L, vocab); ids is (L,)."""
    t = {name.removeprefix("model."): x for name, x in t.items()}
    length, heads, n = len(ids), c["num_attention_heads"], c["hidden_size_per_layer_input"]
    back = np.arange(length)[:, None] - np.arange(length)
    seen = {ALL: back >= 0, NEAR: (back >= 0) & (back < c["sliding_window"])}
    keys = {}

    def norm(x, name=None):
        weight = 1 if name is None else t[f"{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def linear(x, name):
        return x @ t[f"{name}.weight"].T

    def mixed(x, layer):
        """The experts' result for rows x, one row at a time."""
        logits = linear(norm(x) * t[f"{layer}router.scale"] / math.sqrt(x.shape[1]), f"{layer}router.proj")
        chances, y = np.exp(logits), norm(x, f"{layer}pre_feedforward_layernorm_2")
        out = np.zeros_like(x)
        for row, probs, to in zip(y, chances, out, strict=True):
            best = np.argsort(-probs)[: c["top_k_experts"]]
            for i in best:
                gate, up = np.split(t[f"{layer}experts.gate_up_proj"][i] @ row, 2)
                share = probs[i] / probs[best].sum() * t[f"{layer}router.per_expert_scale"][i]
                to += share * (t[f"{layer}experts.down_proj"][i] @ (gelu_tanh(gate) * up))
        return out

    x = t["embed_tokens.weight"][ids] * math.sqrt(c["hidden_size"])
    if n:
        inputs = linear(x, "per_layer_model_projection") / math.sqrt(c["hidden_size"])
        inputs = norm(inputs.reshape(length, -1, n), "per_layer_projection_norm")
        inputs += (t["embed_tokens_per_layer.weight"][ids] * math.sqrt(n)).reshape(length, -1, n)
        inputs /= math.sqrt(2)
    for i, its_kind in enumerate(c["layer_types"]):
        layer, (size, _, _), rope = f"layers.{i}.", sizes(c, i), c["rope_parameters"][its_kind]
        own, y = f"{layer}self_attn.", norm(x, f"{layer}input_layernorm")
        q = rotated(norm(linear(y, f"{own}q_proj").reshape(length, heads, size), f"{own}q_norm"), rope)
        if giver(c, i) == i:
            k = linear(y, f"{own}k_proj").reshape(length, -1, size)
            v = linear(y, f"{own}v_proj").reshape(k.shape) if f"{own}v_proj.weight" in t else k
            keys[i] = rotated(norm(k, f"{own}k_norm"), rope), norm(v)
        y = attend(q, *keys[giver(c, i)], seen[its_kind], scale=1.0)
        x = x + norm(linear(y, f"{own}o_proj"), f"{layer}post_attention_layernorm")
        y = norm(x, f"{layer}pre_feedforward_layernorm")
        y = gelu_tanh(linear(y, f"{layer}mlp.gate_proj")) * linear(y, f"{layer}mlp.up_proj")
        y = linear(y, f"{layer}mlp.down_proj")
        if c.get("enable_moe_block"):
            y = norm(y, f"{layer}post_feedforward_layernorm_1")
            y = y + norm(mixed(x, layer), f"{layer}post_feedforward_layernorm_2")
        x = x + norm(y, f"{layer}post_feedforward_layernorm")
        if n:
            y = gelu_tanh(linear(x, f"{layer}per_layer_input_gate")) * inputs[:, i]
            x = x + norm(linear(y, f"{layer}per_layer_projection"), f"{layer}post_per_layer_input_norm")
        x = x * t[f"{layer}layer_scalar"]
    return capped(norm(x, "norm") @ t["embed_tokens.weight"].T, c["final_logit_softcapping"])
