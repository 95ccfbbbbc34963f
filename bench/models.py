"""The suite "models": whole models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import files, plain
from bench.graphs import bert_exported, bert_optimised, openvino_calibrated, openvino_way, refuse_without_nncf
from bench.suite import (
    INT8_INPUTS,
    WEIGHT_BYTES,
    Request,
    Suite,
    WeightProblem,
    mean_cosine,
    refuse_above_memory,
)
from fastattn import models
from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, own_engines

DTYPES = ("float32", "bfloat16", "int8")

# The largest error of hidden states and logits of about 1, after all layers; their reference has weights that
# were not rounded.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-1, "int8": 5e-1}
INT8_BFLOAT16 = "int8 inputs, rest in bfloat16"  # of the other rows with int8 inputs, the rest is in float32
ROUNDED_TOLERANCE = 1.0  # of inputs in int8; their cosines say more
PROMPT = 16  # tokens at a decoder's step, all but the last of them cached
PREFILL = "prefill"  # the other kind of a decoder's call: the first logits behind a prompt


class ModelShape(NamedTuple):
    """ids is (batch, length)."""

    name: str
    kind: str  # "minilm", "llama" for one step, or PREFILL
    batch: int
    length: int
    makes: str  # a call makes `batch` of these
    layers: int = 6
    vocab: int = 0


@dataclass(frozen=True)
class ModelProblem(WeightProblem):
    """Hidden states of MiniLM, or logits of a decoder: of one step over a cache, or behind a whole prompt."""

    shape: ModelShape
    scratch: str = ""  # folder for the files that the bench writes

    def folder(self) -> Path:
        """Folder of config.json and model.safetensors; they are written if they do not exist."""
        if self.shape.kind == "minilm":
            return files.minilm(Path(self.scratch))
        return files.llama(Path(self.scratch), self.shape.layers, self.shape.vocab)

    def config(self) -> dict[str, Any]:
        return files.read_config(self.folder())

    def ids(self) -> Array:
        """Token ids, (batch, length): random ones, but of MiniLM a text where there is one."""
        if self.shape.kind == "minilm":
            found = files.windows(self.folder(), self.shape.batch, self.shape.length)
            if found is not None:
                return found
        return self.rng(0).integers(0, self.config()["vocab_size"], (self.shape.batch, self.shape.length))

    def reference(self) -> tuple[Array, Array]:
        """The last sequence's hidden states, or the logits."""
        want = _answer(self.folder(), tuple(self.ids()[-1].tolist()))
        total = self.shape.batch * len(want)
        return np.arange(total - len(want), total), want

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        """The mean cosine of a token's hidden state and that in float64; nothing for logits."""
        if self.shape.kind != "minilm":
            return {}
        return mean_cosine(got, want)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype] if self.variant == "plain" else ROUNDED_TOLERANCE

    @property
    def weights(self) -> int:
        """Number of weights of the linear maps that a token passes, a decoder's output layer included."""
        config = self.config()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        if self.shape.kind == "minilm":
            return int(config["num_hidden_layers"] * (4 * hidden * hidden + 2 * hidden * inner))
        kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
        return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)

    @property
    def unit(self) -> str:
        return "bytes" if self.shape.kind == "llama" else "flops"

    @property
    def work(self) -> float:
        """Operations of all matrix products; of a decoder's step the bytes of its weights."""
        if self.shape.kind == "llama":
            return float(self.weights * WEIGHT_BYTES[self.dtype])
        tokens, config = self.shape.batch * self.shape.length, self.config()
        scores: float = 4.0 * self.shape.length * config["hidden_size"] * config["num_hidden_layers"]
        if self.shape.kind == "minilm":
            return tokens * (2.0 * self.weights + scores)
        # Of the output layer the last token alone, of the scores half:
        output: float = config["vocab_size"] * config["hidden_size"]
        return tokens * (2.0 * (self.weights - output) + scores / 2) + 2.0 * output


