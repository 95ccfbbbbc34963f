"""Time deformable attention beside transformers' own function on torch: in one process, in turn.

    python -m bench.deformable [--threads N] [--rounds N]

Sizes are those of Deformable DETR for an image of 800 x 800: 4 levels, 8 heads of 32, 4 points on a level.
The encoder has a query for each place, the decoder has 300. Times are medians of rounds, as ratios are.
It is float32: in 16 bits torch's own may read what is not its own, and end the process.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench.clock import rounds_of

LEVELS = [(100, 100), (50, 50), (25, 25), (13, 13)]
HEADS, HEAD_DIM, POINTS = 8, 32, 4
SPREAD = 0.03  # of points around their query, as a share of the image


def arguments(queries: int | None) -> tuple[Any, ...]:
    """Arguments of transformers' module; without a number, a query stands at the centre of each place."""
    import torch

    rng = np.random.default_rng(0)
    grids = [np.meshgrid((np.arange(w) + 0.5) / w, (np.arange(h) + 0.5) / h) for h, w in LEVELS]
    at = np.concatenate([np.stack(grid, axis=-1).reshape(-1, 2) for grid in grids])
    at = at if queries is None else rng.uniform(0, 1, (queries, 2))
    points = (len(at), HEADS, len(LEVELS), POINTS)
    locations = at[:, None, None, None] + SPREAD * rng.standard_normal((*points, 2))
    weights = torch.from_numpy(rng.standard_normal(points)).flatten(2).softmax(-1).view(points)
    value = rng.standard_normal((sum(h * w for h, w in LEVELS), HEADS, HEAD_DIM))
    tensors = (torch.from_numpy(value), torch.from_numpy(locations), weights)
    value, places, weights = (x[None].float() for x in tensors)
    return value, torch.tensor(LEVELS), LEVELS, None, places, weights, 64


def forward(part: Any, given: Any) -> Any:
    """Call it without gradients."""
    import torch

    with torch.inference_mode():
        return part(*given)


def forward_and_backward(part: Any, given: Any) -> Any:
    """Gradients of the sum of what it returns."""
    import torch

    wanted = [given[i].detach().requires_grad_() for i in (0, 4, 5)]
    value, places, weights = wanted
    out = part(value, *given[1:4], places, weights, *given[6:])
    return torch.autograd.grad(out.sum(), wanted)


def main() -> None:
    """Print a line for each size."""
    import torch
    from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention

    import fastattn
    from fastattn.torch import register

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fastattn.set_num_threads(options.threads)
    part = MultiScaleDeformableAttention()
    theirs = partial(MultiScaleDeformableAttention.forward, part)
    with register(measure=False):
        for name, queries in (("decoder", 300), ("encoder", None)):
            given = arguments(queries)
            for title, how in (("forward", forward), ("forward and backward", forward_and_backward)):
                times = rounds_of(options.rounds, partial(how, theirs, given), partial(how, part, given))
                before, now = (median(each[i] for each in times) * 1e3 for i in (0, 1))
                gain = median(each[0] / each[1] for each in times)
                print(f"{name:<9}{title:<22}{before:9.1f} ms {now:8.2f} ms {gain:7.2f}x", flush=True)


if __name__ == "__main__":
    main()
