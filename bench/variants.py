"""The suite "variants": variants of attention, each with a call that the tests take, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fastattn
from bench.suite import Request, Suite, flops
from fastattn import functional
from fastattn._bench import runtimes
from fastattn._bench.attention import NUMBERS, AttentionProblem, shape_of
from fastattn._bench.cases import DTYPES, VARIANTS, Array, Shape, as_dtype
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, own_engines
from fastattn._engine import settings


class Inputs(NamedTuple):
    """The inputs of a call: q is (B, H, L, D), k and v are (B, Hkv, L, D); `draw` gives more arrays."""

    shape: Shape
    q: Array
    k: Array
    v: Array
    draw: Callable[..., Array]


Call = Callable[[], Array]
Make = Callable[[Inputs], Call]


def _options(name: str) -> Make:
    """A call of `attention` with the arguments of a variant in `cases.VARIANTS`."""

    def make(x: Inputs) -> Call:
        options = VARIANTS[name](x.shape, np.random.default_rng(1))
        return lambda: fastattn.attention(x.q, x.k, x.v, **options)

    return make


def _function(name: str, more: Callable[[Inputs], tuple[Array, ...]], **options: Any) -> Make:
    """A call of a function in `fastattn.variants`; `more` gives the arrays that it takes after q, k and v."""

    def make(x: Inputs) -> Call:
        arrays = more(x)
        return lambda: getattr(functional, name)(x.q, x.k, x.v, *arrays, **options)

    return make


def _deberta(x: Inputs) -> tuple[Array, ...]:
    return tuple(x.draw(x.shape.heads_q, 512, x.shape.head_dim) / 8 for _ in range(2))


def _deformable(x: Inputs) -> Call:
    """Levels are the halves of a grid of all values, nearly square; a query has 8 points on each."""
    shape, n = x.shape, x.shape.len_k
    height = max(i for i in range(1, n + 1) if n % i == 0 and i * i <= n)
    levels = [(height // 2, n // height), (height - height // 2, n // height)]
    lane: Any = np.float64 if x.q.dtype == np.float64 else np.float32
    points = (shape.batch, shape.heads_kv, shape.len_q, 16)
    locations, weights = (x.draw(*each).astype(lane) for each in ((*points, 2), points))
    locations, weights = locations * lane(0.25) + lane(0.5), weights * lane(0.25)
    return lambda: functional.deformable_attention(x.v, levels, locations, weights)


def _selected(x: Inputs) -> Call:
    """Blocks of 16 keys: each query of the first ones, of its own and of every fourth one before."""
    own = np.arange(x.shape.len_q)[:, None] // 16
    blocks = own - 4 * np.arange(max(1, x.shape.len_k // 64))
    lists = np.where(blocks < 0, 0, blocks)[None]
    return lambda: functional.selected_attention(x.q, x.k, x.v, lists, block_size=16, causal=True)


def _statistics(x: Inputs) -> Call:
    stats = ("row_max", "entropy", "top_k:8", "key_sums", "mean_weights")
    return lambda: fastattn.attention(x.q, x.k, x.v, stats=stats)[0]


def _dropout(x: Inputs) -> Call:
    return lambda: fastattn.attention(x.q, x.k, x.v, dropout=0.1, seed=1)


# Variants that are arguments of `attention`: the name here, and the name in `cases.VARIANTS`.
OPTIONS = {
    **{name: name for name in ("plain", "causal", "alibi", "softcap", "sinks", "off_by_one", "t5_bias")},
    "dense_bias": "bias_heads",
}

# For each variant a function that lays out the inputs and returns the call to time. "plain" comes first: the
# other variants are compared with it.
CALLS: dict[str, Make] = {
    **{name: _options(case) for name, case in OPTIONS.items()},
    "deberta": _function("disentangled_attention", _deberta, max_distance=512),
    "gated": _function(
        "gated_attention", lambda x: (x.draw(x.shape.batch, x.shape.heads_q, x.shape.len_q, x.shape.dim_v),)
    ),
    "deformable": _deformable,
    "selected": _selected,
    "all_statistics": _statistics,
    "dropout": _dropout,
}
# Other normalisers and mixed heads, which are not among the calls that the tests take.
NORMALISERS: dict[str, Make] = {
    "sparsemax": _function("sparsemax_attention", lambda x: ()),
    "entmax15": _function("entmax15_attention", lambda x: ()),
    "additive": _function("additive_attention", lambda x: (x.draw(x.shape.heads_q, x.shape.head_dim),)),
    "top_k": _function("top_k_attention", lambda x: (), top_k=32),
    "talking_heads": _function(
        "talking_heads_attention",
        lambda x: tuple(x.draw(*[x.shape.heads_q] * 2) / x.shape.heads_q**0.5 for _ in range(2)),
    ),
}


class VariantProblem(AttentionProblem):
    """A shape whose lengths are equal and whose number of heads is even."""

    @property
    def name(self) -> str:
        return self.variant

    def timed(self, dtype: str | None = None) -> Call:
        """The call on inputs in `dtype`, whose values are those that the problem's own dtype holds."""
        held, wanted = as_dtype(self.dtype), as_dtype(dtype or self.dtype)
        rng = self.rng(1)

        def draw(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32).astype(held).astype(wanted)

        q, k, v = (x.astype(wanted) for x in self.arrays())
        return (CALLS | NORMALISERS)[self.variant](Inputs(self.shape, q, k, v, draw))

    def reference(self) -> tuple[Array, Array]:
        """All rows, by the fallback in float64; the tests compare the fallback with the formulas."""
        with settings.forced(backend="numpy"):
            out = self.timed("float64")()
        out = out.reshape(-1, out.shape[-1])
        return np.arange(len(out)), out

    @property
    def work(self) -> float:
        """Operations of plain attention with this shape, so that rates compare as times do."""
        return flops(self.shape)


LONG = shape_of(1, 8, 2048, 2048, 64)
SHORT = shape_of(8, 12, 128, 128, 64)


def plan(request: Request) -> Sections:
    """The first variants on a long text, or with `full` all variants on a long text and on short ones."""
    dtype = request.dtype or "float32"
    shapes, names = ((LONG, SHORT), [*CALLS, *NORMALISERS]) if request.full else ((LONG,), list(CALLS)[:8])
    sections: Sections = {}
    for shape in shapes:  # NumPy's additive scores hold a number for each feature
        kept = [name for name in names if name != "additive" or shape != LONG]
        sections |= request.section(VariantProblem, shape.name, [shape], dtype, kept)
    return sections


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
    q, k, v = runtimes.tensors(runtimes.torch_inference(threads), *arrays)
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
    q, k, v = runtimes.tensors(runtimes.torch_inference(threads), *arrays)
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


def _own(problem: VariantProblem, backend: str) -> Way:
    return Way(problem.timed())


ENGINES = {
    **own_engines(_own),
    "torch": Engine(("torch",), sdpa_biased, "torch's scaled_dot_product_attention, a dense mask"),
    "flex": Engine(("torch",), flex_modified, "torch's FlexAttention, compiled"),
}


SUITE = Suite(ENGINES, plan, DTYPES, f"{NUMBERS}, and variants of attention below them", "about five minutes")
