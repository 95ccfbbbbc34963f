"""The minute's problems, and the engines that compute them. bench/attention.py has more of both."""

from __future__ import annotations

from functools import partial
from importlib import util
from typing import Any

import numpy as np

import fastattn
from fastattn._bench import runtimes
from fastattn._bench.cases import VARIANTS, Array, Shape, as_dtype, make_inputs
from fastattn._bench.harness import Engine, Problem, Sections, Unsupported, Way, own_engines

NO_MASK: dict[str, Any] = {"": None}  # ways to hand a mask to an engine, and what each hands over


def shape_of(batch: int, heads: int, len_q: int, len_k: int, head_dim: int, heads_kv: int = 0) -> Shape:
    """A shape whose name is its numbers."""
    name = f"{batch},{heads}{f':{heads_kv}' * bool(heads_kv)},{len_q},{len_k},{head_dim}"
    return Shape(name, batch, heads, heads_kv or heads, len_q, len_k, head_dim)


class AttentionProblem(Problem):
    """A call of `attention` with the arguments of one variant."""

    shape: Shape
    causal = property(lambda self: self.variant == "causal")
    group = property(lambda self: self.shape.heads_q // self.shape.heads_kv)
    decode = property(lambda self: self.shape.len_q == 1)  # memory then limits the speed
    unit = property(lambda self: "bytes" if self.decode else "flops")

    def arrays(self) -> tuple[Array, Array, Array]:
        return make_inputs(self.shape, self.dtype, self.rng(0))

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return VARIANTS[self.variant](self.shape, self.rng(1))

    def call(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        out: Array = fastattn.attention(q, k, v, **self.options(), **options)
        return out

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (*self.shape[1:3], self.shape.len_q, self.shape.dim_v)

    @property
    def stacked_shape(self) -> tuple[int, int, int, int]:
        """The shape of q whose query heads of a group are more rows of one head, where nothing is causal."""
        return (self.shape.batch, self.shape.heads_kv, self.group * self.shape.len_q, self.shape.head_dim)

    def reference(self) -> tuple[Array, Array]:
        """16 query rows of every head, by the fallback in float64, which the self-test checks."""
        rows = np.random.default_rng(self.seed).permutation(self.shape.len_q)[:16]
        out = self.call(*(x.astype(float) for x in self.arrays()), backend="numpy")[:, :, rows]
        heads = np.arange(self.shape.batch * self.shape.heads_q)[:, None]
        return (heads * self.shape.len_q + rows).ravel(), out.reshape(-1, self.shape.dim_v)

    @property
    def work(self) -> float:
        """Operations of the two products, or for one query row the bytes of k and v."""
        s, features = self.shape, self.shape.head_dim + self.shape.dim_v
        if self.decode:
            return float(s.batch * s.heads_kv * s.len_k * features * as_dtype(self.dtype).itemsize)
        return s.batch * s.heads_q * s.len_q * s.len_k * features * (1.0 if self.causal else 2.0)


def own(problem: AttentionProblem, backend: str) -> Way:
    q, k, v = problem.arrays()
    if problem.shape == TINY and backend == "compiled":  # a user's first lines, without any option
        return Way(lambda: fastattn.attention(q, k, v))
    out, options = np.empty(problem.out_shape, q.dtype), problem.options()
    return Way(lambda: fastattn.attention(q, k, v, **options, out=out))


def numpy(problem: AttentionProblem, threads: int, keep: Array | None = None) -> Way:
    """The usual five calls. The query heads of a group are stacked, so that K and V are not repeated.

    `keep`, (..., Lq or 1, Lk), says which pairs attend.
    """
    (q, k, v), s, group = problem.arrays(), problem.shape, problem.group
    work: Any = np.float64 if q.dtype == np.float64 else np.float32
    scale, bias = work(s.head_dim**-0.5), None
    if problem.causal:
        keep = np.tri(s.len_q, s.len_k, s.len_k - s.len_q, dtype=bool)
    if keep is not None:
        bias = np.where(keep, work(0), work(-np.inf))

    def call() -> Any:
        wide, keys, values = (x.astype(work, copy=False) for x in (q, k, v))
        scores = (wide.reshape(problem.stacked_shape) * scale) @ keys.swapaxes(-1, -2)
        if bias is not None:
            scores.reshape(s.batch, s.heads_kv, group, s.len_q, s.len_k)[...] += bias
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return (scores @ values).astype(q.dtype, copy=False).reshape(problem.out_shape)

    def shortest() -> Any:  # that anyone would write
        probs = np.exp(q @ k.swapaxes(-1, -2) * scale)
        return probs / probs.sum(-1, keepdims=True) @ v

    return Way(shortest if problem.shape == TINY else call)


def torch(problem: AttentionProblem, threads: int, masks: dict[str, Any] = NO_MASK) -> dict[str, Way]:
    """scaled_dot_product_attention on (B, H, L, D); grouped heads by its option, or stacked."""
    torch = runtimes.torch_inference(threads)
    q, k, v = runtimes.tensors(torch, *problem.arrays())
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": problem.causal, **({"enable_gqa": True} if problem.group > 1 else {})}

    def read(result: Any) -> Array:
        return runtimes.read_tensor(result.reshape(problem.out_shape))

    ways = {how: Way(partial(sdpa, q, k, v, attn_mask=x, **options), read) for how, x in masks.items()}
    if problem.group > 1 and not problem.causal and masks == NO_MASK:
        stacked = q.reshape(problem.stacked_shape)
        ways["stacked groups"] = Way(lambda: sdpa(stacked, k, v), read)
    return ways


def onnx(problem: AttentionProblem, threads: int, masks: dict[str, Any] = NO_MASK) -> dict[str, Way]:
    """Attention of ONNX opset 23 (a mask may give another), of `masks` each a name, opset, and inputs."""
    from onnx import helper

    if problem.dtype not in ("float32", "float16"):
        raise Unsupported(f"has no {problem.dtype} kernel")
    q, k, v = problem.arrays()

    def way(q: Array, opset: int = 23, more: dict[str, Array] | None = None, before: int = 0) -> Way:
        feeds = {"q": q, "k": k, "v": v, **(more or {})}
        names = ["q", "k", "v", *[""] * before, *(more or {})]
        node = helper.make_node("Attention", names, ["out"], is_causal=int(problem.causal))
        out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        model = runtimes.onnx_model([node], feeds, {}, out, opset)
        return runtimes.onnxruntime_way(model, threads, feeds, out, lambda x: x.reshape(problem.out_shape))

    ways = {how: way(q, *(x or ())) for how, x in masks.items()}
    if problem.group > 1 and not problem.causal and masks == NO_MASK:
        ways["stacked groups"] = way(q.reshape(problem.stacked_shape))
    return ways


def onnx_multi_head(problem: AttentionProblem, threads: int, keep: Array | None = None) -> Way:
    """The contrib operator on the fastest layout that it takes: q (B, L, H * D), k and v (B, H, L, D)."""
    from onnx import helper

    if problem.dtype != "float32" or problem.group > 1:
        raise Unsupported("has float32 without grouped heads only")
    (q, k, v), s = problem.arrays(), problem.shape
    feeds = {"q": np.ascontiguousarray(q.swapaxes(1, 2).reshape(s.batch, s.len_q, -1)), "k": k, "v": v}
    names = [*feeds] + ([] if keep is None else ["", "keep"])
    if keep is not None:
        feeds["keep"] = keep.astype(np.int32)
    options = {"num_heads": s.heads_q, "unidirectional": int(problem.causal), "domain": "com.microsoft"}
    node = helper.make_node("MultiHeadAttention", names, ["out"], **options)
    out = np.zeros((s.batch, s.len_q, s.heads_q * s.dim_v), q.dtype)

    def read(x: Array) -> Array:
        return x.reshape(s.batch, s.len_q, s.heads_q, s.dim_v).swapaxes(1, 2)

    model = runtimes.onnx_model([node], feeds, {}, out, 23)
    return runtimes.onnxruntime_way(model, threads, feeds, out, read)


def openvino(problem: AttentionProblem, threads: int, masks: dict[str, Any] = NO_MASK) -> dict[str, Way]:
    """ScaledDotProductAttention of opset 13 on (B, H, L, D); it knows no grouped heads."""
    from openvino import Model, Type
    from openvino import opset13 as ops

    if problem.dtype == "float64":
        raise Unsupported("computes float64 in float32")
    precision = runtimes.openvino_precision(problem.dtype)
    q, k, v = problem.arrays()
    if problem.causal and problem.group > 1:
        k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    elif problem.group > 1:
        q = q.reshape(problem.stacked_shape)

    def way(*arrays: Array) -> Way:
        out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        *inputs, result = (runtimes.openvino_tensor(x) for x in (*arrays, out))
        given = [ops.parameter(list(x.shape), x.element_type) for x in inputs]
        wide = [x if x.get_element_type() == Type.boolean else ops.convert(x, precision) for x in given]
        node = ops.scaled_dot_product_attention(*wide, causal=problem.causal)
        model = Model([ops.convert(node, result.element_type)], given)
        call = runtimes.openvino_call(model, precision, threads, [*inputs, result], [*arrays, out])
        return Way(call, lambda _: out.reshape(problem.out_shape))

    return {how: way(q, k, v, *(() if x is None else (x,))) for how, x in masks.items()}


def jax(problem: AttentionProblem, threads: int, **options: Any) -> Way:
    """jax.nn.dot_product_attention, compiled, on (B, L, H, D)."""
    import jax

    if problem.dtype in ("float16", "float64"):
        raise Unsupported(f"has no product or no softmax of {problem.dtype} on CPUs")
    if problem.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")

    # With one query row, XLA is several times faster where the keys of a head lie in one piece.
    def turn(x: Any) -> Any:
        return x.swapaxes(1, 2) if problem.decode else x

    def attention(*arrays: Any) -> Any:
        options_of = {"is_causal": problem.causal, "implementation": "xla", **options}
        return turn(jax.nn.dot_product_attention(*map(turn, arrays), **options_of))

    arrays = [x if problem.decode else x.swapaxes(1, 2).copy() for x in problem.arrays()]
    on_device = [jax.device_put(x) for x in arrays]
    compiled = jax.jit(attention).lower(*on_device).compile()

    def read(x: Any) -> Array:
        return np.asarray(x) if problem.decode else np.asarray(x).swapaxes(1, 2)

    return Way(lambda: compiled(*on_device).block_until_ready(), read)


ENGINES = {
    **own_engines(own),
    "numpy": Engine(("numpy",), numpy, "plain NumPy: q @ k.T, softmax, @ v"),
    "torch": Engine(("torch",), torch, "torch.nn.functional.scaled_dot_product_attention"),
    "ort": Engine(("onnxruntime", "onnx"), onnx, "onnxruntime, Attention of ONNX opset 23"),
    "ort-mha": Engine(("onnxruntime", "onnx"), onnx_multi_head, "onnxruntime, contrib MultiHeadAttention"),
    "openvino": Engine(("openvino",), openvino, "OpenVINO, ScaledDotProductAttention"),
    "jax": Engine(("jax",), jax, "jax.nn.dot_product_attention"),
}
# Short texts in an encoder, alone and as a batch, and longer ones; texts of a decoder; the next token of a
# decoder, of one text over heads that share keys and values, and of a batch; and what a call costs by itself.
SHORT, BATCH = shape_of(1, 12, 128, 128, 64), shape_of(8, 12, 128, 128, 32)
MIDDLE, LONG = shape_of(1, 12, 512, 512, 64), shape_of(1, 8, 2048, 2048, 64)
DECODER, TINY = shape_of(1, 8, 2048, 2048, 128), shape_of(1, 1, 8, 8, 16)
NEXT_TOKEN = [shape_of(1, 32, 1, 4096, 128, heads_kv=8), shape_of(8, 12, 1, 1024, 64)]
NUMBERS = "batch, heads, len_q, len_k, head_dim"


def plan() -> Sections:
    """The minute's problems."""
    sections: Sections = {}

    def section(title: str, dtype: str, *shapes: Shape, variant: str = "plain") -> None:
        sections[f"{title}, {dtype}"] = [AttentionProblem(shape, variant, dtype) for shape in shapes]

    section("no mask", "float32", SHORT, BATCH, MIDDLE, LONG)
    section("causal", "float32", MIDDLE, DECODER, variant="causal")
    section("next token", "float32", *NEXT_TOKEN)
    if util.find_spec("ml_dtypes") and "bf16" in (fastattn.show_config()["isa"] or ""):  # it is fast there
        section("no mask", "bfloat16", MIDDLE, LONG)
        section("causal", "bfloat16", DECODER, variant="causal")
        section("next token", "bfloat16", NEXT_TOKEN[0])
    section("tiny call", "float32", TINY)
    return sections
