"""States, gates and errors of linear attention. test_recurrent_backward.py tests results and gradients."""

import numpy as np
import pytest
from recurrence import RULES, Recurrence, close, problem

from fastattn.functional import linear_attention

# Each rule, and the delta rules with keys to erase by.
CASES = [*((rule, False) for rule in RULES), *((rule, True) for rule in RULES if "delta" in rule)]
each_case = pytest.mark.parametrize(
    ("rule", "erase"), CASES, ids=[rule + " erase" * erase for rule, erase in CASES]
)


@pytest.mark.parametrize("batch", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_no_sequences(implementation, rule, batch):
    q, k, v, more = problem(rule, (4, 2, 2), 40, 5, 7)
    more = {name: np.empty((*batch, *x.shape), x.dtype) for name, x in more.items()}
    q, k, v = (np.empty((*batch, *x.shape), x.dtype) for x in (q, k, v))
    out, state = linear_attention(q, k, v, rule=rule, return_state=True, **more)
    assert (out.shape, state.shape) == ((*batch, 4, 40, 7), (*batch, 2, 5, 7))
    if rule == "linear":
        options = {"causal": False, "normalize": True, "return_state": True}
        out, (state, norm) = linear_attention(q[..., :3, :], k, v, rule=rule, **options)
        assert (out.shape, state.shape, norm.shape) == ((*batch, 4, 3, 7), (*batch, 2, 5, 7), (*batch, 2, 5))


@each_case
def test_in_pieces(implementation, rule, erase):
    q, k, v, more = problem(rule, 2, 150, 40, 70, erase=erase)
    before = np.random.default_rng(2).standard_normal((2, 40, 70)).astype(np.float32)
    whole, last = linear_attention(q, k, v, rule=rule, state=before, return_state=True, **more)
    pair = before, 0 * before[..., 0]
    close(whole, Recurrence(q, k, v, rule, scale=40**-0.5, state=pair, **more).out, share=16)
    state, parts, begin = before.copy(), [], 0
    for end in (1, 4, 70, 71, 71, 150):
        tokens = slice(begin, end)
        piece = {name: x[:, tokens] for name, x in more.items()}
        inputs = q[:, tokens], k[:, tokens], v[:, tokens]
        out, same = linear_attention(*inputs, rule=rule, state=state, out_state=state, **piece)
        assert same is state
        parts.append(out)
        begin = end
    close(np.concatenate(parts, axis=1), whole.astype(float), share=16)
    close(state, last.astype(float), share=16)


@pytest.mark.parametrize("rule", RULES)
def test_state_in_place(implementation, rule):
    for n in (1, 3, 70):
        q, k, v, more = problem(rule, 2, n, 20, 90)
        before = np.random.default_rng(2).standard_normal((2, 20, 90)).astype(np.float32)
        out, after = linear_attention(q, k, v, rule=rule, state=before, return_state=True, **more)
        again, state = linear_attention(
            q, k, v, rule=rule, state=before, out_state=before, num_threads=3, **more
        )
        np.testing.assert_array_equal(state, after)
        np.testing.assert_array_equal(again, out)


def test_normalized_state_in_place(implementation):
    for n in (1, 70):
        q, k, v, _ = problem("linear", 1, n, 20, 200)
        q, k = np.exp(q), np.exp(k)
        before = (np.ones((1, 20, 200), np.float32), np.ones((1, 20), np.float32))
        options = {"rule": "linear", "normalize": True}
        out, after = linear_attention(q, k, v, state=before, return_state=True, **options)
        state = tuple(x.copy() for x in before)
        again, same = linear_attention(q, k, v, state=state, out_state=state, num_threads=4, **options)
        assert same == state
        np.testing.assert_array_equal(again, out)
        for x, y in zip(state, after, strict=True):
            np.testing.assert_array_equal(x, y)
        close(out, Recurrence(q, k, v, "linear", normalize=True, state=before).out, share=16)


@each_case
def test_bits_depend_on_neither_threads_nor_neighbours(implementation, rule, erase):
    for n in (2, 100):
        problems = [problem(rule, 2, n, 32, 80, seed=seed, erase=erase) for seed in range(3)]
        q, k, v = (np.stack([p[i] for p in problems]) for i in range(3))
        more = {name: np.stack([p[3][name] for p in problems]) for name in problems[0][3]}
        whole = linear_attention(q, k, v, rule=rule, num_threads=1, **more)
        np.testing.assert_array_equal(linear_attention(q, k, v, rule=rule, num_threads=5, **more), whole)
        for b, (q1, k1, v1, more1) in enumerate(problems):
            alone = linear_attention(q1, k1, v1, rule=rule, num_threads=7, **more1)
            if implementation != "numpy":  # whose BLAS chooses by shape
                np.testing.assert_array_equal(alone, whole[b])
            close(alone, whole[b].astype(float), share=16)


@each_case
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_reaches_no_earlier_token(implementation, rule, erase, name):
    def same(actual, expected):
        if implementation == "numpy":  # whose BLAS chooses by shape
            close(actual, expected.astype(float), share=16)
        else:
            np.testing.assert_array_equal(actual, expected)

    name = "erase" if erase and name == "k" else name
    for n, at in ((4, 3), (100, 0), (100, 3), (100, 37), (100, 90)):
        q, k, v, more = problem(rule, 2, n, 20, 24, erase=erase)
        clean = linear_attention(q, k, v, rule=rule, **more)
        ({"q": q, "k": k, "v": v} | more)[name][0, at, 5] = np.nan
        out = linear_attention(q, k, v, rule=rule, **more)
        same(out[0, :at], clean[0, :at])
        same(out[1], clean[1])
        assert np.isnan(out[0, at]).any()
        if name == "q":
            same(out[0, at + 1 :], clean[0, at + 1 :])
        elif name == "v":
            same(np.delete(out, 5, axis=-1), np.delete(clean, 5, axis=-1))
        elif name == "erase":
            assert np.isnan(out[0, at:]).all()


def test_strides_and_broadcasting(implementation):
    rng = np.random.default_rng(3)
    whole = rng.standard_normal((2, 70, 6, 40)).astype(np.float32)
    q, k, v = (
        whole[:, :, :2, :20].swapaxes(1, 2),
        whole[:1, ::-1, 2:4, 20:].swapaxes(1, 2),
        whole[0, :, 4:, ::2],
    )
    v = v.swapaxes(0, 1)
    for decay in (np.float32([-0.1, -0.2]), np.float32([[-0.1], [-0.2]]), np.float32([[[-0.5]], [[-0.1]]])):
        out, state = linear_attention(q, k, v, rule="decay", log_decay=decay, return_state=True)
        full = np.broadcast_to(decay[:, None] if decay.ndim == 1 else decay, (2, 2, 70))
        for b in range(2):
            call = Recurrence(q[b], k[0], v, "decay", full[b], scale=20**-0.5)
            close((out[b], state[b]), (call.out, call.s[-1]), share=16)


@pytest.mark.parametrize("rule", ["decay", "gated", "delta", "kimi_delta"])
def test_gates_in_any_memory(implementation, rule):
    q, k, v, gates = problem(rule, 2, 70, 16, 16, erase="delta" in rule)
    expected = linear_attention(q, k, v, rule=rule, **gates)
    for name, x in gates.items():
        unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        unaligned[...] = x
        for other in (unaligned, np.repeat(x, 2, axis=-1)[..., ::2], np.asfortranarray(x), x.astype(">f4")):
            got = linear_attention(q, k, v, rule=rule, **{**gates, name: other})
            np.testing.assert_array_equal(got, expected)
    if "erase" in gates:  # one batch item of keys to erase by for all, and the keys themselves
        erase, shared = gates.pop("erase"), {name: np.stack([x, x]) for name, x in gates.items()}
        twice = linear_attention(np.stack([q, q]), k, v, rule=rule, erase=erase, **shared)
        close(twice[1], expected.astype(float), share=16)
        own, plain = (linear_attention(q, k, v, rule=rule, **gates, **x) for x in ({"erase": k}, {}))
        close(own, plain.astype(float), share=16)


def test_constant_decay_and_default_beta(implementation):
    q, k, v, _ = problem("delta", 2, 70, 16, 16)
    gates = np.float32(-np.arange(1, 17) / 16)[None, None]
    np.testing.assert_array_equal(
        linear_attention(q, k, v, rule="gated", log_decay=gates),
        linear_attention(q, k, v, rule="gated", log_decay=np.broadcast_to(gates, q.shape)),
    )
    np.testing.assert_array_equal(
        linear_attention(q, k, v, rule="delta"),
        linear_attention(q, k, v, rule="delta", beta=np.ones((2, 70), np.float32)),
    )


X = np.ones((2, 5, 4), np.float32)
GATE = np.full((2, 5), -1, np.float32)
S = np.zeros((2, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "softmax"}, ValueError, "rule is 'softmax'; expected one of linear, decay"),
        ({"rule": "decay"}, ValueError, "log_decay is None; expected an array with rule 'decay'"),
        ({"log_decay": GATE}, ValueError, "log_decay is given; expected None with rule 'linear'"),
        ({"beta": GATE}, ValueError, "beta is given; expected None with rule 'linear'"),
        ({"erase": X}, ValueError, "erase is given; expected None with rule 'linear'"),
        (
            {"rule": "delta", "erase": X[:, :3]},
            ValueError,
            r"erase has shape \(2, 3, 4\); expected .*heads",
        ),
        ({"rule": "delta", "erase": X[:1]}, ValueError, r"erase has shape \(1, 5, 4\); expected"),
        ({"rule": "delta", "erase": np.stack([X, X])}, ValueError, r"erase has shape \(2, 2, 5, 4\)"),
        ({"rule": "delta", "erase": X.astype(float)}, TypeError, "erase has dtype float64; expected float32"),
        ({"rule": "delta", "erase": "x"}, TypeError, "erase has dtype"),
        ({"rule": "decay", "log_decay": -GATE}, ValueError, "log_decay has 1.0; expected 0 or less"),
        ({"rule": "decay", "log_decay": GATE * np.nan}, ValueError, "log_decay has nan; expected 0 or less"),
        ({"rule": "decay", "log_decay": GATE[:, :3]}, ValueError, r"log_decay has shape \(2, 3\); expected"),
        ({"rule": "decay", "log_decay": [True, False]}, TypeError, "log_decay has dtype bool; expected"),
        (
            {"rule": "gated", "log_decay": GATE},
            ValueError,
            r"log_decay has shape \(2, 5\); expected \(...",
        ),
        ({"rule": "delta", "beta": GATE[0]}, ValueError, r"beta has shape \(5,\); expected \(..., heads, le"),
        ({"rule": "delta", "causal": False}, ValueError, "causal is False; expected True with rule 'delta'"),
        ({"rule": "delta", "normalize": True}, ValueError, "normalize is True; expected False"),
        ({"normalize": 1}, TypeError, "normalize is 1; expected True or False"),
        ({"eps": -1.0}, ValueError, "eps is -1.0; expected 0 or more"),
        ({"scale": np.inf}, ValueError, "scale is inf"),
        ({"k": X[..., :3]}, ValueError, "k has head_dim 3; expected q's, 4"),
        ({"v": X[:, :4]}, ValueError, "v has a length of 4; expected k's, 5"),
        ({"q": X[:, :4]}, ValueError, "q has a length of 4; expected k's, 5, if causal"),
        ({"k": np.ones((3, 5, 4), np.float32)}, ValueError, "have 2, 3 and 2 heads"),
        ({"q": X[0]}, ValueError, r"q has shape \(5, 4\); expected \(..., heads"),
        ({"v": X.astype(np.float64)}, TypeError, "have dtypes float32, float32 and float64"),
        ({"state": S[:, :3]}, ValueError, r"state has shape \(2, 3, 4\); expected \(2, 4, 4\)"),
        ({"state": S.astype(np.float16)}, TypeError, "state has dtype float16; expected float32"),
        ({"state": S, "normalize": True}, TypeError, "state is of type ndarray; expected a pair"),
        ({"out_state": S[:1]}, ValueError, r"out_state has shape \(1, 4, 4\); expected \(2, 4, 4\)"),
        ({"out": X}, ValueError, "out shares memory with q"),
        ({"out": S}, ValueError, r"out has shape \(2, 4, 4\); expected \(2, 5, 4\)"),
        ({"num_threads": 0}, ValueError, "num_threads is 0"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ],
)
def test_errors(options, error, message):
    call = {"q": X, "k": X, "v": X, "rule": "linear", **options}
    with pytest.raises(error, match=r"^linear_attention\(\): .*" + message):
        linear_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_out_state_shares_no_memory_but_with_the_state_itself():
    memory = np.zeros((3, 4, 4), np.float32)
    with pytest.raises(ValueError, match="out_state shares memory with state"):
        linear_attention(X, X, X, rule="linear", state=memory[:2], out_state=memory[1:])
    with pytest.raises(ValueError, match="out_state shares memory with erase"):
        linear_attention(X[:, :4], X[:, :4], X[:, :4], rule="delta", erase=memory[1:], out_state=memory[1:])
    with pytest.raises(ValueError, match="out_state shares memory with v"):
        linear_attention(X[:, :4], X[:, :4], memory[:2], rule="linear", out_state=memory[:2])


def test_a_state_is_itself_through_another_view():
    state = np.zeros((2, 4, 4), np.float32)
    linear_attention(X, X, X, rule="linear", state=state, out_state=state[:])
    np.testing.assert_array_equal(state, np.full((2, 4, 4), 5))


def test_batch_dimensions_that_do_not_fit():
    with pytest.raises(ValueError, match=r"batch dimensions \(2,\), \(3,\) and \(2,\); expected ones"):
        linear_attention(X[:, None], np.ones((3, 1, 5, 4), np.float32), X[:, None], rule="linear")
