"""Positions as Hugging Face's transformers compute them, in torch. Its angles and frequencies are float32."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from fastattn.positions import apply_rope, rope_frequencies, rope_tables

HEAD_DIM, TRAINED = 64, 8192
FACTORS = np.linspace(1.0, 1.5, HEAD_DIM // 2).tolist(), np.linspace(1.0, 40.0, HEAD_DIM // 2).tolist()
LONGROPE = {"rope_type": "longrope", "short_factor": FACTORS[0], "long_factor": FACTORS[1],
            "original_max_position_embeddings": 2048}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 40.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 1.0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "factor": 1.0},
    {**YARN, "factor": None},
    {**YARN, "original_max_position_embeddings": 6},
    {**YARN, "original_max_position_embeddings": 2},
    {**YARN, "original_max_position_embeddings": 2**50},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 2048},
    LONGROPE,
    {**LONGROPE, "factor": 16.0},
    {**LONGROPE, "attention_factor": 1.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    {"rope_type": "proportional", "factor": 3.0},
]  # fmt: skip


def llama(scaling, base=10000.0):
    parameters = {**scaling, "rope_theta": base}
    return LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM,
                       max_position_embeddings=TRAINED, rope_parameters=parameters)  # fmt: skip


def test_every_scaling_is_compared():
    assert {s["rope_type"] for s in SCALINGS} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("seq_len", [100, TRAINED, 3 * TRAINED])
@pytest.mark.parametrize("base", [10000.0, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies(scaling, base, seq_len):
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](llama(scaling, base), seq_len=seq_len)
    ours, factor = rope_frequencies(
        HEAD_DIM, base=base, scaling=scaling, max_position_embeddings=TRAINED, seq_len=seq_len
    )
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert factor == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, YARN], ids=str)
def test_rotation_of_llama(scaling):
    x, positions = torch.randn(2, 3, 9, HEAD_DIM), torch.stack([torch.arange(9), torch.arange(50, 59)])
    theirs, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(llama(scaling))(x, positions))
    frequencies = rope_frequencies(HEAD_DIM, base=10000.0, scaling=scaling)
    ours = apply_rope(x.numpy(), *rope_tables(positions.numpy(), frequencies))
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2e-5)
