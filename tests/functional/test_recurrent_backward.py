"""Linear attention and its gradients: the recurrence in float64, on each implementation."""

import numpy as np
import pytest
from differences import assert_gradient
from precisions import BF16, each_dtype, lane
from pullbacks import gradients
from recurrence import RULES, Recurrence, close

from fastattn.functional import feature_maps, linear_attention

# Around the ends of steps (4), of chunks (16, 32), of the parts that are solved (8), and of passes (12).
DELTA_RULES = RULES[3:]
# Each rule, and the delta rules with keys to erase by.
CASES = [*((rule, False) for rule in RULES), *((rule, True) for rule in DELTA_RULES)]
each_case = pytest.mark.parametrize(
    ("rule", "erase"), CASES, ids=[rule + " erase" * erase for rule, erase in CASES]
)
LENGTHS = [0, 1, 2, 4, 5, 7, 12, 13, 15, 16, 17, 31, 32, 33, 64, 65, 150]
DIMS = [(1, 1), (3, 5), (16, 32), (33, 31), (64, 64), (65, 97), (130, 40), (300, 17)]
HEADS = [(2, 2, 2), (4, 2, 2), (2, 2, 6), (6, 1, 3), (1, 4, 2), (8, 2, 4)]


class Problem:
    """The inputs of a call, and the gradients of its results."""

    def __init__(self, rule, n=70, dims=(24, 40), heads=(2, 2, 2), dtype=np.float32, normalize=False,
                 causal=True, strong=False, states=True, len_q=None, seed=0,
                 erase=False):  # fmt: skip
        rng, (head_dim, head_dim_v), (heads_q, heads_k, heads_v) = np.random.default_rng(seed), dims, heads
        h, len_q = max(heads_k, heads_v), n if len_q is None else len_q
        lane = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        q, k = rng.standard_normal((heads_q, len_q, head_dim)), rng.standard_normal((heads_k, n, head_dim))
        v = rng.standard_normal((heads_v, n, head_dim_v))
        dout = rng.standard_normal((max(heads_q, h), len_q, head_dim_v))
        if normalize:
            q, k = np.exp(q / 2), np.exp(k / 2)
        if "delta" in rule:
            k /= np.linalg.norm(k, axis=-1, keepdims=True)
        self.arrays = [x.astype(dtype) for x in (dout, q, k, v)]
        self.options = {"rule": rule, "scale": 0.3, "normalize": normalize, "causal": causal}
        if rule not in ("linear", "delta"):
            shape = (h, n, head_dim) if rule in ("gated", "kimi_delta") else (h, n)
            decays = (
                rng.choice([-np.inf, -20.0, -1e-3, 0.0, -3.0], shape)
                if strong
                else -rng.exponential(0.3, shape)
            )
            self.options["log_decay"] = decays.astype(lane)
        if "delta" in rule:
            self.options["beta"] = rng.uniform(0, 1, (h, n)).astype(lane)
        if erase:
            self.options["erase"] = (k * rng.uniform(0, 1, k.shape)).astype(dtype)
        self.state = self.dstate = None
        if states:
            state, dstate = (rng.standard_normal((h, head_dim, head_dim_v)).astype(lane) for _ in range(2))
            z, dz = (
                np.exp(rng.standard_normal((h, head_dim))).astype(lane),
                rng.standard_normal((h, head_dim)).astype(lane),
            )
            self.state, self.dstate = ((state, z), (dstate, dz)) if normalize else (state, dstate)
        given = [name for name in ("log_decay", "beta", "erase") if name in self.options]
        self.need = ("dk", "dq", "dv", "dstate", "dscale", *(f"d{name}" for name in given))

    def results(self):
        """The result and the last state, or the pair of states."""
        options = self.options | {"state": self.state, "return_state": True}
        return linear_attention(*self.arrays[1:], **options)

    def gradients(self, **more):
        """Compute the gradients by name, as the call returns them."""
        states = {"state": self.state, "dmore": self.dstate}
        found = gradients(linear_attention, *self.arrays, need=self.need, **self.options | states | more)
        return dict(zip(self.need, found, strict=True))

    def expected(self):
        """Compute results and gradients from the recurrence, where a pair of states is two arrays."""
        dout, *arrays = self.arrays
        pair = self.options["normalize"] or self.state is None
        state = self.state if pair else (self.state, 0 * self.state[..., 0])
        call = Recurrence(*arrays, state=state, **self.options)
        dstates = () if self.dstate is None else self.dstate if pair else (self.dstate,)
        found = call.gradients(dout, *dstates)
        if "log_decay" in self.options and self.options["log_decay"].ndim == 2:
            found["dlog_decay"] = found["dlog_decay"].sum(-1)
        scale, small = self.options["scale"], 1e-5
        outs = [
            Recurrence(*arrays, state=state, **self.options | {"scale": scale + d}).out
            for d in (small, -small)
        ]
        found["dscale"] = np.vdot(np.asarray(dout, float), outs[0] - outs[1]) / (2 * small)
        if self.options["normalize"]:
            found["dstate"] = (found["dstate"], found["dnorm"])
        after = (call.s[-1], call.z[-1]) if self.options["normalize"] else call.s[-1]
        return (call.out, after), {name: found[name] for name in self.need}


