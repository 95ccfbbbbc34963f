"""The causal convolution and its gradient against their definition in float64, on every implementation."""

from itertools import pairwise

import numpy as np
import precisions
import pytest
from channels import conv
from differences import assert_gradient
from implementations import forced
from precisions import EPS, each_dtype, lane

from fastattn import grad, ops

# Around the kernel's tokens (8, 32) and channels (16, 256).
LENGTHS = [0, 1, 2, 7, 8, 9, 31, 33, 70, 300]
CHANNELS = [1, 15, 16, 17, 255, 256, 300]


def problem(shape, width, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(dtype)
    weight = rng.standard_normal((shape[-1], width)).astype(lane(dtype))
    bias = rng.standard_normal(shape[-1]).astype(lane(dtype))
    state = rng.standard_normal((*shape[:-2], width - 1, shape[-1])).astype(dtype)
    return x, weight, bias, state


def close(got, expected, dtype, factor=16):
    precisions.close(got, expected, factor * EPS[lane(dtype)] * np.abs(expected).max(initial=1), dtype)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_sizes(implementation, channels, length, width):
    x, weight, bias, state = problem((2, length, channels), width)
    close(ops.causal_conv1d(x, weight), conv(x, weight)[0], np.float32)
    out, last = ops.causal_conv1d(x, weight, bias, activation="silu", state=state, return_state=True)
    expected, inputs = conv(x, weight, bias, "silu", state)
    close(out, expected, np.float32)
    np.testing.assert_array_equal(last, inputs.astype(np.float32))


@each_dtype
def test_dtypes(implementation, dtype):
    x, weight, bias, state = problem((3, 40, 50), 4, dtype)
    close(ops.causal_conv1d(x, weight, bias, state=state), conv(x, weight, bias, None, state)[0], dtype)


def test_a_state_handed_on_gives_the_bits_of_the_whole(implementation):
    x, weight, bias, state = problem((2, 45, 70), 4)
    options = {"activation": "silu"}
    whole = ops.causal_conv1d(x, weight, bias, state=state, **options)
    for cuts in ([0, 1, 2, 3, 45], [0, 8, 30, 45], [0, 0, 44, 45]):
        kept, parts = state.copy(), []
        for i, j in pairwise(cuts):
            part, after = ops.causal_conv1d(x[:, i:j], weight, bias, state=kept, out_state=kept, **options)
            assert after is kept
            parts.append(part)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("lengths", [[5, 0, 40, 1, 2], [0, 0], [], [0, 100, 0]], ids=str)
def test_sequences_end_to_end(implementation, lengths):
    begins = np.cumsum([0, *lengths])
    x, weight, bias, _ = problem((begins[-1], 40), 4)
    state = np.random.default_rng(3).standard_normal((len(lengths), 3, 40)).astype(np.float32)
    out, after = ops.causal_conv1d(x, weight, bias, state=state, begins=begins, return_state=True)
    assert (out.shape, after.shape) == (x.shape, state.shape)
    for s, (i, j) in enumerate(pairwise(begins)):
        alone, last = ops.causal_conv1d(x[i:j], weight, bias, state=state[s], return_state=True)
        np.testing.assert_array_equal(out[i:j], alone)
        np.testing.assert_array_equal(after[s], last)


@each_dtype
@pytest.mark.parametrize("shape", [(2, 45, 40), (1, 70, 300), (3, 1, 17), (2, 31, 1)], ids=str)
def test_tokens_may_lie_side_by_side(implementation, shape, dtype):
    x, weight, bias, state = problem(shape, 4, dtype)
    turned = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    dout = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    for before in (None, state):
        options = {"activation": "silu", "state": before}
        expected = ops.causal_conv1d(x, weight, bias, **options)
        np.testing.assert_array_equal(ops.causal_conv1d(turned, weight, bias, **options), expected)
        need = ("dx", "dweight", "dbias", "dstate")
        found, same = (grad.causal_conv1d(dout, y, weight, bias, **options, need=need) for y in (turned, x))
        for a, b in zip(found, same, strict=True):
            np.testing.assert_array_equal(a, b)
    begins = [0, 0, shape[1] // 2, shape[1]]
    expected = ops.causal_conv1d(x[0], weight, bias, begins=begins)
    np.testing.assert_array_equal(ops.causal_conv1d(turned[0], weight, bias, begins=begins), expected)


def test_one_token_of_many_that_lie_side_by_side(implementation):
    x, weight, _, _ = problem((9, 5), 4)
    turned = np.ascontiguousarray(x.T).T
    np.testing.assert_array_equal(ops.causal_conv1d(turned[3:4], weight), ops.causal_conv1d(x[3:4], weight))
    (found,), (same,) = (grad.causal_conv1d(y[3:4], y[3:4], weight, need=("dx",)) for y in (turned, x))
    np.testing.assert_array_equal(found, same)


def test_strides_and_threads_do_not_matter(implementation):
    x, weight, bias, state = problem((2, 300, 100), 3)
    expected = ops.causal_conv1d(x, weight, bias, state=state, num_threads=1)
    turned = np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    columns = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    wide = np.zeros((2, 300, 130), np.float32)
    wide[..., 7:107] = x
    for other in (turned, columns, wide[..., 7:107]):
        np.testing.assert_array_equal(
            ops.causal_conv1d(other, weight, bias, state=state, num_threads=3), expected
        )
    out = np.empty((2, 600, 100), np.float32)[:, ::2]
    assert ops.causal_conv1d(x, weight, bias, state=state, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_what_is_not_finite_stays_in_its_channel_and_after_its_token(implementation):
    x, weight, _, _ = problem((20, 40), 4)
    clean = ops.causal_conv1d(x, weight)
    x[9, 17], x[12, 3] = np.nan, np.inf
    out = ops.causal_conv1d(x, weight)
    touched = np.zeros(out.shape, bool)
    touched[9:13, 17] = touched[12:16, 3] = True
    np.testing.assert_array_equal(np.isfinite(out), ~touched)
    np.testing.assert_array_equal(out[~touched], clean[~touched])


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "sigmoid"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_gradients_against_differences(implementation, activation, ragged, width):
    begins = [0, 6, 6, 7, 9] if ragged else None
    shape = (9, 3) if ragged else (2, 5, 3)
    x, weight, bias, _ = problem(shape, width, np.float64)
    rng = np.random.default_rng(5)
    state = rng.standard_normal((*((4,) if ragged else (2,)), width - 1, 3))
    given = {"x": x, "weight": weight, "bias": bias, "state": state}
    options = {"activation": activation, "begins": begins}
    dout, dstate_out = rng.standard_normal(x.shape), rng.standard_normal(state.shape)

    def both(**changed):
        out, after = ops.causal_conv1d(**given | changed, **options, return_state=True)
        return np.concatenate([out.ravel(), after.ravel()])

    cotangents = np.concatenate([dout.ravel(), dstate_out.ravel()])
    names = [name for name, y in given.items() if y.size]
    found = grad.causal_conv1d(
        dout, **given, **options, dstate_out=dstate_out, need=tuple(f"d{n}" for n in names)
    )
    for name, got in zip(names, found, strict=True):
        assert_gradient(got, lambda y, name=name: both(**{name: y}), given[name], cotangents, 1e-6)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 700, 40), (3, 65, 300), (2, 0, 5), (0, 4, 5)], ids=str)
