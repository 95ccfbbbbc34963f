"""The problems of the suite "attention", and which of them are measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import fastattn
from fastattn import masks
from fastattn._bench import oracle
from fastattn._bench.cases import (
    SHAPES,
    STRUCTURED,
    STRUCTURES,
    VARIANTS,
    Array,
    fresh_shapes,
    grouped,
    shape_of,
)
from fastattn._bench.suite import CallProblem, Request, Section, has_bfloat16

TINY = shape_of(1, 1, 8, 8, 16)  # its time is what a call costs, whatever it computes
SIGMOID = "sigmoid"  # the variant that is a function of its own, `sigmoid_attention`


class AttentionProblem(CallProblem):
    """A call of `attention` with the arguments of one variant or with one structural mask."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        if self.variant == SIGMOID:
            return {}
        if self.variant in STRUCTURES:
            shape = self.shape
            sizes = (shape.batch, shape.heads_q, shape.len_q, shape.len_k)
            return {"mask": masks.compile(STRUCTURES[self.variant](shape, self.rng(1)), sizes)}
        return VARIANTS[self.variant](self.shape, self.rng(1))

    def attended(self) -> Array | None:
        """Of a structural mask, which query attends which key, (Lq, Lk); None if there is no such mask."""
        if self.variant not in STRUCTURES:
            return None
        return STRUCTURES[self.variant](self.shape, self.rng(1)).to_array(self.shape.len_q, self.shape.len_k)

    @property
    def causal(self) -> bool:
        return self.variant == "causal"

    def kept_keys(self) -> Array | None:
        """Which keys are no padding, (B, Lk); None if no variant pads them."""
        options = self.options()
        if "kv_lengths" in options:
            return np.asarray(np.arange(self.shape.len_k) < options["kv_lengths"][:, None])
        if "mask" not in options or self.variant in STRUCTURES:
            return None
        keep: Array = options["mask"][:, 0, 0, :]
        return keep

    @property
    def group(self) -> int:
        return self.shape.heads_q // self.shape.heads_kv

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.shape.batch, self.shape.heads_q, self.shape.len_q, self.shape.dim_v)

    @property
    def stacked_shape(self) -> tuple[int, int, int, int]:
        """The shape of q when the query heads of a group become more rows of one head.

        The result stays the same, unless the problem is causal.
        """
        return (self.shape.batch, self.shape.heads_kv, self.group * self.shape.len_q, self.shape.head_dim)

    def reference(self) -> tuple[Array, Array]:
        """16 query rows of every head."""
        shape = self.shape
        chosen = np.random.default_rng(self.seed).permutation(shape.len_q)[:16]
        sigmoid_bias = -math.log(shape.len_k) if self.variant == SIGMOID else None
        out, _ = oracle.attention(*self.arrays(), rows=chosen, sigmoid_bias=sigmoid_bias, **self.options())
        rows = np.arange(shape.batch * shape.heads_q)[:, None] * shape.len_q + chosen
        return rows.ravel(), out.reshape(-1, shape.dim_v)

    @property
    def work(self) -> float:
        """Operations of the two products, or for one query row the bytes of k and v, less what is masked."""
        kept = self.attended() if self.variant in STRUCTURES else self.kept_keys()
        share = 0.5 if self.causal else 1.0 if kept is None else float(kept.mean())
        return share * (self.shape.kv_bytes(self.dtype) if self.shape.decode else self.shape.flops)


PREFILL = [shape for shape in SHAPES if not shape.decode]
# The first minute. Short texts in an encoder, alone and as a batch, and longer ones; texts of a decoder; and
# the next token of a decoder, of one text over heads that share keys and values, and of a batch.
SHORT, BATCH, MIDDLE, LONG = PREFILL[:4]
DECODER = PREFILL[4]
NEXT_TOKEN = (grouped(SHAPES[6]), SHAPES[7])


def plan(request: Request) -> list[Section]:
    """The first minute's problems, or with `full` all of them; float32 unless `dtype` says otherwise."""
    main = request.dtype or "float32"

    def section(title: str, shapes: Any, variant: str = "plain", dtype: str = main) -> Section:
        return request.section(AttentionProblem, title, shapes, dtype, [variant])

    if not request.full:
        sections = [
            section("no mask", [SHORT, BATCH, MIDDLE, LONG]),
            section("causal", [MIDDLE, DECODER], "causal"),
            section("next token", NEXT_TOKEN),
        ]
        if request.dtype is None and fast_bfloat16():
            sections += [
                section("no mask", [MIDDLE, LONG], dtype="bfloat16"),
                section("causal", [DECODER], "causal", "bfloat16"),
                section("next token", NEXT_TOKEN[:1], dtype="bfloat16"),
            ]
        return [*sections, section("tiny call", [TINY])]
    sections = [
        section("no mask", SHAPES),
        section("causal", PREFILL, "causal"),
        section("padding mask", SHAPES, "padding_mask"),
        section("sigmoid attention", SHAPES, SIGMOID),
        section("grouped heads", [grouped(shape) for shape in SHAPES]),
        section(f"fresh shapes (seed {request.seed})", fresh_shapes(request.seed)),
        section("tiny call", [TINY]),
        *(section(f"structural mask, {name}", STRUCTURED, name) for name in ("plain", *STRUCTURES)),
    ]
    if request.dtype is None and has_bfloat16():
        sections.insert(5, section("no mask", [s for s in PREFILL if s.len_q >= 2048], dtype="bfloat16"))
    return sections


def fast_bfloat16() -> bool:
    """Whether the kernels in force have instructions for products of bfloat16, and NumPy knows the type."""
    return has_bfloat16() and "bf16" in (fastattn.show_config()["isa"] or "")
