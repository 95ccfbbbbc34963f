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
PADDED, GROUPED, TYPED = {"pad_token_id": 0}, {"num_key_value_heads": 2}, {"type_vocab_size": 2}
KINDS = {  # the name of a config of transformers, and changes of its sizes
    "bert": ("Bert", TYPED),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "camembert": ("Camembert", TYPED),
    "mpnet": ("MPNet", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "distilbert": ("DistilBert", {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 6}),
    "albert": ("Albert", {**TYPED, "embedding_size": 16}),
    "deberta-v2": ("DebertaV2", {
        "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
    }),
    "modernbert": ("ModernBert", {}),
    "modernbert-mean": ("ModernBert", {
        "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True,
    }),
    "modernbert-eps": ("ModernBert", {"norm_eps": 1e-2}),
    "eurobert": ("EuroBert", GROUPED),
    "eurobert-bos": ("EuroBert", {"classifier_pooling": "bos"}),
    "eurobert-mean": ("EuroBert", {"classifier_pooling": "mean"}),
    "jina": ("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "gte": ("Gte", {"type_vocab_size": 1}),
    "nomic_bert": ("NomicBert", {"type_vocab_size": 1}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "qwen2": ("Qwen2", GROUPED),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED),
}  # fmt: skip


def randomised(module, seed=0):
    """Draw every parameter anew, and leave nothing at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.eval()


def made(folder, kind, auto, **changes):
    """A tiny model of a class of transformers, which writes its folder."""
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **PADDED, **sizes, **changes})
    model = randomised(auto.from_config(config), 4)
    model.save_pretrained(folder)
    return model


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
