"""The training loop: batches, loss and gradients, steps, and a run that can be interrupted and resumed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from fastattn import _safetensors
from fastattn._args.errors import named, wrong_type
from fastattn._args.types import FLOAT64, Array
from fastattn._args.values import choice, integer, number, short
from fastattn._engine.settings import warn
from fastattn.train._batches import END, SOURCES, Source, rng_state, set_rng_state
from fastattn.train._checks import rate
from fastattn.train._gradients import Sum, require_known
from fastattn.train._interrupts import interrupts_wait
from fastattn.train._optimizer import NONFINITE, Optimizer
from fastattn.train._schedule import Schedule
from fastattn.train._tuning import KEY, Tuning

Loss = Callable[[Any], tuple[float, Mapping[str, Array]]]

_FORMAT = 2  # of the values in a file
_VALUES: dict[str, tuple[Any, str]] = {
    "optimizer": (str, "a name"),
    "optimizer_steps": (int, "a number"),
    "steps": (int, "a number"),
    "schedule": ((str, NoneType), "a schedule's name, or null"),
    "place": (dict, "a place in the data"),
}


class Step(NamedTuple):
    """One step of `Trainer.fit`."""

    step: int  # its number, from 1 on
    loss: float  # mean over its batches, before the step
    factor: float  # of the learning rate
    grad_norm: float  # before clipping; not finite if the step was skipped
    tokens: int
    seconds: float

    @property
    def skipped(self) -> bool:
        """True if the step was skipped: loss, gradients or new weights were not finite."""
        return not math.isfinite(self.grad_norm)


class Trainer:
    """Training loop: batches, gradient accumulation, clipping, steps, schedule, and resumable runs.

    Parameters
    ----------
    loss : callable
        ``loss(batch)`` returns the mean loss of a batch, and its gradients by the names of the optimizer's
        parameters.
    optimizer : AdamW or SGD
    batches : iterable
        Restarted at its end, except a generator. Its position is saved and resumed if it has ``state_dict``
        and ``load_state_dict``, as `Batches`, or is a sequence such as a list.
    schedule : callable, optional
        ``schedule(step)`` returns the factor of the learning rate after that many steps, 0 or more: a
        `Schedule`. Loading a run does not change it.
    accumulate : int, default 1
        Batches per step, whose gradients are averaged.
    max_norm, nonfinite
        As in `AdamW.step`. A loss that is not finite counts as a gradient that is not.
    rng : Generator, optional
        Generator that `loss` draws from, such as seeds of dropout: its state is saved. Nothing else that
        `loss` changes is.
    tokens : callable, optional
        ``tokens(batch)`` counts the tokens of a batch, for the speed. By default, the tokens given to the
        ``loss`` of the optimizer's tuning; without one, the elements of the batch's first array.

    Attributes
    ----------
    steps : int
        Number of steps, with skipped ones, which ``optimizer.steps`` leaves out.
    """

    @named("Trainer")
    def __init__(
        self,
        loss: Loss,
        optimizer: Optimizer,
        batches: Iterable[Any],
        *,
        schedule: Callable[[int], float] | None = None,
        accumulate: int = 1,
        max_norm: float | None = None,
        nonfinite: str = "raise",
        rng: np.random.Generator | None = None,
        tokens: Callable[[Any], int] | None = None,
    ):
        for name, function in (("loss", loss), ("schedule", schedule), ("tokens", tokens)):
            if not callable(function) and (function is not None or name == "loss"):
                raise wrong_type(name, function, "a function")
        if not isinstance(optimizer, Optimizer):
            raise wrong_type("optimizer", optimizer, "an AdamW or an SGD")
        if not isinstance(batches, Iterable):
            raise wrong_type("batches", batches, "an iterable of batches")
        if rng is not None and not isinstance(rng, np.random.Generator):
            raise wrong_type("rng", rng, "a numpy.random.Generator")
        self.loss, self.optimizer, self._source = loss, optimizer, Source(batches)
        self.schedule = Schedule() if schedule is None else schedule
        self.accumulate = integer("accumulate", accumulate, 1)
        self.max_norm = None if max_norm is None else number("max_norm", max_norm, FLOAT64, positive=True)
        self.nonfinite = choice("nonfinite", nonfinite, NONFINITE)
        self.rng = rng
        self.steps = 0
        self._tuning = optimizer.layer if isinstance(optimizer.layer, Tuning) else None
        self._tokens = self._default_tokens if tokens is None else tokens
        self._sum = Sum()
        self._place = self._where()

    @property
    def batches(self) -> Iterable[Any]:
        """The batches."""
        batches: Iterable[Any] = self._source.batches
        return batches

    @named("Trainer.fit")
    def fit(
        self,
        num_steps: int,
        *,
        callback: Callable[[Step], bool | None] | None = None,
        log_every: int | None = None,
    ) -> list[Step]:
        """Train until `num_steps` steps are done, earlier calls included, or the batches end.

        Parameters
        ----------
        num_steps : int
        callback : callable, optional
            Called with each `Step` after it; training ends if it returns True. It may save the run.
        log_every : int, optional
            Print the mean of finite losses, the speed and skipped steps this often, and at the end.

        Returns
        -------
        list of Step
            Steps of this call.

        Warns
        -----
        UserWarning
            If the batches end and cannot restart. Batches too few for a step are dropped.

        Raises
        ------
        ValueError
            If there is no batch.
        FloatingPointError
            If the loss or a gradient is not finite, unless `nonfinite` is "skip".
        KeyboardInterrupt
            After Ctrl-C. Weights, the position in `batches`, if known, and the state of `rng` are those after
            a whole step: ``fit`` or ``save`` may follow.
        """
        last = integer("num_steps", num_steps, 0)
        every = None if log_every is None else integer("log_every", log_every, 1)
        if callback is not None and not callable(callback):
            raise wrong_type("callback", callback, "a function")
        done: list[Step] = []
        while self.steps < last:
            with self._whole():
                step = self._step()
            if isinstance(step, int):
                self._require_begun(last, len(done), step)
                break
            done.append(step)
            if every and (step.step % every == 0 or step.step == last):
                _show(done[-(step.step % every or every) :], last)
            if callback is not None and callback(step):
                break
        return done

    def _require_begun(self, last: int, done: int, left: int) -> None:
        """Warn that the batches have ended, `left` of them after the last step; raise if there was none."""
        if not done and not left:
            came = f"of type {type(self.batches).__name__} and has none for step {self.steps + 1}"
            raise ValueError(f"(): batches is {came}; expected at least one")
        unused = f", {left} left over, fewer than accumulate={self.accumulate}" if left else ""
        warn(f"Trainer.fit(): batches ended after step {self.steps} of {last}{unused}", UserWarning)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Go back to where the last whole step ended, if this one does not end."""
        before = self.steps
        try:
            yield
        except BaseException:
            if self.steps == before:
                self._go(self._place)
            raise

    def _where(self) -> dict[str, Any]:
        """The generator's state and the place in the data, as far as they can be told."""
        place: dict[str, Any] = {}
        if self.rng is not None:
            place["rng"] = rng_state(self.rng.bit_generator.state)
        return {**place, **self._source.place()}

    def _go(self, place: Mapping[str, Any]) -> None:
        self._source.go(place)
        if "rng" in place and self.rng is not None:  # last: they may share it
            set_rng_state(self.rng, place["rng"])

    def _step(self) -> Step | int:
        """A step; where the batches end before it, how many they still were."""
        begin, losses, tokens = time.perf_counter(), [], 0
        factor, norm = rate(f"schedule({self.steps})", self.schedule(self.steps)), math.nan
        grads: Mapping[str, Array] = {}
        if self._tuning is not None:
            self._tuning._take_tokens()
        for i in range(self.accumulate):
            batch = self._source.take()
            if batch is END:
                return i
            returned = self.loss(batch)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError(f"(): loss returned {short(returned)}; expected a loss and its gradients")
            losses.append(_number(returned[0]))
            if not isinstance(returned[1], Mapping):
                came = short(returned[1])
                raise TypeError(f"(): loss returned {came} as gradients; expected a mapping of names")
            tokens += self._tokens(batch)
            grads = returned[1]
            if self.accumulate > 1:
                require_known(grads, self.optimizer.parameters)
                self._sum.add(grads, self.optimizer.trained, first=i == 0)
                grads = self._sum.total
        loss = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        if not math.isfinite(loss) and self.nonfinite == "raise":
            came = next(x for x in losses if not math.isfinite(x))
            raise FloatingPointError(f"(): the loss is {came} at step {self.steps + 1}; expected a number")
        with interrupts_wait():  # weights, place and count belong together
            if math.isfinite(loss):
                norm = self.optimizer.step(
                    grads,
                    factor=factor,
                    max_norm=self.max_norm,
                    scale=1 / self.accumulate,
                    nonfinite=self.nonfinite,
                )
            self.steps += 1
            self._place = self._where()
        return Step(self.steps, loss, factor, norm, tokens, time.perf_counter() - begin)

    def _default_tokens(self, batch: Any) -> int:
        return (0 if self._tuning is None else self._tuning._take_tokens()) or _tokens(batch)

    @named("Trainer.save")
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a safetensors file: weights, moments, step, position in the data, generators.

        The file replaces an older one atomically. ``layer.load_state_dict(path, prefix="params.")`` reads a
        layer's weights alone. Requires the safetensors package.
        """
        state = self.optimizer.state_dict()
        values = {
            "format": _FORMAT,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_steps": state.pop("steps"),
            "steps": self.steps,
            "schedule": self._named_schedule(),
            "place": self._place,
            "tuning": None if self._tuning is None else self._tuning._run_values(),
        }
        _safetensors.write(path, state, values, KEY)

    @named("Trainer.load")
    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue a run that `save` wrote.

        The next steps have the same bits as without the interruption, if this trainer is built like the saved
        one. Its loss, schedule, options and rates are not loaded.

        Warns
        -----
        UserWarning
            If the file names another schedule, or if `batches` is neither a sequence nor has ``state_dict``,
            so that it restarts.

        Raises
        ------
        TypeError, ValueError
            If the file holds no run, or one with other parameters, another `alpha` or another model. Nothing
            was changed.
        FileNotFoundError
            If no file is there.
        """
        arrays, values = _safetensors.read(path, KEY, "training run", _FORMAT)
        _require_fit(path, values, type(self.optimizer).__name__)
        if self._tuning is not None:
            self._tuning._require_same(path, values.get("tuning"))
        place = values["place"]
        wanted, given = self._where().keys(), place.keys() - (set() if self._source.kind else SOURCES)
        if wanted != given:
            came = ", ".join(sorted(given)) or "nothing"
            expected = ", ".join(sorted(wanted)) or "nothing"
            raise ValueError(f"(): {os.fsdecode(path)} has the place of {came}; expected {expected}")
        with interrupts_wait():
            before = self._where()
            try:
                self._go(place)
                self._warn(path, values["schedule"])
                self.optimizer.load_state_dict({**arrays, "steps": values["optimizer_steps"]})
            except BaseException:
                self._go(before)
                raise
            self._source.anew()
            self.steps, self._place = values["steps"], self._where()

    def _warn(self, path: str | os.PathLike[str], begun: str | None) -> None:
        """Warn of what makes other steps than the run in `path` would have had. `begun`: its schedule."""
        if begun != (own := self._named_schedule()):
            then, now = (name or "a function" for name in (begun, own))
            came = f"{os.fsdecode(path)} has the schedule {then}"
            warn(
                f"Trainer.load(): {came}; it continues with the trainer's, {now}, so bits differ",
                UserWarning,
            )
        if self._source.kind is None:
            came = f"batches is of type {type(self.batches).__name__}, whose place is not known"
            expected = "a sequence, or batches with state_dict and load_state_dict"
            warn(f"Trainer.load(): {came}: it restarts, so bits differ; expected {expected}", UserWarning)

    def _named_schedule(self) -> str | None:
        return repr(self.schedule) if isinstance(self.schedule, Schedule) else None


