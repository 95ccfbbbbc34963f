"""Malformed GGUF files of tiny models: each loads in little memory, or raises a ModelError that names it."""

import math
import resource
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import files
import numpy as np
import tiny_gguf
from judge import Case

from fastattn import models
from fastattn._formats import FORMATS
from fastattn.models import ModelError

HIDDEN, INNER, HEADS, VOCAB = 32, 64, 2, 260
MOST = (
    64 << 10
)  # kilobytes that a file of 200 may take beyond what was used before: NumPy and threads have some
NUMBERS = (0, 1, 2, 3, 31, 32, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
STRINGS = (
    b"", b"\0", b"llama", b"gemma3", b"gpt2", b"x" * 5000, b"\xff\xfe", b"blk.0.attn_q.weight", b"a/../b",
    b"blk.99999999999.attn_q.weight", b"blk.-1.attn_q.weight", b"output.weight", b"general.alignment",
    b"%s%n", b"{}", "\u202e".encode(), b"\xed\xa0\x80", b"blk.0.ffn_gate_exps.weight", b"token_embd.weight",
    b"rope_freqs.weight", b"llama.expert_count", b"llama.rope.scaling.type", b"split.count",
)  # fmt: skip
STRING, ARRAY = 8, 9  # types of values


class Tensor(NamedTuple):
    name: bytes
    shape: tuple[int, ...]  # as the file has it
    kind: int
    offset: int


class Header(NamedTuple):
    """The part of a file before its tensors: keys are names, with their values behind their types."""

    version: int
    n_tensors: int
    n_keys: int
    keys: list[tuple[bytes, bytes]]
    tensors: list[Tensor]


def text(x):
    return struct.pack("<Q", len(x)) + x


def value(x):
    """A value behind its type."""
    if isinstance(x, str):
        return struct.pack("<I", STRING) + text(x.encode())
    if isinstance(x, list):
        each = [value(y) for y in x]
        return (
            struct.pack("<I", ARRAY) + each[0][:4] + struct.pack("<Q", len(x)) + b"".join(y[4:] for y in each)
        )
    return struct.pack("<If", 6, x) if isinstance(x, float) else struct.pack("<II", 4, x)


@cache
def whole(stored, experts=0, by_scores=False):
    """The header of a correct file whose maps are `stored`, and its tensors.

    Its model has so many experts, if any; its tokenizer merges `by_scores`, or else bytes.
    """
    sizes = {
        "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": INNER, "context_length": 64,
        "attention.head_count": HEADS, "attention.head_count_kv": HEADS, "vocab_size": VOCAB,
        "rope.dimension_count": HIDDEN // HEADS, "rope.freq_base": 1e4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    words = {
        "model": "gpt2", "pre": "llama-bpe", "tokens": [*tiny_gguf.byte_tokens(), "th", "the", "<s>", "</s>"],
        "token_type": [1] * 258 + [3, 3], "merges": ["t h", "th e"], "bos_token_id": 258, "eos_token_id": 259,
    }  # fmt: skip
    if by_scores:
        pieces = [f"<0x{i:02X}>" for i in range(250)] + ["▁", "t", "h", "e", "th", "he", "▁the"]
        words |= {
            "model": "llama",
            "tokens": ["<unk>", *pieces, "<s>", "</s>"],
            "scores": [-float(i) for i in range(VOCAB)],
            "token_type": [2] + [6] * 250 + [1] * 7 + [3, 3],
        }
    if experts:
        sizes |= {"expert_count": experts, "expert_used_count": 1}
    keys = {"general.architecture": "llama", "general.alignment": 32, "general.sampling.temp": 0.5}
    keys |= {f"llama.{name}": x for name, x in sizes.items()}
    keys |= {f"tokenizer.ggml.{name}": x for name, x in words.items()}
    maps = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    if experts:
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            maps[f"{name}_exps"] = (experts, *maps.pop(name))
        maps["ffn_gate_inp"] = (experts, HIDDEN)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in maps.items()}
    tensors, data = [], b""
    for name, shape in shapes.items():
        plain = stored == "F32" or len(shape) == 1
        rows = math.prod(shape[:-1])
        x = np.ones(shape, np.float32) if plain else tiny_gguf.random_blocks(stored, rows, shape[-1])
        kind = 0 if plain else FORMATS[stored].number
        tensors.append(Tensor(f"{name}.weight".encode(), shape[::-1], kind, len(data)))
        data += x.tobytes()
        data += bytes(-len(data) % 32)
    encoded = [(name.encode(), value(x)) for name, x in keys.items()]
    return Header(3, len(tensors), len(encoded), encoded, tensors), data


def written(header, data, alignment=32):
    found = b"GGUF" + struct.pack("<IQQ", header.version, header.n_tensors, header.n_keys)
    found += b"".join(text(name) + x for name, x in header.keys)
    for name, shape, kind, offset in header.tensors:
        found += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return found + bytes(-len(found) % alignment) + data


def number(d):
    return d.choose(*NUMBERS, int(d.rng.integers(300)), int(d.rng.integers(2**63)))


def string(d):
    return d.choose(*STRINGS, d.rng.bytes(int(d.rng.integers(70))))


