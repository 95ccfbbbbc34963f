"""flash-attn's functions on tensors: the bits of arrays, gradients, compiled and exported calls."""

import copy
import pickle

import numpy as np
import pytest
import torch

import fastattn.flash_attn as fa
import fastattn.torch  # noqa: F401 - defines operators
from fastattn.flash_attn import bert_padding
from fastattn.flash_attn.layers import rotary

pytestmark = pytest.mark.usefixtures("quiet")
with_cache = torch.ops.fastattn.flash_attn_with_kvcache

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "local": {"window_size": (3, 2), "softmax_scale": 0.3},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.7, 4)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
BEGINS_Q, BEGINS_K = (
    torch.tensor([0, 3, 3, 9], dtype=torch.int32),
    torch.tensor([0, 5, 7, 20], dtype=torch.int32),
)


@pytest.fixture(autouse=True)
def _not_compiled_too_often():
    torch.compiler.reset()


def operands(dtype=torch.float32, grad=False):
    shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 8)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def tokens(dtype=torch.float32, grad=False):
    shapes = (9, 4, 16), (20, 2, 16), (20, 2, 8)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def in_torch(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0, alibi_slopes=None):
    """The definition, by torch's own operations: its gradients are those of it."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    far = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * far.abs()
    left, right = (torch.inf if side < 0 else side for side in window_size)
    hidden = (far > left) | (-far > (0 if causal else right))
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def arrays(options):
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@every_option
@pytest.mark.parametrize("grad", [False, True])
def test_the_bits_of_arrays(options, grad):
    options = options | {"return_attn_probs": True}
    calls = (
        (fa.flash_attn_func, operands(grad=grad), ()),
        (fa.flash_attn_varlen_func, tokens(grad=grad), (BEGINS_Q, BEGINS_K)),
    )
    for function, inputs, begins in calls:
        expected = function(
            *(x.detach().numpy() for x in inputs), *(x.numpy() for x in begins), **arrays(options)
        )
        found = function(*inputs, *begins, **options)
        assert found[2] is None
        for x, y in zip(found[:2], expected[:2], strict=True):
            assert x.dtype is torch.float32
            assert x.requires_grad is grad
            np.testing.assert_array_equal(x.detach(), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_option
def test_gradients(options, dtype):
    inputs, wide = operands(dtype, grad=True), None
    out = fa.flash_attn_func(*inputs, **options)
    dout = torch.randn(out.shape).to(dtype)
    found = torch.autograd.grad(out, inputs, dout)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(in_torch(*wide, **options), wide, dout.double())
    eps = torch.finfo(dtype).eps
    for x, y in zip(found, expected, strict=True):
        assert x.dtype is dtype
        assert (x.double() - y).abs().max() < 16 * eps * y.abs().max()


@every_option
def test_gradients_of_packed_forms(options):
    """Of sequences of any lengths: those of their own calls."""
    q = tokens(torch.float64, grad=True)[0]
    kv = torch.randn(20, 2, 2, 16, dtype=torch.float64, requires_grad=True)
    run = fa.flash_attn_varlen_kvpacked_func
    out = run(q, kv, BEGINS_Q, BEGINS_K, 6, 13, **options)
    own = []
    for i in range(3):
        rows, keys = slice(*BEGINS_Q[i : i + 2].tolist()), slice(*BEGINS_K[i : i + 2].tolist())
        own.append(in_torch(q[None, rows], kv[None, keys, 0], kv[None, keys, 1], **options)[0])
    expected = torch.cat(own)
    torch.testing.assert_close(out, expected)
    dout = torch.randn(out.shape, dtype=torch.float64)
    for x, y in zip(*(torch.autograd.grad(o, (q, kv), dout) for o in (out, expected)), strict=True):
        torch.testing.assert_close(x, y)
    qkv = torch.randn(2, 9, 3, 4, 16, dtype=torch.float64, requires_grad=True)
    out, expected = fa.flash_attn_qkvpacked_func(qkv, **options), in_torch(*qkv.unbind(2), **options)
    grads = [torch.autograd.grad(o.square().sum(), qkv)[0] for o in (out, expected)]
    torch.testing.assert_close(*grads)


def test_dropout_is_drawn_from_torchs_generator():
    """Backward has the seed of forward, in each call another."""
    one_length = fa.flash_attn_func, operands(torch.float64, True), ()
    packed = fa.flash_attn_varlen_func, tokens(torch.float64, True), (BEGINS_Q, BEGINS_K)
    for function, inputs, begins in (one_length, packed):

        def run(*inputs, function=function, begins=begins):
            torch.manual_seed(3)
            return function(*inputs, *begins, dropout_p=0.3)

        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
        with torch.no_grad():
            assert torch.equal(run(*inputs), run(*inputs))
            torch.testing.assert_close(run(*inputs), run(*inputs))
            assert not torch.equal(run(*inputs), function(*inputs, *begins, dropout_p=0.3))
    values = torch.eye(200).expand(1, 1, 200, 200).transpose(1, 2)
    q = torch.randn(1, 200, 4, 16) * 0.1
    out = fa.flash_attn_func(q, q[:, :, :1], values, dropout_p=0.17)
    assert abs((out == 0).double().mean() - 0.17) < 0.01
    assert abs(out.sum(-1).mean() - 1) < 0.01


def test_pages_have_no_gradients():
    pages = [torch.randn(3, 16, 2, 16) for _ in range(2)]
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    q = torch.randn(9, 4, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func.*: pages have no gradients"):
        fa.flash_attn_varlen_func(q, *pages, BEGINS_Q, BEGINS_K, 6, 13, block_table=table, causal=True)
    q = q.detach()
    out = fa.flash_attn_varlen_func(q, *pages, BEGINS_Q, BEGINS_K, 6, 13, block_table=table, causal=True)
    rows = [pages[0][p, : int(n)] for p, n in zip(table[:, 0], BEGINS_K.diff(), strict=True)]
    values = [pages[1][p, : int(n)] for p, n in zip(table[:, 0], BEGINS_K.diff(), strict=True)]
    whole = fa.flash_attn_varlen_func(q, torch.cat(rows), torch.cat(values), BEGINS_Q, BEGINS_K, causal=True)
    assert torch.equal(out, whole)


def cache_call(dtype=torch.float32, paged=False):
    """Arguments of flash_attn_with_kvcache by name, new tensors in each call."""
    torch.manual_seed(1)
    shape = (8, 16, 2, 16) if paged else (2, 64, 2, 16)
    angle = torch.rand(70, 8) * 7
    given = {
        "q": torch.randn(2, 3, 4, 16), "k_cache": torch.randn(shape), "v_cache": torch.randn(shape),
        "k": torch.randn(2, 3, 2, 16), "v": torch.randn(2, 3, 2, 16), "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
    }  # fmt: skip
    given = {name: x.to(dtype) for name, x in given.items()}
    given["cache_seqlens"] = torch.tensor([13, 40], dtype=torch.int32)
    given["alibi_slopes"] = torch.linspace(0.1, 1, 4)
    if paged:
        given["block_table"] = torch.randperm(8).reshape(2, 4).int()
    return given


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_has_the_bits_of_arrays(paged):
    given, options = (
        cache_call(paged=paged),
        {"causal": True, "window_size": (20, 0), "return_softmax_lse": True},
    )
    copies = arrays(cache_call(paged=paged))
    expected = fa.flash_attn_with_kvcache(**copies, **options)
    given["q"].requires_grad_()  # as of a model's parameters: there are no gradients
    found = fa.flash_attn_with_kvcache(**given, **options)
    for x, y in zip(found, expected, strict=True):
        assert not x.requires_grad
        np.testing.assert_array_equal(x, y)
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(given[name], copies[name])


def test_a_cache_has_no_gradients_and_is_written_by_versions():
    for compiled in (False, True):
        given = cache_call()
        given["q"].requires_grad_()
        run = fa.flash_attn_with_kvcache
        run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        before = given["k_cache"]._version
        assert not run(**given).requires_grad
        assert given["k_cache"]._version > before


def test_a_cache_of_bfloat16():
    given = cache_call(torch.bfloat16)
    old, new = given["k_cache"].clone(), given["v"]
    out = fa.flash_attn_with_kvcache(**given, causal=True)
    assert out.dtype is torch.bfloat16
    assert torch.equal(given["v_cache"][1, 40:43], new[1])
    given["k_cache"][1, 40:43] = old[1, 40:43]
    given["k_cache"][0, 13:16] = old[0, 13:16]
    assert torch.equal(given["k_cache"], old)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_is_written_in_compiled_code(paged):
    def f(given):
        out, lse = fa.flash_attn_with_kvcache(**given, causal=True, return_softmax_lse=True)
        return out * 2, lse + given["k_cache"].sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    first, second = cache_call(paged=paged), cache_call(paged=paged)
    for x, y in zip(f(first), compiled(second), strict=True):
        torch.testing.assert_close(x, y)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(first[name], second[name])
    if not paged:  # an int, which becomes a tensor
        for length in (9, 11):
            first, second = ({**cache_call(), "cache_seqlens": length} for _ in range(2))
            torch.testing.assert_close(f(first), compiled(second))


@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_of_the_cache(paged):
    torch.library.opcheck(with_cache.default, (), {**cache_call(paged=paged), "causal": True})
    call = cache_call(paged=paged)
    meta = {name: x.to("meta") for name, x in call.items()}
    assert with_cache(**meta)[0].shape == (2, 3, 4, 16)
    assert fa.flash_attn_with_kvcache(**meta).shape == (2, 3, 4, 16)
    with pytest.raises(ValueError, match=r"^flash_attn_with_kvcache\(\): v has shape \(2, 2, 2, 16\)"):
        with_cache(**{**meta, "v": meta["v"][:, 1:]})


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_functions_are_compiled(dropout_p):
    inputs, packed = operands(grad=True), tokens(grad=True)

    def f(q, k, v, *tokens):
        out = fa.flash_attn_func(q * 2, k, v, dropout_p, causal=True, window_size=(5, 0))
        other, lse, _ = fa.flash_attn_varlen_func(
            *tokens, BEGINS_Q, BEGINS_K, softcap=3.0, return_attn_probs=True
        )
        return out.sum() + (other * 3).sum() + lse[:, :3].sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    expected = f(*inputs, *packed)
    torch.manual_seed(0)
    found = compiled(*inputs, *packed)
    torch.testing.assert_close(found, expected)
    assert dropout_p == 0 or not torch.equal(compiled(*inputs, *packed), found)
    for x, y in zip(
        *(torch.autograd.grad(out, (*inputs, *packed)) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_functions_are_exported():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return fa.flash_attn_func(q, k, v, causal=True)

    sizes = {name: {1: torch.export.Dim.AUTO} for name in "qkv"}
    q, k, v = operands()
    exported = torch.export.export(Attention(), (q, k, v), dynamic_shapes=sizes).module()
    shorter = q[:, :5], k[:, :7], v[:, :7]
    assert torch.equal(exported(*shorter), fa.flash_attn_func(*shorter, causal=True))


def test_autocast():
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert fa.flash_attn_func(q, k, v).dtype is torch.bfloat16


@pytest.mark.parametrize("offsets", [2, torch.tensor([3, 0])], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved, offsets):
    x = torch.randn(2, 6, 3, 16, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(9, 5, dtype=torch.float64) * 7
    tables = angle.cos(), angle.sin()
    plain = offsets.numpy() if isinstance(offsets, torch.Tensor) else offsets
    expected = rotary.apply_rotary_emb(
        x.detach().numpy(), *(t.numpy() for t in tables), interleaved, seqlen_offsets=plain
    )

    def run(x, inplace=False):
        return rotary.apply_rotary_emb(x, *tables, interleaved, inplace, offsets)

    np.testing.assert_array_equal(run(x).detach(), expected)
    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x, fast_mode=True)
    torch.autograd.gradcheck(lambda x: run(x * 1, True), x)  # of what has been overwritten, too
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    packed = rotary.apply_rotary_emb(
        x.reshape(12, 3, 16),
        *tables,
        interleaved,
        seqlen_offsets=offsets,
        cu_seqlens=torch.tensor([0, 6, 12]),
    )
    assert torch.equal(packed.reshape(x.shape), run(x))
    begins = torch.tensor([0, 6, 12])
    torch.library.opcheck(
        torch.ops.fastattn.apply_rotary_emb.default,
        (x.reshape(12, 3, 16), *tables, None, begins),
        {"offset": 2},
    )


def test_rotary_embedding():
    """Of a kind and a dtype each, in a compiled call, too; a part of a module that is copied."""
    layer = rotary.RotaryEmbedding(8)
    qkv = torch.randn(2, 9, 3, 4, 8)
    expected = qkv.numpy().copy()
    layer(expected, seqlen_offset=3)
    assert layer(qkv.bfloat16(), seqlen_offset=3).dtype is torch.bfloat16
    compiled = torch.compile(lambda x: layer(x * 1, seqlen_offset=3), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv), torch.from_numpy(expected))
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(made(qkv.clone(), seqlen_offset=3), torch.from_numpy(expected))
    changed = rotary.RotaryEmbedding(8)
    changed.inv_freq = torch.from_numpy(changed.inv_freq).float() / 4
    layer.inv_freq /= 4
    torch.testing.assert_close(changed(qkv.clone()), layer(qkv.clone()))
    changed._update_cos_sin_cache(20, device="cpu", dtype=torch.bfloat16)
    assert changed._sin_cached.dtype is torch.bfloat16
    leaf = qkv.clone().requires_grad_()
    layer(leaf * 1).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())  # rotations keep lengths


def test_tensors_are_on_one_device():
    """A kernel of shapes alone would leave a result of nothing."""
    x, elsewhere = torch.randn(1, 8, 2, 16), torch.empty(1, 8, 2, 16, device="meta")
    for call in (
        lambda: fa.flash_attn_func(x, elsewhere, x),
        lambda: fa.flash_attn_with_kvcache(x, elsewhere, elsewhere, cache_seqlens=3),
        lambda: torch.ops.fastattn.attention(x, elsewhere, x),
        lambda: torch.ops.fastattn.attention(x, x, x, bias=elsewhere),
    ):
        with pytest.raises(ValueError, match=r"\(\): (k|k_cache|bias) is on meta; expected cpu, as "):
            call()


def test_padding():
    x, mask = torch.randn(3, 7, 4, requires_grad=True), torch.arange(7) < torch.tensor([[3], [0], [7]])
    expected = bert_padding.unpad_input(x.detach().numpy(), mask.numpy())
    for m in (mask, mask.long()):
        found = bert_padding.unpad_input(x, m)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a.detach() if isinstance(a, torch.Tensor) else a, b)
        assert found[2].dtype is torch.int32
    padded = bert_padding.pad_input(found[0], found[1], 3, 7)
    assert torch.equal(padded, torch.where(mask[..., None], x, 0))
    (grad,) = torch.autograd.grad(padded.square().sum(), x)
    torch.testing.assert_close(grad, 2 * torch.where(mask[..., None], x, 0))


def test_errors_are_those_of_the_function():
    q, k, v = operands(grad=True)
    with pytest.raises(
        TypeError, match=r"^flash_attn_func\(\): k is of type ndarray; expected a tensor, as the others"
    ):
        fa.flash_attn_func(q, k.detach().numpy(), v)
    with pytest.raises(ValueError, match=r"^flash_attn_func\(\): alibi_slopes has shape \(3,\)"):
        fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(3))
    for grad in (True, False):
        packed = [x.requires_grad_(grad) for x in tokens()]
        with pytest.raises(ValueError, match=r"^flash_attn_varlen_func\(\): cu_seqlens_k falls from 5 to 2"):
            fa.flash_attn_varlen_func(*packed, BEGINS_Q, torch.tensor([0, 5, 2, 20]))
    given = cache_call()
    with pytest.raises(
        ValueError, match=r"^flash_attn_with_kvcache\(\): cache_seqlens has 62 and k 3 new keys"
    ):
        fa.flash_attn_with_kvcache(**{**given, "cache_seqlens": torch.tensor([62, 0])})
    with pytest.raises(
        TypeError, match=r"^flash_attn_with_kvcache\(\): v_cache is of type ndarray; expected a"
    ):
        fa.flash_attn_with_kvcache(**{**given, "v_cache": given["v_cache"].numpy(), "cache_seqlens": 1})
    with pytest.raises(ValueError, match=r"^apply_rotary_emb\(\): cos has 1 positions"):
        rotary.apply_rotary_emb(q, torch.ones(1, 4), torch.ones(1, 4))
