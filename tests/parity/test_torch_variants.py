"""Operators of attention without softmax."""

import numpy as np
import pytest
import torch

from fastattn import functional
from fastattn.torch._tensors import array_of

linear = torch.ops.fastattn.linear_attention
sigmoid = torch.ops.fastattn.sigmoid_attention
RULES = ["linear", "decay", "gated", "delta", "gated_delta", "kimi_delta"]


def operands(rule, dtype=torch.float64):
    """q, k, v, log_decay and beta of a rule."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(2, 4, 11, 6), normal(2, 2, 11, 6), normal(2, 2, 11, 5)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay = {
        "decay": -normal(2).abs(),
        "gated": -normal(2, 2, 11, 6).abs(),
        "gated_delta": -normal(2, 2, 11).abs(),
        "kimi_delta": -normal(2, 2, 11, 6).abs(),
    }.get(rule)
    beta = normal(2, 2, 11).sigmoid() if "delta" in rule else None
    return [None if x is None else x.to(dtype).requires_grad_() for x in (q, k, v, log_decay, beta)]


@pytest.mark.parametrize("rule", RULES)
def test_linear(rule):
    """Gradients are those of finite differences, bits NumPy's, and torch's check of an operator passes."""
    assert torch.autograd.gradcheck(lambda *x: linear(*x, rule=rule), operands(rule))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(rule, dtype)
        q, k, v, *more = [None if x is None else array_of(x.detach()) for x in tensors]
        given = dict(zip(("log_decay", "beta"), more, strict=True))
        expected = functional.linear_attention(q, k, v, rule=rule, **given)
        assert np.array_equal(array_of(linear(*tensors, rule=rule).detach()), expected)
    torch.library.opcheck(linear.default, operands(rule, torch.float32), {"rule": rule})


def test_gradcheck_of_options():
    def f(*x):
        return linear(*x, rule="linear", causal=False, normalize=True, scale=0.5, eps=0.1)

    q, k, v, *_ = operands("linear")
    q, k = (x.detach().abs().requires_grad_() for x in (q, k))
    assert torch.autograd.gradcheck(f, (q, k, v))


SIGMOID = {
    "plain": ((), {}),
    "causal": ((), {"causal": True, "sigmoid_bias": -0.5}),
    "window": ((), {"causal": True, "window": [3, -1], "scale": 0.3, "softcap": 2.0}),
    "mask": ((torch.arange(9 * 11).reshape(9, 11) % 4 > 0,), {}),
    "bias": ((None, torch.linspace(-1, 1, 11, dtype=torch.float64).expand(2, 1, 9, 11)), {}),
    "alibi": ((None, None, torch.linspace(0.1, 0.7, 4, dtype=torch.float64)), {"q_offset": 1}),
    "lengths": ((None, None, None, torch.tensor([5, 0])), {}),
}


def of_sigmoid(call, dtype):
    """All tensors, and the options."""
    tensors, options = SIGMOID[call]
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 9, 6), (2, 2, 11, 6), (2, 2, 11, 5)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    learned = [x is not None and x.is_floating_point() for x in (*inputs, *tensors)]
    return [
        x.to(dtype).clone().requires_grad_() if learns else x
        for x, learns in zip((*inputs, *tensors), learned, strict=True)
    ], options


@pytest.mark.parametrize("call", SIGMOID)
def test_sigmoid(call):
    """Bits are NumPy's, gradients those of finite differences, and torch's check of an operator passes."""
    tensors, options = of_sigmoid(call, torch.float64)
    names = ("q", "k", "v", "mask", "bias", "alibi_slopes", "kv_lengths")
    arrays = {n: x.detach().numpy() for n, x in zip(names, tensors, strict=False) if x is not None}
    window = tuple(None if n == -1 else n for n in options.get("window", ())) or None
    expected = functional.sigmoid_attention(**arrays, **options | {"window": window})
    assert np.array_equal(sigmoid(*tensors, **options).detach(), expected)
    assert torch.autograd.gradcheck(lambda *x: sigmoid(*x, **options), tensors)
    torch.library.opcheck(sigmoid.default, of_sigmoid(call, torch.float32)[0], options)


def test_sigmoid_of_one_head_and_of_bfloat16():
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    assert sigmoid(x, x, x).shape == (5, 8)
    assert torch.equal(sigmoid(x, x, x), sigmoid(x[None, None], x[None, None], x[None, None])[0, 0])
    with pytest.raises(ValueError, match=r"window is \[3\]; expected \[left, right\]"):
        sigmoid(x, x, x, window=[3])


def test_errors():
    q, k, v, *_ = operands("linear", torch.float32)
    with pytest.raises(ValueError, match=r"^linear_attention\(\): rule is 'fast'"):
        linear(q, k, v, rule="fast")
    (grad,) = torch.autograd.grad(linear(q, k, v, rule="linear").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^linear_attention\(\): it has a first derivative, no"):
        torch.autograd.grad(grad.square().sum(), k)


selected = torch.ops.fastattn.selected_attention


def listed(dtype=torch.float64, block_size=3):
    """q, k, v, lists and sinks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, 6, generator=generator, dtype=dtype) for h, n in ((4, 5), (2, 20), (2, 20))
    )
    lists = torch.randint(-1, 20 // block_size + 1, (2, 2, 5, 4), generator=generator)
    sinks = torch.randn(4, generator=generator, dtype=dtype)
    return *(x.requires_grad_() for x in (q, k, v)), lists, sinks.requires_grad_()


def test_selected():
    options = {
        "block_size": 3,
        "causal": True,
        "scale": 0.5,
        "softcap": 2.0,
        "q_offset": 12,
        "window": [9, -1],
    }
    assert torch.autograd.gradcheck(lambda *x: selected(*x, **options), listed())
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [x.detach() for x in listed(dtype)]
        q, k, v, lists, sinks = map(array_of, tensors)
        expected = functional.selected_attention(q, k, v, lists, block_size=3, sinks=sinks)
        assert np.array_equal(array_of(selected(*tensors, block_size=3)), expected)
    torch.library.opcheck(selected, listed(torch.float32), {"block_size": 3})
