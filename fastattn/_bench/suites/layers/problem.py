"""The problems of the suite "layers", and which of them are measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastattn._args.packed import from_bfloat16_bits, to_bfloat16_bits
from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS, WEIGHT_BYTES, Problem, Request, Section

DTYPES = tuple(WEIGHT_BYTES)
FEW = 8  # rows of a linear map whose limit is the memory that its weights are read from


class LayerShape(NamedTuple):
    """x is (batch, length, width)."""

    name: str
    kind: str  # "linear", "layer_norm", "gelu", "rope", "encoder", "decoder", "step"
    batch: int
    length: int
    width: int
    inner: int = 0  # output features of a linear map, or of the first one of a feed-forward network
    heads: int = 0
    memory: int = 0  # length of the memory that a decoder layer attends to

    @property
    def rows(self) -> int:
        return self.batch * self.length


class LayerProblem(Problem[LayerShape]):
    """A linear map, one pass over memory, or a layer.

    A "step" is the last row of a decoder layer; the keys and values of the rows before it are cached.
    """

    shape_type = LayerShape

    @property
    def name(self) -> str:
        return self.shape.name + (f", {self.variant}" if self.variant == INT8_INPUTS else "")

    def x(self) -> Array:
        """The input, (B, L, width); of rope (B, H, L, width / H)."""
        s = self.shape
        x = self.rng(0).standard_normal((s.batch, s.length, s.width), np.float32)
        return np.ascontiguousarray(plain.split_heads(x, s.heads)) if s.kind == "rope" else x

    def memory(self) -> Array:
        """What a decoder layer attends to, (B, S, width)."""
        s = self.shape
        return self.rng(1).standard_normal((s.batch, s.memory, s.width), np.float32)

    def tables(self) -> tuple[Array, Array]:
        """The cosines and sines of rope, (L, head_dim / 2)."""
        return plain.rope_tables(self.shape.length, self.shape.width // self.shape.heads, 1e4, np.float32)

    def weights(self) -> dict[str, Array]:
        """By the names that torch gives them; in float32, but with values that `dtype` holds exactly."""
        rng = self.rng(2)
        d, inner, kind = self.shape.width, self.shape.inner, self.shape.kind

        def matrix(rows: int, columns: int) -> Array:
            return rounded(rng.standard_normal((rows, columns), np.float32) * columns**-0.5, self.dtype)

        def vectors(name: str, n: int, first: float = 0.0) -> dict[str, Array]:
            return {name: (first + 0.1 * rng.standard_normal(n)).astype(np.float32)}

        if kind in ("gelu", "rope"):
            return {}
        if kind == "linear":
            return {"weight": matrix(inner, d)}
        weights: dict[str, Array] = {}
        norms = {"layer_norm": ("",), "encoder": ("norm1.", "norm2.")}
        for name in norms.get(kind, ("norm1.", "norm2.", "norm3.")):
            weights |= vectors(f"{name}weight", d, 1.0) | vectors(f"{name}bias", d)
        if kind == "layer_norm":
            return weights
        for name in ("self_attn", "multihead_attn")[: 1 if kind == "encoder" else 2]:
            weights[f"{name}.in_proj_weight"] = matrix(3 * d, d)
            weights[f"{name}.out_proj.weight"] = matrix(d, d)
            weights |= vectors(f"{name}.in_proj_bias", 3 * d) | vectors(f"{name}.out_proj.bias", d)
        weights |= {"linear1.weight": matrix(inner, d), "linear2.weight": matrix(d, inner)}
        return weights | vectors("linear1.bias", inner) | vectors("linear2.bias", d)

    def compute(self, dtype: Any, batch: slice = slice(None)) -> Array:
        """The result in plain NumPy: (B, L, out), of a step its last row only; of rope (B, H, L, D)."""
        weights = {name: array.astype(dtype) for name, array in self.weights().items()}
        x, memory = self.x()[batch].astype(dtype), self.memory()[batch].astype(dtype)
        return plain_layer(self.shape, x, memory, weights, self.tables)

    def reference(self) -> tuple[Array, Array]:
        """The last sequence, or 16 rows of a linear map."""
        last, total = self.shape.batch - 1, self.shape.rows
        if self.shape.kind == "linear":
            chosen = np.random.default_rng(self.seed).permutation(total)[:16]
            x, weight = self.x().reshape(total, -1)[chosen], self.weights()["weight"]
            return chosen, x.astype(np.float64) @ weight.astype(np.float64).T
        want = self.compute(np.float64, slice(last, last + 1))
        want = want.reshape(-1, want.shape[-1])
        total = self.shape.batch * len(want)
        return np.arange(total - len(want), total), want

    @property
    def unit(self) -> str:
        products = self.shape.kind in ("encoder", "decoder") or (
            self.shape.kind == "linear" and self.shape.rows > FEW
        )
        return "flops" if products else "bytes"

    @property
    def work(self) -> float:
        """Operations of the matrix products.

        Of few rows and of a step it is the bytes of the weights, of one pass those that are read and written.
        """
        s = self.shape
        d, n = s.width, s.rows
        if s.kind in ("layer_norm", "gelu", "rope"):
            return 2 * 4.0 * n * d
        if s.kind == "linear":
            return 2.0 * n * d * s.inner if n > FEW else float(d * s.inner * WEIGHT_BYTES[self.dtype])
        if s.kind == "encoder":
            return 2.0 * n * (4 * d * d + 2 * d * s.inner) + 4.0 * n * s.length * d
        if s.kind == "step":  # the keys and values of the memory are cached, too
            cached = 2 * 4 * s.batch * d * (s.length + s.memory)
            return float((6 * d * d + 2 * d * s.inner) * WEIGHT_BYTES[self.dtype] + cached)
        products = 2.0 * n * (6 * d * d + 2 * d * s.inner) + 2.0 * s.batch * s.memory * 2 * d * d
        return products + 4.0 * n * d * (s.length / 2 + s.memory)


def plain_layer(shape: LayerShape, x: Array, memory: Array, weights: plain.Weights, tables: Any) -> Array:
    """The layer in plain NumPy, in x's dtype."""
    if shape.kind == "linear":
        out: Array = x @ weights["weight"].T
        return out
    if shape.kind == "layer_norm":
        return plain.layer_norm(x, {f".{name}": array for name, array in weights.items()}, "")
    if shape.kind == "gelu":
        return plain.gelu(x)
    if shape.kind == "rope":
        return plain.rope(x, *(table.astype(x.dtype) for table in tables()))
    if shape.kind == "encoder":
        return plain.encoder_layer(x, weights, shape.heads)
    out = plain.decoder_layer(x, memory, weights, shape.heads)
    return out[:, -1:] if shape.kind == "step" else out


