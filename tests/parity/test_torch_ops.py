"""Operators of torch: results, gradients, and what torch's own checks say of them."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import fastattn
import fastattn.torch

attention = torch.ops.fastattn.attention
with_lse = torch.ops.fastattn.attention_with_lse
backward = torch.ops.fastattn.attention_backward


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.compiler.reset()  # who recompiles too often fails, and it counts all tests


def operands(dtype=torch.float32, heads_kv=4, len_q=9, len_k=13, grad=True):
    shapes = (2, 4, len_q, 16), (2, heads_kv, len_k, 16), (2, heads_kv, len_k, 8)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


MASK = np.random.default_rng(0).random((2, 1, 9, 13)) < 0.7
CALLS = {
    "plain": ((), {}),
    "causal": ((), {"causal": True}),
    "window": ((), {"causal": True, "window": [3, -1], "scale": 0.3}),
    "mask": ((torch.from_numpy(MASK),), {"softcap": 2.0}),
    "bias": ((None, torch.from_numpy(MASK[:1] * 0.5)), {}),
    "sinks": ((None, None, torch.linspace(-1, 1, 4, dtype=torch.float64)), {}),
    "alibi": ((None, None, None, torch.linspace(0.1, 0.7, 4, dtype=torch.float64)), {"q_offset": 1}),
    "lengths": ((None, None, None, None, torch.tensor([5, 0])), {}),
    "dropout": ((*[None] * 6, torch.tensor(5)), {"dropout": 0.3}),
}


def in_numpy(q, k, v, tensors, options):
    names = ("mask", "bias", "sinks", "alibi_slopes", "kv_lengths", "block_table", "seed")
    arrays = {n: x.detach().numpy() for n, x in zip(names, tensors, strict=False) if x is not None}
    window = tuple(None if n == -1 else n for n in options.get("window", ())) or None
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    return fastattn.attention(q, k, v, **arrays, **options | {"window": window}, return_lse=True)


def cast(tensors, dtype):
    return [x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("call", CALLS)
def test_same_bits_as_the_call_in_numpy(call, dtype):
    tensors, options = CALLS[call]
    tensors, (q, k, v) = cast(tensors, dtype), operands(dtype, heads_kv=2)
    out, lse = with_lse(q, k, v, *tensors, **options)
    expected, expected_lse = in_numpy(q, k, v, tensors, options)
    assert np.array_equal(out.detach(), expected)
    assert np.array_equal(lse.detach(), expected_lse)
    assert torch.equal(attention(q, k, v, *tensors, **options), out)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, *tensors, **options), out)


@pytest.mark.parametrize(
    "shapes", [[(5, 8)] * 3, [(3, 5, 8)] * 3, [(2, 1, 3, 5, 8), (4, 1, 7, 8), (1, 7, 6)]]
)
def test_any_number_of_dimensions(shapes):
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    out = attention(q, k, v)
    assert np.array_equal(out.detach(), in_numpy(q, k, v, (), {})[0])
    fake = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(fake, out)
    assert fake.stride() == out.stride()
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


def test_memory_is_shared():
    """Results lie as torch's kernel leaves them: the heads of a token side by side."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16)
    array = fastattn.torch._tensors.array_of(x)
    assert array.dtype.name == "bfloat16"
    assert array.__array_interface__["data"][0] == x.data_ptr()
    back = fastattn.torch._tensors.tensor_of(array)
    assert back.dtype is torch.bfloat16
    assert back.data_ptr() == x.data_ptr()
    out = attention(x, x, x)
    assert out.transpose(1, 2).is_contiguous()
    np.testing.assert_allclose(out.float(), scaled_dot_product_attention(x, x, x).float(), atol=2e-2)


@pytest.mark.parametrize("call", CALLS)
def test_gradcheck(call):
    tensors, options = CALLS[call]
    inputs = operands(torch.float64, heads_kv=2)
    tensors = [x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]
    ops = (attention, with_lse) if call in ("causal", "sinks") else (attention,)  # the gradient of lse, too
    for op in ops:
        run = partial(op, **options)
        assert torch.autograd.gradcheck(run, (*inputs, *tensors), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_those_of_torch(dtype):
    inputs = operands(dtype, len_q=40, len_k=40)
    dout = torch.randn(2, 4, 40, 8).to(dtype)
    found = torch.autograd.grad(attention(*inputs, causal=True), inputs, dout)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*wide, is_causal=True)
    expected = torch.autograd.grad(out, wide, dout.double())
    eps = torch.finfo(dtype).eps
    for x, y in zip(found, expected, strict=True):
        assert x.dtype is dtype
        assert (x.double() - y).abs().max() < 16 * eps * y.abs().max()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("op", [attention.default, with_lse.default])
