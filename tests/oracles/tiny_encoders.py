"""Families of encoders for `tiny_models`: configs, the shapes of their tensors, results in plain NumPy."""

import numpy as np
from tiny_numpy import attend, gelu, gelu_tanh, layer_norm, linear, rms_norm, rotated, silu

VOCAB = 60

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "modernbert": {
        **SIZES, "num_hidden_layers": 3, "global_attn_every_n_layers": 2, "local_attention": 4,
        "global_rope_theta": 1000.0, "local_rope_theta": 100.0,
    },
    "eurobert": {
        **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 100.0, "rms_norm_eps": 1e-5
    },
    "distilbert": {
        "vocab_size": VOCAB, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 3,
        "max_position_embeddings": 32,
    },
    "jina-v2": {
        **SIZES, "model_type": "bert", "layer_norm_eps": 1e-5, "type_vocab_size": 2,
        "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    },
    "jina-v2-code": {
        **SIZES, "model_type": "bert", "layer_norm_eps": 1e-5, "type_vocab_size": 2,
        "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    },
    "mpnet": {**SIZES, "max_position_embeddings": 34, "layer_norm_eps": 1e-5},
    "nomic_bert": {
        **SIZES, "layer_norm_eps": 1e-5, "type_vocab_size": 2, "rope_parameters": {"rope_theta": 100.0},
    },
    "jina_embeddings_v3": {
        **SIZES, "layer_norm_eps": 1e-5, "type_vocab_size": 1,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    },
    "nomic-experts": {
        "model_type": "nomic_bert", "vocab_size": VOCAB, "n_embd": 24, "n_inner": 40, "n_head": 3,
        "n_layer": 3, "n_positions": 32, "type_vocab_size": 1, "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
        "rotary_emb_fraction": 1.0, "rotary_emb_base": 100.0, "num_experts": 5, "moe_top_k": 2,
        "moe_every_n_layers": 2,
    },
    "new": {
        **SIZES, "layer_norm_eps": 1e-5, "type_vocab_size": 1, "rope_theta": 20.0,
        "rope_scaling": {"type": "ntk", "factor": 4.0},
    },
    "gte": {
        **SIZES, "layer_norm_eps": 1e-5, "type_vocab_size": 0,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    },
    "albert": {
        **SIZES, "layer_norm_eps": 1e-5, "embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 3,
    },
    "deberta-v2": {
        **SIZES, "layer_norm_eps": 1e-5, "relative_attention": True, "position_buckets": 4,
        "max_relative_positions": -1, "pos_att_type": "p2c|c2p", "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip


def shapes(kind, c):
    """Shape of every tensor by its name."""
    return _FAMILIES[kind][0](c)


def result(kind, c, t, ids):
    """Hidden states (L, hidden); ids is (L,)."""
    return _FAMILIES[kind][1](c, t, ids)


def counted(ids, padding):
    """The position of each token in RoBERTa: that of the padding token is its id, and it is not counted."""
    real = np.array(ids) != padding
    return np.where(real, padding + np.cumsum(real), padding)


def both(name, n):
    return {f"{name}.weight": (n,), f"{name}.bias": (n,)}


def maps(layer, sizes, biased=True):
    """Linear maps, each name with (n_in, n_out)."""
    found = {}
    for name, (n_in, n_out) in sizes.items():
        found[f"{layer}{name}.weight"] = (n_out, n_in)
        if biased:
            found[f"{layer}{name}.bias"] = (n_out,)
    return found


def _modernbert_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.tok_embeddings.weight": (VOCAB, h), "embeddings.norm.weight": (h,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}."
        found |= {f"{layer}attn.Wqkv.weight": (3 * h, h), f"{layer}attn.Wo.weight": (h, h)}
        found |= {f"{layer}mlp.Wi.weight": (2 * inner, h), f"{layer}mlp.Wo.weight": (h, inner)}
        found |= {f"{layer}{name}_norm.weight": (h,) for name in (("attn", "mlp") if i else ("mlp",))}
    return {**found, "final_norm.weight": (h,)}


def _modernbert(c, t, ids):
    heads, n = c["num_attention_heads"], len(ids)
    away = np.abs(np.arange(n)[:, None] - np.arange(n))
    x = layer_norm(t["embeddings.tok_embeddings.weight"][ids], t, "embeddings.norm")
    for i in range(c["num_hidden_layers"]):
        layer, slides = f"layers.{i}.", i % c["global_attn_every_n_layers"]
        theta = c["local_rope_theta" if slides else "global_rope_theta"]
        y = layer_norm(x, t, f"{layer}attn_norm") if i else x
        q, k, v = linear(y, t, f"{layer}attn.Wqkv").reshape(n, 3, heads, -1).transpose(1, 0, 2, 3)
        allowed = away <= (c["local_attention"] // 2 if slides else n)
        x = x + linear(attend(rotated(q, theta), rotated(k, theta), v, allowed), t, f"{layer}attn.Wo")
        gate, up = np.split(linear(layer_norm(x, t, f"{layer}mlp_norm"), t, f"{layer}mlp.Wi"), 2, axis=1)
        x = x + linear(gelu(gate) * up, t, f"{layer}mlp.Wo")
    return layer_norm(x, t, "final_norm")


def _eurobert_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    kv = h * c["num_key_value_heads"] // c["num_attention_heads"]
    found = {"embed_tokens.weight": (VOCAB, h), "norm.weight": (h,)}
    for layer in (f"layers.{i}." for i in range(c["num_hidden_layers"])):
        sizes = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (h, kv), "self_attn.v_proj": (h, kv)}
        sizes |= {"self_attn.o_proj": (h, h), "mlp.gate_proj": (h, inner), "mlp.up_proj": (h, inner)}
        found |= maps(layer, {**sizes, "mlp.down_proj": (inner, h)}, biased=False)
        found |= {f"{layer}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
    return found


def _eurobert(c, t, ids):
    n, heads, kv = len(ids), c["num_attention_heads"], c["num_key_value_heads"]
    theta, eps = c["rope_theta"], c["rms_norm_eps"]
    x = t["embed_tokens.weight"][ids]
    for layer in (f"layers.{i}." for i in range(c["num_hidden_layers"])):
        y = rms_norm(x, t[f"{layer}input_layernorm.weight"], eps)
        q, k, v = (linear(y, t, f"{layer}self_attn.{part}_proj") for part in "qkv")
        q, k = rotated(q.reshape(n, heads, -1), theta), rotated(k.reshape(n, kv, -1), theta)
        v = v.reshape(n, kv, -1)
        x = x + linear(attend(q, k, v, np.ones((n, n))), t, f"{layer}self_attn.o_proj")
        y = rms_norm(x, t[f"{layer}post_attention_layernorm.weight"], eps)
        y = silu(linear(y, t, f"{layer}mlp.gate_proj")) * linear(y, t, f"{layer}mlp.up_proj")
        x = x + linear(y, t, f"{layer}mlp.down_proj")
    return rms_norm(x, t["norm.weight"], eps)


def _distilbert_shapes(c):
    h, inner = c["dim"], c["hidden_dim"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("embeddings.LayerNorm", h)}
    found["embeddings.position_embeddings.weight"] = (c["max_position_embeddings"], h)
    for i in range(c["n_layers"]):
        layer = f"transformer.layer.{i}."
        found |= maps(f"{layer}attention.", dict.fromkeys(("q_lin", "k_lin", "v_lin", "out_lin"), (h, h)))
        found |= maps(f"{layer}ffn.", {"lin1": (h, inner), "lin2": (inner, h)})
        found |= both(f"{layer}sa_layer_norm", h) | both(f"{layer}output_layer_norm", h)
    return found


def _distilbert(c, t, ids):
    n = len(ids)
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][:n]
    x = layer_norm(x, t, "embeddings.LayerNorm", 1e-12)
    for layer in (f"transformer.layer.{i}." for i in range(c["n_layers"])):
        q, k, v = (linear(x, t, f"{layer}attention.{p}_lin").reshape(n, c["n_heads"], -1) for p in "qkv")
        x = x + linear(attend(q, k, v, np.ones((n, n))), t, f"{layer}attention.out_lin")
        x = layer_norm(x, t, f"{layer}sa_layer_norm", 1e-12)
        x = x + linear(gelu(linear(x, t, f"{layer}ffn.lin1")), t, f"{layer}ffn.lin2")
        x = layer_norm(x, t, f"{layer}output_layer_norm", 1e-12)
    return x


def _mpnet_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("embeddings.LayerNorm", h)}
    found["embeddings.position_embeddings.weight"] = (c["max_position_embeddings"], h)
    found["encoder.relative_attention_bias.weight"] = (32, c["num_attention_heads"])
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        found |= maps(f"{layer}attention.attn.", dict.fromkeys("qkvo", (h, h)))
        found |= maps(layer, {"intermediate.dense": (h, inner), "output.dense": (inner, h)})
        found |= both(f"{layer}attention.LayerNorm", h) | both(f"{layer}output.LayerNorm", h)
    return found


def _mpnet(c, t, ids):
    n, heads = len(ids), c["num_attention_heads"]
    away = np.arange(n) - np.arange(n)[:, None]  # a key's place behind its query
    far = 8 + np.log2(np.maximum(np.abs(away), 8) / 8) / 4 * 8  # log(128 / 8) is 4
    bucket = np.where(np.abs(away) < 8, np.abs(away), np.minimum(far, 15)).astype(int) + 16 * (away > 0)
    bias = t["encoder.relative_attention_bias.weight"][bucket].transpose(2, 0, 1)
    x = (
        t["embeddings.word_embeddings.weight"][ids]
        + t["embeddings.position_embeddings.weight"][counted(ids, 1)]
    )
    x = layer_norm(x, t, "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{i}." for i in range(c["num_hidden_layers"])):
        q, k, v = (linear(x, t, f"{layer}attention.attn.{p}").reshape(n, heads, -1) for p in "qkv")
        x = x + linear(attend(q, k, v, np.ones((n, n)), bias), t, f"{layer}attention.attn.o")
        x = layer_norm(x, t, f"{layer}attention.LayerNorm")
        x = x + linear(gelu(linear(x, t, f"{layer}intermediate.dense")), t, f"{layer}output.dense")
        x = layer_norm(x, t, f"{layer}output.LayerNorm")
    return x


def _jina_v2_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("embeddings.LayerNorm", h)}
    found["embeddings.token_type_embeddings.weight"] = (c["type_vocab_size"], h)
    for layer in (f"encoder.layer.{i}." for i in range(c["num_hidden_layers"])):
        names = "self.query", "self.key", "self.value", "output.dense"
        found |= maps(f"{layer}attention.", dict.fromkeys(names, (h, h)))
        found |= maps(layer, {"mlp.gated_layers": (h, 2 * inner)}, biased=False)
        found |= maps(layer, {"mlp.wo": (inner, h)})
        found |= both(f"{layer}attention.output.LayerNorm", h) | both(f"{layer}mlp.layernorm", h)
    return found


def _jina_v2_code_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {name: shape for name, shape in _jina_v2_shapes(c).items() if ".mlp." not in name}
    for layer in (f"encoder.layer.{i}." for i in range(c["num_hidden_layers"])):
        found |= maps(layer, {"mlp.up_gated_layer": (h, 2 * inner)}, biased=False)
        found |= maps(layer, {"mlp.down_layer": (inner, h)})
        for name in (
            "attention.self.layer_norm_q",
            "attention.self.layer_norm_k",
            "layer_norm_1",
            "layer_norm_2",
        ):
            found |= both(f"{layer}{name}", h)
    return found


def _jina_v2(c, t, ids):
    n, heads, eps = len(ids), c["num_attention_heads"], c["layer_norm_eps"]
    assert heads == 3  # whose slopes are those of two heads, and the first one of four
    slopes = np.array([2.0**-4, 2.0**-8, 2.0**-2])
    bias = -slopes[:, None, None] * np.abs(np.arange(n) - np.arange(n)[:, None])
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, t, "embeddings.LayerNorm", eps)
    for layer in (f"encoder.layer.{i}." for i in range(c["num_hidden_layers"])):
        names = (f"{layer}attention.self.{part}" for part in ("query", "key", "value"))
        q, k, v = (linear(x, t, name) for name in names)
        for_code = f"{layer}layer_norm_1.weight" in t
        if for_code:
            q, k = (
                layer_norm(each, t, f"{layer}attention.self.layer_norm_{part}", eps)
                for each, part in ((q, "q"), (k, "k"))
            )
        q, k, v = (each.reshape(n, heads, -1) for each in (q, k, v))
        y = linear(attend(q, k, v, np.ones((n, n)), bias), t, f"{layer}attention.output.dense")
        y = layer_norm(x + y, t, f"{layer}attention.output.LayerNorm", eps)
        if for_code:
            x = layer_norm(x + y, t, f"{layer}layer_norm_1", eps)
            up, gate = np.split(linear(x, t, f"{layer}mlp.up_gated_layer"), 2, axis=1)
            y = linear(up * gelu(gate), t, f"{layer}mlp.down_layer")
            x = layer_norm(x + y, t, f"{layer}layer_norm_2", eps)
            continue
        x = y
        gate, up = np.split(linear(x, t, f"{layer}mlp.gated_layers"), 2, axis=1)
        x = layer_norm(x + linear(gelu(gate) * up, t, f"{layer}mlp.wo"), t, f"{layer}mlp.layernorm", eps)
    return x


