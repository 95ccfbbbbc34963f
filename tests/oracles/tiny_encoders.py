"""Families of encoders for `tiny_models`: configs, names and shapes of tensors, results in plain NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tiny_numpy import attend, gelu, gelu_tanh, layer_norm, linear, rotated, silu

VOCAB = 60

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 32,
}  # fmt: skip
_EPS = {**SIZES, "layer_norm_eps": 1e-5}
CONFIGS = {
    "bert": {**_EPS, "type_vocab_size": 2},
    "roberta": {**SIZES, "max_position_embeddings": 34, "type_vocab_size": 1, "pad_token_id": 1},
    "modernbert": {
        **SIZES, "num_hidden_layers": 3, "global_attn_every_n_layers": 2, "local_attention": 4,
        "global_rope_theta": 1000.0, "local_rope_theta": 100.0,
    },
    "distilbert": {
        "vocab_size": VOCAB, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 3,
        "max_position_embeddings": 32,
    },
    "jina-v2": {
        **_EPS, "model_type": "bert", "type_vocab_size": 2,
        "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    },
    "jina-v2-code": {
        **_EPS, "model_type": "bert", "type_vocab_size": 2,
        "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    },
    "mpnet": {**SIZES, "max_position_embeddings": 34, "layer_norm_eps": 1e-5},
    "nomic_bert": {
        **_EPS, "type_vocab_size": 2, "rope_parameters": {"rope_theta": 100.0},
    },
    "jina_embeddings_v3": {
        **_EPS, "type_vocab_size": 1,
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
        **_EPS, "type_vocab_size": 1, "rope_theta": 20.0,
        "rope_scaling": {"type": "ntk", "factor": 4.0},
    },
    "gte": {
        **_EPS, "type_vocab_size": 0,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    },
    "albert": {
        **_EPS, "embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 3,
    },
    "deberta-v2": {
        **_EPS, "relative_attention": True, "position_buckets": 4,
        "max_relative_positions": -1, "pos_att_type": "p2c|c2p", "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip


class _Names(NamedTuple):
    """Names of the tensors of an encoder with norms after attention and feed-forward: BERT's, and others."""

    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    inner: tuple[str, ...] = ("intermediate.dense",)
    outer: str = "output.dense"
    norm: str = "output.LayerNorm"
    first_norm: str = "embeddings.LayerNorm"
    gate: int | None = (
        None  # which half of the inner features, if one multiplies the other; these have no bias
    )
    activation: Callable = gelu
    places: bool = True  # a table of positions
    biased: bool = True
    more: tuple[str, ...] = ()  # further norms


_ROTATED = _Names(
    "encoder.layers.{}.", ("attn.Wqkv",), "attn.out_proj", "norm1", ("mlp.fc1",), "mlp.fc2", "norm2",
    "emb_ln", places=False,
)  # fmt: skip
_JINA = _Names(inner=("mlp.gated_layers",), outer="mlp.wo", norm="mlp.layernorm", gate=0, places=False)
_GTE = _Names(
    qkv=("attention.qkv_proj",), out="attention.o_proj", attention_norm="attn_ln",
    inner=("mlp.up_gate_proj",), outer="mlp.down_proj", norm="mlp_ln", gate=1, places=False,
)  # fmt: skip
_NAMES = {
    **dict.fromkeys(("bert", "roberta"), _Names()),
    "albert": _Names(
        "encoder.albert_layer_groups.{}.albert_layers.0.",
        ("attention.query", "attention.key", "attention.value"), "attention.dense", "attention.LayerNorm",
        ("ffn",), "ffn_output", "full_layer_layer_norm", activation=gelu_tanh,
    ),
    "deberta-v2": _Names(
        qkv=tuple(f"attention.self.{x}_proj" for x in ("query", "key", "value")), places=False
    ),
    "distilbert": _Names(
        "transformer.layer.{}.", ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin", "sa_layer_norm", ("ffn.lin1",), "ffn.lin2", "output_layer_norm",
    ),
    **dict.fromkeys(("gte", "new"), _GTE),
    "jina-v2": _JINA,
    "jina-v2-code": _JINA._replace(
        inner=("mlp.up_gated_layer",), outer="mlp.down_layer", norm="layer_norm_2", gate=1,
        more=("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"),
    ),
    "jina_embeddings_v3": _ROTATED._replace(qkv=("mixer.Wqkv",), out="mixer.out_proj"),
    "mpnet": _Names(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), out="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    "nomic_bert": _ROTATED._replace(inner=("mlp.fc11", "mlp.fc12"), gate=1, activation=silu, biased=False),
    "nomic-experts": _ROTATED,
}  # fmt: skip


