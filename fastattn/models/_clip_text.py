"""CLIP's tokenizer, for folders that have its vocab.json and merges.txt in place of tokenizer.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn.models._files import ModelError, require

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN, _END = "<|startoftext|>", "<|endoftext|>"
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clip_tokenizer(folder: Path) -> Any:
    """A `tokenizers.Tokenizer` as transformers makes it of these files; None where they are missing."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        return None
    library = require("tokenizers")
    normalizers, split = library.normalizers, library.pre_tokenizers
    try:
        bpe = library.models.BPE.from_file(
            str(vocab), str(merges), unk_token=_END, continuing_subword_prefix="", end_of_word_suffix="</w>"
        )
        tokenizer = library.Tokenizer(bpe)
    except Exception as error:  # the library raises nothing narrower
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
