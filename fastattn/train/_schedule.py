"""Schedules of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastattn._args.errors import named
from fastattn._args.values import choice, integer
from fastattn.train._checks import rate

KINDS = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Schedule:
    """Factor of the learning rate by step, as in ``Schedule("cosine", 1000, warmup=50)(step)``.

    Parameters
    ----------
    kind : {"constant", "cosine", "linear"}
        Curve of the factor from 1 to `final`.
    num_steps : int, optional
        Step from which on the factor is `final`; not needed for "constant".
    warmup : int, default 0
        Linear warm-up steps, with the factors ``1 / warmup``, ``2 / warmup`` and so on to 1.
    final : float, default 0
        Last factor of "cosine" and "linear".
    """

    kind: str = "constant"
    num_steps: int | None = None
    warmup: int = 0
    final: float = 0.0

    @named("Schedule")
    def __post_init__(self) -> None:
        choice("kind", self.kind, KINDS)
        warmup, num_steps = integer("warmup", self.warmup, 0), self.num_steps
        if num_steps is not None or self.kind != "constant":
            num_steps = integer("num_steps", num_steps, warmup + 1)
        final = rate("final", self.final)
        if final and self.kind == "constant":
            raise ValueError(f"(): final is {final} for kind 'constant', which stays 1; expected none")
        for name, value in (("warmup", warmup), ("num_steps", num_steps), ("final", final)):
            object.__setattr__(self, name, value)  # Python's numbers, whose names a run's file compares

    @named("Schedule")
    def __call__(self, step: int) -> float:
        """Return the factor of the step after `step` steps."""
        step = integer("step", step, 0)
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant" or self.num_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup) / (self.num_steps - self.warmup))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * left
