"""Which problems of attention the bench measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastattn._bench.cases import SHAPES, STRUCTURED, STRUCTURES, fresh_shapes, grouped
from fastattn._bench.suite import Section, has_bfloat16
from fastattn._bench.suites.attention.problem import SIGMOID, TINY, Problem


def plan(dtype: str | None, quick: bool, seed: int, folder: Path) -> list[Section]:
    """What is measured, in float32 unless `dtype` says otherwise; with `quick` a part of it."""
    main = dtype or "float32"

    def section(title: str, shapes: Any, variant: str = "plain", dtype: str = main) -> Section:
        return Section(f"{title}, {dtype}", [Problem(shape, variant, dtype, seed) for shape in shapes])

    prefill = [shape for shape in SHAPES if not shape.decode]
    decode = [shape for shape in SHAPES if shape.decode]
    if quick:
        small = [s for s in fresh_shapes(seed) if s.flops < 4e9 and s.kv_bytes(main) < 5e7]
        short, middle, long = prefill[1], prefill[2], prefill[3]
        return [
            section("no mask", [short, middle, long, *decode]),
            section("causal", [long], "causal"),
            section("padding mask", [short], "padding_mask"),
            section("grouped heads", [grouped(middle), grouped(decode[0])]),
            section("tiny call", [TINY]),
            section(f"fresh shapes (seed {seed})", small[:2]),
        ]
    sections = [
        section("no mask", SHAPES),
        section("causal", prefill, "causal"),
        section("padding mask", SHAPES, "padding_mask"),
        section("sigmoid attention", SHAPES, SIGMOID),
        section("grouped heads", map(grouped, SHAPES)),
        section(f"fresh shapes (seed {seed})", fresh_shapes(seed)),
        section("tiny call", [TINY]),
        *(section(f"structural mask, {name}", STRUCTURED, name) for name in ("plain", *STRUCTURES)),
    ]
    if dtype is None and has_bfloat16():
        sections.insert(5, section("no mask", [s for s in prefill if s.len_q >= 2048], dtype="bfloat16"))
    return sections
