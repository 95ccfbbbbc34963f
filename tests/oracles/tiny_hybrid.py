"""Models with recurrent layers, for `tiny_models`: config, shapes of tensors, result in plain NumPy."""

import numpy as np
from tiny_numpy import attend, linear, rms_norm, rotated, silu

VOCAB = 60
_QWEN = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 100.0,
    "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "rms_norm_eps": 1e-2,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}  # fmt: skip
CONFIGS = {
    "lfm2": {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False, "layer_types": ["conv", "full_attention", "conv"],
        "rope_theta": 100.0,
    },
    "granitemoehybrid": {
        "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 0, "shared_intermediate_size": 40,
        "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 6, "mamba_d_state": 7,
        "mamba_n_groups": 2, "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5, "logits_scaling": 0.6, "time_step_limit": [0.4, 0.9],
        "rms_norm_eps": 1e-3,
    },
    "qwen3_5_text": {**_QWEN},
    "qwen3_next": {**_QWEN, **_EXPERTS, "linear_num_key_heads": 1},
    "qwen3_5_moe_text": {**_QWEN, **_EXPERTS},
}  # fmt: skip
QWENS = "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"


def shapes(kind, c):
    """Shape of every tensor by its name."""
    own = {"lfm2": _lfm2_shapes, "granitemoehybrid": _granite_shapes}
    return own.get(kind, _qwen_shapes)(kind, c)


def result(kind, c, t, ids):
    """Logits (L, vocab); ids is (L,)."""
    return {"lfm2": _lfm2, "granitemoehybrid": _granite}.get(kind, _qwen)(kind, c, t, ids)


