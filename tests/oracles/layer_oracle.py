"""Layers with random weights, their gradients by differences, and attention layers by their definition."""

import naive
import numpy as np
import pytest

from fastattn.grad import vjp
from fastattn.layers import KVCache, MultiHeadAttention, Rope
from fastattn.positions import rope_frequencies

BATCH, LENGTH, WIDTH, HEADS = 3, 11, 64, 4
SLOPES = 2.0 ** -np.arange(1, HEADS + 1)

FEATURES = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "head_dim": 24},
    "rope": {"rope": Rope(rope_frequencies(16))},
    "interleaved": {"rope": Rope(rope_frequencies(16), interleaved=True), "num_kv_heads": 2},
    "partial rope": {"rope": Rope(rope_frequencies(8))},
    "qk_norm": {"qk_norm": True},
    "gate": {"output_gate": True},
    "sinks": {"sinks": True},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "bias_kv": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False, "output_gate": True},
    "all": {
        "num_kv_heads": 2, "head_dim": 24, "rope": Rope(rope_frequencies(24)), "qk_norm": True, "sinks": True,
        "output_gate": True, "window": (4, 2), "softcap": 5.0, "alibi_slopes": SLOPES, "add_bias_kv": True,
        "add_zero_attn": True,
    },
}  # fmt: skip
every_feature = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def randomized(layer, seed=0):
    """`layer` with random parameters, also where they begin as zeros or ones."""
    rng = np.random.default_rng(seed)
    layer.load_state_dict(
        {name: rng.standard_normal(p.shape) / p.shape[-1] ** 0.5 for name, p in layer.parameters().items()}
    )
    return layer


def attention_layer(options, dtype="float32"):
    return randomized(MultiHeadAttention(WIDTH, HEADS, weights_dtype=dtype, **options))


def output(result):
    """The result of any layer; of `MultiHeadAttention`, which returns a pair, the first."""
    return result[0] if isinstance(result, tuple) else result


MASK = np.zeros((LENGTH, LENGTH), np.bool_)
X = draw(BATCH, LENGTH, WIDTH)

STACKS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "rms_norm, swiglu": {
        "norm": "rms_norm", "activation": "swiglu", "norm_first": True, "bias": False,
        "attention": {"num_kv_heads": 2, "rope": Rope(rope_frequencies(16)), "qk_norm": True},
    },
}  # fmt: skip
every_stack = pytest.mark.parametrize("options", STACKS.values(), ids=STACKS)


def dense(layer, query, key, *, causal=False, hidden=None):
    """(out, weights) of `layer` by its definition, in float64."""
    state = {name: x.astype(np.float64) for name, x in layer.state_dict().items()}
    heads, heads_kv = layer.num_heads, layer.num_kv_heads or layer.num_heads
    head_dim = layer.head_dim or layer.embed_dim // heads
    ends = [heads * head_dim, (heads + heads_kv) * head_dim]
    query, key = query.astype(np.float64), key.astype(np.float64)
    weights = np.split(state["in_proj_weight"], ends)
    biases = np.split(state["in_proj_bias"], ends) if layer.bias else [0, 0, 0]
    inputs = zip((query, key, key), weights, biases, strict=True)
    q, k, v = (split(x @ weight.T + bias, head_dim) for x, weight, bias in inputs)
    if layer.qk_norm:
        q, k = (rms(x, state[f"{name}_norm.weight"], layer.qk_norm_eps) for x, name in ((q, "q"), (k, "k")))
    if layer.rope is not None:
        q, k = (rotated(x, layer.rope) for x in (q, k))
    extra = [(state["bias_k"], state["bias_v"])] if layer.add_bias_kv else []
    if layer.add_zero_attn:
        extra.append((np.zeros((1, 1, heads_kv * head_dim)),) * 2)
    attend = np.ones((query.shape[1], key.shape[1]), np.bool_) if hidden is None else ~hidden
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    if causal:
        attend = attend & (distance >= 0)
    if layer.window is not None:
        attend = attend & (distance <= layer.window[0]) & (-distance <= layer.window[1])
    bias = np.zeros((heads, *distance.shape))
    if layer.alibi_slopes is not None:
        bias = -layer.alibi_slopes[:, None, None] * abs(distance)
    for extra_k, extra_v in extra:
        k, v = (
            np.concatenate([x, np.repeat(split(y, head_dim), len(x), 0)], axis=2)
            for x, y in ((k, extra_k), (v, extra_v))
        )
        attend = np.pad(attend, [(0, 0)] * (attend.ndim - 1) + [(0, 1)], constant_values=True)
        bias = np.pad(bias, [(0, 0), (0, 0), (0, 1)])
    out, _, probs, _ = naive.attention(
        q, k, v, mask=attend, bias=bias, scale=layer.scale, softcap=layer.softcap, sinks=state.get("sinks")
    )
    out = out.swapaxes(1, 2).reshape(*query.shape[:2], -1)
    if layer.output_gate:
        gate = query @ state["gate_proj.weight"].T + state.get("gate_proj.bias", 0)
        out = out / (1 + np.exp(-gate))
    return out @ state["out_proj.weight"].T + state.get("out_proj.bias", 0), probs


