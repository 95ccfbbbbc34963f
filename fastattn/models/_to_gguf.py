"""Language models as GGUF files: the keys that `_gguf_config` reads, and tensors in the types of a file.

What such a file cannot say of a model, or what would be read in another way, is refused by name.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._engine.experts import ExpertsStep
from fastattn._engine.settings import get_num_threads
from fastattn._formats import FORMATS, Format, feedback_of
from fastattn._gguf_writer import Encoded, Entry, write
from fastattn.models import _gguf, _gguf_hybrid
from fastattn.models._files import Config, ModelError, require
from fastattn.models._gguf_config import FACTORS, SAMPLING, SIZES
from fastattn.models._parameters import required
from fastattn.models._to_gguf_tokenizer import named_values, tokenizer_values
from fastattn.positions import RopeFrequencies, rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from fastattn._args.types import Array, Shape
    from fastattn.models._decoder import Decoder

DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q6_k": "Q6_K", "q4_k": "Q4_K",
    "q4_1": "Q4_1", "q4_0": "Q4_0",
}  # fmt: skip
_PLAIN = {"F32": (0, "<f4"), "F16": (1, "<f2"), "BF16": (30, "bfloat16")}  # as in `_gguf`, and NumPy's
_SHORTER = {"Q4_K": "Q4_1", "Q6_K": "Q8_0"}  # for rows that are not whole blocks
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 15, "Q6_K": 18, "BF16": 32}
_PIECE = 1 << 20  # numbers that a thread encodes at a time
_READ_AS = {"mistral": "llama", "mixtral": "llama"}
_BASES = 1e4, 1e6  # of rotary positions, where config.json does not say
_SUPPORTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")  # from folders


class _Kept(NamedTuple):
    """Facts of a model that are written before its tensors, and their names in the file."""

    values: dict[str, Any]
    names: dict[str, str]  # by the names of `state_dict`
    interleaved: bool  # rows of heads of queries and keys
    factors: Array | None  # of frequencies


def written(model: Decoder, path: Path, dtype: str, moments: Mapping[str, Array]) -> None:
    """Write a file over `path`; `moments` are those of the inputs of maps, as of `_calibration`."""
    origin = required(model.origin)
    kept = (_of_file if _gguf.is_file(origin.folder) else _of_folder)(model)
    values = {**kept.values, "general.quantization_version": 2}  # of the layouts of blocks
    values["general.file_type"] = _FILE_TYPES[DTYPES[dtype]]
    shapes = origin.parameters.shapes()
    maps = origin.parameters.maps() | {name for name in shapes if kept.names[name] == "token_embd.weight"}
    last: Any = model.logits.steps[-1]
    output = {part.name for made in origin.parameters if made.parameter is last.weight for part in made.parts}
    with ExitStack() as stack:
        read = origin.reader(stack)
        pool = stack.enter_context(ThreadPoolExecutor(get_num_threads()))
        entries = []
        for name, shape in shapes.items():
            new, kind = kept.names[name], "F32"
            if name in maps and not new.endswith("ffn_gate_inp.weight"):
                is_output = name in output and dtype == "q4_k"
                kind = _kind("Q6_K" if is_output else DTYPES[dtype], shape[-1])
            part = new.split(".")[2] if new.startswith("blk.") else ""
            head = model.head_dim if kept.interleaved and part in ("attn_q", "attn_k") else 0
            parts = partial(_parts, name, kind, read, head, moments.get(name), pool)
            entries.append(Entry(new, shape, *_size(kind, shape), parts))
        if kept.factors is not None:
            factors = kept.factors
            entries.append(Entry(FACTORS, factors.shape, 0, factors.nbytes, lambda: [factors]))
        write(path, values, _with_experts(entries))


def _kind(kind: str, features: int) -> str:
    """The type of a matrix's file with such rows: blocks have to be whole."""
    while kind in FORMATS and features % FORMATS[kind].features:
        kind = _SHORTER.get(kind, "F32")
    return kind


