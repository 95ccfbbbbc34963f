"""Kernels on CPUs for ``torch.nn.attention.varlen.varlen_attn``, which torch has on other devices alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastattn._args.errors import named, wrong_shape
from fastattn.flash_attn._check import sides, window_of
from fastattn.functional import varlen_attention_backward
from fastattn.functional._varlen import varlen_attention
from fastattn.torch._tensors import array_of, num_threads, tensor_of

_LIBRARY = torch.library.Library("torch_attn", "IMPL")


def _options(causal: bool, scale: float | None, window: Sequence[int] | None) -> dict[str, Any]:
    options = {"causal": causal, "scale": scale, "num_threads": num_threads()}
    return options if causal or window is None else options | {"window": sides(window_of(list(window)))}


def _check_used(used: Any, room: Any) -> None:
    """Raise unless each sequence has room for its `used` keys: the next sequence begins there."""
    if used.shape != room.shape:
        raise wrong_shape("seqused_k", used, f"{tuple(room.shape)}, one number for each sequence")
    for i in ((used < 0) | (used > room)).nonzero()[:1, 0].tolist():
        came = f"seqused_k[{i}] is {int(used[i])}"
        raise ValueError(f"(): {came}; expected 0 to {int(room[i])}, the room of that sequence")


@named("varlen_attn")
def _forward(
    q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False,
    scale: float | None = None, window_size: Sequence[int] | None = None, enable_gqa: bool = False,
    seqused_k: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    options = _options(is_causal, scale, window_size)
    if block_table is not None and seqused_k is None:
        expected = "one number for each sequence, as block_table is given"
        raise ValueError(f"(): seqused_k is None; expected {expected}")
    if seqused_k is not None:
        if block_table is None:
            room = cu_seq_k[1:].clamp(max=len(k)) - cu_seq_k[:-1]
        else:
            room = torch.full(block_table.shape[:1], block_table.shape[1] * k.shape[1])
        _check_used(seqused_k, room)
    if block_table is not None:
        options["block_table"] = array_of(block_table)
        cu_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0))
    elif seqused_k is not None:  # each sequence has room for more keys than there are
        starts, ends = cu_seq_k[:-1], cu_seq_k[:-1] + seqused_k
        index = torch.cat([torch.arange(i, j) for i, j in zip(starts.tolist(), ends.tolist(), strict=True)])
        k, v, cu_seq_k = k[index], v[index], torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0))
    arrays = (array_of(x.detach()) for x in (q, k, v, cu_seq_q, cu_seq_k))
    out, lse = varlen_attention(*arrays, return_lse=True, **options)
    return tensor_of(out), tensor_of(lse), torch.zeros(2, dtype=torch.uint64)


@named("varlen_attn")
def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int,
    max_k: int, is_causal: bool, state: Any, scale: float | None = None,
    window_size: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    arrays = (array_of(x.detach()) for x in (dout, q, k, v, out, lse, cu_seq_q, cu_seq_k))
    found = varlen_attention_backward(*arrays, **_options(is_causal, scale, window_size))
    return tuple(tensor_of(np.ascontiguousarray(x)) for x in found)


_LIBRARY.impl("_varlen_attn", _forward, "CPU")
_LIBRARY.impl("_varlen_attn_backward", _backward, "CPU")
