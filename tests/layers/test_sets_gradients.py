"""Gradients of Set Transformer's blocks and Perceiver's, against finite differences in float64."""

import numpy as np
import pytest

from fastattn import layers
from fastattn.grad import vjp
from fastattn.layers import FeedForward, TransformerEncoder, TransformerEncoderLayer

D, HEADS, WIDE, STEP = 24, 4, 40, 1e-5


def layer(seed=1, dtype="float64", **options):
    rng = np.random.default_rng(seed)
    made = TransformerEncoderLayer(D, HEADS, WIDE, rng=rng, weights_dtype=dtype, **options)
    state = made.state_dict()
    made.load_state_dict({name: x + 0.1 * rng.standard_normal(x.shape) for name, x in state.items()})
    return made


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


X, POINTS = normal(3, 9, D), normal(4, D)
HIDDEN = np.arange(9) >= np.array([9, 5, 1])[:, None]
ADDED = np.where(HIDDEN, -np.inf, normal(3, 9))
FIRST = {"norm_first": True}


def forward():
    return FeedForward(D, WIDE, "swiglu", rng=np.random.default_rng(2), weights_dtype="float64")


# The function, its layers, where these stand among its arguments, and its arrays.
CALLS = {
    "set": ("set_attention", [layer()], lambda a, x, y: ((a, x, y), {}), (normal(3, 5, D), X)),
    "set, norm first": ("set_attention", [layer(**FIRST)], lambda a, x, y: ((a, x, y), {}), (POINTS, X)),
    "set, one for all": ("set_attention", [layer()], lambda a, x, y: ((a, x, y), {}), (X[:1], X)),
    "set, of one": ("set_attention", [layer()], lambda a, x, y: ((a, x, y), {}), (X[0], X[1])),
    "set, of options": (
        "set_attention",
        [layer(attention={"num_kv_heads": 2, "qk_norm": True, "add_bias_kv": True, "output_gate": True})],
        lambda a, x, y: ((a, x, y), {}),
        (normal(3, 5, D), X),
    ),
    "induced": (
        "induced_set_attention",
        [layer(), layer(2, **FIRST)],
        lambda a, b, i, x: ((a, b, i, x), {}),
        (POINTS, X),
    ),
    "pooling": ("pooling_by_attention", [layer()], lambda a, s, x: ((a, s, x), {}), (POINTS[:1], X)),
    "pooling, mapped": (
        "pooling_by_attention",
        [layer(), forward()],
        lambda a, f, s, x: ((a, s, x), {"feed_forward": f}),
        (POINTS, X),
    ),
    "perceiver": (
        "perceiver",
        [layer(**FIRST), TransformerEncoder([layer(3), layer(4)])],
        lambda a, b, z, x: ((a, b, z, x), {}),
        (POINTS, X),
    ),
    "perceiver, a layer": (
        "perceiver",
        [layer(), layer(3)],
        lambda a, b, z, x: ((a, b, z, x), {}),
        (normal(3, 4, D), X),
    ),
    "perceiver, alone": ("perceiver", [layer()], lambda a, z, x: ((a, None, z, x), {}), (POINTS, X)),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def run(call, arrays, backward=False, **options):
    name, parts, placed, _ = call
    args, more = placed(*parts, *arrays)
    function = getattr(layers, name)
    args = (function, *args) if backward else args
    return (vjp if backward else function)(*args, **more, **options)


@pytest.mark.parametrize("mask", [None, HIDDEN, ADDED], ids=["all", "hidden", "added"])
@every_call
def test_finite_differences(call, mask, implementation):
    _, parts, _, arrays = call
    mask = mask[1] if mask is not None and arrays[1].ndim == 2 else mask
    out, pullback = run(call, arrays, True, key_padding_mask=mask)
    np.testing.assert_array_equal(out, run(call, arrays, key_padding_mask=mask))
    rng = np.random.default_rng(7)
    dout = rng.standard_normal(out.shape)
    found = pullback(dout)
    assert len(found) == len(arrays) + len(parts)

    def slope(gradient, moved):
        """Along a direction, what the gradient says and the difference quotient."""
        direction = rng.standard_normal(gradient.shape)
        ends = [(moved(sign * STEP * direction) * dout).sum() for sign in (1, -1)]
        return (gradient * direction).sum(), (ends[0] - ends[1]) / (2 * STEP)

    pairs = {}
    for i, (x, gradient) in enumerate(zip(arrays, found, strict=False)):
        assert gradient.shape == x.shape
        pairs[f"input {i}"] = slope(
            gradient,
            lambda d, i=i: run(
                call, [x + d if j == i else x for j, x in enumerate(arrays)], key_padding_mask=mask
            ),
        )
    for i, (part, grads) in enumerate(zip(parts, found[len(arrays) :], strict=True)):
        state = part.state_dict()
        assert list(grads) == list(state)
        for name, gradient in grads.items():

            def moved(d, part=part, name=name, state=state):
                part.load_state_dict({**state, name: state[name] + d})
                return run(call, arrays, key_padding_mask=mask)

            pairs[f"{i}.{name}"] = slope(gradient, moved)
        part.load_state_dict(state)
    most = max(abs(expected) for _, expected in pairs.values())
    for name, (got, expected) in pairs.items():
        assert abs(got - expected) <= 2e-7 * most, name


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("induced", "set, of one")])
def test_what_a_mask_hides_never_shows(name, implementation):
    """An induced block is the exception, whose result has a vector for what is hidden."""
    call = CALLS[name]
    arrays = call[3]
    dirty = [arrays[0], np.where(HIDDEN[..., None], np.nan, arrays[1])]
    for mask in (HIDDEN, ADDED):
        found = []
        for given in (arrays, dirty):
            out, pullback = run(call, given, True, key_padding_mask=mask)
            dx, dy, *grads = pullback(out)
            assert (dy[HIDDEN] == 0).all()
            found.append([out, dx, dy, *(x for each in grads for x in each.values())])
        for x, y in zip(*found, strict=True):
            assert np.isfinite(x).all()
            np.testing.assert_array_equal(x, y)


