"""fastattn.torch.flex_attention against torch's own: results eagerly, gradients by scores in float64."""

import gc
import tracemalloc

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, or_masks

from fastattn.torch import _flex, flex_attention

B, H, LEN_Q, LEN_K, DIM = 2, 4, 150, 220, 16
pytestmark = pytest.mark.filterwarnings("ignore:.*return_lse is deprecated")


@pytest.fixture(autouse=True)
def _eagerly(monkeypatch):
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def operands(dtype=torch.float32, heads_kv=H, batch_kv=B):
    random = torch.Generator().manual_seed(0)
    shapes = (B, H, LEN_Q, DIM), (batch_kv, heads_kv, LEN_K, DIM), (batch_kv, heads_kv, LEN_K, 24)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


RANDOM = torch.Generator().manual_seed(1)
DOCUMENT = torch.randint(0, 4, (B, LEN_K), generator=RANDOM).sort()[0]
LENGTH = torch.tensor([40, 110])
ALLOWED = torch.rand(LEN_Q, LEN_K, generator=RANDOM) < 0.3


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def same_document(b, h, q_idx, kv_idx):
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def is_prefix(b, h, q_idx, kv_idx):
    return kv_idx < LENGTH[b]


MASKS = {
    "causal": causal,
    "window": and_masks(causal, lambda b, h, i, j: i - j <= 20),
    "documents": same_document,
    "causal documents": and_masks(causal, same_document),
    "prefix": or_masks(causal, is_prefix),
    "padding": is_prefix,
    "of heads": lambda b, h, i, j: (i - j).abs() < 10 * (h + 1),
    "dense": lambda b, h, i, j: ALLOWED[i][j],
    "no keys": lambda b, h, i, j: (i < 70) & (j >= 0),
    "noop": torchs.noop_mask,
}