def check(problem, factor=64):
    found, (results, expected) = problem.gradients(), problem.expected()
    dout, q, k, v = problem.arrays
    out, after = problem.results()
    assert (out.dtype, np.asarray(after[0]).dtype) == (q.dtype, lane(q.dtype))
    close(out, results[0], factor, share=16)
    close(after, results[1], factor, share=16)
    floor = 2.0**-21 * float(np.abs(dout).max(initial=0))  # of what cancels
    for name, x in {"dq": q, "dk": k, "dv": v}.items():
        assert found[name].dtype == x.dtype
    for name, x in expected.items():
        close(found[name], x, factor, floor if dout.dtype != np.float64 else 2.0**-29 * floor)
    size = np.abs(q.astype(float)).sum()
    loose = {np.dtype(np.float64): 1e-7}.get(q.dtype, 1e-4)  # of differences, and of sums
    bound = loose * (size * np.abs(expected["dq"]).max(initial=0) + abs(expected["dscale"])) + floor * size
    assert abs(found["dscale"] - expected["dscale"]) <= bound


@each_case
@pytest.mark.parametrize("normalize", [False, True])
def test_finite_differences(implementation, rule, erase, normalize):
    normalize = normalize and "delta" not in rule
    problem = Problem(rule, 5, (3, 2), (4, 2, 2), np.float64, normalize, erase=erase)
    dout, *arrays = problem.arrays
    inputs, options = dict(zip("qkv", arrays, strict=True)), {}
    for name, x in problem.options.items():
        (inputs if isinstance(x, np.ndarray) else options)[name] = x
    state, dstate = (x if normalize else (x,) for x in (problem.state, problem.dstate))
    inputs |= dict(zip(("state", "norm"), state, strict=False))
    cotangents = np.concatenate([x.ravel() for x in (dout, *dstate)])

    def both(**moved):
        given = inputs | moved
        if normalize:
            given["state"] = given["state"], given.pop("norm")
        out, after = linear_attention(**given, return_state=True, **options)
        return np.concatenate([x.ravel() for x in (out, *(after if normalize else (after,)))])

    found = problem.gradients()
    if normalize:
        found["dstate"], found["dnorm"] = found["dstate"]
    for name, x in inputs.items():
        assert_gradient(found[f"d{name}"], lambda y, name=name: both(**{name: y}), x, cotangents, 1e-6)


@each_case
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(implementation, rule, erase, n):
    check(Problem(rule, n, erase=erase))


@each_case
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(implementation, rule, erase, dims):
    check(Problem(rule, 70, dims, erase=erase), factor=128)


@each_case
@each_dtype
def test_dtypes(implementation, rule, erase, dtype):
    check(Problem(rule, 90, (36, 44), dtype=dtype, erase=erase), factor=128)


@pytest.mark.parametrize("rule", ["decay", "gated", "gated_delta", "kimi_delta"])
def test_strong_decays_and_resets(implementation, rule):
    problem = Problem(rule, 150, (20, 20), strong=True)
    check(problem)
    reset = problem.options["log_decay"] == -np.inf
    assert (problem.gradients()["dlog_decay"][reset] == 0).mean() > 0.99  # and the rest is rounding


@each_case
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_grouped_heads(implementation, rule, erase, heads):
    for n in (2, 70):
        check(Problem(rule, n, (16, 24), heads, erase=erase, strong=erase and rule != "delta"))


