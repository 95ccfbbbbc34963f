"""The peers of attention, each in its own layout, with its best settings and an explicit precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.cases import STRUCTURES, Array
from fastattn._bench.suites.attention.problem import SIGMOID, AttentionProblem
from fastattn._bench.ways import Unsupported, Way, refuse_dense


def refuse_sigmoid(problem: AttentionProblem) -> None:
    if problem.variant == SIGMOID:
        raise Unsupported("has no sigmoid attention")


def refuse_variant(problem: AttentionProblem) -> None:
    """Refuse structural masks, which most engines take as an array only: torch stands for them all."""
    refuse_sigmoid(problem)
    if problem.variant in STRUCTURES:
        raise Unsupported("is not given structural masks")


def torch_sdpa(problem: AttentionProblem, threads: int) -> Way | dict[str, Way]:
    """torch.nn.functional.scaled_dot_product_attention on (B, H, L, D) tensors sharing the arrays' memory."""
    refuse_sigmoid(problem)
    torch = runtimes.torch_inference(threads)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def tensor(x: Array) -> Any:
        if problem.dtype == "bfloat16":  # torch.from_numpy does not know NumPy's bfloat16
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    def read(result: Any) -> Array:
        return runtimes.read_tensor(result.reshape(problem.out_shape))

    q, k, v = map(tensor, problem.arrays())
    stacked = q.reshape(problem.stacked_shape)
    grouped = {"enable_gqa": True} if problem.group > 1 else {}
    keep = problem.kept_keys()
    if problem.causal:
        return Way(lambda: sdpa(q, k, v, is_causal=True, **grouped), read)
    if (attended := problem.attended()) is not None:
        dense = torch.from_numpy(attended)
        return Way(lambda: sdpa(q, k, v, attn_mask=dense, **grouped), read)
    if keep is not None:
        mask = torch.from_numpy(keep)[:, None, None, :]
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        return {
            "boolean mask": Way(lambda: sdpa(stacked, k, v, attn_mask=mask), read),
            "float mask": Way(lambda: sdpa(stacked, k, v, attn_mask=bias), read),
        }
    ways = {"": Way(lambda: sdpa(q, k, v, **grouped), read)}
    if problem.group > 1:
        ways["stacked groups"] = Way(lambda: sdpa(stacked, k, v), read)
    return ways


def _mask_mod(attended: Array) -> Any:
    """The mask as FlexAttention wants it: a comparison where each query attends one range of keys.

    For any other mask, a look-up in the array.
    """
    import torch

    begin, count = attended.argmax(-1), attended.sum(-1)
    end = attended.shape[-1] - attended[:, ::-1].argmax(-1)
    if (count == np.where(count, end - begin, 0)).all():
        first, last = torch.from_numpy(begin), torch.from_numpy(np.where(count, end, begin))
        return lambda b, h, i, j: (first[i] <= j) & (j < last[i])
    table = torch.from_numpy(attended)
    return lambda b, h, i, j: table[i, j]


def torch_flex(problem: AttentionProblem, threads: int) -> Way:
    """flex_attention for structural masks, whose blocks are found outside the timed call."""
    attended = problem.attended()
    if attended is None:
        raise Unsupported("is asked for structural masks only")
    if problem.dtype != "float32":
        raise Unsupported("is asked in float32 only")
    from torch import compile
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = runtimes.torch_tensors(threads, *problem.arrays())
    len_q, len_k = attended.shape
    blocks = create_block_mask(_mask_mod(attended), None, None, len_q, len_k, device="cpu")
    compiled, grouped = compile(flex_attention), problem.group > 1
    return Way(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped), runtimes.read_tensor)


def _onnx_way(
    dtype: str,
    threads: int,
    node: dict[str, Any],
    opset: int,
    feeds: dict[str, Array],
    out_shape: tuple[int, ...],
    read: Callable[[Array], Array],
) -> Way:
    """A model of one node in onnxruntime."""
    from onnx import helper

    out = np.zeros(out_shape, feeds["q"].dtype)
    model = runtimes.onnx_model([helper.make_node(outputs=["out"], **node)], feeds, {}, out, opset)
    return runtimes.onnxruntime_way(model, dtype, threads, feeds, out, read)


def onnx_attention(problem: AttentionProblem, threads: int) -> Way | dict[str, Way]:
    """Attention of ONNX opset 23 on (B, H, L, D); opset 24 where it brings key lengths."""
    refuse_variant(problem)
    if problem.dtype not in ("float32", "float16"):
        raise Unsupported(f"has no {problem.dtype} kernel")
    refuse_dense(problem.scores_bytes)
    shape, keep = problem.shape, problem.kept_keys()
    q, k, v = problem.arrays()
    feeds = {"q": q, "k": k, "v": v}

    def way(
        opset: int = 23,
        inputs: tuple[str, ...] = ("q", "k", "v"),
        attributes: dict[str, int] | None = None,
        **arrays: Array,
    ) -> Way:
        every = {**feeds, **arrays}
        node = {"op_type": "Attention", "inputs": inputs, **(attributes or {})}
        out_shape = (*every["q"].shape[:3], shape.dim_v)
        return _onnx_way(
            problem.dtype, threads, node, opset, every, out_shape, lambda out: out.reshape(problem.out_shape)
        )

    if problem.causal:
        return way(attributes={"is_causal": 1})
    if keep is not None:
        bias = np.where(keep, 0, -np.inf).astype(q.dtype)[:, None, None, :]
        bias = np.ascontiguousarray(np.broadcast_to(bias, (shape.batch, 1, shape.len_q, shape.len_k)))
        lengths = keep.sum(-1, dtype=np.int64)
        return {
            "float mask": way(inputs=("q", "k", "v", "bias"), bias=bias),
            "nonpad_kv_seqlen": way(24, inputs=("q", "k", "v", "", "", "", "lengths"), lengths=lengths),
        }
    ways = {"": way()}
    if problem.group > 1:
        ways["stacked groups"] = way(q=q.reshape(problem.stacked_shape))
    return ways


