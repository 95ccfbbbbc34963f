"""Time gradients of operations, of fastattn or of torch: each in a process of its own.

    python -m bench.gradients {fastattn,torch} [--threads 2] [--dtype float32] [--only NAME]

Each time is the shortest of many, in milliseconds; GF/s where there are products. Results go to arrays that
exist, where a library can do that. Shapes are those of a step of 4,096 tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench import clock

TOKENS, WIDTH, HIDDEN, CLASSES = 4096, 384, 1536, 50257
PRODUCTS = ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (768, 3072))  # in, out


def normal(*shape: int) -> Any:
    """Random numbers, float32."""
    return clock.normal(shape, seed=len(shape))


def ours(dtype: str, threads: int) -> dict[str, Any]:
    """Calls by their names."""
    from fastattn import grad, ops
    from fastattn._args.dtypes import float_dtype
    from fastattn._args.grad_types import OuterArgs
    from fastattn._engine import dispatch

    kind, options = float_dtype(dtype), {"num_threads": threads}
    calls = {}
    for k, n in PRODUCTS:
        x, dout = normal(TOKENS, k).astype(kind), normal(TOKENS, n).astype(kind)
        weight = ops.pack(normal(n, k), dtype=dtype)
        outer = OuterArgs(dout, x, np.empty((n, k), np.float32), None, threads, pairs=dtype == "bfloat16")
        sums = OuterArgs(dout, x, outer.out, np.empty(n, np.float32), threads, pairs=outer.pairs)
        dx = np.empty_like(x)
        calls[f"dweight {k} -> {n}"] = (lambda a=outer: dispatch.run_grad(a)), 2 * TOKENS * k * n
        calls[f"dweight, dbias {k} -> {n}"] = (lambda a=sums: dispatch.run_grad(a)), 2 * TOKENS * k * n
        calls[f"dx {k} -> {n}"] = (
            lambda d=dout, w=weight, o=dx: ops.linear(d, w, transposed=True, out=o, **options),
            2 * TOKENS * k * n,
        )
    x, dout, hidden, dhidden = (normal(TOKENS, n).astype(kind) for n in (WIDTH, WIDTH, HIDDEN, HIDDEN))
    into = np.empty_like(x), np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32)
    weight, room, other = np.ones(WIDTH, np.float32), np.empty_like(hidden), np.empty_like(hidden)
    calls["layer_norm"] = (lambda: grad.layer_norm(dout, x, weight, into=into, **options)), 0
    calls["rms_norm"] = (lambda: grad.rms_norm(dout, x, weight, into=into[:2], **options)), 0
    for name in ("gelu", "gelu_tanh", "silu", "relu"):
        calls[name] = (lambda f=name: grad.activate(dhidden, hidden, f, into=(room,), **options)), 0
    calls["silu, gated"] = (
        lambda: grad.activate(dhidden, hidden, "silu", up=hidden, into=(room, other), **options),
        0,
    )
    calls["dropout"] = (lambda: grad.dropout(hidden, 0.1, seed=1, out=room, **options)), 0
    ids = np.random.default_rng(0).integers(0, CLASSES, TOKENS)
    table = np.zeros((CLASSES, WIDTH), np.float32)
    calls["embedding"] = (lambda: grad.embedding(dout, ids, CLASSES, add_to=table)), 0
    small, few = normal(TOKENS, 65).astype(kind), ids % 65
    calls["cross_entropy of 65 logits"] = (lambda: grad.cross_entropy(small, None, few, **options)), 0

    def loss() -> Any:
        wide = normal(TOKENS, 768).astype(kind)
        packed = ops.pack(0.02 * normal(CLASSES, 768), dtype=dtype)
        into = np.empty_like(wide), np.empty((CLASSES, 768), np.float32)
        return lambda: grad.cross_entropy(wide, packed, ids, into=into, **options)

    calls["cross_entropy 768 -> 50257"] = loss, 6 * TOKENS * 768 * CLASSES
    return calls


def theirs(dtype: str, threads: int) -> dict[str, Any]:
    """Calls of torch by the same names: autograd's backward pass alone; of products what autograd calls."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)

    def tensor(*shape: int, learns: bool = True) -> Any:
        return torch.from_numpy(normal(*shape)).to(kind).requires_grad_(learns)

    def backward(inputs: Any, out: Any) -> Any:
        dout = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    calls = {}
    for k, n in PRODUCTS:
        x, dout, weight = (
            tensor(TOKENS, k, learns=False),
            tensor(TOKENS, n, learns=False),
            tensor(n, k, learns=False),
        )
        flop = 2 * TOKENS * k * n
        calls[f"dweight {k} -> {n}"] = (lambda d=dout, x=x: d.t() @ x), flop
        calls[f"dweight, dbias {k} -> {n}"] = (lambda d=dout, x=x: (d.t() @ x, d.sum(0))), flop
        calls[f"dx {k} -> {n}"] = (lambda d=dout, w=weight: d @ w), flop
    x, hidden, up = tensor(TOKENS, WIDTH), tensor(TOKENS, HIDDEN), tensor(TOKENS, HIDDEN)
    weight, bias = tensor(WIDTH), tensor(WIDTH)
    calls["layer_norm"] = backward((x, weight, bias), F.layer_norm(x, (WIDTH,), weight, bias)), 0
    calls["rms_norm"] = backward((x, weight), F.rms_norm(x, (WIDTH,), weight)), 0
    gates = {
        "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu,
    }  # fmt: skip
    for name, function in gates.items():
        calls[name] = backward((hidden,), function(hidden)), 0
    calls["silu, gated"] = backward((hidden, up), F.silu(hidden) * up), 0
    calls["dropout"] = (lambda: F.dropout(hidden.detach(), 0.1)), 0
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, CLASSES, TOKENS))
    table = tensor(CLASSES, WIDTH)
    calls["embedding"] = backward((table,), F.embedding(ids, table)), 0
    small, few = tensor(TOKENS, 65), ids % 65

    def logits_loss() -> None:
        torch.autograd.grad(F.cross_entropy(small, few), small)

    calls["cross_entropy of 65 logits"] = logits_loss, 0

    def loss() -> Any:
        wide, weight = tensor(TOKENS, 768), (0.02 * tensor(CLASSES, 768)).detach().requires_grad_()

        def step() -> None:
            torch.autograd.grad(F.cross_entropy((wide @ weight.t()).float(), ids), (wide, weight))

        return step

    calls["cross_entropy 768 -> 50257"] = loss, 6 * TOKENS * 768 * CLASSES
    return calls


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", choices=("fastattn", "torch"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default="", help="calls whose name holds this")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each")
    args = parser.parse_args()
    made = (ours if args.library == "fastattn" else theirs)(args.dtype, args.threads)
    for name, (call, flop) in made.items():
        if args.only in name:
            (seconds,) = clock.shortest(call() if "50257" in name else call, during=args.seconds)
            speed = f"{flop / seconds / 1e9:8.0f} GF/s" if flop else ""
            print(f"{name:28} {1e3 * seconds:9.2f} ms{speed}", flush=True)


if __name__ == "__main__":
    main()
