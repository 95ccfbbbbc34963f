"""Padding away and back by flash-attn's names, for arrays and for tensors with gradients."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fastattn._args.errors import named, wrong_shape
from fastattn._args.names import show_public
from fastattn.flash_attn._check import is_tensor, same_kind

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


@named("index_first_axis")
def index_first_axis(input: Any, indices: Any) -> Any:
    """``input[indices]``: rows of an array or a tensor."""
    input, indices = same_kind(input, input=input, indices=indices)
    return input[indices]


@named("index_put_first_axis")
def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """`values` as the rows `indices` of an array or a tensor of `first_axis_dim` rows, the others 0."""
    values, indices = same_kind(values, values=values, indices=indices)
    shape = (first_axis_dim, *values.shape[1:])
    if len(indices) != len(values):
        raise wrong_shape("indices", indices, f"({len(values)},), one of each row")
    out = values.new_zeros(shape) if is_tensor(values) else np.zeros(shape, values.dtype)
    out[indices] = values
    return out


@named("unpad_input")
def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, ...]:
    """Leave padding out of hidden_states (batch, length, ...), by masks (batch, length) of 0 and 1.

    Returns the tokens that one of the masks has, (tokens, ...), their numbers in the padded batch, cu_seqlens
    (batch + 1,), the largest length, and how many tokens of each sequence attention_mask has.
    """
    given = {"hidden_states": hidden_states, "attention_mask": attention_mask, "unused_mask": unused_mask}
    x, mask, unused = same_kind(hidden_states, **given)
    for name, m in (("attention_mask", mask), ("unused_mask", unused)):
        if m is not None and m.shape != x.shape[:2]:
            raise wrong_shape(name, m, f"{tuple(x.shape[:2])}, as hidden_states has")
    module: Any = sys.modules["torch"] if is_tensor(x) else np
    kept = mask if unused is None else mask + unused
    lengths, used = (m.sum(-1, dtype=module.int32) for m in (kept, mask))
    ends = module.cumsum(lengths, 0, dtype=module.int32)
    cu_seqlens = module.concatenate([module.zeros_like(ends[:1]), ends])
    (indices,) = module.nonzero(kept.reshape(-1), **({"as_tuple": True} if module is not np else {}))
    flat = x.reshape(-1, *x.shape[2:])
    return flat[indices], indices, cu_seqlens, int(lengths.max()) if len(lengths) else 0, used


@named("pad_input")
def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """The padded batch (batch, seqlen, ...) of tokens, with 0 for padding: `unpad_input` undone."""
    out = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return out.reshape(batch, seqlen, *out.shape[1:])


show_public(__name__)