@cache
def _answer(folder: Path, ids: tuple[int, ...]) -> Array:
    """(length, hidden) or (1, vocab) of one sequence; weights of every type are compared with the same."""
    config, tensors, row = files.read_config(folder), files.Tensors(folder), np.array([ids])
    if config["model_type"] != "bert":
        return plain.llama(row, tensors, config, np.float64)
    states: Array = plain.bert(row, plain.Widened(tensors, "", np.float64), config)[0]
    return states


def minilm(batch: int, length: int) -> ModelShape:
    return ModelShape(f"MiniLM {batch},{length}", "minilm", batch, length, "sentences")


def llama(layers: int, vocab: int) -> ModelShape:
    name = f"Llama, {layers} layer{'s' * (layers > 1)}"
    return ModelShape(name, "llama", 1, PROMPT, "tokens", layers, vocab)


def prefill(length: int, layers: int, vocab: int) -> ModelShape:
    name = f"{llama(layers, vocab).name}, {length} tokens"
    return ModelShape(name, PREFILL, 1, length, "prompts", layers, vocab)


ENCODERS = (minilm(1, 16), minilm(1, 128), minilm(32, 32), minilm(32, 128), minilm(8, 256))
DECODER = llama(16, 128256)
PROMPT_OF_512 = prefill(512, 16, 128256)
SMALL_DECODER = llama(1, 8000)  # 77 million weights, which is still more than caches hold


def plan(request: Request) -> Sections:
    """Weights in every type or in `dtype`; unless `full`, fewer texts and a small decoder."""
    sections: Sections = {}

    def section(title: str, shapes: Any, dtype: str) -> None:
        rounded = title != "one step" and dtype == "int8"
        variants = (INT8_INPUTS, INT8_BFLOAT16) if rounded else ("plain",)
        made = partial(ModelProblem, scratch=str(request.folder))
        sections.update(request.section(made, title, shapes, dtype, variants))

    dtypes = DTYPES if request.dtype is None else (request.dtype,)
    hidden = "hidden states" if files.has_minilm() else "hidden states (random)"
    if not request.full:  # reading, packing and checking a large decoder takes longest
        section(hidden, ENCODERS[:2], dtypes[0])
        for dtype in dict.fromkeys((dtypes[0], dtypes[-1])):
            section("one step", [SMALL_DECODER], dtype)
        return sections
    for dtype in dtypes:
        section(hidden, ENCODERS, dtype)
        section("one step", [DECODER], dtype)
        section(PREFILL, [PROMPT_OF_512], dtype)
    return sections


def torch_eager(problem: ModelProblem, threads: int) -> Way:
    """BertModel, and LlamaForCausalLM with its cache."""
    if problem.dtype == "int8" and problem.variant != INT8_INPUTS:
        raise Unsupported("has no product of this type and int8")
    torch = runtimes.torch_inference(threads)
    refuse_above_memory(problem.weights * WEIGHT_BYTES[problem.dtype], "holds its weights")
    if problem.dtype == "int8":
        model = torch_int8(_transformers(problem, dtype=torch.float32))
    else:
        model = _transformers(problem, dtype=getattr(torch, problem.dtype))
    ids = torch.from_numpy(problem.ids())

    if problem.shape.kind == "minilm":
        return Way(lambda: model(input_ids=ids).last_hidden_state, runtimes.read_tensor)
    if problem.shape.kind == PREFILL:
        call = partial(model, input_ids=ids, use_cache=True, logits_to_keep=1)
        return Way(lambda: call().logits[:, -1], runtimes.read_tensor)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    last = ids[:, -1:].contiguous()

    def step() -> Any:
        cache.crop(-1)  # drops the token of the call before
        return model(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1]

    return Way(step, runtimes.read_tensor)


