"""The arguments of a backward pass, checked, and the gradients that its sums become."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.grad import places
from fastattn._args.quiet import quiet
from fastattn._args.results import require_apart, result_array
from fastattn._args.types import (
    AXES,
    FLOAT64,
    OF_HEADS,
    OF_NUMBERS,
    Array,
    AttentionArgs,
    BackwardArgs,
    RowwiseArgs,
    RowwiseBackwardArgs,
    Shape,
    lane_dtype,
)
from fastattn._args.values import (
    as_array,
    is_float,
    operand,
    readable,
    real_array,
    real_values,
    require_broadcast,
    shared,
    short,
)

# Options of attention that have gradients.
OF_OPTIONS = ("bias", *OF_HEADS, "scale")
# Arguments that have no gradient of their own.
_SAVED = ("dout", "out", "lse", "dlse")
_UNGIVEN = ("scale", "state", "gamma")  # have a default that has a gradient
_SIZES = {f"d{name}": attrgetter(*AXES[name]) for name in ("q", "k", "v")}
_OF_ALL = ("heads_q", "heads_q")
_AXES = {**AXES, "weight": ("heads_q", "head_dim"), "pre": _OF_ALL, "post": _OF_ALL}


@dataclass(slots=True)
class _Wanted:
    """One requested gradient: the caller's array and the kernel's buffer."""

    name: str
    result: Any  # the caller's array; None: a float
    place: Any  # the same, with heads before tokens
    sums: Any  # of the whole batch, or `place`; None for dscale, which is made of dq


@dataclass(slots=True)
class Gradients:
    """The arguments of a backward pass, and the caller's gradients."""

    args: BackwardArgs
    wanted: list[_Wanted]

    @quiet  # what is too large for float16 is infinite, as in kernels
    def results(self) -> tuple[Any, ...]:
        """The gradients, in the order of `need`, of what the kernels have left."""
        return tuple(self._result(each) for each in self.wanted)

    def clear(self) -> None:
        """Leave what a call without queries leaves: 0."""
        for each in self.wanted:
            if each.sums is not None:
                each.sums[...] = 0

    def _result(self, wanted: _Wanted) -> Any:
        if wanted.name == "dscale":
            return self._dscale()
        if wanted.result is None:
            return float(wanted.sums.sum())
        if wanted.sums is not wanted.place:
            sums = summed_to(wanted.place.shape, wanted.sums)
            wanted.place[...] = sums * self._rest() if wanted.name == "dq" else sums
        return wanted.result

    def _rest(self) -> Any:
        """Factor that dq still lacks."""
        forward = self.args.attention
        return lane_dtype(forward.q.dtype).type(1 if self.args.dq_factor == forward.scale else forward.scale)

    def _dscale(self) -> float:
        dq: Any = self.args.dq
        q = np.broadcast_to(self.args.attention.q, dq.shape)
        total = 0.0
        for i in np.ndindex(q.shape[:-2]):  # a row of 0 has attended nothing: whatever is in q is hidden
            total += float(np.vdot(np.where(dq[i] == 0, 0, q[i].astype(float)), dq[i].astype(float)))
        return total


