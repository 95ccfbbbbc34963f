"""What the suite "models" times: fastattn, its fallback, plain NumPy, and the peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastattn import models
from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS, WEIGHT_BYTES, Engine, own_engines
from fastattn._bench.suites.models import files, peers
from fastattn._bench.suites.models.problem import INT8_BFLOAT16, ModelProblem
from fastattn._bench.ways import Unsupported, Way, refuse_above_memory

STEPS = 256  # the keys and values then take a percent of the memory of the weights
FALLBACK_BYTES = 1e9  # of weights: with more, the fallback would take the memory that the peers need


def _own(problem: ModelProblem, backend: str) -> Way:
    """The model as a user loads it."""
    size = problem.weights * WEIGHT_BYTES[problem.dtype]
    if backend == "numpy" and size > FALLBACK_BYTES:
        raise Unsupported("would take the memory that the peers need")
    refuse_above_memory(size, "holds its weights")
    options: dict[str, Any] = {
        INT8_INPUTS: {"activations": "int8"},
        INT8_BFLOAT16: {"activations": "int8", "dtype": "bfloat16"},
    }.get(problem.variant, {})
    model: Any = models.load(problem.folder(), weights_dtype=problem.dtype, **options)
    ids = problem.ids()
    if problem.shape.kind == "minilm":
        return Way(lambda: model(ids))
    return Way(_generating(model, ids[0]), lambda _: model(ids)[:, -1])


def _generating(model: Any, prompt: Array) -> Any:
    """A call that continues a text by one token; after `STEPS` tokens it begins again with the prompt."""

    def steps() -> Iterator[int]:
        while True:
            yield from model.generate(prompt, STEPS, stop=())

    return partial(next, steps())


def _numpy(problem: ModelProblem, threads: int) -> Way:
    """By definition, in float32."""
    if problem.shape.kind == "llama":
        raise Unsupported("is written without a cache of keys and values")
    ids, config = problem.ids(), problem.config()
    weights = dict(files.Tensors(problem.folder()))
    return Way(lambda: plain.bert(ids, weights, config))


_TORCH = ("torch", "transformers")

ENGINES = {
    **own_engines(_own, "safetensors"),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, by definition"),
    "torch": Engine(_TORCH, peers.torch_eager, "transformers on torch, eager, inference mode"),
    "ort": Engine(
        ("onnxruntime", "onnx", *_TORCH), peers.onnxruntime, "onnxruntime, the graph that torch exports"
    ),
    "ort-bert": Engine(
        ("onnxruntime", "onnx", *_TORCH), peers.onnxruntime_bert, "the same after its BERT optimiser"
    ),
    "openvino": Engine(("openvino", "onnx", *_TORCH), peers.openvino, "OpenVINO, the exported graph"),
}
