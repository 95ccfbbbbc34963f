"""The functions for tensors: by operators of torch where there are gradients or a compiler, else directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastattn._args.errors import named
from fastattn._args.values import integer
from fastattn.flash_attn._arrays import attend, cached
from fastattn.flash_attn._check import same_kind, window_of
from fastattn.flash_attn._rotate import rotate_by_offsets
from fastattn.torch._attention import attention_op, varlen_op, varlen_with_lse_op, with_lse_op
from fastattn.torch._library import define, differentiate, differentiates
from fastattn.torch._tensors import array_of, num_threads, tensor_of, traced

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def attend_tensors(
    arrays: tuple[Any, ...], more: dict[str, Any], options: dict[str, Any], return_lse: bool
) -> tuple[Any, Any]:
    """Out and lse of `attend`, by the operators of attention where somebody looks on."""
    if more.get("block_table") is not None and differentiates([*arrays, more["alibi_slopes"]]):
        raise ValueError("(): block_table is given; expected none: pages have no gradients")
    seed = torch.randint(2**63 - 1, ()) if "dropout" in options else None
    if not _observed([*arrays, *more.values()]):
        given = {name: x if x is None else _array(x) for name, x in more.items()}
        drawn = None if seed is None else int(seed)
        out, lse = attend(tuple(map(_array, arrays)), given, options, return_lse, num_threads(), drawn)
        return tensor_of(out), None if lse is None else tensor_of(lse)
    q, k, v = arrays
    options = {**more, **options, "seed": seed}
    packed = "cu_seqlens_q" in more
    if not packed:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if return_lse:
        out, lse = (varlen_with_lse_op if packed else with_lse_op)(q, k, v, **options)
    else:
        out, lse = (varlen_op if packed else attention_op)(q, k, v, **options), None
    return out if packed else out.transpose(1, 2), lse


def _observed(tensors: list[Any]) -> bool:
    """Whether torch's dispatcher has to see a call: recorded, differentiated, cast, or of special tensors."""
    if traced() or differentiates(tensors) or torch.is_autocast_enabled("cpu"):
        return True
    for x in tensors:  # noqa: SIM110 # any() takes twice as long
        if x is not None and not (type(x) in _PLAIN and x.is_cpu):
            return True
    return False


def cached_tensors(*tensors: Any, **options: Any) -> tuple[Any, Any]:
    """Out and lse of `cached`."""
    if not (traced() or tensors[0].is_meta):
        out, lse = cached(*_arrays_of(tensors), num_threads=num_threads(), **options)
        if tensors[3] is not None:  # a backward pass that kept what has been written must not go on
            torch.autograd.graph.increment_version(tensors[1:3])
        return tensor_of(out), None if lse is None else tensor_of(lse)
    del options["return_lse"]  # the operator always does
    window = options.pop("window") or (-1, -1)
    given = [torch.full(tensors[0].shape[:1], x) if isinstance(x, int) else x for x in tensors]
    with torch.no_grad():  # as in a call that is not compiled
        found: tuple[Any, Any] = _cached_op(*given, window_size=window, **options)
    return found


def _arrays_of(tensors: tuple[Any, ...]) -> list[Any]:
    """The memory of tensors, by the way that most can go; None and integers as they are."""
    try:
        if tensors[0].dtype is not torch.bfloat16:
            return [x if x is None or type(x) is int else x.numpy() for x in tensors]
    except (AttributeError, TypeError, RuntimeError):  # others in bfloat16, with a gradient, or no tensors
        given = {name: x for name, x in zip(_NAMES, tensors, strict=True) if not isinstance(x, int)}
        same_kind(tensors[0], **given)
    return [x if x is None or isinstance(x, int) else _array(x) for x in tensors]


def _array(x: Any) -> Any:
    """The memory of a tensor."""
    if x.requires_grad:
        x = x.detach()
    return array_of(x) if x.dtype is torch.bfloat16 else x.numpy()


_TENSORS = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None,"
    " Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? cache_seqlens=None,"
    " Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? block_table=None,"
    " Tensor? alibi_slopes=None"
)
_OPTIONS = (
    "float? softmax_scale=None, bool causal=False, SymInt[2] window_size=[-1, -1], float? softcap=None,"
    " bool rotary_interleaved=True"
)
_NAMES = [tensor.split()[1].removesuffix("=None") for tensor in _TENSORS.split(", ")]


def _cached(*arrays: Any, window_size: Any = (-1, -1), **given: Any) -> tuple[Any, Any]:
    """`cached` for the arguments of the operator."""
    return cached(*arrays, window=window_of(window_size), return_lse=True, num_threads=num_threads(), **given)


@named("flash_attn_with_kvcache")
def _kernel(*tensors: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = _cached(*[x if x is None else _array(x) for x in tensors], **options)
    return tensor_of(out), tensor_of(lse)


@named("flash_attn_with_kvcache")
def _check(**given: Any) -> None:
    _cached(**given, compute=False)


def _fake(q: Any, k_cache: Any, v_cache: Any, *tensors: Any, **options: Any) -> tuple[Any, Any]:
    batch, length, heads, _ = q.shape
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = q.new_empty((batch, length, heads, v_cache.shape[-1]))
    return out, q.new_empty((batch, heads, length), dtype=dtype)


_cached_op = define(
    f"flash_attn_with_kvcache({_TENSORS}, *, {_OPTIONS}) -> (Tensor, Tensor)", _kernel, _fake, _check
)


def rotate_tensor(x: Any, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any, interleaved: bool) -> Any:
    """`apply_rotary_emb` of a tensor."""
    given = {"seqlen_offsets": offsets} if isinstance(offsets, torch.Tensor) else {}
    first = 0 if given else integer("seqlen_offsets", offsets, 0)
    return _rotate_op(x, cos, sin, cu_seqlens=cu_seqlens, offset=first, interleaved=interleaved, **given)


def _rotated(
    x: Any, cos: Any, sin: Any, seqlen_offsets: Any = None, cu_seqlens: Any = None, *, offset: int = 0,
    interleaved: bool = False, conjugate: bool = False,
) -> Any:  # fmt: skip
    first = offset if seqlen_offsets is None else seqlen_offsets
    return rotate_by_offsets(x, cos, sin, first, cu_seqlens, interleaved, False, conjugate)


@named("apply_rotary_emb")
def _rotate(*tensors: Any, **options: Any) -> Any:
    return tensor_of(_rotated(*[x if x is None else _array(x) for x in tensors], **options))


@named("apply_rotary_emb")
def _check_rotary(x: Any, cu_seqlens: Any = None, **given: Any) -> None:
    if cu_seqlens is not None:  # positions are not known: those of no tokens
        x, cu_seqlens = x[:0], np.zeros_like(cu_seqlens)
    _rotated(x, cu_seqlens=cu_seqlens, **given)


def _keep(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.options = options


def _turned_back(ctx: Any, wanted: tuple[bool, ...], dout: Any) -> tuple[Any, ...]:
    options = {**ctx.options, "conjugate": not ctx.options.get("conjugate", False)}
    return _rotate_op(dout, *ctx.saved_tensors, **options), *[None] * len(ctx.saved_tensors)


_rotate_op = define(
    "apply_rotary_emb(Tensor x, Tensor cos, Tensor sin, Tensor? seqlen_offsets=None,"
    " Tensor? cu_seqlens=None, *, SymInt offset=0, bool interleaved=False, bool conjugate=False) -> Tensor",
    _rotate,
    lambda x, *tensors, **options: x.new_empty(x.shape),
    _check_rotary,
)
differentiate(_rotate_op, _turned_back, _keep, "apply_rotary_emb")
