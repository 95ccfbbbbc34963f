"""torch with masks and modified scores: FlexAttention, compiled; for biases scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench.cases import VARIANTS, Array
from fastattn._bench.suites.attention.problem import Problem
from fastattn._bench.suites.variants.problem import OPTIONS, VariantProblem
from fastattn._bench.ways import Unsupported, Way, enter_for_good


def _tensors(threads: int, *arrays: Array) -> list[Any]:
    import torch

    torch.set_num_threads(threads)
    enter_for_good(torch.inference_mode())
    if any(x.dtype != np.float32 for x in arrays):
        raise Unsupported("is asked in float32 only")
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]


def _mask_mod(attended: Array) -> Any:
    """As two numbers a query where each attends one range of keys; else looked up in the array."""
    import torch

    begin, count = attended.argmax(-1), attended.sum(-1)
    end = attended.shape[-1] - attended[:, ::-1].argmax(-1)
    if (count == np.where(count, end - begin, 0)).all():
        first, last = torch.from_numpy(begin), torch.from_numpy(np.where(count, end, begin))
        return lambda b, h, i, j: (first[i] <= j) & (j < last[i])
    table = torch.from_numpy(attended)
    return lambda b, h, i, j: table[i, j]


def torch_flex(problem: Problem, threads: int) -> dict[str, Way]:
    """flex_attention with the mask's blocks found beforehand, for structural masks."""
    attended = problem.attended()
    if attended is None:
        raise Unsupported("is asked for structural masks only")
    from torch import compile
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _tensors(threads, *problem.inputs())
    len_q, len_k = attended.shape
    blocks = create_block_mask(_mask_mod(attended), None, None, len_q, len_k, device="cpu")
    compiled, grouped = compile(flex_attention), problem.group > 1
    return {"": Way(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped), _rows)}


def _modified(problem: VariantProblem) -> tuple[dict[str, Any], tuple[Array, Array, Array]]:
    """The arguments of attention that change its scores, and q, k, v."""
    if problem.variant not in OPTIONS:
        raise Unsupported("has no such variant")
    options = VARIANTS[OPTIONS[problem.variant]](problem.shape, np.random.default_rng(1))
    return options, problem.arrays()


def sdpa_biased(problem: VariantProblem, threads: int) -> dict[str, Way]:
    """scaled_dot_product_attention, with whatever is added to the scores as one dense mask."""
    import torch

    options, arrays = _modified(problem)
    if options.keys() - {"bias", "alibi_slopes", "causal"}:
        raise Unsupported("only adds to scores")
    q, k, v = _tensors(threads, *arrays)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if "causal" in options:
        return {"": Way(lambda: sdpa(q, k, v, is_causal=True), _rows)}
    bias = None
    if "alibi_slopes" in options:
        positions = np.arange(problem.shape.len_k)
        distance = np.abs(positions[:, None] - positions).astype(np.float32)
        slopes = np.asarray(options["alibi_slopes"], np.float32)[:, None, None]
        bias = torch.from_numpy(-slopes * distance)[None]
    elif "bias" in options:
        bias = torch.from_numpy(np.ascontiguousarray(options["bias"], np.float32))
    return {"": Way(lambda: sdpa(q, k, v, attn_mask=bias), _rows)}


def flex_modified(problem: VariantProblem, threads: int) -> dict[str, Way]:
    """flex_attention with a score_mod, or a mask where it is causal."""
    from torch import compile, from_numpy, tanh
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    options, arrays = _modified(problem)
    if len(options) != 1 or options.keys() - {"bias", "alibi_slopes", "causal", "softcap"}:
        raise Unsupported("only changes single scores")
    q, k, v = _tensors(threads, *arrays)
    (value,) = options.values()
    length, compiled = problem.shape.len_k, compile(flex_attention)
    if "causal" in options:
        blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu")
        return {"": Way(lambda: compiled(q, k, v, block_mask=blocks), _rows)}
    if "softcap" in options:
        mod = lambda score, b, h, i, j: value * tanh(score / value)  # noqa: E731
    elif "alibi_slopes" in options:
        slopes = from_numpy(np.asarray(value, np.float32))
        mod = lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()  # noqa: E731
    else:
        whole = (problem.shape.heads_q, length, length)
        bias = from_numpy(np.ascontiguousarray(np.broadcast_to(value, (1, *whole))[0], np.float32))
        mod = lambda score, b, h, i, j: score + bias[h, i, j]  # noqa: E731
    return {"": Way(lambda: compiled(q, k, v, score_mod=mod), _rows)}


def _rows(out: Any) -> Array:
    array: Array = out.reshape(-1, out.shape[-1]).numpy()
    return array
