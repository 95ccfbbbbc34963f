"""torch.ops.fastattn.attention and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastattn._args.attention import attention_args
from fastattn._args.backward import OF_OPTIONS, backward_args
from fastattn._args.errors import named
from fastattn._args.options import AttentionOptions
from fastattn._args.types import AttentionArgs
from fastattn._engine import dispatch
from fastattn.functional import attention_backward
from fastattn.torch._library import autocast, define, differentiate, differentiate_by, forbid_gradients
from fastattn.torch._tensors import array_of, heads_inside, num_threads, tensor_of

_OPTIONAL = ("mask", "bias", "sinks", "alibi_slopes", "kv_lengths")
_TENSORS = ", ".join(["Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}=None" for name in _OPTIONAL)])
# Types of options in schemas, by their annotations.
_NUMBERS = {
    "bool": "bool {}=False",
    "float | None": "float? {}=None",
    "tuple[int | None, int | None] | None": "SymInt[]? {}=None",
}


def schema_of(options: type) -> str:
    """Those of attention's `options` that are numbers, and q_offset, one for all sequences."""
    kinds = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}
    found = [_NUMBERS[kind].format(name) for name, kind in kinds.items() if kind in _NUMBERS]
    return ", ".join((*found, "SymInt? q_offset=None"))


_OPTIONS = f"*, {schema_of(AttentionOptions)}"
# Of which tensors there are gradients, by their places.
_GRADIENTS = {0: "dq", 1: "dk", 2: "dv", 4: "dbias", 5: "dsinks", 6: "dalibi_slopes"}


def sides(window: Sequence[int] | None) -> tuple[int | None, int | None] | None:
    """The option `window` of attention: schemas know no None in a list, so that -1 is no bound."""
    if window is None:
        return None
    if len(window) != 2 or min(window) < -1:
        expected = "[left, right], each at least 0, or -1 for no bound"
        raise ValueError(f"(): window is {list(window)}; expected {expected}")
    left, right = (None if n == -1 else n for n in window)
    return left, right


def _named(tensors: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options of attention, of which `tensors` come first."""
    options |= zip(_OPTIONAL, tensors, strict=False)
    found = {name: array_of(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return found | {"window": sides(options.get("window")), "num_threads": num_threads()}


@named("attention")
def _computed(q: Any, k: Any, v: Any, *tensors: Any, **options: Any) -> AttentionArgs:
    """The arguments of a call that has been run, with its result."""
    given = _named(tensors, options)
    args = attention_args(array_of(q), array_of(k), array_of(v), scales="k_scale and v_scale", **given)
    args.out = heads_inside(args.out.shape, args.out.dtype)
    dispatch.run(args)
    return args


def _attention(q: Any, *tensors: Any, **options: Any) -> Any:
    out = _computed(q, *tensors, **options).out
    return tensor_of(out if q.ndim > 2 or out.ndim > 3 else out[0])


def _attention_with_lse(q: Any, k: Any, v: Any, *tensors: Any, **options: Any) -> Any:
    options["return_lse"] = True
    args = _computed(q, k, v, *tensors, **options)
    one_head = q.ndim == k.ndim == v.ndim == 2
    return tensor_of(args.out[0] if one_head else args.out), tensor_of(args.result[1])


@named("attention")
def _check(window: Any = None, **given: Any) -> AttentionArgs:
    """Raise unless these are arguments of attention, by name and with arrays for tensors."""
    return attention_args(window=sides(window), scales="k_scale and v_scale", **given)


@named("attention")
def _check_backward(
    dout: Any, out: Any, lse: Any, need: Sequence[str], dlse: Any = None, **given: Any
) -> None:
    saved = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    backward_args(
        _check(return_lse=True, **given), {**dict.fromkeys(OF_OPTIONS), **given, **saved}, need, None, {}
    )


def like_result(q: Any, k: Any, v: Any) -> Any:
    """An empty tensor for the result of attention."""
    if q.ndim == k.ndim == v.ndim == 2:
        return q.new_empty((q.shape[0], v.shape[1]))
    q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return q.new_empty((*batch, q.shape[-2], q.shape[-3], v.shape[-1])).transpose(-3, -2)


def _fake(q: Any, k: Any, v: Any, *tensors: Any, **options: Any) -> Any:
    return like_result(q, k, v)


def _fake_with_lse(q: Any, k: Any, v: Any, *tensors: Any, **options: Any) -> Any:
    out = like_result(q, k, v)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return out, q.new_empty(out.shape[:-1], dtype=dtype)


@named("attention")
def _backward(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *tensors: Any, need: Sequence[str],
    **options: Any,
) -> list[Any]:  # fmt: skip
    inputs = {"dq": array_of(q), "dk": array_of(k), "dv": array_of(v)}
    options = _named(tensors, {**options, "dlse": dlse, "need": tuple(need)})
    options["into"] = [heads_inside(inputs[n].shape, inputs[n].dtype) if n in inputs else None for n in need]
    arrays = array_of(dout), *inputs.values(), array_of(out), array_of(lse)
    return [tensor_of(x) for x in attention_backward(*arrays, **options)]


def _fake_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, *tensors: Any, need: Sequence[str], **options: Any
) -> list[Any]:
    sources = {name: tensors[i] for i, name in _GRADIENTS.items() if i < len(tensors)}
    return [_like_gradient(sources[name], inside=name in ("dq", "dk", "dv")) for name in need]


def _like_gradient(x: Any, inside: bool) -> Any:
    if not inside or x.ndim < 3:
        return x.new_empty(x.shape)
    return x.new_empty(x.transpose(-3, -2).shape).transpose(-3, -2)


def _keep(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """Keep what the backward pass reads."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)
    ctx.options = options


def _gradient(ctx: Any, wanted: tuple[bool, ...], dout: Any, dlse: Any) -> tuple[Any, ...]:
    out, lse, *inputs = ctx.saved_tensors
    places = [i for i in _GRADIENTS if wanted[i : i + 1] == (True,)]
    dout = torch.zeros_like(out) if dout is None else dout
    need = [_GRADIENTS[i] for i in places]
    found = _attention_backward_op(dout, dlse, out, lse, *inputs, **ctx.options, need=need)
    grads = dict(zip(places, found, strict=True))
    return tuple(grads.get(i) for i in range(len(inputs)))


attention_op = define(f"attention({_TENSORS}, {_OPTIONS}) -> Tensor", _attention, _fake, _check)
with_lse_op = define(
    f"attention_with_lse({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention_with_lse,
    _fake_with_lse,
    _check,
)
_attention_backward_op = define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS},"
    " str[] need) -> Tensor[]",
    _backward,
    _fake_backward,
    _check_backward,
)
differentiate(with_lse_op, _gradient, _keep, "attention")
differentiate_by(attention_op, with_lse_op, lambda results: results[0])
forbid_gradients(_attention_backward_op, "attention")
autocast(attention_op, 3)
autocast(with_lse_op, 3)
