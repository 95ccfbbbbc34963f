"""Fine-tuning of models that `fastattn.models.load` has read: which tensors change; decoders."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_shape
from fastattn._args.grad_types import OuterArgs
from fastattn._args.types import FLOAT32, Array, Ints
from fastattn._args.values import as_array, generator, integer, integers, number, several, short
from fastattn._engine import dispatch
from fastattn._engine.settings import get_num_threads
from fastattn._safetensors import header
from fastattn.grad._linear import TRAINED
from fastattn.layers._state import Parameter, checked_state, constant, reader
from fastattn.models import Decoder, Encoder
from fastattn.models._model import pad
from fastattn.models._parameters import TunedModel
from fastattn.train._checks import matching
from fastattn.train._interrupts import interrupts_wait

_DOWN, _UP = ".lora_a", ".lora_b"
KEY = "fastattn.train"  # in the header of a run's file


class Tuning:
    """Base of tunings: a model with tensors, or low-rank adapters, that an optimizer changes.

    `ContrastiveTuning` documents the parameters.
    """

    @named("{cls}")
    def __init__(
        self,
        model: Any,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        targets: str | Sequence[str] = "*",
        rng: np.random.Generator | int = 0,
        **unknown: Any,
    ):
        if unknown:
            known = (signature(kind).parameters.values() for kind in (type(self), Tuning))
            names = dict.fromkeys(x.name for each in known for x in each if x.kind is x.KEYWORD_ONLY)
            raise TypeError(f"(): {next(iter(unknown))} is not known; expected {', '.join(names)}")
        self._require(model)
        if model.weights_dtype not in TRAINED:
            came = f"model has weights_dtype {model.weights_dtype!r}, which has no gradients"
            raise ValueError(f"(): {came}; expected {', '.join(TRAINED)}")
        if not model.has_gradients:
            expected = "one of another type, as docs/training.md says"
            raise ValueError(f"(): model is {model.model_type}, which has no gradients; expected {expected}")
        self._weights = TunedModel(model)
        self._base = dict(self._weights.tensors)
        chosen = matching("targets", targets, self._base)
        self.rank = None if rank is None else integer("rank", rank, 1)
        self._parameters: dict[str, Array] = {}
        self._adapted: list[str] = []
        self.alpha: float | None = None
        self._factor = 1.0
        if self.rank is None:
            if alpha is not None:
                raise ValueError(f"(): alpha is {short(alpha)}, and rank is None; expected a rank")
            self._parameters = {name: x for name, x in self._base.items() if name in chosen}
        else:
            self.alpha = 2.0 * self.rank if alpha is None else number("alpha", alpha, FLOAT32, positive=True)
            self._factor, source = self.alpha / self.rank, generator("rng", rng)
            maps = self._weights.maps()
            self._adapted = [name for name in self._base if name in chosen and name in maps]
            if not self._adapted:
                expected = "one that fits the weight of a linear map"
                raise ValueError(f"(): targets is {short(targets)}; expected {expected}")
            for name in self._adapted:
                rows, columns = self._base[name].shape
                if self.rank > min(rows, columns):
                    expected = f"at most {min(rows, columns)}, as {name} is ({rows}, {columns})"
                    raise ValueError(f"(): rank is {self.rank}; expected {expected}")
                down = source.standard_normal((self.rank, columns)) / columns**0.5
                self._parameters[name + _DOWN] = down.astype(self._base[name].dtype)
                self._parameters[name + _UP] = np.zeros((rows, self.rank), self._base[name].dtype)
        self._tokens = 0  # that losses were given since a trainer took them

    def _take_tokens(self) -> int:
        """Number of tokens that losses were given since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    @cached_property
    def _checksum(self) -> str:
        """CRC of the frozen tensors; a run loads only onto the same ones.

        It is the same for all types that the model computes in.
        """
        crc = 0
        for name in sorted(self._base.keys() - self._parameters.keys()):
            tensor = np.ascontiguousarray(self._base[name], np.float32)
            crc = zlib.crc32(tensor.data, zlib.crc32(name.encode(), crc))
        return f"{crc:08x}"

    def _run_values(self) -> dict[str, Any]:
        """Values that a run must share with one that continues it, beside the parameters: for JSON."""
        return {"rank": self.rank, "alpha": self.alpha, "checksum": self._checksum}

    def _require_same(self, path: Any, given: Any) -> None:
        """Raise unless `given` are the `_run_values` of a run like this one."""
        where, own, kind = os.fsdecode(path), self._run_values(), type(self).__name__
        if not isinstance(given, dict) or given.keys() != own.keys():
            raise ValueError(f"(): {where} holds no fine-tuning; expected one of {kind}")
        for name in ("rank", "alpha"):
            if given[name] != own[name]:
                raise ValueError(f"(): the {name} in {where} is {short(given[name])}; expected {own[name]}")
        if given["checksum"] != own["checksum"]:
            came = f"is of a model whose frozen tensors' checksum is {short(given['checksum'])}"
            expected = f"{own['checksum']!r}, that of the model given to {kind}"
            raise ValueError(f"(): {where} {came}; expected {expected}")

    _kind: ClassVar[type[Any]]  # of the model

    def _require(self, model: Any) -> None:
        """Raise unless `model` can be trained so."""
        if not isinstance(model, self._kind):
            article = "an" if self._kind is Encoder else "a"
            came = f"model is of type {type(model).__name__}"
            raise TypeError(f"(): {came}; expected {article} {self._kind.__name__}")

    @property
    def model(self) -> Any:
        """The model as it is now, adapters merged; later steps do not change it.

        The first access after a step copies the trained tensors for its ``state_dict``. The next step
        allocates new weights, which later steps overwrite.
        """
        return self._weights.snapshot({*self._parameters, *self._adapted})

    @property
    def _model(self) -> Any:
        """The model that losses compute with."""
        return self._weights.current

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the trained tensors or adapters, and of the parameters of a head, by name."""
        return {name: x.copy() for name, x in self._parameters.items()}

    @named("{cls}.load_state_dict")
    def load_state_dict(
        self, state_dict: Mapping[str, Any] | str | os.PathLike[str], *, prefix: str = ""
    ) -> None:
        """Load what `state_dict` returned, of a tuning with the same options, and pack the model again.

        An optimizer's next step starts at these weights; its moments stay.

        Parameters
        ----------
        state_dict : mapping of str to array_like, or path
            Arrays of any floating type. Or a safetensors file (requires the safetensors package): with
            ``prefix="params."`` one of ``Trainer.save``.
        prefix : str, default ""
            Read only names that start with it, and remove it.

        Raises
        ------
        TypeError, ValueError
            If names are missing or unknown, or arrays do not fit (one message lists all), or the file is of a
            run with another `rank`, `alpha` or model. Nothing was changed.
        FileNotFoundError
            If `state_dict` is a path, and no file is there.

        Notes
        -----
        Mappings, and files that ``Trainer.save`` did not write, contain neither `alpha` nor a checksum of the
        model: both must be the same.
        """
        known = {
            name: (Parameter(x.shape, constant(0.0)), x.dtype.name) for name, x in self._parameters.items()
        }
        with ExitStack() as stack:
            names, read, file = reader(state_dict, prefix, stack)
            if file is not None:
                path: Any = state_dict
                values = header(path, file, KEY)
                if isinstance(values, dict):
                    self._require_same(path, values.get("tuning"))
            arrays = checked_state(known, names, read, prefix)
        with interrupts_wait(), np.errstate(all="ignore"):  # what is not finite is refused
            before = self.state_dict()
            try:
                self._set(arrays)
            except BaseException:
                self._set(before)
                raise

    def _set(self, arrays: Mapping[str, Array]) -> None:
        for name, x in arrays.items():
            self._parameters[name][...] = x
        self._repack(self._parameters, self._parameters.keys())

    def _repack(self, arrays: Mapping[str, Array], changed: Collection[str]) -> None:
        """Pack the `arrays`, the optimizer's, whose names are `changed` into the model."""
        tensors = {name: arrays[name] for name in changed if name in self._base}
        for name in self._adapted:
            if name + _UP in changed or name + _DOWN in changed:
                up, down = arrays[name + _UP], arrays[name + _DOWN]
                merged = self._weights.tensors[name]
                over = None if merged is self._base[name] else merged  # by the step before
                tensors[name] = product(up.dtype.type(self._factor) * up, down, self._base[name], over)
        self._weights.put(tensors)

    def _own(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients of what is trained, of those of the model's tensors."""
        found = {name: grads[name] for name in self._parameters if name in self._base}
        for name in self._adapted:
            up, down = self._parameters[name + _UP], self._parameters[name + _DOWN]
            factor = up.dtype.type(self._factor)
            found[name + _DOWN] = factor * outer(up, grads[name])
            found[name + _UP] = factor * product(grads[name], down.T)
        return found


class NextTokenTuning(Tuning):
    """Train a decoder on texts: the loss is the mean cross-entropy of each next token.

    Parameters
    ----------
    model : Decoder
    rank, alpha, targets, rng
        As in `ContrastiveTuning`.
    """

    _kind = Decoder

    @named("{cls}.loss")
    def loss(self, texts: Iterable[Any]) -> tuple[float, dict[str, Array]]:
        """Compute the loss of texts, or of sequences of ids, and its gradients: for `Trainer`."""
        expected = "texts, or sequences of ids, at least one"
        given = list(several("texts", texts, expected))
        if not given:
            raise TypeError(f"(): texts is {short(texts)}; expected {expected}")
        strings = [x for x in given if isinstance(x, str)]
        if strings and len(strings) != len(given):
            raise TypeError("(): texts holds strings and ids; expected one of both")
        if not strings:
            most = self._model.vocab_size - 1
            given = [_ids(f"texts[{i}]", x, most) for i, x in enumerate(given)]
        ids, mask = pad(self._model.text.encode(strings) if strings else given)
        self._tokens += int(mask.sum())
        loss, grads = self._model.loss_and_gradients(ids, mask)
        return loss, self._own(grads)


def product(a: Array, b: Array, added: Array | None = None, out: Array | None = None) -> Array:
    """Multiply by our own kernels, whose bits depend on no number of threads: ``a @ b``, plus `added`."""
    return ops.linear(a, ops.pack(b.T), residual=added, out=out)


def outer(a: Array, b: Array) -> Array:
    """``a.T @ b``."""
    out = np.zeros((a.shape[1], b.shape[1]), a.dtype)
    args = OuterArgs(np.ascontiguousarray(a), np.ascontiguousarray(b), out, None, get_num_threads())
    if not args.empty:
        dispatch.run_grad(args)
    return out


def _ids(name: str, x: Any, most: int) -> Ints:
    """`x`, the ids of one text."""
    array = as_array(name, x)
    if array.ndim != 1:
        raise wrong_shape(name, array, "(length,)")
    return integers(name, array if array.size else array.astype(np.int64), low=0, high=most)