@every_call
def test_checkpoints_have_the_same_bits(call, implementation):
    found = []
    for checkpoint in (False, True):
        out, pullback = run(call, call[3], True, checkpoint=checkpoint, dropout=0.2, seed=5)
        gradients = pullback(out)
        found.append([out, *gradients[:2], *(x for each in gradients[2:] for x in each.values())])
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (found[0][0] != run(call, call[3])).any()


@pytest.mark.parametrize("name", ["set", "induced", "pooling", "perceiver"])
def test_empty_sets(name, implementation):
    """Sets may have no elements, and a batch no sequences."""
    for inner in ((POINTS, X[:, :0]), (POINTS, X[:0]), (POINTS[:0], X)):
        out, pullback = run(CALLS[name], inner, backward=True)
        np.testing.assert_array_equal(out, run(CALLS[name], inner))
        dx, dy, *_ = pullback(out)
        assert (dx.shape, dy.shape) == (inner[0].shape, inner[1].shape)


def test_a_layer_that_is_passed_twice():
    both = layer()
    out, pullback = vjp(layers.induced_set_attention, both, both, POINTS, X)
    _, _, first, second = pullback(out)
    apart = vjp(layers.induced_set_attention, layer(), layer(), POINTS, X)[1]
    *_, inner, outer = apart(out)
    for name, x in first.items():
        np.testing.assert_allclose(x, inner[name] + outer[name], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(x, second[name])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: run(CALLS["set"], (X[..., :3], X), True), ValueError, r"\(\): x has shape \(3, 9, 3\)"),
        (
            lambda: run(CALLS["set"], (X.astype("f"), X.astype("f")), True),
            TypeError,
            r"^set_attention\(\): x has dtype float32; expected float64",
        ),
        (
            lambda: vjp(layers.set_attention, layer(dtype="float32"), X.astype("f"), X.astype(np.float16)),
            TypeError,
            r"\(\): y has dtype float16; expected float32, as x has",
        ),
        (
            lambda: vjp(layers.induced_set_attention, layer(), None, POINTS, X),
            TypeError,
            r"^induced_set_attention\(\): second is of type NoneType",
        ),
        (
            lambda: vjp(
                layers.perceiver,
                layer(),
                TransformerEncoderLayer(12, 4, 8, rng=0, weights_dtype="float64"),
                POINTS,
                X,
            ),
            ValueError,
            r"^perceiver\(\): latent has d_model 12; expected 24",
        ),
        (
            lambda: vjp(
                layers.pooling_by_attention, layer(), POINTS, X, feed_forward=FeedForward(D, WIDE, rng=0)
            ),
            ValueError,
            r"\(\): feed_forward has weights_dtype 'float32'; expected 'float64'",
        ),
        (
            lambda: run(CALLS["pooling"], (POINTS, X), True, key_padding_mask=HIDDEN[:1]),
            ValueError,
            r"\(\): key_padding_mask has shape \(1, 9\)",
        ),
        (lambda: run(CALLS["set"], (X, X), True, dropout=0.1), ValueError, "dropout"),
        (
            lambda: vjp(
                layers.set_attention, TransformerEncoderLayer(D, HEADS, WIDE, weights_dtype="float64"), X, X
            ),
            ValueError,
            "load_state_dict",
        ),
        (lambda: run(CALLS["set"], (X, X), True)[1](X[:1]), ValueError, r"\(\): dout has shape"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
