"""GPT-OSS for `tiny_models`: config, shapes of tensors, result in plain NumPy."""

import numpy as np
from tiny_numpy import attend, linear, rms_norm, rotated

VOCAB = 60
CONFIGS = {
    "gpt_oss": {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
        "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.7, "rope_theta": 100.0,
        "rope_scaling": {"rope_type": "default"},
    },
}  # fmt: skip


def shapes(kind, c):
    """Shape of every tensor by its name; those of experts are (experts, in, out)."""
    h, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    heads, q, kv = (
        c["num_attention_heads"],
        *(c[f"num_{x}_heads"] * c["head_dim"] for x in ("attention", "key_value")),
    )
    found = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    found["lm_head.weight"] = (c["vocab_size"], h)
    for layer in (f"model.layers.{i}." for i in range(c["num_hidden_layers"])):
        found |= {f"{layer}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        maps = ("q_proj", h, q), ("k_proj", h, kv), ("v_proj", h, kv), ("o_proj", q, h)
        for name, n_in, n_out in (
            *((f"self_attn.{x}", *sizes) for x, *sizes in maps),
            ("mlp.router", h, count),
        ):
            found |= {f"{layer}{name}.weight": (n_out, n_in), f"{layer}{name}.bias": (n_out,)}
        found[f"{layer}self_attn.sinks"] = (heads,)
        for name, n_in, n_out in (("gate_up", h, 2 * inner), ("down", inner, h)):
            found[f"{layer}mlp.experts.{name}_proj"] = count, n_in, n_out
            found[f"{layer}mlp.experts.{name}_proj_bias"] = count, n_out
    return found


def result(kind, c, t, ids):
    """Logits (L, vocab); ids is (L,)."""
    n, size = len(ids), c["head_dim"]
    eps = c.get("rms_norm_eps", 1e-5)
    back = np.arange(n)[:, None] - np.arange(n)
    x = t["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        near = (back >= 0) & (back < (n if i % 2 else c["sliding_window"]))
        y = rms_norm(x, t[f"{layer}input_layernorm.weight"], eps)
        q, k, v = (linear(y, t, f"{layer}self_attn.{part}_proj").reshape(n, -1, size) for part in "qkv")
        q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
        y = attend(q, k, v, near, sinks=t[f"{layer}self_attn.sinks"])
        x = x + linear(y, t, f"{layer}self_attn.o_proj")
        y = rms_norm(x, t[f"{layer}post_attention_layernorm.weight"], eps)
        x = x + np.stack([_mixed(c, t, f"{layer}mlp.", row) for row in y])
    return rms_norm(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _mixed(c, t, mlp, row):
    """The experts' result for one row."""
    logits = linear(row, t, f"{mlp}router")
    best = np.argsort(-logits)[: c["num_experts_per_tok"]]
    weights, limit = np.exp(logits[best]), c["swiglu_limit"]
    out = 0
    for i, weight in zip(best, weights / weights.sum(), strict=True):
        both = row @ t[f"{mlp}experts.gate_up_proj"][i] + t[f"{mlp}experts.gate_up_proj_bias"][i]
        gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
        inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        out = out + weight * (inner @ t[f"{mlp}experts.down_proj"][i] + t[f"{mlp}experts.down_proj_bias"][i])
    return out


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def in_mxfp4(weights):
    """GPT-OSS's tensors with random blocks and scales of experts, and the same with their numbers."""
    rng, blocks, numbers = np.random.default_rng(1), dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, n_in, n_out = weights[name].shape
        data = rng.integers(0, 256, (count, n_out, n_in // 32, 16), dtype=np.uint8)
        scales = rng.integers(122, 126, (count, n_out, n_in // 32), dtype=np.uint8)
        del blocks[name]
        blocks |= {f"{name}_blocks": data, f"{name}_scales": scales}
        codes = np.stack((data & 15, data >> 4), axis=-1)  # the lower half of a byte comes first
        wide = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None, None]
        numbers[name] = np.ascontiguousarray(wide.reshape(count, n_out, n_in).swapaxes(1, 2))
    return blocks, numbers
