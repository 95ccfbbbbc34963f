"""What the bench of models times, by name, and how fastattn and plain NumPy compute it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastattn import models
from fastattn._bench import model_files, model_peers, plain
from fastattn._bench.cases import Array
from fastattn._bench.layer_problem import BYTES
from fastattn._bench.model_problem import ModelProblem
from fastattn._bench.suite import Engine
from fastattn._bench.ways import Unsupported, Way, enter_for_good, refuse_above_memory
from fastattn._engine import settings

STEPS = 256  # in which the keys and values grow from nothing to a percent of the weights
FALLBACK_BYTES = 1e9  # of weights: the fallback is not measured beyond, it would crowd out the peers


def _compiled(problem: ModelProblem, threads: int) -> dict[str, Way]:
    return _own(problem, "compiled")


def _fallback(problem: ModelProblem, threads: int) -> dict[str, Way]:
    if problem.weights * BYTES[problem.dtype] > FALLBACK_BYTES:
        raise Unsupported("is measured on a smaller model, by --quick")
    return _own(problem, "numpy")


def _own(problem: ModelProblem, backend: str) -> dict[str, Way]:
    """The model as a user loads it; threads are those that the worker's environment says."""
    refuse_above_memory(problem.weights * BYTES[problem.dtype], "holds its weights")
    enter_for_good(settings.forced(backend=backend))
    model: Any = models.load(problem.folder(), weights_dtype=problem.dtype)
    ids = problem.ids()
    if problem.shape.kind == "minilm":
        return {"": Way(lambda: model(ids))}
    return {"": Way(_generating(model, ids[0]), lambda _: model(ids)[:, -1])}


def _generating(model: Any, prompt: Array) -> Any:
    """A call that continues a text by one token; after `STEPS` of them it begins anew."""

    def steps() -> Iterator[int]:
        while True:
            yield from model.generate(prompt, STEPS, stop=())

    return partial(next, steps())


def _numpy(problem: ModelProblem, threads: int) -> dict[str, Way]:
    """By definition, in float32."""
    if problem.shape.kind == "llama":
        raise Unsupported("is written without a cache of keys and values")
    ids, config = problem.ids(), problem.config()
    weights = dict(model_files.Tensors(problem.folder()))
    return {"": Way(lambda: plain.bert(ids, weights, config))}


_TORCH = ("torch", "transformers")

ENGINES = {
    "fastattn": Engine(("fastattn._engine.core._core", "safetensors"), _compiled, "the compiled kernels"),
    "fallback": Engine(("fastattn", "safetensors"), _fallback, "fastattn without its extension"),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, by definition"),
    "torch": Engine(_TORCH, model_peers.torch_eager, "transformers on torch, eager, inference mode"),
    "ort": Engine(
        ("onnxruntime", "onnx", *_TORCH), model_peers.onnxruntime, "onnxruntime, the graph that torch exports"
    ),
    "ort-bert": Engine(
        ("onnxruntime", "onnx", *_TORCH), model_peers.onnxruntime_bert, "the same after its BERT optimiser"
    ),
    "openvino": Engine(("openvino", "onnx", *_TORCH), model_peers.openvino, "OpenVINO, the exported graph"),
}
