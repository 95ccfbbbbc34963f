"""Folders of tiny static embeddings, and of a router that has one for queries and a BERT for documents."""

import json

import numpy as np
import tiny_models as tiny
from safetensors.numpy import save_file
from tiny_tokenizers import WORDS, write_tokenizer

PACKAGE = "sentence_transformers.base.modules"


def write_static(folder, features=24, **tensors):
    """Write a table of tokens, and return it; no modules.json."""
    folder.mkdir(exist_ok=True)
    table = np.random.default_rng(7).standard_normal((len(WORDS), features)).astype(np.float32)
    save_file(tensors or {"embedding.weight": table}, folder / "model.safetensors")
    write_tokenizer(folder)
    return table


def write_entries(folder, *kinds):
    """Write modules.json; the first kind is the folder's own."""
    entries = [
        {"type": f"{PACKAGE}.{kind}", "path": f"{i}_{kind}" if i else ""} for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


def write_router(folder):
    """Write a router of a static embedding for queries, and a tiny BERT for documents; return the table."""
    write_entries(folder, "Router", "Normalize")
    inner = folder / "document_0_Transformer"
    inner.mkdir()
    tiny.write(inner, "bert")
    write_tokenizer(inner)
    (folder / "document_1_Pooling").mkdir()
    (folder / "document_1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    kinds = ("query_0_StaticEmbedding", "document_0_Transformer", "document_1_Pooling")
    types = {name: f"{PACKAGE}.{name.rpartition('_')[2]}" for name in kinds}
    config = {"types": types, "structure": {"query": kinds[:1], "document": kinds[1:]}, "parameters": {}}
    (folder / "router_config.json").write_text(json.dumps(config))
    return write_static(folder / kinds[0])


def mean_of(table, text, most=3):
    """The mean of the first tokens' rows: the tokenizer cuts at three."""
    rows = [table[WORDS.index(word)] for word in text.split()[:most]]
    return np.mean(rows, axis=0) if rows else np.zeros(table.shape[1])