def _size(kind: str, shape: Shape) -> tuple[int, int]:
    """The number of a type, and how many bytes a tensor has in it."""
    size = math.prod(shape)
    if kind in _PLAIN:
        return _PLAIN[kind][0], size * (4 if kind == "F32" else 2)
    block = FORMATS[kind]
    return block.number, size // block.features * block.nbytes


def _parts(
    name: str,
    kind: str,
    read: Callable[[str], Array],
    head: int,
    moments: Array | None,
    pool: ThreadPoolExecutor,
) -> Iterator[Array]:
    """Yield what a tensor becomes, in pieces."""
    x = read(name)
    if head:
        x = x.reshape(-1, 2, head // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if kind == "BF16":
        require("ml_dtypes")
    if kind in _PLAIN:
        with np.errstate(over="ignore"):
            found = x.astype(_PLAIN[kind][1])
        if not np.isfinite(found).all():
            raise ValueError(f"(): {name!r} has values that are not finite as {kind}; expected finite ones")
        yield found
        return
    rows = max(1, _PIECE // x.shape[1])
    pieces = [x[begin : begin + rows] for begin in range(0, len(x), rows)]
    block, encoded = FORMATS[kind], FORMATS[kind].encoded
    if moments is not None:
        encoded = partial(_calibrated, block, moments, feedback_of(moments))
    try:
        yield from pool.map(encoded, pieces)
    except ValueError as error:
        raise ValueError(f"(): {name!r} has {error}") from error


def _calibrated(block: Format, moments: Array, feedback: Array, rows: Array) -> Array:
    """Blocks of rows, each calibrated if its products err less then: it may leave the range of its scales."""
    found, errors = (block.compensated(rows, feedback), block.encoded(rows)), []
    for blocks in found:
        numbers = block.decoded(np.ascontiguousarray(blocks).reshape(-1).view(np.uint8))
        off = numbers.reshape(rows.shape) - rows
        errors.append(np.einsum("ij,ij->i", off @ moments, off))
    return np.where((errors[0] < errors[1])[:, None], *found)


def _with_experts(entries: list[Entry]) -> Iterator[Entry]:
    """The entries, those of a layer's experts as one, which has three axes."""
    together: dict[str, list[Entry]] = {}
    for entry in entries:
        stem, number, kind = (*entry.name.rsplit(".", 2), "", "")[:3]
        together.setdefault(f"{stem}.{kind}" if number.isdecimal() else entry.name, []).append(entry)
    for name, each in together.items():
        first = each[0]
        if name == first.name:
            yield first
            continue
        shape, nbytes = (len(each), *first.shape), len(each) * first.nbytes
        yield Entry(name, shape, first.number, nbytes, partial(_in_turn, each))


def _in_turn(entries: list[Entry]) -> Iterator[Array]:
    for entry in entries:
        yield from entry.parts()


def _of_file(model: Decoder) -> _Kept:
    """Facts of a model that is from such a file: they are copied."""
    origin, kind = required(model.origin), model.model_type
    if kind in _gguf_hybrid.MIXERS:
        raise ModelError(f"{origin.folder} holds a {kind}; expected a model without recurrent layers")
    with _gguf.opened_alone(origin.folder) as file:
        values: dict[str, Any] = {name: Encoded(file.encoded(name)) for name in file.metadata}
        values.pop("general.alignment", None)
        interleaved = _gguf.ARCHITECTURES[file.metadata["general.architecture"]][1]
        factors = file.get_tensor(FACTORS) if FACTORS in file.names else None
    return _Kept(values, {name: name for name in origin.parameters.shapes()}, interleaved, factors)


def _of_folder(model: Decoder) -> _Kept:
    """Facts of a model that is from a folder."""
    origin, kind = required(model.origin), model.model_type
    config = Config(origin.folder / "config.json")
    if kind not in _SUPPORTED:
        raise config.wrong("model_type", kind, f"one of {', '.join(_SUPPORTED)} for a GGUF file")
    if config.get("hidden_act", str, "silu") not in ("silu", "swish"):
        raise config.wrong("hidden_act", config.values["hidden_act"], "silu for a GGUF file")
    prefix = next(x for x, (said, _) in _gguf.ARCHITECTURES.items() if said == _READ_AS.get(kind, kind))
    shapes, experts = origin.parameters.shapes(), _experts(model, config)
    known = _gguf.tensor_names(kind, model.num_layers, experts.get("num_local_experts", 0))
    known |= {name.removeprefix("model."): new for name, new in known.items()}  # some files leave it out
    if unknown := [name for name in shapes if name not in known]:
        raise ModelError(f"{config.path}: {unknown[0]!r} has no name in a GGUF file of a {kind}")
    names = {name: known[name] for name in shapes}
    norm: Any = model.logits.steps[0]
    rotary, factors = _rotary(model, config)
    sizes = {
        "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
        "intermediate_size": config.size("intermediate_size"), "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "rms_norm_eps": float(norm.eps), **experts, **rotary, **_window(model, config),
    }  # fmt: skip
    if longest := config.optional_size("max_position_embeddings"):
        sizes["max_position_embeddings"] = longest
    values = {f"{prefix}.{key}": sizes[name] for key, name in SIZES.items() if name in sizes}
    values |= {
        f"{prefix}.{key}": model.head_dim for key in ("attention.value_length", "rope.dimension_count")
    }
    sampling = model.usual_sampling()
    values |= {f"general.sampling.{key}": sampling[x] for key, x in SAMPLING.items() if x in sampling}
    values = {"general.architecture": prefix, "general.name": origin.folder.name, **values}
    values |= named_values(tokenizer_values(origin.folder, model.vocab_size, model.stop))
    return _Kept(values, names, _gguf.ARCHITECTURES[prefix][1], factors)


def _experts(model: Decoder, config: Config) -> dict[str, int]:
    """Sizes of experts, as config.json has them; empty without experts."""
    steps = [step for step in model.program.steps if isinstance(step, ExpertsStep)]
    if not steps:
        return {}
    experts = steps[0].experts
    inner, outer = experts.maps
    if not experts.normalised:
        raise config.wrong("norm_topk_prob", False, "true for a GGUF file")
    found = {"num_local_experts": len(inner), "num_experts_per_tok": experts.chosen}
    return (
        found if model.model_type == "mixtral" else {**found, "moe_intermediate_size": outer[0].in_features}
    )


def _window(model: Decoder, config: Config) -> dict[str, int]:
    """The width of a sliding window, as config.json has it; empty without one."""
    (window, *others) = dict.fromkeys(model.windows) or [None]
    if others or (window is not None and model.model_type not in ("mistral", "mixtral")):
        came = config.values.get("sliding_window")
        raise config.wrong("sliding_window", came, f"none in a GGUF file of a {model.model_type}")
    return {} if window is None else {"sliding_window": window[0] + 1}


def _rotary(model: Decoder, config: Config) -> tuple[dict[str, Any], Array | None]:
    """Base of rotary positions, as config.json has it, and what frequencies are divided by, if anything."""
    said = {**config.get("rope_scaling", dict, {}), **config.get("rope_parameters", dict, {})}
    base = said.get("rope_theta", config.values.get("rope_theta"))
    frequencies, bases = model.frequencies[0], _BASES if base is None else (base,)
    if isinstance(frequencies, RopeFrequencies) and frequencies.attention_factor == 1:
        for base in bases:
            plain = rope_frequencies(model.head_dim, base=base).inv_freq
            if np.array_equal(plain, frequencies.inv_freq):
                return {"rope_theta": float(base)}, None
            if len(bases) == 1 and (frequencies.inv_freq > 0).all():
                return {"rope_theta": float(base)}, (plain / frequencies.inv_freq).astype(np.float32)
    raise config.wrong(
        "rope_scaling", said, "one that scales frequencies alone, of any length, for a GGUF file"
    )