def test_opcheck(op, call):
    tensors, options = CALLS[call]
    torch.library.opcheck(op, (*operands(), *cast(tensors, torch.float32)), options)


def packed(dtype=torch.float64, paged=False):
    """Arguments of varlen_attention that are tensors."""
    shapes = (9, 4, 16), *[(5, 8, 2, n) if paged else (20, 2, n) for n in (16, 8)]
    begins = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 5, 7, 20], dtype=torch.int32)
    slopes = [torch.linspace(-0.5, 1, 4, dtype=dtype) for _ in range(2)]
    table = torch.tensor([[3, 9], [0, 9], [4, 1]]) if paged else None
    return [*(torch.randn(s, dtype=dtype) for s in shapes), *begins, *slopes, table, torch.tensor(5)]


def test_packed_sequences():
    """Gradients, torch's own checks, other numbers of sequences and tokens in an exported program."""
    op, options = torch.ops.fastattn.varlen_attention, {"causal": True, "window": [3, -1], "dropout": 0.2}
    q, k, v, begins_q, begins_k, sinks, slopes, _, seed = packed()
    inputs = [x.requires_grad_() for x in (q, k, v, sinks, slopes)]

    def run(q, k, v, sinks, slopes, op=op):
        return op(q, k, v, begins_q, begins_k, sinks, slopes, None, seed, **options)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    with_lse = torch.ops.fastattn.varlen_attention_with_lse
    assert torch.autograd.gradcheck(partial(run, op=with_lse), inputs, fast_mode=True)
    for paged in (False, True):
        arguments = packed(torch.float32, paged)
        for checked in (op.default, with_lse.default):
            torch.library.opcheck(checked, arguments, options)
        assert op(*(x if x is None else x.to("meta") for x in arguments), **options).shape == (9, 4, 8)

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, begins_q, begins_k):
            return op(q, k, v, begins_q, begins_k, causal=True)

    sizes = {name: {0: torch.export.Dim.AUTO} for name in ("q", "k", "v", "begins_q", "begins_k")}
    exported = torch.export.export(Attention(), tuple(packed()[:5]), dynamic_shapes=sizes).module()
    shorter = *(x.detach()[:5] for x in (q, k, v)), torch.tensor([0, 2, 5]), torch.tensor([0, 1, 5]).int()
    assert torch.equal(exported(*shorter), op(*shorter, causal=True))


def test_pages_have_no_gradients():
    pages, table = torch.randn(6, 2, 8, 16), torch.tensor([[0, 3], [5, 1]])
    arguments = (
        torch.randn(2, 4, 9, 16, requires_grad=True),
        pages,
        pages,
        None,
        None,
        None,
        None,
        None,
        table,
    )
    out = attention(*arguments)
    gathered = pages[table].transpose(1, 2).flatten(2, 3)
    assert torch.equal(out, attention(arguments[0], gathered, gathered))
    torch.library.opcheck(attention.default, [x if x is None else x.detach() for x in arguments])
    with pytest.raises(
        ValueError, match=r"^attention\(\): block_table is given; expected none: pages have no"
    ):
        out.sum().backward()


def test_opcheck_of_the_backward_pass():
    q, k, v = operands(torch.bfloat16, grad=False)
    bias = torch.randn(1, 4, 1, 13)
    out, lse = with_lse(q, k, v, None, bias)
    for need in (["dq", "dk", "dv", "dbias"], ["dv"], []):
        torch.library.opcheck(backward.default, (out, None, out, lse, q, k, v, None, bias), {"need": need})


@pytest.mark.filterwarnings("ignore")  # torch's compiler uses what torch deprecates
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def f(q, k, v):
        out = attention(q * 2, k, v, causal=True, window=[5, -1])
        return out.transpose(1, 2).reshape(2, q.shape[2], -1).cumsum(-1)

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    for length in (9, 12):
        inputs = operands(len_q=length)
        expected, found = f(*inputs), compiled(*inputs)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected)]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y)