def summed_to(shape: Shape, x: Array) -> Array:
    """`x` summed over the axes along which an array of `shape` was broadcast to x's."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, (n, m) in enumerate(zip(padded, x.shape, strict=True)) if n == 1 and m != 1)
    return (x.sum(axis=axes, keepdims=True) if axes else x).reshape(shape)


def of_source(source: Any, x: Array) -> Array:
    """The gradient `x`, summed to the shape of the argument `source`, in its dtype if that is floating."""
    array = shared(source)
    dtype = array.dtype.newbyteorder("=")
    found = summed_to(array.shape, x)
    return found.astype(dtype, copy=False) if is_float(dtype) else found


def backward_args(
    args: AttentionArgs,
    given: Mapping[str, Any],
    need: Sequence[str],
    into: Sequence[Array | None] | None,
    options: Mapping[str, Any],
) -> Gradients:
    """Check the arguments of a backward pass whose forward pass is `args`.

    `given` holds by name what the caller passed: dout, out, lse, dlse, and what there are gradients of. Of a
    ragged call, its arrays are (tokens, heads, head_dim). `options` are the others.
    """
    names = gradient_names(need, given)
    dout, dlse = saved(args, given)
    backward = BackwardArgs(args, dout, dlse, dq_factor=1.0 if "dscale" in names else args.scale)
    return gradients(backward, names, given, into, options)


def saved(args: AttentionArgs, given: Mapping[str, Any]) -> tuple[Array, Array | None]:
    """Check dout, out, lse and dlse; `args`, of a call with return_lse=True, gets out and lse."""
    copies: list[str] = []
    lane = lane_dtype(args.q.dtype)
    shape = np.shape(args.result[0])
    dout, args.out = (like_result(name, given[name], args, shape, copies) for name in ("dout", "out"))
    if given["lse"] is None:
        raise TypeError("(): lse is None; expected an array, as return_lse=True gives it")
    lse = real_array("lse", given["lse"])
    row_shape = args.result[1].shape
    if lse.dtype.newbyteorder("=") != lane:
        raise wrong_dtype("lse", lse, f"{lane}, as return_lse=True gives it")
    if lse.shape != row_shape:
        raise wrong_shape("lse", lse, f"{row_shape}, as return_lse=True gives it")
    args.lse = readable(lse, "lse", copies).reshape(args.out.shape[:-1])
    args.copies = (*args.copies, *copies)
    if given["dlse"] is None:
        return dout, None
    dlse = real_values("dlse", given["dlse"], lane, copies)
    require_broadcast("dlse", dlse.shape, row_shape, "lse's shape")
    return dout, np.broadcast_to(dlse, row_shape).reshape(args.out.shape[:-1])


def like_result(name: str, x: Any, args: AttentionArgs, shape: Shape, copies: list[str]) -> Array:
    """`x`, of the `shape` that the caller got as the result of the forward pass, as the kernels have it."""
    array = operand(name, x, copies)
    if array.shape != shape:
        raise wrong_shape(name, array, f"{shape}, as the result of the forward pass")
    if array.dtype != args.q.dtype:
        raise wrong_dtype(name, array, f"{args.q.dtype}, as q has")
    return heads_first(args, array).reshape(args.out.shape)


def gradients(
    backward: BackwardArgs,
    names: list[str],
    given: Mapping[str, Any],
    into: Sequence[Array | None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Gradients:
    """Room for the gradients `names` of what is `given`, set in `backward`."""
    args, lane = backward.attention, lane_dtype(backward.attention.q.dtype)
    given_places = places(into, len(names))
    inputs = [] if into is None else _inputs(backward, {**(options or {}), **given})
    results = [
        _result(args, name, given[source_of(name)], place, inputs, f"into[{i}]")
        for i, (name, place) in enumerate(zip(names, given_places, strict=True))
    ]
    require_apart([(f"into[{i}]", x) for i, x in enumerate(results) if x is not None])
    found = [_room(backward, name, result) for name, result in zip(names, results, strict=True)]
    if "dscale" in names and backward.dq is None:
        backward.dq = np.empty((*args.out.shape[:-1], args.head_dim), lane)
    return Gradients(backward, found)


def heads_first(args: AttentionArgs, x: Array) -> Array:
    """`x`, an array of the caller's, as the kernels have it."""
    return x if args.begins is None else x.swapaxes(0, 1)


def source_of(name: str) -> str:
    """The argument that a gradient is the gradient of."""
    return "bias" if name == "dbias_diagonals" else name[1:]


def gradient_names(need: Any, given: Mapping[str, Any], diagonals: bool = True) -> list[str]:
    """`need`, checked: names of gradients of what is in `given`."""
    if not isinstance(need, (tuple, list)):
        raise TypeError(f'(): need is {short(need)}; expected a tuple of names, such as ("dq", "dv")')
    allowed = [f"d{source}" for source in given if source not in _SAVED]
    if "bias" in given and diagonals:
        allowed.insert(allowed.index("dbias") + 1, "dbias_diagonals")
    for name in need:
        if not isinstance(name, str) or name not in allowed:
            raise ValueError(f"(): need has {short(name)}; expected {', '.join(allowed)}")
        source = source_of(name)
        if given[source] is None and source not in _UNGIVEN:
            raise ValueError(f"(): need has {name}, but {source} is not given")
    if len(set(need)) != len(need):
        raise ValueError(f"(): need is {tuple(need)}; expected each name once")
    return list(need)