def _nomic_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("emb_ln", h)}
    found["embeddings.token_type_embeddings.weight"] = (c["type_vocab_size"], h)
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layers.{i}."
        sizes = {"attn.Wqkv": (h, 3 * h), "attn.out_proj": (h, h)}
        sizes |= {"mlp.fc11": (h, inner), "mlp.fc12": (h, inner), "mlp.fc2": (inner, h)}
        found |= {**maps(layer, sizes, biased=False), **both(f"{layer}norm1", h), **both(f"{layer}norm2", h)}
    return found


def _nomic(c, t, ids):
    n, heads, theta = len(ids), c["num_attention_heads"], c["rope_parameters"]["rope_theta"]
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, t, "emb_ln")
    for layer in (f"encoder.layers.{i}." for i in range(c["num_hidden_layers"])):
        q, k, v = linear(x, t, f"{layer}attn.Wqkv").reshape(n, 3, heads, -1).transpose(1, 0, 2, 3)
        y = attend(rotated(q, theta), rotated(k, theta), v, np.ones((n, n)))
        x = layer_norm(x + linear(y, t, f"{layer}attn.out_proj"), t, f"{layer}norm1")
        y = linear(x, t, f"{layer}mlp.fc11") * silu(linear(x, t, f"{layer}mlp.fc12"))
        x = layer_norm(x + linear(y, t, f"{layer}mlp.fc2"), t, f"{layer}norm2")
    return x


