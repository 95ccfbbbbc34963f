"""What the suite "layers" times: fastattn, its fallback, plain NumPy, and the peers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn import layers, ops
from fastattn._args.types import Rounding
from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS, Engine, own_engines
from fastattn._bench.suites.layers import peers
from fastattn._bench.suites.layers.problem import LayerProblem, plain_layer
from fastattn._bench.ways import Way
from fastattn.cache import DecoderCache, KVCache
from fastattn.positions import apply_rope


def _own(problem: LayerProblem, backend: str) -> Way:
    """The layer as a user builds it."""
    kind, x, weights = problem.shape.kind, problem.x(), problem.weights()
    if kind == "linear":
        packed = ops.pack(weights["weight"], dtype=problem.dtype)
        result = np.empty((*x.shape[:-1], packed.out_features), x.dtype)
        activations: Rounding | None = "int8" if problem.variant == INT8_INPUTS else None
        return Way(lambda: ops.linear(x, packed, activations=activations, out=result))
    if kind in ("encoder", "decoder", "step"):
        return Way(_layer(problem, x, weights))
    out = np.empty_like(x)
    if kind == "layer_norm":
        weight, bias = weights["weight"], weights["bias"]
        return Way(lambda: ops.layer_norm(x, weight, bias, out=out))
    if kind == "gelu":
        return Way(lambda: ops.activate(x, "gelu", out=out))
    cos, sin = problem.tables()
    return Way(lambda: apply_rope(x, cos, sin, out=out))


def _layer(problem: LayerProblem, x: Array, weights: dict[str, Array]) -> Any:
    """A call of an encoder layer, of a decoder layer, or of a decoder layer's next step over its caches."""
    shape = problem.shape
    kind = layers.TransformerEncoderLayer if shape.kind == "encoder" else layers.TransformerDecoderLayer
    layer: Any = kind(shape.width, shape.heads, shape.inner, "gelu", weights_dtype=problem.dtype)
    layer.load_state_dict(weights)
    if shape.kind == "encoder":
        return lambda: layer(x)
    memory = problem.memory()
    if shape.kind == "decoder":
        return lambda: layer(x, memory, tgt_is_causal=True)
    cache = DecoderCache(KVCache(shape.length))
    layer(x[:, :-1], memory, cache=cache)
    last = x[:, -1:].copy()

    def step() -> Array:
        cache.tokens.truncate(shape.length - 1)
        out: Array = layer(last, cache=cache)
        return out

    return step


def _numpy(problem: LayerProblem, threads: int) -> Way:
    """By definition, in float32; a step keeps its keys and values."""
    shape, x, memory, tables = problem.shape, problem.x(), problem.memory(), problem.tables
    weights = problem.weights()
    if shape.kind == "step":
        return Way(_numpy_step(problem, x, memory, weights))
    cached = tables() if shape.kind == "rope" else None
    return Way(lambda: plain_layer(shape, x, memory, weights, lambda: cached))


def _numpy_step(problem: LayerProblem, x: Array, memory: Array, weights: dict[str, Array]) -> Any:
    heads, last = problem.shape.heads, x[:, -1:].copy()
    own, over = (
        [plain.project(tokens, weights, name, part, heads).copy() for part in (1, 2)]
        for tokens, name in ((x, "self_attn"), (memory, "multihead_attn"))
    )

    def step() -> Array:
        q, *new = (plain.project(last, weights, "self_attn", part, heads) for part in range(3))
        for cache, row in zip(own, new, strict=True):
            cache[:, :, -1:] = row
        y = plain.linear(plain.attention(q, own[0], own[1]), weights, "self_attn.out_proj")
        y = plain.layer_norm(last + y, weights, "norm1")
        q = plain.project(y, weights, "multihead_attn", 0, heads)
        attended = plain.linear(plain.attention(q, over[0], over[1]), weights, "multihead_attn.out_proj")
        y = plain.layer_norm(y + attended, weights, "norm2")
        inner = plain.gelu(plain.linear(y, weights, "linear1"))
        return plain.layer_norm(y + plain.linear(inner, weights, "linear2"), weights, "norm3")

    return step


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, by definition"),
    "torch": Engine(("torch",), peers.torch_eager, "torch.nn, eager, inference mode"),
    "ort": Engine(("onnxruntime", "onnx"), peers.onnxruntime, "onnxruntime, the layer's graph"),
    "ort-bert": Engine(
        ("onnxruntime", "onnx"), peers.onnxruntime_bert, "the same after onnxruntime's BERT optimiser"
    ),
    "openvino": Engine(("openvino", "onnx"), peers.openvino, "OpenVINO, the same graph"),
}
