"""Tokenizers of tiny models: one of a few words, one of bytes."""

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "tree"]
TEXTS = ["the cat sat on the mat", "a dog ran", "", "a tree sat on the cat on the mat on a dog", "the cat"]


def write_tokenizer(folder):
    """Words between spaces, <s> before and </s> after a text, and after each of a pair."""
    words = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_padding(length=20)  # as some files have it; not wanted here
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_byte_tokenizer(folder, merges=()):
    """256 tokens of one byte, and one for each merge of two, "a b", as in GPT-2."""
    pairs = [tuple(merge.split()) for merge in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(tokenizer_models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
