"""Recurrent layers' functions on sequences end to end: each has the bits of a call of its own."""

from itertools import pairwise

import numpy as np
import pytest
from recurrence import RULES, problem

from fastattn import functional
from fastattn.grad import vjp

BEGINS = [0, 1, 1, 4, 9, 50, 120]  # steps and chunks, none, and a chunk that is not full
TOKENS = BEGINS[-1]


def in_part(x, i, j, axis=-2):
    return x if x.shape[axis] == 1 else np.take(x, range(i, j), axis)


def parts(arrays):
    """The arrays of each sequence; those of scalars have tokens last, the others one axis more."""
    for s, (i, j) in enumerate(pairwise(BEGINS)):
        yield {
            name: x[s] if name == "state" else in_part(x, i, j, -1 if x.ndim == 2 else -2)
            for name, x in arrays.items()
        }


def given(rule, heads=(4, 2, 2), dtype=np.float32, **options):
    q, k, v, more = problem(rule, heads, TOKENS, 12, 20, dtype, **options)
    rng = np.random.default_rng(1)
    state = rng.standard_normal((len(BEGINS) - 1, max(heads[1:]), 12, 20))
    lane = np.float64 if dtype == np.float64 else np.float32
    return {"q": q, "k": k, "v": v, **more, "state": state.astype(lane)}


def require_same(arrays, **options):
    """Results and gradients of all sequences at once are those of each alone."""
    out, after = functional.linear_attention(**arrays, begins=BEGINS, return_state=True, **options)
    for s, part in enumerate(parts(arrays)):
        alone, state = functional.linear_attention(**part, return_state=True, **options)
        np.testing.assert_array_equal(out[:, BEGINS[s] : BEGINS[s + 1]], alone)
        np.testing.assert_array_equal(after[s], state)
    need = tuple(f"d{name}" for name in arrays)
    rng = np.random.default_rng(3)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dafter = rng.standard_normal(after.shape).astype(after.dtype)
    _, pullback = vjp(functional.linear_attention, **arrays, begins=BEGINS, return_state=True, **options)
    whole = dict(zip(arrays, pullback(dout, dafter, need=need), strict=True))
    expected = {name: [] for name in arrays}
    for s, part in enumerate(parts(arrays)):
        _, pullback = vjp(functional.linear_attention, **part, return_state=True, **options)
        rows = dout[:, BEGINS[s] : BEGINS[s + 1]]
        for name, x in zip(arrays, pullback(rows, dafter[s], need=need), strict=True):
            expected[name].append(x)
    for name, x in whole.items():
        own, axis = expected[name], -1 if x.ndim == 2 else -2
        joined = np.stack(own) if name == "state" else np.concatenate(own, axis)
        np.testing.assert_array_equal(x, joined, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(4, 2, 2), (1, 2, 4)], ids=str)
def test_rules(implementation, rule, heads):
    for dtype in (np.float32, np.float64, np.float16):
        require_same(given(rule, heads, dtype), rule=rule)
    if "delta" in rule:
        require_same(given(rule, heads, erase=True), rule=rule)


def test_not_causal(implementation):
    require_same(given("linear"), rule="linear", causal=False)


def test_decays_of_heads_and_sums_of_keys(implementation):
    """Arrays without tokens; states that are pairs, in place."""
    arrays = {name: np.abs(x) for name, x in given("linear").items()}
    state = arrays.pop("state")
    kept = state, state.sum(-1)
    before = tuple(x.copy() for x in kept)
    options = {"rule": "decay", "log_decay": np.float32([-0.1, -0.3]), "normalize": True}
    out, _ = functional.linear_attention(**arrays, **options, begins=BEGINS, state=kept, out_state=kept)
    for s, part in enumerate(parts(arrays)):
        own = {"state": (before[0][s], before[1][s]), "return_state": True}
        alone, after = functional.linear_attention(**part, **options, **own)
        np.testing.assert_array_equal(out[:, BEGINS[s] : BEGINS[s + 1]], alone)
        for x, y in zip(kept, after, strict=True):
            np.testing.assert_array_equal(x[s], y)


def test_what_is_not_finite_stays_in_its_sequence(implementation):
    arrays = given("gated_delta")
    clean = functional.linear_attention(**arrays, rule="gated_delta", begins=BEGINS)
    arrays["v"][:, 9:50] = np.nan
    odd = functional.linear_attention(**arrays, rule="gated_delta", begins=BEGINS)
    others = [*range(9), *range(50, TOKENS)]
    np.testing.assert_array_equal(odd[:, others], clean[:, others])
    assert np.isnan(odd[:, 9:50]).all()


def test_no_tokens_and_no_sequences(implementation):
    arrays = {name: x if name == "state" else x[:, :0] for name, x in given("delta").items()}
    for begins, state in (([0] * len(BEGINS), arrays["state"]), ([0], arrays["state"][:0])):
        options = {**arrays, "state": state, "rule": "delta", "begins": begins, "return_state": True}
        out, after = functional.linear_attention(**options)
        assert out.shape == (4, 0, 20)
        np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"begins": [0, 5]}, r"begins goes from 0 to 5; expected 0 to 120, the tokens of k"),
        ({"begins": [0, 90, 50, 120]}, r"begins falls from 90 to 50 at index 2"),
        ({"begins": [0.0, 120.0]}, "begins"),
        (
            {"q": np.zeros((1, 4, 120, 12), np.float32)},
            r"q has shape .*; expected \(heads, tokens, head_dim\)",
        ),
        ({"q": np.zeros((4, 9, 12), np.float32), "causal": False}, "q has 9 tokens; expected k's, 120"),
        (
            {"state": np.zeros((2, 12, 20), np.float32)},
            r"state has shape \(2, 12, 20\); expected \(6, 2, 12, 20\)",
        ),
    ],
)
def test_errors(changed, message):
    with pytest.raises((ValueError, TypeError), match=message):
        functional.linear_attention(**{**given("linear"), "rule": "linear", "begins": BEGINS, **changed})
    for name in ("cu_seqlens", "seq_idx"):
        with pytest.raises(TypeError, match=f"{name} is not an argument; expected begins"):
            functional.linear_attention(**given("gated"), rule="gated", **{name: BEGINS})
