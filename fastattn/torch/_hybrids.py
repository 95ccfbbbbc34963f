"""Convolutions, delta rules, scans and deformable attention, as models of transformers call them.

Each function has the results of transformers' own, which is much slower on CPUs, and takes its arguments by
name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastattn import functional, grad, ops
from fastattn._args.values import sequence_begins
from fastattn.torch._composed import composed, record_conv, recorded
from fastattn.torch._tensors import array_of, num_threads, tensor_of

_ACTIVATIONS: dict[str | None, Any] = {None: None, "silu": "silu", "swish": "silu"}
_rule = recorded(functional.linear_attention)
_scan = recorded(functional.selective_scan)
_heads_scan = recorded(functional.mamba2_scan)


class NotTaken(NotImplementedError):
    """Raised where transformers' own function is to compute a call; says why."""


# Calls that end so, before anything is computed, are transformers': it takes widths above 8 and decays above
# 0, and callers of its functions expect its own errors.
REFUSED = (NotTaken, TypeError, ValueError)


def causal_conv1d_fn(
    hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None, **kwargs: Any
) -> Any:
    """Convolve (batch, channels, length) with (channels, width)."""
    _require_activation(activation)
    x = hidden_states.transpose(1, 2)
    if 1 not in x.stride()[1:]:
        x = x.contiguous()
    begins = _begins(x, kwargs)
    tensors = {"x": _end_to_end(x, begins), "weight": weight, "bias": bias}
    (out,) = composed(record_conv, tensors, activation=_ACTIVATIONS[activation], begins=begins)
    return out.reshape(x.shape).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None
) -> Any:
    """Convolve new tokens (batch, channels, length) after those of `conv_state`, which it shifts in place."""
    _require_activation(activation)
    _require_constant(hidden_states, conv_state, weight, bias)
    kept, new = conv_state.shape[-1], hidden_states.shape[-1]
    width = weight.shape[-1]
    if kept < width - 1 or conv_state.dtype is not hidden_states.dtype:
        raise NotTaken(
            f"conv_state has {kept} tokens of {conv_state.dtype}, hidden_states are {hidden_states.dtype}"
        )
    before = conv_state[..., kept - (width - 1) :].transpose(1, 2).contiguous()
    out = ops.causal_conv1d(
        array_of(hidden_states.transpose(1, 2).detach().contiguous()),
        array_of(weight.detach()),
        None if bias is None else array_of(bias.detach()),
        activation=_ACTIVATIONS[activation],
        state=array_of(before.detach()),
        num_threads=num_threads(),
    )
    if new < kept:
        conv_state.copy_(torch.cat([conv_state[..., new:], hidden_states], dim=-1))
    else:
        conv_state.copy_(hidden_states[..., new - kept :])
    return tensor_of(out).transpose(1, 2)


