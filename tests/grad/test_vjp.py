"""Results and pullbacks of functions: what is kept, what is refused, and what a call uses up."""

import threading
import weakref

import numpy as np
import pytest

import fastattn
from fastattn import functional, ops
from fastattn.grad import vjp
from fastattn.layers import (
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    RMSNorm,
    TransformerEncoderLayer,
)

Q, K, V, GATE = np.random.default_rng(0).standard_normal((4, 2, 5, 8)).astype(np.float32)
MAPS = functional.feature_maps


def test_a_call_frees_what_was_kept():
    out, pullback = vjp(functional.gated_attention, Q, K, V, GATE)
    kept, dout = weakref.ref(out), np.ones_like(out)
    del out
    assert kept() is not None
    pullback(dout)
    assert kept() is None


def test_a_pullback_is_called_once_and_outlives_a_dout_that_does_not_fit():
    out, pullback = vjp(functional.gated_attention, Q, K, V, GATE)
    name = r"^pullback of gated_attention\(\): "
    with pytest.raises(ValueError, match=name + r"dout has shape \(1, 5, 8\); expected \(2, 5, 8\)"):
        pullback(out[:1])
    with pytest.raises(TypeError, match=name + "dout has dtype float64; expected float32"):
        pullback(out.astype(float))
    assert len(pullback(out)) == 4
    with pytest.raises(RuntimeError, match=name + "it was called before"):
        pullback(out)


def test_of_several_threads_one_gets_the_gradients():
    for _ in range(20):
        out, pullback = vjp(functional.gated_attention, Q, K, V, GATE)
        found, barrier = [], threading.Barrier(4)

        def call(out=out, pullback=pullback, found=found, barrier=barrier):
            barrier.wait()
            try:
                found.append(len(pullback(out)))
            except RuntimeError as error:
                found.append("called before" in str(error))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [True, True, True, 4]


def test_arguments_are_checked_as_in_a_plain_call():
    for wrong in ("no", 1, None):
        for function in (fastattn.attention, functional.gated_attention):
            arrays = (Q, K, V) if function is fastattn.attention else (Q, K, V, GATE)
            with pytest.raises(TypeError, match=r"attention\(\): return_lse is "):
                vjp(function, *arrays, return_lse=wrong)
    with pytest.raises(TypeError, match=r"^attention\(\) missing 1 required positional argument: 'v'"):
        vjp(fastattn.attention, Q, K)
    with pytest.raises(TypeError, match=r"^attention\(\) missing 1 required positional argument: 'k'"):
        vjp(fastattn.attention, Q, v=V)
    with pytest.raises(TypeError, match=r"^attention\(\) got multiple values for argument 'q'"):
        vjp(fastattn.attention, Q, K, V, q=Q)
    with pytest.raises(TypeError, match=r"^attention\(\): 4 arguments are given by position"):
        vjp(fastattn.attention, Q, K, V, np.ones((5, 5), bool))
    out, pullback = vjp(fastattn.attention, q=Q, k=K, v=V)
    with pytest.raises(ValueError, match=r"^pullback of attention\(\): need is None; expected need="):
        pullback(out)
    assert len(pullback(out, need=("dq", "dv"))) == 2
    _, pullback = vjp(fastattn.attention, Q, K, V, out=None, stats=None)
    with pytest.raises(ValueError, match=r"^pullback of attention\(\): need has 'dz'; expected dq, dk, dv"):
        pullback(Q, need=("dz",))
    for name in ("out", "stats", "out_state"):
        with pytest.raises(ValueError, match=rf"^vjp\(\): {name} is given; expected None"):
            vjp(fastattn.attention, Q, K, V, **{name: Q})


REFUSED = [len, ops.linear, TransformerEncoderLayer, functional.attention_backward]


@pytest.mark.parametrize("function", REFUSED, ids=lambda x: x.__name__)
def test_functions_without_gradients_are_refused(function):
    name = rf"^vjp\(\): function is {function.__name__}; expected attention, varlen_attention"
    with pytest.raises(TypeError, match=name):
        vjp(function, Q)


def test_errors_of_layers_name_the_layer():
    layer = TransformerEncoderLayer(8, 2, 16, rng=np.random.default_rng(0))
    with pytest.raises(
        TypeError, match=r"^TransformerEncoderLayer\(\) missing 1 required positional argument"
    ):
        vjp(layer)
    out, pullback = vjp(layer, Q)
    with pytest.raises(
        TypeError, match=r"^pullback of TransformerEncoderLayer\(\): need is not an argument; expected dout"
    ):
        pullback(out, need=("dx",))
    assert repr(pullback) == "<pullback of TransformerEncoderLayer>"
    assert len(pullback(out)) == 2
    assert repr(pullback) == "<pullback of TransformerEncoderLayer, called>"
    heads = MultiHeadAttention(8, 2, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"^MultiHeadAttention\(\): need_weights is given; expected none"):
        vjp(heads, Q, need_weights=True)
    np.testing.assert_array_equal(vjp(heads, Q, need_weights=False)[0][0], heads(Q)[0])
    with pytest.raises(TypeError, match=r"^LayerNorm\(\) missing 1 required positional argument: 'x'"):
        vjp(LayerNorm(8))
    with pytest.raises(TypeError, match=r"^FeedForward\(\): bogus is not an argument; expected one of x$"):
        vjp(FeedForward(8, 16, rng=0), Q, bogus=1)
    with pytest.raises(ValueError, match=r"^RMSNorm\(\): residual is given; expected None: add it outside"):
        vjp(RMSNorm(8), Q, residual=Q)
    keys, scale = K.astype(np.int8), np.ones((2, 5), np.float32)
    with pytest.raises(ValueError, match=r"^attention\(\): k_scale is given; expected none: int8"):
        vjp(fastattn.attention, Q, keys, keys, k_scale=scale, v_scale=scale)


def test_arguments_that_are_refused_do_not_use_a_pullback_up():
    state = np.zeros((2, 8, 8), np.float32)
    calls = [
        (vjp(fastattn.attention, Q, K, V), (Q,)),
        (vjp(functional.gated_attention, Q, K, V, GATE), (Q,)),
        (vjp(functional.sparsemax_attention, Q, K, V), (Q,)),
        (vjp(functional.flex_attention, Q, K, V), (Q,)),
        (vjp(functional.linear_attention, Q, K, V, rule="linear", return_state=True), (Q, state)),
    ]
    for (_, pullback), given in calls:
        for wrong in ({"need": ("dz",)}, {"need": "dq"}, {"need": ("dq", "dq")}, {"dmore": Q[0]}):
            with pytest.raises((TypeError, ValueError), match=r"^pullback of \w+\(\): "):
                pullback(Q, **wrong)
        assert [x.shape for x in pullback(*given)[:3]] == [Q.shape] * 3


def test_gradients_of_feature_maps_are_those_that_are_needed():
    for function in (MAPS.elu, MAPS.unit, MAPS.taylor):
        out, pullback = vjp(function, Q)
        assert pullback(out, need=()) == ()
        for need, message in (
            (("dy",), "need has 'dy'; expected dx"),
            (("dx", "dx"), "expected each name once"),
        ):
            with pytest.raises(ValueError, match=rf"^pullback of {function.__name__}\(\): .*{message}"):
                vjp(function, Q)[1](Q, need=need)
