"""CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): tensors' names, and the keys of config.json.

Both towers consist of the same blocks. CLIP's texts are causal, and their vector is that of the token that
ends them. SigLIP's are padded, padding is attended, and their vector is that of the last token. SigLIP 2
(Tschannen et al. 2025) with images of one size has the type siglip, too.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastattn import ops
from fastattn._args.types import Array
from fastattn.layers._block import Projection, program_of_blocks
from fastattn.models._blocks import BlockNames, Blocks
from fastattn.models._embeddings import SequenceRules
from fastattn.models._families.shared import ModelNames, read_encoder
from fastattn.models._files import Config, ModelError, opened, require
from fastattn.models._images import Images
from fastattn.models._sentences import Sentences
from fastattn.models._source import Rows, Source
from fastattn.models._tensors import Tensors
from fastattn.models._text import Text
from fastattn.models._towers import ClassToken, Probe, TextHead, TwoTowers, Vision

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
    positions, end_id, pad_id, end = text.size("max_position_embeddings"), 0, None, "last"
    if is_clip:
        end_id = text.size("eos_token_id", low=0)
        end = "largest" if end_id == _OLD_END else "first"
    else:
        pad_id = text.size("pad_token_id", low=0)

    def read() -> dict[str, Any]:
        tower = _vision(images, size, patch, features, is_clip)
        projection = _map(source, head, features, texts.hidden, biased=not is_clip)
        found = {
            "model_type": model_type,
            "vision": tower,
            "text_head": TextHead(projection, end, end_id, pad_id),
            "images": None if source.is_planning else Images.of(source.folder, size, kind.images),
            "scale": source.table(Rows("logit_scale", () if is_clip else (1,))),
            "shift": None if is_clip else source.table(Rows("logit_bias", (1,))),
        }
        return found | ({"text": Text(source.folder, positions, other=_tokenizer)} if is_clip else {})

    sentences = Sentences.of(source, features, towers=True)
    how: Any = {"positions": positions, "causal": is_clip, "sentences": sentences}
    model: Any = read_encoder(_NAMES, texts, others=read, kind=TwoTowers, **how)
    towers: TwoTowers = model
    return towers


def _tower(config: Config, name: str, usual: dict[str, Any]) -> Config:
    """Table of a tower in config.json; where old files have it twice, the second one counts alone."""
    twice = f"{name}_dict"
    usual = {**usual, "model_type": config.get("model_type", str)}
    return config.inner(name if config.values.get(twice) is None else twice, usual)


def _blocks(source: Source, config: Config, tower: str) -> Blocks:
    """The blocks of a tower, of which `config` says everything."""
    return Blocks.of(source.with_config(config), _block(tower), eps=None, activation=None)


def _map(source: Source, name: str, out: int, *shape: int, biased: bool = True) -> Projection:
    """A map of vectors that have been pooled, whose inputs are not rounded."""
    bias = source.vector(Rows(f"{name}.bias", (out,))) if biased else None
    return Projection(source.pack([Rows(f"{name}.weight", (out, *shape))]), bias)


def _vision(blocks: Blocks, size: int, patch: int, features: int, is_clip: bool) -> Vision:
    """The tower of images."""
    source, hidden, each = blocks.source, blocks.hidden, blocks.read()
    dtype, patches = source.precision.dtype, (size // patch) ** 2
    norm, token = blocks.norm(_LAST_NORM), None
    if is_clip:
        program, windows = program_of_blocks(each, blocks.norm(_FIRST_NORM), rounds=True)
        token = source.vector(Rows(_TOKEN, (hidden,)), added=_POSITIONS, dtype=dtype)
        projection = _map(source, "visual_projection", features, hidden, biased=False)
        head: ClassToken | Probe = ClassToken(norm, projection)
    else:
        program, windows = program_of_blocks(each, None, norm, rounds=True)
        head = _probe(blocks)
    squares = _map(source, _PATCHES, hidden, 3, patch, patch, biased=not is_clip)
    squares = squares._replace(activations=source.precision.activations)
    rows = Rows(_POSITIONS, (patches + is_clip, hidden), int(is_clip))
    positions = source.vector(rows, dtype=dtype)
    return Vision(size, patch, squares, token, positions, program, SequenceRules(windows), head)


def _probe(blocks: Blocks) -> Probe:
    """The head, whose query is the same for all images."""
    source, hidden, inner, joint = blocks.source, blocks.hidden, blocks.inner, f"{_PROBE}attention.in_proj_"
    make = partial(_query, blocks.heads, source.precision.lane, source.precision.weights)
    weight, bias = Rows(f"{joint}weight", (3 * hidden, hidden)), Rows(f"{joint}bias", (3 * hidden,))
    return Probe(
        q=source.computed(make, Rows(f"{_PROBE}probe", (1, 1, hidden)), weight, bias),
        kv=Projection(
            source.pack([weight.part(hidden, 2 * hidden)]),
            source.vector(bias.part(hidden, 2 * hidden)),
            source.precision.activations,
        ),
        attended=_map(source, f"{_PROBE}attention.out_proj", hidden, hidden),
        norm=blocks.norm(f"{_PROBE}layernorm"),
        inner=_map(source, f"{_PROBE}mlp.fc1", inner, hidden),
        activation=blocks.activation,
        outer=_map(source, f"{_PROBE}mlp.fc2", hidden, inner),
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
