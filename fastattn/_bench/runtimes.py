"""onnxruntime and OpenVINO as the bench runs them: latency settings, inputs and outputs bound once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.ways import Way


def onnx_model(
    nodes: Sequence[Any], feeds: Mapping[str, Array], constants: Mapping[str, Array], out: Array, opset: int
) -> bytes:
    """A serialised model of these nodes, whose inputs are `feeds` and whose one output is "out"."""
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
    threads: int,
    feeds: Mapping[str, Array],
    out: Array,
    read: Callable[[Array], Array] = np.asarray,
    sizes: Mapping[str, int] | None = None,
) -> Way:
    """A model, or the path of one, on these inputs; `sizes` are those of its named dimensions."""
    import onnxruntime

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

    def call(bound: Any = (values, feeds, out, result)) -> None:  # it keeps pointers, not references
        session.run_with_iobinding(binding)

    return Way(call, lambda _: read(result.numpy()))


def openvino_precision(dtype: str) -> str:
    """What OpenVINO is told to compute in: 16-bit types, where the CPU lacks them, are emulated slowly."""
    import openvino

    name, capability = {
        "float32": ("f32", "FP32"),
        "float16": ("f16", "FP16"),
        "bfloat16": ("bf16", "BF16"),
    }.get(dtype, ("f32", "FP32"))
    return name if capability in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def openvino_call(
    model: Any, precision: str, threads: int, tensors: Sequence[Any], owners: Sequence[Array]
) -> Callable[[], None]:
    """A model on tensors, the last of them its output; OpenVINO keeps pointers into them, not references."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    for index, one in enumerate(tensors[:-1]):
        request.set_input_tensor(index, one)
    request.set_output_tensor(0, tensors[-1])

    def call(shared: Any = (tensors, owners)) -> None:
        request.infer()

    return call


def openvino_way(model: bytes | str, dtype: str, threads: int, feeds: Mapping[str, Array], out: Array) -> Way:
    """An ONNX model, or the path of one, on these inputs in their order."""
    import openvino

    graph = openvino.Core().read_model(model)
    shapes = [openvino.PartialShape(list(array.shape)) for array in feeds.values()]
    graph.reshape(dict(zip(graph.inputs, shapes, strict=True)))
    arrays = [*feeds.values(), out]
    tensors = [openvino.Tensor(array, shared_memory=True) for array in arrays]
    call = openvino_call(graph, openvino_precision(dtype), threads, tensors, arrays)
    return Way(call, lambda _: out)
