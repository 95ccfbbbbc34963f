"""The suite "layers": linear maps, passes over memory, and Transformer layers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from bench import plain
from bench.graphs import bert_optimised, openvino_way
from bench.suite import INT8_INPUTS, WEIGHT_BYTES, Request, Suite, WeightProblem
from fastattn import layers, ops
from fastattn._args.types import Rounding
from fastattn._args.weight_types import from_bfloat16_bits, to_bfloat16_bits
from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, own_engines
from fastattn.positions import apply_rope

DTYPES = tuple(WEIGHT_BYTES)
FEW = 8  # rows of a linear map whose limit is the memory that its weights are read from


class LayerShape(NamedTuple):
    """x is (batch, length, width)."""

    name: str
    kind: str  # "linear", "layer_norm", "gelu", "rope", "encoder", "decoder"
    batch: int
    length: int
    width: int
    inner: int = 0  # output features of a linear map, or of the first one of a feed-forward network
    heads: int = 0
    memory: int = 0  # length of the memory that a decoder layer attends to

    @property
    def rows(self) -> int:
        return self.batch * self.length


class LayerProblem(WeightProblem):
    """A linear map, one pass over memory, or a layer."""

    shape: LayerShape

    def x(self) -> Array:
        """The input, (B, L, width); of rope (B, H, L, width / H)."""
        s = self.shape
        x = self.rng(0).standard_normal((s.batch, s.length, s.width), np.float32)
        return np.ascontiguousarray(plain.split_heads(x, s.heads)) if s.kind == "rope" else x

    def memory(self) -> Array:
        """The memory that a decoder layer attends to, (B, S, width)."""
        s = self.shape
        return self.rng(1).standard_normal((s.batch, s.memory, s.width), np.float32)

    def tables(self) -> tuple[Array, Array]:
        """The cosines and sines of rope, (L, head_dim / 2)."""
        return plain.rope_tables(self.shape.length, self.shape.width // self.shape.heads, 1e4, np.float32)

    def weights(self) -> dict[str, Array]:
        """Arrays by torch's names; in float32, but with values that `dtype` holds exactly."""
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
        """The result in plain NumPy: (B, L, out); of rope (B, H, L, D)."""
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

        Of few rows it is the bytes of the weights, of one pass the bytes that are read and written.
        """
        s = self.shape
        d, n = s.width, s.rows
        if s.kind in ("layer_norm", "gelu", "rope"):
            return 2 * 4.0 * n * d
        if s.kind == "linear":
            return 2.0 * n * d * s.inner if n > FEW else float(d * s.inner * WEIGHT_BYTES[self.dtype])
        if s.kind == "encoder":
            return 2.0 * n * (4 * d * d + 2 * d * s.inner) + 4.0 * n * s.length * d
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
    return plain.decoder_layer(x, memory, weights, shape.heads)


def rounded(weight: Array, dtype: str) -> Array:
    """A weight (out, in) rounded to the values that `dtype` holds; int8 has one scale for each row."""
    if dtype == "bfloat16":
        return from_bfloat16_bits(to_bfloat16_bits(weight))
    if dtype == "int8":
        scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
        weight = np.rint(weight / scale) * scale
    return weight


def linear(rows: int, width: int, inner: int) -> LayerShape:
    return LayerShape(f"{rows},{width},{inner}", "linear", 1, rows, width, inner)


def encoder(batch: int, length: int, width: int) -> LayerShape:
    name = f"encoder {batch},{length},{width}"
    return LayerShape(name, "encoder", batch, length, width, 4 * width, 12)


def decoder(batch: int, length: int, width: int, memory: int) -> LayerShape:
    name = f"decoder {batch},{length},{width} over {memory}"
    return LayerShape(name, "decoder", batch, length, width, 4 * width, width // 64, memory)


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
DECODER = decoder(8, 128, 512, 128)
PASSES = (
    LayerShape("layer_norm 4096,768", "layer_norm", 32, 128, 768),
    LayerShape("gelu 4096,3072", "gelu", 32, 128, 3072),
    LayerShape("rope 1,32,2048,64", "rope", 1, 2048, 2048, heads=32),
)


def plan(request: Request) -> Sections:
    """Weights in every type or in `dtype`; fewer matrices and smaller batches unless `full`."""
    full = request.full
    sections: Sections = {}

    def section(title: str, shapes: Any, dtype: str) -> None:
        maps = title in ("linear", "one row", "eight rows") and dtype == "int8"
        variants = ("plain", INT8_INPUTS) if maps else ("plain",)
        sections.update(request.section(LayerProblem, title, shapes, dtype, variants))

    for dtype in DTYPES if request.dtype is None else (request.dtype,):
        main = dtype == "float32"
        section("linear", MATRICES if full else MATRICES[:3] if main else MATRICES[1:2], dtype)
        if main:
            section("layer", (*(ENCODERS if full else SMALL_ENCODERS), DECODER), dtype)
        section("one row", VECTORS if full else VECTORS[:1], dtype)
        if full and not main:
            section("eight rows", EIGHT, dtype)
        if main:
            section("one pass", PASSES if full else PASSES[::2], dtype)
    return sections


class _Graph:
    """Nodes and constants of a graph; every method that adds one returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}

    def add(self, kind: str, *inputs: str | Array, out: str = "", results: int = 1, **attributes: Any) -> str:
        """A node. Of several `results`, the names are the one returned with a number after it."""
        from onnx import helper

        out = out or f"{kind}_{len(self.nodes)}"
        names = [one if isinstance(one, str) else self._constant(one) for one in inputs]
        outs = [out] if results == 1 else [f"{out}{i}" for i in range(results)]
        self.nodes.append(helper.make_node(kind, names, outs, name=f"node_{out}", **attributes))
        return out

    def _constant(self, array: Array) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def linear(self, x: str, weight: Array, bias: Array) -> str:
        return self.add("Add", bias, self.add("MatMul", x, weight.T))