@pytest.mark.parametrize("block", [128, (64, 32), (100, 1000), 4096], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, block):
    q, k, v = operands()
    for separate in (True, False):
        options = {"device": "cpu", "BLOCK_SIZE": block, "separate_full_blocks": separate}
        mask = create_block_mask(MASKS[name], B, H, LEN_Q, LEN_K, **options)
        expected = torchs.flex_attention(q, k, v, block_mask=mask, return_lse=True)
        found = flex_attention(q, k, v, block_mask=mask, return_lse=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_blocks_are_obeyed_where_the_function_says_more():
    """As torch's compiled one: its eager one reads the function alone."""
    q, k, v = operands()
    count, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([[[[1, 0], [1, 0], [0, 1]]]])
    for kind in ({"mask_mod": causal}, {}):
        mask = BlockMask.from_kv_blocks(
            count, indices, BLOCK_SIZE=(50, 110), seq_lengths=(LEN_Q, LEN_K), **kind
        )
        i, j = torch.arange(LEN_Q)[:, None], torch.arange(LEN_K)
        allowed = (j // 110 == torch.tensor([1, 1, 0])[i // 50]) & (i >= j if kind else True)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed).nan_to_num()
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, rtol=1e-5, atol=1e-5)


PARAMETERS = {
    "slopes": torch.rand(H, generator=RANDOM),
    "table": torch.randn(H, LEN_Q + LEN_K, generator=RANDOM),
    "bias": torch.randn(LEN_Q, LEN_K, generator=RANDOM),
    "of_keys": torch.randn(B, LEN_K, generator=RANDOM),
}


def mods(slopes, table, bias, of_keys):
    """Functions of scores; all of them broadcast, too."""
    cap = torch.tensor(5.0)

    def in_place(s, b, h, i, j):
        s += table[h, i - j + LEN_K]
        s.masked_fill_(i < j, -torch.inf)
        return s

    return {
        "nothing": lambda s, b, h, i, j: s,
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        "alibi of floats": lambda s, b, h, i, j: s + slopes[h] * (j.float() - (3 + i.float())),
        "relative": lambda s, b, h, i, j: table[h, i - j + LEN_K] + s,
        "distance": lambda s, b, h, i, j: s - (j - i),
        "in place": in_place,
        "bias": lambda s, b, h, i, j: torch.add(s, bias[i, j]),
        "of keys": lambda s, b, h, i, j: s + of_keys[b, j],
        "of heads": lambda s, b, h, i, j: s + slopes[h],
        "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
        "softcap, bias": lambda s, b, h, i, j: -cap * (s / -cap).tanh() - slopes[h] * (i - j),
        "product": lambda s, b, h, i, j: -(s * -0.5) / 2,
        "product by head": lambda s, b, h, i, j: s * slopes[h],
        "product where": lambda s, b, h, i, j: torch.where(h % 2 == 0, s, s * 0.5) + bias[i, j],
        "sum of scores": lambda s, b, h, i, j: s + 0.5 * s - (0.25 * s - slopes[h]),
        "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
        "causal, tensors": lambda s, b, h, i, j: torch.where(i < j, torch.full_like(s, -torch.inf), s + 1),
        "method where": lambda s, b, h, i, j: s.to(s.dtype).where(i - j > -3, -float("inf")),
        "padding": lambda s, b, h, i, j: torch.where(j < LENGTH[b], s, -float("inf")),
    }


def by_scores(mod, mask_mod, q, k, v):
    """Result and lse of a function that broadcasts."""
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(LEN_Q)[:, None], torch.arange(LEN_K)
    scores = mod(q @ k.mT * DIM**-0.5 + 0, b, h, i, j)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("mask", [None, "prefix"])
@pytest.mark.parametrize("name", mods(**PARAMETERS))
def test_score_mods_and_gradients(name, mask):
    mask_mod = mask and MASKS[mask]
    blocks = mask and create_block_mask(mask_mod, B, H, LEN_Q, LEN_K, device="cpu")
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (*operands(), *PARAMETERS.values())]
        mod = mods(*leaves[3:])[name]
        if dtype is torch.float64:
            out, lse = by_scores(mod, mask_mod, *leaves[:3])
        else:
            out, lse = flex_attention(*leaves[:3], mod, blocks, return_lse=True)
        random = torch.Generator().manual_seed(3)
        total = sum((x * torch.randn(x.shape, generator=random)).sum() for x in (out, lse))
        results.append([out, lse, *torch.autograd.grad(total, leaves, allow_unused=True)])
    for x, y in zip(*results, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert (x - y).abs().max() < 2e-5 * max(1, y.abs().max())


@pytest.mark.parametrize("name", ["product by head", "alibi", "of heads", "of keys", "relative", "bias"])
def test_gradients_of_equal_numbers(name):
    """Each of them has its own, as factors that are learned and begin at 1."""
    q, k, v = operands(torch.float64)
    found = []
    for call in (flex_attention, lambda q, k, v, mod: by_scores(mod, None, q, k, v)[0]):
        leaves = [torch.ones_like(x, dtype=torch.float64).requires_grad_() for x in PARAMETERS.values()]
        out = call(q, k, v, mods(*leaves)[name])
        total = (out * torch.arange(out.numel()).view(out.shape)).sum() / out.numel()
        found.append(torch.autograd.grad(total, leaves, allow_unused=True))
    for x, y in zip(*found, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x - y).abs().max() < 1e-6 * max(1, y.abs().max())


@pytest.mark.parametrize("name", ["alibi", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_heads_and_batches(dtype, name):
    q, k, v = operands(dtype, heads_kv=2, batch_kv=1)
    mask = create_block_mask(causal, None, None, LEN_Q, LEN_K, device="cpu")
    mod = mods(**PARAMETERS)[name]
    options = {"score_mod": mod, "block_mask": mask, "scale": 0.3, "enable_gqa": True}
    # torch does not repeat one batch item of keys for all queries unless the mask has as many.
    mask_of_all = create_block_mask(causal, B, None, LEN_Q, LEN_K, device="cpu")
    expected = torchs.flex_attention(q, k, v, **options | {"block_mask": mask_of_all})
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    tolerance = {torch.float64: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert aux.lse.shape == out.shape[:3]
    assert aux.max_scores is None


def test_gradients_of_grouped_heads_and_of_one_batch_item_of_keys():
    q, k, v = (x.requires_grad_() for x in operands(torch.float64, heads_kv=2, batch_kv=1))
    mod = mods(**PARAMETERS)["alibi"]
    given = q, *(x.expand(B, -1, -1, -1).repeat_interleave(2, dim=1) for x in (k, v))
    expected = torch.autograd.grad(by_scores(mod, causal, *given)[0].square().sum(), (q, k, v))
    mask = create_block_mask(causal, None, None, LEN_Q, LEN_K, device="cpu")
    out = flex_attention(q, k, v, mod, mask, enable_gqa=True)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "relative", "in place", "softcap, bias", "causal"])
def test_distances_and_ranges_take_no_memory_of_scores(name):
    length = 4000
    table = torch.randn(1, 2 * length + LEN_K)
    mod = mods(torch.rand(1), table[:, length - LEN_K :], None, None)[name]
    mask = create_block_mask(and_masks(causal, lambda b, h, i, j: i - j < 300), 1, 1, length, length, "cpu")
    q = torch.randn(1, 1, length, 8, requires_grad=True)
    gc.collect()
    tracemalloc.start()  # of NumPy; torch's own memory it does not see
    flex_attention(q, q, q, mod, mask).sum().backward()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < length * length
    bias = _flex.read(mod, (1, 1, length, length), torch.float32)
    assert bias.bias is None
    assert bias.diagonals is None or bias.diagonals.untyped_storage().nbytes() < 20 * length


def test_a_mask_is_evaluated_once():
    q, k, v = operands()
    calls = []

    def counted(b, h, i, j):
        calls.append(1)
        return i >= j

    mask = create_block_mask(counted, None, None, LEN_Q, LEN_K, device="cpu")
    calls.clear()
    first = flex_attention(q, k, v, block_mask=mask)
    count = len(calls)
    assert count > 0
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), first, rtol=0, atol=0)
    assert len(calls) == count
    mask.mask_mod = lambda b, h, i, j: counted(b, h, i, j) & (i - j < 9)
    assert (flex_attention(q, k, v, block_mask=mask) != first).any()
    assert len(_flex._known) > 0
    del mask
    gc.collect()
    assert all(known.mask_mod is not counted for known in _flex._known)


