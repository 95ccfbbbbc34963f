"""The peers of layers: torch's own modules, and an ONNX graph in two runtimes."""

from __future__ import annotations

from typing import Any

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.suite import INT8_INPUTS
from fastattn._bench.suites.layers import graph
from fastattn._bench.suites.layers.problem import LayerProblem
from fastattn._bench.ways import Unsupported, Way


def torch_eager(problem: LayerProblem, threads: int) -> Way:
    """torch.nn; if the weights are bfloat16, so are the inputs."""
    if problem.variant == INT8_INPUTS and problem.dtype == "int8":
        return _torch_int8(problem, threads)
    if problem.dtype in ("int8", "int4"):
        raise Unsupported(f"has no product of float32 and {problem.dtype}")
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
    if kind == "step":
        return way(_torch_step(layer, x, memory))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(shape.length)
    return way(lambda: layer(x, memory, tgt_mask=mask, tgt_is_causal=True))


def _torch_int8(problem: LayerProblem, threads: int) -> Way:
    """What `quantize_dynamic` makes of a linear map, with all 8 bits of the inputs."""
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


def _torch_step(layer: Any, x: Any, memory: Any) -> Any:
    """torch's decoder layer has no cache: here are its functions, called on its parameters and a cache."""
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
        return layer.norm3(y + layer.linear2(functional.gelu(layer.linear1(y))))

    return step


def _graphs(problem: LayerProblem) -> dict[str, tuple[bytes, dict[str, Array], Array]]:
    """The layer's graph; one for each way to round the inputs, where they may be rounded."""
    if problem.shape.kind in ("decoder", "step"):
        raise Unsupported("decoder layers are not built as a graph")
    rounding = problem.dtype == "int8" and problem.variant == INT8_INPUTS
    ways = (graph.FREE, graph.DYNAMIC, graph.STATIC) if rounding else (graph.FREE,)
    return {way: graph.of(problem, way) for way in ways}


def onnxruntime(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The graph, with the optimisations that a session makes by itself."""
    return {
        name: runtimes.onnxruntime_way(model, problem.dtype, threads, feeds, out)
        for name, (model, feeds, out) in _graphs(problem).items()
    }


def onnxruntime_bert(problem: LayerProblem, threads: int) -> Way:
    """The encoder layer's graph, rewritten by onnxruntime.transformers."""
    if problem.shape.kind != "encoder" or problem.dtype != "float32":
        raise Unsupported("is for encoder layers in float32")
    model, feeds, out = _graphs(problem)[graph.FREE]
    model = runtimes.bert_optimised(model, problem.shape.heads, problem.shape.width)
    return runtimes.onnxruntime_way(model, problem.dtype, threads, feeds, out)


def openvino(problem: LayerProblem, threads: int) -> dict[str, Way]:
    """The same graph; where the inputs are to stay exact, OpenVINO is told not to round them."""
    exact = problem.dtype in ("int8", "int4") and problem.variant != INT8_INPUTS
    more = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if exact else {}
    ways = {}
    for name, (model, feeds, out) in _graphs(problem).items():
        if name == graph.DYNAMIC:  # whose products it computes in float32
            continue
        integers = name == graph.STATIC
        try:
            ways[name] = runtimes.openvino_way(
                model, problem.dtype, threads, feeds, out, more, integers=integers
            )
        except Unsupported:
            if not integers:
                raise
    return ways
