"""CLIP and SigLIP with tiny random towers: their folders, and their vectors in plain NumPy."""

import json

import numpy as np
from safetensors.numpy import save_file
from tiny_numpy import attend, gelu_tanh, layer_norm, linear

VOCAB, LENGTH, SIZE, PATCH, CHANNELS = 60, 16, 20, 6, 3  # of an image's 20 pixels, 18 are in patches
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH}
VISION = {**SIZES, "image_size": SIZE, "patch_size": PATCH}
FEATURES = {"clip": 20, "siglip": 24}
KINDS = ("clip", "siglip")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
PROCESSOR = {
    "do_resize": True, "size": {"shortest_edge": SIZE}, "resample": 3, "do_center_crop": True,
    "crop_size": {"height": SIZE, "width": SIZE}, "image_mean": MEAN, "image_std": STD,
}  # fmt: skip


def config(kind, text=(), vision=(), **changes):
    """config.json; `text` and `vision` change the tables of the towers."""
    end = {"eos_token_id": 2} if kind == "clip" else {"pad_token_id": 0}
    towers = {"text_config": {**TEXT, **end, **dict(text)}, "vision_config": {**VISION, **dict(vision)}}
    return {"model_type": kind, "projection_dim": FEATURES["clip"], **towers, **changes}


