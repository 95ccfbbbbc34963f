"""Estimates of attention as Hugging Face's transformers compute them in torch."""

import numpy as np
import pytest
import torch
from torch_modules import drawn, split
from transformers import NystromformerConfig, ReformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from fastattn import functional

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("landmarks", [8, 32, 96])
def test_nystromformer(landmarks):
    config = NystromformerConfig(
        hidden_size=64, num_attention_heads=4, num_landmarks=landmarks, segment_means_seq_len=96
    )
    module = drawn(NystromformerSelfAttention(config))
    module.conv_kernel_size = None  # the model's convolution of the values is not part of it
    module.init_option = "exact"  # of each head; the other is the largest of the batch
    x = torch.randn(2, 96, 64)
    q, k, v = (split(linear(x), 4) for linear in (module.query, module.key, module.value))
    got = functional.nystrom_attention(q, k, v, num_landmarks=landmarks)
    np.testing.assert_allclose(got, split(module(x)[0], 4), atol=2e-5 * abs(got).max())


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_reformer(causal, rounds):
    config = ReformerConfig(
        hidden_size=64, num_attention_heads=4, attention_head_size=16, num_buckets=8, num_hashes=rounds,
        lsh_attn_chunk_length=16, lsh_num_chunks_before=1, lsh_num_chunks_after=0, hash_seed=3,
        is_decoder=causal, lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = drawn(LSHSelfAttention(config))
    x = torch.randn(2, 96, 64)
    qk, v = split(module.query_key(x), 4), split(module.value(x), 4)
    want = split(module(x).hidden_states, 4)
    torch.manual_seed(3)
    rotations = torch.randn(4, 16, rounds, 4).numpy().swapaxes(1, 2)
    got = functional.lsh_attention(
        qk, v, num_buckets=8, chunk=16, num_rounds=rounds, rotations=rotations, causal=causal
    )
    # A key alone in its chunk weighs rounds by lses of -1e5, which float32 rounds to 0.008.
    alone = 16 if causal else 0
    np.testing.assert_allclose(got[:, :, alone:], want[:, :, alone:], atol=2e-4)
