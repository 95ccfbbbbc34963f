"""The runtimes of the peers, as the bench sets them up: torch, onnxruntime and OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from fastattn._bench.cases import Array
from fastattn._bench.harness import FOR_GOOD, Way

NONE: Mapping[str, Any] = MappingProxyType({})


def torch_inference(threads: int) -> Any:
    """The module torch, in inference mode until the process ends."""
    import torch

    torch.set_num_threads(threads)
    FOR_GOOD.enter_context(torch.inference_mode())
    return torch


def tensors(torch: Any, *arrays: Array) -> list[Any]:
    """Contiguous tensors in the memory of arrays; torch does not know NumPy's bfloat16."""
    arrays = tuple(np.ascontiguousarray(x) for x in arrays)
    plain = [x.view(np.int16) if x.dtype.name == "bfloat16" else x for x in arrays]
    made = [torch.from_numpy(x) for x in plain]
    return [t if p is x else t.view(torch.bfloat16) for t, p, x in zip(made, plain, arrays, strict=True)]


def read_tensor(result: Any) -> Array:
    """A result of torch as an array; types that NumPy lacks are widened."""
    array: Array = (result if result.element_size() >= 4 else result.float()).numpy()
    return array


def onnx_model(
    nodes: Sequence[Any], feeds: Mapping[str, Array], constants: Mapping[str, Array], out: Array, opset: int
) -> bytes:
    """A serialised model of these nodes: its inputs are `feeds`, its one output is "out"."""
    from onnx import helper, numpy_helper

    given, (result,) = (
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in arrays.items()
        ]
        for arrays in (feeds, {"out": out})
    )
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(list(nodes), "bench", given, [result], weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return model


def onnxruntime_way(
    model: bytes | str, threads: int, feeds: Mapping[str, Array], out: Array,
    read: Callable[[Array], Array] = np.asarray, sizes: Mapping[str, int] = NONE,
) -> Way:  # fmt: skip
    """An ONNX model, or the path of one, with inputs and output bound; `sizes` of its named dimensions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    for name, size in sizes.items():
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


def openvino_precision(dtype: str) -> str:
    """The type that OpenVINO is told to compute in: float32 where this CPU would emulate `dtype` slowly."""
    import openvino

    name, able = {"float16": ("f16", "FP16"), "bfloat16": ("bf16", "BF16")}.get(dtype, ("f32", "FP32"))
    return name if able in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def openvino_tensor(x: Array) -> Any:
    """A tensor in the memory of an array."""
    import openvino

    if x.dtype.name == "bfloat16":
        return openvino.Tensor(x.view(np.uint16), openvino.Shape(x.shape), openvino.Type.bf16)
    return openvino.Tensor(x, shared_memory=True)


def openvino_call(
    model: Any, precision: str, threads: int, tensors: Sequence[Any], owners: Sequence[Array],
    more: Mapping[str, Any] = NONE, check: Callable[[Any], None] = lambda _: None,
) -> Callable[[], None]:  # fmt: skip
    """A model set up for latency, with `more` settings; the last of `tensors` is its output.

    OpenVINO keeps pointers into the tensors, so the call itself holds them and the arrays that own them.
    `check` may refuse the compiled model.
    """
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    settings |= {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, **more}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    check(compiled)
    request = compiled.create_infer_request()
    for index, one in enumerate(tensors[:-1]):
        request.set_input_tensor(index, one)
    request.set_output_tensor(0, tensors[-1])

    def call(shared: Any = (tensors, owners)) -> None:
        request.infer()

    return call
