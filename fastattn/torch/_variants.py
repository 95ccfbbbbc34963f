"""Operators of variants of attention, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastattn import functional, grad
from fastattn._args.errors import named
from fastattn._args.options import SelectedOptions, SigmoidOptions
from fastattn._args.recurrent import recurrent_args
from fastattn._args.selection import selected_args
from fastattn.functional._recurrent import linear_attention_backward
from fastattn.functional._scores import sigmoid_args, sigmoid_attention_backward
from fastattn.torch._attention import like_result, schema_of, sides
from fastattn.torch._library import define, differentiate, forbid_gradients
from fastattn.torch._tensors import array_of, num_threads, tensor_of

_REQUIRED = ("q", "k", "v", "selected")


def _variant(
    name: str,
    backward: Callable[..., Any],
    tensors: tuple[str, ...],
    options: str,
    fake: Callable[..., Any],
    check: Callable[..., Any],
    gradients: tuple[str, ...],
) -> Any:
    """Define the operator of `functional`'s `name` and its gradients, with respect to its first tensors.

    Those of `tensors` that are not `_REQUIRED` are optional, and of all there is a gradient whose name is in
    `gradients`. `fake` and `check` are those of `define`. Returns the operator.
    """
    forward = getattr(functional, name)
    schema = ", ".join(f"Tensor {x}" if x in _REQUIRED else f"Tensor? {x}=None" for x in tensors)

    def arrays(values: Sequence[Any]) -> dict[str, Any]:
        given = zip(tensors, values, strict=False)
        return {n: None if x is None else array_of(x) for n, x in given} | {"num_threads": num_threads()}

    @named(name)
    def kernel(*values: Any, **given: Any) -> Any:
        return tensor_of(np.ascontiguousarray(forward(**arrays(values), **_options(given))))

    @named(name)
    def backward_kernel(dout: Any, *values: Any, need: Sequence[str], **given: Any) -> list[Any]:
        found = backward(array_of(dout), **arrays(values), need=tuple(need), **_options(given))
        return [tensor_of(np.ascontiguousarray(x)) for x in found]

    @named(name)
    def checked(**given: Any) -> None:
        check(**_options(given))

    @named(name)
    def fake_backward(dout: Any, *values: Any, need: Sequence[str], **given: Any) -> list[Any]:
        out = fake(*values, **given)
        if dout.shape != out.shape:
            raise ValueError(f"(): dout has shape {tuple(dout.shape)}; expected {tuple(out.shape)}")
        if dout.dtype is not out.dtype:
            raise TypeError(f"(): dout has dtype {dout.dtype}; expected {out.dtype}")
        return [values[tensors.index(n[1:])].new_empty(values[tensors.index(n[1:])].shape) for n in need]

    op = define(f"{name}({schema}, *, {options}) -> Tensor", kernel, fake, checked)
    backward_op = define(
        f"{name}_backward(Tensor dout, {schema}, *, {options}, str[] need) -> Tensor[]",
        backward_kernel,
        fake_backward,
        lambda dout, need, **given: checked(**given),
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = options

    def gradient(ctx: Any, wanted: tuple[bool, ...], dout: Any) -> tuple[Any, ...]:
        need = [f"d{n}" for n, yes in zip(tensors, wanted, strict=False) if yes and f"d{n}" in gradients]
        found = dict(zip(need, backward_op(dout, *ctx.saved_tensors, **ctx.options, need=need), strict=True))
        return tuple(found.get(f"d{n}") for n in tensors)

    differentiate(op, gradient, keep, name)
    forbid_gradients(backward_op, name)
    return op


def _selected_backward(dout: Any, *, need: tuple[str, ...], **given: Any) -> tuple[Any, ...]:
    """Gradients of `selected_attention`, by its forward pass once more."""
    _, pullback = grad.vjp(functional.selected_attention, **given)
    found: tuple[Any, ...] = pullback(dout, need=need)
    return found


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"window": sides(given["window"])} if "window" in given else given


def _fake_linear(q: Any, k: Any, v: Any, *tensors: Any, **options: Any) -> Any:
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = max(q.shape[-3], k.shape[-3], v.shape[-3])
    return q.new_empty((*batch, heads, q.shape[-2], v.shape[-1]))


def _fake_result(q: Any, k: Any, v: Any, *tensors: Any, **options: Any) -> Any:
    return torch.empty_like(like_result(q, k, v), memory_format=torch.contiguous_format)


_variant(
    "linear_attention",
    linear_attention_backward,
    ("q", "k", "v", "log_decay", "beta"),
    "str rule, bool causal=True, float? scale=None, bool normalize=False, float eps=1e-6",
    _fake_linear,
    recurrent_args,
    ("dq", "dk", "dv", "dlog_decay", "dbeta"),
)
_variant(
    "sigmoid_attention",
    sigmoid_attention_backward,
    ("q", "k", "v", "mask", "bias", "alibi_slopes", "kv_lengths"),
    f"float? sigmoid_bias=None, {schema_of(SigmoidOptions)}",
    _fake_result,
    lambda q, k, v, sigmoid_bias=None, **options: sigmoid_args(q, k, v, sigmoid_bias, options),
    ("dq", "dk", "dv", "dbias", "dalibi_slopes"),
)
selected_op = _variant(
    "selected_attention",
    _selected_backward,
    ("q", "k", "v", "selected", "sinks", "kv_lengths"),
    f"int block_size=1, {schema_of(SelectedOptions)}",
    _fake_result,
    lambda q, k, v, selected, block_size=1, **options: selected_args(
        q, k, v, selected, block_size, False, options
    ),
    ("dq", "dk", "dv", "dsinks"),
)
