"""Tiny models with random weights: their folders in safetensors, and their results in plain NumPy.

Float64, dense, one sequence at a time: it imports nothing of fastattn. Tensors have the names and shapes of
Hugging Face's files. A kind is a `model_type`, unless its config says another.
"""

import json
import math

import numpy as np
import tiny_encoders
import tiny_gemma
import tiny_gemma4
import tiny_gpt_oss
import tiny_hybrid
import tiny_t5
from safetensors.numpy import save_file
from tiny_encoders import VOCAB, both
from tiny_numpy import attend, gelu_tanh, layer_norm, linear, rms_norm, rotated, silu

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32},
    "llama": {**_SIZES, "rope_theta": 100.0},
    "mistral": {**_SIZES, "num_key_value_heads": 1, "head_dim": 10, "sliding_window": 4},
    "qwen2": {**_SIZES, "tie_word_embeddings": True},
    "qwen3": {**_SIZES, "head_dim": 8, "rms_norm_eps": 1e-5},
    "ministral": {**_SIZES, "sliding_window": 4},
    "ministral3": {
        **_SIZES, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "rope_parameters": {
            "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
    "phi3": {**_SIZES, "head_dim": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "smollm3": {
        **_SIZES, "num_hidden_layers": 3, "no_rope_layer_interval": 2, "tie_word_embeddings": True,
        "rope_theta": 100.0,
    },
    "mixtral": {
        **_SIZES, "intermediate_size": 32, "num_local_experts": 5, "num_experts_per_tok": 2,
        "rope_theta": 100.0, "rms_norm_eps": 1e-5,
    },
    "qwen3_moe": {
        **_SIZES, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    },
    "granite": {
        **_SIZES, "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
        "logits_scaling": 0.7,
    },
    "olmo2": {**_SIZES, "rms_norm_eps": 1e-5, "rope_theta": 100.0},
    "olmo3": {
        **_SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-embedding": {**_SIZES, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "e5-mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 4},
    "eurobert": {**_SIZES, "max_position_embeddings": 32, "rope_theta": 100.0, "rms_norm_eps": 1e-5},
    **tiny_encoders.CONFIGS,
    **tiny_t5.CONFIGS,
    **tiny_gemma.CONFIGS,
    **tiny_gemma4.CONFIGS,
    **tiny_gpt_oss.CONFIGS,
    **tiny_hybrid.CONFIGS,
}  # fmt: skip
OLMO = ("olmo2", "olmo3")  # norms after attention and feed-forward alone
EXPERTS = (
    "gemma4-experts",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
)  # decoders without gradients
DECODERS = (
    "gpt2", "gemma2", "gemma3-causal", "gemma4_text", "granite", "granitemoehybrid", "lfm2", "llama",
    "ministral", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5_text", "smollm3", *OLMO,
    *EXPERTS,
)  # fmt: skip
UNTRAINED = (*EXPERTS, "gemma2", "gemma4_text")
TRAINED_DECODERS = tuple(kind for kind in DECODERS if kind not in UNTRAINED)
FROM_DECODERS = ("qwen3-embedding", "e5-mistral")  # encoders: their folders have modules.json
_MODULES = tiny_encoders, tiny_t5, tiny_gemma, tiny_gemma4, tiny_gpt_oss, tiny_hybrid
_ELSEWHERE = {kind: module for module in _MODULES for kind in module.CONFIGS}
ENCODERS = ("eurobert", *FROM_DECODERS, *(kind for kind in _ELSEWHERE if kind not in DECODERS))


def shapes(kind, config):
    """Shape of every tensor by its name."""
    c = config
    if kind in _ELSEWHERE:
        return _ELSEWHERE[kind].shapes(kind, c)
    if kind == "gpt2":
        h, inner = c["n_embd"], 4 * c["n_embd"]
        found = {"wte.weight": (c["vocab_size"], h), "wpe.weight": (c["n_positions"], h), **both("ln_f", h)}
        for i in range(c["n_layer"]):
            found |= {**both(f"h.{i}.ln_1", h), **both(f"h.{i}.ln_2", h)}
            for name, n_in, n_out in (
                ("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h),
                ("mlp.c_fc", h, inner), ("mlp.c_proj", inner, h),
            ):  # fmt: skip
                found |= {f"h.{i}.{name}.weight": (n_in, n_out), f"h.{i}.{name}.bias": (n_out,)}
        return found
    h, inner, layers = c["hidden_size"], c["intermediate_size"], range(c["num_hidden_layers"])
    head_dim = c.get("head_dim", h // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    prefix, kind = _llama_names(kind, c)
    found = {f"{prefix}embed_tokens.weight": (c["vocab_size"], h), f"{prefix}norm.weight": (h,)}
    if prefix and not c.get("tie_word_embeddings"):
        found["lm_head.weight"] = (c["vocab_size"], h)
    for layer in (f"{prefix}layers.{i}." for i in layers):
        maps = (
            ("self_attn.q_proj", h, q), ("self_attn.k_proj", h, kv), ("self_attn.v_proj", h, kv),
            ("mlp.gate_proj", h, inner), ("mlp.up_proj", h, inner),
        )  # fmt: skip
        if kind == "phi3":
            maps = ("self_attn.qkv_proj", h, q + 2 * kv), ("mlp.gate_up_proj", h, 2 * inner)
        maps = (*maps, ("self_attn.o_proj", q, h), ("mlp.down_proj", inner, h))
        if kind in EXPERTS:
            maps = (*maps[:3], maps[-2], *_expert_maps(kind, c))
        for name, n_in, n_out in maps:
            found[f"{layer}{name}.weight"] = (n_out, n_in)
            if kind == "qwen2" and name[:11] in ("self_attn.q", "self_attn.k", "self_attn.v"):
                found[f"{layer}{name}.bias"] = (n_out,)
        first = "post_feedforward_layernorm" if kind in OLMO else "input_layernorm"
        found |= {f"{layer}{name}.weight": (h,) for name in (first, "post_attention_layernorm")}
        if kind in OLMO:
            found |= {f"{layer}self_attn.q_norm.weight": (q,), f"{layer}self_attn.k_norm.weight": (kv,)}
        if kind in ("qwen3", "qwen3_moe"):
            found |= {f"{layer}self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return found


def _expert_maps(kind, c):
    """The router and the maps of each expert: names, inputs and outputs."""
    h, inner = c["hidden_size"], c.get("moe_intermediate_size", c["intermediate_size"])
    if kind == "mixtral":
        prefix, count, names = "block_sparse_moe", c["num_local_experts"], ("w1", "w3", "w2")
    else:
        prefix, count, names = "mlp", c["num_experts"], ("gate_proj", "up_proj", "down_proj")
    yield f"{prefix}.gate", h, count
    for i in range(count):
        for name, sizes in zip(names, ((h, inner), (h, inner), (inner, h)), strict=True):
            yield f"{prefix}.experts.{i}.{name}", *sizes


def mixed(kind, c, t, layer, y):
    """The experts' result for rows y, one row at a time."""
    router, *maps = (name for name, *_ in _expert_maps(kind, c))
    logits = linear(y, t, f"{layer}{router}")
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    out = np.zeros_like(y)
    for row, probs, to in zip(y, chances, out, strict=True):
        best = np.argsort(-probs)[: c["num_experts_per_tok"]]
        total = probs[best].sum() if kind == "mixtral" or c.get("norm_topk_prob") else 1.0
        for i in best:
            gate, up, down = (f"{layer}{name}" for name in maps[3 * i : 3 * i + 3])
            inner = silu(linear(row, t, gate)) * linear(row, t, up)
            to += probs[i] / total * linear(inner, t, down)
    return out


def _llama_names(kind, config):
    """The prefix of all tensors but the output's, and the `model_type`."""
    return "" if kind in ("eurobert", *FROM_DECODERS) else "model.", config.get("model_type", kind)


def tensors(kind, config, seed=0):
    """Random tensors: weights of norms lie around 1 (where a model adds 1, around 0), others around 0."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in shapes(kind, config).items():
        is_norm = name.endswith(".weight") and len(shape) == 1
        if kind in tiny_gemma.CONFIGS or (kind in tiny_hybrid.QWENS and "linear" not in name):
            is_norm = False
        if kind in tiny_gemma4.CONFIGS:  # scores are not scaled
            is_norm = name.endswith(("layer_scalar", "scale")) or (
                is_norm and not name.endswith("q_norm.weight")
            )
        # T5 does not scale its scores, either, and convolutions multiply what their map gives.
        scale = 0.1 if name.endswith(("SelfAttention.q.weight", "conv.in_proj.weight")) else 0.3
        drawn[name] = (is_norm + scale * rng.standard_normal(shape)).astype(np.float32)
    return drawn


def write(folder, kind, weights=None, **changes):
    """Write a model's folder and return its tensors. `changes` are values of config.json."""
    config = {**CONFIGS[kind], **changes}
    weights = tensors(kind, config) if weights is None else weights
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    save_file(weights, folder / "model.safetensors")
    if kind in FROM_DECODERS:
        write_modules(folder, "lasttoken")
    return weights


def write_modules(folder, pooling):
    """The files with which sentence-transformers says how hidden states become a vector."""
    parts = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{x}"} for x, path in parts.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": pooling}))


def result(kind, config, t, ids):
    """Hidden states of an encoder, logits of a decoder; ids is (L,), the result (L, n)."""
    t = {name: x.astype(np.float64) for name, x in t.items()}
    own = {"gpt2": _gpt2} | {other: module.result for other, module in _ELSEWHERE.items()}
    return own.get(kind, _llama)(kind, config, t, np.array(ids))


def _gpt2(kind, c, t, ids):
    n, heads = len(ids), c["n_head"]

    def transposed(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["wte.weight"][ids] + t["wpe.weight"][:n]
    for layer in (f"h.{i}." for i in range(c["n_layer"])):
        qkv = transposed(layer_norm(x, t, f"{layer}ln_1"), f"{layer}attn.c_attn")
        q, k, v = (part.reshape(n, heads, -1) for part in np.split(qkv, 3, axis=1))
        x = x + transposed(attend(q, k, v, np.tri(n)), f"{layer}attn.c_proj")
        inner = gelu_tanh(transposed(layer_norm(x, t, f"{layer}ln_2"), f"{layer}mlp.c_fc"))
        x = x + transposed(inner, f"{layer}mlp.c_proj")
    return layer_norm(x, t, "ln_f") @ t["wte.weight"].T


def _parted(t, sizes, inner):
    """Tensors of Phi-3 under Llama's names."""
    found = dict(t)
    for name, x in t.items():
        layer = name.partition("self_attn.")[0]
        if name.endswith("qkv_proj.weight"):
            parts = np.split(x, np.cumsum(sizes)[:2])
            found |= {f"{layer}self_attn.{part}_proj.weight": y for part, y in zip("qkv", parts, strict=True)}
        if name.endswith("gate_up_proj.weight"):
            found |= {name.replace("gate_up", "gate"): x[:inner], name.replace("gate_up", "up"): x[inner:]}
    return found


def _llama(kind, c, t, ids):
    n, eps = len(ids), c.get("rms_norm_eps", 1e-6)
    prefix, kind = _llama_names(kind, c)
    q_heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = c.get("head_dim", c["hidden_size"] // q_heads)
    theta = c.get("rope_theta", 10000.0)
    back = np.arange(n)[:, None] - np.arange(n)
    kinds = c.get("layer_types", ["sliding_attention"] * c["num_hidden_layers"])
    turned = int(head_dim * c.get("partial_rotary_factor", 1))  # dimensions of a head
    if kind == "phi3":
        t = _parted(t, [q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], c["intermediate_size"])

    x = t[f"{prefix}embed_tokens.weight"][ids] * c.get("embedding_multiplier", 1.0)
    added = c.get("residual_multiplier", 1.0)
    for i, layer in enumerate(f"{prefix}layers.{i}." for i in range(c["num_hidden_layers"])):
        width = c.get("sliding_window", n) if kinds[i] == "sliding_attention" else n
        allowed = (back >= 0) & (back < width) if kind != "eurobert" else np.ones((n, n))
        has_positions = (i + 1) % c.get("no_rope_layer_interval", n + 2)
        y = x if kind in OLMO else rms_norm(x, t[f"{layer}input_layernorm.weight"], eps)
        q, k, v = (linear(y, t, f"{layer}self_attn.{part}_proj") for part in "qkv")
        if kind in OLMO:
            q = rms_norm(q, t[f"{layer}self_attn.q_norm.weight"], eps)
            k = rms_norm(k, t[f"{layer}self_attn.k_norm.weight"], eps)
        q, k, v = (x.reshape(n, -1, head_dim) for x in (q, k, v))
        if kind == "ministral3":
            rope = c["rope_parameters"]
            distance = np.arange(n) // rope["original_max_position_embeddings"]
            q = q * (1 + rope["llama_4_scaling_beta"] * np.log(1 + distance))[:, None, None]
        if kind in ("qwen3", "qwen3_moe"):
            q = rms_norm(q, t[f"{layer}self_attn.q_norm.weight"], eps)
            k = rms_norm(k, t[f"{layer}self_attn.k_norm.weight"], eps)
        if has_positions:
            q, k = (np.concatenate([rotated(y[..., :turned], theta), y[..., turned:]], -1) for y in (q, k))
        q = (
            q * c.get("attention_multiplier", head_dim**-0.5) * math.sqrt(head_dim)
        )  # which `attend` divides by
        y = linear(attend(q, k, v, allowed), t, f"{layer}self_attn.o_proj")
        if kind in OLMO:
            x = y = x + rms_norm(y, t[f"{layer}post_attention_layernorm.weight"], eps)
        else:
            x = x + added * y
            y = rms_norm(x, t[f"{layer}post_attention_layernorm.weight"], eps)
        if kind in EXPERTS:
            x = x + mixed(kind, c, t, layer, y)
            continue
        gate = silu(linear(y, t, f"{layer}mlp.gate_proj"))
        y = linear(gate * linear(y, t, f"{layer}mlp.up_proj"), t, f"{layer}mlp.down_proj")
        y = rms_norm(y, t[f"{layer}post_feedforward_layernorm.weight"], eps) if kind in OLMO else y
        x = x + added * y
    x = rms_norm(x, t[f"{prefix}norm.weight"], eps)
    if not prefix:
        return x
    return x @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T / c.get("logits_scaling", 1.0)
