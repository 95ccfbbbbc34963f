"""CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): tensors' names, and the keys of config.json.

Both towers consist of the same blocks. CLIP's texts are causal, and their vector is that of the token that
ends them. SigLIP's are padded, padding is attended, and their vector is that of the last token. SigLIP 2
(Tschannen et al. 2025) with images of one size has the type siglip, too.
"""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.ops import integer_activations
from fastattn._args.types import Array, Shape
from fastattn.layers._block import Projection, model_program
from fastattn.models._blocks import BlockNames, Blocks
from fastattn.models._embeddings import SequenceRules
from fastattn.models._encoder import Encoder
from fastattn.models._families.shared import ModelNames, read_encoder
from fastattn.models._files import Config, ModelError, opened, require
from fastattn.models._images import Images
from fastattn.models._sentences import Sentences
from fastattn.models._source import Source
from fastattn.models._tensors import Tensors
from fastattn.models._text import Text
from fastattn.models._towers import TextHead, TwoTowers
from fastattn.models._vision import ClassToken, Probe, Vision

_SIZES: Any = {
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
}
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class _Kind(NamedTuple):
    """A kind of towers: defaults of config.json's tables, which may be nearly empty, and of images."""

    text: dict[str, Any]
    vision: dict[str, Any]
    images: dict[str, Any]
    is_clip: bool = False