def rounded(weight: Array, dtype: str) -> Array:
    """A weight (out, in) rounded to the values that `dtype` holds.

    int8 has one scale for each row, int4 one for each 32 numbers of it, whose largest becomes -8.
    """
    if dtype == "bfloat16":
        return from_bfloat16_bits(to_bfloat16_bits(weight))
    if dtype == "int8":
        scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
        weight = np.rint(weight / scale) * scale
    if dtype == "int4":
        codes, scale = in_4_bits(weight)
        weight = ((codes - 8) * scale).reshape(weight.shape)
    return weight


def in_4_bits(weight: Array) -> tuple[Array, Array]:
    """Codes 0 .. 15 (out, blocks, 32) and scales (out, blocks, 1), float32, of a weight (out, in)."""
    blocks = weight.reshape(len(weight), -1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
    scale = (largest / -8).astype(np.float16).astype(np.float32)
    return np.clip(np.rint(blocks / scale), -8, 7) + np.float32(8), scale


def linear(rows: int, width: int, inner: int) -> LayerShape:
    return LayerShape(f"{rows},{width},{inner}", "linear", 1, rows, width, inner)


def encoder(batch: int, length: int, width: int) -> LayerShape:
    name = f"encoder {batch},{length},{width}"
    return LayerShape(name, "encoder", batch, length, width, 4 * width, 12)


def decoder(kind: str, batch: int, length: int, width: int, memory: int) -> LayerShape:
    name = f"{kind} {batch},{length},{width} over {memory}"
    return LayerShape(name, kind, batch, length, width, 4 * width, width // 64, memory)


# Encoders 384 and 768 wide, a cube, then MiniLM's: many rows, and 128 of them.
MATRICES = (
    linear(128, 384, 1536),
    linear(1024, 768, 768),
    linear(1024, 768, 3072),
    linear(2048, 2048, 2048),
    linear(4096, 384, 384),
    linear(4096, 384, 1536),
    linear(4096, 1536, 384),
    linear(128, 384, 384),
    linear(128, 1536, 384),
)
VECTORS = (linear(1, 2048, 2048), linear(1, 4096, 11008))
EIGHT = (linear(8, 4096, 11008),)
ENCODERS = (encoder(32, 128, 384), encoder(1, 16, 384), encoder(32, 128, 768), encoder(1, 16, 768))
SMALL_ENCODERS = (encoder(8, 128, 384), ENCODERS[1])
DECODERS = (decoder("decoder", 8, 128, 512, 128), decoder("step", 1, 128, 1024, 128))
PASSES = (
    LayerShape("layer_norm 4096,768", "layer_norm", 32, 128, 768),
    LayerShape("gelu 4096,3072", "gelu", 32, 128, 3072),
    LayerShape("rope 1,32,2048,64", "rope", 1, 2048, 2048, heads=32),
)


def plan(request: Request) -> list[Section]:
    """Weights in every type or in `dtype`; fewer matrices and smaller batches unless `full`."""
    full = request.full
    sections: list[Section] = []

    def section(title: str, shapes: Any, dtype: str) -> None:
        maps = title in ("linear", "one row", "eight rows") and dtype in ("int8", "int4")
        variants = ("plain", INT8_INPUTS) if maps else ("plain",)
        sections.append(request.section(LayerProblem, title, shapes, dtype, variants))

    for dtype in DTYPES if request.dtype is None else (request.dtype,):
        main = dtype == "float32"
        section("linear", MATRICES if full else MATRICES[:3] if main else MATRICES[1:2], dtype)
        if main:
            section("layer", (*(ENCODERS if full else SMALL_ENCODERS), *DECODERS), dtype)
        section("one row", VECTORS if full else VECTORS[:1], dtype)
        if full and not main:
            section("eight rows", EIGHT, dtype)
        if main:
            section("one pass", PASSES if full else PASSES[::2], dtype)
    return sections
