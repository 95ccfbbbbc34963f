"""The training loop: batches, loss and gradients, steps, and a run that can be interrupted and resumed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import _safetensors
from fastattn._args.errors import named, wrong_type
from fastattn._args.types import FLOAT64
from fastattn._args.values import choice, flag, integer, number, short
from fastattn._engine.settings import warn
from fastattn.train import _files
from fastattn.train._batches import rng_state, set_rng_state
from fastattn.train._checks import rate
from fastattn.train._gradients import Sum, require_known
from fastattn.train._interrupts import interrupts_wait
from fastattn.train._optimizer import NONFINITE, Optimizer
from fastattn.train._progress import Step, bar, show
from fastattn.train._schedule import Schedule
from fastattn.train._source import END, KINDS, Source
from fastattn.train._tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastattn._args.types import Array

    Loss = Callable[[Any], tuple[float, Mapping[str, Array]]]


class Trainer:
    """Trains: takes batches, adds up gradients, clips them, steps, changes the learning rate.

    Parameters
    ----------
    loss : callable
        ``loss(batch)`` returns the mean loss of a batch, a number, and its gradients by the names of the
        optimizer's parameters.
    optimizer : AdamW or SGD
    batches : iterable
        Begun anew at its end, where it can be: a generator cannot. The place in it is saved and resumed if it
        has ``state_dict`` and ``load_state_dict``, as `Batches` has, or is a sequence, such as a list.
    schedule : callable, optional
        ``schedule(step)`` is the factor of the learning rate after that many steps, 0 or more: a `Schedule`.
        It stays when a run is loaded.
    accumulate : int, default 1
        Batches of a step. Its gradients are the means of theirs.
    max_norm, nonfinite
        As in the optimizer's ``step``. A loss that is not finite counts as such a gradient.
    rng : Generator, optional
        One that `loss` draws from, such as seeds of dropout: its state is saved. What else `loss` changes,
        such as a counter, is not.
    tokens : callable, optional
        ``tokens(batch)`` is how many tokens a batch has, for the speed. By default, the tokens of all
        texts that `loss` gave to the ``loss`` of the optimizer's `ContrastiveTuning`, `ClassifierTuning` or
        `NextTokenTuning`; if it gave none, the number of elements of the batch's first array.

    Attributes
    ----------
    steps : int
        How many steps there have been. Skipped ones count here, and not in ``optimizer.steps``.
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
        layer = optimizer.layer
        self._run = layer._run if isinstance(layer, Tuning) else None
        self._tokens = self._default_tokens if tokens is None else tokens
        self._sum = Sum()
        self._place = self._where()

    @property
    def batches(self) -> Iterable[Any]:
        """Batches that it was made with."""
        batches: Iterable[Any] = self._source.batches
        return batches

    @named("Trainer.fit")
    def fit(
        self,
        num_steps: int,
        *,
        callback: Callable[[Step], bool | None] | None = None,
        log_every: int | None = None,
        show_progress_bar: bool | None = None,
    ) -> list[Step]:
        """Train until there have been `num_steps` steps, with those of earlier calls, or the batches end.

        Parameters
        ----------
        num_steps : int
        callback : callable, optional
            Called with each `Step` after it; training ends if it returns True. It may save the run.
        log_every : int, optional
            Print the loss and the speed after every so many steps, and at the end. The loss is the mean of
            those that are finite. If steps were skipped, it says how many.
        show_progress_bar : bool, optional
            Whether to show one, by tqdm; by default not.

        Returns
        -------
        list of Step
            Those of this call.

        Warns
        -----
        UserWarning
            If the batches end before and cannot begin anew. Those too few for a step are not used.

        Raises
        ------
        ValueError
            If there is no batch.
        FloatingPointError
            If the loss or a gradient is not finite, unless `nonfinite` is "skip".
        KeyboardInterrupt
            After Ctrl-C. The weights are those after some whole step, as are the place in `batches`, if it
            is known, and the state of `rng`: ``fit`` or ``save`` may follow.
        """
        last = integer("num_steps", num_steps, 0)
        every = None if log_every is None else integer("log_every", log_every, 1)
        if callback is not None and not callable(callback):
            raise wrong_type("callback", callback, "a function")
        progress = show_progress_bar is not None and flag("show_progress_bar", show_progress_bar)
        done: list[Step] = []
        skipped = 0
        with ExitStack() as stack:
            drawn = stack.enter_context(bar(last, self.steps)) if progress else None
            while self.steps < last:
                with self._whole():
                    step = self._step()
                if isinstance(step, int):
                    self._require_begun(last, len(done), step)
                    break
                done.append(step)
                skipped += step.skipped
                if every and (step.step % every == 0 or step.step == last):
                    show(done[-(step.step % every or every) :], last)
                if drawn is not None:
                    speed, lost = f"{step.tokens_per_second:,.0f}/s", {"skipped": skipped} if skipped else {}
                    drawn.set_postfix(loss=f"{step.loss:.4f}", tokens=speed, **lost)
                    drawn.update()
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
        if self._run is not None:
            self._run.take_tokens()
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
        return (0 if self._run is None else self._run.take_tokens()) or _tokens(batch)

    @named("Trainer.save")
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
        state = self.optimizer.state_dict()
        values = {
            "format": _files.FORMAT,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_steps": state.pop("steps"),
            "steps": self.steps,
            "schedule": self._named_schedule(),
            "place": self._place,
            "tuning": None if self._run is None else self._run.values(),
        }
        _safetensors.write(path, state, values, _files.KEY)

    @named("Trainer.load")
    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from where `save` wrote `path`.

        The next steps have the bits that they would have had, if the trainer is made as that one was. What it
        was made with stays: loss, schedule, options, and the rates of the optimizer.

        Warns
        -----
        UserWarning
            If the file names another schedule than this trainer has, or the place in `batches` is not known:
            neither a sequence, nor with ``state_dict``. They begin anew then.

        Raises
        ------
        TypeError, ValueError
            If the file holds no run, or one of other parameters, or of adapters with another `alpha` or of
            another model. Nothing was changed then.
        FileNotFoundError
            If no file is there.
        """
        arrays, values = _safetensors.read(path, _files.KEY, "training run", _files.FORMAT)
        _files.require_fit(path, values, type(self.optimizer).__name__)
        if self._run is not None:
            self._run.require_same(path, values.get("tuning"))
        place = values["place"]
        wanted, given = self._where().keys(), place.keys() - (set() if self._source.kind else KINDS)
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
                f"Trainer.load(): {came}; it goes on with the trainer's, {now}, so not to the bit",
                UserWarning,
            )
        if self._source.kind is None:
            came = f"batches is of type {type(self.batches).__name__}, whose place is not known"
            expected = "a sequence, or batches with state_dict and load_state_dict"
            warn(
                f"Trainer.load(): {came}: it begins anew, so not to the bit; expected {expected}", UserWarning
            )

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