@pytest.mark.parametrize("name", ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"])
def test_blocks_that_change_are_converted_again(name):
    q, k, v = operands()
    for replaces in (False, True):
        mask = create_block_mask(lambda b, h, i, j: j < 140, 1, 1, LEN_Q, LEN_K, "cpu", BLOCK_SIZE=64)
        first = flex_attention(q, k, v, block_mask=mask)
        x = getattr(mask, name)
        changed = torch.zeros_like(x) if "num" in name else 3 - x
        if replaces:
            setattr(mask, name, changed)
        else:
            x.copy_(changed)
        assert (flex_attention(q, k, v, block_mask=mask) != first).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_factors_of_heads_round_no_16_bits(dtype):
    given = [(4 * x).to(dtype).requires_grad_() for x in operands()]
    factors = torch.tensor([1.3, 0.7, 1.1, 0.9], requires_grad=True)
    mod = lambda s, b, h, i, j: s * factors[h]  # noqa: E731
    out = flex_attention(*given, mod)
    expected, _ = by_scores(mod, None, *(x.double() for x in given))
    assert out.dtype is dtype
    assert (out - expected).abs().max() < 16 * torch.finfo(dtype).eps
    found = torch.autograd.grad(out.float().sum(), (*given, factors))
    assert [x.dtype for x in found] == [dtype] * 3 + [torch.float32]


def test_autocast_and_compilers():
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, k.bfloat16(), v).dtype is torch.bfloat16
    alibi = torch.rand(4)

    def score_mod(score, b, h, i, j):
        return score - alibi[h % 4] * (i - j)

    direct = torch.compile(flex_attention, backend="eager")(q, k, v, score_mod)
    torch.testing.assert_close(direct, flex_attention(q, k, v, score_mod))
    compiled = torch.compile(lambda *x: flex_attention(*x) * 2, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), flex_attention(q, k, v) * 2)


def test_no_queries():
    q, k, v = operands()
    assert flex_attention(q[:, :, :0], k, v, lambda s, *_: s + 1).shape == (B, H, 0, 24)


