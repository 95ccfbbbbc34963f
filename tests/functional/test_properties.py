"""Properties of attention that hold for any input.

`pytest tests/functional/test_properties.py --hypothesis-profile=long` tries more inputs.
"""

from itertools import pairwise

import numpy as np
from any_call import SEEDS, calls, part_of
from hypothesis import given
from hypothesis import strategies as st
from oracle import check, expect, poison

import fastattn


def attention(*args, **arguments):
    return fastattn.attention(*args, **arguments, return_lse=True)


@given(call=calls())
def test_any_call_is_within_the_bound(call, implementation):
    q, k, v, arguments = call
    check(attention(q, k, v, **arguments), expect(q, k, v, **arguments), telling=False)


@given(call=calls(("scale", "softcap", "sinks", "mask", "padding_mask", "bias", "bias_masking")), seed=SEEDS)
def test_permuting_keys_changes_nothing(call, seed, implementation):
    q, k, v, arguments = call
    order = np.random.default_rng(seed).permutation(k.shape[-2])
    moved = {name: x[..., order] if name in ("mask", "bias") else x for name, x in arguments.items()}
    got = attention(q, k[..., order, :], v[..., order, :], **moved)
    check(got, expect(q, k, v, **arguments), telling=False)


@given(call=calls(), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_splitting_keys_and_merging_gives_the_whole(call, cuts, implementation):
    q, k, v, arguments = call
    len_q, len_k = q.shape[-2], k.shape[-2]
    edges = [0, *sorted(int(cut * len_k) for cut in cuts), len_k]
    parts = []
    for begin, end in pairwise(edges):
        part = part_of(arguments, begin, end, len_q, len_k)
        if parts:
            part.pop("sinks", None)  # one of the parts carries them
        parts.append(attention(q, k[..., begin:end, :], v[..., begin:end, :], **part))
    got = fastattn.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    check(got, expect(q, k, v, **arguments), telling=False)


@given(call=calls())
def test_grouped_heads_equal_repeated_keys_and_values(call, implementation):
    q, k, v, arguments = call
    group = q.shape[1] // k.shape[1]
    got = attention(q, np.repeat(k, group, 1), np.repeat(v, group, 1), **arguments)
    check(got, expect(q, k, v, **arguments), telling=False)


@given(call=calls(), seed=SEEDS)
def test_garbage_behind_masks_never_shows(call, seed, implementation):
    q, k, v, arguments = call
    rng = np.random.default_rng(seed)
    hidden = rng.random(k.shape[-2]) < 0.4
    arguments["mask"] = arguments.get("mask", True) & ~hidden
    expected = expect(q, k, v, **arguments)
    poison(k, hidden, rng)
    poison(v, hidden, rng)
    check(attention(q, k, v, **arguments), expected, telling=False)


@given(call=calls(("scale", "softcap", "sinks", "alibi", "q_offset")), seed=SEEDS)
def test_ranges_masks_and_infinite_biases_agree(call, seed, implementation):
    q, k, v, arguments = call
    rng = np.random.default_rng(seed)
    len_k = k.shape[-2]
    begin, end = rng.integers(-5, len_k + 5, (2, *q.shape[:-1]))
    mask = (begin[..., None] <= np.arange(len_k)) & (np.arange(len_k) < end[..., None])
    expected = expect(q, k, v, mask=mask, **arguments)
    check(attention(q, k, v, row_ranges=(begin, end), **arguments), expected, telling=False)
    check(attention(q, k, v, mask=mask, **arguments), expected, telling=False)
    bias = np.where(mask, np.float32(0), -np.inf)
    check(attention(q, k, v, bias=bias.astype(np.float32), **arguments), expected, telling=False)
