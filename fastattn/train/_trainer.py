"""The training loop: batches, loss and gradients, steps, and a run that can be interrupted and resumed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.errors import wrong_type
from fastattn._args.types import FLOAT64
from fastattn._args.values import choice, flag, integer, number, short
from fastattn.train import _files
from fastattn.train._batches import rng_state, set_rng_state
from fastattn.train._gradients import Sum, require_known
from fastattn.train._interrupts import interrupts_wait
from fastattn.train._optimizer import NONFINITE, Optimizer
from fastattn.train._schedule import Schedule
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.types import Array

    Loss = Callable[[Any], tuple[float, Mapping[str, Array]]]


class Step(NamedTuple):
    """What one step of `Trainer.fit` did."""

    step: int  # how many there have been, with this one
    loss: float  # the mean over its batches, before the step
    factor: float  # of the learning rate
    grad_norm: float  # before clipping; not finite if the step was skipped
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step by the time it took."""
        return self.tokens / max(self.seconds, 1e-9)


class Trainer:
    """Trains: takes batches, adds up gradients, clips them, steps, changes the learning rate.

    Parameters
    ----------
    loss : callable
        ``loss(batch)`` returns the mean loss of a batch, a number, and its gradients by the names of the
        optimizer's parameters.
    optimizer : AdamW or SGD
    batches : iterable
        Begun anew at its end. The place in it is saved and resumed if it has ``state_dict`` and
        ``load_state_dict``, as `Batches` has.
    schedule : callable, optional
        ``schedule(step)`` is the factor of the learning rate after that many steps: a `Schedule`.
    accumulate : int, default 1
        Batches of a step. Its gradients are the means of theirs.
    max_norm, nonfinite
        As in the optimizer's ``step``. A loss that is not finite counts as such a gradient.
    rng : Generator, optional
        One that `loss` draws from, so that its state is saved, too.
    tokens : callable, optional
        ``tokens(batch)`` is how many tokens a batch has, for the speed. By default, the tokens of all
        texts that `loss` gave to the ``loss`` of the optimizer's `ContrastiveTuning`, `ClassifierTuning` or
        `NextTokenTuning`; if it gave none, the number of elements of the batch's first array.

    Attributes
    ----------
    steps : int
        How many steps there have been. Skipped ones count here, and not in ``optimizer.steps``.
    """

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
        func = "Trainer"
        for name, function in (("loss", loss), ("schedule", schedule), ("tokens", tokens)):
            if not callable(function) and (function is not None or name == "loss"):
                raise wrong_type(func, name, function, "a function")
        if not isinstance(optimizer, Optimizer):
            raise wrong_type(func, "optimizer", optimizer, "an AdamW or an SGD")
        if not isinstance(batches, Iterable):
            raise wrong_type(func, "batches", batches, "an iterable of batches")
        if rng is not None and not isinstance(rng, np.random.Generator):
            raise wrong_type(func, "rng", rng, "a numpy.random.Generator")
        self.loss, self.optimizer, self.batches = loss, optimizer, batches
        self.schedule = Schedule() if schedule is None else schedule
        self.accumulate = integer(func, "accumulate", accumulate, 1)
        self.max_norm = (
            None if max_norm is None else number(func, "max_norm", max_norm, FLOAT64, positive=True)
        )
        self.nonfinite = choice(func, "nonfinite", nonfinite, NONFINITE)
        self.rng = rng
        self.steps = 0
        self._tokens = self._default_tokens if tokens is None else tokens
        self._iterator: Iterator[Any] | None = None
        self._sum = Sum()
        self._place = self._where()

    def fit(
        self,
        num_steps: int,
        *,
        callback: Callable[[Step], bool | None] | None = None,
        log_every: int | None = None,
        show_progress_bar: bool | None = None,
    ) -> list[Step]:
        """Train until there have been `num_steps` steps, with those of earlier calls.

        Parameters
        ----------
        num_steps : int
        callback : callable, optional
            Called with each `Step` after it; training ends if it returns True. It may save the run.
        log_every : int, optional
            Print the loss and the speed of so many steps behind them.
        show_progress_bar : bool, optional
            Whether to show one, by tqdm; by default not.

        Returns
        -------
        list of Step
            Those of this call.

        Raises
        ------
        FloatingPointError
            If the loss or a gradient is not finite, unless `nonfinite` is "skip".
        KeyboardInterrupt
            After Ctrl-C. The weights are those after some whole step, as are the place in `batches` and the
            state of `rng`: ``fit`` or ``save`` may follow.
        """
        func = "Trainer.fit"
        last = integer(func, "num_steps", num_steps, 0)
        every = None if log_every is None else integer(func, "log_every", log_every, 1)
        if callback is not None and not callable(callback):
            raise wrong_type(func, "callback", callback, "a function")
        progress = show_progress_bar is not None and flag(func, "show_progress_bar", show_progress_bar)
        done: list[Step] = []
        with ExitStack() as stack:
            bar = stack.enter_context(_bar(func, last, self.steps)) if progress else None
            while self.steps < last:
                with self._whole():
                    step = self._step(func)
                if step is None:
                    break
                done.append(step)
                if every and step.step % every == 0:
                    _print(done[-every:], last)
                if bar is not None:
                    bar.set_postfix(loss=f"{step.loss:.4f}", tokens=f"{step.tokens_per_second:,.0f}/s")
                    bar.update()
                if callback is not None and callback(step):
                    break
        return done

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
        batches: Any = self.batches
        if _has_place(batches):
            place["batches"] = batches.state_dict()
        return place

    def _go(self, place: Mapping[str, Any]) -> None:
        if "batches" in place:
            self.batches.load_state_dict(place["batches"])  # type: ignore[attr-defined]
            self._iterator = None
        if "rng" in place and self.rng is not None:  # last: they may share it
            set_rng_state("Trainer", self.rng, place["rng"])

    def _next(self) -> Any:
        """The next batch; None if there is none even in a new round."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.batches)
            for batch in self._iterator:
                return batch
            self._iterator = None
        return None

    def _step(self, func: str) -> Step | None:
        begin, losses, tokens = time.perf_counter(), [], 0
        grads: Mapping[str, Array] = {}
        layer = self.optimizer.layer
        for i in range(self.accumulate):
            batch = self._next()
            if batch is None:
                return None
            if isinstance(layer, Tuning):
                layer._num_tokens = 0
            returned = self.loss(batch)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError(
                    f"{func}(): loss returned {short(returned)}; expected a loss and its gradients"
                )
            losses.append(_number(func, returned[0]))
            tokens += self._tokens(batch)
            grads = returned[1]
            if self.accumulate > 1:
                require_known(func, grads, self.optimizer.parameters)
                self._sum.add(func, grads, self.optimizer._trained, first=i == 0)
                grads = self._sum.total
        loss = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        factor, norm = float(self.schedule(self.steps)), math.nan
        if not math.isfinite(loss) and self.nonfinite == "raise":
            came = next(x for x in losses if not math.isfinite(x))
            raise FloatingPointError(
                f"{func}(): the loss is {came} at step {self.steps + 1}; expected a number"
            )
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
        layer = self.optimizer.layer
        return (layer._num_tokens if isinstance(layer, Tuning) else 0) or _tokens(batch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a safetensors file: weights, moments, step, place in the data, generators.

        The file is whole at every moment: it replaces the old one at once. A layer reads its weights alone:
        ``layer.load_state_dict(path, prefix="params.")``.

        Raises
        ------
        ImportError
            Without the safetensors package.
        OSError
            If the file cannot be written.
        """
        state, layer = self.optimizer.state_dict(), self.optimizer.layer
        values = {
            "format": _files.FORMAT,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_steps": state.pop("steps"),
            "steps": self.steps,
            "schedule": asdict(self.schedule) if isinstance(self.schedule, Schedule) else None,
            "place": self._place,
            "tuning": layer._origin() if isinstance(layer, Tuning) else None,
        }
        _files.write("Trainer.save", path, state, values)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from where `save` wrote `path`: the next steps have the bits that they would have had.

        The trainer is made as that one was, with the same loss and options. A `Schedule` is read from the
        file.

        Raises
        ------
        TypeError, ValueError
            If the file holds no run, or one of other parameters, or of adapters with another `alpha` or of
            another model. Nothing was changed then.
        FileNotFoundError
            If no file is there.
        """
        func = "Trainer.load"
        arrays, values = _files.read(func, path)
        _files.require_fit(func, path, values, type(self.optimizer).__name__)
        if isinstance(self.optimizer.layer, Tuning):
            self.optimizer.layer._require_same(func, path, values.get("tuning"))
        place = values["place"]
        wanted, given = self._where().keys(), place.keys()
        if wanted != given:
            came = ", ".join(sorted(given)) or "nothing"
            expected = ", ".join(sorted(wanted)) or "nothing"
            raise ValueError(f"{func}(): {os.fsdecode(path)} has the place of {came}; expected {expected}")
        schedule = None
        if isinstance(self.schedule, Schedule) and values["schedule"] is not None:
            try:
                schedule = Schedule(**values["schedule"])
            except TypeError as error:
                raise ValueError(f"{func}(): the schedule in {os.fsdecode(path)} is none: {error}") from error
        with interrupts_wait():
            before = self._where()
            try:
                self._go(place)
                self.optimizer.load_state_dict({**arrays, "steps": values["optimizer_steps"]})
            except BaseException:
                self._go(before)
                raise
            self.steps, self._place = values["steps"], place
            if schedule is not None:
                self.schedule = schedule


def _has_place(batches: Any) -> bool:
    return all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict"))


def _tokens(batch: Any) -> int:
    """Elements of the first array of a batch."""
    while isinstance(batch, (tuple, list, Mapping)) and len(batch):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return int(np.size(batch))


def _number(func: str, loss: Any) -> float:
    """`loss` as a float, which may be NaN or infinite."""
    if isinstance(loss, (bool, str)) or np.ndim(loss):
        raise TypeError(f"{func}(): loss returned {short(loss)} as the loss; expected a number")
    return float(loss)


def _print(steps: list[Step], last: int) -> None:
    loss = math.fsum(step.loss for step in steps if math.isfinite(step.loss)) / len(steps)
    speed = sum(step.tokens for step in steps) / max(1e-9, sum(step.seconds for step in steps))
    print(f"step {steps[-1].step} of {last}: loss {loss:.4f}, {speed:,.0f} tokens/s")


def _bar(func: str, total: int, done: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(f"{func}(): a progress bar needs the tqdm package: pip install tqdm") from error
    return tqdm(total=total, initial=done, unit=" steps")
