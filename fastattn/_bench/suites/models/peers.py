"""The peers of models: transformers on torch, and the graph that torch exports in two runtimes."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS, WEIGHT_BYTES
from fastattn._bench.suites.models import text
from fastattn._bench.suites.models.problem import INT8_BFLOAT16, ModelProblem
from fastattn._bench.ways import Unsupported, Way, refuse_above_memory


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
        import torch

        names = ["ids", "mask"][: 1 + masked]
        ids = torch.ones((2, 16), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _encoder_alone(problem),
                (ids,) * len(names),
                str(path.with_suffix(".part")),
                input_names=names,
                output_names=["out"],
                dynamic_axes={name: {0: "batch", 1: "length"} for name in names},
                opset_version=17,
                dynamo=False,
            )
        path.with_suffix(".part").rename(path)
    return str(path)


def _encoder_alone(problem: ModelProblem) -> Any:
    """A torch module that turns ids, and a mask if there is one, into hidden states."""
    import torch

    class Encoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = _transformers(problem, attn_implementation="eager", dtype=torch.float32)

        def forward(self, ids: Any, mask: Any = None) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    return Encoder().eval()


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
    if problem.variant == INT8_BFLOAT16:
        raise Unsupported("has no bfloat16 product on CPUs")
    model = _exported(problem, masked=optimise)
    if optimise:
        config = problem.config()
        path = Path(problem.scratch, "minilm-optimised.onnx")
        if not path.exists():
            fused = runtimes.bert_optimised(
                Path(model).read_bytes(), config["num_attention_heads"], config["hidden_size"]
            )
            path.write_bytes(fused)
        model = str(path)
    if problem.dtype == "int8":
        model = _onnxruntime_int8(model)
    feeds, out = _feeds(problem, masked=optimise)
    sizes = {"batch": problem.shape.batch, "length": problem.shape.length}
    return runtimes.onnxruntime_way(model, problem.dtype, threads, feeds, out, sizes=sizes)


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
        return runtimes.openvino_way(model, problem.dtype, threads, feeds, out)
    rest = "bfloat16" if problem.variant == INT8_BFLOAT16 else "float32"
    return runtimes.openvino_way(_calibrated(problem, model), rest, threads, feeds, out, integers=True)


def _calibrated(problem: ModelProblem, model: str) -> str:
    """The path of the graph after NNCF's quantisation, whose ranges are those of 128 pieces of text."""
    if util.find_spec("nncf") is None:
        raise Unsupported("needs NNCF to round its inputs: pip install nncf")
    path = Path(model).with_suffix(".int8.xml")
    if not path.exists():
        import openvino

        nncf = import_module("nncf")

        pieces = text.windows(problem.folder(), 128, 128, text.COMPARED)
        if pieces is None:  # as the ids of the problem
            pieces = problem.rng(1).integers(0, problem.config()["vocab_size"], (128, 128))
        nncf.set_log_level(logging.ERROR)
        calibrated = nncf.quantize(
            openvino.Core().read_model(model),
            nncf.Dataset([piece[None] for piece in pieces]),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(pieces),
        )
        openvino.save_model(calibrated, path, compress_to_fp16=False)
    return str(path)