def _jina_v3_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("emb_ln", h)}
    found["embeddings.token_type_embeddings.weight"] = (c["type_vocab_size"], h)
    for layer in (f"encoder.layers.{i}." for i in range(c["num_hidden_layers"])):
        found |= maps(layer, {"mixer.Wqkv": (h, 3 * h), "mixer.out_proj": (h, h)})
        found |= maps(layer, {"mlp.fc1": (h, inner), "mlp.fc2": (inner, h)})
        found |= {**both(f"{layer}norm1", h), **both(f"{layer}norm2", h)}
    return found


def _jina_v3(c, t, ids):
    n, heads, theta = len(ids), c["num_attention_heads"], c["rope_parameters"]["rope_theta"]
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, t, "emb_ln")
    for layer in (f"encoder.layers.{i}." for i in range(c["num_hidden_layers"])):
        q, k, v = linear(x, t, f"{layer}mixer.Wqkv").reshape(n, 3, heads, -1).transpose(1, 0, 2, 3)
        y = attend(rotated(q, theta), rotated(k, theta), v, np.ones((n, n)))
        x = layer_norm(x + linear(y, t, f"{layer}mixer.out_proj"), t, f"{layer}norm1")
        y = linear(gelu(linear(x, t, f"{layer}mlp.fc1")), t, f"{layer}mlp.fc2")
        x = layer_norm(x + y, t, f"{layer}norm2")
    return x


