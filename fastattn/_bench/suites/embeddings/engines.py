"""What the suite "embeddings" times: fastattn, its fallback, plain NumPy, and the peers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fastattn import models
from fastattn._bench.suite import Engine, own_engines
from fastattn._bench.suites.embeddings import peers
from fastattn._bench.suites.embeddings.problem import TextProblem, vectors
from fastattn._bench.ways import Unsupported, Way


def _own(problem: TextProblem, backend: str) -> Way:
    """The model as a user loads it, and its defaults."""
    options: dict[str, Any] = {"dtype": problem.rest}
    if problem.dtype == "int8":
        options |= {"weights_dtype": "int8", "activations": "int8"}
    folder, chosen = problem.folder(), problem.texts()
    model: Any = cache(lambda: models.load(folder, **options))

    def load() -> None:
        assert model().text.tokenizer

    return Way(lambda: model().encode(chosen), load=load)


def _numpy(problem: TextProblem, threads: int) -> Way:
    """By definition, in float32; equal lengths together."""
    folder, chosen = problem.folder(), problem.texts()
    if problem.dtype != "float32":
        raise Unsupported("computes in float32")
    compute: Any = vectors.__wrapped__  # which does not remember

    def call() -> Any:
        made = compute(folder, tuple(chosen), np.float32)
        return np.stack([made[text] for text in chosen])

    return Way(call)


_TORCH = ("torch", "transformers", "tokenizers")  # which make the files of the runtimes
_ONNX = ("onnxruntime", "onnx", *_TORCH)

ENGINES = {
    **own_engines(_own, "safetensors", "tokenizers"),
    "numpy": Engine(("numpy", "tokenizers"), _numpy, "plain NumPy, by definition"),
    "ort": Engine(_ONNX, peers.onnxruntime, "onnxruntime, torch's export, as it is and optimised"),
    "openvino": Engine(("openvino", *_TORCH), peers.openvino, "OpenVINO, torch's graph"),
    "ct2": Engine(("ctranslate2", *_TORCH), peers.ctranslate2, "CTranslate2, its own converter"),
    "fastembed": Engine(("fastembed", *_ONNX), peers.fastembed, "fastembed, the files of ort"),
    "st": Engine(("sentence_transformers",), peers.sentence_transformers, "sentence-transformers on torch"),
    "st-onnx": Engine(
        ("sentence_transformers", "optimum", *_ONNX),
        peers.sentence_transformers_onnx,
        "the same on onnxruntime, by the files of ort",
    ),
    "st-ov": Engine(
        ("sentence_transformers", "optimum", "openvino", *_TORCH),
        peers.sentence_transformers_openvino,
        "the same on OpenVINO, by the files of openvino",
    ),
}
