"""Fine-tuning of models that `fastattn.models.load` has read: which tensors change; decoders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.types import FLOAT32
from fastattn._args.values import as_array, generator, integer, integers, iterated, number, short
from fastattn.grad._linear import TRAINED
from fastattn.models import Decoder, Encoder
from fastattn.models._model import pad
from fastattn.train._patterns import matching
from fastattn.train._products import outer, product

if TYPE_CHECKING:
    from fastattn._args.types import Array, Ints

_DOWN, _UP = ".lora_a", ".lora_b"


class Tuning:
    """A model with tensors that an optimizer changes: all of them, or low-rank adapters of its matrices.

    Parameters
    ----------
    model : Encoder or Decoder
        Of `fastattn.models.load`, in a floating `weights_dtype`.
    rank : int, optional
        Train adapters of this rank in place of the tensors: ``W + alpha / rank * up @ down`` (LoRA, Hu et al.
        2021). By default the tensors themselves.
    alpha : float, optional
        By default twice the rank.
    targets : str or sequence of str, default ``"*"``
        Patterns, as of `fnmatch`: which tensors are trained; with `rank` only weights of linear maps, and no
        table of tokens, which the output layer may share.
    rng : Generator or int, default 0
        Draws ``down``; ``up`` begins as 0, so that nothing changes before the first step.

    Notes
    -----
    `model` always has the adapters merged: it computes as fast as before. The gradients of adapters are those
    of the whole matrices, projected: a step costs what training all would, its moments are small.
    """

    _num_tokens = 0  # that the loss was given since `Trainer` set it to 0

    def __init__(
        self,
        model: Any,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        targets: str | Sequence[str] = "*",
        rng: np.random.Generator | int = 0,
    ):
        func = type(self).__name__
        self._model = self._require(func, model)
        if model.weights_dtype not in TRAINED:
            came = f"model keeps its weights in {model.weights_dtype}, which has no gradients"
            raise ValueError(f"{func}(): {came}; expected {', '.join(TRAINED)}")
        self._base: dict[str, Array] = model.state_dict()
        self._state = self._base  # with what was trained
        chosen = matching(func, "targets", targets, self._base)
        self.rank = None if rank is None else integer(func, "rank", rank, 1)
        self._parameters: dict[str, Array] = {}
        self._adapted: list[str] = []
        self._factor = 1.0
        if self.rank is None:
            self._parameters = {name: x for name, x in self._base.items() if name in chosen}
        else:
            wide = 2.0 * self.rank if alpha is None else number(func, "alpha", alpha, FLOAT32)
            self._factor, source = wide / self.rank, generator(func, "rng", rng)
            maps = _maps(model)
            self._adapted = [name for name in self._base if name in chosen and name in maps]
            if not self._adapted:
                expected = "one that fits the weight of a linear map"
                raise ValueError(f"{func}(): targets is {short(targets)}; expected {expected}")
            for name in self._adapted:
                rows, columns = self._base[name].shape
                down = source.standard_normal((self.rank, columns)) / columns**0.5
                self._parameters[name + _DOWN] = down.astype(self._base[name].dtype)
                self._parameters[name + _UP] = np.zeros((rows, self.rank), self._base[name].dtype)

    @staticmethod
    def _require(func: str, model: Any) -> Any:
        if not isinstance(model, (Encoder, Decoder)):
            expected = "an Encoder or a Decoder of models.load()"
            raise TypeError(f"{func}(): model is of type {type(model).__name__}; expected {expected}")
        return model

    @property
    def model(self) -> Any:
        """The model as it is now."""
        return self._model

    def state_dict(self) -> dict[str, Array]:
        """The arrays that are trained, by name, not copied: the optimizer changes them in place."""
        return self._parameters

    def _repack(self, arrays: Mapping[str, Array], changed: Collection[str]) -> None:
        """Put those of `arrays`, the optimizer's, into the model whose names are `changed`."""
        state = {**self._state, **{name: arrays[name] for name in changed if name in self._base}}
        for name in self._adapted:
            if name + _UP in changed or name + _DOWN in changed:
                up, down = arrays[name + _UP], arrays[name + _DOWN]
                state[name] = product(up.dtype.type(self._factor) * up, down, self._base[name])
        differing = {name.removesuffix(_UP).removesuffix(_DOWN) for name in changed}
        self._model, self._state = self._model._with(state, differing), state

    def _own(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients of what is trained, of those of the model's tensors."""
        found = {name: grads[name] for name in self._parameters if name in self._base}
        for name in self._adapted:
            up, down = self._parameters[name + _UP], self._parameters[name + _DOWN]
            factor = up.dtype.type(self._factor)
            found[name + _DOWN] = factor * outer(up, grads[name])
            found[name + _UP] = factor * product(grads[name], down.T)
        return found


def _maps(model: Any) -> set[str]:
    """The names of the weights of linear maps, but for a table of tokens that is the output layer, too."""
    origins = model.origin.origins
    tokens = origins.of(model.tokens) if isinstance(model, Decoder) else ()
    names: set[str] = origins.maps() - {part.name for part in tokens}
    return names


class NextTokenTuning(Tuning):
    """A decoder that learns texts: the loss is the mean cross-entropy of each next token.

    Parameters are those of `Tuning`; the model is a `Decoder`.
    """

    def loss(self, texts: Iterable[Any]) -> tuple[float, dict[str, Array]]:
        """The loss of texts, or of sequences of ids, and its gradients: for `Trainer`."""
        func, expected = f"{type(self).__name__}.loss", "texts, or sequences of ids, at least one"
        given = [] if isinstance(texts, str) else list(iterated(func, "texts", texts, expected))
        if not given:
            raise TypeError(f"{func}(): texts is {short(texts)}; expected {expected}")
        strings = [x for x in given if isinstance(x, str)]
        if strings and len(strings) != len(given):
            raise TypeError(f"{func}(): texts holds strings and ids; expected one of both")
        if not strings:
            most = self.model.vocab_size - 1
            given = [_ids(func, f"texts[{i}]", x, most) for i, x in enumerate(given)]
        ids, mask = pad(self.model.text.encode(strings) if strings else given)
        self._num_tokens += int(mask.sum())
        loss, grads = self.model.loss_and_gradients(ids, mask)
        return loss, self._own(grads)

    @staticmethod
    def _require(func: str, model: Any) -> Any:
        if not isinstance(model, Decoder):
            raise TypeError(f"{func}(): model is of type {type(model).__name__}; expected a Decoder")
        return model


def _ids(func: str, name: str, x: Any, most: int) -> Ints:
    """`x`, the ids of one text."""
    array = as_array(func, name, x)
    if array.ndim != 1:
        raise wrong_shape(func, name, array, "(length,)")
    return integers(func, name, array if array.size else array.astype(np.int64), low=0, high=most)
