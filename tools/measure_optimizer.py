"""What a step of AdamW takes: fastattn's with clipping and packing, and torch's where it is installed.

    python tools/measure_optimizer.py [--layers 6] [--width 384]

torch runs in a process of its own. All numbers are milliseconds, medians.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np


def median(function, rounds=15):
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times)[rounds // 2]


def state_of(layers, width):
    from fastattn.layers import LayerNorm, TransformerEncoder, TransformerEncoderLayer

    stack = [TransformerEncoderLayer(width, 6, 4 * width, norm_first=True, rng=i) for i in range(layers)]
    return TransformerEncoder(stack, LayerNorm(width))


def ours(layers, width):
    from fastattn import train

    layer = state_of(layers, width)
    optimizer = train.AdamW(layer)
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(x.shape, np.float32) for name, x in optimizer.parameters.items()}
    print(f"{sum(x.size for x in grads.values()):,} parameters")
    print(f"fastattn: norm {median(lambda: train.grad_norm(grads)):.1f}")
    print(f"fastattn: packing {median(lambda: layer.load_state_dict(optimizer.parameters)):.1f}")
    print(f"fastattn: step, with both {median(lambda: optimizer.step(grads, max_norm=1.0)):.1f}")
    plain = train.AdamW({name: x.copy() for name, x in optimizer.parameters.items()})
    print(
        f"fastattn: step of plain arrays, with the norm {median(lambda: plain.step(grads, max_norm=1.0)):.1f}"
    )


def theirs(layers, width):
    import torch

    from fastattn import get_num_threads

    torch.set_num_threads(get_num_threads())
    state = state_of(layers, width).state_dict()
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in state.values()]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    print(f"torch: clipping {median(lambda: torch.nn.utils.clip_grad_norm_(tensors, 1.0)):.1f}")
    for name, options in (("step", {}), ("fused step", {"fused": True})):
        print(f"torch: {name} {median(torch.optim.AdamW(tensors, **options).step):.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--torch", action="store_true", help="only this one, in this process")
    args = parser.parse_args()
    if args.torch:
        theirs(args.layers, args.width)
        return
    ours(args.layers, args.width)
    if find_spec("torch"):
        sizes = ["--layers", str(args.layers), "--width", str(args.width)]
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, *sizes, "--torch"], check=True)


if __name__ == "__main__":
    main()
