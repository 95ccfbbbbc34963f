"""Properties of the gradients of attention that hold for any input.

`pytest tests/functional/test_backward_properties.py --hypothesis-profile=long` tries more inputs.
"""

from itertools import pairwise

import numpy as np
import pytest
from any_call import SEEDS, calls, part_of
from backward_oracle import OPTIONAL, check, cotangents, needed, run
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_bits, case, eps, poison

import fastattn
from fastattn import masks
from fastattn._bench.cases import Shape
from fastattn.functional import attention_backward


@st.composite
def backward_calls(draw, *args, wide=False, dropout=True, **how):
    """q, k, v, dout, dlse and the arguments of a call, some with dropout; `wide`: in float64."""
    q, k, v, arguments = draw(calls(*args, **how))
    if wide:
        q, k, v = (x.astype(float) for x in (q, k, v))
        arguments = {name: np.asarray(x, float) if name in OPTIONAL else x for name, x in arguments.items()}
    if dropout and draw(st.booleans()):
        arguments = {**arguments, "dropout": draw(st.sampled_from([0.1, 0.5])), "seed": draw(SEEDS)}
    return (q, k, v, *cotangents(q, v, np.random.default_rng(draw(SEEDS))), arguments)


def hold(got, q, k, v, dout, dlse, arguments):
    """The bound, and what rounding may do to a score: of few numbers, plain ones may be right by luck."""
    sums = np.repeat(abs(k.astype(float)), q.shape[1] // k.shape[1], 1).swapaxes(-1, -2)
    largest = np.max(abs(q.astype(float)) @ sums, initial=0) * abs(
        arguments.get("scale", q.shape[-1] ** -0.5)
    )
    more = 2 * eps(np.float64 if q.dtype == np.float64 else np.float32) * largest
    check(got, q, k, v, dout, dlse, arguments, telling=False, more=more)


@given(call=backward_calls())
def test_any_call_is_within_the_bound(call, implementation):
    hold(run(*call), *call)


@given(call=backward_calls(wide=True, dropout=False), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_split_keys_merged_with_dlse(call, cuts, implementation):
    """The result is the sum of exp(lse_i - lse) out_i: each part has a dout and a dlse."""
    q, k, v, dout, dlse, arguments = call
    len_q, len_k = q.shape[-2], k.shape[-2]
    out, lse = fastattn.attention(q, k, v, **arguments, return_lse=True)
    need = [name for name in needed(arguments) if name != "dbias_diagonals"]
    found = []
    for begin, end in pairwise([0, *sorted(int(cut * len_k) for cut in cuts), len_k]):
        part = part_of(arguments, begin, end, len_q, len_k)
        if found:
            part.pop("sinks", None)  # one of the parts carries them
        arrays = q, k[..., begin:end, :], v[..., begin:end, :]
        part_out, part_lse = fastattn.attention(*arrays, **part, return_lse=True)
        weight = np.where(part_lse == -np.inf, 0, np.exp(part_lse - np.where(lse == -np.inf, 0, lse)))
        dpart = weight * ((dout * (part_out - out)).sum(-1) + dlse)
        names = [name for name in need if name != "dsinks" or "sinks" in part]
        gradients = attention_backward(
            weight[..., None] * dout, *arrays, part_out, part_lse, dlse=dpart, need=names, **part
        )
        found.append(dict(zip(names, gradients, strict=True)))
    whole = run(q, k, v, dout, dlse, arguments, need)
    for name, x in whole.items():
        parts = [part[name] for part in found if name in part]
        axis = {"dk": -2, "dv": -2, "dbias": -1}.get(name)
        got = sum(parts) if axis is None else np.concatenate(parts, axis)
        size = np.max(abs(np.asarray(x)), initial=1e-2)
        np.testing.assert_allclose(got, x, rtol=0, atol=1e-9 * size, err_msg=name)


@given(call=backward_calls(), seed=SEEDS)
def test_garbage_behind_masks_never_shows(call, seed, implementation):
    """Garbage stands in keys that nobody attends, and in rows of q and dout that attend nothing."""
    q, k, v, dout, _, arguments = call
    rng = np.random.default_rng(seed)
    hidden, idle = rng.random(k.shape[-2]) < 0.4, rng.random(q.shape[-2]) < 0.3
    arguments["mask"] = arguments.get("mask", True) & ~hidden & ~idle[:, None]
    clean = run(*call)
    hold(clean, *call)
    for x in (k, v):
        poison(x, hidden, rng)
    for x in (q, dout):
        poison(x, idle, rng)
    assert_same_bits(map(np.asarray, run(*call).values()), map(np.asarray, clean.values()))


IDLE = np.isin(np.arange(67), range(5, 9))  # rows
BLOCKS = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 1]], bool)
SHAPE = Shape("", batch=2, heads_q=3, heads_kv=3, len_q=67, len_k=67, head_dim=16)
SINK_ALONE = {
    "mask": {"mask": ~IDLE[:, None] & np.ones(67, bool)},
    "bias": {"bias": np.where(IDLE[:, None], -np.inf, np.zeros(67)).astype(np.float32)},
    "ranges": {"row_ranges": (0, np.where(IDLE, 0, 67))},
    "causal": {"causal": True, "q_offset": -9},
    "lists": {"mask": masks.block_sparse(BLOCKS, 16)},
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", SINK_ALONE)
def test_what_attends_a_sink_alone_has_no_dout(name, dtype, implementation):
    """Its result is 0 whatever the values are: NaN in its dout reaches no gradient, in its dlse it does."""
    q, k, v, _, _ = case(SHAPE, ("plain",), dtype)
    arguments = {**SINK_ALONE[name], "sinks": np.float32([0.5, -1, 2])}
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    _, lse = fastattn.attention(q, k, v, **{**arguments, "sinks": None}, return_lse=True)
    alone = lse == -np.inf
    assert alone.any()
    clean = run(q, k, v, dout, dlse, arguments)
    dirty = run(q, k, v, np.where(alone[..., None], np.nan, dout).astype(dout.dtype), dlse, arguments)
    assert_same_bits(map(np.asarray, dirty.values()), map(np.asarray, clean.values()))
    dlse = np.where(alone, np.nan, dlse).astype(dlse.dtype)
    assert np.isnan(run(q, k, v, dout, dlse, arguments, ["dsinks"])["dsinks"]).all()
    dlse = np.zeros_like(dlse)
    dout = np.where(alone[..., None], dout, np.nan).astype(dout.dtype)
    assert np.isnan(run(q, k, v, dout, dlse, arguments, ["dsinks"])["dsinks"]).all()
