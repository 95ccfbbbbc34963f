"""nn.Linear on packed weights."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad
from torch.nn.functional import linear as torch_linear

from fastattn import ops
from fastattn._args.errors import named
from fastattn._args.ops import linear_args
from fastattn._args.types import Rounding
from fastattn.torch._library import define
from fastattn.torch._tensors import array_of, num_threads, tensor_of, traced

TAKEN = (torch.float32, torch.float16, torch.bfloat16)
# Classes of calls that are timed apart, by the number of rows that is timed.
CLASSES = {1: "calls of 1 row", 16: "2 to 64 rows", 256: "more than 64 rows"}


class FrozenLinear:
    """The forward pass of an nn.Linear on packed weights; what it does not cover is computed as before.

    It has the module's dictionary of parameters, in which load_state_dict and functional_call put others. A
    copy, by deepcopy or pickle, packs the parameters that are copied with it.
    """

    def __init__(
        self,
        parameters: dict[str, Any],
        weights_dtype: str | None,
        activations: Rounding | None,
        slower: tuple[bool, ...] = (),
    ) -> None:
        self.parameters = parameters
        self.dtype = weights_dtype
        self.activations = activations
        self.slower = slower  # for which of `CLASSES` torch is faster; empty: for none
        self.in_use = True  # until it is undone: what wraps the module's forward pass may still call this
        self._pack()
        with _lock:
            self.number = next(_numbers)
            _NUMBERED[self.number] = self

    def __reduce__(self) -> Any:
        args = self.parameters, self.dtype, self.activations, self.slower
        return FrozenLinear, args, {"in_use": self.in_use}

    def _pack(self) -> None:
        self.weight, self.bias = self._current()
        state = _state(self.weight), _state(self.bias)
        self.packed = ops.pack(array_of(self.weight.detach()), dtype=self.dtype)
        self.array = None if self.bias is None else array_of(self.bias.detach().float())
        # Kept, so that memory that is assigned later never has the address that `state` knows.
        self.memory = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self.state: Any = state

    def _current(self) -> tuple[Any, Any]:
        """The weight and the bias that the module has now."""
        try:
            return self.parameters["weight"], self.parameters["bias"]
        except KeyError:
            raise RuntimeError(
                "optimize(): the weight or bias of an nn.Linear is no longer its parameter; expected a"
                " model that is pruned or parametrized before it is optimized"
            ) from None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with weights, for the module's `forward`."""
        if torch.jit.is_scripting():  # what torch.jit.script compiles, where `self` is the module
            return torch_linear(input, self.weight, self.bias)
        else:
            return self._forward(input)

    def _forward(self, x: Any) -> Any:
        weight, bias = self._current()
        if not self._covers(x, weight, bias):
            return torch_linear(x, weight, bias)
        return _linear_op(x, self.number) if torch.compiler.is_compiling() else self.computed(x)

    def _covers(self, x: Any, weight: Any, bias: Any) -> bool:
        if not (self.in_use and isinstance(x, torch.Tensor) and self._packs(weight, bias)):
            return False
        compiling = torch.compiler.is_compiling()
        if not compiling:
            if type(x) is not torch.Tensor or traced() or x.is_neg():
                return False
            count, features = x.numel(), weight.shape[-1]
            if self.slower and self.slower[(count > features) + (count > 64 * features)]:
                return False
        dtype = weight.dtype
        if x.dtype is not dtype or (bias is not None and bias.dtype is not dtype) or dtype not in TAKEN:
            return False  # an error of torch's, mostly
        if not (x.is_cpu and weight.is_cpu) or x.is_nested or torch.is_autocast_enabled("cpu"):
            return False
        if torch.compiler.is_exporting():
            return False  # numbers of linear maps are those of this process
        if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and x.requires_grad):
            return False  # derivatives are torch's
        if not (x.layout is weight.layout is torch.strided and x.ndim and x.shape[-1:] == weight.shape[1:]):
            return False  # mostly an error, too, as a bias of another length
        return bias is None or bias.shape == weight.shape[:1]

    def _packs(self, weight: Any, bias: Any) -> bool:
        """Whether the module's parameters are those that are packed, or may be packed instead."""
        compiling = torch.compiler.is_compiling()
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            if not compiling:
                self.state = None  # who thaws it may write by a fused optimizer, which does not count that
            return False
        if weight is self.weight and bias is self.bias:
            return True
        # load_state_dict(assign=True) leaves parameters; functional_call may lend any tensors for one call.
        return not compiling and all(x is None or type(x) is torch.nn.Parameter for x in (weight, bias))

    def computed(self, x: Any) -> Any:
        """The product, of an x that is covered."""
        weight, bias = self._current()
        if weight is not self.weight or bias is not self.bias or self.state != (_state(weight), _state(bias)):
            self._pack()
        result = ops.linear(
            array_of(x), self.packed, self.array, activations=self.activations, num_threads=num_threads()
        )
        return tensor_of(result)


def _state(x: Any) -> tuple[int, int] | None:
    """Key that differs after x has been written to, or has got other memory."""
    return None if x is None else (0 if x.is_inference() else x._version, x.data_ptr())


# Operators take no objects, so that a compiled graph names its linear map by a number, given only once.
_NUMBERED: WeakValueDictionary[int, FrozenLinear] = WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def _numbered(x: Any, number: int) -> Any:
    return _NUMBERED[number].computed(x)


def _fake(x: Any, number: int) -> Any:
    return x.new_empty((*x.shape[:-1], _NUMBERED[number].weight.shape[0]))


@named("linear")
def _check(x: Any, number: int) -> None:
    linear_args(x, _NUMBERED[number].packed, None, None, None, None, False, None, None, None)


_linear_op = define("frozen_linear(Tensor x, int number) -> Tensor", _numbered, _fake, _check)