# How a linear map of int8 weights rounds its inputs: as the runtime chooses, by the range of each call, or by
# a range that is known before.
FREE, DYNAMIC, STATIC = "weights", "dynamic", "static"


def graph_of(problem: LayerProblem, inputs: str = FREE) -> tuple[bytes, dict[str, Array], Array]:
    """The model, its inputs, and an array for its output."""
    shape, x, weights = problem.shape, problem.x(), problem.weights()
    graph, feeds, out, opset = _Graph(), {"x": x}, np.empty_like(x), 17
    if shape.kind == "linear":
        out = np.zeros((*x.shape[:-1], shape.inner), x.dtype)
        _linear(graph, weights["weight"], problem, inputs)
    elif shape.kind == "layer_norm":
        _norm(graph, "x", weights, "", out="out")
    elif shape.kind == "gelu":
        graph.add("Gelu", "x", out="out")
        opset = 20
    elif shape.kind == "rope":
        cos, sin = problem.tables()
        feeds |= {"cos": cos[None], "sin": sin[None]}
        graph.add("RotaryEmbedding", "x", "cos", "sin", out="out")
        opset = 23
    elif shape.kind == "encoder":
        _encoder(graph, shape, weights)
    else:
        raise Unsupported("decoder layers are not built as a graph")
    return runtimes.onnx_model(graph.nodes, feeds, graph.constants, out, opset), feeds, out


def _linear(graph: _Graph, weight: Array, problem: LayerProblem, inputs: str) -> None:
    """The product with a constant weight; int8 has a scale for each output feature and is widened."""
    if problem.dtype == "int8":
        scale = np.abs(weight).max(1) / np.float32(127)
        quantised = np.rint(weight / scale[:, None]).astype(np.int8)
        zeros = np.zeros(len(scale), np.int8)
        if inputs == DYNAMIC:
            x = graph.add("DynamicQuantizeLinear", "x", results=3)  # bytes, their scale, their zero
            sums = graph.add("MatMulInteger", f"{x}0", quantised.T, f"{x}2", zeros)
            graph.add("Mul", graph.add("Cast", sums, to=1), graph.add("Mul", f"{x}1", scale), out="out")
            return
        weight_name = graph.add("DequantizeLinear", quantised.T, scale, zeros, axis=1)
        x = "x"
        if inputs == STATIC:
            scale_zero = np.array(2 * np.abs(problem.x()).max() / 255, np.float32), np.array(128, np.uint8)
            x = graph.add("DequantizeLinear", graph.add("QuantizeLinear", "x", *scale_zero), *scale_zero)
        graph.add("MatMul", x, weight_name, out="out")
    else:
        graph.add("MatMul", "x", weight.T, out="out")


