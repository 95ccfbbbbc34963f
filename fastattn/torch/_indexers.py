"""Indexers of models: their scores are never made, but for those that no kernel here knows.

An indexer multiplies queries with keys, takes the ReLU, weighs heads, masks, and looks for the largest. While
its `forward` runs, the product is a promise, which remembers these steps. `topk` of it is `select_keys`.
Whatever else is asked of it turns it into the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fastattn._args.selection import selection_args
from fastattn._engine import dispatch
from fastattn.torch._measure import gains
from fastattn.torch._tensors import array_of, num_threads, tensor_of

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_RELU = (torch.nn.functional.relu, torch.relu, torch.Tensor.relu)
_LEFT_OUT: dict[str, Any] = {
    **dict.fromkeys(("k_scale", "q_offset", "kv_lengths", "backend")),
    **{"causal": False, "block_size": 1, "first": 0, "last": 0},
}
_SAMPLE, _ROWS = 64, 64  # queries of a measurement, the last ones; and of a mask that is looked at


def with_promises(own: Callable[..., Any], measures: Callable[[], bool]) -> Callable[..., Any]:
    """Make `own`, the `forward` of an indexer, one that selects without all scores."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), _Promising(measures()):  # numbers of keys have no gradient
            result = own(*args, **kwargs)
        return tree_map(lambda x: x.tensor() if type(x) is _Scores else x, result)

    return forward


def _select(q: Any, k: Any, top_k: int, weights: Any, ends: Any) -> Any:
    """Numbers (batch, len_q, top_k) of the first `ends` keys; q, k and weights are those of `_Scores`."""
    args = selection_args(
        array_of(q.transpose(1, 2)),
        np.ascontiguousarray(array_of(k.transpose(1, 2)))[:, None],
        top_k,
        weights=array_of(weights[:, :, 0].transpose(1, 2)),
        activation="relu",
        num_threads=num_threads(),
        **_LEFT_OUT,
    )
    args.attention.row_end = np.ascontiguousarray(array_of(ends)[:, None])
    dispatch.run(args)
    return tensor_of(args.attention.result[:, 0])


class _Promising(TorchFunctionMode):  # type: ignore[misc]
    """Products of queries (batch, len_q, heads, dim) with keys (batch, 1, dim, keys) are promises."""

    def __init__(self, measures: bool):
        super().__init__()
        self.measures = measures

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs and all(map(_is_plain, args)):
            q, k = args
            fits = q.ndim == k.ndim == 4 and k.shape[:3] == (q.shape[0], 1, q.shape[-1])
            if fits and q.numel() and k.numel():
                return _Scores(self.measures, q, k[:, 0])
        return func(*args, **(kwargs or {}))


def _is_plain(x: Any) -> bool:
    tracked = torch.is_grad_enabled() and getattr(x, "requires_grad", False)
    plain = type(x) is torch.Tensor and x.is_cpu and x.dtype is torch.float32
    return plain and not tracked and not torch.is_autocast_enabled("cpu")


