"""Tensors as arrays and back: the same memory, never a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import _C
from torch.utils._pytree import tree_leaves, tree_map

from fastattn._args.types import Array, Shape
from fastattn._engine import settings

try:
    import ml_dtypes

    _BFLOAT16: Any = np.dtype(ml_dtypes.bfloat16)
except ImportError:  # as long as no tensor of bfloat16 comes
    _BFLOAT16 = None


_PRE_DISPATCH = _C.DispatchKey.PreDispatch


def array_of(x: Any) -> Array:
    """The memory of a CPU tensor as an array; NumPy has no bfloat16, so it crosses as int16."""
    if x.dtype is not torch.bfloat16:
        return x.numpy()  # type: ignore[no-any-return]
    if _BFLOAT16 is None:
        raise ImportError(
            "fastattn.torch: tensors of bfloat16 need the ml_dtypes package: pip install ml_dtypes"
        )
    return x.view(torch.int16).numpy().view(_BFLOAT16)  # type: ignore[no-any-return]


def tensor_of(x: Array) -> Any:
    """The memory of an array as a tensor."""
    if x.dtype is not _BFLOAT16 and x.dtype != _BFLOAT16:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def stand_ins(given: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of an operator with arrays in the place of tensors, whose values are not known.

    They are the values that fit best: -1, which is no key, the most kv_lengths, the first page and all tokens
    in the last sequence. Sizes that are symbols are those of the example; None if some are known to nobody.
    """
    leaves = tree_leaves([list(x.shape) if isinstance(x, torch.Tensor) else x for x in given.values()])
    if not all(x.node.has_hint() for x in leaves if isinstance(x, torch.SymInt)):
        return None
    given = tree_map(_stand_in, given)
    k: Any = given.get("k")
    table = given.get("block_table")
    for name in _FITTING:
        x = given.get(name)
        if x is None or x.dtype.kind not in "iu":
            continue
        given[name] = fitting = np.zeros(x.shape, np.int64)
        if name == "kv_lengths":
            fitting += [0, 0, *k.shape][-2] * (1 if table is None else [1, *table.shape][-1])
        elif x.ndim == 1 and (name == "cu_seqlens_q" or (name == "cu_seqlens_k" and table is None)):
            fitting[-1:] = len(given[name[-1]])
    return given


# Arguments of integers that have to fit others. 0 is a page, a seed, a position, and the begin of a sequence.
_FITTING = (
    "kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seed", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "seqlen_offsets",
)  # fmt: skip


def _stand_in(x: Any) -> Any:
    """An array of the shape and the dtype of the tensor x, with memory for its last axis alone."""
    if isinstance(x, torch.SymInt):
        return x.node.hint
    if not isinstance(x, torch.Tensor):
        return x
    dtype = np.dtype(str(x.dtype).removeprefix("torch."))
    shape = [_stand_in(n) for n in x.shape]
    return np.broadcast_to(np.full(shape[-1:], -1 if dtype.kind == "i" else 0, dtype), shape)


def heads_inside(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """A new array (..., heads, length, head_dim) that lies in memory as (..., length, heads, head_dim).

    So do the results of torch's own kernel: a model joins the heads of a token without copying.
    """
    if len(shape) < 3:
        return np.empty(shape, dtype)
    return np.empty((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype).swapaxes(-3, -2)


def traced() -> bool:
    """Whether a call is recorded or rewritten: compiled, exported, traced, of torch.func, in a dispatch mode.

    Arrays of its tensors would be constants of the record: only torch's functions and operators may run.
    """
    return bool(
        torch.compiler.is_compiling()  # first, since the compiler knows none of the others
        or _C._is_tracing()
        or _C._len_torch_dispatch_stack() > 0
        or _C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or _C._are_functorch_transforms_active()
    )


def num_threads() -> int | None:
    """The threads of a call: no more than torch uses (1 in a worker of a DataLoader), or than we would."""
    threads: int = torch.get_num_threads()
    return threads if threads < settings.get_num_threads() else None
