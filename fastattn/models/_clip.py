"""CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): tensors' names, and what their config.json says.

Both towers consist of the same blocks. CLIP's texts are causal, and their vector is that of the token that
ends them. SigLIP's are padded, padding is attended, and their vector is that of the last token.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fastattn import ops
from fastattn._args.ops import integer_activations
from fastattn.layers._block import Projection, model_program
from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Source
from fastattn.models._clip_text import clip_tokenizer
from fastattn.models._embeddings import Places
from fastattn.models._encoder import Encoder
from fastattn.models._families import EncoderNames, read_encoder
from fastattn.models._files import ModelError
from fastattn.models._images import Images
from fastattn.models._sentences import Sentences
from fastattn.models._text import Text
from fastattn.models._towers import TextHead, TwoTowers
from fastattn.models._vision import ClassToken, Probe, Vision

if TYPE_CHECKING:
    from fastattn._args.types import Shape
    from fastattn.models._files import Config

# What is missing in config.json, where the tables of the towers may be nearly empty.
_BASE = {"num_hidden_layers": 12, "num_attention_heads": 12}
_TEXT: dict[str, dict[str, Any]] = {
    "clip": {
        **_BASE, "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
        "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
        "eos_token_id": 49407,
    },
    "siglip": {
        **_BASE, "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072,
        "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
        "pad_token_id": 1,
    },
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {
    "clip": {
        **_BASE, "hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 32,
        "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    },
    "siglip": {
        **_BASE, "hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    },
}  # fmt: skip
_IMAGES: dict[str, dict[str, Any]] = {
    "clip": {
        "do_resize": True, "size": {"shortest_edge": 224}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": 224, "width": 224},
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "siglip": {
        "do_resize": True, "size": {"height": 224, "width": 224}, "resample": 3,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
}  # fmt: skip
_OLD_END = 2  # `eos_token_id` of the first files, which is not the one that the tokenizer has


def _block(tower: str) -> BlockNames:
    return BlockNames(
        prefix=f"{tower}.encoder.layers.{{}}.",
        attention_norm="layer_norm1",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attended="self_attn.out_proj",
        inner_norm="layer_norm2",
        inner="mlp.fc1",
        outer="mlp.fc2",
    )


_NAMES = EncoderNames(
    tokens="text_model.embeddings.token_embedding",
    positions="text_model.embeddings.position_embedding",
    last_norm="text_model.final_layer_norm",
    block=_block("text_model"),
    ignored=re.compile(r"\.embeddings\.position_ids$"),  # 0, 1, 2, ...; old files hold them
)
_PATCHES, _TOKEN = "vision_model.embeddings.patch_embedding", "vision_model.embeddings.class_embedding"
_POSITIONS = "vision_model.embeddings.position_embedding.weight"
_FIRST_NORM, _LAST_NORM = "vision_model.pre_layrnorm", "vision_model.post_layernorm"  # so in all files
_PROBE = "vision_model.head."


def build(source: Source) -> TwoTowers:
    """The model that the folder's files describe."""
    config, kind = source.config, source.config.get("model_type", str)
    is_clip = kind == "clip"
    text, vision = _tower(config, "text_config", _TEXT[kind]), _tower(config, "vision_config", _VISION[kind])
    vision.refuse(num_channels=3, vision_use_head=True)
    texts, images = _blocks(source, text, "text_model"), _blocks(source, vision, "vision_model")
    size, patch = vision.size("image_size"), vision.size("patch_size")
    if patch > size:
        raise ModelError(f"{vision.path}: 'patch_size' is {patch}; expected at most 'image_size', {size}")
    if is_clip:
        features = config.size("projection_dim", 512)
    else:
        features = text.size("projection_size", texts.hidden)
        if features != images.hidden:
            expected = f"'hidden_size' of the images' tower, {images.hidden}"
            raise ModelError(f"{text.path}: 'projection_size' is {features}; expected {expected}")

    head = "text_projection" if is_clip else "text_model.head"
    shapes = _vision_shapes(images, (patch, patch), (size // patch) ** 2, is_clip)
    shapes |= {f"{head}.weight": (features, texts.hidden), "logit_scale": () if is_clip else (1,)}
    if is_clip:
        shapes["visual_projection.weight"] = features, images.hidden
    else:
        shapes |= {f"{head}.bias": (features,), "logit_bias": (1,)}
    encoder = read_encoder(
        _NAMES,
        texts,
        positions=text.size("max_position_embeddings"),
        causal=is_clip,
        others=shapes,
        sentences=Sentences.of(source.outer, features, source.precision.dtype, towers=True),
    )
    end_id = text.size("eos_token_id", low=0) if is_clip else 0
    own = {field.name: getattr(encoder, field.name) for field in fields(Encoder)} | {"model_type": kind}
    if is_clip:
        own["text"] = Text(source.folder, encoder.max_length, other=clip_tokenizer)
    return TwoTowers(
        **own,
        vision=_vision(images, vision, is_clip),
        text_head=TextHead(
            _map(source, head, biased=not is_clip),
            ("largest" if end_id == _OLD_END else "first") if is_clip else "last",
            end_id,
            None if is_clip else text.size("pad_token_id", low=0),
        ),
        images=Images.of(source.folder, size, _IMAGES[kind]),
        logit_scale=float(source.tensors["logit_scale"].item()),
        logit_bias=0.0 if is_clip else float(source.tensors["logit_bias"].item()),
    )


def _tower(config: Config, name: str, usual: dict[str, Any]) -> Config:
    """What config.json says of a tower; where old files say it twice, the second one counts alone."""
    twice = f"{name}_dict"
    usual = {**usual, "model_type": config.get("model_type", str)}
    return config.inner(name if config.values.get(twice) is None else twice, usual)


def _blocks(source: Source, config: Config, tower: str) -> Blocks:
    names, heads = _block(tower), config.size("num_attention_heads")
    return Blocks(
        source._replace(config=config),
        names,
        num_layers=source.tensors.depth(config, "num_hidden_layers"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=heads,
        heads_kv=heads,
        head_dim=config.divided("hidden_size", "num_attention_heads"),
        eps=config.number("layer_norm_eps"),
        activation=config.choice("hidden_act", ACTIVATIONS),
        biased=names.maps,
    )


def _vision_shapes(blocks: Blocks, patch: Shape, patches: int, is_clip: bool) -> dict[str, Shape]:
    """The shape of every tensor of the tower of images."""
    hidden, inner = blocks.hidden, blocks.inner
    shapes: dict[str, Shape] = {f"{_PATCHES}.weight": (hidden, 3, *patch), **blocks.shapes()}
    shapes |= {_POSITIONS: (patches + is_clip, hidden), **blocks.norm_shapes(_LAST_NORM)}
    if is_clip:
        return {**shapes, _TOKEN: (hidden,), **blocks.norm_shapes(_FIRST_NORM)}
    shapes |= {f"{_PATCHES}.bias": (hidden,), f"{_PROBE}probe": (1, 1, hidden)}
    shapes |= blocks.norm_shapes(f"{_PROBE}layernorm")
    maps = {
        "attention.in_proj_": (3 * hidden, hidden),
        "attention.out_proj.": (hidden, hidden),
        "mlp.fc1.": (inner, hidden),
        "mlp.fc2.": (hidden, inner),
    }
    for name, shape in maps.items():
        shapes |= {f"{_PROBE}{name}weight": shape, f"{_PROBE}{name}bias": shape[:1]}
    return shapes


def _map(source: Source, name: str, biased: bool = True) -> Projection:
    """A map behind the vectors have been pooled, whose inputs are not rounded."""
    return Projection(
        source.tensors.pack([f"{name}.weight"]), source.vector(f"{name}.bias") if biased else None
    )


def _vision(blocks: Blocks, config: Config, is_clip: bool) -> Vision:
    """The tower of images, whose tensors are there."""
    source, patch = blocks.source, config.size("patch_size")
    precision = source.precision
    integer_activations("load", precision.activations, precision.weights, 3 * patch * patch)
    positions = source.vector(_POSITIONS)
    norm = blocks.norm(_LAST_NORM)
    if is_clip:
        program, windows = model_program(blocks.read(), blocks.norm(_FIRST_NORM))
        token = (source.vector(_TOKEN) + positions[0]).astype(precision.dtype)
        head: ClassToken | Probe = ClassToken(norm, _map(source, "visual_projection", biased=False))
    else:
        program, windows = model_program(blocks.read(), None, norm)
        token, head = None, _probe(blocks)
    patches = _map(source, _PATCHES, biased=not is_clip)._replace(activations=precision.activations)
    return Vision(
        image_size=config.size("image_size"),
        patch_size=patch,
        patches=patches,
        token=token,
        positions=positions[int(is_clip) :].astype(precision.dtype),
        program=program,
        places=Places(windows),
        head=head,
    )


def _probe(blocks: Blocks) -> Probe:
    """The head, whose query is the same for all images."""
    source, hidden = blocks.source, blocks.hidden
    weight, bias = (source.vector(f"{_PROBE}attention.in_proj_{part}") for part in ("weight", "bias"))
    q, kv = (ops.pack(part, dtype=source.precision.weights) for part in (weight[:hidden], weight[hidden:]))
    found = ops.linear(source.vector(f"{_PROBE}probe").reshape(1, hidden), q, bias[:hidden])
    return Probe(
        q=found.reshape(blocks.heads, 1, blocks.head_dim),
        kv=Projection(kv, bias[hidden:].copy(), source.precision.activations),
        attended=_map(source, f"{_PROBE}attention.out_proj"),
        norm=blocks.norm(f"{_PROBE}layernorm"),
        inner=_map(source, f"{_PROBE}mlp.fc1"),
        activation=blocks.activation,
        outer=_map(source, f"{_PROBE}mlp.fc2"),
    )