def test_there_is_no_second_derivative():
    q, k, v = operands()
    (grad,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second"):
        torch.autograd.grad(grad.square().sum(), k)
    first = torch.func.grad(lambda *x: attention(*x).square().sum())
    with pytest.raises(NotImplementedError, match=r"^attention\(\): it has a first derivative, no second"):
        torch.func.grad(lambda x: first(q, x, v).sum())(k)


def test_transforms_of_torch_func():
    q, k, v = operands(grad=False)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*inputs, causal=True).square().sum(), inputs)

    def f(*x):
        return attention(*x, causal=True).square().sum()

    for found in (torch.func.grad(f, (0, 1, 2))(q, k, v), torch.func.vjp(f, q, k, v)[1](torch.tensor(1.0))):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)
    assert torch.equal(torch.func.vmap(lambda x: attention(x, k[0], v[0]))(q)[0], attention(q[0], k[0], v[0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("op", ["attention", "attention_with_lse", "sigmoid_attention"])
def test_there_is_no_derivative_in_forward_mode(op):
    """An error is raised even where no gradient is wanted: the tangent would vanish."""
    q, k, v = operands(grad=False)

    def f(x):
        out = getattr(torch.ops.fastattn, op)(x, k, v)
        return (out[0] if isinstance(out, tuple) else out).sum()

    calls = {
        "jvp": lambda: torch.func.jvp(f, (q,), (q,)),
        "jvp of grad": lambda: torch.func.jvp(torch.func.grad(f), (q,), (q,)),
        "dual": lambda: f(torch.autograd.forward_ad.make_dual(q, q)),
        "dual, learned": lambda: f(torch.autograd.forward_ad.make_dual(q.clone().requires_grad_(), q)),
    }
    for name, call in calls.items():
        message = rf"^{op.removesuffix('_with_lse')}\(\): it has no derivative in forward mode"
        with torch.autograd.forward_ad.dual_level() if "dual" in name else contextlib.nullcontext():
            assert torch.isfinite(f(q))  # without a tangent
            with pytest.raises(NotImplementedError, match=message), torch.set_grad_enabled(name != "jvp"):
                call()


def test_autocast():
    q, k, v = operands(grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v.bfloat16())
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_threads_are_no_more_than_torch_uses():
    before = torch.get_num_threads()
    try:
        with fastattn._engine.settings.forced(num_threads=3):
            for count, used in ((1, 1), (8, None), (3, None)):
                torch.set_num_threads(count)
                assert fastattn.torch._tensors.num_threads() == used
    finally:
        torch.set_num_threads(before)


def test_errors_are_those_of_attention():
    q, k, v = operands(grad=False)
    with pytest.raises(ValueError, match=r"^attention\(\): k has a head_dim of 8"):
        attention(q, v, v)
    with pytest.raises(TypeError, match=r"^attention\(\): q, k and v have dtypes"):
        attention(q, k.double(), v)
    with pytest.raises(ValueError, match=r"^attention\(\): window is \[3\]; expected \[left, right\]"):
        attention(q, k, v, window=[3])
    for op in (attention, torch.ops.fastattn.sigmoid_attention):
        match = rf"^{op.__name__}\(\): window is \[-2, 0\]; expected \[left, right\], each .*-1 for no bound"
        with pytest.raises(ValueError, match=match):
            op(q, k, v, window=[-2, 0])
    with pytest.raises(NotImplementedError, match="fastattn::attention"):
        attention(*(x.to_sparse() for x in (q, k, v)))
    assert attention(*(x.to("meta") for x in (q, k, v))).shape == (2, 4, 9, 8)


Q, K, V = torch.ones(2, 4, 9, 16), torch.ones(2, 2, 13, 16), torch.ones(2, 2, 13, 8)
LISTS, OUT, LSE = torch.zeros(2, 2, 9, 3, dtype=torch.int64), torch.ones(2, 4, 9, 8), torch.ones(2, 4, 9)
WRONG = {
    "head_dim": (Q, K[..., :8], V), "length": (Q, K, V[:, :, 1:]), "heads": (Q[:, :3], K, V),
    "heads of v": (Q, K, V[:, :1]), "batch": (Q, K[:1].expand(3, 2, 13, 16), V), "dtype": (Q, K, V.double()),
    "integers": (Q.int(), K.int(), V.int()), "axes": (Q[0, 0, 0], K, V), "empty": (Q[..., :0], K[..., :0], V),
}  # fmt: skip
OF_SCORES = {
    "mask": torch.ones(9, 12) > 0, "bias": torch.ones(3, 9, 13), "alibi_slopes": torch.ones(3),
    "kv_lengths": torch.ones(3, dtype=torch.int64),
}  # fmt: skip


def wrong_calls():
    for name, call in WRONG.items():
        for op in ("attention", "attention_with_lse", "sigmoid_attention"):
            yield f"{op} {name}", op, call, {}
        yield f"selected_attention {name}", "selected_attention", (*call, LISTS), {}
        options = {"rule": "linear", "causal": False}
        if name not in ("heads", "heads of v"):  # which linear attention takes
            yield f"linear_attention {name}", "linear_attention", call, options
        yield (
            f"attention_backward {name}",
            "attention_backward",
            (OUT, None, OUT, LSE, *call),
            {"need": ["dq"]},
        )
    for name, x in OF_SCORES.items():
        for op in ("attention", "sigmoid_attention"):
            yield f"{op} {name}", op, (Q, K, V), {name: x}
            yield f"{op} {name} dtype", op, (Q, K, V), {name: x.to(torch.complex64)}
    yield "sinks", "attention", (Q, K, V), {"sinks": torch.ones(3)}
    q, k, v, begins_q, begins_k, *_ = packed(torch.float32)
    for name, call in {
        "heads": (q[:, :3], k, v, begins_q, begins_k), "tokens": (q, k, v[1:], begins_q, begins_k),
        "axes": (q[0], k, v, begins_q, begins_k), "sequences": (q, k, v, begins_q[::3], begins_k),
        "floats": (q, k, v, begins_q.float(), begins_k), "begins": (q, k, v, begins_q[None], begins_k),
    }.items():  # fmt: skip
        yield f"packed {name}", "varlen_attention", call, {}
    yield "window", "attention", (Q, K, V), {"window": [1]}
    yield "lists", "selected_attention", (Q, K, V, LISTS[:, :, 1:]), {}
    yield "floats", "selected_attention", (Q, K, V, LISTS.float()), {}
    yield "causal", "linear_attention", (Q, K, V), {"rule": "linear"}
    yield "no decay", "linear_attention", (K, K, V), {"rule": "decay"}
    yield "decay", "linear_attention", (K, K, V, -torch.ones(3)), {"rule": "decay"}
    yield "beta", "linear_attention", (K, K, V, None, torch.ones(2, 2, 9)), {"rule": "delta"}
    for wrong in (OUT[:, :, 1:], OUT.double()):
        of_linear = {"rule": "linear", "causal": False, "need": ["dq"]}
        kind = f"dout {wrong.dtype}"
        yield f"{kind}", "attention_backward", (wrong, None, OUT, LSE, Q, K, V), {"need": ["dq"]}
        yield f"{kind} sigmoid", "sigmoid_attention_backward", (wrong, Q, K, V), {"need": ["dq"]}
        yield f"{kind} selected", "selected_attention_backward", (wrong, Q, K, V, LISTS), {"need": ["dq"]}
        yield f"{kind} linear", "linear_attention_backward", (wrong, Q, K, V), of_linear


@pytest.mark.parametrize(("op", "tensors", "options"), [
    pytest.param(*call, id=name) for name, *call in wrong_calls()
])  # fmt: skip
def test_shapes_alone_are_refused_as_tensors_are(op, tensors, options):
    function, errors = getattr(torch.ops.fastattn, op), []
    for device in ("cpu", "meta"):
        given, more = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x, device=device: x.to(device), (tensors, options)
        )
        with pytest.raises((TypeError, ValueError)) as error:
            function(*given, **more)
        errors.append((error.type, str(error.value)))
    if "backward" not in op:
        assert errors[0] == errors[1]


def test_shapes_that_fit_are_taken_whatever_values_there_may_be():
    lengths, empty = torch.zeros(2, dtype=torch.int8).to("meta"), torch.ones(2, 2, 0, 16).to("meta")
    q, k, v, lists = (x.to("meta") for x in (Q, K, V, LISTS))
    assert attention(q, k, v, kv_lengths=lengths, causal=True).shape == OUT.shape
    selected = torch.ops.fastattn.selected_attention
    assert selected(q, empty, empty[..., :8], lists).shape == OUT.shape
    with pytest.raises(ValueError, match=r"^attention\(\): kv_lengths has 13 for 20 queries"):
        attention(torch.ones(2, 4, 20, 16, device="meta"), k, v, kv_lengths=lengths, causal=True)


def test_what_is_refused_is_not_exported():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v)

    sizes = {name: {2: torch.export.Dim.AUTO} for name in "qkv"}
    exported = torch.export.export(Attention(), (Q, K, V), dynamic_shapes=sizes).module()
    shorter = Q[:, :, :5], K[:, :, :7], V[:, :, :7]
    assert torch.equal(exported(*shorter), attention(*shorter))
    with pytest.raises(ValueError, match=r"^attention\(\): v has a length of 12"):
        torch.export.export(Attention(), (Q, K, V[:, :, 1:]), dynamic_shapes=sizes)
