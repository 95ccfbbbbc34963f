"""Linear attention as Hugging Face's transformers compute it in torch; ONNX's is in test_onnx.py."""

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from fastattn.functional import feature_maps, linear_attention

BATCH, LENGTH, DIM, DIM_V = 2, 150, 24, 40
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


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
