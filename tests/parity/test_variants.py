"""Variants as Hugging Face's transformers compute them in torch."""

import numpy as np
import pytest
import torch
from torch_modules import drawn, split
from transformers import DebertaV2Config, DeepseekV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2

from fastattn import functional

pytestmark = pytest.mark.usefixtures("no_gradients")
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
@pytest.mark.parametrize("buckets", [-1, 16])
def test_deberta(buckets, terms):
    batch, heads, length, width = 2, 4, 90, 32
    config = DebertaV2Config(
        hidden_size=width, num_attention_heads=heads, relative_attention=True, pos_att_type=terms,
        position_buckets=buckets, max_relative_positions=50, max_position_embeddings=128,
    )  # fmt: skip
    module = drawn(DisentangledSelfAttention(config))
    span = 16 if buckets > 0 else 50
    x, embeddings = torch.from_numpy(normal(batch, length, width)), torch.from_numpy(normal(2 * span, width))
    mask = np.arange(length) < np.array([length, 70])[:, None]
    expected, _ = module(x, torch.from_numpy(mask[:, None, None]), rel_embeddings=embeddings)
    q, k, v = (split(f(x), heads) for f in (module.query_proj, module.key_proj, module.value_proj))
    tables = [
        split(getattr(module, name)(embeddings[None]), heads)[0] if term in terms else None
        for term, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj"))
    ]
    far = 50 if buckets > 0 else None
    out = functional.disentangled_attention(q, k, v, *tables, max_distance=far, mask=mask[:, None, None])
    np.testing.assert_allclose(out, split(expected, heads), atol=2e-5)


@pytest.mark.parametrize("absorbed", [False, True, None])
def test_deepseek_v2(absorbed):
    config = DeepseekV2Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20, attn_implementation="eager",
    )  # fmt: skip
    module = drawn(deepseek_v2.DeepseekV2Attention(config, 0))
    batch, length = 2, 70
    x = torch.from_numpy(normal(batch, length, 64))
    rotation = deepseek_v2.DeepseekV2RotaryEmbedding(config)(x, torch.arange(length)[None])
    causal = torch.full((length, length), -np.inf).triu(1)[None, None]
    expected, _ = module(x, causal, position_embeddings=rotation)

    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).view(batch, length, 4, 24).transpose(1, 2)
    latent, k_rope = module.kv_a_proj_with_mqa(x).split([32, 8], -1)
    q_rope, k_rope = deepseek_v2.apply_rotary_emb(q[..., 16:], k_rope[:, None], rotation)
    q = torch.cat([q[..., :16], q_rope], -1).numpy()
    cache = torch.cat([module.kv_a_layernorm(latent), k_rope[:, 0]], -1).numpy()
    weights = np.split(module.kv_b_proj.weight.numpy().reshape(4, 36, 32), [16], axis=1)
    out = functional.latent_attention(
        q, cache, *weights, absorbed=absorbed, causal=True, scale=module.scaling
    )
    out = module.o_proj(torch.from_numpy(out).transpose(1, 2).reshape(batch, length, -1))
    np.testing.assert_allclose(out, expected, atol=2e-5)