def _inputs(backward: BackwardArgs, passed: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """List the inputs for `result_array`: name, the array `passed` by the caller, and the one made of it."""
    found = []
    for name, x in passed.items():
        made = getattr(backward if name in ("dout", "dlse") else backward.attention, name, None)
        made = made if isinstance(made, np.ndarray) else None
        parts = x if name == "row_ranges" and x is not None else (x,)
        found += [(name, part, made) for part in parts]
    return found


def _result(
    args: AttentionArgs, name: str, source: Any, place: Any, inputs: Any, called: str
) -> Array | None:
    """Return the array of a gradient: `place`, checked, or a new one; None for a float."""
    if source_of(name) in ("scale", *OF_NUMBERS):
        if place is not None:
            raise TypeError(f"(): {called} is for {name}, a float; expected None")
        return None
    array, dtype = as_array(source_of(name), source), lane_dtype(args.q.dtype)
    if name == "dbias_diagonals":
        shape = (*array.shape[:-2], max(0, args.len_q + args.len_k - 1))
    else:
        shape = array.shape
        dtype = array.dtype.newbyteorder("=") if is_float(array.dtype) else dtype
    return result_array(place, shape, dtype, source_of(name), inputs, called)


def gradient_shape(args: AttentionArgs, name: str) -> Shape:
    """The shape of what the kernels leave of a gradient."""
    if name in _SIZES:
        sizes: Shape = _SIZES[name](args)
        return sizes if args.begins is not None else args.batch_shape + sizes
    bias: Any = args.bias
    if name == "dbias":
        return bias.shape  # type: ignore[no-any-return]
    if name == "dbias_diagonals":
        return (*bias.shape[:-2], max(0, args.len_q + args.len_k - 1))
    return (*args.batch_shape, *[getattr(args, axis) for axis in _AXES.get(name[1:], ("heads_q",))])


def _room(backward: BackwardArgs, name: str, result: Any) -> _Wanted:
    """Room for what the kernels leave of a gradient, set in `backward`: the result itself where it fits."""
    args, lane = backward.attention, lane_dtype(backward.attention.q.dtype)
    if name == "dscale":
        return _Wanted(name, None, None, None)
    place, shape, dtype = result, gradient_shape(args, name), FLOAT64
    if name.startswith("dbias"):
        place, dtype = result.reshape(shape), lane
    elif name in ("dq", "dk", "dv"):
        place, dtype = heads_first(args, result), result.dtype
        if place.size == math.prod(shape):
            place = place.reshape(shape)  # a view: lengths of 1 come and go
    apart = place is None or place.shape != shape or place.dtype != dtype
    if apart or (name == "dq" and backward.dq_factor != args.scale):
        sums = np.zeros(shape, FLOAT64 if dtype == FLOAT64 else lane)
    else:
        sums = place
        if name not in ("dq", "dk", "dv"):  # those are written, others are added to
            sums[...] = 0
    setattr(backward, name, sums)
    return _Wanted(name, result, place, sums)


def rowwise_backward_args(
    args: RowwiseArgs, dout: Any, given: Mapping[str, Any], need: Sequence[str]
) -> Gradients:
    """Check dout and need; `given` holds by name what the caller passed, of all that can have a gradient."""
    names = gradient_names(need, given)
    forward = args.attention
    shape = np.shape(forward.result)
    cotangent = like_result("dout", dout, forward, shape, [])
    scale = 1.0 if "dscale" in names else forward.scale
    backward = RowwiseBackwardArgs(forward, cotangent, dq_factor=scale, rowwise=args)
    found = gradients(backward, names, given)
    lane = lane_dtype(forward.q.dtype)
    for each in found.wanted:
        if each.name in ("dk", "dv"):
            if each.sums.dtype != lane:
                each.sums = np.empty(each.sums.shape, lane)
            each.sums[...] = 0
            setattr(backward, each.name, each.sums)
    return found
