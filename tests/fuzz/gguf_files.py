"""Malformed GGUF files of tiny models: each loads in little memory, or raises a ModelError that names it."""

import math
import resource
import struct
from functools import cache
from itertools import pairwise
from pathlib import Path

import files
import gguf
import numpy as np
import tiny_gguf
from judge import Case

from fastattn import models
from fastattn.models import ModelError

HIDDEN, INNER, HEADS, VOCAB = 32, 64, 2, 260
# Kilobytes that a file of 200 may take beyond what was used before: NumPy and threads have some.
MOST = 64 << 10
NUMBERS = (0, 1, 2, 3, 31, 32, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
STRINGS = (
    b"", b"\0", b"llama", b"gemma3", b"gpt2", b"x" * 5000, b"\xff\xfe", b"blk.0.attn_q.weight", b"a/../b",
    b"blk.99999999999.attn_q.weight", b"blk.-1.attn_q.weight", b"output.weight", b"general.alignment",
    b"%s%n", b"{}", "\u202e".encode(), b"\xed\xa0\x80", b"blk.0.ffn_gate_exps.weight", b"token_embd.weight",
    b"rope_freqs.weight", b"llama.expert_count", b"llama.rope.scaling.type", b"split.count",
)  # fmt: skip


@cache
def whole(stored, experts=0, by_scores=False):
    """The bytes of a correct file whose maps are `stored`, and the parts of its header.

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
    keys = {"general.alignment": 32, "general.sampling.temp": 0.5}
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
    path = Path(files.home().name, "whole.gguf")
    out = gguf.GGUFWriter(path, "llama")
    for name, x in keys.items():
        out.add_key_value(name, *tiny_gguf.typed(x))
    for name, shape in shapes.items():
        plain = stored == "F32" or len(shape) == 1
        x = np.ones(shape, np.float32)
        if not plain:
            x = tiny_gguf.random_blocks(stored, math.prod(shape[:-1]), shape[-1]).reshape(*shape[:-1], -1)
        kind = None if plain else gguf.GGMLQuantizationType[stored]
        out.add_tensor(f"{name}.weight", x, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    reader = gguf.GGUFReader(path)
    fields = [*reader.fields.values()][3:]  # without the version and both counts
    return path.read_bytes(), [spans(x) for x in fields], [spans(x.field) for x in reader.tensors]


def spans(field):
    """Where the parts of a key, or of a tensor's entry, begin and end."""
    ends = np.cumsum([field.offset, *(part.nbytes for part in field.parts)]).tolist()
    return [*pairwise(ends)]


def number(d):
    return d.choose(*NUMBERS, int(d.rng.integers(300)), int(d.rng.integers(2**63)))


def with_number(data, at, size, x):
    """The bytes with another number at that place."""
    return data[:at] + (x % 256**size).to_bytes(size, "little") + data[at + size :]


def spoiled(d, data, keys, tensors):
    """One thing in the header is another, gone, there twice, or counted wrong. Later places come first."""
    fields, count = d.choose((keys, 16), (tensors, 8))
    parts = d.choose(*fields)
    how, (begin, end) = d.rng.integers(6), (parts[0][0], parts[-1][1])
    if how == 0:
        at, size = d.choose((4, 4), (8, 8), (16, 8))
        return with_number(data, at, size, number(d)), "a count or the version"
    if how == 1:  # with the count of before, now and then
        fewer = with_number(data, count, 8, len(fields) - d.choose(0, *[1] * 9))
        return fewer[:begin] + fewer[end:], f"nothing at {begin}"
    if how == 2:
        other = d.choose(*fields)
        more = with_number(data, count, 8, len(fields) + d.choose(0, *[1] * 9))
        return more[:begin] + data[other[0][0] : other[-1][1]] + more[begin:], f"one more at {begin}"
    if how == 3:  # another name
        name = d.choose(*STRINGS, d.rng.bytes(int(d.rng.integers(70))))
        (first, _), (_, last) = parts[:2]
        return data[:first] + struct.pack("<Q", len(name)) + name + data[last:], f"{name[:30]} at {first}"
    at, end = d.choose(*parts[2:])
    if end - at > 8:
        return data[:at] + d.rng.bytes(end - at) + data[end:], f"other bytes at {at}"
    return with_number(data, at, end - at, d.choose(number(d), int(d.rng.integers(45)))), f"a number at {at}"


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
    found, *fields = whole(*which)
    changes, begin = [], fields[-1][-1][-1][1]
    if d.chance(0.75):
        found, what = spoiled(d, found, *fields)
        changes.append(what)
    for _ in range(d.choose(0, 0, 1, 2) if changes else 1):
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