REFUSED = {
    "calls sin on": lambda s, b, h, i, j: s.sin(),
    "calls mul on": lambda s, b, h, i, j: s * s,
    "calls __float__ on": lambda s, b, h, i, j: s + float(s),
    "calls gt on": lambda s, b, h, i, j: torch.where(s > 0, s, 0),
    "calls tanh on": lambda s, b, h, i, j: torch.tanh(s + 1),
    "calls int on": lambda s, b, h, i, j: s.int() + 0.5,
    "divides by a score": lambda s, b, h, i, j: 1 / s,
    "calls where on a score, with condition=, input=, other=": lambda s, b, h, i, j: torch.where(
        condition=i >= j, input=s, other=0.0
    ),
    "calls add on": lambda s, b, h, i, j: torch.add(s, 1, alpha=2),
    "calls sub on": lambda s, b, h, i, j: torch.tanh(s) - s,
    "returns what does not depend on its score": lambda s, b, h, i, j: i - j + 0.0,
    "by what differs by key": lambda s, b, h, i, j: s * (j + 1),
    "tanh in score_mod has factors that differ": lambda s, b, h, i, j: (h + 1) * torch.tanh(s / (h + 1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_computes_is_named(message):
    with pytest.raises(NotImplementedError, match=rf"^flex_attention\(\): .*{message}"):
        flex_attention(*operands(), REFUSED[message])


def test_errors():
    q, k, v = operands()
    mask = create_block_mask(causal, 3, None, LEN_Q, LEN_K, device="cpu")
    short = create_block_mask(causal, None, None, LEN_Q, 9, device="cpu")
    numbers = create_block_mask(causal, None, None, LEN_Q, LEN_K, device="cpu")
    numbers.mask_mod = lambda b, h, i, j: i - j
    refused = [
        (TypeError, "query is of type ndarray; expected a tensor", ((q.numpy(), k, v), {})),
        (TypeError, "key is on meta", ((q, k.to("meta"), v), {})),
        (ValueError, r"query has shape \(4, 150, 16\), torch.float32", ((q[0], k, v), {})),
        (ValueError, "value has shape .*torch.int64", ((q, k, v.long()), {})),
        (
            ValueError,
            "query has 4 heads, and key 2; expected the same, or enable_gqa",
            ((q, k[:, :2], v), {}),
        ),
        (ValueError, "key has 3 batch items; expected 2", ((q, k[[0, 0, 0]], v[[0, 0, 0]]), {})),
        (ValueError, "value has a length of 9", ((q, k, v[:, :, :9]), {})),
        (
            TypeError,
            "query, key and value have dtypes float32, float64 and float32",
            ((q, k.double(), v), {}),
        ),
        (TypeError, "scale is 'a'", ((q, k, v), {"scale": "a"})),
        (TypeError, "block_mask is of type Tensor", ((q, k, v), {"block_mask": ALLOWED})),
        (ValueError, r"block_mask has shape \(3, 1, 150, 220\)", ((q, k, v), {"block_mask": mask})),
        (ValueError, r"block_mask has shape \(1, 1, 150, 9\)", ((q, k, v), {"block_mask": short})),
        (TypeError, "mask_mod of block_mask returns torch.int64", ((q, k, v), {"block_mask": numbers})),
        (NotImplementedError, "return_aux", ((q, k, v), {"return_aux": AuxRequest(max_scores=True)})),
        (
            ValueError,
            "score_mod multiplies tanh of scores by 0.0",
            ((q, k, v, lambda s, *_: 0 * torch.tanh(s)), {}),
        ),
        (ValueError, "what score_mod adds to scores is NaN", ((q, k, v, lambda s, *_: s + torch.nan), {})),
    ]
    for error, message, (args, options) in refused:
        with pytest.raises(error, match=rf"^flex_attention\(\): {message}"):
            flex_attention(*args, **options)
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, 2, 1, LEN_Q, LEN_K, "cpu")[:1])
    out = flex_attention(q.requires_grad_(), k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_it_is_looked_up_by_name():
    import fastattn.torch

    assert fastattn.torch.flex_attention is flex_attention
    with pytest.raises(AttributeError, match=r"'fastattn.torch' has no attribute 'flex'"):
        fastattn.torch.flex  # noqa: B018
