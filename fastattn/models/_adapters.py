"""Adapters of low rank (LoRA, Hu et al. 2021): to a tensor, a product of two narrow matrices is added.

A folder of PEFT has adapter_config.json, and the matrices in adapter_model.safetensors.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from fastattn.models._files import Config, ModelError
from fastattn.models._tensors import opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fastattn._args.types import Array

    Pairs = dict[str, tuple[Array, Array]]  # of a tensor (n, m), by its name: (n, rank) and (rank, m)

CONFIG, WEIGHTS = FILES = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora(?:_embedding)?)_([AB])(?:\.weight)?")


def of_peft(folder: Path, renamed: Callable[[str], str]) -> Pairs:
    """The pairs in a folder of PEFT, under the names that `renamed` gives their tensors."""
    config = Config(folder / CONFIG)
    config.refuse(peft_type="LORA", bias="none", use_rslora=False, use_dora=False, fan_in_fan_out=False)
    config.refuse(rank_pattern={}, alpha_pattern={}, modules_to_save=[], lora_bias=False)
    rank = config.size("r", 8)
    scale = config.number("lora_alpha", 8) / rank
    path = folder / WEIGHTS
    found: dict[str, dict[str, Array]] = {}
    with ExitStack() as stack:
        file = opened(path, stack)
        for name in file.names:
            parts = _NAME.fullmatch(name)
            array = file.get_tensor(name).astype(np.float32)
            if parts is None or array.ndim != 2 or not np.isfinite(array).all():
                raise ModelError(f"{path} has {name!r}; expected finite matrices of lora_A and lora_B")
            # A table of tokens is (tokens, features), and its adapter is that of the transposed one.
            key = "BA"["AB".index(parts[3])] if parts[2] == "lora_embedding" else parts[3]
            array = array.T if parts[2] == "lora_embedding" else array
            found.setdefault(renamed(f"{parts[1]}.weight"), {})[key] = array
    for name, pair in found.items():
        ranks = [pair[key].shape[axis] for key, axis in (("A", 0), ("B", 1)) if key in pair]
        if ranks != [rank, rank]:
            came = f"{path} has matrices of rank {ranks} for {name!r}"
            raise ModelError(f"{came}; expected lora_A and lora_B of rank {rank}, as {CONFIG} says")
    return {name: (pair["B"] * np.float32(scale), pair["A"]) for name, pair in found.items()}


def joined(pairs: Pairs, names: tuple[str, ...], name: str) -> Pairs:
    """`pairs`, those of the tensors `names` as one of `name`, where their rows follow one another."""
    parts = [pairs[each] for each in names if each in pairs]
    if not parts:
        return pairs
    if len(parts) != len(names) or len({a.shape[1] for _, a in parts}) != 1:
        raise ModelError(f"an adapter has some of {', '.join(names)}; expected all of them, of one input")
    rows, ranks = sum(len(b) for b, _ in parts), sum(len(a) for _, a in parts)
    wide, row, column = np.zeros((rows, ranks), np.float32), 0, 0
    for b, a in parts:
        wide[row : row + len(b), column : column + len(a)] = b
        row, column = row + len(b), column + len(a)
    others = {key: pair for key, pair in pairs.items() if key not in names}
    return {**others, name: (wide, np.concatenate([a for _, a in parts]))}
