"""nn.Linear on packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import linear as torch_linear

from fastattn import ops
from fastattn.torch._library import define
from fastattn.torch._tensors import array_of, num_threads, tensor_of

if TYPE_CHECKING:
    from fastattn._args.types import Rounding

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)


def _version(x: Any) -> int:
    return 0 if x is None or x.is_inference() else x._version


class FrozenLinear:
    """The forward pass of an nn.Linear on packed weights; what it does not cover is the module's own."""

    def __init__(self, module: Any, weights_dtype: str | None, activations: Rounding | None) -> None:
        self.weight, self.bias = module.weight, module.bias
        self.dtype = weights_dtype
        self.activations = activations
        self._pack()
        self.number = len(_NUMBERED)
        while self.number in _NUMBERED:
            self.number += 1
        _NUMBERED[self.number] = self

    def _pack(self) -> None:
        weight = self.weight.detach()
        self.packed = ops.pack(array_of(weight), dtype=self.dtype)
        self.array = None if self.bias is None else array_of(self.bias.detach().float())
        self.version = self._versions()

    def _versions(self) -> tuple[int, int]:
        """How often the parameters have been written to."""
        return _version(self.weight), _version(self.bias)

    def __call__(self, x: Any) -> Any:
        if torch.compiler.is_compiling():
            if self._covers(x):
                return _linear_op(x, self.number)
        elif type(x) is torch.Tensor and self._covers(x):
            return self.computed(x)
        return torch_linear(x, self.weight, self.bias)

    def _covers(self, x: Any) -> bool:
        if x.dtype not in _TAKEN or not x.is_cpu or x.is_nested or torch.is_autocast_enabled("cpu"):
            return False
        # Gradients are torch's: of the input, or of weights that somebody has thawed.
        return not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad))

    def computed(self, x: Any) -> Any:
        """The product, of an x that is covered."""
        if self._versions() != self.version:
            self._pack()  # somebody has written to the weight, as load_state_dict does
        result = ops.linear(
            array_of(x), self.packed, self.array, activations=self.activations, num_threads=num_threads()
        )
        return tensor_of(result)


# Operators take no objects, so that a compiled graph names its linear map by a number.
_NUMBERED: WeakValueDictionary[int, FrozenLinear] = WeakValueDictionary()


def _numbered(x: Any, number: int) -> Any:
    return _NUMBERED[number].computed(x)


def _fake(x: Any, number: int) -> Any:
    return x.new_empty((*x.shape[:-1], _NUMBERED[number].weight.shape[0]))


_linear_op = define("frozen_linear(Tensor x, int number) -> Tensor", _numbered, _fake)
