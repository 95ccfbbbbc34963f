"""Steps of optimizers, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from fastattn._args.types import Array, KernelArgs

UPDATE_BLOCK = 4096  # elements whose squares are summed together: FA_UPDATE_BLOCK of interface/rows.h


class Update(NamedTuple):
    """One parameter. All arrays are of one size, C-contiguous, float32 or float64, as those of all others."""

    grad: Array
    param: Array | None = None  # changed in place, as the moments are
    first: Array | None = None  # SGD's momentum buffer, or AdamW's mean of gradients
    second: Array | None = None  # AdamW's mean of their squares


@dataclass(slots=True, eq=False)
class UpdateArgs(KernelArgs):
    """One step of "sgd" or "adamw" on all `parameters`; or "squares", `sums` of those of gradients alone."""

    kind: Literal["squares", "sgd", "adamw"]
    parameters: list[Update]
    num_threads: int
    scale: float = 1.0  # of gradients
    lr: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0  # AdamW's beta1
    nesterov: bool = False
    beta2: float = 0.0
    eps: float = 0.0
    first_correction: float = 1.0  # 1 - beta1**step
    second_correction: float = 1.0  # sqrt(1 - beta2**step)
    sums: Array = field(init=False)  # float64, by block: each parameter has whole ones

    def __post_init__(self) -> None:
        blocks = sum(-(-update.grad.size // UPDATE_BLOCK) for update in self.parameters)
        self.sums = np.zeros(blocks)

    @property
    def out(self) -> Array:
        """Array that has elements if there is something to do."""
        return self.sums
