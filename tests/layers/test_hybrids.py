"""Layers of hybrid models against their definitions in float64, token by token, and the state they carry."""

import copy
import pickle
from itertools import pairwise

import channels
import ml_dtypes
import numpy as np
import pytest
from implementations import each_isa, forced
from layer_oracle import assert_gradients, draw, randomized, rms
from refused import assert_refused, refused

from fastattn.grad import vjp
from fastattn.layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba,
    Mamba2,
    RecurrentState,
    ShortConvolution,
)

WIDTH, LENGTH = 24, 39  # more tokens than a chunk has

LAYERS = {
    "short convolution": (ShortConvolution, (WIDTH,), {}),
    "short convolution, bias": (ShortConvolution, (WIDTH, True), {"kernel_size": 2}),
    "gated delta": (GatedDeltaNet, (WIDTH, 6, 2, 8, 5), {}),
    "gated delta, one key head": (GatedDeltaNet, (WIDTH, 2, 1, 5, 8), {"kernel_size": 2, "eps": 1e-3}),
    "gated delta of qwen3_5": (GatedDeltaNet, (WIDTH, 4, 2, 5, 8), {"names": "qwen3_5"}),
    "gated delta of olmo_hybrid": (
        GatedDeltaNet, (WIDTH, 2, 2, 8, 5), {"names": "olmo_hybrid", "beta_scale": 2}
    ),
    "mamba2": (Mamba2, (WIDTH, 4, 8, 6, 2), {}),
    "mamba2, bias": (
        Mamba2, (WIDTH, 3, 5, 7, 1, True), {"conv_bias": False, "dt_limits": (0.5, 0.9), "kernel_size": 1}
    ),
    "mamba": (Mamba, (WIDTH,), {}),
    "mamba, bias": (Mamba, (WIDTH, 10, 3, 5, True), {"conv_bias": False, "kernel_size": 8}),
    "kimi delta": (KimiDeltaAttention, (WIDTH, 3, 8), {}),
    "kimi delta of bailing": (
        KimiDeltaAttention, (WIDTH, 3, 8), {"names": "bailing_hybrid", "lowest_decay": -5.0}
    ),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)
DTYPES = {"float32": 3e-6, "float64": 1e-13}


def made(name, **more):
    cls, sizes, options = LAYERS[name]
    return cls(*sizes, **options, **more)


def sigmoid(x):
    return 0.5 + 0.5 * np.tanh(x / 2)


