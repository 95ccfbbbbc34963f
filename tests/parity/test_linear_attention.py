"""Linear attention as ONNX defines it, and as Hugging Face's transformers compute it in torch."""

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from fastattn.functional import feature_maps, linear_attention

BATCH, HEADS, LENGTH, DIM, DIM_V = 2, 4, 150, 24, 40
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


Q, K, V = normal(BATCH, HEADS, LENGTH, DIM), normal(BATCH, 2, LENGTH, DIM), normal(BATCH, 2, LENGTH, DIM_V)
K /= np.linalg.norm(K, axis=-1, keepdims=True)
GATE, GATES = -np.exp(normal(BATCH, 2, LENGTH) - 2), -np.exp(normal(BATCH, 2, LENGTH, DIM) - 2)
BETA = RNG.uniform(0, 1, (BATCH, 2, LENGTH)).astype(np.float32)
STATE = normal(BATCH, 2, DIM, DIM_V)


def packed(x):
    """(batch, heads, length, dim) as (batch, length, heads * dim)."""
    x = x[..., None] if x.ndim == 3 else x
    return x.swapaxes(1, 2).reshape(BATCH, LENGTH, -1)


@pytest.mark.parametrize(
    ("rule", "onnx_rule", "more"),
    [
        ("linear", "linear", {}),
        ("decay", "gated", {"log_decay": GATE}),
        ("gated", "gated", {"log_decay": GATES}),
        ("delta", "delta", {"beta": BETA}),
        ("gated_delta", "gated_delta", {"log_decay": GATE, "beta": BETA}),
        ("kimi_delta", "gated_delta", {"log_decay": GATES, "beta": BETA}),
    ],
)
def test_onnx(rule, onnx_rule, more):
    operator = pytest.importorskip(
        "onnx.reference.ops.op_linear_attention", reason="ONNX has it from opset 27 on"
    )
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    assert operator
    names = ["query", "key", "value", "past_state", "decay", "beta"]
    arrays = [packed(Q), packed(K), packed(V), STATE]
    arrays += [packed(more[name]) if name in more else None for name in ("log_decay", "beta")]
    feeds = {name: x for name, x in zip(names, arrays, strict=True) if x is not None}
    node = helper.make_node(
        "LinearAttention",
        [name if name in feeds else "" for name in names],
        ["out", "present"],
        q_num_heads=HEADS,
        kv_num_heads=2,
        update_rule=onnx_rule,
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("out", "present")]
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    expected, expected_state = ReferenceEvaluator(model).run(None, feeds)
    out, state = linear_attention(Q, K, V, rule=rule, state=STATE, return_state=True, **more)
    np.testing.assert_allclose(packed(out), expected, atol=1e-4)
    np.testing.assert_allclose(state, expected_state, atol=1e-4)


@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_qwen3_next(function):
    """Queries and keys have half the heads of values, and are normalised inside."""
    q, k, v = normal(BATCH, 2, LENGTH, DIM), normal(BATCH, 2, LENGTH, DIM), normal(BATCH, 4, LENGTH, DIM_V)
    log_decay, beta = -np.exp(normal(BATCH, 4, LENGTH) - 2), RNG.uniform(0, 1, (BATCH, 4, LENGTH))
    state = normal(BATCH, 4, DIM, DIM_V)
    beta = beta.astype(np.float32)
    tensors = [torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v, log_decay, beta)]
    expected, expected_state = getattr(qwen3_next, function)(
        *tensors,
        initial_state=torch.from_numpy(state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    units, options = (feature_maps.unit(x) for x in (q, k)), {"log_decay": log_decay, "beta": beta}
    out, after = linear_attention(*units, v, rule="gated_delta", state=state, return_state=True, **options)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected.numpy(), atol=2e-5)
    np.testing.assert_allclose(after, expected_state.numpy(), atol=2e-5)
