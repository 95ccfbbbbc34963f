"""Calls that Hypothesis draws, and parts of them."""

import numpy as np
from hypothesis import strategies as st
from oracle import spread_inputs

from fastattn._bench.cases import DTYPES, VARIANTS, Shape, combine

LENGTHS = st.integers(1, 70)
LONGER = st.integers(1, 300)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def calls(draw, variants=tuple(VARIANTS), lengths=LENGTHS):
    """q, k, v and the arguments of one call, of any shape and dtype and with up to three options."""
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = Shape("", draw(st.integers(1, 3)), heads_kv * group, heads_kv, draw(lengths), draw(lengths),
                  draw(st.integers(1, 40)), draw(st.integers(1, 40)))  # fmt: skip
    rng = np.random.default_rng(draw(SEEDS))
    names = draw(st.lists(st.sampled_from(variants), max_size=3, unique=True))
    return *spread_inputs(shape, draw(st.sampled_from(DTYPES)), rng), combine(names, shape, rng)


def part_of(arguments, begin, end, len_q, len_k):
    """The arguments for the keys from `begin` to `end` alone: what counts keys moves by `begin`."""
    lengths = arguments.get("kv_lengths", len_k)
    part = {**arguments, "q_offset": arguments.get("q_offset", lengths - len_q) - begin}
    for name in {"mask", "bias"} & arguments.keys():
        part[name] = arguments[name][..., begin:end]
    if "kv_lengths" in arguments:
        part["kv_lengths"] = np.clip(lengths - begin, 0, end - begin)
    if "row_ranges" in arguments:
        part["row_ranges"] = tuple(side - begin for side in arguments["row_ranges"])
    return part
