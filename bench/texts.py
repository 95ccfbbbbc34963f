"""Texts of skewed lengths, and MiniLM as sentence-transformers keeps it."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench import files
from fastattn._bench.cases import Array, Rng

# Words of a text: a lognormal number. MiniLM's tokenizer makes 26 tokens of the median text, 240 at most.
MEDIAN, SPREAD, MOST = 21, 0.8, 180
ONE = 12  # words of the one short text: 16 tokens, as short questions have
LONGEST = 256  # tokens, at which MiniLM's own folder cuts
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORD = re.compile(r"(?<!\S)[A-Za-z]+[.,;:]?(?!\S)")
_PIECE = re.compile(r"[a-z]+|[.,;:]")


@cache
def words() -> list[str]:
    """The plain words of the manual of the language that comes with Python, in its order."""
    topics = import_module("pydoc_data.topics").topics
    return _WORD.findall("\n".join(topics[name] for name in sorted(topics)))


def draw(rng: Rng, count: int) -> list[str]:
    """Texts in the order in which they arrive."""
    known = words()
    lengths = np.clip(np.round(MEDIAN * np.exp(SPREAD * rng.standard_normal(count))), 1, MOST).astype(int)
    starts = rng.integers(0, len(known) - MOST, count)
    return [" ".join(known[start : start + n]) for start, n in zip(starts, lengths, strict=True)]


def short(rng: Rng) -> list[str]:
    """One text of `ONE` words."""
    start = int(rng.integers(0, len(words()) - ONE))
    return [" ".join(words()[start : start + ONE])]


def folder(scratch: Path) -> Path:
    """MiniLM as sentence-transformers keeps it; random weights, and a tokenizer, without its package."""
    path = files.minilm(scratch)
    if files.has_minilm() or (path / "modules.json").exists():
        return path
    _tokenizer().save(str(path / "tokenizer.json"))
    special = {f"{name[1:-1].lower()}_token": name for name in _SPECIAL}
    kind = {"tokenizer_class": "BertTokenizer", "model_max_length": files.MINILM["max_position_embeddings"]}
    pooling = {"word_embedding_dimension": files.MINILM["hidden_size"], "pooling_mode_mean_tokens": True}
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{name}"}
        for i, (name, where) in enumerate(names.items())
    ]
    for name, values in {
        "tokenizer_config.json": kind | special,
        "special_tokens_map.json": special,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": LONGEST, "do_lower_case": False},
        "modules.json": modules,  # written last: the folder is complete with it
    }.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(values))
    return path


def _tokenizer() -> Any:
    """BERT's, of the words that the texts have: lower-case words, and the letters of any other."""
    tokenizers = import_module("tokenizers")
    pieces = sorted({piece for word in words() for piece in _PIECE.findall(word.lower())})
    letters = [mark + chr(letter) for letter in range(ord("a"), ord("z") + 1) for mark in ("", "##")]
    vocabulary = dict.fromkeys([*_SPECIAL, *letters, *pieces])
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    return made


@cache
def reader(path: Path) -> Any:
    """The folder's tokenizer, which cuts at `LONGEST` and does not pad."""
    made = import_module("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    made.no_padding()
    made.enable_truncation(LONGEST)
    return made


def encode(path: Path, texts: list[str]) -> list[list[int]]:
    """The ids of each text."""
    return [encoding.ids for encoding in reader(path).encode_batch(texts)]


def padded(sequences: list[list[int]]) -> tuple[Array, Array]:
    """Ids, padded on the right, and the mask; both (batch, length)."""
    mask = np.arange(max(map(len, sequences))) < np.array([[len(ids)] for ids in sequences])
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(sequences)
    return ids, mask.astype(np.int64)


def pooled(hidden: Array, mask: Array) -> Array:
    """The mean of what counts, of length 1: (batch, features) of (batch, length, features)."""
    sums = (mask[:, None].astype(hidden.dtype) @ hidden)[:, 0]
    unit: Array = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    return unit