def spoiled_counts(d, header):
    """One count, and no more, no fewer things."""
    name = d.choose("n_tensors", "n_keys", "version")
    return header._replace(**{name: number(d) % (2**32 if name == "version" else 2**64)}), f"another {name}"


def spoiled_key(d, header):
    keys, i = list(header.keys), int(d.rng.integers(len(header.keys)))
    name, x = keys[i]
    how = d.rng.integers(7)
    if how == 0:
        del keys[i]
    elif how == 1:
        keys.insert(i, keys[int(d.rng.integers(len(keys)))])
    elif how == 2:
        keys[i] = string(d), x
    elif how == 3:  # read as a value of another type
        keys[i] = name, struct.pack("<I", d.choose(*range(14), number(d) % 2**32)) + x[4:]
    elif how == 4:
        kind = d.choose(0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
        size = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)[kind]
        keys[i] = name, struct.pack("<I", kind) + struct.pack("<Q", number(d))[:size]
    elif how == 5:
        keys[i] = name, struct.pack("<I", STRING) + text(string(d))
    else:
        kind, count = d.choose(*range(14)), d.choose(0, 1, 2, 260, number(d))
        keys[i] = name, struct.pack("<IIQ", ARRAY, kind, count) + d.rng.bytes(int(d.rng.integers(3000)))
    count = len(keys) if d.chance(0.9) else header.n_keys
    return header._replace(keys=keys, n_keys=count), f"the key {name!r}, way {how}"


def spoiled_tensor(d, header):
    tensors, i = list(header.tensors), int(d.rng.integers(len(header.tensors)))
    tensor, how = tensors[i], d.rng.integers(8)
    if how == 0:
        del tensors[i]
    elif how == 1:
        tensors.insert(i, tensors[int(d.rng.integers(len(tensors)))])
    elif how == 2:
        tensors[i] = tensor._replace(name=string(d))
    elif how == 3:
        axes = d.choose(*range(6), 40)
        tensors[i] = tensor._replace(shape=tuple(number(d) for _ in range(axes)))
    elif how == 4:
        shape = list(tensor.shape) or [1]
        shape[int(d.rng.integers(len(shape)))] = number(d)
        tensors[i] = tensor._replace(shape=tuple(shape))
    elif how == 5:
        tensors[i] = tensor._replace(kind=d.choose(*range(45), number(d) % 2**32))
    elif how == 6:
        tensors[i] = tensor._replace(offset=number(d))
    else:  # where another one lies
        tensors[i] = tensor._replace(offset=d.choose(*tensors).offset + d.choose(0, 0, 1, 32))
    count = len(tensors) if d.chance(0.9) else header.n_tensors
    return header._replace(tensors=tensors, n_tensors=count), f"the tensor {tensor.name!r}, way {how}"


def spoiled_bytes(d, whole, begin):
    """Bytes are cut off, others, or from elsewhere; mostly in the header, which ends at `begin`."""
    at = int(d.rng.integers(min(d.choose(24, begin, begin, len(whole)), len(whole))))
    how = d.rng.integers(5)
    if how == 0:
        return whole[:at], f"cut at {at}"
    if how == 1:
        return whole[:at] + struct.pack("<Q", number(d)) + whole[at + 8 :], f"a number at {at}"
    if how == 2:
        n = int(d.rng.integers(1, 40))
        return whole[:at] + whole[at + n :], f"{n} bytes left out at {at}"
    if how == 3:
        return whole[:at] + d.rng.bytes(int(d.rng.integers(1, 40))) + whole[at:], f"bytes put in at {at}"
    changed = bytearray(whole)
    for place in (at, *d.rng.integers(begin, size=d.choose(0, 0, 5))):
        changed[place] ^= 1 << int(d.rng.integers(8)) if d.chance(0.5) else int(d.rng.integers(1, 256))
    return bytes(changed), f"bytes flipped at {at}"


def draw(d):
    """A case: a file with some things wrong, which is loaded, and asked for what else it says."""
    which = d.choose("F32", "Q4_0", "Q5_1", "Q8_0", "MXFP4"), d.choose(0, 2), d.chance(0.5)
    header, data = whole(*which)
    changes = []
    for _ in range(d.choose(0, 1, 1, 2)):
        header, what = d.choose(spoiled_counts, spoiled_key, spoiled_key, spoiled_tensor, spoiled_tensor)(
            d, header
        )
        changes.append(what)
    found, begin = written(header, data), len(written(header, b""))
    for _ in range(d.choose(0, 1, 2) if changes else 1):
        found, what = spoiled_bytes(d, found, min(begin, len(found))) if found else (found, "nothing is left")
        changes.append(what)
    path = Path(files.home().name, "tiny.gguf")
    path.write_bytes(found)
    return Case(
        ("gguf",), lambda: loaded(path), [which, changes], clean=lambda e: clean(e, path), twice=False
    )


def clean(error, path):
    return isinstance(error, ModelError) and str(path) in str(error)


def loaded(path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        model = models.load(path)
        model.usual_sampling()
        model.text.encode(["the cat"])
    except MemoryError as error:
        raise AssertionError("no memory") from error
    finally:
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if more > MOST:
            raise AssertionError(f"{more} kilobytes for a file of {path.stat().st_size} bytes")
    return []
