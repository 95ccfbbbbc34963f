"""Arrays and tensors of torch, which is imported only where a tensor is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastattn._args.types import Array


def torch_of(reason: str) -> Any:
    """The module torch, where a tensor is asked for."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"(): {reason} needs torch: pip install torch ({error})") from error
    return torch


def is_tensor(x: Any) -> bool:
    """Tell whether x is a tensor of torch, without importing it."""
    return type(x).__module__.partition(".")[0] == "torch"


def arrays_of(name: str, x: Any) -> tuple[Any, bool]:
    """`x`, the argument `name`, an array or tensor or a list, in NumPy; and whether it was of torch."""
    if is_tensor(x):
        return x.detach().cpu().float().numpy() if x.is_floating_point() else x.cpu().numpy(), True
    if isinstance(x, (list, tuple)) and any(map(is_tensor, x)):
        rows = [arrays_of(name, each)[0] for each in x]
        if len({np.shape(row) for row in rows}) > 1:
            raise ValueError(f"(): {name} has vectors of different shapes; expected one shape")
        return np.stack(rows), True
    return x, False


def as_asked(x: Array, to_numpy: bool, to_tensor: bool) -> Any:
    """Array x (n, ...) as it is, as a tensor, or as a list of n tensors; without rows, of the shape (0,)."""
    if to_tensor:
        torch = torch_of("convert_to_tensor=True")
        return torch.from_numpy(x) if len(x) else torch.tensor([])
    if not to_numpy:
        return list(torch_of("convert_to_numpy=False").from_numpy(x)) if len(x) else []
    return x if len(x) else np.array([])
