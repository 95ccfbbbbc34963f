"""ONNX's own tests of eight operators, computed by those of examples/onnx_operators.py."""

import io
import re
import warnings

import ml_dtypes
import numpy as np
import onnx
import onnx_operators
import pytest
import torch
from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator
from onnx_operators import OPERATORS

import fastattn.torch

NAMES = {operator.__name__ for operator in OPERATORS}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # cases of other operators overflow while they are made
    MADE = node.collect_testcases(None)
CASES = {
    case.name: case
    for case in MADE
    if len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type in NAMES
}
# They want the scores before the softmax, which a fused kernel never writes to memory.
RAW_SCORES = {name for name in CASES if re.search(r"qk_matmul(_bias|_softcap|$)", name)}
# ONNX's expected results have rounded scores to bfloat16, and its tolerance is an eighth of a rounding.
BFLOAT16 = {name for name in CASES if name.startswith("test_attention") and name.endswith("_bf16")}


def computed(case, new_ops=OPERATORS, inputs=None):
    """The results of the case's model, and what ONNX expects."""
    ((given, expected),) = case.data_sets
    names = [value.name for value in case.model.graph.input]
    evaluator = ReferenceEvaluator(case.model, new_ops=new_ops)
    return evaluator.run(None, dict(zip(names, inputs or given, strict=True))), expected


@pytest.mark.parametrize("name", sorted(CASES.keys() - RAW_SCORES - BFLOAT16))
def test_of_onnx(name):
    case = CASES[name]
    found, expected = computed(case)
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=case.rtol, atol=case.atol)


@pytest.mark.parametrize("name", sorted(BFLOAT16))
def test_bfloat16_is_nearer_to_float32_than_onnx(name):
    case = CASES[name]
    ((given, _),) = case.data_sets
    wide = [x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x for x in given]
    (exact,), ((rounded,), (expected,)) = computed(case, [], wide)[0], computed(case)
    assert rounded.dtype == expected.dtype == ml_dtypes.bfloat16
    rounded, expected = (x.astype(np.float32) for x in (rounded, expected))
    np.testing.assert_allclose(rounded, exact, rtol=float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps))
    assert np.abs(rounded - exact).mean() < np.abs(expected - exact).mean()


@pytest.mark.parametrize("name", sorted(RAW_SCORES))
def test_what_is_not_there_says_so(name):
    with pytest.raises(NotImplementedError, match="scores are never written"):
        computed(CASES[name])


def test_which_cases_there_are():
    """A newer ONNX may have more of them: then they run, too."""
    assert (len(RAW_SCORES), len(BFLOAT16)) >= (12, 5)
    counts = {name: sum(c.model.graph.node[0].op_type == name for c in CASES.values()) for name in NAMES}
    least = {
        "Attention": 93, "RotaryEmbedding": 8, "RMSNormalization": 19, "LayerNormalization": 19,
        "LinearAttention": 14, "CausalConvWithState": 13, "SwiGLU": 3, "Swish": 1,
    }  # fmt: skip
    assert all(counts[name] >= least[name] for name in least), counts


def run(operators, node, arrays, opset):
    """The result of a model of one node."""
    types = {name: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in arrays.items()}
    inputs = [onnx.helper.make_tensor_value_info(n, types[n], x.shape) for n, x in arrays.items()]
    output = onnx.helper.make_tensor_value_info("out", types[node.input[0]], None)
    graph = onnx.helper.make_graph([node], "of_one_node", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model, new_ops=operators).run(None, arrays)[0]


@pytest.mark.parametrize("opset", range(23, onnx.defs.onnx_opset_version() + 1))
@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "uint8", "float16"])
def test_attention_of_each_opset_with_masks_of_each_kind(kind, opset):
    """Integers are added, as floats are; ONNX's own operator of opsets 23 and 24 fails on them."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 6)}
    arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    arrays["mask"] = rng.integers(0, 3, (2, 1, 5, 9)).astype(kind)
    options = {"is_causal": 1, "softcap": 3.0}
    if opset >= 25:
        options |= {"left_window_size": 2, "right_window_size": 1}
    node = onnx.helper.make_node("Attention", list(arrays), ["out"], **options)
    out = run(OPERATORS, node, arrays, opset)
    if kind != "bool":
        arrays["mask"] = arrays["mask"].astype(np.float32)
    np.testing.assert_allclose(out, run([], node, arrays, opset), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float16", "float32"), ("float32", "float64")])
def test_values_of_another_type(dtypes):
    rng = np.random.default_rng(1)
    q, v = (rng.standard_normal((2, 4, 5, 8)).astype(dtype) for dtype in dtypes)
    node = onnx.helper.make_node("Attention", ["q", "k", "v"], ["out"])
    expected, out = (run(ops, node, {"q": q, "k": q, "v": v}, 23) for ops in ([], OPERATORS))
    assert out.dtype == q.dtype
    np.testing.assert_allclose(out, expected, rtol=2e-3 if "float16" in dtypes else 1e-5, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.702, -0.5])
@pytest.mark.parametrize(("op", "names"), [("SwiGLU", "ab"), ("Swish", "a")])
def test_swish_of_each_alpha(op, names, alpha, dtype):
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((3, 17)).astype(dtype) for name in names}
    node = onnx.helper.make_node(op, list(names), ["out"], alpha=alpha)
    expected, out = (run(ops, node, arrays, 28) for ops in ([], OPERATORS))
    assert out.dtype == dtype
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(out, expected, rtol=max(4 * eps, 1e-6), atol=max(eps, 1e-7))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_an_optimized_model_is_exported():
    model, file, x = torch.nn.Linear(40, 3), io.BytesIO(), torch.randn(2, 40)
    with torch.no_grad(), fastattn.torch.optimize(model, measure=False):
        torch.onnx.export(model, (torch.ones(2, 40),), file, dynamo=False, input_names=["x"])
        (found,) = ReferenceEvaluator(onnx.load_from_string(file.getvalue())).run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x))


def test_it_runs_as_a_script(capsys):
    onnx_operators.main()
    assert "(1, 100, 512), greatest difference" in capsys.readouterr().out
