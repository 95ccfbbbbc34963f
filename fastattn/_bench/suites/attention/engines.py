"""What the suite "attention" times: fastattn, its fallback, plain NumPy, and the peers.

Inputs are laid out, converted and bound outside the timed call. Where an engine can be given a problem in
several ways (layouts, spellings of a mask), the fastest of them is timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fastattn
from fastattn import functional
from fastattn._bench.cases import Array
from fastattn._bench.suite import Engine, own_engines
from fastattn._bench.suites.attention import peers
from fastattn._bench.suites.attention.problem import SIGMOID, TINY, AttentionProblem
from fastattn._bench.ways import Way, refuse_dense


def _own(problem: AttentionProblem, backend: str) -> Way:
    q, k, v = problem.arrays()
    if problem.shape == TINY and backend == "compiled":  # a user's first lines, without any option
        return Way(lambda: fastattn.attention(q, k, v))
    function = functional.sigmoid_attention if problem.variant == SIGMOID else fastattn.attention
    options = {**problem.options(), "out": np.empty(problem.out_shape, q.dtype)}
    return Way(lambda: function(q, k, v, **options))


def _numpy(problem: AttentionProblem, threads: int) -> Way:
    """The usual five calls. The query heads of a group are stacked, so that K and V are not repeated."""
    refuse_dense(problem.scores_bytes)
    q, k, v = problem.arrays()
    shape = problem.shape
    work: Any = np.float64 if q.dtype == np.float64 else np.float32
    per_query = (shape.batch, shape.heads_kv, problem.group, shape.len_q, shape.len_k)
    scale = work(shape.head_dim**-0.5)
    keep = problem.kept_keys()
    bias: Any = None
    if problem.causal:
        bias = np.triu(np.full((shape.len_q, shape.len_k), -np.inf, work), 1 + shape.len_k - shape.len_q)
    elif (attended := problem.attended()) is not None:
        bias = np.where(attended, work(0), work(-np.inf))
    elif keep is not None:
        bias = np.where(keep, work(0), work(-np.inf))[:, None, None, None, :]

    def wide(x: Array) -> Array:
        return x.astype(work, copy=False)

    def softmax_attention() -> Any:
        scores = (wide(q).reshape(problem.stacked_shape) * scale) @ wide(k).swapaxes(-1, -2)
        if bias is not None:
            scores.reshape(per_query)[...] += bias
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return (scores @ wide(v)).astype(q.dtype, copy=False).reshape(problem.out_shape)

    def without_row_max() -> Any:
        probs = np.exp(q @ k.swapaxes(-1, -2) * scale)
        return probs / probs.sum(-1, keepdims=True) @ v

    def sigmoid_attention() -> Any:
        scores = (wide(q).reshape(problem.stacked_shape) * -scale) @ wide(k).swapaxes(-1, -2)
        np.exp(scores, out=scores)
        weights = 1 / (1 + work(shape.len_k) * scores)
        return (weights @ wide(v)).astype(q.dtype, copy=False).reshape(problem.out_shape)

    if problem.variant == SIGMOID:
        return Way(sigmoid_attention)
    if problem.shape == TINY:  # the shortest code that anyone would write
        return Way(without_row_max)
    return Way(softmax_attention)


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy: q @ k.T, softmax, @ v"),
    "torch": Engine(("torch",), peers.torch_sdpa, "torch.nn.functional.scaled_dot_product_attention"),
    "flex": Engine(("torch",), peers.torch_flex, "torch's FlexAttention, compiled"),
    "ort": Engine(("onnxruntime", "onnx"), peers.onnx_attention, "onnxruntime, Attention of ONNX opset 23"),
    "ort-mha": Engine(
        ("onnxruntime", "onnx"), peers.onnx_multi_head, "onnxruntime, contrib MultiHeadAttention"
    ),
    "openvino": Engine(("openvino",), peers.openvino_sdpa, "OpenVINO, ScaledDotProductAttention"),
    "jax": Engine(("jax",), peers.jax_dpa, "jax.nn.dot_product_attention"),
}