def torch_int8(model: Any) -> Any:
    """All linear maps by int8, the range of the inputs found in each call."""
    import torch
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return quantization.quantize_dynamic(
            model, {torch.nn.Linear: quantization.per_channel_dynamic_qconfig}, dtype=torch.qint8
        )


def _transformers(problem: ModelProblem, **options: Any) -> Any:
    """The model in transformers, which is kept from asking the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bert = problem.shape.kind == "minilm"
    kind = transformers.BertModel if bert else transformers.LlamaForCausalLM
    if bert:
        options["add_pooling_layer"] = False
    return kind.from_pretrained(problem.folder(), **options).eval()


def _exported(problem: ModelProblem, *, masked: bool) -> str:
    """The path of MiniLM as torch exports it, for any batch and length; exported once for all engines.

    Texts without padding need no mask, and the graph without one is faster. The BERT optimiser, however,
    finds attention by its mask.
    """
    if problem.shape.kind != "minilm":
        raise Unsupported("is given no decoder with a cache")
    path = Path(problem.scratch, f"minilm{'-masked' * masked}.onnx")
    if not path.exists():
        bert_exported(problem.folder(), path, ["ids", "mask"][: 1 + masked], "out")
    return str(path)


def _feeds(problem: ModelProblem, *, masked: bool) -> tuple[dict[str, Array], Array]:
    """The inputs, and an array for the output."""
    ids = problem.ids()
    feeds = {"ids": ids, "mask": np.ones_like(ids)} if masked else {"ids": ids}
    return feeds, np.zeros((*ids.shape, problem.config()["hidden_size"]), np.float32)


def onnxruntime(problem: ModelProblem, threads: int) -> Way:
    """The exported graph, with the optimisations that a session makes by itself."""
    return _onnxruntime(problem, threads, optimise=False)


def onnxruntime_bert(problem: ModelProblem, threads: int) -> Way:
    """The exported graph, rewritten by onnxruntime.transformers."""
    return _onnxruntime(problem, threads, optimise=True)


def _onnxruntime(problem: ModelProblem, threads: int, *, optimise: bool) -> Way:
    if problem.dtype == "bfloat16" or problem.variant == INT8_BFLOAT16:
        raise Unsupported("has no bfloat16 product on CPUs")
    model = _exported(problem, masked=optimise)
    if optimise:
        config = problem.config()
        path = Path(problem.scratch, "minilm-optimised.onnx")
        if not path.exists():
            fused = bert_optimised(
                Path(model).read_bytes(), config["num_attention_heads"], config["hidden_size"]
            )
            path.write_bytes(fused)
        model = str(path)
    if problem.dtype == "int8":
        model = _onnxruntime_int8(model)
    feeds, out = _feeds(problem, masked=optimise)
    sizes = {"batch": problem.shape.batch, "length": problem.shape.length}
    return runtimes.onnxruntime_way(model, threads, feeds, out, sizes=sizes)


def _onnxruntime_int8(model: str) -> str:
    """The path of a graph whose linear maps are by int8, the range of the inputs found in each call."""
    path = Path(model).with_suffix(".int8.onnx")
    if not path.exists():
        onnx_int8(model, path)
    return str(path)


def onnx_int8(model: str, path: Path) -> None:
    """Write that graph."""
    import onnx
    from onnxruntime import quantization

    graph = onnx.load(model)
    if all(opset.domain != "com.microsoft" for opset in graph.opset_import):  # which fused operators need
        graph.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    quantization.quantize_dynamic(
        graph,
        path,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )


def openvino(problem: ModelProblem, threads: int) -> Way:
    """The exported graph, reshaped to the inputs; in int8 with the ranges that a text of its own gives."""
    model = _exported(problem, masked=False)
    feeds, out = _feeds(problem, masked=False)
    if problem.dtype != "int8":
        return openvino_way(model, problem.dtype, threads, feeds, out)
    rest = "bfloat16" if problem.variant == INT8_BFLOAT16 else "float32"
    return openvino_way(_calibrated(problem, model), rest, threads, feeds, out, integers=True)


def _calibrated(problem: ModelProblem, model: str) -> str:
    """The path of the graph after NNCF's quantisation, whose ranges are those of 128 pieces of text."""
    refuse_without_nncf()
    path = Path(model).with_suffix(".int8.xml")
    if not path.exists():
        import openvino

        pieces = files.windows(problem.folder(), 128, 128, files.COMPARED)
        if pieces is None:  # as the ids of the problem
            pieces = problem.rng(1).integers(0, problem.config()["vocab_size"], (128, 128))
        openvino_calibrated(openvino.Core().read_model(model), [piece[None] for piece in pieces], path)
    return str(path)


