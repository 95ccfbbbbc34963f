"""Steps of optimizers in NumPy: the readable twin of src/optimizer.inc.h."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastattn._args.quiet import quiet
from fastattn._args.types import Array
from fastattn._args.updates import UPDATE_BLOCK, UpdateArgs

Block = tuple[Array, Array | None, Array | None, Array | None]


@quiet
def update(args: UpdateArgs) -> None:
    """Change the parameters in place, or fill args.sums. A block at a time: it stays in the caches."""
    for i, block in enumerate(_blocks(args)):
        if args.kind == "squares":
            args.sums[i] = np.square(block[0], dtype=np.float64).sum()
        elif args.kind == "sgd":
            _sgd(args, *block)
        else:
            _adamw(args, *block)


def _blocks(args: UpdateArgs) -> Iterator[Block]:
    """Views of each parameter's blocks: grad, param, first, second."""
    for update in args.parameters:
        flat = [None if x is None else x.reshape(-1) for x in update]
        for begin in range(0, update.grad.size, UPDATE_BLOCK):
            part = slice(begin, begin + UPDATE_BLOCK)
            grad, param, first, second = (None if x is None else x[part] for x in flat)
            assert grad is not None
            yield grad, param, first, second


def _adamw(
    args: UpdateArgs, grad: Array, param: Array | None, first: Array | None, second: Array | None
) -> None:
    assert param is not None
    assert first is not None
    assert second is not None
    lane = grad.dtype.type
    grad = grad * lane(args.scale)
    first += (grad - first) * lane(1 - args.momentum)
    second *= lane(args.beta2)
    second += grad * lane(1 - args.beta2) * grad
    param *= lane(1 - args.lr * args.weight_decay)
    divisor = np.sqrt(second) / lane(args.second_correction) + lane(args.eps)
    param -= lane(args.lr / args.first_correction) * first / divisor


def _sgd(
    args: UpdateArgs, grad: Array, param: Array | None, first: Array | None, second: Array | None
) -> None:
    assert param is not None
    lane = grad.dtype.type
    step = grad * lane(args.scale) + lane(args.weight_decay) * param
    if first is not None:
        first *= lane(args.momentum)
        first += step
        step = step + lane(args.momentum) * first if args.nesterov else first
    param -= lane(args.lr) * step