def onnx_multi_head(problem: AttentionProblem, threads: int) -> Way:
    """The contrib operator on the fastest layout that it takes: q (B, L, H * D), k and v (B, H, L, D)."""
    refuse_variant(problem)
    if problem.dtype != "float32":
        raise Unsupported(f"has no {problem.dtype} kernel")
    if problem.group > 1:
        raise Unsupported("has no grouped heads")
    refuse_dense(problem.scores_bytes)
    shape, keep = problem.shape, problem.kept_keys()
    q, k, v = problem.arrays()
    packed = q.swapaxes(1, 2).reshape(shape.batch, shape.len_q, -1)
    feeds = {"q": np.ascontiguousarray(packed), "k": k, "v": v}
    node: dict[str, Any] = {
        "op_type": "MultiHeadAttention",
        "domain": "com.microsoft",
        "num_heads": shape.heads_q,
        "inputs": ["q", "k", "v"],
    }
    if problem.causal:
        node["unidirectional"] = 1
    if keep is not None:
        node["inputs"] += ["", "keep"]
        feeds["keep"] = keep.astype(np.int32)

    def read(out: Array) -> Array:
        return out.reshape(shape.batch, shape.len_q, shape.heads_q, shape.dim_v).swapaxes(1, 2)

    out_shape = (shape.batch, shape.len_q, shape.heads_q * shape.dim_v)
    return _onnx_way(problem.dtype, threads, node, 23, feeds, out_shape, read)


def openvino_sdpa(problem: AttentionProblem, threads: int) -> Way | dict[str, Way]:
    """ScaledDotProductAttention of opset 13 on (B, H, L, D); it knows no grouped heads."""
    refuse_variant(problem)
    import openvino
    from openvino import opset13 as ops

    if problem.dtype == "float64":
        raise Unsupported("computes float64 in float32")
    refuse_dense(problem.scores_bytes, copies=1)
    name = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[problem.dtype]
    precision = runtimes.openvino_precision(problem.dtype)
    q, k, v = problem.arrays()
    if problem.causal and problem.group > 1:
        k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    elif problem.group > 1:
        q = q.reshape(problem.stacked_shape)

    def tensor(x: Array) -> Any:
        if x.dtype.name == "bfloat16":
            return openvino.Tensor(x.view(np.uint16), openvino.Shape(x.shape), openvino.Type.bf16)
        return openvino.Tensor(x, shared_memory=True)

    def way(*arrays: Array) -> Way:
        tensors = [tensor(x) for x in arrays]
        inputs = [ops.parameter(list(x.shape), x.element_type) for x in tensors]
        wide = [
            x if x.get_element_type() == openvino.Type.boolean else ops.convert(x, precision) for x in inputs
        ]
        node = ops.convert(ops.scaled_dot_product_attention(*wide, causal=problem.causal), name)
        out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        model = openvino.Model([node], inputs)
        call = runtimes.openvino_call(model, precision, threads, [*tensors, tensor(out)], [*arrays, out])
        return Way(call, lambda _: out.reshape(problem.out_shape))

    keep = problem.kept_keys()
    if keep is not None:
        bias = np.where(keep, 0, -np.inf).astype(q.dtype)[:, None, None, :]
        return {"boolean mask": way(q, k, v, keep[:, None, None, :].copy()), "float mask": way(q, k, v, bias)}
    return way(q, k, v)


def jax_dpa(problem: AttentionProblem, threads: int) -> Way:
    """jax.nn.dot_product_attention, compiled, on (B, L, H, D)."""
    refuse_variant(problem)
    import jax

    if problem.dtype == "float16":
        raise Unsupported("has no float16 product on CPUs")
    if problem.dtype == "float64":
        raise Unsupported("computes the softmax of float64 in float32")
    refuse_dense(problem.scores_bytes)
    if problem.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    keep = problem.kept_keys()
    options: dict[str, Any] = {"is_causal": problem.causal, "implementation": "xla"}
    if keep is not None:
        options["key_value_seq_lengths"] = keep.sum(-1, dtype=np.int32)

    # With one query row, XLA is several times faster where the keys of a head lie in one piece.
    heads_first = problem.shape.decode

    def attention(q: Any, k: Any, v: Any) -> Any:
        if heads_first:
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, **options)
        return out.swapaxes(1, 2) if heads_first else out

    arrays = problem.arrays() if heads_first else [x.swapaxes(1, 2).copy() for x in problem.arrays()]
    on_device = [jax.device_put(x) for x in arrays]
    compiled = jax.jit(attention).lower(*on_device).compile()

    def read(result: Any) -> Array:
        return np.asarray(result) if heads_first else np.asarray(result).swapaxes(1, 2)

    return Way(lambda: compiled(*on_device).block_until_ready(), read)