def test_16_bit_keys_to_erase_by(implementation):
    """They have the type of the keys, whose queries are wider; one batch item of them serves all."""
    problem = Problem("kimi_delta", 70, (16, 24), (4, 2, 2), states=False, erase=True)
    dout, q, k, v = problem.arrays
    problem.arrays = [dout, q, k.astype(np.float16), v.astype(np.float16)]
    problem.options["erase"] = erase = problem.options["erase"].astype(np.float16)
    check(problem)
    found = problem.gradients()["derase"]
    assert found.dtype == np.float16
    problem.arrays = [np.stack([x, x]) for x in problem.arrays]
    twice = problem.gradients(erase=erase)["derase"]
    close(twice, 2 * found.astype(float))
    assert problem.gradients(erase=erase[None])["derase"].shape == (1, *erase.shape)


@pytest.mark.parametrize("rule", DELTA_RULES)
def test_the_two_uses_of_a_key(implementation, rule):
    """Where keys to erase by are the keys, both gradients together are that of the keys."""
    problem = Problem(rule, 70, (20, 30), (4, 2, 2), np.float64)
    whole, k = problem.gradients(), problem.arrays[2]
    problem.need = (*problem.need, "derase")
    apart = problem.gradients(erase=k)
    close(apart["dk"] + apart["derase"], whole["dk"])
    for name in set(whole) - {"dk", "dscale"}:
        close(apart[name], whole[name])
    problem.need = ("dv",)
    dv = problem.gradients(erase=k)["dv"]
    close(dv, whole["dv"])
    if implementation != "numpy":  # whose products round by where their arrays lie
        np.testing.assert_array_equal(dv, whole["dv"])


@pytest.mark.parametrize("rule", ["linear", "decay", "gated"])
@pytest.mark.parametrize("n", [0, 1, 17, 64, 100])
def test_normalized(implementation, rule, n):
    check(Problem(rule, n, (20, 50), (4, 2, 2), normalize=True), factor=128)
    check(Problem(rule, n, (20, 50), normalize=True, states=False), factor=128)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lengths", [(0, 5), (7, 0), (1, 1), (70, 130), (64, 3)], ids=str)
def test_bidirectional(implementation, lengths, normalize):
    len_q, n = lengths
    check(Problem("linear", n, (20, 33), (4, 2, 2), normalize=normalize, causal=False, len_q=len_q))


@each_case
def test_several_segments(implementation, rule, erase):
    """States of this size are kept every four chunks."""
    check(Problem(rule, 300, (130, 200), (1, 1, 1), erase=erase), factor=256)


@pytest.mark.parametrize("rule", RULES)
def test_in_pieces(implementation, rule):
    """The gradient of a state is that of the call that went on from it."""
    problem = Problem(rule, 100, (20, 30), dtype=np.float64)
    whole, dout, *arrays = problem.gradients(), *problem.arrays
    tokens = [slice(0, 37), slice(37, 38), slice(38, 100)]

    def piece(t):
        cut = {name: x[:, t] for name, x in problem.options.items() if name in ("log_decay", "beta")}
        return [x[:, t] for x in arrays], problem.options | cut

    states = [problem.state]
    for t in tokens:
        inputs, options = piece(t)
        states.append(linear_attention(*inputs, state=states[-1], return_state=True, **options)[1])
    dstate, scales = problem.dstate, 0.0
    for t, state in zip(reversed(tokens), reversed(states[:-1]), strict=True):
        inputs, options = piece(t)
        found = gradients(
            linear_attention, dout[:, t], *inputs, state=state, dmore=dstate, need=problem.need, **options
        )
        for name, x in zip(problem.need, found, strict=True):
            if name == "dstate":
                dstate = x
            elif name == "dscale":
                scales += x
            else:
                close(x, whole[name][:, t])
    close(dstate, whole["dstate"])
    np.testing.assert_allclose(scales, whole["dscale"], rtol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_bits_depend_on_neither_threads_nor_neighbours(implementation, rule):
    problems = [Problem(rule, 100, (32, 80), (4, 2, 2), seed=seed) for seed in range(3)]
    whole = Problem(rule, 100, (32, 80), (4, 2, 2))
    whole.arrays = [np.stack(x) for x in zip(*(p.arrays for p in problems), strict=True)]
    whole.state, whole.dstate = (
        np.stack([getattr(p, name) for p in problems]) for name in ("state", "dstate")
    )
    for name in ("log_decay", "beta"):
        if name in whole.options:
            whole.options[name] = np.stack([p.options[name] for p in problems])
    together, again = whole.gradients(num_threads=1), whole.gradients(num_threads=5)
    for b, problem in enumerate(problems):
        alone = problem.gradients(num_threads=3)
        for name in ("dq", "dk", "dv", "dstate"):
            np.testing.assert_array_equal(together[name], again[name])
            if implementation == "numpy":  # whose BLAS chooses by shape
                close(alone[name], together[name][b].astype(float))
            else:
                np.testing.assert_array_equal(alone[name], together[name][b])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["dout", "q", "k", "v"])
