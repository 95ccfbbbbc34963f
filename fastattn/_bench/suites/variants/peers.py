"""The peers of the variants that modify scores: torch's FlexAttention, compiled, and its fused attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.cases import VARIANTS, Array
from fastattn._bench.suites.variants.calls import OPTIONS
from fastattn._bench.suites.variants.problem import VariantProblem
from fastattn._bench.ways import Unsupported, Way


def _modified(problem: VariantProblem) -> tuple[dict[str, Any], tuple[Array, Array, Array]]:
    """The arguments of `attention` that change its scores, and q, k, v."""
    if problem.dtype != "float32":
        raise Unsupported("is asked in float32 only")
    if problem.variant not in OPTIONS:
        raise Unsupported("has no such variant")
    options = VARIANTS[OPTIONS[problem.variant]](problem.shape, np.random.default_rng(1))
    return options, problem.arrays()


def sdpa_biased(problem: VariantProblem, threads: int) -> Way:
    """scaled_dot_product_attention; all that is added to the scores becomes one dense mask."""
    import torch

    options, arrays = _modified(problem)
    if options.keys() - {"bias", "alibi_slopes", "causal"}:
        raise Unsupported("only adds to scores")
    q, k, v = runtimes.torch_tensors(threads, *arrays)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if "causal" in options:
        return Way(lambda: sdpa(q, k, v, is_causal=True), runtimes.read_tensor)
    bias = None
    if "alibi_slopes" in options:
        positions = np.arange(problem.shape.len_k)
        distance = np.abs(positions[:, None] - positions).astype(np.float32)
        slopes = np.asarray(options["alibi_slopes"], np.float32)[:, None, None]
        bias = torch.from_numpy(-slopes * distance)[None]
    elif "bias" in options:
        bias = torch.from_numpy(np.ascontiguousarray(options["bias"], np.float32))
    return Way(lambda: sdpa(q, k, v, attn_mask=bias), runtimes.read_tensor)


def flex_modified(problem: VariantProblem, threads: int) -> Way:
    """flex_attention with a function that modifies scores, or with a block mask if it is causal."""
    from torch import compile, from_numpy, tanh
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    options, arrays = _modified(problem)
    if len(options) != 1 or options.keys() - {"bias", "alibi_slopes", "causal", "softcap"}:
        raise Unsupported("only changes single scores")
    q, k, v = runtimes.torch_tensors(threads, *arrays)
    (value,) = options.values()
    length, compiled = problem.shape.len_k, compile(flex_attention)
    if "causal" in options:
        blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu")
        return Way(lambda: compiled(q, k, v, block_mask=blocks), runtimes.read_tensor)
    if "softcap" in options:
        mod = lambda score, b, h, i, j: value * tanh(score / value)  # noqa: E731
    elif "alibi_slopes" in options:
        slopes = from_numpy(np.asarray(value, np.float32))
        mod = lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()  # noqa: E731
    else:
        whole = (problem.shape.heads_q, length, length)
        bias = from_numpy(np.ascontiguousarray(np.broadcast_to(value, (1, *whole))[0], np.float32))
        mod = lambda score, b, h, i, j: score + bias[h, i, j]  # noqa: E731
    return Way(lambda: compiled(q, k, v, score_mod=mod), runtimes.read_tensor)