def _norm(graph: _Graph, x: str, weights: dict[str, Array], name: str, out: str = "") -> str:
    weight, bias = weights[f"{name}weight"], weights[f"{name}bias"]
    return graph.add("LayerNormalization", x, weight, bias, out=out, axis=-1, epsilon=1e-5)


def _encoder(graph: _Graph, shape: LayerShape, weights: dict[str, Array]) -> None:
    """x is (B, L, D), out the same: post-norm, GELU, no mask."""
    add, width = graph.add, shape.width
    heads = np.array([0, 0, shape.heads, width // shape.heads], np.int64)
    projected = np.split(weights["self_attn.in_proj_weight"], 3)
    biases = np.split(weights["self_attn.in_proj_bias"], 3)
    q, k, v = (
        add("Reshape", graph.linear("x", weight, bias), heads)
        for weight, bias in zip(projected, biases, strict=True)
    )
    q, k, v = (
        add("Transpose", y, perm=perm)
        for y, perm in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3]))
    )
    root = np.array(math.sqrt(width // shape.heads), np.float32)
    probs = add("Softmax", add("Div", add("MatMul", q, k), root), axis=-1)
    context = add("Transpose", add("MatMul", probs, v), perm=[0, 2, 1, 3])
    context = add("Reshape", context, np.array([0, 0, width], np.int64))
    attended = graph.linear(context, weights["self_attn.out_proj.weight"], weights["self_attn.out_proj.bias"])
    y = _norm(graph, add("Add", attended, "x"), weights, "norm1.")
    inner = graph.linear(y, weights["linear1.weight"], weights["linear1.bias"])
    half, one, root = (np.array(value, np.float32) for value in (0.5, 1.0, math.sqrt(2)))
    erf = add("Add", add("Erf", add("Div", inner, root)), one)
    inner = add("Mul", add("Mul", inner, erf), half)
    outer = graph.linear(inner, weights["linear2.weight"], weights["linear2.bias"])
    _norm(graph, add("Add", outer, y), weights, "norm2.", out="out")


def torch_eager(problem: LayerProblem, threads: int) -> Way:
    """torch.nn; if the weights are bfloat16, so are the inputs."""
    if problem.variant == INT8_INPUTS and problem.dtype == "int8":
        return _torch_int8(problem, threads)
    if problem.dtype == "int8":
        raise Unsupported("has no product of float32 and int8")
    torch = runtimes.torch_inference(threads)
    functional = torch.nn.functional
    shape, kind = problem.shape, problem.shape.kind
    dtype = getattr(torch, problem.dtype)
    x, memory = (torch.from_numpy(array).to(dtype) for array in (problem.x(), problem.memory()))
    weights = {name: torch.from_numpy(array).to(dtype) for name, array in problem.weights().items()}

    def way(call: Any) -> Way:
        return Way(call, runtimes.read_tensor)

    if kind == "linear":
        return way(lambda: functional.linear(x, weights["weight"]))
    if kind == "layer_norm":
        return way(lambda: functional.layer_norm(x, x.shape[-1:], weights["weight"], weights["bias"]))
    if kind == "gelu":
        return way(lambda: functional.gelu(x))
    if kind == "rope":
        return way(_torch_rope(x, *(torch.from_numpy(table) for table in problem.tables())))
    sizes = (shape.width, shape.heads, shape.inner)
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "dtype": dtype}
    module: Any = torch.nn.TransformerEncoderLayer if kind == "encoder" else torch.nn.TransformerDecoderLayer
    layer = module(*sizes, **options).eval()
    layer.load_state_dict(weights)
    if kind == "encoder":
        return way(lambda: layer(x))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(shape.length)
    return way(lambda: layer(x, memory, tgt_mask=mask, tgt_is_causal=True))


def _torch_int8(problem: LayerProblem, threads: int) -> Way:
    """A linear map as `quantize_dynamic` makes it, with all 8 bits of the inputs."""
    torch = runtimes.torch_inference(threads)
    x, weight = torch.from_numpy(problem.x()), torch.from_numpy(problem.weights()["weight"])
    scale, zeros = weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.int64)
    quantised = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    return Way(lambda: torch.ops.quantized.linear_dynamic(x, packed, False), runtimes.read_tensor)


