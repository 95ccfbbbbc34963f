"""Whole graphs in onnxruntime and OpenVINO: those of layers and of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.harness import Unsupported, Way


def onnxruntime_way(
    model: bytes | str,
    dtype: str,
    threads: int,
    feeds: Mapping[str, Array],
    out: Array,
    sizes: Mapping[str, int] = runtimes.NONE,
) -> Way:
    """A model in a dtype that onnxruntime has products of; for the others see `runtimes.onnxruntime_way`."""
    if dtype == "bfloat16":
        raise Unsupported("has no bfloat16 product on CPUs")
    return runtimes.onnxruntime_way(model, threads, feeds, out, sizes=sizes)


def bert_optimised(model: bytes, heads: int, width: int) -> bytes:
    """A model of the BERT family, its operators fused by onnxruntime.transformers.optimizer."""
    import logging

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