def _lfm2_shapes(kind, c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    head_dim = h // c["num_attention_heads"]
    kv = c["num_key_value_heads"] * head_dim
    found = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.embedding_norm.weight": (h,)}
    found["lm_head.weight"] = (c["vocab_size"], h)
    for i, own in enumerate(c["layer_types"]):
        layer = {"operator_norm": (h,), "ffn_norm": (h,), "feed_forward.w2": (h, inner)}
        layer |= {f"feed_forward.{name}": (inner, h) for name in ("w1", "w3")}
        if own == "conv":
            layer |= {"conv.conv": (h, 1, 3), "conv.in_proj": (3 * h, h), "conv.out_proj": (h, h)}
        else:
            layer |= {"self_attn.q_proj": (h, h), "self_attn.out_proj": (h, h)}
            layer |= {f"self_attn.{part}_proj": (kv, h) for part in "kv"}
            layer |= {f"self_attn.{part}_layernorm": (head_dim,) for part in "qk"}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def _lfm2(kind, c, t, ids):
    n, heads = len(ids), c["num_attention_heads"]
    x = t["model.embed_tokens.weight"][ids]
    for i, own in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        y = rms_norm(x, t[f"{layer}operator_norm.weight"], 1e-5)
        if own == "conv":
            b, gate, z = np.split(linear(y, t, f"{layer}conv.in_proj"), 3, axis=1)
            y = linear(gate * convolved(b * z, t[f"{layer}conv.conv.weight"]), t, f"{layer}conv.out_proj")
        else:
            attention = f"{layer}self_attn."
            q, k, v = (linear(y, t, f"{attention}{part}_proj") for part in "qkv")
            q, k, v = (part.reshape(n, -1, c["hidden_size"] // heads) for part in (q, k, v))
            q, k = (
                rotated(rms_norm(part, t[f"{attention}{name}_layernorm.weight"], 1e-5), c["rope_theta"])
                for part, name in ((q, "q"), (k, "k"))
            )
            y = linear(attend(q, k, v, np.tri(n)), t, f"{attention}out_proj")
        x = x + y
        y = rms_norm(x, t[f"{layer}ffn_norm.weight"], 1e-5)
        inner = silu(linear(y, t, f"{layer}feed_forward.w1")) * linear(y, t, f"{layer}feed_forward.w3")
        x = x + linear(inner, t, f"{layer}feed_forward.w2")
    return rms_norm(x, t["model.embedding_norm.weight"], 1e-5) @ t["lm_head.weight"].T


def convolved(x, taps):
    """The causal convolution of x (L, channels), channel by channel."""
    width = taps.shape[2]
    before = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return sum(before[i : i + len(x)] * taps[:, 0, i] for i in range(width))


def _qwen_shapes(kind, c):
    h, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    heads, dim_v = c["linear_num_value_heads"], c["linear_value_head_dim"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    mixed, values = 2 * keys + heads * dim_v, heads * dim_v
    found = {f"model.{name}.weight": (c["vocab_size"], h) for name in ("embed_tokens",)}
    found |= {"lm_head.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    for i, own in enumerate(c["layer_types"]):
        layer = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        if own == "full_attention":
            layer |= {"self_attn.q_proj": (2 * q, h), "self_attn.o_proj": (h, q)}
            layer |= {f"self_attn.{part}_proj": (kv, h) for part in "kv"}
            layer |= {f"self_attn.{part}_norm": (head_dim,) for part in "qk"}
        else:
            maps = {"qkv": mixed, "z": values, "b": heads, "a": heads}
            if kind == "qwen3_next":
                maps = {"qkvz": mixed + values, "ba": 2 * heads}
            layer |= {f"linear_attn.in_proj_{name}": (n, h) for name, n in maps.items()}
            layer |= {"linear_attn.conv1d": (mixed, 1, 4), "linear_attn.norm": (dim_v,)}
            layer["linear_attn.out_proj"] = (h, values)
            found |= {f"model.layers.{i}.linear_attn.{name}": (heads,) for name in ("A_log", "dt_bias")}
        forwards = {"mlp.": inner}
        if "num_experts" in c:
            forwards = {f"mlp.experts.{i}.": c["moe_intermediate_size"] for i in range(c["num_experts"])}
            forwards["mlp.shared_expert."] = c["shared_expert_intermediate_size"]
            layer |= {"mlp.gate": (c["num_experts"], h), "mlp.shared_expert_gate": (1, h)}
        for prefix, n in forwards.items():
            layer |= {f"{prefix}gate_proj": (n, h), f"{prefix}up_proj": (n, h), f"{prefix}down_proj": (h, n)}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def _qwen(kind, c, t, ids):
    n, eps, head_dim = len(ids), c["rms_norm_eps"], c["head_dim"]
    turned = int(head_dim * c["partial_rotary_factor"])

    def norm(x, name):
        return rms_norm(x, 1 + t[f"{name}.weight"], eps)

    def feed_forward(y, prefix):
        inner = silu(linear(y, t, f"{prefix}gate_proj")) * linear(y, t, f"{prefix}up_proj")
        return linear(inner, t, f"{prefix}down_proj")

    def turn(x):
        return np.concatenate([rotated(x[..., :turned], c["rope_theta"]), x[..., turned:]], axis=-1)

    x = t["model.embed_tokens.weight"][ids]
    for i, own in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        y = norm(x, f"{layer}input_layernorm")
        if own == "full_attention":
            attention = f"{layer}self_attn."
            q, k, v = (linear(y, t, f"{attention}{part}_proj").reshape(n, -1, head_dim) for part in "qkv")
            q, gate = q[:, ::2], q[:, 1::2]  # of each head, one after the other
            q, k = turn(norm(q, f"{attention}q_norm")), turn(norm(k, f"{attention}k_norm"))
            y = attend(q, k, v, np.tri(n)) * sigmoid(gate.reshape(n, -1))
            x = x + linear(y, t, f"{attention}o_proj")
        else:
            x = x + delta_net(kind, c, t, f"{layer}linear_attn.", y)
        y = norm(x, f"{layer}post_attention_layernorm")
        if kind == "qwen3_5_text":
            x = x + feed_forward(y, f"{layer}mlp.")
            continue
        chances = np.exp(linear(y, t, f"{layer}mlp.gate"))
        share = sigmoid(linear(y, t, f"{layer}mlp.shared_expert_gate"))
        x = x + share * feed_forward(y, f"{layer}mlp.shared_expert.")
        for row, to, probs in zip(y, x, chances, strict=True):
            best = np.argsort(-probs)[: c["num_experts_per_tok"]]
            for j in best:
                total = probs[best if c.get("norm_topk_prob", True) else slice(None)].sum()
                to += probs[j] / total * feed_forward(row, f"{layer}mlp.experts.{j}.")
    return norm(x, "model.norm") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def delta_net(kind, c, t, prefix, y):
    """A gated DeltaNet, token by token."""
    n, heads, groups = len(y), c["linear_num_value_heads"], c["linear_num_key_heads"]
    dim, dim_v, each = c["linear_key_head_dim"], c["linear_value_head_dim"], heads // groups
    if kind == "qwen3_next":
        qkvz = linear(y, t, f"{prefix}in_proj_qkvz").reshape(n, groups, -1)
        parts = np.split(qkvz, np.cumsum([dim, dim, each * dim_v]), axis=2)
        q, k, v, z = (part.reshape(n, -1) for part in parts)
        b, a = np.split(linear(y, t, f"{prefix}in_proj_ba").reshape(n, groups, -1), 2, axis=2)
        mixed, b, a = np.concatenate([q, k, v], axis=1), b.reshape(n, -1), a.reshape(n, -1)
    else:
        mixed, z, b, a = (linear(y, t, f"{prefix}in_proj_{name}") for name in ("qkv", "z", "b", "a"))
    mixed = silu(convolved(mixed, t[f"{prefix}conv1d.weight"]))
    q, k, v = np.split(mixed, np.cumsum([groups * dim] * 2), axis=1)
    q, k = (part.reshape(n, groups, dim) for part in (q, k))
    q, k = (
        np.repeat(part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6), each, axis=1)
        for part in (q, k)
    )
    v, z = v.reshape(n, heads, dim_v), z.reshape(n, heads, dim_v)
    decay = np.exp(-np.exp(t[f"{prefix}A_log"]) * np.log1p(np.exp(a + t[f"{prefix}dt_bias"])))
    state, out = np.zeros((heads, dim, dim_v)), np.zeros((n, heads, dim_v))
    for i in range(n):
        state *= decay[i][:, None, None]
        there = np.einsum("hkv,hk->hv", state, k[i])
        state += np.einsum("hk,hv->hkv", k[i], sigmoid(b[i])[:, None] * (v[i] - there))
        out[i] = np.einsum("hkv,hk->hv", state, q[i]) / np.sqrt(dim)
    out = rms_norm(out, t[f"{prefix}norm.weight"], c["rms_norm_eps"]) * silu(z)
    return linear(out.reshape(n, -1), t, f"{prefix}out_proj")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _granite_shapes(kind, c):
    h, inner, heads = c["hidden_size"], c["shared_intermediate_size"], c["mamba_n_heads"]
    kv = c["num_key_value_heads"] * h // c["num_attention_heads"]
    mixed = 2 * h + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    found = {f"{name}.weight": (c["vocab_size"], h) for name in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = (h,)
    for i, own in enumerate(c["layer_types"]):
        prefix = f"model.layers.{i}."
        layer = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        layer |= {"shared_mlp.input_linear": (2 * inner, h), "shared_mlp.output_linear": (h, inner)}
        if experts := c["num_local_experts"]:
            layer["block_sparse_moe.router.layer"] = (experts, h)
            layer["block_sparse_moe.input_linear"] = (experts, 2 * c["intermediate_size"], h)
            layer["block_sparse_moe.output_linear"] = (experts, h, c["intermediate_size"])
        if own == "attention":
            layer |= {f"self_attn.{part}_proj": (h, h) for part in "qo"}
            layer |= {f"self_attn.{part}_proj": (kv, h) for part in "kv"}
        else:
            layer |= {"mamba.in_proj": (2 * h + mixed + heads, h), "mamba.out_proj": (h, 2 * h)}
            layer |= {"mamba.conv1d": (mixed, 1, 4), "mamba.norm": (2 * h,)}
            found |= {f"{prefix}mamba.{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
            found[f"{prefix}mamba.conv1d.bias"] = (mixed,)
        found |= {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
    return found


def _granite(kind, c, t, ids):
    n, eps, times = len(ids), c["rms_norm_eps"], c["residual_multiplier"]
    head_dim = c["hidden_size"] // c["num_attention_heads"]

    x = t["model.embed_tokens.weight"][ids] * c["embedding_multiplier"]
    for i, own in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        y = rms_norm(x, t[f"{layer}input_layernorm.weight"], eps)
        if own == "attention":
            q, k, v = (
                linear(y, t, f"{layer}self_attn.{part}_proj").reshape(n, -1, head_dim) for part in "qkv"
            )
            q = q * c["attention_multiplier"] * np.sqrt(head_dim)
            y = linear(attend(q, k, v, np.tri(n)), t, f"{layer}self_attn.o_proj")
        else:
            y = mamba2(c, t, f"{layer}mamba.", y)
        x = x + times * y
        y = rms_norm(x, t[f"{layer}post_attention_layernorm.weight"], eps)
        gate, up = np.split(linear(y, t, f"{layer}shared_mlp.input_linear"), 2, axis=1)
        x = x + times * linear(silu(gate) * up, t, f"{layer}shared_mlp.output_linear")
    return rms_norm(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T / c["logits_scaling"]


def mamba2(c, t, prefix, y):
    """Mamba 2, token by token."""
    n, heads, groups, states = len(y), c["mamba_n_heads"], c["mamba_n_groups"], c["mamba_d_state"]
    inner = 2 * c["hidden_size"]
    product = linear(y, t, f"{prefix}in_proj")
    gate, mixed, dt = np.split(product, [inner, product.shape[1] - heads], axis=1)
    mixed = silu(convolved(mixed, t[f"{prefix}conv1d.weight"]) + t[f"{prefix}conv1d.bias"])
    x, b, read = np.split(mixed, np.cumsum([inner, groups * states]), axis=1)
    x = x.reshape(n, heads, -1)
    b, read = (np.repeat(part.reshape(n, groups, -1), heads // groups, axis=1) for part in (b, read))
    step = np.clip(np.log1p(np.exp(dt + t[f"{prefix}dt_bias"])), *c["time_step_limit"])
    decay = np.exp(-np.exp(t[f"{prefix}A_log"]) * step)
    state, out = np.zeros((heads, states, x.shape[2])), np.zeros_like(x)
    for i in range(n):
        state = decay[i][:, None, None] * state
        state += np.einsum("hs,hd->hsd", b[i], step[i][:, None] * x[i])
        out[i] = np.einsum("hsd,hs->hd", state, read[i]) + t[f"{prefix}D"][:, None] * x[i]
    out = (out.reshape(n, -1) * silu(gate)).reshape(n, groups, -1)
    out = rms_norm(out, 1.0, c["rms_norm_eps"]).reshape(n, -1) * t[f"{prefix}norm.weight"]
    return linear(out, t, f"{prefix}out_proj")