def tensors(kind, values, seed=0):
    """Random tensors: weights of norms lie around 1, others around 0."""
    rng, drawn = np.random.default_rng(seed), {}
    text, vision, clip = values["text_config"], values["vision_config"], kind == "clip"
    hidden, patches = vision["hidden_size"], (vision["image_size"] // vision["patch_size"]) ** 2
    shapes = {"text_model.embeddings.token_embedding.weight": (text["vocab_size"], text["hidden_size"])}
    places = (text["max_position_embeddings"], text["hidden_size"])
    shapes["text_model.embeddings.position_embedding.weight"] = places
    shapes["vision_model.embeddings.position_embedding.weight"] = (patches + clip, hidden)
    kernel = (hidden, CHANNELS, vision["patch_size"], vision["patch_size"])
    shapes["vision_model.embeddings.patch_embedding.weight"] = kernel
    norms = {"text_model.final_layer_norm": text, "vision_model.post_layernorm": vision}
    maps = {}
    for tower, c in (("text_model", text), ("vision_model", vision)):
        h, inner = c["hidden_size"], c["intermediate_size"]
        for layer in (f"{tower}.encoder.layers.{i}." for i in range(c["num_hidden_layers"])):
            norms |= {f"{layer}layer_norm{i}": c for i in (1, 2)}
            maps |= {f"{layer}self_attn.{part}_proj": (h, h) for part in ("q", "k", "v", "out")}
            maps |= {f"{layer}mlp.fc1": (inner, h), f"{layer}mlp.fc2": (h, inner)}
    if clip:
        norms["vision_model.pre_layrnorm"] = vision
        shapes["vision_model.embeddings.class_embedding"] = (hidden,)
        shapes["text_projection.weight"] = (values["projection_dim"], text["hidden_size"])
        shapes["visual_projection.weight"] = (values["projection_dim"], hidden)
    else:
        head = "vision_model.head."
        norms[f"{head}layernorm"] = vision
        shapes["vision_model.embeddings.patch_embedding.bias"] = (hidden,)
        shapes |= {f"{head}probe": (1, 1, hidden), "logit_bias": (1,)}
        shapes |= {f"{head}attention.in_proj_weight": (3 * hidden, hidden)}
        shapes |= {f"{head}attention.in_proj_bias": (3 * hidden,)}
        inner = vision["intermediate_size"]
        maps |= {f"{head}attention.out_proj": (hidden, hidden), f"{head}mlp.fc1": (inner, hidden)}
        maps |= {f"{head}mlp.fc2": (hidden, inner)}
        maps["text_model.head"] = (text.get("projection_size", text["hidden_size"]), text["hidden_size"])
    for name, shape in maps.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, c in norms.items():
        shapes |= {f"{name}.{part}": (c["hidden_size"],) for part in ("weight", "bias")}
    for name, shape in {**shapes, "logit_scale": () if clip else (1,)}.items():
        around = any(name == f"{norm}.weight" for norm in norms)
        drawn[name] = np.asarray(around + 0.3 * rng.standard_normal(shape), np.float32)
    return drawn


def write(folder, kind, weights=None, processor=PROCESSOR, **changes):
    """Write a model's folder and return its tensors."""
    values = config(kind, **changes)
    weights = tensors(kind, values) if weights is None else weights
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file(weights, folder / "model.safetensors")
    return weights


def _blocks(x, t, tower, c, kind, allowed):
    heads, n = c["num_attention_heads"], len(x)
    eps = 1e-5 if kind == "clip" else 1e-6
    for layer in (f"{tower}.encoder.layers.{i}." for i in range(c["num_hidden_layers"])):
        y = layer_norm(x, t, f"{layer}layer_norm1", eps)
        q, k, v = (linear(y, t, f"{layer}self_attn.{p}_proj").reshape(n, heads, -1) for p in "qkv")
        x = x + linear(attend(q, k, v, allowed), t, f"{layer}self_attn.out_proj")
        x = x + _feed_forward(layer_norm(x, t, f"{layer}layer_norm2", eps), t, f"{layer}mlp", kind)
    return x


def _feed_forward(x, t, name, kind):
    z = linear(x, t, f"{name}.fc1")
    return linear(z / (1 + np.exp(-1.702 * z)) if kind == "clip" else gelu_tanh(z), t, f"{name}.fc2")


def text_vector(kind, values, t, ids):
    """The vector of one text."""
    t, c, ids = {name: x.astype(np.float64) for name, x in t.items()}, values["text_config"], np.array(ids)
    names, n = "text_model.embeddings.", len(ids)
    x = t[f"{names}token_embedding.weight"][ids] + t[f"{names}position_embedding.weight"][:n]
    x = _blocks(x, t, "text_model", c, kind, np.tri(n) if kind == "clip" else np.ones((n, n)))
    x = layer_norm(x, t, "text_model.final_layer_norm", 1e-5 if kind == "clip" else 1e-6)
    if kind == "siglip":
        return linear(x[-1], t, "text_model.head")
    end = c["eos_token_id"]  # 2 is not the id of the last token, which has the largest
    place = ids.argmax() if end == 2 else (ids == end).argmax()
    return linear(x[place], t, "text_projection")


def image_vector(kind, values, t, pixels):
    """The vector of one image, pixels (3, size, size)."""
    t, c = {name: x.astype(np.float64) for name, x in t.items()}, values["vision_config"]
    patch, names = c["patch_size"], "vision_model.embeddings."
    kernel, side = t[f"{names}patch_embedding.weight"], c["image_size"] // patch
    places = [(slice(i * patch, (i + 1) * patch), slice(j * patch, (j + 1) * patch))
              for i in range(side) for j in range(side)]  # fmt: skip
    x = np.array([np.einsum("hcij,cij->h", kernel, pixels[(slice(None), *place)]) for place in places])
    if kind == "clip":
        x = np.concatenate([t[f"{names}class_embedding"][None], x])
    else:
        x = x + t[f"{names}patch_embedding.bias"]
    x = x + t[f"{names}position_embedding.weight"]
    everything = np.ones((len(x), len(x)))
    if kind == "clip":
        x = layer_norm(x, t, "vision_model.pre_layrnorm")
        x = _blocks(x, t, "vision_model", c, kind, everything)
        return linear(layer_norm(x[0], t, "vision_model.post_layernorm"), t, "visual_projection")
    x = layer_norm(_blocks(x, t, "vision_model", c, kind, everything), t, "vision_model.post_layernorm", 1e-6)
    head, heads = "vision_model.head.", c["num_attention_heads"]
    weights = np.split(t[f"{head}attention.in_proj_weight"], 3)
    biases = np.split(t[f"{head}attention.in_proj_bias"], 3)
    inputs = (t[f"{head}probe"][0], x, x)
    q, k, v = (
        (y @ w.T + b).reshape(len(y), heads, -1) for y, w, b in zip(inputs, weights, biases, strict=True)
    )
    found = linear(attend(q, k, v, np.ones((1, len(x)))), t, f"{head}attention.out_proj")[0]
    return found + _feed_forward(layer_norm(found, t, f"{head}layernorm", 1e-6), t, f"{head}mlp", kind)
