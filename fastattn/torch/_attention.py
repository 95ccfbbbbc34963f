"""torch.ops.fastattn.attention, torch.ops.fastattn.varlen_attention, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fastattn._args.attention import attention_args
from fastattn._args.backward import OF_OPTIONS, backward_args
from fastattn._args.errors import named
from fastattn._args.options import AttentionOptions, VarlenOptions
from fastattn._args.types import AttentionArgs
from fastattn._args.varlen import varlen_args
from fastattn._engine import dispatch
from fastattn.functional import attention_backward, varlen_attention_backward
from fastattn.torch._library import autocast, define, differentiate, differentiate_by, forbid_gradients
from fastattn.torch._tensors import array_of, heads_inside, num_threads, tensor_of

# Types of options in schemas, by their annotations.
_NUMBERS = {
    "bool": "bool {}=False",
    "float": "float {}=0.0",
    "float | None": "float? {}=None",
    "tuple[int | None, int | None] | None": "SymInt[]? {}=None",
}
_DIFFERENTIATED = ("q", "k", "v", "bias", "sinks", "alibi_slopes")


def schema_of(options: type) -> str:
    """Those of `options` that are numbers, and q_offset, one for all sequences."""
    kinds = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}
    found = [_NUMBERS[kind].format(name) for name, kind in kinds.items() if kind in _NUMBERS]
    return ", ".join((*found, *["SymInt? q_offset=None"] * ("q_offset" in kinds)))


def sides(window: Sequence[int] | None) -> tuple[int | None, int | None] | None:
    """The option `window` of attention: schemas know no None in a list, so that -1 is no bound."""
    if window is None:
        return None
    if len(window) != 2 or min(window) < -1:
        expected = "[left, right], each at least 0, or -1 for no bound"
        raise ValueError(f"(): window is {list(window)}; expected {expected}")
    left, right = (None if n == -1 else n for n in window)
    return left, right


def like_result(q: Any, k: Any, v: Any) -> Any:
    """An empty tensor for the result of attention."""
    if q.ndim == k.ndim == v.ndim == 2:
        return q.new_empty((q.shape[0], v.shape[1]))
    q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return q.new_empty((*batch, q.shape[-2], q.shape[-3], v.shape[-1])).transpose(-3, -2)


def _like_gradient(x: Any, inside: bool) -> Any:
    if not inside or x.ndim < 3:
        return x.new_empty(x.shape)
    return x.new_empty(x.transpose(-3, -2).shape).transpose(-3, -2)


def _operators(
    name: str,
    args_of: Callable[..., AttentionArgs],
    backward: Callable[..., Any],
    required: tuple[str, ...],
    optional: tuple[str, ...],
    schema: str,
) -> tuple[Any, Any]:
    """Define the operator `name`, ``{name}_with_lse`` and ``{name}_backward``; returns the first two.

    Tensors come first: those `required`, beginning with q, k and v, and those that are `optional`. `args_of`
    checks the arguments of the function of that name, and `backward` is its gradient function. Results of
    attention lie in memory as torch's do; those of packed sequences have their heads inside already.
    """
    tensors = ", ".join([*(f"Tensor {x}" for x in required), *(f"Tensor? {x}=None" for x in optional)])
    names, packed = (*required, *optional), "cu_seqlens_q" in required
    gradients = {i: f"d{x}" for i, x in enumerate(names) if x in _DIFFERENTIATED}
    inside = () if packed else ("dq", "dk", "dv")

    def arguments(values: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
        """The function's arguments by name, of which the tensors `values` come first."""
        given = {n: x if x is None else array_of(x) for n, x in zip(names, values, strict=False)}
        return {**given, **options, "window": sides(options.get("window")), "num_threads": num_threads()}

    def compute(
        values: Sequence[Any], options: dict[str, Any], return_lse: bool
    ) -> tuple[Any, AttentionArgs]:
        args = args_of(**arguments(values, options), return_lse=return_lse)
        out = args.result[0] if return_lse else args.result
        if not packed:
            args.out = heads_inside(args.out.shape, args.out.dtype)
            out = args.out if out.ndim > 2 else args.out[0]
        dispatch.run(args)
        return tensor_of(out), args

    @named(name)
    def kernel(*values: Any, **options: Any) -> Any:
        return compute(values, options, False)[0]

    @named(name)
    def kernel_with_lse(*values: Any, **options: Any) -> Any:
        out, args = compute(values, options, True)
        return out, tensor_of(args.result[1])

    @named(name)
    def backward_kernel(
        dout: Any, dlse: Any, out: Any, lse: Any, *values: Any, need: Sequence[str], **options: Any
    ) -> list[Any]:
        saved = {"dout": dout, "dlse": dlse, "out": out, "lse": lse}
        given = arguments(values, options) | {n: x if x is None else array_of(x) for n, x in saved.items()}
        _require_no_pages(given)
        places = [heads_inside(given[n[1:]].shape, given[n[1:]].dtype) if n in inside else None for n in need]
        return [tensor_of(x) for x in backward(**given, need=tuple(need), into=places)]

    @named(name)
    def check(window: Any = None, **given: Any) -> AttentionArgs:
        return args_of(window=sides(window), **given)

    @named(name)
    def check_backward(
        dout: Any, out: Any, lse: Any, need: Sequence[str], dlse: Any = None, **given: Any
    ) -> None:
        _require_no_pages(given)
        saved = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
        of_options = [option for option in OF_OPTIONS if option == "scale" or option in names]
        args = check(return_lse=True, **given)
        backward_args(args, {**dict.fromkeys(of_options), **given, **saved}, need, None, {})

    def fake(q: Any, k: Any, v: Any, *values: Any, **options: Any) -> Any:
        if packed:
            return q.new_empty((*q.shape[:2], v.shape[-1]))
        if dict(zip(names[3:], values, strict=False)).get("block_table") is not None:
            k = v = v.new_empty(v.shape[1:])
        return like_result(q, k, v)

    def fake_with_lse(q: Any, k: Any, v: Any, *values: Any, **options: Any) -> Any:
        out = fake(q, k, v, *values)
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        return out, q.new_empty(out.shape[1::-1] if packed else out.shape[:-1], dtype=dtype)

    def fake_backward(
        dout: Any, dlse: Any, out: Any, lse: Any, *values: Any, need: Sequence[str], **options: Any
    ) -> list[Any]:
        sources = {f"d{n}": x for n, x in zip(names, values, strict=False)}
        return [_like_gradient(sources[n], n in inside) for n in need]

    def keep(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Keep what the backward pass reads."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *inputs)
        ctx.options = options

    def gradient(ctx: Any, wanted: tuple[bool, ...], dout: Any, dlse: Any) -> tuple[Any, ...]:
        out, lse, *inputs = ctx.saved_tensors
        places = [i for i in gradients if wanted[i : i + 1] == (True,)]
        dout = torch.zeros_like(out) if dout is None else dout
        need = [gradients[i] for i in places]
        found = backward_op(dout, dlse, out, lse, *inputs, **ctx.options, need=need)
        grads = dict(zip(places, found, strict=True))
        return tuple(grads.get(i) for i in range(len(inputs)))

    op = define(f"{name}({tensors}, *, {schema}) -> Tensor", kernel, fake, check)
    with_lse = define(
        f"{name}_with_lse({tensors}, *, {schema}) -> (Tensor, Tensor)", kernel_with_lse, fake_with_lse, check
    )
    backward_op = define(
        f"{name}_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {tensors}, *, {schema},"
        " str[] need) -> Tensor[]",
        backward_kernel,
        fake_backward,
        check_backward,
    )
    differentiate(with_lse, gradient, keep, name)
    differentiate_by(op, with_lse, lambda results: results[0])
    forbid_gradients(backward_op, name)
    autocast(op, 3)
    autocast(with_lse, 3)
    return op, with_lse


def _require_no_pages(given: dict[str, Any]) -> None:
    """Take block_table out of the arguments of a backward pass, where it is None."""
    if given.pop("block_table", None) is not None:
        raise ValueError("(): block_table is given; expected none: pages have no gradients")


attention_op, with_lse_op = _operators(
    "attention",
    partial(attention_args, scales="k_scale and v_scale"),
    attention_backward,
    ("q", "k", "v"),
    ("mask", "bias", "sinks", "alibi_slopes", "kv_lengths", "block_table", "seed"),
    schema_of(AttentionOptions),
)
varlen_op, varlen_with_lse_op = _operators(
    "varlen_attention",
    varlen_args,
    varlen_attention_backward,
    ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    ("sinks", "alibi_slopes", "block_table", "seed"),
    schema_of(VarlenOptions),
)