def size(c, *names):
    """The value of the one of these keys that a config has."""
    return next(c[name] for name in names if name in c)


def sizes_of(c):
    """Features of hidden states and within feed-forwards, heads, layers with tensors of their own."""
    return (
        size(c, "hidden_size", "dim", "n_embd"),
        size(c, "intermediate_size", "hidden_dim", "n_inner"),
        size(c, "num_attention_heads", "n_heads", "n_head"),
        size(c, "num_hidden_groups", "num_hidden_layers", "n_layers", "n_layer"),
    )


def shapes(kind, c):
    """Shape of every tensor by its name."""
    if kind == "modernbert":
        return _modernbert_shapes(c)
    f, (h, inner, heads, layers) = _NAMES[kind], sizes_of(c)
    width, tables = c.get("embedding_size", h), {}
    if f.places:
        tables["position"] = c["max_position_embeddings"]
    if types := c.get("type_vocab_size", 2 if kind == "albert" else 0):
        tables["token_type"] = types
    first, words = both(f.first_norm, width), {"embeddings.word_embeddings.weight": (c["vocab_size"], width)}
    found = {**first, **words} if kind in ("bert", "roberta") else {**words, **first}  # tensors are drawn so
    found |= {f"embeddings.{name}_embeddings.weight": (n, width) for name, n in tables.items()}
    if kind == "albert":
        found |= maps("encoder.", {"embedding_hidden_mapping_in": (width, h)})
    if kind == "mpnet":
        found["encoder.relative_attention_bias.weight"] = (32, heads)
    if kind == "deberta-v2":
        found |= {
            "encoder.rel_embeddings.weight": (2 * c["position_buckets"], h),
            **both("encoder.LayerNorm", h),
        }
    for i in range(layers):
        layer = f.layer.format(i)
        found |= maps(layer, {name: (h, 3 * h // len(f.qkv)) for name in f.qkv} | {f.out: (h, h)}, f.biased)
        if i % c.get("moe_every_n_layers", 1) == 1:
            found |= maps(f"{layer}mlp.", {"router.layer": (h, c["num_experts"])}, biased=False)
            found |= {f"{layer}mlp.experts.mlp.w{part}": (c["num_experts"] * inner, h) for part in (1, 2)}
            found[f"{layer}mlp.experts.bias"] = (h,)
        else:
            n = inner if f.gate is None else 2 * inner // len(f.inner)
            found |= maps(layer, dict.fromkeys(f.inner, (h, n)), f.gate is None)
            found |= maps(layer, {f.outer: (inner, h)}, f.biased)
        for name in (f.attention_norm, *f.more, f.norm):
            found |= both(f"{layer}{name}", h)
    return found


def result(kind, c, t, ids):
    """Hidden states (L, hidden); ids is (L,)."""
    if kind == "modernbert":
        return _modernbert(c, t, ids)
    f, (h, _, heads, groups), n = _NAMES[kind], sizes_of(c), len(ids)
    eps = c.get("layer_norm_eps", c.get("layer_norm_epsilon", 1e-12))
    layers = size(c, "num_hidden_layers", "n_layers", "n_layer")
    theta, slower = _rotation(c, h // heads)
    padding = 1 if kind == "mpnet" else c.get("pad_token_id")

    def norm(x, name):
        return layer_norm(x, t, name, eps)

    x = t["embeddings.word_embeddings.weight"][ids]
    if "embeddings.token_type_embeddings.weight" in t:
        x = x + t["embeddings.token_type_embeddings.weight"][0]
    if f.places:
        places = np.arange(n) if padding is None else counted(ids, padding)
        x = x + t["embeddings.position_embeddings.weight"][places]
    x = norm(x, f.first_norm)
    if "encoder.embedding_hidden_mapping_in.weight" in t:
        x = linear(x, t, "encoder.embedding_hidden_mapping_in")
    for i in range(layers):
        layer = f.layer.format(int(i / (layers / groups)))
        if len(f.qkv) == 1:
            parts = linear(x, t, layer + f.qkv[0]).reshape(n, 3, -1).transpose(1, 0, 2)
        else:
            parts = [linear(x, t, layer + name) for name in f.qkv]
        if f.more:
            parts = [norm(parts[0], layer + f.more[0]), norm(parts[1], layer + f.more[1]), parts[2]]
        q, k, v = (part.reshape(n, heads, -1) for part in parts)
        if theta is not None:
            q, k = rotated(q, theta, slower), rotated(k, theta, slower)
        bias = _bias(kind, c, t, n)
        if kind == "deberta-v2":
            bias = _disentangled(c, t, [layer + name for name in f.qkv[:2]], q, k)
            q = q / 3**0.5  # one scale for three terms
        y = linear(attend(q, k, v, np.ones((n, n)), bias), t, layer + f.out)
        y = norm(x + y, layer + f.attention_norm)
        x = norm(x + y, layer + f.more[2]) if f.more else y
        if f"{layer}mlp.router.layer.weight" in t:
            y = _experts(c, t, layer, x)
        else:
            inner = np.concatenate([linear(x, t, layer + name) for name in f.inner], axis=1)
            if f.gate is None:
                inner = f.activation(inner)
            else:
                halves = np.split(inner, 2, axis=1)
                inner = f.activation(halves[f.gate]) * halves[1 - f.gate]
            y = linear(inner, t, layer + f.outer)
        x = norm(x + y, layer + f.norm)
    return x


def _rotation(c, head_dim):
    """The base of rotary positions, None without any, and what divides all frequencies."""
    if "rope_scaling" in c:
        factor = c["rope_scaling"]["factor"]
        return c["rope_theta"] * factor, factor ** (2 / head_dim)
    return c.get("rope_parameters", {}).get("rope_theta", c.get("rotary_emb_base")), 1.0


def _bias(kind, c, t, n):
    """What is added to scores by distance."""
    away = np.arange(n) - np.arange(n)[:, None]  # a key's place behind its query
    if kind == "mpnet":
        far = 8 + np.log2(np.maximum(np.abs(away), 8) / 8) / 4 * 8  # log(128 / 8) is 4
        bucket = np.where(np.abs(away) < 8, np.abs(away), np.minimum(far, 15)).astype(int) + 16 * (away > 0)
        return t["encoder.relative_attention_bias.weight"][bucket].transpose(2, 0, 1)
    if kind in ("jina-v2", "jina-v2-code"):
        assert c["num_attention_heads"] == 3  # whose slopes are those of two heads, and the first one of four
        return -np.array([2.0**-4, 2.0**-8, 2.0**-2])[:, None, None] * np.abs(away)
    return 0.0


def _experts(c, t, layer, x):
    """Nomic's mix of experts, of which each row has the best ones."""
    chances = np.exp(linear(x, t, f"{layer}mlp.router.layer"))
    chances /= chances.sum(-1, keepdims=True)
    least = np.sort(chances)[:, -c["moe_top_k"], None]
    shape = c["num_experts"], c["n_inner"], -1
    w1, w2 = (t[f"{layer}mlp.experts.mlp.w{part}"].reshape(shape) for part in (1, 2))
    y = sum(
        np.where(chances >= least, chances, 0)[:, e, None] * (gelu(x @ w1[e].T) @ w2[e])
        for e in range(c["num_experts"])
    )
    return y + t[f"{layer}mlp.experts.bias"]


def _disentangled(c, t, maps, q, k):
    """DeBERTa's scores by distance, of queries and of keys with vectors of positions."""
    n, heads, d = q.shape
    span, away = c["position_buckets"], np.arange(n)[:, None] - np.arange(n)
    middle = span // 2
    steps = np.log(np.maximum(np.abs(away), middle) / middle) / np.log(31 / middle) * (middle - 1)
    bucket = np.where(np.abs(away) <= middle, away, np.sign(away) * (np.ceil(steps) + middle)).astype(int)
    bucket = np.clip(bucket + span, 0, 2 * span - 1)
    places = layer_norm(t["encoder.rel_embeddings.weight"], t, "encoder.LayerNorm")
    rows, columns = np.indices((n, n))
    qr, kr = (linear(places, t, part).reshape(2 * span, heads, -1) for part in maps)
    by_query = np.einsum("ihd,bhd->hib", q, kr)[:, rows, bucket]
    by_key = np.einsum("jhd,bhd->hjb", k, qr)[:, columns, bucket]
    return (by_query + by_key) / (3 * d) ** 0.5


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
