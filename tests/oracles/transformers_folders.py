"""Folders of tiny models and their tokenizers, as transformers writes them."""

import numpy as np
import torch
import transformers
from tiny_tokenizers import write_tokenizer

from fastattn import models

SIZES = {
    "vocab_size": 13, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 64,
}  # fmt: skip
DISTIL_SIZES = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 6}


def randomised(module, seed=0):
    """Draw every parameter anew, and leave nothing at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.eval()


def save_tokenizer(folder, markers=(), **options):
    """Save the tokenizer of WORDS, or of the folder's tokenizer.json; `markers` are more tokens."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **options}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.add_tokens(list(markers))
    tokenizer.save_pretrained(folder)


def reloaded(theirs, folder):
    """A model of sentence-transformers from the folder to which it was saved, and ours from there."""
    theirs.save_pretrained(str(folder), create_model_card=False)
    return type(theirs)(str(folder), device="cpu"), models.load(folder)


def dense(x):
    """A tensor or a sparse array as a dense one."""
    return x.to_dense().numpy() if isinstance(x, torch.Tensor) else x.toarray() if hasattr(x, "nnz") else x


def require_close(got, expected):
    """Each of a list has the same shape as the expected one, and the same numbers to 1e-5."""
    if isinstance(got, list):
        for one, other in zip(got, expected, strict=True):
            require_close(one, other)
        return
    got, expected = dense(got), dense(expected)
    assert got.shape == expected.shape
    if got.size:
        assert np.abs(expected).mean() > 0.01, "a result next to nothing shows nothing"
        assert np.abs(got - expected).max() < 1e-5 * max(1, np.abs(expected).max())
