"""Folders of tiny models and their tokenizers, as transformers writes them."""

import torch
import transformers
from tiny_tokenizers import write_tokenizer

SIZES = {
    "vocab_size": 13,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
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