def _nomic_experts_shapes(c):
    h, inner, experts = c["n_embd"], c["n_inner"], c["num_experts"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("emb_ln", h)}
    found["embeddings.token_type_embeddings.weight"] = (c["type_vocab_size"], h)
    for i in range(c["n_layer"]):
        layer = f"encoder.layers.{i}."
        found |= maps(layer, {"attn.Wqkv": (h, 3 * h), "attn.out_proj": (h, h)})
        if i % c["moe_every_n_layers"] == 1:
            found |= maps(f"{layer}mlp.", {"router.layer": (h, experts)}, biased=False)
            found |= {f"{layer}mlp.experts.mlp.w{part}": (experts * inner, h) for part in (1, 2)}
            found[f"{layer}mlp.experts.bias"] = (h,)
        else:
            found |= maps(f"{layer}mlp.", {"fc1": (h, inner), "fc2": (inner, h)})
        found |= {**both(f"{layer}norm1", h), **both(f"{layer}norm2", h)}
    return found


def _nomic_experts(c, t, ids):
    n, heads, theta = len(ids), c["n_head"], c["rotary_emb_base"]
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, t, "emb_ln")
    for i, layer in enumerate(f"encoder.layers.{i}." for i in range(c["n_layer"])):
        q, k, v = linear(x, t, f"{layer}attn.Wqkv").reshape(n, 3, heads, -1).transpose(1, 0, 2, 3)
        y = attend(rotated(q, theta), rotated(k, theta), v, np.ones((n, n)))
        x = layer_norm(x + linear(y, t, f"{layer}attn.out_proj"), t, f"{layer}norm1")
        if i % c["moe_every_n_layers"] == 1:
            chances = np.exp(linear(x, t, f"{layer}mlp.router.layer"))
            chances /= chances.sum(-1, keepdims=True)
            least = np.sort(chances)[:, -c["moe_top_k"], None]
            shape = c["num_experts"], c["n_inner"], -1
            w1, w2 = (t[f"{layer}mlp.experts.mlp.w{part}"].reshape(shape) for part in (1, 2))
            y = sum(
                np.where(chances >= least, chances, 0)[:, e, None] * (gelu(x @ w1[e].T) @ w2[e])
                for e in range(c["num_experts"])
            )
            y = y + t[f"{layer}mlp.experts.bias"]
        else:
            y = linear(gelu(linear(x, t, f"{layer}mlp.fc1")), t, f"{layer}mlp.fc2")
        x = layer_norm(x + y, t, f"{layer}norm2")
    return x


