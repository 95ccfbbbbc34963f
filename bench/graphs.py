"""Whole graphs in onnxruntime and OpenVINO: those of layers and of models."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.harness import Unsupported, Way


def bert_exported(folder: Path, path: Path, inputs: Sequence[str], out: str) -> None:
    """Write the graph of a folder's BERT as torch exports it, for any batch and length.

    `inputs` are names for its ids, its mask and its types, or for the first of them.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch, transformers = import_module("torch"), import_module("transformers")
    kind = transformers.BertModel
    model = kind.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager").float().eval()

    class Encoder(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any = None, types: Any = None) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Encoder().eval(),
            (torch.ones((2, 16), dtype=torch.int64),) * len(inputs),
            str(path.with_suffix(".part")),
            input_names=list(inputs),
            output_names=[out],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*inputs, out)},
            opset_version=17,
            dynamo=False,
        )
    path.with_suffix(".part").rename(path)


def openvino_calibrated(model: Any, feeds: Sequence[Any], path: Path) -> None:
    """Write an OpenVINO model after NNCF's quantisation, whose ranges are those of `feeds`."""
    import openvino

    nncf = import_module("nncf")
    nncf.set_log_level(logging.ERROR)
    dataset, kind = nncf.Dataset(feeds), nncf.ModelType.TRANSFORMER
    calibrated = nncf.quantize(model, dataset, model_type=kind, subset_size=len(feeds))
    openvino.save_model(calibrated, path, compress_to_fp16=False)


def refuse_without_nncf() -> None:
    """Refuse to round inputs for OpenVINO without NNCF."""
    if find_spec("nncf") is None:
        raise Unsupported("needs NNCF to round its inputs: pip install nncf")


def bert_optimised(model: bytes, heads: int, width: int) -> bytes:
    """A model of the BERT family, its operators fused by onnxruntime.transformers.optimizer."""
    import onnx
    from onnxruntime.transformers import optimizer

    logging.disable(logging.WARNING)
    fused = optimizer.optimize_model(
        onnx.load_from_string(model), model_type="bert", num_heads=heads, hidden_size=width, opt_level=0
    )
    serialised: bytes = fused.model.SerializeToString()
    return serialised


def demand_integers(compiled: Any) -> None:
    """Refuse an OpenVINO model with linear maps that it does not compute in bytes."""
    types = {
        node.get_rt_info()["runtimePrecision"].value
        for node in compiled.get_runtime_model().get_ordered_ops()
        if node.get_rt_info()["layerType"].value == "FullyConnected"
    }
    if not types or types - {"i8", "u8"}:
        raise Unsupported(f"computes linear maps in {', '.join(sorted(types))}, not in bytes")


def openvino_way(
    model: bytes | str,
    dtype: str,
    threads: int,
    feeds: Mapping[str, Array],
    out: Array,
    more: Mapping[str, Any] = runtimes.NONE,
    *,
    integers: bool = False,
) -> Way:
    """A model or its path, whose inputs are `feeds` in their order.

    With `integers`, a linear map that is not computed in bytes is an error.
    """
    import openvino

    precision = runtimes.openvino_precision(dtype)
    if dtype == "bfloat16" and precision != "bf16":
        raise Unsupported("computes bfloat16 in float32 on this CPU")
    graph = openvino.Core().read_model(model)
    shapes = [openvino.PartialShape(list(array.shape)) for array in feeds.values()]
    graph.reshape(dict(zip(graph.inputs, shapes, strict=True)))
    arrays = [*feeds.values(), out]
    tensors = [runtimes.openvino_tensor(array) for array in arrays]
    check: Callable[[Any], None] = demand_integers if integers else lambda _: None
    call = runtimes.openvino_call(graph, precision, threads, tensors, arrays, more, check)
    return Way(call, lambda _: out)
