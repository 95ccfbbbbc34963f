"""Masks of attention layers, as torch has them, made options of `fastattn.attention`."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import window_sides
from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.types import FLOAT64, Array, Bools, Shape, lane_dtype
from fastattn._args.values import is_float, mask_array

if TYPE_CHECKING:
    Options = dict[str, Any]
    # What messages call a layer's input, attn_mask and key_padding_mask.
    Names = tuple[str, str, str]
    # Of one attention: attn_mask and key_padding_mask (bool: True hides; float: added), and is_causal.
    Masks = tuple[Names, Any, Any, bool]


def add_masks(options: Options, masks: Masks, shape: Shape, dtype: np.dtype[Any]) -> None:
    """Put the first two `masks` into `options`.

    `shape` is (B, H, L, S). Floats of any type are converted to the lane type of `dtype`.
    """
    hidden: list[Array] = []
    added: list[Array] = []
    for name, x, with_four_axes in zip(masks[0][1:], masks[1:3], (_mask_4d, _padding_4d), strict=True):
        if x is None:
            continue
        array = with_four_axes(name, mask_array(name, x), shape)
        if array.dtype == np.bool_:
            hidden.append(array)
        elif is_float(array.dtype):
            added.append(array)
        else:
            expected = f"bool (True hides; {name} == 0, where 1 attends) or floats to add"
            raise wrong_dtype(name, array, expected)
    if hidden:
        options["mask"] = ~reduce(np.logical_or, hidden)
    if added:
        bias = added[0] if len(added) == 1 else added[0].astype(FLOAT64) + added[1].astype(FLOAT64)
        options["bias"] = _as_lane(bias, lane_dtype(dtype))


def padding_alone(masks: Masks, shape: Shape) -> tuple[bool, Bools | None]:
    """Whether there is no mask but is_causal, or only a bool key_padding_mask; and that mask.

    Masks of floats or of another shape than `shape`, (B, S), and errors in them, are `add_masks`'s.
    """
    names, attn_mask, padding, is_causal = masks
    if padding is None:
        return attn_mask is None, None
    if is_causal or attn_mask is not None:
        return False, None
    array = mask_array(names[2], padding)
    found = array if array.dtype == np.bool_ and array.shape == shape else None
    return found is not None, found


def _as_lane(x: Array, lane: np.dtype[Any]) -> Array:
    """Floats `x` in a lane type. Finite ones stay finite, because -inf hides."""
    if x.dtype.newbyteorder("=") != FLOAT64 or lane == FLOAT64:
        return x.astype(lane, copy=False)
    most = np.finfo(lane).max
    return np.where(np.isinf(x), x, np.clip(x, -most, most)).astype(lane)


def _mask_4d(name: str, mask: Array, shape: Shape) -> Array:
    """A mask (L, S), (B * H, L, S), or one that broadcasts to (B, H, L, S), with four axes."""
    batch, heads, len_q, len_k = shape
    if mask.ndim == 2 and mask.shape == (len_q, len_k):
        return mask[None, None]
    if mask.ndim == 3 and mask.shape == (batch * heads, len_q, len_k):
        return mask.reshape(shape)
    if mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, shape, strict=True)):
        return mask
    stacked = f"(batch * heads, len_q, len_k) = {(batch * heads, len_q, len_k)}"
    expected = f"(len_q, len_k) = {shape[2:]}, {stacked}, or four axes that broadcast to {shape}"
    raise wrong_shape(name, mask, expected)


def _padding_4d(name: str, mask: Array, shape: Shape) -> Array:
    """A mask (B, S) with four axes."""
    if mask.shape != (shape[0], shape[3]):
        raise wrong_shape(name, mask, f"(batch, len_k) = {(shape[0], shape[3])}")
    return mask[:, None, None, :]


def add_extra_keys(
    options: Options, len_q: int, k: Array, v: Array, extra: list[tuple[Any, Any]]
) -> tuple[Array, Array]:
    """Append `extra` keys and values to k and v (B, H, S, D); `options` are changed to match.

    Options that count positions would hide the extra keys. They become a dense mask and a dense bias.
    """
    len_k = k.shape[2]
    shape = (*k.shape[:2], len_k + len(extra), k.shape[3])
    new_k, new_v = np.empty(shape, k.dtype), np.empty(shape, v.dtype)
    new_k[:, :, :len_k], new_v[:, :, :len_k] = k, v
    for i, (key, value) in enumerate(extra):
        new_k[:, :, len_k + i], new_v[:, :, len_k + i] = key, value

    key_index = np.arange(len_k)
    offset = np.reshape(options.pop("q_offset", 0), (-1, 1, 1, 1))
    position = offset + np.arange(len_q)[:, None]
    left, right = window_sides(options.pop("window", None))
    masks = [options.pop("mask")] if "mask" in options else []
    if options.pop("causal", False):
        masks.append(key_index <= position)
    if left is not None:
        masks.append(key_index >= position - left)
    if right is not None:
        masks.append(key_index <= position + right)
    if "kv_lengths" in options:
        masks.append(key_index < options.pop("kv_lengths")[:, None, None, None])
    biases = [options.pop("bias")] if "bias" in options else []
    if "alibi_slopes" in options:
        slopes = np.asarray(options.pop("alibi_slopes"))[..., None, None]
        biases.append((-slopes * abs(position - key_index)).astype(lane_dtype(k.dtype)))
    if masks:
        options["mask"] = _wider(reduce(np.logical_and, masks), len_k, len(extra), True)
    if biases:
        options["bias"] = _wider(reduce(np.add, biases), len_k, len(extra), 0)
    return new_k, new_v


def _wider(x: Array, len_k: int, extra: int, value: Any) -> Array:
    """`x`, for len_k keys or one for all, with `value` for `extra` more."""
    result: Array = np.full((*x.shape[:-1], len_k + extra), value, x.dtype)
    result[..., :len_k] = x
    return result