def _torch_rope(x: Any, cos: Any, sin: Any) -> Any:
    """The expression of transformers: x is (B, H, L, D), cos and sin are (L, D / 2)."""
    import torch

    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def call() -> Any:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return call


def _graphs(problem: LayerProblem) -> dict[str, tuple[bytes, dict[str, Array], Array]]:
    """The layer's graph; one for each way to round the inputs, where they may be rounded."""
    if problem.shape.kind == "decoder":
        raise Unsupported("decoder layers are not built as a graph")
    rounding = problem.dtype == "int8" and problem.variant == INT8_INPUTS
    ways = (FREE, DYNAMIC, STATIC) if rounding else (FREE,)
    return {way: graph_of(problem, way) for way in ways}


def onnxruntime(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The graph, with the optimisations that a session makes by itself."""
    if problem.dtype == "bfloat16":
        raise Unsupported("has no bfloat16 product on CPUs")
    return {
        name: runtimes.onnxruntime_way(model, threads, feeds, out)
        for name, (model, feeds, out) in _graphs(problem).items()
    }


def onnxruntime_bert(problem: LayerProblem, threads: int) -> Way:
    """The encoder layer's graph, rewritten by onnxruntime.transformers."""
    if problem.shape.kind != "encoder" or problem.dtype != "float32":
        raise Unsupported("is for encoder layers in float32")
    model, feeds, out = _graphs(problem)[FREE]
    model = bert_optimised(model, problem.shape.heads, problem.shape.width)
    return runtimes.onnxruntime_way(model, threads, feeds, out)


def openvino(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The graph in OpenVINO; where the inputs are to stay exact, OpenVINO is told not to round them."""
    exact = problem.dtype == "int8" and problem.variant != INT8_INPUTS
    more = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if exact else {}
    ways = {}
    for name, (model, feeds, out) in _graphs(problem).items():
        if name == DYNAMIC:  # whose products it computes in float32
            continue
        integers = name == STATIC
        try:
            ways[name] = openvino_way(model, problem.dtype, threads, feeds, out, more, integers=integers)
        except Unsupported:
            if not integers:
                raise
    return ways


def _own(problem: LayerProblem, backend: str) -> Way:
    """The layer as a user builds it."""
    kind, x, weights = problem.shape.kind, problem.x(), problem.weights()
    if kind == "linear":
        packed = ops.pack(weights["weight"], dtype=problem.dtype)
        result = np.empty((*x.shape[:-1], packed.out_features), x.dtype)
        activations: Rounding | None = "int8" if problem.variant == INT8_INPUTS else None
        return Way(lambda: ops.linear(x, packed, activations=activations, out=result))
    if kind in ("encoder", "decoder"):
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
    """A call of an encoder layer or a decoder layer."""
    shape = problem.shape
    kind = layers.TransformerEncoderLayer if shape.kind == "encoder" else layers.TransformerDecoderLayer
    layer: Any = kind(shape.width, shape.heads, shape.inner, "gelu", weights_dtype=problem.dtype)
    layer.load_state_dict(weights)
    if shape.kind == "encoder":
        return lambda: layer(x)
    memory = problem.memory()
    return lambda: layer(x, memory, tgt_is_causal=True)


def _numpy(problem: LayerProblem, threads: int) -> Way:
    """Layer by its definition, in float32."""
    shape, x, memory, tables = problem.shape, problem.x(), problem.memory(), problem.tables
    weights = problem.weights()
    cached = tables() if shape.kind == "rope" else None
    return Way(lambda: plain_layer(shape, x, memory, weights, lambda: cached))


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, by definition"),
    "torch": Engine(("torch",), torch_eager, "torch.nn, eager, inference mode"),
    "ort": Engine(("onnxruntime", "onnx"), onnxruntime, "onnxruntime, the layer's graph"),
    "ort-bert": Engine(
        ("onnxruntime", "onnx"), onnxruntime_bert, "the same after onnxruntime's BERT optimiser"
    ),
    "openvino": Engine(("openvino", "onnx"), openvino, "OpenVINO, the same graph"),
}


SUITE = Suite(
    ENGINES, plan, DTYPES, "rows, in, out of a weight; batch, length, width of a layer", "about five minutes"
)