def test_gradients_against_those_of_float64(implementation, shape, dtype):
    x, weight, bias, state = problem(shape, 4, dtype)
    dout = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    need = ("dstate", "dx", "dweight", "dbias")
    found = grad.causal_conv1d(dout, x, weight, bias, activation="silu", state=state, need=need)
    with forced("numpy"):
        wide = [y.astype(np.float64) for y in (dout, x, weight, bias)]
        expected = grad.causal_conv1d(*wide, activation="silu", state=state.astype(np.float64), need=need)
    for name, got, want in zip(need, found, expected, strict=True):
        close(got, want, lane(dtype) if name in ("dweight", "dbias") else np.dtype(dtype), factor=64)


@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_a_tap_without_a_token_has_no_part_in_gradients(implementation, length):
    weight, x = np.ones((2, 4), np.float32), np.zeros((length, 2), np.float32)
    weight[0, 0] = np.inf  # of the token three before
    dx, dstate = grad.causal_conv1d(
        x + 1, x, weight, state=np.zeros((3, 2), np.float32), need=("dx", "dstate")
    )
    expected = np.minimum(4, length - np.arange(length))
    np.testing.assert_array_equal(dx[:, 1], expected)
    np.testing.assert_array_equal(dx[:, 0], np.where(expected < 4, expected, np.inf))
    assert (dstate[:, 0] == np.inf).sum() == min(3, length)


def test_gradients_do_not_depend_on_threads(implementation):
    x, weight, bias, state = problem((2, 900, 64), 4)
    need = ("dx", "dweight", "dbias", "dstate")
    options = {"activation": "silu", "state": state, "need": need}
    first, second = (grad.causal_conv1d(x, x, weight, bias, num_threads=n, **options) for n in (1, 3))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


ONES = np.ones((2, 5, 6), np.float32)
WRONG = {
    ValueError: {
        r"x has shape \(4,\); expected \(..., length, channels\)": {"x": np.ones(4, np.float32)},
        r"weight has shape \(3, 4\); expected .*\(6, 1 to 8\)": {"weight": np.ones((3, 4), np.float32)},
        r"weight has shape \(6, 9\)": {"weight": np.ones((6, 9), np.float32)},
        r"bias has shape \(5,\); expected \(6,\)": {"bias": np.ones(5, np.float32)},
        r"activation is 'swish'; expected one of relu": {"activation": "swish"},
        r"state has shape .*; expected \(2, 3, 6\)": {"state": np.ones((2, 4, 6), np.float32)},
        r"x has shape \(2, 5, 6\); expected \(tokens, channels\), as begins": {"begins": [0, 5]},
        r"begins goes from 0 to 4; expected 0 to 5": {"x": ONES[0], "begins": [0, 4]},
        r"begins falls from 4 to 2": {"x": ONES[0], "begins": [0, 4, 2, 5]},
        r"out has shape": {"out": np.ones((2, 5, 7), np.float32)},
        r"out shares memory with x": {"out": ONES},
    },
    TypeError: {
        r"state has dtype float64; expected float32": {"state": np.ones((2, 3, 6))},
        r"return_state is 1; expected True or False": {"return_state": 1},
        r"out_state has dtype float64": {"out_state": np.ones((2, 3, 6))},
    },
}


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [(error, *each) for error, calls in WRONG.items() for each in calls.items()],
)
def test_errors_come_before_anything_is_computed(implementation, changed, error, message):
    with pytest.raises(error, match=r"^causal_conv1d\(\): " + message):
        ops.causal_conv1d(**{"x": ONES, "weight": np.ones((6, 4), np.float32)} | changed)


def test_a_state_may_not_lie_where_an_input_is(implementation):
    x = ONES
    state = np.ones((2, 3, 6), np.float32)
    with pytest.raises(ValueError, match="out_state shares memory with state"):
        ops.causal_conv1d(x, np.ones((6, 4), np.float32), state=state, out_state=state[::-1])
    weight = np.ones(36, np.float32)
    with pytest.raises(ValueError, match="out_state shares memory with weight"):
        ops.causal_conv1d(x, weight[:24].reshape(6, 4), out_state=weight.reshape(2, 3, 6))