def _gte_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("embeddings.LayerNorm", h)}
    if c["type_vocab_size"]:
        found["embeddings.token_type_embeddings.weight"] = (c["type_vocab_size"], h)
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        found |= maps(layer, {"attention.qkv_proj": (h, 3 * h), "attention.o_proj": (h, h)})
        found |= maps(layer, {"mlp.up_gate_proj": (h, 2 * inner)}, biased=False)
        found |= maps(layer, {"mlp.down_proj": (inner, h)})
        found |= {**both(f"{layer}attn_ln", h), **both(f"{layer}mlp_ln", h)}
    return found


def _gte(c, t, ids):
    n, heads = len(ids), c["num_attention_heads"]
    x = t["embeddings.word_embeddings.weight"][ids]
    theta, slower = c.get("rope_theta"), 1.0
    if "rope_scaling" in c:
        factor = c["rope_scaling"]["factor"]
        theta, slower = theta * factor, factor ** (2 * heads / c["hidden_size"])
        x = x + t["embeddings.token_type_embeddings.weight"][0]
    else:
        theta = c["rope_parameters"]["rope_theta"]
    x = layer_norm(x, t, "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{i}." for i in range(c["num_hidden_layers"])):
        q, k, v = linear(x, t, f"{layer}attention.qkv_proj").reshape(n, 3, heads, -1).transpose(1, 0, 2, 3)
        y = attend(rotated(q, theta, slower), rotated(k, theta, slower), v, np.ones((n, n)))
        x = layer_norm(x + linear(y, t, f"{layer}attention.o_proj"), t, f"{layer}attn_ln")
        up, gate = np.split(linear(x, t, f"{layer}mlp.up_gate_proj"), 2, axis=1)
        x = layer_norm(x + linear(up * gelu(gate), t, f"{layer}mlp.down_proj"), t, f"{layer}mlp_ln")
    return x


def _albert_shapes(c):
    h, e, inner = c["hidden_size"], c["embedding_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, e), **both("embeddings.LayerNorm", e)}
    found["embeddings.position_embeddings.weight"] = (c["max_position_embeddings"], e)
    found["embeddings.token_type_embeddings.weight"] = (2, e)
    found |= maps("encoder.", {"embedding_hidden_mapping_in": (e, h)})
    for i in range(c["num_hidden_groups"]):
        layer = f"encoder.albert_layer_groups.{i}.albert_layers.0."
        found |= maps(f"{layer}attention.", dict.fromkeys(("query", "key", "value", "dense"), (h, h)))
        found |= maps(layer, {"ffn": (h, inner), "ffn_output": (inner, h)})
        found |= both(f"{layer}attention.LayerNorm", h) | both(f"{layer}full_layer_layer_norm", h)
    return found


def _albert(c, t, ids):
    n, layers, groups = len(ids), c["num_hidden_layers"], c["num_hidden_groups"]
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][:n]
    x = layer_norm(x + t["embeddings.token_type_embeddings.weight"][0], t, "embeddings.LayerNorm")
    x = linear(x, t, "encoder.embedding_hidden_mapping_in")
    for i in range(layers):
        layer = f"encoder.albert_layer_groups.{int(i / (layers / groups))}.albert_layers.0."
        q, k, v = (
            linear(x, t, f"{layer}attention.{part}").reshape(n, c["num_attention_heads"], -1)
            for part in ("query", "key", "value")
        )
        x = x + linear(attend(q, k, v, np.ones((n, n))), t, f"{layer}attention.dense")
        x = layer_norm(x, t, f"{layer}attention.LayerNorm")
        x = x + linear(gelu_tanh(linear(x, t, f"{layer}ffn")), t, f"{layer}ffn_output")
        x = layer_norm(x, t, f"{layer}full_layer_layer_norm")
    return x