def test_what_is_not_finite_reaches_only_what_depends_on_it(implementation, rule, name):
    """A row of dout or q: no later key or value. A key or value: no earlier query. And no other head."""
    for at in (0, 3, 37, 90):
        clean, spoiled = (Problem(rule, 100, (20, 24), states=False) for _ in range(2))
        spoiled.arrays[["dout", "q", "k", "v"].index(name)][0, at, 5] = np.nan
        a, b = clean.gradients(), spoiled.gradients()
        safe = {"dq": [slice(0, 0)], "dk": [slice(0, 0)], "dv": [slice(0, 0)]}
        if name in ("dout", "q"):
            safe["dq"] = [slice(0, at), slice(at + 1, None)] if name == "dout" else [slice(0, None)]
            safe["dk"] = safe["dv"] = [slice(at + 1, None)]
        else:
            safe["dq"] = [slice(0, at)]
            if name == "v" and "delta" not in rule:
                safe["dk"], safe["dv"] = [slice(0, at), slice(at + 1, None)], [slice(0, None)]
            elif "delta" not in rule:
                safe["dk"], safe["dv"] = [slice(0, None)], [slice(0, at), slice(at + 1, None)]
        for gradient, parts in safe.items():
            close(b[gradient][1], a[gradient][1].astype(float))
            for part in parts:
                close(b[gradient][0, part], a[gradient][0, part].astype(float))
        touched = {"dout": "dq", "q": "dk", "k": "dv" if "delta" not in rule else "dk", "v": "dq"}[name]
        assert np.isnan(b[touched][0]).any()
        if "dlog_decay" in b and "delta" not in rule:
            assert np.isfinite(b["dlog_decay"][1]).all()
            assert np.isfinite(b["dlog_decay"][0, :at]).all() or name in ("dout", "q")


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 70), (3, 1, 70), (1, 2, 1)], ids=str)
def test_what_is_broadcast_is_added_up(implementation, shape):
    rng = np.random.default_rng(0)
    problem = Problem("gated_delta", 70, (16, 24), (4, 2, 2), np.float64, states=False)
    dout, q, k, v = problem.arrays
    q, dout = (np.stack([x, 2 * x, -x]) for x in (q, dout))
    decay = -rng.exponential(0.3, shape)
    full = np.broadcast_to(decay[:, None] if len(shape) == 1 else decay, (3, 2, 70))
    beta = rng.uniform(0, 1, (1, 70))
    options = {"rule": "gated_delta", "scale": 0.3}
    need = ("dq", "dk", "dv", "dlog_decay", "dbeta")
    found = gradients(linear_attention, dout, q, k, v[None], log_decay=decay, beta=beta, need=need, **options)
    parts = []
    for b in range(3):
        call = Recurrence(q[b], k, v, log_decay=full[b], beta=np.broadcast_to(beta, (2, 70)), **options)
        parts.append(call.gradients(dout[b]))
    np.testing.assert_allclose(found[0], np.stack([p["dq"] for p in parts]), atol=1e-10)
    np.testing.assert_allclose(found[1], sum(p["dk"] for p in parts), atol=1e-10)
    np.testing.assert_allclose(found[2], sum(p["dv"] for p in parts)[None], atol=1e-10)
    expected = np.stack([p["dlog_decay"].sum(-1) for p in parts])
    whole = (1,) * (3 - len(shape)) + shape if len(shape) > 1 else (1, 2, 1)
    axes = tuple(i for i in range(3) if whole[i] == 1)
    np.testing.assert_allclose(found[3], expected.sum(axes, keepdims=True).reshape(shape), atol=1e-10)
    np.testing.assert_allclose(found[4], sum(p["dbeta"] for p in parts).sum(0)[None], atol=1e-10)