def split(x, head_dim):
    return x.reshape(*x.shape[:-1], -1, head_dim).swapaxes(1, 2)


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotated(x, rope):
    """x (batch, heads, length, head_dim): each pair of dimensions, as a complex number, is turned."""
    angles = np.arange(x.shape[2])[:, None] * np.asarray(rope.frequencies.inv_freq, float)
    turn, pairs = np.exp(1j * angles) * rope.frequencies.attention_factor, angles.shape[1]
    out = np.array(x, float)
    halves = ((slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)), (slice(0, pairs), slice(pairs, 2 * pairs)))
    first, second = halves[0 if rope.interleaved else 1]
    turned = (out[..., first] + 1j * out[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def assert_gradients(layer, *inputs, call=None, step=1e-5, **options):
    """Compare each gradient of an input or parameter, along a direction, with the difference quotient."""
    call = call or (lambda *inputs: output(layer(*inputs, **options)))
    rng = np.random.default_rng(7)
    result, pullback = vjp(layer, *inputs, **options)
    out = output(result)
    np.testing.assert_array_equal(out, call(*inputs))
    dout = rng.standard_normal(out.shape)
    before = [x.copy() for x in (*inputs, dout)]
    *found, grads = pullback(dout)
    for x, y in zip((*inputs, dout), before, strict=True):
        np.testing.assert_array_equal(x, y)
    assert [x.shape for x in found] == [x.shape for x in inputs]
    state = layer.state_dict()
    assert list(grads) == list(state)

    def slope(change, shape):
        direction = rng.standard_normal(shape)
        above, below = (np.sum(change(sign * step * direction) * dout) for sign in (1, -1))
        return direction, (above - below) / (2 * step)

    slopes = []
    for i, (x, gradient) in enumerate(zip(inputs, found, strict=True)):
        direction, expected = slope(lambda d, i=i, x=x: call(*inputs[:i], x + d, *inputs[i + 1 :]), x.shape)
        slopes.append((f"input {i}", np.sum(gradient * direction), expected))
    for name, gradient in grads.items():
        assert gradient.shape == state[name].shape
        assert gradient.dtype == state[name].dtype

        def changed(d, name=name):
            layer.load_state_dict({**state, name: state[name] + d})
            return call(*inputs)

        direction, expected = slope(changed, gradient.shape)
        slopes.append((name, np.sum(gradient * direction), expected))
    layer.load_state_dict(state)
    most = max(abs(expected) for *_, expected in slopes)
    for name, got, expected in slopes:
        assert abs(got - expected) <= 2e-7 * max(1, most), name
    assert most > 0


def errors_of_cache(layer, x, dtype):
    """How far a cache in `dtype` moves results, relative to the largest, and weights: of three sequences."""
    found = []
    for kept in (None, dtype):
        cache, parts = KVCache(dtype=kept), []
        parts.append(layer(x[:, :4], cache=cache, lengths=[4, 2, 3], is_causal=True)[0][:, :2])
        out, weights = layer(x[:, 4:6], cache=cache, is_causal=True, need_weights=True)
        parts += [out, layer(x[:, 6:7], cache=cache, is_causal=True)[0]]
        found.append((np.concatenate(parts, axis=1), weights))
    (out, weights), (rounded, rounded_weights) = found
    return np.abs(rounded - out).max() / np.abs(out).max(), np.abs(rounded_weights - weights).max()
