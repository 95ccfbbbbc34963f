"""What `fastattn.torch` makes of models of torch: each engine in a process of its own, in turn.

python tools/measure_torch.py minilm FOLDER   # transformers' all-MiniLM-L6-v2, whose files FOLDER has
python tools/measure_torch.py llama           # 8 layers of 512, random weights, prefill of 2048 tokens
python tools/measure_torch.py overhead        # tiny calls: an operator of torch beside attention itself
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time

DTYPES = ("float32", "bfloat16")
# What optimize() is called with; None: the model as it is, with the attention implementation "sdpa".
ENGINES = {
    "torch": None,
    "optimize": {},
    "optimize bfloat16": {"weights_dtype": "bfloat16"},
    "optimize int8": {"weights_dtype": "int8", "activations": "int8"},
}


def minilm(folder, dtype):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    return model, [(1, 16), (32, 128)], 30000


def llama(folder, dtype):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=32000, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaModel(config).to(dtype), [(1, 2048)], 32000


def worker(what, folder, engine, dtype, seconds):
    """Print how far results are from torch's; then, for each line that comes, median times in ms."""
    import torch

    torch.manual_seed(0)
    model, shapes, words = globals()[what](folder, getattr(torch, dtype))
    model.eval()
    inputs = [torch.randint(1000, words, shape) for shape in shapes]
    with torch.inference_mode():
        run = [lambda ids=ids: model(input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in inputs]
        before = [call().last_hidden_state for call in run]
        if ENGINES[engine] is not None:
            import fastattn.torch

            fastattn.torch.optimize(model, **ENGINES[engine])
        apart = [
            (call().last_hidden_state - x).abs().max().item() for call, x in zip(run, before, strict=True)
        ]
        print(*apart, flush=True)
        for _ in sys.stdin:
            medians = []
            for call in run:
                times, end = [], time.perf_counter() + seconds
                while time.perf_counter() < end or len(times) < 3:
                    begin = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - begin)
                medians.append(sorted(times)[len(times) // 2] * 1e3)
            print(*medians, flush=True)


def compare(what, folder, dtype, engines, rounds, seconds):
    """Start all engines, each in a process of its own, and have them measured in turn."""
    given = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        what,
        *filter(None, [folder]),
        "--seconds",
        str(seconds),
    ]
    workers = {
        engine: subprocess.Popen(
            [*given, "--worker", engine, dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for engine in engines
    }
    apart = {engine: numbers(process) for engine, process in workers.items()}
    times = {engine: [] for engine in engines}
    for _, (engine, process) in itertools.product(range(rounds), workers.items()):
        process.stdin.write("go\n")
        process.stdin.flush()
        times[engine].append(numbers(process))
    medians = {engine: [statistics.median(x) for x in zip(*times[engine], strict=True)] for engine in engines}
    for engine, process in workers.items():
        process.stdin.close()
        process.wait()
        for place, ms in enumerate(medians[engine]):
            ratio = statistics.median(
                x[place] / y[place] for x, y in zip(times["torch"], times[engine], strict=True)
            )
            print(
                f"{dtype:9} {engine:18} {ms:8.2f} ms  {ratio:5.2f}x  apart {apart[engine][place]:.1e}",
                flush=True,
            )


def numbers(process):
    """The next line that it prints."""
    return [float(x) for x in process.stdout.readline().split()]


def overhead():
    """Microseconds of a call: the least of many rounds, in each of which all calls take turns."""
    import ml_dtypes
    import numpy as np
    import torch

    import fastattn
    import fastattn.torch

    op = torch.ops.fastattn.attention
    for dtype, name in ((np.float32, "float32"), (ml_dtypes.bfloat16, "bfloat16")):
        arrays = [np.random.default_rng(i).standard_normal((1, 2, 4, 16)).astype(dtype) for i in range(3)]
        tensors = [fastattn.torch._tensors.tensor_of(x) for x in arrays]
        learning = [x.clone().requires_grad_() for x in tensors]

        def inference(tensors=tensors):
            with torch.inference_mode():
                op(*tensors)

        calls = {
            "attention": lambda arrays=arrays: fastattn.attention(*arrays),
            "operator": lambda tensors=tensors: op(*tensors),
            "operator, inference_mode": inference,
            "operator, gradients wanted": lambda learning=learning: op(*learning),
            "torch's own": lambda tensors=tensors: torch.nn.functional.scaled_dot_product_attention(*tensors),
        }
        least = dict.fromkeys(calls, np.inf)
        for _, (label, call) in itertools.product(range(100), calls.items()):
            begin = time.perf_counter()
            for _ in range(100):
                call()
            least[label] = min(least[label], (time.perf_counter() - begin) / 100)
        for label, seconds in least.items():
            print(f"{name:9}  {label:27} {seconds * 1e6:5.1f} us", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["minilm", "llama", "overhead"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each shape in each round")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES)[1:], default=list(ENGINES)[1:])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    if args.what == "overhead":
        overhead()
    elif args.worker:
        worker(args.what, args.folder, *args.worker, args.seconds)
    else:
        for dtype in args.dtypes:
            compare(args.what, args.folder, dtype, ["torch", *args.engines], args.rounds, args.seconds)


if __name__ == "__main__":
    main()
