"""Measure a step of AdamW, in milliseconds: fastattn's with clipping and packing, and torch's.

    python -m bench.optimizer [--layers 6] [--width 384]
    python -m bench.optimizer --model FOLDER

torch runs in a process of its own, where it is installed. With `--model`, the folder of an encoder, it is a
step of fine-tuning, merging and packing included: of adapters, of one matrix, of everything.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np

from bench.clock import Call, rounds_of, shortest
from fastattn import get_num_threads, models, train
from fastattn._bench.harness import CONTEXT
from fastattn.layers import LayerNorm, TransformerEncoder, TransformerEncoderLayer

TEXTS = (["the cat sat on the mat", "a dog ran"], ["a mat", "the tree"])


def median(call: Call) -> str:
    """Milliseconds of a call, in words."""
    return f"{1e3 * np.median(rounds_of(15, call)):.1f}"


def encoder(layers: int, width: int) -> Any:
    stack = [TransformerEncoderLayer(width, 6, 4 * width, norm_first=True, rng=i) for i in range(layers)]
    return TransformerEncoder(stack, LayerNorm(width))


def ours(layers: int, width: int) -> None:
    layer = encoder(layers, width)
    optimizer = train.AdamW(layer)
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(x.shape, np.float32) for name, x in optimizer.parameters.items()}
    print(f"{sum(x.size for x in grads.values()):,} parameters")
    print(f"fastattn: packing {median(lambda: layer.load_state_dict(optimizer.parameters))}")
    print(f"fastattn: step, with both {median(lambda: optimizer.step(grads, max_norm=1.0))}")
    plain = train.AdamW({name: x.copy() for name, x in optimizer.parameters.items()})
    print(f"fastattn: step of plain arrays, with the norm {median(lambda: plain.step(grads, max_norm=1.0))}")


def theirs(layers: int, width: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in encoder(layers, width).state_dict().values()]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    print(f"torch: clipping {median(lambda: torch.nn.utils.clip_grad_norm_(tensors, 1.0))}")
    for name, fused in (("step", False), ("fused step", True)):
        print(f"torch: {name} {median(torch.optim.AdamW(tensors, fused=fused).step)}", flush=True)


def tuning(folder: str) -> None:
    """The shortest of several steps of fine-tuning."""
    model: Any = models.load(folder)
    matrix = max(name for name, x in model.state_dict().items() if x.ndim == 2)
    kinds: dict[str, dict[str, Any]] = {"adapters of rank 8": {"rank": 8}, matrix: {"targets": matrix}}
    for what, options in {**kinds, "everything": {}}.items():
        tuned = train.ContrastiveTuning(model, **options)
        optimizer, (_, grads) = train.AdamW(tuned, lr=1e-4), tuned.loss(TEXTS)
        (best,) = shortest(lambda step=optimizer.step, grads=grads: step(grads))  # type: ignore[misc]
        print(f"{what}: {1e3 * best:.1f}")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--model", help="folder of an encoder to fine-tune")
    args = parser.parse_args()
    if args.model:
        tuning(args.model)
        return
    ours(args.layers, args.width)
    if find_spec("torch"):
        sys.stdout.flush()
        with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
            pool.submit(theirs, args.layers, args.width, get_num_threads()).result()


if __name__ == "__main__":
    main()
