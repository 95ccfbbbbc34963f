"""The peers of the bench of layers: torch's own modules, and an ONNX graph in two runtimes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.suites.layers import graph as layer_graph
from fastattn._bench.suites.layers.problem import LayerProblem
from fastattn._bench.ways import Unsupported, Way, enter_for_good


def torch_eager(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """torch.nn in inference mode; with bfloat16 weights, inputs in bfloat16 as well."""
    import torch
    from torch.nn import functional

    if problem.dtype == "int8":
        raise Unsupported("has no product of float32 and int8")
    torch.set_num_threads(threads)
    enter_for_good(torch.inference_mode())
    shape, kind = problem.shape, problem.shape.kind
    dtype = getattr(torch, problem.dtype)
    x, memory = (torch.from_numpy(array).to(dtype) for array in (problem.x(), problem.memory()))
    weights = {name: torch.from_numpy(array).to(dtype) for name, array in problem.weights().items()}

    def way(call: Any) -> dict[str, Way]:
        return {"": Way(call, lambda result: np.asarray(result.float().numpy()))}

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
    if kind == "step":
        return way(_torch_step(layer, x, memory))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(shape.length)
    return way(lambda: layer(x, memory, tgt_mask=mask, tgt_is_causal=True))


def _torch_rope(x: Any, cos: Any, sin: Any) -> Any:
    """As transformers spells it: x is (B, H, L, D), cos and sin (L, D / 2)."""
    import torch

    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def call() -> Any:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return call


def _torch_step(layer: Any, x: Any, memory: Any) -> Any:
    """torch's decoder layer keeps no keys and values: its functions, called on its parameters and a cache."""
    import torch
    from torch.nn import functional

    heads = layer.self_attn.num_heads
    last = x[:, -1:].contiguous()

    def split(y: Any) -> Any:
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    def kept(attention: Any, tokens: Any) -> list[Any]:
        y = functional.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
        return [split(part).contiguous() for part in y.chunk(3, -1)[1:]]

    own, over = kept(layer.self_attn, x), kept(layer.multihead_attn, memory)
    cross_weight = layer.multihead_attn.in_proj_weight[: x.shape[-1]]
    cross_bias = layer.multihead_attn.in_proj_bias[: x.shape[-1]]

    def attend(attention: Any, q: Any, keys_values: list[Any]) -> Any:
        context = functional.scaled_dot_product_attention(q, *keys_values)
        return attention.out_proj(context.transpose(1, 2).flatten(2))

    def step() -> Any:
        attention = layer.self_attn
        projected = functional.linear(last, attention.in_proj_weight, attention.in_proj_bias)
        q, *new = (split(part) for part in projected.chunk(3, -1))
        for cache, row in zip(own, new, strict=True):
            cache[:, :, -1:] = row
        y = layer.norm1(last + attend(attention, q, own))
        q = split(functional.linear(y, cross_weight, cross_bias))
        y = layer.norm2(y + attend(layer.multihead_attn, q, over))
        return layer.norm3(y + layer.linear2(torch.nn.functional.gelu(layer.linear1(y))))

    return step


def _graph(problem: LayerProblem) -> tuple[bytes, dict[str, Array], Array]:
    if problem.shape.kind in ("decoder", "step"):
        raise Unsupported("decoder layers are not built as a graph")
    return layer_graph.of(problem)


def onnxruntime(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The graph, with the optimisations that a session makes by itself."""
    if problem.dtype == "bfloat16":
        raise Unsupported("has no bfloat16 product on CPUs")
    model, feeds, out = _graph(problem)
    return {"": runtimes.onnxruntime_way(model, threads, feeds, out)}


def onnxruntime_bert(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The encoder layer's graph, rewritten by onnxruntime.transformers."""
    if problem.shape.kind != "encoder" or problem.dtype != "float32":
        raise Unsupported("is for encoder layers in float32")
    model, feeds, out = _graph(problem)
    return {
        "": runtimes.onnxruntime_way(
            optimised(model, problem.shape.heads, problem.shape.width), threads, feeds, out
        )
    }


def optimised(model: bytes, heads: int, width: int) -> bytes:
    """A model of the BERT family, its operators fused by onnxruntime.transformers.optimizer."""
    import logging

    import onnx
    from onnxruntime.transformers import optimizer

    logging.disable(logging.WARNING)
    fused = optimizer.optimize_model(
        onnx.load_from_string(model), model_type="bert", num_heads=heads, hidden_size=width, opt_level=0
    )
    serialised: bytes = fused.model.SerializeToString()
    return serialised


def openvino(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The graph; bfloat16 where the CPU has products of it."""
    if problem.dtype == "bfloat16" and runtimes.openvino_precision("bfloat16") != "bf16":
        raise Unsupported("computes bfloat16 in float32 on this CPU")
    model, feeds, out = _graph(problem)
    return {"": runtimes.openvino_way(model, problem.dtype, threads, feeds, out)}
