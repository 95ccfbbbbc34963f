"""Measure language models with recurrent layers or windows beside transformers: eight layers, random weights.

    python -m bench.hybrid_models [--models lfm2-350m ...] [--dtypes float32 bfloat16] [--rounds 3]

A prompt of 512 tokens up to the first logits, and a token after 16, in milliseconds: medians of rounds in
which the engines take turns, each in a process of its own with the same weights. Then how many times as fast
fastattn is: the median of the rounds, and the least and the most. In float32 both must write the same tokens.
transformers runs as `from_pretrained` makes it, a call for each token. Widths are those of the models named;
the vocabulary has 32,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import files

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT, BEHIND, STEPS = 512, 16, 24
COLUMNS = f"prompt of {PROMPT}", f"token after {BEHIND}"
_COMMON = {
    "vocab_size": 32000,
    "num_hidden_layers": 8,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _lfm2(hidden: int, inner: int, heads: int) -> files.Json:
    kinds = ["conv", "conv", "full_attention"] * 2 + ["conv", "full_attention"]
    sizes = {
        "hidden_size": hidden,
        "block_ff_dim": inner,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }
    return {"model_type": "lfm2", **sizes, "num_key_value_heads": 8, "layer_types": kinds}


_QWEN = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
}  # fmt: skip
MODELS: dict[str, files.Json] = {
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "intermediate_size": 6912, "sliding_window": 512, "tie_word_embeddings": True,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2],
    },
    "lfm2-350m": _lfm2(1024, 6656, 16),
    "lfm2-1.2b": _lfm2(2048, 12288, 32),
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", **_QWEN, "intermediate_size": 3584, "tie_word_embeddings": True,
    },
    "granite-4-h-350m": {
        "model_type": "granitemoehybrid", "hidden_size": 768, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 0, "num_experts_per_tok": 0,
        "intermediate_size": 2048, "shared_intermediate_size": 2048, "mamba_n_heads": 48, "mamba_d_head": 32,
        "mamba_d_state": 128, "mamba_n_groups": 1, "tie_word_embeddings": True,
        "layer_types": [*["mamba"] * 4, "attention", *["mamba"] * 3], "position_embedding_type": None,
        "embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.246,
        "logits_scaling": 3,
    },
}  # fmt: skip


def write_model(scratch: Path, name: str) -> Path:
    """The folder of a model; its tensors are those that transformers names."""
    torch, transformers = import_module("torch"), import_module("transformers")
    config = {**_COMMON, **MODELS[name]}
    given = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        own = transformers.AutoConfig.for_model(config["model_type"], **given)
        model = transformers.AutoModelForCausalLM.from_config(own)
    shapes = {key: tuple(x.shape) for key, x in model.state_dict().items() if key != "lm_head.weight"}
    return files.write(scratch / name, {**own.to_dict(), "torch_dtype": "bfloat16"}, shapes)


def _fastattn(folder: str, dtype: str, threads: int) -> Callable[[list[int], int], Any]:
    import fastattn
    from fastattn import models

    fastattn.set_num_threads(threads)
    model: Any = models.load(folder, dtype=dtype)
    return lambda ids, count: model.generate(ids, count, stop=())


def _transformers(folder: str, dtype: str, threads: int) -> Callable[[list[int], int], Any]:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def tokens(ids: list[int], count: int) -> Any:
        new, cache = torch.tensor([ids]), None
        for _ in range(count):
            out = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, new = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            yield int(new)

    return tokens


ENGINES = {"fastattn": _fastattn, "transformers": _transformers}


def times(engine: str, folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Milliseconds of each of `COLUMNS`, and the tokens that were found."""
    generate = ENGINES[engine](folder, dtype, threads)
    ids = [i * 7919 % 32000 for i in range(PROMPT)]

    def tokens(behind: int, count: int) -> tuple[list[float], list[int]]:
        found, taken, last = [], [], time.perf_counter()
        for token in generate(ids[:behind], count):
            taken.append(time.perf_counter() - last)
            last += taken[-1]
            found.append(token)
        return taken, found

    tokens(BEHIND, 3)  # warms up
    tokens(PROMPT, 1)
    prompt = min(tokens(PROMPT, 1)[0][0] for _ in range(2))
    steps, found = tokens(BEHIND, STEPS + 1)
    return {"times": [1e3 * prompt, 1e3 * float(np.median(steps[1:]))], "tokens": found}


def main() -> None:
    """Print a line for each model and type, the engines one after the other."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hybrid_models", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    for name, default in (("threads", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(f"{'':34}" + "".join(f"{name:>34}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.models:
            folder = write_model(Path(scratch), name)
            for dtype in given.dtypes:
                found: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
                for _ in range(given.rounds):
                    tokens = []
                    for engine, rounds in found.items():
                        call = f"times({engine!r}, {str(folder)!r}, {dtype!r}, {given.threads})"
                        code = (
                            f"import json; from bench.hybrid_models import times; print(json.dumps({call}))"
                        )
                        command = [sys.executable, "-c", code]
                        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                        each = json.loads(out.splitlines()[-1])
                        rounds.append(each["times"])
                        tokens.append(each["tokens"])
                    if dtype == "float32" and tokens[0] != tokens[1]:
                        sys.exit(f"{name}: fastattn writes {tokens[0]}, transformers {tokens[1]}")
                own, other = (np.array(rounds) for rounds in found.values())
                ratios = other / own
                cells = [
                    f"{np.median(x):11.1f} {np.median(y):8.1f} {np.median(r):5.2f}"
                    f" ({r.min():.2f}, {r.max():.2f})"
                    for x, y, r in zip(own.T, other.T, ratios.T, strict=True)
                ]
                print(f"{name:20}{dtype:10}{''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
