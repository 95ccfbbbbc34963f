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


def parts(arrays, by_token=("log_decay", "beta")):
    """The arrays of each sequence; matrices of `by_token` have tokens last, the others one axis more."""
    for s, (i, j) in enumerate(pairwise(BEGINS)):
        yield {
            name: x[s]
            if name == "state"
            else in_part(x, i, j, -1 if name in by_token and x.ndim == 2 else -2)
            for name, x in arrays.items()
        }


def given(rule, heads=(4, 2, 2), dtype=np.float32, **options):
    q, k, v, more = problem(rule, heads, TOKENS, 12, 20, dtype, **options)
    rng = np.random.default_rng(1)
    state = rng.standard_normal((len(BEGINS) - 1, max(heads[1:]), 12, 20))
    lane = np.float64 if dtype == np.float64 else np.float32
    return {"q": q, "k": k, "v": v, **more, "state": state.astype(lane)}


def require_same(function, arrays, by_token=("log_decay", "beta"), **options):
    """Results and gradients of all sequences at once are those of each alone."""
    out, after = function(**arrays, begins=BEGINS, return_state=True, **options)
    for s, part in enumerate(parts(arrays, by_token)):
        alone, state = function(**part, return_state=True, **options)
        np.testing.assert_array_equal(out[:, BEGINS[s] : BEGINS[s + 1]], alone)
        np.testing.assert_array_equal(after[s], state)
    need = tuple(f"d{name}" for name in arrays)
    rng = np.random.default_rng(3)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dafter = rng.standard_normal(after.shape).astype(after.dtype)
    _, pullback = vjp(function, **arrays, begins=BEGINS, return_state=True, **options)
    whole = dict(zip(arrays, pullback(dout, dafter, need=need), strict=True))
    expected = {name: [] for name in arrays}
    for s, part in enumerate(parts(arrays, by_token)):
        _, pullback = vjp(function, **part, return_state=True, **options)
        rows = dout[:, BEGINS[s] : BEGINS[s + 1]]
        for name, x in zip(arrays, pullback(rows, dafter[s], need=need), strict=True):
            expected[name].append(x)
    for name, x in whole.items():
        joined = expected[name]
        if name == "state":
            joined = np.stack(joined)
        else:
            joined = np.concatenate(joined, -1 if name in by_token and x.ndim == 2 else -2)
        np.testing.assert_array_equal(x, joined, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(4, 2, 2), (1, 2, 4)], ids=str)
def test_rules(implementation, rule, heads):
    for dtype in (np.float32, np.float64, np.float16):
        require_same(functional.linear_attention, given(rule, heads, dtype), rule=rule)
    if "delta" in rule:
        require_same(functional.linear_attention, given(rule, heads, erase=True), rule=rule)


def test_not_causal(implementation):
    require_same(functional.linear_attention, given("linear"), rule="linear", causal=False)


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


def named(function):
    """The arrays of a named delta rule."""
    q, k, v, more = (x for x in problem("kimi_delta", 2, TOKENS, 8, 12))
    rng = np.random.default_rng(2)
    tokens, state = (2, TOKENS), rng.standard_normal((len(BEGINS) - 1, 2, 8, 12)).astype(np.float32)
    decay, beta = -rng.random(tokens, np.float32), rng.random(tokens, np.float32)
    found = {"q": q, "k": k, "v": v, "state": state}
    if function == "comba":
        return found | {"log_decay": decay, "beta": beta, "erase_strength": beta / 2}
    if function == "gated_delta_net2":
        gates = {"erase_gate": rng.random(k.shape, np.float32), "write_gate": rng.random(v.shape, np.float32)}
        return found | {"log_decay": more["log_decay"]} | gates
    own = {"read_by": -k, "write_by": k * 0.5, "log_decay": np.maximum(more["log_decay"], -1)}
    return {"r": q, "k": k, "v": v, "state": state, **own}


@pytest.mark.parametrize("name", ["comba", "gated_delta_net2", "rwkv7"])
def test_named(implementation, name):
    by_token = ("log_decay", "beta", "erase_strength")
    require_same(getattr(functional, name), named(name), by_token)


def test_several_steps_a_token(implementation):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, TOKENS, 3, n)).astype(np.float32) for n in (8, 12))
    q, beta = rng.standard_normal((2, TOKENS, 8)).astype(np.float32), rng.random((2, TOKENS, 3), np.float32)
    out, after = functional.delta_product(q, k, v, beta, begins=BEGINS, return_state=True)
    for s, (i, j) in enumerate(pairwise(BEGINS)):
        of = slice(i, j)
        alone = functional.delta_product(q[:, of], k[:, of], v[:, of], beta[:, of], return_state=True)
        np.testing.assert_array_equal(out[:, of], alone[0])
        np.testing.assert_array_equal(after[s], alone[1])


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
    steps = {"k": np.zeros((2, 5, 3, 4)), "v": np.zeros((2, 5, 3, 4)), "beta": np.zeros((2, 5, 3))}
    with pytest.raises(ValueError, match="begins goes from 0 to 15; expected 0 to 5, the tokens of k"):
        functional.delta_product(np.zeros((2, 5, 4)), **steps, begins=[0, 15])
    with pytest.raises(ValueError, match=r"q has shape \(1, 2, 5, 4\); expected \(heads, len, head_dim\)"):
        functional.delta_product(np.zeros((1, 2, 5, 4)), **steps, begins=[0, 5])
    tokens = {name: np.zeros((1, 2, 5, 4)) for name in ("r", "log_decay", "k", "v", "read_by", "write_by")}
    with pytest.raises(ValueError, match=r"r has shape \(1, 2, 5, 4\); expected \(heads, len, head_dim\)"):
        functional.rwkv7(**tokens, begins=[0, 5])
    for name in ("cu_seqlens", "seq_idx"):
        with pytest.raises(TypeError, match=f"{name} is not an argument; expected begins"):
            functional.linear_attention(**given("gated"), rule="gated", **{name: BEGINS})
