"""Reports of steps: loss, speed, a progress bar."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Step(NamedTuple):
    """Report of one step of `Trainer.fit`."""

    step: int  # how many there have been, with this one
    loss: float  # the mean over its batches, before the step
    factor: float  # of the learning rate
    grad_norm: float  # before clipping; not finite if the step was skipped
    tokens: int
    seconds: float

    @property
    def skipped(self) -> bool:
        """True if nothing was trained: loss, gradients or new weights were not finite."""
        return not math.isfinite(self.grad_norm)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step by the time it took."""
        return self.tokens / max(self.seconds, 1e-9)


def show(steps: list[Step], last: int) -> None:
    """Print the mean of the losses that are finite, the speed, and how many steps were skipped."""
    losses = [step.loss for step in steps if math.isfinite(step.loss)]
    loss = math.fsum(losses) / len(losses) if losses else math.nan
    speed = sum(step.tokens for step in steps) / max(1e-9, sum(step.seconds for step in steps))
    skipped = sum(step.skipped for step in steps)
    end = f", {skipped} of {len(steps)} steps skipped" if skipped else ""
    print(f"step {steps[-1].step} of {last}: loss {loss:.4f}, {speed:,.0f} tokens/s{end}")


def bar(total: int, done: int) -> Any:
    """A progress bar of tqdm."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("(): a progress bar needs the tqdm package: pip install tqdm") from error
    return tqdm(total=total, initial=done, unit=" steps")
