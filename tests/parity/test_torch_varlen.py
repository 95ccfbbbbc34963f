"""torch's varlen_attn on CPUs, against scaled_dot_product_attention of each sequence."""

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

import fastattn.torch

LENGTHS_Q, LENGTHS_K = torch.tensor([5, 1, 7, 3]), torch.tensor([8, 6, 7, 4])


def begins(lengths):
    return pad(lengths.cumsum(0), (1, 0)).int()


def operands(heads_kv=4, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    sizes = (LENGTHS_Q, 4), (LENGTHS_K, heads_kv), (LENGTHS_K, heads_kv)
    shapes = [(int(lengths.sum()), heads, 16) for lengths, heads in sizes]
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def one_by_one(q, k, v, window):
    """Results of each sequence."""
    results = []
    of_all = (x.split(n.tolist()) for x, n in zip((q, k, v), (LENGTHS_Q, LENGTHS_K, LENGTHS_K), strict=True))
    for parts in zip(*of_all, strict=True):
        len_q, len_k = (len(x) for x in parts[:2])
        behind = torch.arange(len_q)[:, None] + len_k - len_q - torch.arange(len_k)
        left, right = (len_k if n < 0 else n for n in window)
        mask = (behind <= left) & (-behind <= right)
        heads = (x.transpose(0, 1)[None] for x in parts)
        results.append(scaled_dot_product_attention(*heads, mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_results_and_gradients(heads_kv, window):
    cu, given = (begins(LENGTHS_Q), begins(LENGTHS_K), 7, 8), operands(heads_kv)
    options = {"window_size": window, "enable_gqa": heads_kv < 4}
    out, lse = varlen_attn(*given, *cu, **options, return_aux=AuxRequest(lse=True))
    expected = one_by_one(*given, window)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (4, len(out))
    found = torch.autograd.grad(out.square().sum(), given)
    for x, y in zip(found, torch.autograd.grad(expected.square().sum(), given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_and_compiled(dtype):
    given = operands(dtype=dtype)
    call = torch.compile(
        lambda *x: varlen_attn(*x, begins(LENGTHS_Q), begins(LENGTHS_K), 7, 8), backend="eager"
    )
    expected = one_by_one(*given, (-1, -1))
    torch.testing.assert_close(call(*given), expected, rtol=2e-2, atol=2e-2)


def test_used_keys_alone_are_attended_in_one_piece_or_in_pages():
    q, k, v = (x.detach() for x in operands())
    room = 12
    places = torch.cat([room * i + torch.arange(n) for i, n in enumerate(LENGTHS_K)])
    roomy = [torch.full((4 * room, 4, 16), torch.nan).index_copy(0, places, x) for x in (k, v)]
    expected = one_by_one(q, k, v, (-1, 0))
    options = {"seqused_k": LENGTHS_K.int(), "window_size": (-1, 0)}
    begin = torch.arange(5, dtype=torch.int32) * room
    out = varlen_attn(q, *roomy, begins(LENGTHS_Q), begin, 7, room, **options)
    torch.testing.assert_close(out, expected)
    order = torch.tensor([5, 2, 0, 7, 3, 1, 6, 4])
    pages = [x.view(8, 6, 4, 16)[order.argsort()] for x in roomy]
    options["block_table"] = order.view(4, 2).int()
    out = varlen_attn(q, *pages, begins(LENGTHS_Q), None, 7, room, **options)
    torch.testing.assert_close(out, expected)


def test_errors_are_those_of_varlen_attention():
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"^varlen_attention\(\): cu_seqlens_q"):
        varlen_attn(q, k, v, begins(LENGTHS_K), begins(LENGTHS_K), 8, 8)
    with pytest.raises(ValueError, match=r"^varlen_attn\(\): window_size\[0\] is -3"):
        varlen_attn(q, k, v, begins(LENGTHS_Q), begins(LENGTHS_K), 8, 8, window_size=(-3, 0))
    table = torch.zeros(len(LENGTHS_Q), 1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^varlen_attn\(\): seqused_k is None; expected one number for each"
    ):
        varlen_attn(q, k[:, None], v[:, None], begins(LENGTHS_Q), None, 8, 8, block_table=table)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(("used", "said"), [
    ([6, 6], r"seqused_k\[0\] is 6; expected 0 to 4"), ([-2, 4], r"seqused_k\[0\] is -2; expected 0 to 4"),
    ([4, 9], r"seqused_k\[1\] is 9"), ([4], r"seqused_k has shape \(1,\); expected \(2,\)"),
])  # fmt: skip
def test_used_keys_that_have_no_room_are_named(used, said, pages):
    x, begin = torch.randn(8, 4, 16), torch.tensor([0, 4, 8], dtype=torch.int32)
    options = {"seqused_k": torch.tensor(used, dtype=torch.int32)}
    k, cu_k = x, begin
    if pages:
        options["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        k, cu_k = x.view(4, 2, 4, 16), None
    with pytest.raises(ValueError, match=rf"^varlen_attn\(\): {said}"):
        varlen_attn(x, k, k, begin, cu_k, 4, 4, **options)


def test_torch_has_no_kernel_that_is_replaced():
    """Of a torch that has kernels on CPUs, ours are not needed."""
    assert fastattn.torch._varlen is not None
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.aten._flash_attention_forward(*operands(), None, None, 7, 8, 0.0, False, False)
