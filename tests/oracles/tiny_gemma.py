"""Gemma 2, and Gemma 3's text model, for `tiny_models`: config, shapes of tensors, result in plain NumPy."""

import math

import numpy as np
from tiny_numpy import attend, capped, gelu_tanh, linear, rms_norm, rotated

VOCAB = 60
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 5,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 12, "rope_theta": 500.0,
    "rope_local_base_freq": 50.0,
}  # fmt: skip
CONFIGS = {
    "gemma3_text": {**_SIZES, "use_bidirectional_attention": True},
    "gemma3-causal": {**_SIZES, "model_type": "gemma3_text"},
    "gemma2": {
        **_SIZES, "sliding_window_pattern": 2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.5,
    },
}  # fmt: skip
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def shapes(kind, c):
    """Shape of every tensor by its name."""
    h, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    prefix = "" if kind == "gemma3_text" else "model."
    found = {f"{prefix}embed_tokens.weight": (c["vocab_size"], h), f"{prefix}norm.weight": (h,)}
    for layer in (f"{prefix}layers.{i}." for i in range(c["num_hidden_layers"])):
        found |= {f"{layer}self_attn.q_proj.weight": (q, h), f"{layer}self_attn.o_proj.weight": (h, q)}
        found |= {f"{layer}self_attn.{part}_proj.weight": (kv, h) for part in "kv"}
        if kind != "gemma2":
            found |= {f"{layer}self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        found |= {f"{layer}mlp.{part}_proj.weight": (inner, h) for part in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = (h, inner)
        found |= {f"{layer}{part}_layernorm.weight": (h,) for part in NORMS}
    return found


def result(kind, c, t, ids):
    """Hidden states (L, hidden), or logits; ids is (L,)."""
    causal, t = kind != "gemma3_text", {name.removeprefix("model."): x for name, x in t.items()}
    n, head_dim = len(ids), c["head_dim"]
    back = np.arange(n)[:, None] - np.arange(n)
    near = (back >= 0) & (back < c["sliding_window"]) if causal else abs(back) <= c["sliding_window"] // 2
    scale, cap = c["query_pre_attn_scalar"] ** -0.5, c.get("attn_logit_softcapping")

    def norm(x, name):
        return rms_norm(x, 1 + t[f"{name}.weight"], 1e-6)

    x = t["embed_tokens.weight"][ids] * math.sqrt(c["hidden_size"])
    for i in range(c["num_hidden_layers"]):
        layer, slides = f"layers.{i}.", (i + 1) % c["sliding_window_pattern"]
        own = f"{layer}self_attn."
        theta = c["rope_local_base_freq" if slides and kind != "gemma2" else "rope_theta"]
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = (linear(y, t, f"{own}{part}_proj").reshape(n, -1, head_dim) for part in "qkv")
        if kind != "gemma2":
            q, k = norm(q, f"{own}q_norm"), norm(k, f"{own}k_norm")
        seen = near if slides else back >= 0 if causal else np.ones((n, n))
        y = attend(rotated(q, theta), rotated(k, theta), v, seen, scale=scale, cap=cap)
        x = x + norm(linear(y, t, f"{own}o_proj"), f"{layer}post_attention_layernorm")
        y = norm(x, f"{layer}pre_feedforward_layernorm")
        y = gelu_tanh(linear(y, t, f"{layer}mlp.gate_proj")) * linear(y, t, f"{layer}mlp.up_proj")
        x = x + norm(linear(y, t, f"{layer}mlp.down_proj"), f"{layer}post_feedforward_layernorm")
    x = norm(x, "norm")
    return capped(x @ t["embed_tokens.weight"].T, c.get("final_logit_softcapping")) if causal else x
