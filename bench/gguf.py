"""Measure language models of GGUF files: a Llama of 3.2 1B's shape, of random blocks, beside llama.cpp.

    python -m bench gguf [--types Q4_K_M Q8_0] [--layers 16] [--threads 2] [--rounds 3] [--llama-cpp PROGRAM]

Loading, prompts of 512 and 2000 tokens, a token after 16 and after 2000, and a token of each of eight
sequences after 16, in milliseconds: medians of rounds in which the engines take turns, each in a process of
its own. The last line of a type is the shortest time in which a loop that only reads gets a token's weights
from memory. fastattn runs with inputs as they are, and rounded to int8 as llama.cpp rounds them; in BF16
and F32 in the file's type. PROGRAM is bench/llama_cpp.cpp, which says how it is built. The vocabulary has
32,064 tokens, and the output layer is the table of tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fastattn._formats import FORMATS

HIDDEN, INNER, KEYS, VOCAB, HEAD_DIM = 2048, 8192, 512, 32064, 64
COLUMNS = "load", "prompt of 512", "of 2000", "token after 16", "after 2000", "8 sequences"
# In an M file some values, what goes out of feed-forwards and the output layer have more bits.
MIXED = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
_PLAIN = ("F32", "BF16")
_SCALES = {"d": 0.003, "m": -0.02, "dmin": 0.0003}


def numbers(kind: str, size: int, rng: np.random.Generator) -> Any:
    """So many numbers of a type, which repeat: their bytes."""
    if kind in _PLAIN:
        wide = rng.normal(0, 0.02, 1 << 20).astype("<f4")
        return np.resize(wide if kind == "F32" else (wide.view("<u4") >> 16).astype("<u2"), size)
    block = FORMATS[kind]
    data = rng.integers(0, 256, (4096, block.nbytes), np.uint8).view(block.fields)[:, 0]
    for name, scale in _SCALES.items():
        if name in (block.fields.names or ()):
            share = 1 / 16 if kind == "Q8_0" else 1 / 32 if block.features == 256 and name == "d" else 1
            data[name] = scale * share * rng.uniform(0.5, 1.5, len(data))
    return np.resize(data, size // block.features)


def write_model(path: Path, kind: str, layers: int) -> None:
    """Write the model."""
    rng, (usual, more) = np.random.default_rng(0), MIXED.get(kind, (kind, kind))
    maps: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (KEYS, HIDDEN), "attn_v": (KEYS, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd": ((VOCAB, HIDDEN), more), "output_norm": ((HIDDEN,), "F32")
    }  # fmt: skip
    for i in range(layers):
        shapes |= {f"blk.{i}.{norm}": ((HIDDEN,), "F32") for norm in ("attn_norm", "ffn_norm")}
        for name, shape in maps.items():
            is_more = i % 2 and name in ("attn_v", "ffn_down")
            shapes[f"blk.{i}.{name}"] = shape, more if is_more else usual
    writer = gguf.GGUFWriter(path, "llama")
    for name, (shape, of) in shapes.items():
        x = np.ones(shape, "<f4") if len(shape) == 1 else numbers(of, shape[0] * shape[1], rng)
        rows = x.view(np.uint8).reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[of])
    sizes = {
        "vocab_size": VOCAB, "embedding_length": HIDDEN, "block_count": layers, "feed_forward_length": INNER,
        "attention.head_count": HIDDEN // HEAD_DIM, "attention.head_count_kv": KEYS // HEAD_DIM,
        "context_length": 4096, "rope.dimension_count": HEAD_DIM,
    }  # fmt: skip
    for key, size in sizes.items():
        writer.add_uint32(f"llama.{key}", size)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("none")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def times(path: str, threads: int, **how: Any) -> list[float]:
    """Milliseconds of each of `COLUMNS` with fastattn, and of reading all weights that a token takes."""
    import fastattn
    from fastattn import models
    from fastattn._args.packed import PackedLinear
    from fastattn._engine import settings

    fastattn.set_num_threads(threads)
    start = time.perf_counter()
    model: Any = models.load(path, **how)
    loaded, ids = time.perf_counter() - start, [i * 7919 % 32000 for i in range(2000)]

    def steps(behind: int, count: int, sequences: int = 1) -> list[float]:
        found, last = [], time.perf_counter()
        prompts = [ids[i : i + behind] for i in range(sequences)]
        for _ in model.generate(prompts if sequences > 1 else prompts[0], count, stop=()):
            found.append(time.perf_counter() - last)
            last += found[-1]
        return found

    steps(16, 3)  # warms up
    prompts = [min(steps(n, 1)[0] for _ in range(2)) for n in (512, 2000)]
    tokens = [float(np.median(steps(*which)[1:])) for which in ((16, 25), (2000, 25), (16, 25, 8))]
    made = (x.parameter for x in model.origin.parameters)
    weights = sum(x.nbytes for x in made if isinstance(x, PackedLinear))
    limit = weights / max(settings.core.read_bandwidth(threads) for _ in range(3))
    return [1e3 * x for x in (loaded, *prompts, *tokens, limit)]


def main(words: list[str]) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m bench gguf", description=__doc__.partition("\n")[0])
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q8_0", "Q4_0", "BF16"])
    for name, default in (("layers", 16), ("threads", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--llama-cpp", metavar="PROGRAM")
    given = parser.parse_args(words)
    print(f"{'':28}" + "".join(f"{name:>16}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for kind in given.types:
            write_model(path, kind, given.layers)
            plain = "bfloat16" if kind == "BF16" else "float32"
            engines: dict[str, dict[str, Any]] = {"fastattn": {"dtype": plain}}
            if kind not in _PLAIN:
                engines["fastattn, int8 inputs"] = {"dtype": plain, "activations": "int8"}
            commands = {
                name: [sys.executable, "-c", f"from bench.gguf import times; print(*times({str(path)!r}, "
                       f"{given.threads}, **{how}))"]
                for name, how in engines.items()
            }  # fmt: skip
            if given.llama_cpp:
                commands["llama.cpp"] = [given.llama_cpp, str(path), str(given.threads)]
            found: dict[str, list[list[float]]] = {name: [] for name in commands}
            for _ in range(given.rounds):
                for name, command in commands.items():
                    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    found[name].append([float(x) for x in out.split()])
            limits = {name: [each.pop() for each in found[name]] for name in engines}
            for name, rounds in found.items():
                each = "".join(f"{x:13.2f} ms" for x in np.median(rounds, axis=0))
                print(f"{kind:8}{name:20}{each}", flush=True)
            least = min(each for rounds in limits.values() for each in rounds)
            print(f"{kind:8}{'reading':20}{least:{13 + 16 * 3}.2f} ms", flush=True)