_SIGLIP = _Kind(
    {
        **_SIZES, "vocab_size": 32000, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6, "pad_token_id": 1,
    },
    {
        **_SIZES, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    {"do_resize": True, "size": {"height": 224, "width": 224}, "resample": 3, **_HALVES},
)  # fmt: skip
_KINDS = {
    "clip": _Kind(
        {
            **_SIZES, "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048,
            "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5, "eos_token_id": 49407,
        },
        {**_SIZES, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        {
            "do_resize": True, "size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224}, "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        is_clip=True,
    ),
    "siglip": _SIGLIP,
}  # fmt: skip
TYPES = tuple(_KINDS)
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


_NAMES = ModelNames(
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
_BEGIN, _END = "<|startoftext|>", "<|endoftext|>"
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clip(source: Source) -> TwoTowers:
    """Build CLIP or SigLIP."""
    config, model_type = source.config, source.config.get("model_type", str)
    kind = _KINDS[model_type]
    is_clip = kind.is_clip
    text, vision = _tower(config, "text_config", kind.text), _tower(config, "vision_config", kind.vision)
    vision.refuse(num_channels=3, vision_use_head=True)
    texts, images = _blocks(source, text, "text_model"), _blocks(source, vision, "vision_model")
    patch = vision.size("patch_size")
    size = vision.size("image_size")
    if patch > size:
        raise vision.wrong("patch_size", patch, f"at most 'image_size', {size}")
    if is_clip:
        features = config.size("projection_dim", 512)
    else:
        features = text.size("projection_size", texts.hidden)
        if features != images.hidden:
            raise text.wrong(
                "projection_size", features, f"'hidden_size' of the images' tower, {images.hidden}"
            )

    head = "text_projection" if is_clip else "text_model.head"
    shapes = _vision_shapes(images, patch, (size // patch) ** 2, is_clip)
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
        sentences=Sentences.of(source, features, towers=True),
    )
    end_id = text.size("eos_token_id", low=0) if is_clip else 0
    own = {field.name: getattr(encoder, field.name) for field in fields(Encoder)} | {"model_type": model_type}
    if is_clip:
        own["text"] = Text(source.folder, encoder.max_length, other=_tokenizer)
    return TwoTowers(
        **own,
        vision=_vision(images, vision, is_clip),
        text_head=TextHead(
            _map(source, head, biased=not is_clip),
            ("largest" if end_id == _OLD_END else "first") if is_clip else "last",
            end_id,
            None if is_clip else text.size("pad_token_id", low=0),
        ),
        images=Images.of(source.folder, size, kind.images),
        scale=source.table("logit_scale"),
        shift=None if is_clip else source.table("logit_bias"),
    )


def _tower(config: Config, name: str, usual: dict[str, Any]) -> Config:
    """Table of a tower in config.json; where old files have it twice, the second one counts alone."""
    twice = f"{name}_dict"
    usual = {**usual, "model_type": config.get("model_type", str)}
    return config.inner(name if config.values.get(twice) is None else twice, usual)


def _blocks(source: Source, config: Config, tower: str) -> Blocks:
    """The blocks of a tower, of which `config` says everything."""
    return Blocks.of(source.with_config(config), _block(tower), eps=None, activation=None)


def _vision_shapes(blocks: Blocks, patch: int, patches: int, is_clip: bool) -> dict[str, Shape]:
    """The shape of every tensor of the tower of images."""
    hidden, inner = blocks.hidden, blocks.inner
    shapes: dict[str, Shape] = {f"{_PATCHES}.weight": (hidden, 3, patch, patch), **blocks.shapes()}
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
    """A map of vectors that have been pooled, whose inputs are not rounded."""
    return Projection(source.pack([f"{name}.weight"]), source.vector(f"{name}.bias") if biased else None)


def _vision(blocks: Blocks, config: Config, is_clip: bool) -> Vision:
    """The tower of images, whose tensors are there."""
    source, patch = blocks.source, config.size("patch_size")
    precision = source.precision
    integer_activations(precision.activations, precision.weights, 3 * patch * patch)
    norm = blocks.norm(_LAST_NORM)
    if is_clip:
        program, windows = model_program(blocks.read(), blocks.norm(_FIRST_NORM), rounds=True)
        token = source.vector(_TOKEN, added=_POSITIONS, dtype=precision.dtype)
        head: ClassToken | Probe = ClassToken(norm, _map(source, "visual_projection", biased=False))
    else:
        program, windows = model_program(blocks.read(), None, norm, rounds=True)
        token, head = None, _probe(blocks)
    patches = _map(source, _PATCHES, biased=not is_clip)._replace(activations=precision.activations)
    return Vision(
        image_size=config.size("image_size"),
        patch_size=patch,
        patches=patches,
        token=token,
        positions=source.vector(_POSITIONS, begin=int(is_clip), dtype=precision.dtype),
        program=program,
        sequence_rules=SequenceRules(windows),
        head=head,
    )


def _probe(blocks: Blocks) -> Probe:
    """The head, whose query is the same for all images."""
    source, hidden, joint = blocks.source, blocks.hidden, f"{_PROBE}attention.in_proj_"
    make = partial(_query, blocks.heads, source.precision.lane, source.precision.weights)
    return Probe(
        q=source.computed(make, f"{_PROBE}probe", f"{joint}weight", f"{joint}bias"),
        kv=Projection(
            source.pack([f"{joint}weight"], begin=hidden),
            source.vector(f"{joint}bias", begin=hidden),
            source.precision.activations,
        ),
        attended=_map(source, f"{_PROBE}attention.out_proj"),
        norm=blocks.norm(f"{_PROBE}layernorm"),
        inner=_map(source, f"{_PROBE}mlp.fc1"),
        activation=blocks.activation,
        outer=_map(source, f"{_PROBE}mlp.fc2"),
    )


def _query(
    heads: int, lane: np.dtype[Any], stored: str, tensors: Tensors, probe: str, weight: str, bias: str
) -> Array:
    """The query (heads, 1, head_dim) of the probe."""
    x, w, b = (tensors.whole(name).astype(lane, copy=False) for name in (probe, weight, bias))
    hidden = x.shape[-1]
    found = ops.linear(x.reshape(1, hidden), ops.pack(w[:hidden], dtype=stored), b[:hidden])
    return np.asarray(found).reshape(heads, 1, -1)


def _tokenizer(folder: Path) -> Any:
    """CLIP's tokenizer, of vocab.json and merges.txt as transformers makes it; None without these files."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.exists() and merges.exists()):
        return None
    library = require("tokenizers")
    normalizers, split = library.normalizers, library.pre_tokenizers
    try:
        with opened(vocab), opened(merges):
            bpe = library.models.BPE.from_file(
                str(vocab),
                str(merges),
                unk_token=_END,
                continuing_subword_prefix="",
                end_of_word_suffix="</w>",
            )
        tokenizer = library.Tokenizer(bpe)
    except Exception as error:
        if type(error) is not Exception:  # the library raises nothing narrower
            raise
        raise ModelError(f"{vocab} and {merges.name} are no tokenizer: {error}") from error
    missing = [token for token in (_BEGIN, _END) if tokenizer.token_to_id(token) is None]
    if missing:
        raise ModelError(f"{vocab} has no {' and no '.join(missing)}; expected CLIP's vocabulary")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(library.Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = split.Sequence(
        [
            split.Split(library.Regex(_WORDS), behavior="removed", invert=True),
            split.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([_BEGIN, _END])
    ends = ((token, tokenizer.token_to_id(token)) for token in (_END, _BEGIN))
    tokenizer.post_processor = library.processors.RobertaProcessing(
        *ends, trim_offsets=False, add_prefix_space=False
    )
    return tokenizer
