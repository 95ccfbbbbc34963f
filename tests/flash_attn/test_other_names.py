"""Padding, rotary positions and `install`, on arrays."""

import copy
import pickle

import flash
import ml_dtypes
import numpy as np
import pytest
from refused import assert_refused, refused

from fastattn.flash_attn import bert_padding, install
from fastattn.flash_attn.layers import rotary

RNG = np.random.default_rng(1)


def test_unpad_and_pad():
    x, mask = RNG.standard_normal((3, 7, 2, 4)), np.arange(7) < np.array([[3], [0], [7]])
    unused = (np.arange(7) == 5) & ~mask
    for m in (mask, mask.astype(np.int64)):
        tokens, indices, begins, longest, used = bert_padding.unpad_input(x, m)
        np.testing.assert_array_equal(tokens, x[mask])
        assert (begins.tolist(), longest, used.tolist()) == ([0, 3, 3, 10], 7, [3, 0, 7])
        assert begins.dtype == used.dtype == np.int32
        np.testing.assert_array_equal(
            bert_padding.pad_input(tokens, indices, 3, 7), np.where(mask[..., None, None], x, 0)
        )
        np.testing.assert_array_equal(bert_padding.index_first_axis(x.reshape(21, 2, 4), indices), tokens)
    tokens, indices, begins, longest, used = bert_padding.unpad_input(x, mask, unused)
    np.testing.assert_array_equal(tokens, x[mask | unused])
    assert (begins.tolist(), longest, used.tolist()) == ([0, 4, 5, 12], 7, [3, 0, 7])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("pairs", [4, 10])
@pytest.mark.parametrize("offsets", [0, 5, np.array([3, 0, 9], np.int32)], ids=str)
def test_rotary(interleaved, dtype, pairs, offsets):
    """All at once, in place, and of packed sequences."""
    x = RNG.standard_normal((3, 12, 2, 20)).astype(dtype)
    angle = RNG.random((21, pairs)) * 7
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    positions = np.broadcast_to(np.reshape(offsets, (-1, 1)) + np.arange(12), (3, 12))
    expected = flash.turned_rows(x, positions, cos, sin, interleaved)
    found = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(*(y.astype(float) for y in (found, expected)), atol=8 * eps)
    assert found.dtype == dtype
    packed = rotary.apply_rotary_emb(
        x.reshape(36, 2, 20),
        cos,
        sin,
        interleaved,
        seqlen_offsets=offsets,
        cu_seqlens=[0, 12, 24, 36],
        max_seqlen=12,
    )
    np.testing.assert_array_equal(packed.reshape(x.shape), found)
    strided = np.asfortranarray(x)
    for y in (x, strided):
        assert rotary.apply_rotary_emb(y, cos, sin, interleaved, True, offsets) is y
        np.testing.assert_array_equal(y, found)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_embedding(scale_base):
    layer = rotary.RotaryEmbedding(8, base=100.0, interleaved=True, scale_base=scale_base)
    angle = np.outer(np.arange(14), 100.0 ** -(np.arange(0, 8, 2) / 8))
    scale = 1.0
    if scale_base:
        scale = ((np.arange(0, 8, 2) + 3.2) / 11.2) ** ((np.arange(14) - 7) / 512)[:, None]
    qkv = RNG.standard_normal((2, 9, 3, 4, 8))
    positions = np.arange(9) + np.array([[5], [5]])
    q = flash.turned_rows(qkv[:, :, 0], positions, np.cos(angle) * scale, np.sin(angle) * scale, True)
    k = flash.turned_rows(qkv[:, :, 1], positions, np.cos(angle) / scale, np.sin(angle) / scale, True)
    expected = np.stack([q, k, qkv[:, :, 2]], 2)
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        given = qkv.copy()
        assert made(given, seqlen_offset=5) is given
        np.testing.assert_allclose(given, expected, atol=1e-12)
        joined = qkv.reshape(2, 9, 12, 8).copy()
        made(joined, seqlen_offset=np.array([5, 5]), max_seqlen=14, num_heads_q=4)
        np.testing.assert_allclose(joined, expected.reshape(2, 9, 12, 8), atol=1e-12)
        found_q, found_kv = made(qkv[:, :, 0].copy(), qkv[:, :, 1:].copy(), 5)
        np.testing.assert_allclose(found_q, q, atol=1e-12)
        np.testing.assert_allclose(found_kv, expected[:, :, 1:], atol=1e-12)