def _delta_rule(rule: str, over_root: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Make the function of a delta rule: in chunks or token by token, which is one function here.

    `over_root` divides queries and keys by the roots of numbers, with the rounding of the model.
    """

    def unit(x: Any) -> Any:
        x = x.float()
        return over_root(x, (x * x).sum(-1, keepdim=True) + 1e-6)

    def compute(
        query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run it on (batch, length, heads, head_dim), with decays g as it or without its last axis."""
        begins = _begins(query, kwargs)  # as flash-linear-attention: with a state for each sequence
        dtype, state, shape = query.dtype, initial_state, value.shape
        query, key, value, g, beta = (_end_to_end(x, begins) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = unit(query), unit(key)
        if not (query.dtype is key.dtype is value.dtype):
            query, key, value = query.float(), key.float(), value.float()
        tensors = {"q": query, "k": key, "v": value}
        tensors = {name: _rows(x.transpose(-3, -2)) for name, x in tensors.items()}
        by_head = g.ndim < query.ndim
        more = {"log_decay": g.float().transpose(-2, -1) if by_head else _rows(g.float().transpose(-3, -2))}
        more["beta"] = beta.transpose(-2, -1).float()
        more["state"] = None if state is None else state.float().contiguous()
        out, after = composed(_rule, {**tensors, **more}, rule=rule, begins=begins)
        out = out.transpose(-3, -2).reshape(shape).to(dtype)
        return out, after if output_final_state else None

    return compute


gated_delta_rule = _delta_rule("gated_delta", lambda x, n: x * torch.rsqrt(n))
kimi_delta_rule = _delta_rule("kimi_delta", lambda x, n: x / torch.sqrt(n))


def mamba2_chunk_scan(
    hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None,
    initial_states: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Scan (batch, length, heads, head_dim) in float32; states are (batch, heads, head_dim, states)."""
    if D is not None and D.ndim != 1:
        raise NotTaken(f"D has {D.ndim} axes, not one")
    begins = _begins(hidden_states, kwargs)
    if begins is not None and initial_states is not None:
        raise NotTaken("packed sequences have initial_states")
    tensors = {"x": hidden_states, "B": B, "C": C}
    tensors = {name: _rows(_end_to_end(x, begins).float().transpose(-3, -2)) for name, x in tensors.items()}
    tensors |= {"dt": _end_to_end(dt, begins).float().transpose(-2, -1), "A": A.float()}
    more = {name: None if x is None else x.float() for name, x in (("D", D), ("dt_bias", dt_bias))}
    more["state"] = None if initial_states is None else initial_states.float().transpose(-1, -2).contiguous()
    limits = tuple(map(float, dt_limit))
    options = {"dt_softplus": dt_softplus, "dt_limits": limits, "begins": begins}
    out, after = composed(_heads_scan, {**tensors, **more}, **options)
    out = out.transpose(-3, -2).reshape(hidden_states.shape).contiguous()
    if begins is not None:  # states of the last sequence of each row
        batch, length = hidden_states.shape[:2]
        after = after[np.searchsorted(begins, length * np.arange(1, batch + 1)) - 1]
    return (out, after.transpose(-1, -2)) if return_final_states else out


def mamba_selective_scan(
    hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
    delta_softplus: bool = False, return_last_state: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Scan (batch, channels, length), with B and C (batch, states, length)."""
    if _begins(hidden_states.transpose(1, 2), kwargs) is not None:
        raise NotTaken("sequences are packed")
    tensors = _of_one_dtype({"x": hidden_states, "dt": dt, "B": B, "C": C, "z": z})
    dtype = hidden_states.dtype
    tensors = {name: _rows(x.transpose(1, 2)) for name, x in tensors.items()}
    more = {"A": A, "D": D, "dt_bias": delta_bias}
    more = {name: None if x is None else x.float() for name, x in more.items()}
    out, after = composed(_scan, {**tensors, **more}, dt_softplus=delta_softplus)
    out = out.transpose(1, 2).to(dtype)
    if D is not None:  # as where it is added by torch
        out = out.to(torch.promote_types(dtype, D.dtype))
    return (out, after) if return_last_state else out


def mamba_selective_state_update(
    state: Any, hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False, z: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Scan one token (batch, channels), and change `state` (batch, channels, states) in place."""
    _require_constant(state, hidden_states, dt, A, B, C, D, dt_bias, z)
    tensors = _of_one_dtype({"x": hidden_states, "dt": dt, "B": B, "C": C, "z": z})
    arrays: dict[str, Any] = {name: array_of(_rows(x.detach())[:, None]) for name, x in tensors.items()}
    numbers = {"A": A, "D": D, "dt_bias": dt_bias}
    arrays |= {name: None if x is None else array_of(x.detach().float()) for name, x in numbers.items()}
    out = _updated(functional.selective_scan, state, arrays, dt_softplus)
    return out[:, 0].to(hidden_states.dtype)


def mamba2_selective_state_update(
    state: Any, hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False, z: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Scan one token (batch, heads, head_dim), and change `state` (..., head_dim, states) in place.

    A head's numbers come expanded to its channels. Only states of `mamba2_chunk_scan` are contiguous for
    the kernel.
    """
    numbers = dt, A, *(x for x in (D, dt_bias) if x is not None)
    _require_constant(state, hidden_states, B, C, z, *numbers)
    if any(x.stride(-1) for x in numbers) or A.stride(-2):
        raise NotTaken("dt, A, D or dt_bias may differ within a head")
    tokens = {"x": hidden_states, "B": B, "C": C}
    arrays: dict[str, Any] = {
        n: array_of(x.detach().float()[:, :, None].contiguous()) for n, x in tokens.items()
    }
    lanes = {"D": D, "dt_bias": dt_bias}
    arrays |= {n: None if x is None else array_of(x.detach().float())[:, 0] for n, x in lanes.items()}
    arrays["dt"], arrays["A"] = array_of(dt.detach().float())[..., :1], array_of(A.detach().float())[:, 0, 0]
    out = _updated(functional.mamba2_scan, state.transpose(-1, -2), arrays, dt_softplus)[:, :, 0]
    out = out if z is None else out * torch.nn.functional.silu(z)
    return out.to(hidden_states.dtype)


def _updated(scan: Callable[..., Any], state: Any, arrays: dict[str, Any], dt_softplus: bool) -> Any:
    """Run a scan that writes to `state` where it is, if it is contiguous, else to a copy first."""
    if state.is_inference() and not torch.is_inference_mode_enabled():  # torch would not let it write
        raise NotTaken("state is one of inference mode")
    kept = state if state.dtype is torch.float32 and state.is_contiguous() else state.float().contiguous()
    own = array_of(kept.detach())
    out, _ = scan(**arrays, dt_softplus=dt_softplus, state=own, out_state=own, num_threads=num_threads())
    if kept is state:
        torch.autograd.graph.increment_version(state)
    else:
        state.copy_(kept)
    return tensor_of(out)


def _begins(x: Any, given: dict[str, Any]) -> Any:
    """Where packed sequences begin among all tokens of x (batch, length, ...), and the end; or None."""
    batch, length = x.shape[:2]
    found = None
    for name in PACKED:
        if given.get(name) is None:
            continue
        if not isinstance(given[name], torch.Tensor):
            raise NotTaken(f"{name} is of type {type(given[name]).__name__}, not a tensor")
        numbers = given[name].detach().cpu().numpy()
        if name == "seq_idx":
            if numbers.shape != (batch, length):
                raise NotTaken(f"seq_idx has shape {numbers.shape}, not {(batch, length)}")
            others = np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1)
            begins = np.append(np.flatnonzero(others), batch * length)
        elif batch != 1:
            raise NotTaken(f"{name} is given for a batch of {batch}")
        else:
            begins = sequence_begins(name, numbers, "the batch", length)
        if found is not None and not np.array_equal(np.unique(found), np.unique(begins)):
            raise NotTaken(f"{name} tells of other sequences than {' and '.join(PACKED)}")
        found = begins if found is None else found
    return found


def _end_to_end(x: Any, begins: Any) -> Any:
    """`x` (batch, length, ...) as (tokens, ...), where there are `begins`."""
    return x if begins is None else x.flatten(0, 1)


def multi_scale_deformable_attention(
    value: Any, value_spatial_shapes: Any, sampling_locations: Any, attention_weights: Any
) -> Any:
    """Sample (batch, len_v, heads, head_dim) at (batch, len_q, heads, levels, points, 2)."""
    return _sampled(
        value, value_spatial_shapes, sampling_locations.flatten(3, 4), attention_weights.flatten(3)
    )


def multi_scale_deformable_forward(
    self: Any, value: Any, value_spatial_shapes: Any, value_spatial_shapes_list: Any, level_start_index: Any,
    sampling_locations: Any, attention_weights: Any, im2col_step: int,
) -> Any:  # fmt: skip
    """Sample as `forward` of the class `MultiScaleDeformableAttention` does."""
    return multi_scale_deformable_attention(
        value, value_spatial_shapes_list, sampling_locations, attention_weights
    )


def multi_scale_deformable_attention_v2(
    value: Any, value_spatial_shapes: Any, sampling_locations: Any, attention_weights: Any,
    num_points_list: list[int], method: str = "default",
) -> Any:  # fmt: skip
    """Sample at (batch, len_q, heads, points, 2): levels may differ in their numbers of points."""
    if method not in ("default", "discrete"):
        raise NotTaken(f"method is {method!r}")
    mode = "bilinear" if method == "default" else "discrete"
    if mode == "discrete":  # no gradient flows there
        sampling_locations = sampling_locations.detach()
    options = {"num_points": num_points_list, "mode": mode}
    return _sampled(value, value_spatial_shapes, sampling_locations, attention_weights, **options)


def _sampled(value: Any, shapes: Any, locations: Any, weights: Any, **options: Any) -> Any:
    """Run deformable attention on tensors (batch, length, heads, ...)."""
    if not value.dtype is locations.dtype is weights.dtype:
        raise NotTaken(f"tensors are of {value.dtype}, {locations.dtype} and {weights.dtype}")
    sides = shapes.tolist() if isinstance(shapes, torch.Tensor) else shapes
    given = {"v": value, "locations": locations, "weights": weights}
    (out,) = composed(_record_samples, given, spatial_shapes=sides, **options)
    return out.flatten(2)


def _record_samples(given: dict[str, Any], options: dict[str, Any]) -> Any:
    arrays = {name: x.swapaxes(1, 2) for name, x in given.items()}
    out, pullback = grad.vjp(functional.deformable_attention, **arrays, **options)

    def back(need: tuple[str, ...], dout: Any) -> tuple[Any, ...]:
        return tuple(x.swapaxes(1, 2) for x in pullback(dout.swapaxes(1, 2), need=need))

    return (out.swapaxes(1, 2),), back


def _of_one_dtype(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors that are there, in the narrowest type that holds all of theirs."""
    given = {name: x for name, x in tensors.items() if x is not None}
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in given.values()))
    return {name: x.to(dtype) for name, x in given.items()}


def _rows(x: Any) -> Any:
    """`x`, its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _require_activation(activation: Any) -> None:
    if activation not in _ACTIVATIONS:
        raise NotTaken(f"activation is {activation!r}")


def _require_constant(*tensors: Any) -> None:
    """Refuse tensors of which gradients are wanted."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotTaken("gradients of an update are wanted")


# Arguments that tell packed sequences apart.
PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")

# By the names that modules of transformers have for them; of a class it is the method `forward`.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": kimi_delta_rule,
    "recurrent_kimi_delta_attention": kimi_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_selective_state_update": mamba2_selective_state_update,
    "mamba_selective_scan": mamba_selective_scan,
    "mamba_selective_state_update": mamba_selective_state_update,
    "MultiScaleDeformableAttention": multi_scale_deformable_forward,
    "multi_scale_deformable_attention": multi_scale_deformable_attention,
    "multi_scale_deformable_attention_v2": multi_scale_deformable_attention_v2,
}
