"""The suite "attention": softmax and sigmoid attention, with masks and grouped heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.suite import PREFILL, SHAPES, Request, Suite, grouped, has_bfloat16, refuse_dense
from fastattn import functional, masks
from fastattn._bench import attention, runtimes
from fastattn._bench.attention import TINY, AttentionProblem, shape_of
from fastattn._bench.cases import DTYPES, STRUCTURES, Array, Shape
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, Ways, own_engines

SIGMOID = "sigmoid"  # the variant that is a function of its own, `sigmoid_attention`
STRUCTURED = shape_of(1, 4, 4096, 4096, 64)  # long enough for a mask to save time


class MaskedProblem(AttentionProblem):
    """A call of `attention` with the arguments of one variant or with one structural mask."""

    def options(self) -> dict[str, Any]:
        if self.variant in STRUCTURES:
            s = self.shape
            structure = STRUCTURES[self.variant](s, self.rng(1))
            return {"mask": masks.compile(structure, (s.batch, s.heads_q, s.len_q, s.len_k))}
        return {} if self.variant == SIGMOID else super().options()

    def call(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        if self.variant == SIGMOID:
            return functional.sigmoid_attention(q, k, v, **options)
        return super().call(q, k, v, **options)

    def attended(self) -> Array | None:
        """The pairs that a structural mask attends, (Lq, Lk); None if there is no such mask."""
        if self.variant not in STRUCTURES:
            return None
        return STRUCTURES[self.variant](self.shape, self.rng(1)).to_array(self.shape.len_q, self.shape.len_k)

    def kept_keys(self) -> Array | None:
        """The keys that are no padding, (B, Lk); None if no variant pads them."""
        options = self.options()
        if "kv_lengths" in options:
            return np.asarray(np.arange(self.shape.len_k) < options["kv_lengths"][:, None])
        if "mask" not in options or self.variant in STRUCTURES:
            return None
        keep: Array = options["mask"][:, 0, 0, :]
        return keep

    @property
    def work(self) -> float:
        """The work without a mask, less what is masked."""
        kept = self.attended() if self.variant in STRUCTURES else self.kept_keys()
        return super().work * (1.0 if kept is None else float(kept.mean()))


def _own(problem: MaskedProblem, backend: str) -> Way:
    if problem.variant != SIGMOID:
        return attention.own(problem, backend)
    (q, k, v), out = problem.arrays(), np.empty(problem.out_shape, problem.arrays()[0].dtype)
    return Way(lambda: functional.sigmoid_attention(q, k, v, out=out))


def _numpy(problem: MaskedProblem, threads: int) -> Way:
    refuse_dense(problem.shape, problem.dtype)
    if problem.variant == SIGMOID:
        return _numpy_sigmoid(problem)
    keys = problem.kept_keys()
    keep = problem.attended() if keys is None else keys[:, None, None, None, :]
    return attention.numpy(problem, threads, keep)


def _numpy_sigmoid(problem: MaskedProblem) -> Way:
    q, k, v = problem.arrays()
    work: Any = np.float64 if q.dtype == np.float64 else np.float32
    scale, len_k = work(-(problem.shape.head_dim**-0.5)), work(problem.shape.len_k)

    def call() -> Any:
        wide, keys, values = (x.astype(work, copy=False) for x in (q, k, v))
        scores = (wide.reshape(problem.stacked_shape) * scale) @ keys.swapaxes(-1, -2)
        np.exp(scores, out=scores)
        out = 1 / (1 + len_k * scores) @ values
        return out.astype(q.dtype, copy=False).reshape(problem.out_shape)

    return Way(call)


def _refuse(problem: MaskedProblem, structures: bool = False, copies: float = 2) -> None:
    """Refuse what an engine is not given: torch stands for all that take structural masks as an array."""
    if problem.variant == SIGMOID:
        raise Unsupported("has no sigmoid attention")
    if problem.variant in STRUCTURES and not structures:
        raise Unsupported("is not given structural masks")
    if copies:
        refuse_dense(problem.shape, problem.dtype, copies)


def _padding_bias(problem: MaskedProblem, keep: Array) -> Array:
    """A bias (B, 1, 1, Lk) that masks padding."""
    return np.where(keep, 0, -np.inf).astype(problem.arrays()[0].dtype)[:, None, None, :]


def _torch(problem: MaskedProblem, threads: int) -> Ways:
    _refuse(problem, structures=True, copies=0)
    torch = runtimes.torch_inference(threads)
    keep, attended = problem.kept_keys(), problem.attended()
    if attended is not None:
        return attention.torch(problem, threads, {"": torch.from_numpy(attended)})
    if keep is None:
        return attention.torch(problem, threads)
    mask = torch.from_numpy(keep)[:, None, None, :]
    bias = torch.zeros(mask.shape, dtype=getattr(torch, problem.dtype)).masked_fill(~mask, float("-inf"))
    return attention.torch(problem, threads, {"boolean mask": mask, "float mask": bias})


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


def _flex(problem: MaskedProblem, threads: int) -> Way:
    """flex_attention for structural masks, whose blocks are found outside the timed call."""
    attended = problem.attended()
    if attended is None or problem.dtype != "float32":
        raise Unsupported("is asked for structural masks in float32 only")
    from torch import compile
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = runtimes.tensors(runtimes.torch_inference(threads), *problem.arrays())
    blocks = create_block_mask(_mask_mod(attended), None, None, *attended.shape, device="cpu")
    compiled, grouped_heads = compile(flex_attention), problem.group > 1
    return Way(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped_heads), runtimes.read_tensor)


def _onnx(problem: MaskedProblem, threads: int) -> Ways:
    """Attention of ONNX; opset 24 brings key lengths."""
    _refuse(problem)
    if (keep := problem.kept_keys()) is None:
        return attention.onnx(problem, threads)
    s = problem.shape
    bias = np.broadcast_to(_padding_bias(problem, keep), (s.batch, 1, s.len_q, s.len_k)).copy()
    lengths = keep.sum(-1, dtype=np.int64)
    ways = {"float mask": (23, {"bias": bias}), "nonpad_kv_seqlen": (24, {"lengths": lengths}, 3)}
    return attention.onnx(problem, threads, ways)


def _onnx_multi_head(problem: MaskedProblem, threads: int) -> Ways:
    _refuse(problem)
    return attention.onnx_multi_head(problem, threads, problem.kept_keys())


def _openvino(problem: MaskedProblem, threads: int) -> Ways:
    _refuse(problem, copies=1)
    if (keep := problem.kept_keys()) is None:
        return attention.openvino(problem, threads)
    masks = {"boolean mask": keep[:, None, None, :].copy(), "float mask": _padding_bias(problem, keep)}
    return attention.openvino(problem, threads, masks)


def _jax(problem: MaskedProblem, threads: int) -> Ways:
    _refuse(problem)
    keep = problem.kept_keys()
    lengths = {} if keep is None else {"key_value_seq_lengths": keep.sum(-1, dtype=np.int32)}
    return attention.jax(problem, threads, **lengths)


_PEERS = {
    "numpy": _numpy,
    "torch": _torch,
    "ort": _onnx,
    "ort-mha": _onnx_multi_head,
    "openvino": _openvino,
    "jax": _jax,
}
ENGINES = {
    **own_engines(_own),
    **{name: attention.ENGINES[name]._replace(ways=ways) for name, ways in _PEERS.items()},
    "flex": Engine(("torch",), _flex, "torch's FlexAttention, compiled"),
}


def fresh_shapes(seed: int, n: int = 12) -> list[Shape]:
    """Random shapes with about the work of `SHAPES`, to catch a kernel that was tuned to that list.

    Lengths are on no grid; head dimensions are multiples of 8, as in models. Every fourth shape is a decode
    step. The bench compares their medians with those of the fixed shapes of the same kind.
    """
    rng = np.random.default_rng(seed)

    def log_uniform(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    shapes = []
    for index in range(n):
        batch, heads, head_dim = log_uniform(1, 8), int(rng.integers(4, 33)), 8 * int(rng.integers(4, 21))
        if index % 4 == 3:
            shape = shape_of(batch, heads, 1, log_uniform(512, 8192), head_dim)
        else:
            len_q = log_uniform(128, 4096)
            len_k = len_q if index % 2 else log_uniform(128, 4096)
            shape = shape_of(1 if len_q > 512 else batch, heads, len_q, len_k, head_dim)
        shapes.append(shape)
    return shapes


def plan(request: Request) -> Sections:
    """The minute's problems, or with `full` all of them; float32 unless `dtype` says otherwise."""
    main = request.dtype or "float32"

    def section(title: str, shapes: Any, variant: str = "plain", dtype: str = main) -> Sections:
        return request.section(MaskedProblem, title, shapes, dtype, [variant])

    if not request.full:
        return {
            title.replace("float32", main): [
                MaskedProblem(x.shape, x.variant, main if x.dtype == "float32" else x.dtype, request.seed)
                for x in problems
            ]
            for title, problems in attention.plan().items()
            if request.dtype is None or "float32" in title
        }
    found = {
        **section("no mask", SHAPES),
        **section("causal", PREFILL, "causal"),
        **section("padding mask", SHAPES, "padding_mask"),
        **section("sigmoid attention", SHAPES, SIGMOID),
        **section("grouped heads", [grouped(shape) for shape in SHAPES]),
        **section(f"fresh shapes (seed {request.seed})", fresh_shapes(request.seed)),
        **section("tiny call", [TINY]),
    }
    for name in ("plain", *STRUCTURES):
        found |= section(f"structural mask, {name}", [STRUCTURED], name)
    if request.dtype is None and has_bfloat16():
        found |= section("no mask", [s for s in PREFILL if s.len_q >= 2048], dtype="bfloat16")
    return found


SUITE = Suite(ENGINES, plan, DTYPES, attention.NUMBERS, "about a quarter of an hour")