def _deberta_shapes(c):
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {"embeddings.word_embeddings.weight": (VOCAB, h), **both("embeddings.LayerNorm", h)}
    found |= {"encoder.rel_embeddings.weight": (2 * c["position_buckets"], h), **both("encoder.LayerNorm", h)}
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        names = "self.query_proj", "self.key_proj", "self.value_proj", "output.dense"
        found |= maps(f"{layer}attention.", dict.fromkeys(names, (h, h)))
        found |= maps(layer, {"intermediate.dense": (h, inner), "output.dense": (inner, h)})
        found |= both(f"{layer}attention.output.LayerNorm", h) | both(f"{layer}output.LayerNorm", h)
    return found


def _deberta(c, t, ids):
    n, heads, span = len(ids), c["num_attention_heads"], c["position_buckets"]
    away = np.arange(n)[:, None] - np.arange(n)
    middle = span // 2
    steps = np.log(np.maximum(np.abs(away), middle) / middle) / np.log(31 / middle) * (middle - 1)
    bucket = np.where(np.abs(away) <= middle, away, np.sign(away) * (np.ceil(steps) + middle)).astype(int)
    bucket = np.clip(bucket + span, 0, 2 * span - 1)
    x = layer_norm(t["embeddings.word_embeddings.weight"][ids], t, "embeddings.LayerNorm")
    places = layer_norm(t["encoder.rel_embeddings.weight"], t, "encoder.LayerNorm")
    rows, columns = np.indices((n, n))
    for layer in (f"encoder.layer.{i}." for i in range(c["num_hidden_layers"])):
        parts = [f"{layer}attention.self.{part}_proj" for part in ("query", "key", "value")]
        q, k, v = (linear(x, t, part).reshape(n, heads, -1) for part in parts)
        kr, qr = (linear(places, t, part).reshape(2 * span, heads, -1) for part in (parts[1], parts[0]))
        by_query = np.einsum("ihd,bhd->hib", q, kr)[:, rows, bucket]
        by_key = np.einsum("jhd,bhd->hjb", k, qr)[:, columns, bucket]
        d = q.shape[-1]
        q = q / 3**0.5  # one scale for three terms
        y = attend(q, k, v, np.ones((n, n)), (by_query + by_key) / (3 * d) ** 0.5)
        x = layer_norm(
            x + linear(y, t, f"{layer}attention.output.dense"), t, f"{layer}attention.output.LayerNorm"
        )
        x = x + linear(gelu(linear(x, t, f"{layer}intermediate.dense")), t, f"{layer}output.dense")
        x = layer_norm(x, t, f"{layer}output.LayerNorm")
    return x


_FAMILIES = {
    "modernbert": (_modernbert_shapes, _modernbert),
    "eurobert": (_eurobert_shapes, _eurobert),
    "distilbert": (_distilbert_shapes, _distilbert),
    "jina-v2": (_jina_v2_shapes, _jina_v2),
    "jina-v2-code": (_jina_v2_code_shapes, _jina_v2),
    "mpnet": (_mpnet_shapes, _mpnet),
    "nomic_bert": (_nomic_shapes, _nomic),
    "jina_embeddings_v3": (_jina_v3_shapes, _jina_v3),
    "nomic-experts": (_nomic_experts_shapes, _nomic_experts),
    "new": (_gte_shapes, _gte),
    "gte": (_gte_shapes, _gte),
    "albert": (_albert_shapes, _albert),
    "deberta-v2": (_deberta_shapes, _deberta),
}