def delta(q, k, v, decay, beta, head_dim):
    """Results (batch, length, heads, head_dim_v) of a delta rule; decays are of each feature, or one."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    s, out = np.zeros((len(v), v.shape[2], head_dim, v.shape[3])), []
    for t in range(v.shape[1]):
        s = decay[:, t, ..., None] * s
        missing = v[:, t] - np.einsum("bhdv,bhd->bhv", s, k[:, t])
        s = s + np.einsum("bhd,bhv->bhdv", k[:, t], beta[:, t, :, None] * missing)
        out.append(np.einsum("bhdv,bhd->bhv", s, q[:, t]) * head_dim**-0.5)
    return np.stack(out, 1)


def expected(layer, x):
    """The result of a layer by its definition, from its state dict."""
    p = {name: y.astype(np.float64) for name, y in layer.state_dict().items()}
    x = x.astype(np.float64)
    batch, length, _ = x.shape

    def project(name, x=x):
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def convolved(x, name="conv1d", activation="silu"):
        return channels.conv(x, p[f"{name}.weight"][:, 0], p.get(f"{name}.bias"), activation)[0]

    if isinstance(layer, ShortConvolution):
        b, c, x = np.split(project("in_proj"), 3, axis=-1)
        return project("out_proj", c * convolved(b * x, "conv", None))
    if isinstance(layer, GatedDeltaNet) and layer.names != "qwen3_next":
        heads, groups = layer.num_heads, layer.num_key_heads
        olmo, shape = layer.names == "olmo_hybrid", (batch, length, heads, -1)
        maps = "q_proj k_proj v_proj" if olmo else "in_proj_qkv"
        z, b, a = map(project, ("g_proj b_proj a_proj" if olmo else "in_proj_z in_proj_b in_proj_a").split())
        mixed = convolved(np.concatenate([project(name) for name in maps.split()], axis=-1))
        q, k, v = np.split(mixed, [groups * layer.head_dim, 2 * groups * layer.head_dim], axis=-1)
        q, k, v = (y.reshape(batch, length, n, -1) for y, n in ((q, groups), (k, groups), (v, heads)))
        decay = np.exp(-np.exp(p["A_log"]) * channels.softplus(a + p["dt_bias"]))
        out = delta(q, k, v, decay[..., None], layer.beta_scale * sigmoid(b), layer.head_dim)
        out = rms(out, p["o_norm.weight" if olmo else "norm.weight"], layer.eps)
        out = (out * channels.silu(z.reshape(shape))).reshape(batch, length, -1)
        return project("o_proj" if olmo else "out_proj", out)
    if isinstance(layer, GatedDeltaNet):
        heads, groups, dim, dim_v = layer.num_heads, layer.num_key_heads, layer.head_dim, layer.head_dim_v
        each = heads // groups
        parts = np.split(
            project("in_proj_qkvz").reshape(batch, length, groups, -1),
            np.cumsum([dim, dim, each * dim_v]), axis=-1,
        )  # fmt: skip
        z = parts.pop().reshape(batch, length, heads, dim_v)
        mixed = convolved(np.concatenate([y.reshape(batch, length, -1) for y in parts], axis=-1))
        q, k, v = np.split(mixed, [groups * dim, 2 * groups * dim], axis=-1)
        q, k, v = (y.reshape(batch, length, n, -1) for y, n in ((q, groups), (k, groups), (v, heads)))
        ba = project("in_proj_ba").reshape(batch, length, groups, 2, each)
        b, a = (y.reshape(batch, length, heads) for y in (ba[:, :, :, 0], ba[:, :, :, 1]))
        decay = np.exp(-np.exp(p["A_log"]) * channels.softplus(a + p["dt_bias"]))
        out = rms(delta(q, k, v, decay[..., None], sigmoid(b), dim), p["norm.weight"], layer.eps)
        return project("out_proj", (out * channels.silu(z)).reshape(batch, length, -1))
    if isinstance(layer, Mamba2):
        heads, groups, inner = layer.num_heads, layer.num_groups, layer.num_heads * layer.head_dim
        states = groups * layer.state_size
        z, mixed, dt = np.split(project("in_proj"), [inner, 2 * inner + 2 * states], axis=-1)
        x, keys, queries = np.split(convolved(mixed), [inner, inner + states], axis=-1)
        x, keys, queries = (
            y.reshape(batch, length, n, -1).swapaxes(1, 2)
            for y, n in ((x, heads), (keys, groups), (queries, groups))
        )
        options = {"dt_bias": p["dt_bias"], "dt_softplus": True, "dt_limits": layer.dt_limits}
        out, _ = channels.mamba2(x, dt.swapaxes(1, 2), -np.exp(p["A_log"]), keys, queries, p["D"], **options)
        out = out.swapaxes(1, 2).reshape(batch, length, -1) * channels.silu(z)
        weight = p["norm.weight"].reshape(groups, -1)
        out = rms(out.reshape(batch, length, groups, -1), weight, layer.eps)
        return project("out_proj", out.reshape(batch, length, -1))
    if isinstance(layer, Mamba):
        x, z = np.split(project("in_proj"), 2, axis=-1)
        x = convolved(x)
        rank, states = p["dt_proj.weight"].shape[1], layer.state_size
        low, b, c = np.split(project("x_proj", x), [rank, rank + states], axis=-1)
        out, _ = channels.scan(
            x, project("dt_proj", low), -np.exp(p["A_log"]), b, c, p["D"], z, dt_softplus=True
        )
        return project("out_proj", out)
    shape = (batch, length, layer.num_heads, layer.head_dim)
    mixed = convolved(np.concatenate([project(f"{name}_proj") for name in "qkv"], axis=-1))
    q, k, v = (y.reshape(shape) for y in np.split(mixed, 3, axis=-1))
    bailing = layer.names == "bailing_hybrid"
    if bailing:
        forget = project("forget_gate.f_proj")
    else:
        forget = project("forget_gate.f_b_proj", project("forget_gate.f_a_proj"))
    forget = (forget + p["forget_gate.dt_bias"]).reshape(shape)
    rates = np.exp(p["forget_gate.A_log"]).reshape(-1, 1)
    decay = -rates * channels.softplus(forget)
    decay = np.exp(layer.lowest_decay * sigmoid(rates * forget) if bailing else decay)
    out = delta(q, k, v, decay, sigmoid(project("b_proj")), layer.head_dim)
    out = rms(out, p["o_norm.weight"], layer.eps)
    gate = sigmoid(project("g_proj") if bailing else project("g_b_proj", project("g_a_proj")))
    return project("o_proj", out.reshape(batch, length, -1) * gate)


@every_layer
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_its_definition(name, dtype, implementation):
    layer, x = randomized(made(name, weights_dtype=dtype)), draw(2, LENGTH, WIDTH, dtype=dtype)
    out, right = layer(x), expected(layer, x)
    assert out.dtype == dtype
    np.testing.assert_allclose(out, right, rtol=0, atol=DTYPES[dtype] * abs(right).max())
    np.testing.assert_array_equal(layer(x[0]), layer(x[:1])[0])


@every_layer
@pytest.mark.parametrize("cuts", [range(1, LENGTH), [0, 1, 2, 35, 35]], ids=["token by token", "in parts"])
def test_calls_with_a_state_are_one_call(name, cuts, implementation):
    layer, x, state = randomized(made(name)), draw(2, LENGTH, WIDTH), RecurrentState()
    whole = layer(x)
    parts = np.concatenate([layer(part, state=state) for part in np.split(x, cuts, axis=1)], 1)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=3e-6 * abs(whole).max())
    single = 1 in np.diff([0, *cuts, LENGTH])  # a token alone, of which Mamba adds states in another order
    if implementation != "numpy" and isinstance(
        layer, ShortConvolution if single else (ShortConvolution, Mamba)
    ):
        np.testing.assert_array_equal(parts, whole)
    branch, more = copy.deepcopy(state), draw(2, 3, WIDTH, seed=1)
    first = layer(more, state=state)
    np.testing.assert_array_equal(layer(more, state=branch), first)
    assert not np.array_equal(first, layer(more))
    assert state.nbytes == branch.nbytes
    assert f"(2, {layer.kernel_size - 1}, " in repr(state)


@every_layer
def test_sequences_end_to_end_are_apart(name, implementation):
    """With states: what each does alone, to the bit but for products of other numbers of rows."""
    layer, begins = randomized(made(name)), [0, 3, 3, 30, 31]
    x, more = draw(31, WIDTH), draw(4, WIDTH, seed=1)
    state = RecurrentState()
    out, next_out = layer(x, begins=begins, state=state), layer(more, begins=range(5), state=state)
    spoiled = x.copy()
    spoiled[3:30] = np.nan
    np.testing.assert_array_equal(layer(spoiled, begins=begins)[[0, 1, 2, 30]], out[[0, 1, 2, 30]])
    for s, (i, j) in enumerate(pairwise(begins)):
        own = RecurrentState()
        alone = layer(x[None, i:j], state=own)[0], layer(more[None, s : s + 1], state=own)[0]
        for got, right in zip((out[i:j], next_out[s : s + 1]), alone, strict=True):
            np.testing.assert_allclose(got, right, rtol=0, atol=3e-6 * abs(out).max())


@every_layer
def test_hidden_tokens_are_not_there(name, implementation):
    """To the left, to the right, and in between; a state goes on after those that are."""
    layer, x, hidden = randomized(made(name)), draw(4, 12, WIDTH), np.zeros((4, 12), bool)
    hidden[0, :5] = hidden[1, 9:] = hidden[2, 3:6] = hidden[3] = True
    tokens, begins = x[~hidden], np.cumsum([0, *(~hidden).sum(1)])
    expected = np.zeros_like(x)
    states = RecurrentState(), RecurrentState()
    expected[~hidden] = layer(tokens, begins=begins, state=states[0])
    x[hidden] = np.nan
    np.testing.assert_array_equal(layer(x, key_padding_mask=hidden, state=states[1]), expected)
    more = draw(4, 1, WIDTH, seed=1)
    np.testing.assert_array_equal(*(layer(more, state=state) for state in states))
    dout = draw(4, 12, WIDTH, seed=2)
    dx, found = vjp(layer, x, key_padding_mask=hidden)[1](dout)
    dtokens, right = vjp(layer, tokens, begins=begins)[1](dout[~hidden])
    np.testing.assert_array_equal(dx[~hidden], dtokens)
    assert not dx[hidden].any()
    for parameter, gradient in right.items():
        np.testing.assert_array_equal(found[parameter], gradient)
    alone = layer(x[0], key_padding_mask=hidden[0])
    np.testing.assert_allclose(alone, expected[0], rtol=0, atol=3e-6 * abs(expected).max())
    none = layer(x[3], key_padding_mask=hidden[3])
    np.testing.assert_array_equal(none, np.zeros_like(none))


@every_layer
def test_gradients_of_sequences_end_to_end_are_slopes(name, implementation):
    layer = randomized(made(name, weights_dtype="float64"))
    assert_gradients(layer, draw(7, WIDTH, dtype=np.float64), step=1e-6, begins=[0, 2, 2, 7])


@every_layer
def test_an_error_leaves_the_state_as_it_was(name, monkeypatch):
    layer, x, states = made(name, rng=0), draw(2, 9, WIDTH), (RecurrentState(), RecurrentState())
    mixed = type(layer)._mixed

    def interrupted(*args):
        mixed(*args)
        raise KeyboardInterrupt

    for batch in (1, 2):  # the first one leaves an empty state empty
        monkeypatch.setattr(type(layer), "_mixed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            layer(x[:batch], state=states[0])
        monkeypatch.undo()
        if batch == 1:
            for state in states:
                layer(x, state=state)
    for wrong in (x[:1], x[..., :5], x.astype(np.float16)):
        with pytest.raises(ValueError, match=r"\(\): (x has shape|state is <RecurrentState: \(2, )"):
            layer(wrong, state=states[0])
    np.testing.assert_array_equal(*(layer(x, state=state) for state in states))


@every_layer
def test_gradients_are_slopes(name, implementation):
    layer = randomized(made(name, weights_dtype="float64"))
    assert_gradients(layer, draw(2, 7, WIDTH, dtype=np.float64), step=1e-6)  # unit vectors turn quickly


@every_layer
def test_checkpoints_change_no_bit(name):
    layer, x, dout = made(name, rng=0), draw(2, 9, WIDTH), draw(2, 9, WIDTH, seed=1)
    found = [vjp(layer, x, checkpoint=checkpoint)[1](dout) for checkpoint in (False, True)]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for parameter, gradient in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][parameter], gradient)


@every_layer
@each_isa
def test_batch_neighbours_change_no_bit(name, isa):
    layer, x = randomized(made(name)), draw(5, LENGTH, WIDTH)
    with forced(isa):
        out = layer(x)
        for i in range(5):
            np.testing.assert_array_equal(layer(x[i]), out[i])


@every_layer
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_later_tokens_alone(name, odd, implementation):
    layer, x = randomized(made(name)), draw(2, LENGTH, WIDTH)
    expected = layer(x)
    x[0, 20, 3] = odd
    out, reached = layer(x), np.zeros((2, LENGTH), bool)
    reached[0, 20 : 20 + layer.kernel_size if isinstance(layer, ShortConvolution) else None] = True
    assert not np.isfinite(out[reached]).any()
    bound = 3e-6 * abs(expected).max() if implementation == "numpy" else 0  # whose sums have another order
    np.testing.assert_allclose(out[~reached], expected[~reached], rtol=0, atol=bound)


@every_layer
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_nothing_gives_nothing(name, shape, implementation):
    layer, x, state = made(name, rng=0), np.zeros((*shape, WIDTH), np.float32), RecurrentState()
    out, pullback = vjp(layer, x)
    dx, grads = pullback(out)
    assert layer(x, state=state).shape == layer(x, state=state).shape == out.shape == dx.shape == x.shape
    assert not any(gradient.any() for gradient in grads.values())


@every_layer
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_narrow_inputs(name, dtype):
    layer, x = made(name, rng=0), draw(2, 9, WIDTH).astype(dtype)
    right, state = layer(x.astype(np.float32)), RecurrentState()
    out, pullback = vjp(layer, x)
    (dx, grads), bound = pullback(out), 12 * float(ml_dtypes.finfo(dtype).eps) * abs(right).max()
    assert out.dtype == dx.dtype == dtype
    assert {gradient.dtype for gradient in grads.values()} == {np.dtype(np.float32)}
    for found in (out, np.concatenate([layer(x[:, :4], state=state), layer(x[:, 4:], state=state)], 1)):
        np.testing.assert_allclose(found.astype(np.float32), right, rtol=0, atol=bound)


@every_layer
@pytest.mark.parametrize(("weights_dtype", "bound"), [("bfloat16", 0.05), ("int8", 0.05), ("int4", 0.8)])
def test_narrow_weights(name, weights_dtype, bound):
    layer, x = made(name, rng=0), draw(2, 9, WIDTH)
    right = layer(x)
    layer.load_state_dict(layer.state_dict(), weights_dtype=weights_dtype)
    assert 0 < abs(layer(x) - right).max() < bound * abs(right).max()
    assert layer.in_map.dtype == layer.out_map.dtype == weights_dtype


@every_layer
def test_parameters_come_and_go(name):
    layer, x = made(name, rng=0), draw(2, 9, WIDTH)
    state, other = layer.state_dict(), made(name)
    assert {key: p.shape for key, p in layer.parameters().items()} == {k: y.shape for k, y in state.items()}
    assert list(layer.parameters()) == list(state)
    other.load_state_dict({f"layers.0.{key}": y for key, y in state.items()}, prefix="layers.0.")
    for key, y in other.state_dict().items():
        np.testing.assert_array_equal(y, state[key])
    for again in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(again(x), layer(x))
    with pytest.raises(ValueError, match=f"{type(layer).__name__} has no parameters yet"):
        made(name)(x)


def test_steps_are_those_of_mamba():
    for layer in (Mamba(WIDTH, 500, rng=0), Mamba2(WIDTH, 500, 1, rng=0)):
        steps = channels.softplus(layer.dt_bias.astype(np.float64))
        assert 0.001 < steps.min() < 0.0015
        assert 0.08 < steps.max() < 0.1
        np.testing.assert_allclose(np.exp(layer.A_log).reshape(-1)[:3], [1, 2, 3], rtol=1e-6)


REFUSED = r"""
GatedDeltaNet(24, 5, 2, 8, 8) -> ValueError: num_heads is 5; expected a multiple of num_k
GatedDeltaNet(24, 4, 0, 8, 8) -> ValueError: num_key_heads is 0; expected at least 1
GatedDeltaNet(24, 4, 2, 8, 8, kernel_size=9) -> ValueError: kernel_size is 9; expected 1 to
GatedDeltaNet(24, 4, 2, 8, 8, eps=-1) -> ValueError: eps is -1; expected 0 or more
GatedDeltaNet(24, 4, 2, 8, None) -> TypeError: head_dim_v is None; expected an integer
GatedDeltaNet(24, 4, 2, 8, hidden_size=3) -> TypeError: hidden_size is not.*d_model
Mamba2(24, 5, 8, num_groups=2) -> ValueError: num_heads is 5; expected a multiple of num_g
Mamba2(24, 4, 8, dt_limits=(1, 0)) -> ValueError: dt_limits is \(1, 0\); expected a pair
Mamba2(24, 4, 8, bias=1) -> TypeError: bias is 1; expected True or False
Mamba(24, 0) -> ValueError: d_inner is 0; expected at least 1
Mamba(24, state_size=None) -> TypeError: state_size is None; expected an integer
Mamba(24, activations='int8') -> ValueError: activations is 'int8'
GatedDeltaNet(24, 4, 2, 8, 8, names='qwen') -> ValueError: names is 'qwen'; expected one
GatedDeltaNet(24, 4, 2, 8, 8, beta_scale='2') -> TypeError: beta_scale is '2'; expected
KimiDeltaAttention(24, 4, 8, names='kimi') -> ValueError: names is 'kimi'; expected
KimiDeltaAttention(24, 4, 8, lowest_decay=5) -> ValueError: lowest_decay is 5.0; expected
KimiDeltaAttention(24, 4, '8') -> TypeError: head_dim is '8'; expected an integer
ShortConvolution(24, None) -> TypeError: bias is None; expected True or False
"""


@refused(REFUSED)
def test_what_is_refused_when_built(code, error):
    kind, message = error.split(": ", 1)
    name = code.partition("(")[0]
    assert_refused(code, rf"{kind}: ^{name}\(\): {message}")


CALLS = r"""
layer(x[..., :5]) -> ValueError: x has shape \(2, 9, 5\); expected \(..., 24\)
layer(x[0, 0]) -> ValueError: x has shape \(24,\); expected \(batch, length, 24
layer(x.astype(float)) -> TypeError: x has dtype float64; expected float32
layer(x, state={}) -> TypeError: state is of type dict; expected a RecurrentState
layer(x, state=other) -> ValueError: state is <RecurrentState: \(2, 2, 5\) in float32>;
vjp(layer, x, state=other) -> ValueError: state is given; expected none: tokens of earlier
layer(x, begins=[0, 9])
    -> ValueError: x has shape \(2, 9, 24\); expected \(tokens, 24\), as begins is given
vjp(layer, x, begins=[0, 9]) -> ValueError: x has shape \(2, 9, 24\)
layer(x, key_padding_mask=hidden[:, :8]) -> ValueError: key_padding_mask has shape \(2, 8\); expected \(2, 9\)
vjp(layer, x, key_padding_mask=hidden[:, :8]) -> ValueError: key_padding_mask has shape \(2, 8\)
layer(x, key_padding_mask=hidden, begins=[0, 9]) -> ValueError: key_padding_mask and begins are
layer(x, attention_mask=hidden) -> TypeError: attention_mask is not an argument; expected key
layer(x, key_padding_mask=hidden * x.dtype.type(1))
    -> TypeError: key_padding_mask has dtype float32; expected bool
layer(x[0], begins=[0, 8]) -> ValueError: begins goes from 0 to 8; expected 0 to 9
"""


@every_layer
@refused(CALLS)
def test_what_is_refused_in_a_call(name, code, error):
    layer, x, other = made(name, rng=0), draw(2, 9, WIDTH), RecurrentState()
    ShortConvolution(5, rng=0)(x[..., :5], state=other)
    error = error.replace(": ", rf": ^{LAYERS[name][0].__name__}\(\): ", 1)
    assert_refused(code, error, layer=layer, x=x, other=other, hidden=np.zeros((2, 9), bool))