def _tokens(batch: Any) -> int:
    """Elements of the first array of a batch."""
    while isinstance(batch, (tuple, list, Mapping)) and len(batch):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return int(np.size(batch))


def _number(loss: Any) -> float:
    """`loss` as a float, which may be NaN or infinite."""
    try:
        if isinstance(loss, (bool, str)) or np.ndim(loss):
            raise TypeError
        return float(loss)
    except (TypeError, ValueError):
        raise TypeError(f"(): loss returned {short(loss)} as the loss; expected a number") from None


def _show(steps: list[Step], last: int) -> None:
    """Print the mean of the losses that are finite, the speed, and how many steps were skipped."""
    losses = [step.loss for step in steps if math.isfinite(step.loss)]
    loss = math.fsum(losses) / len(losses) if losses else math.nan
    speed = sum(step.tokens for step in steps) / max(1e-9, sum(step.seconds for step in steps))
    skipped = sum(step.skipped for step in steps)
    end = f", {skipped} of {len(steps)} steps skipped" if skipped else ""
    print(f"step {steps[-1].step} of {last}: loss {loss:.4f}, {speed:,.0f} tokens/s{end}")


def _require_fit(path: str | os.PathLike[str], values: Any, optimizer: str) -> None:
    """Raise unless `values` are those of a run with this optimizer."""
    where = os.fsdecode(path)
    for name, (kind, expected) in _VALUES.items():
        x = values.get(name)
        if name not in values or not isinstance(x, kind) or (isinstance(x, int) and (x is True or x < 0)):
            came = f"is {short(x)}" if name in values else "is missing"
            raise ValueError(f"(): {name!r} in the header of {where} {came}; expected {expected}")
    if values["optimizer"] != optimizer:
        came = f"of the optimizer {values['optimizer']}"
        raise ValueError(f"(): {where} is {came}; expected {optimizer}")
