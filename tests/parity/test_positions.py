"""Positions as Hugging Face's transformers compute them, in torch. Its angles and frequencies are float32."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as gpt_neox_rotation
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotation
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention, T5Config

from fastattn.positions import alibi_slopes, apply_rope, rope_frequencies, rope_tables, t5_bias, t5_buckets

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


def test_partial_rotation_of_gpt_neox():
    x, (cos, sin) = torch.randn(2, 3, 9, HEAD_DIM), rope_tables(np.arange(9), rope_frequencies(16))
    both = (torch.from_numpy(np.concatenate([table, table], -1))[None] for table in (cos, sin))
    theirs, _ = gpt_neox_rotation(x, x, *both)
    np.testing.assert_allclose(apply_rope(x.numpy(), cos, sin), theirs.numpy(), rtol=0, atol=1e-6)


def test_interleaved_rotation_of_gptj():
    x, (cos, sin) = torch.randn(2, 3, 9, HEAD_DIM), rope_tables(np.arange(9), rope_frequencies(HEAD_DIM))
    tables = (torch.from_numpy(table)[None] for table in (sin, cos))
    theirs = gptj_rotation(x.transpose(1, 2), *tables).transpose(1, 2)  # GPT-J has the heads after the length
    ours = apply_rope(x.numpy(), cos, sin, interleaved=True)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 16, 25, 40, 71, 112])
def test_alibi_of_bloom_and_mpt(n_heads):
    slopes = alibi_slopes(n_heads)[:, None, None]
    bloom = build_alibi_tensor(torch.ones(1, 10), n_heads, torch.float32)
    np.testing.assert_allclose(slopes * np.arange(10), bloom.numpy(), rtol=2e-6)
    mpt = build_mpt_alibi_tensor(n_heads, 10)
    np.testing.assert_allclose(slopes * np.arange(-9, 1), mpt.numpy(), rtol=2e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [40, 64, 100, 128, 160, 256, 300])
@pytest.mark.parametrize("num_buckets", [4, 5, 6, 8, 12, 16, 24, 32, 33, 48, 64])
def test_buckets_of_t5(num_buckets, max_distance, bidirectional):
    options = {"bidirectional": bidirectional, "num_buckets": num_buckets, "max_distance": max_distance}
    theirs = T5Attention._relative_position_bucket(torch.arange(-700, 701), **options)
    np.testing.assert_array_equal(t5_buckets(1, 1401, q_offset=700, **options)[0], theirs.numpy())


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("past", [0, 60])
def test_bias_of_t5(is_decoder, past):
    config = T5Config(num_heads=6, is_decoder=is_decoder)
    t5 = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs = t5.compute_bias(80, 80 + past, past_seen_tokens=past)[0].detach()
    table = t5.relative_attention_bias.weight.detach().numpy()
    ours = t5_bias(table, 80, 80 + past, bidirectional=not is_decoder)
    np.testing.assert_array_equal(ours, theirs.numpy())
