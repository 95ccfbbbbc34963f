"""Serve a folder's encoder as `python -m fastattn serve` does, with another engine that computes.

    python -m bench.serve_engine onnxruntime THREADS FOLDER GRAPH    # sentence-transformers

`bench.load_serve --engines` starts it. Requests, micro-batches and answers are those of the server; only what
makes vectors of a batch's texts is another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import files, texts
from bench.graphs import bert_exported, bert_optimised, session_options
from fastattn import models, serve
from fastattn.serve._service import Service

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SIZE = 8  # texts that are padded together: the fastest of 4, 8 and 32 in the suite `embeddings`


def graph(folder: Path, path: Path) -> None:
    """Write the graph of a folder's BERT, after onnxruntime's optimiser."""
    bert_exported(folder, path, INPUTS, "last_hidden_state")
    config = files.read_config(folder)
    path.write_bytes(bert_optimised(path.read_bytes(), config["num_attention_heads"], config["hidden_size"]))


def onnxruntime(threads: int, folder: Path, path: str) -> Callable[[list[str]], Any]:
    import onnxruntime as runtime

    session = runtime.InferenceSession(path, session_options(threads), providers=["CPUExecutionProvider"])
    wanted = [value.name for value in session.get_inputs()]

    def compute(items: list[str]) -> Any:
        ids = texts.encode(folder, items)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        rows: Any = [None] * len(ids)
        for chosen in (order[i : i + SIZE] for i in range(0, len(order), SIZE)):
            tokens, mask = texts.padded([ids[i] for i in chosen])
            feeds = dict(zip(INPUTS, (tokens, mask, np.zeros_like(tokens)), strict=True))
            hidden = session.run(None, {name: feeds[name] for name in wanted})[0]
            for i, row in zip(chosen, texts.pooled(hidden, mask), strict=True):
                rows[i] = row
        return np.stack(rows)

    return compute


def sentence_transformers(threads: int, folder: Path) -> Callable[[list[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda items: model.encode(items, batch_size=SIZE)


ENGINES = {"onnxruntime": onnxruntime, "sentence-transformers": sentence_transformers}


def main() -> None:
    name, threads, folder, *more = sys.argv[1:]
    compute = ENGINES[name](int(threads), Path(folder), *more)
    Service.compute = lambda self, items, prompt: compute(items)
    serve.serve(models.load(folder), port=0)


if __name__ == "__main__":
    main()
