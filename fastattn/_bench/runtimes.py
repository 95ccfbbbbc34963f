"""The runtimes of the peers, as the bench sets them up: torch, onnxruntime and OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.ways import Unsupported, Way, enter_for_good


def torch_inference(threads: int) -> Any:
    """The module torch, in inference mode until the process ends."""
    import torch

    torch.set_num_threads(threads)
    enter_for_good(torch.inference_mode())
    return torch


def torch_tensors(threads: int, *arrays: Array) -> list[Any]:
    """Contiguous tensors in the memory of arrays in float32 or float64."""
    torch = torch_inference(threads)
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]


def read_tensor(result: Any) -> Array:
    """A result of torch as an array; types that NumPy lacks are widened."""
    array: Array = (result if result.element_size() >= 4 else result.float()).numpy()
    return array


def onnx_model(
    nodes: Sequence[Any], feeds: Mapping[str, Array], constants: Mapping[str, Array], out: Array, opset: int
) -> bytes:
    """A serialised model of these nodes: its inputs are `feeds`, its one output is "out"."""
    from onnx import helper, numpy_helper

    def info(name: str, array: Array) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    graph = helper.make_graph(
        list(nodes),
        "bench",
        [info(name, array) for name, array in feeds.items()],
        [info("out", out)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return model


def onnxruntime_way(
    model: bytes | str,
    dtype: str,
    threads: int,
    feeds: Mapping[str, Array],
    out: Array,
    read: Callable[[Array], Array] = np.asarray,
    sizes: Mapping[str, int] | None = None,
) -> Way:
    """An ONNX model, or the path of one, with inputs and output bound; `sizes` of its named dimensions."""
    import onnxruntime

    if dtype == "bfloat16":
        raise Unsupported("has no bfloat16 product on CPUs")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    for name, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    result = onnxruntime.OrtValue.ortvalue_from_numpy(out)
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("out", result)

    def call(bound: Any = (values, feeds, out, result)) -> None:  # the session keeps pointers only
        session.run_with_iobinding(binding)

    return Way(call, lambda _: read(result.numpy()))


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


def openvino_precision(dtype: str) -> str:
    """The type that OpenVINO is told to compute in: float32 where this CPU would emulate `dtype` slowly."""
    import openvino

    name, capability = {
        "float32": ("f32", "FP32"),
        "float16": ("f16", "FP16"),
        "bfloat16": ("bf16", "BF16"),
    }.get(dtype, ("f32", "FP32"))
    return name if capability in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def openvino_call(
    model: Any,
    precision: str,
    threads: int,
    tensors: Sequence[Any],
    owners: Sequence[Array],
    more: Mapping[str, Any] = MappingProxyType({}),
    *,
    integers: bool = False,
) -> Callable[[], None]:
    """A model set up for latency, with `more` settings; the last of `tensors` is its output.

    With `integers`, a linear map that is not computed in bytes is an error. OpenVINO keeps pointers into the
    tensors, so the call itself holds them and the arrays that own them.
    """
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        **more,
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    if integers:
        demand_integers(compiled)
    request = compiled.create_infer_request()
    for index, one in enumerate(tensors[:-1]):
        request.set_input_tensor(index, one)
    request.set_output_tensor(0, tensors[-1])

    def call(shared: Any = (tensors, owners)) -> None:
        request.infer()

    return call


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
    more: Mapping[str, Any] = MappingProxyType({}),
    *,
    integers: bool = False,
) -> Way:
    """A model or its path, whose inputs are `feeds` in their order; for the others see `openvino_call`."""
    import openvino

    if dtype == "bfloat16" and openvino_precision(dtype) != "bf16":
        raise Unsupported("computes bfloat16 in float32 on this CPU")
    graph = openvino.Core().read_model(model)
    shapes = [openvino.PartialShape(list(array.shape)) for array in feeds.values()]
    graph.reshape(dict(zip(graph.inputs, shapes, strict=True)))
    arrays = [*feeds.values(), out]
    tensors = [openvino.Tensor(array, shared_memory=True) for array in arrays]
    call = openvino_call(graph, openvino_precision(dtype), threads, tensors, arrays, more, integers=integers)
    return Way(call, lambda _: out)