STEPS = 256  # the keys and values then take a percent of the memory of the weights
FALLBACK_BYTES = 1e9  # of weights: with more, the fallback would take the memory that the peers need


def _own(problem: ModelProblem, backend: str) -> Way:
    """The model as a user loads it; in bfloat16 all of it, as the peers have it."""
    size = problem.weights * WEIGHT_BYTES[problem.dtype]
    if backend == "numpy" and size > FALLBACK_BYTES:
        raise Unsupported("would take the memory that the peers need")
    refuse_above_memory(size, "holds its weights")
    options: dict[str, Any] = {
        INT8_INPUTS: {"activations": "int8"},
        INT8_BFLOAT16: {"activations": "int8", "dtype": "bfloat16"},
    }.get(problem.variant, {})
    if problem.dtype == "bfloat16":
        options["dtype"] = "bfloat16"
    model: Any = models.load(problem.folder(), weights_dtype=problem.dtype, **options)
    ids = problem.ids()
    if problem.shape.kind == "minilm":
        return Way(lambda: model(ids))
    if problem.shape.kind == PREFILL:
        return Way(lambda: next(iter(model.generate(ids[0], 1, stop=()))), partial(_behind, model, ids))
    return Way(_generating(model, ids[0]), lambda _: model(ids)[:, -1])


def _behind(model: Any, ids: Array, token: int) -> Array:
    """The logits that the first token behind a prompt is the largest of."""
    logits: Array = model(ids)[:, -1]
    if logits[0, token] < logits.max() - 1e-2:  # nearly equal ones may change places
        raise ArithmeticError(f"token {token} is not the most likely one")
    return logits


def _generating(model: Any, prompt: Array) -> Any:
    """A call that continues a text by one token; after `STEPS` tokens it begins again with the prompt."""

    def steps() -> Iterator[int]:
        while True:
            yield from model.generate(prompt, STEPS, stop=())

    return partial(next, steps())


def _numpy(problem: ModelProblem, threads: int) -> Way:
    """Model by its definition, in float32."""
    if problem.shape.kind == "llama":
        raise Unsupported("is written without a cache of keys and values")
    if problem.shape.kind == PREFILL:
        raise Unsupported("would take minutes")
    ids, config = problem.ids(), problem.config()
    weights = dict(files.Tensors(problem.folder()))
    return Way(lambda: plain.bert(ids, weights, config))


_TORCH = ("torch", "transformers")

ENGINES = {
    **own_engines(_own, "safetensors"),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, by definition"),
    "torch": Engine(_TORCH, torch_eager, "transformers on torch, eager, inference mode"),
    "ort": Engine(("onnxruntime", "onnx", *_TORCH), onnxruntime, "onnxruntime, the graph that torch exports"),
    "ort-bert": Engine(
        ("onnxruntime", "onnx", *_TORCH), onnxruntime_bert, "the same after its BERT optimiser"
    ),
    "openvino": Engine(("openvino", "onnx", *_TORCH), openvino, "OpenVINO, the exported graph"),
}


SUITE = Suite(ENGINES, plan, DTYPES, "batch, length", "about a quarter of an hour")