class _Scores:
    """Scores that nobody has computed: of heads, and with `weights` their sums, (batch, len_q, keys)."""

    def __init__(self, measures: bool, q: Any, k: Any, **steps: Any):
        self.measures, self.q, self.k, self.steps = measures, q, k, steps
        self.made: Any = None  # the tensor, once somebody has asked for it

    def _with(self, **step: Any) -> _Scores:
        return _Scores(self.measures, self.q, self.k, **{**self.steps, **step})

    def _has(self, *steps: str) -> bool:
        """Whether these are the steps so far, and it is no tensor yet."""
        return self.made is None and set(self.steps) - {"factor", "hidden"} == set(steps)

    def tensor(self) -> Any:
        """The scores, computed as the model says; the same tensor ever after."""
        if self.made is None:
            self.made = self._computed()
        return self.made

    def _computed(self) -> Any:
        scores = torch.einsum("bshd,bdt->bsht", self.q, self.k) * self.steps.get("factor", 1.0)
        scores = scores.relu() if "relu" in self.steps else scores
        if "weights" in self.steps:
            scores = torch.einsum("bsoh,bsht->bsot", self.steps["weights"], scores)
        scores = scores * self.steps["weighed"] if "weighed" in self.steps else scores
        scores = scores.squeeze(-2) if "squeezed" in self.steps else scores
        if "allowed" in self.steps:
            scores = scores.masked_fill(~self.steps["allowed"], self.steps.get("hidden", -torch.inf))
        return scores

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RELU and len(args) == 1 and args[0]._has() and not (kwargs or {}).get("inplace"):
            return args[0]._with(relu=True)
        if func in _PRODUCTS and len(args) == 2 and type(args[1]) is cls and args[1]._has("relu"):
            weights, own = args
            if _is_plain(weights) and weights.shape == (*own.q.shape[:2], 1, own.q.shape[2]):
                return own._with(weights=weights)
        made = tree_map(lambda x: x.tensor() if type(x) is cls else x, (args, kwargs or {}))
        return func(*made[0], **made[1])

    def __mul__(self, factor: Any) -> Any:
        early = self._has() or self._has("relu")
        if isinstance(factor, float) and factor > 0 and early and "factor" not in self.steps:
            return self._with(factor=factor)
        if self._has("relu") and _is_plain(factor) and factor.shape == (*self.q.shape[:3], 1):
            return self._with(weighed=factor)
        return self.tensor() * factor

    def sum(self, *axes: Any, **named: Any) -> Any:
        """Add up, as `Tensor.sum` does."""
        if not axes and named == {"dim": 2} and self._has("relu", "weighed"):
            steps = {name: x for name, x in self.steps.items() if name != "weighed"}
            steps |= {"weights": self.steps["weighed"].mT, "squeezed": True}
            return _Scores(self.measures, self.q, self.k, **steps)
        return self.tensor().sum(*axes, **named)

    def __add__(self, mask: Any) -> Any:
        fits = isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.shape == self.shape
        if fits and self._has("relu", "weights", "squeezed"):
            allowed = mask == 0
            if (allowed | (mask <= torch.finfo(mask.dtype).min)).all():
                return self._with(allowed=allowed)
        return self.tensor() + mask

    def masked_fill(self, mask: Any, value: Any) -> Any:
        """Hide scores, as `Tensor.masked_fill` does."""
        fits = isinstance(value, float) and value <= torch.finfo(self.dtype).min and mask.ndim == 3
        if fits and mask.shape[1:] == self.shape[1:] and self._has("relu", "weights", "squeezed"):
            return self._with(allowed=(~mask).expand(self.shape), hidden=value)
        return self.tensor().masked_fill(mask, value)

    @property
    def dtype(self) -> Any:
        """Type of the tensor."""
        return self.q.dtype

    @property
    def device(self) -> Any:
        """Device of the tensor."""
        return self.q.device

    def squeeze(self, *axes: Any, **named: Any) -> Any:
        """Drop axes of length 1, as `Tensor.squeeze` does."""
        if axes == (-2,) and not named and self._has("relu", "weights"):
            return self._with(squeezed=True)
        return self.tensor().squeeze(*axes, **named)

    @property
    def shape(self) -> Any:
        """Shape of the tensor."""
        batch, len_q, heads = self.q.shape[:3]
        heads = () if "squeezed" in self.steps else (1,) if "weights" in self.steps else (heads,)
        return torch.Size((batch, len_q, *heads, self.k.shape[-1]))

    def topk(self, k: int, dim: int = -1, **named: Any) -> Any:
        """The numbers of the largest, ascending; where fewer are allowed, that of the first key once more."""
        steps = ("relu", "weights", "squeezed")
        known = self._has(*steps) or self._has(*steps, "allowed")
        ends = self._ends() if known and dim == -1 and 0 < k <= self.k.shape[-1] and not named else None
        if ends is None or not self._gains(k, ends):
            return self.tensor().topk(k, dim=dim, **named)
        return _Chosen(self, self._selected(k, ends).clamp_(min=0))

    def _ends(self) -> Any:
        """How many keys each query may select, the first ones, (batch, len_q); None if others are."""
        batch, len_q, keys = self.shape
        if "allowed" not in self.steps:
            return torch.full((batch, len_q), keys)
        allowed, places = self.steps["allowed"], torch.arange(keys)
        ends = allowed.new_empty((batch, len_q), dtype=torch.int64)
        for i in range(0, len_q, _ROWS):
            part = slice(i, i + _ROWS)
            ends[:, part] = allowed[:, part].sum(-1)
            if not torch.equal(allowed[:, part], places < ends[:, part, None]):
                return None
        return ends

    def _selected(self, k: int, ends: Any) -> Any:
        return _select(self.q, self.k, k, self.steps["weights"], ends)

    def _gains(self, k: int, ends: Any) -> bool:
        """Whether selecting gains for such calls, timed at the first of a kind."""
        if not self.measures:
            return True
        queries, keys = self.shape[1:]

        def pair() -> tuple[Callable[[], Any], Callable[[], Any]]:
            rows = slice(max(0, self.shape[1] - _SAMPLE), None)
            steps = {
                name: x[:1, rows] if name in ("weights", "allowed") else x for name, x in self.steps.items()
            }
            part = _Scores(False, self.q[:1, rows], self.k[:1], **steps)
            return lambda: part._computed().topk(k, dim=-1), lambda: part._selected(k, ends[:1, rows])

        key = _text, *self.q.shape[2:], queries.bit_length(), keys.bit_length(), k.bit_length()
        return gains(key, pair)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


class _Chosen:
    """A result of topk, whose values nobody has asked for."""

    def __init__(self, scores: _Scores, indices: Any):
        self.scores, self.indices = scores, indices

    @property
    def values(self) -> Any:
        """The scores of these keys."""
        return self.scores.tensor().gather(-1, self.indices)

    def __getitem__(self, i: int) -> Any:
        return (self.values, self.indices)[i]


def _text(heads: int, dim: int, *sizes: int) -> str:
    """What is measured, for `measured`."""
    queries, keys, selected = (2**n for n in sizes)
    return f"indexer {heads} heads of {dim} queries < {queries} keys < {keys} selected < {selected}"


def _of_tensor(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.tensor(), name)(*args)


for _name in (
    "getitem", "len", "iter", "neg", "sub", "rsub", "radd", "rmul", "truediv", "matmul", "rmatmul",
    "lt", "le", "gt", "ge", "eq", "ne", "setitem", "pow", "bool",
):  # fmt: skip
    setattr(_Scores, f"__{_name}__", _of_tensor(f"__{_name}__"))
