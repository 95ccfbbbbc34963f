"""Tiles of AMX in a process whose other libraries use them, too, in turn and at the same time."""

import threading

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from oracle import assert_same_bits

import fastattn
from fastattn import ops
from fastattn._engine import settings

pytestmark = pytest.mark.skipif(
    "amx" not in fastattn.show_config()["isas_available"], reason="no tiles: of an Intel Xeon, or emulated"
)


@pytest.fixture(autouse=True)
def _use_amx():
    with settings.forced(isa="amx", backend="compiled"):
        yield


def ours():
    x = np.random.default_rng(0).standard_normal((70, 512), np.float32).astype(ml_dtypes.bfloat16)
    heads, packed = x.reshape(8, 70, 64), ops.pack(x)
    return lambda: (fastattn.attention(heads, heads, heads), ops.linear(x, packed))


def of_torch():
    layer, x = torch.nn.Linear(512, 96).bfloat16(), torch.randn(200, 512).bfloat16()
    return lambda: (layer(x).float().numpy(force=True),)


def of_onnxruntime():
    names = {"x": (200, 512), "w": (512, 96)}
    of = onnx.TensorProto
    values = [onnx.helper.make_tensor_value_info(n, of.INT8, shape) for n, shape in names.items()]
    out = onnx.helper.make_tensor_value_info("out", of.INT32, (200, 96))
    node = onnx.helper.make_node("MatMulInteger", ["x", "w"], ["out"])
    graph = onnx.helper.make_graph([node], "product", values, [out])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    given = {n: rng.integers(-127, 128, shape, np.int8) for n, shape in names.items()}
    return lambda: session.run(None, given)


def repeat(call, expected, wrong):
    """Compare 30 results of `call`; what differs is listed in `wrong`."""
    for _ in range(30):
        for result, other in zip(call(), expected, strict=True):
            if result.tobytes() != other.tobytes():
                wrong.append(call)


@pytest.mark.parametrize("of_other", [of_torch, of_onnxruntime])
def test_tiles_beside_those_of_other_libraries(of_other):
    mine, other = ours(), of_other()
    expected, of_others = mine(), other()
    for _ in range(10):
        for results, wanted in [(other(), of_others), (mine(), expected)]:
            for result, each in zip(results, wanted, strict=True):
                assert_same_bits(result, each)
    wrong = []
    threads = [
        threading.Thread(target=repeat, args=(*each, wrong))
        for each in [(mine, expected), (other, of_others)] * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
