"""Layers as ONNX graphs.

Operators and their order are those of torch's export of BERT, which the optimisers of the runtimes look for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS
from fastattn._bench.suites.layers.problem import LayerProblem, LayerShape, in_4_bits
from fastattn._bench.ways import Unsupported


class _Graph:
    """Nodes and constants of a graph; every method that adds one returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}

    def add(self, kind: str, *inputs: str | Array, out: str = "", results: int = 1, **attributes: Any) -> str:
        """A node. Of several `results`, the names are the one returned with a number behind it."""
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


def of(problem: LayerProblem, inputs: str = FREE) -> tuple[bytes, dict[str, Array], Array]:
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
    if problem.dtype == "int4":
        codes, scale = in_4_bits(weight)
        codes = codes.astype(np.uint8)
        graph.add(
            "MatMulNBits",
            "x",
            codes[..., ::2] | codes[..., 1::2] << 4,
            scale.reshape(-1),
            out="out",
            domain="com.microsoft",
            K=weight.shape[1],
            N=len(weight),
            bits=4,
            block_size=32,
            accuracy_level=4 if problem.variant == INT8_INPUTS else 0,  # 4: by int8
        )
    elif problem.dtype == "int8":
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
