"""Experts in safetensors files where one tensor has all of a layer; GPT-OSS's weights may be MXFP4.

Such a weight is two tensors, of blocks and of their scales, and becomes one in GGUF's order of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from fastattn._args.types import Array, Shape
from fastattn._formats import FORMATS
from fastattn._regular_files import Tensors
from fastattn._safetensors import TensorFile

_OF_EXPERTS = re.compile(
    r"\.experts\.(?:gate_up|down)_proj(_bias|_blocks|_scales|)"
    r"|\.block_sparse_moe\.(?:input|output)_linear\.weight"
)
# Of Nomic: the experts' rows follow one another, and the router tells their number.
_ROWS_OF_EXPERTS = re.compile(r"experts\.mlp\.w[12]$")
_MOST_EXPERTS = 1 << 12
_FORMAT = FORMATS["MXFP4"]
_BYTES = _FORMAT.features // 2  # of a block, without its scale


def experts_apart(files: Mapping[str, TensorFile]) -> dict[str, TensorFile | Mxfp4Expert]:
    """The files by names of tensors, in which each expert's are apart: NAME.0 and so on of NAME.

    Tensors that do not fit stay as they are.
    """
    found: dict[str, TensorFile | Mxfp4Expert] = dict(files)
    for name, file in files.items():
        match = _OF_EXPERTS.search(name)
        if _ROWS_OF_EXPERTS.search(name):
            router = _ROWS_OF_EXPERTS.sub("router.layer.weight", name)
            count = files[router].shape(router)[0] if router in files else 0
            if 0 < count <= _MOST_EXPERTS and file.shape(name) and file.shape(name)[0] % count == 0:
                del found[name]
                found |= dict.fromkeys(file.split(name, count), file)
        if match is None or match.end() < len(name) or match[1] == "_scales":
            continue
        if match[1] != "_blocks":
            if file.shape(name) and file.shape(name)[0] <= _MOST_EXPERTS:
                del found[name]
                found |= dict.fromkeys(file.split(name), file)
            continue
        scales, stem = f"{name.removesuffix('_blocks')}_scales", name.removesuffix("_blocks")
        if scales not in files or not _fit(file, name, files[scales], scales):
            continue
        del found[name], found[scales]
        pairs = zip(file.split(name), files[scales].split(scales), strict=True)
        for i, (block, scale) in enumerate(pairs):
            found[f"{stem}.{i}"] = Mxfp4Expert(file, block, files[scales], scale)
    return found


def _fit(file: TensorFile, blocks: str, other: TensorFile, scales: str) -> bool:
    """Tell whether the tensors are blocks (experts, rows, n, bytes) and their scales (experts, rows, n)."""
    shape, are_bytes = file.shape(blocks), file.kind(blocks) == other.kind(scales) == "U8"
    fits = len(shape) == 4 and shape[0] <= _MOST_EXPERTS and shape[3] == _BYTES
    return are_bytes and fits and shape[:3] == other.shape(scales)


class Mxfp4Expert(Tensors):
    """One expert's weight, read as tensors of a `GgufFile` are."""

    def __init__(self, file: TensorFile, blocks: str, other: TensorFile, scales: str):
        self._file, self._blocks, self._other, self._scales = file, blocks, other, scales

    def shape(self, name: str) -> Shape:
        """The shape of the weight."""
        rows, n, _ = self._file.shape(self._blocks)
        return rows, n * _FORMAT.features

    def kind(self, name: str) -> str:
        """The type of the weight, as GGUF calls it."""
        return _FORMAT.name

    def empty(self, name: str, shape: Shape) -> Array:
        """An uninitialised array for numbers."""
        return np.empty(shape, np.float32)

    def unit(self, name: str) -> int:
        """Elements that are read together."""
        return _FORMAT.features

    def blocks(self, name: str, begin: int, end: int) -> Array:
        """Some rows, as a GGUF file has them: (rows, bytes)."""
        n = self.shape(name)[1] // _FORMAT.features
        return self._read(begin * n, (end - begin) * n).reshape(end - begin, -1)

    def fill(self, array: Array, name: str, begin: int) -> None:
        """Read a contiguous `array` from the weight, from its element `begin` on, which begins a block."""
        flat = array.reshape(-1)
        data = self._read(begin // _FORMAT.features, flat.size // _FORMAT.features)
        flat[:] = _FORMAT.decoded(data.reshape(-1))

    def _read(self, begin: int, count: int) -> Array:
        """Blocks (count, bytes) as GGUF has them: number i and number i + 16 share a byte, not neighbours."""
        there, data = np.empty((count, _BYTES), np.uint8), np.empty((count, _FORMAT.nbytes), np.uint8)
        scales = np.empty(count, np.uint8)
        self._file.fill(there, self._blocks, begin * _BYTES)
        self._other.fill(scales, self._scales, begin)
        codes = np.stack((there & 15, there >> 4), axis=2).reshape(count, 2, _BYTES)
        data[:, 0], data[:, 1:] = scales, codes[:, 0] | codes[:, 1] << 4
        return data