def test_rotary_embedding_of_other_frequencies():
    """Of a class, or assigned or written to later; tables have the names that they have in flash-attn."""

    class Slower(rotary.RotaryEmbedding):
        def _compute_inv_freq(self, device=None):
            return super()._compute_inv_freq(device) / 4

    qkv = RNG.standard_normal((2, 9, 3, 4, 8)).astype(np.float32)
    expected, changed, written = Slower(8)(qkv.copy()), rotary.RotaryEmbedding(8), rotary.RotaryEmbedding(8)
    assert not np.array_equal(changed(qkv.copy()), expected)
    assert not np.array_equal(written(qkv.copy()), expected)
    changed.inv_freq = changed.inv_freq / 4
    written.inv_freq /= 4
    np.testing.assert_array_equal(changed(qkv.copy()), expected)
    np.testing.assert_array_equal(written(qkv.copy()), expected)
    changed._update_cos_sin_cache(20, dtype="float64")
    np.testing.assert_allclose(changed._cos_cached, np.cos(np.outer(np.arange(20), changed.inv_freq)))
    assert changed._sin_cached.dtype == np.float64
    assert changed._cos_k_cached is None


X, TABLE = np.ones((2, 5, 4, 8), np.float32), np.ones((9, 4), np.float32)


@refused(r"""
r.apply_rotary_emb(x[0], t, t)
    -> ValueError: ^apply_rotary_emb\(\): x has shape \(5, 4, 8\); expected \(batch, length,
r.apply_rotary_emb(x, t, t, cu_seqlens=[0, 2])
    -> ValueError: x has shape .*expected \(tokens, heads, head_dim\)
r.apply_rotary_emb(x[0], t, t, cu_seqlens=[0, 3, 2, 5]) -> ValueError: cu_seqlens falls from 3 to 2
r.apply_rotary_emb(x, t, t, seqlen_offsets=5)
    -> ValueError: cos has 9 positions; expected at least 10, by seqlen_off
r.apply_rotary_emb(x, t, t, seqlen_offsets=[0, 5]) -> ValueError: cos has 9 positions; expected at least 10
r.apply_rotary_emb(x, t, t, seqlen_offsets=[0, -1]) -> ValueError: seqlen_offsets has -1
r.apply_rotary_emb(x, t, t, seqlen_offsets=[0])
    -> ValueError: seqlen_offsets has shape \(1,\); expected one number, or one for each sequence
r.apply_rotary_emb(x.astype(int), t, t) -> TypeError: x has dtype int64
r.apply_rotary_emb(x, t, t[:3]) -> ValueError: sin has shape \(3, 4\); expected \(9, 4\), as cos
r.apply_rotary_emb(x, t, t, interleaved=2) -> TypeError: interleaved is 2
r.apply_rotary_emb_qkv_(x, t, t) -> ValueError: ^apply_rotary_emb_qkv_\(\): qkv has shape \(2, 5, 4, 8\)
r.apply_rotary_emb_qkv_(x[:, :, None].repeat(3, 2), t, t, t[:4], t[:4])
    -> ValueError: cos_k has shape .*; expected \(9, 4\), as cos
r.apply_rotary_emb_kv_(x, t, t) -> ValueError: ^apply_rotary_emb_kv_\(\): kv has shape
b.unpad_input(x, x[:, 1:, 0, 0])
    -> ValueError: ^unpad_input\(\): attention_mask has shape \(2, 4\); expected \(2, 5\)
b.pad_input(x, np.arange(3), 1, 3) -> ValueError: indices has shape \(3,\); expected \(2,\)
""")
def test_errors_name_the_argument(code, error):
    assert_refused(code, error, r=rotary, b=bert_padding, x=X, t=TABLE)


def test_install_is_undone():
    with pytest.raises(ModuleNotFoundError):
        import flash_attn
    with install() as first:
        second = install()
        first.undo()
        import flash_attn
        from flash_attn import flash_attn_func, flash_attn_interface
        from flash_attn.bert_padding import pad_input
        from flash_attn.layers.rotary import apply_rotary_emb

        assert flash_attn_func is flash_attn_interface.flash_attn_func
        assert (pad_input, apply_rotary_emb) == (bert_padding.pad_input, rotary.apply_rotary_emb)
        assert flash_attn.__version__.startswith("2.8.")
        assert str(second) == "flash_attn: fastattn.flash_attn"
        second.undo()
    with pytest.raises(ModuleNotFoundError):
        import flash_attn


def test_install_refuses_where_the_package_is_installed(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"^install\(\): there is a flash_attn already"):
        install()


def test_nothing_here_imports_torch(python):
    """Nor needs it: arrays do without."""
    code = """
import sys, numpy as np
sys.modules["torch"] = None
from fastattn.flash_attn import *
import fastattn.flash_attn.bert_padding, fastattn.flash_attn.layers.rotary as rotary
q = np.ones((1, 3, 2, 8), np.float32)
print(flash_attn_func(q, q, q).shape, type(rotary.RotaryEmbedding(8)).__name__)
"""
    assert python(code).stdout.strip() == "(1, 3, 2, 8) RotaryEmbedding"
