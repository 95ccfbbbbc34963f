"""ONNX's own tests of five operators, computed by those of examples/onnx_operators.py."""

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
        "LinearAttention": 14,
    }  # fmt: skip
    assert all(counts[name] >= least[name] for name in least), counts


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