def test_mixed_and_foreign_arrays(implementation):
    problem = Problem("kimi_delta", 70, (16, 24), (4, 2, 2), states=False)
    expected = problem.gradients()
    dout, q, k, v = problem.arrays
    problem.arrays = [
        dout.astype(">f4"),
        np.repeat(q, 2, axis=-1)[..., ::2],
        np.asfortranarray(k),
        v[:, ::-1][:, ::-1],
    ]
    for name, x in problem.gradients().items():
        np.testing.assert_array_equal(x, expected[name])
    problem.arrays = [dout, q, k.astype(np.float16), v.astype(np.float16)]
    found = problem.gradients()
    assert [found[name].dtype for name in ("dq", "dk", "dv")] == [np.float32, np.float16, np.float16]
    check(problem)


@pytest.mark.parametrize("batch", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_no_sequences(implementation, rule, batch):
    problem = Problem(rule, 40, (5, 7), (4, 2, 2), states=False)
    problem.arrays = [np.empty((*batch, *x.shape), x.dtype) for x in problem.arrays]
    for name in ("log_decay", "beta"):
        if name in problem.options:
            problem.options[name] = np.empty((*batch, *problem.options[name].shape), np.float32)
    found = problem.gradients()
    for name, x in zip(("dq", "dk", "dv"), problem.arrays[1:], strict=True):
        assert found[name].shape == x.shape
    assert found["dstate"].shape == (*batch, 2, 5, 7)
    assert found["dscale"] == 0


@each_dtype
@pytest.mark.parametrize("name", ["elu", "unit", "taylor"])
def test_feature_maps(name, dtype):
    phi, rng = getattr(feature_maps, name), np.random.default_rng(4)
    x = rng.standard_normal((3, 5, 4)).astype(dtype)
    dout = rng.standard_normal(phi(x).shape).astype(dtype)
    (dx,) = gradients(phi, dout, x)
    assert dx.dtype == dtype
    wide = x.astype(np.float64), dout.astype(np.float64)
    if dtype == np.float64:
        assert_gradient(dx, phi, *wide)
    tolerance = {np.float64: 1e-12, np.float32: 4e-6}.get(dtype.type, 4e-2 if dtype == BF16 else 8e-3)
    np.testing.assert_allclose(dx.astype(float), gradients(phi, *wide[::-1])[0], atol=tolerance)


X = np.ones((2, 5, 4), np.float32)
GATE = np.full((2, 5), -1, np.float32)
S = np.zeros((2, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dout": X[:, :4]}, ValueError, r"dout has shape \(2, 4, 4\); expected \(2, 5, 4\)"),
        ({"dout": X.astype(np.float64)}, TypeError, "dout has dtype float64; expected float32"),
        ({"dout": [1, 2]}, TypeError, "dout has dtype int64"),
        ({"need": "dq"}, TypeError, "need is 'dq'; expected a tuple of names"),
        ({"need": ("dq", "dx")}, ValueError, "need has 'dx'; expected dq, dk, dv"),
        ({"need": ("dq", "dq")}, ValueError, "need is .*; expected each name once"),
        ({"need": ("dlog_decay",)}, ValueError, "need has dlog_decay, but log_decay is not given"),
        ({"rule": "delta", "need": ("dbeta",)}, ValueError, "need has dbeta, but beta is not given"),
        ({"rule": "delta", "need": ("derase",)}, ValueError, "need has derase, but erase is not given"),
        ({"dmore": S[:1]}, ValueError, r"dmore has shape \(1, 4, 4\); expected \(2, 4, 4\)"),
        ({"dmore": S.astype(float)}, TypeError, "dmore has dtype float64; expected float32"),
        ({"normalize": True, "dmore": S}, TypeError, "dmore is of type ndarray; expected a pair"),
    ],
)
def test_errors(options, error, message):
    call = {"dout": X, "q": X, "k": X, "v": X, "rule": "linear", **options}
    with pytest.raises(error, match=r"^pullback of linear_attention\(\): .*" + message):
        gradients(linear_attention, **call)
