"""Arguments that layers refuse when they are built."""

import ml_dtypes
import numpy as np
import pytest
from layer_oracle import output
from refused import assert_refused, refused

from fastattn.layers import (
    MultiHeadAttention,
    RMSNorm,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

ENCODER, DECODER = TransformerEncoderLayer(64, 4), TransformerDecoderLayer(64, 4)


REFUSED = r"""
MultiHeadAttention(64, 4, bias=None) -> TypeError: bias is None; expected True or False
MultiHeadAttention(64, 4, qk_norm=1) -> TypeError: qk_norm is 1; expected True or False
MultiHeadAttention(64, 4, sinks=[0.0] * 4) -> TypeError: sinks is .*; expected True or False
MultiHeadAttention(64, 4, qk_norm_eps='x') -> TypeError: qk_norm_eps is 'x'; expected a real
MultiHeadAttention(64, 4, rope=True) -> TypeError: rope is of type bool; expected a Rope, Rope\(
MultiHeadAttention(64, 4, rope=rope_frequencies(16)) -> TypeError: type RopeFrequencies; exp
MultiHeadAttention(64, 4, rope=Rope(rope_frequencies(18))) -> ValueError: rope rotates 18 dim
Rope(8) -> TypeError: frequencies is of type int; expected what rope_frequencies\(head_dim\)
Rope(rope_frequencies(8), interleaved=1) -> TypeError: interleaved is 1
MultiHeadAttention(64, 4, window=5) -> TypeError: window is 5; expected a pair \(left, right\)
MultiHeadAttention(64, 4, window=(-1, 0)) -> ValueError: window\[0\] is -1
MultiHeadAttention(64, 4, softcap=0.0) -> ValueError: softcap is 0.0; expected a number above 0
MultiHeadAttention(64, 4, scale='1') -> TypeError: scale is '1'; expected a real number
MultiHeadAttention(64, 4, alibi_slopes=np.ones(3)) -> ValueError: alibi_slopes has shape \(3,\)
LayerNorm(64, None) -> TypeError: eps is None; expected a real number
LayerNorm(64, bias='yes') -> TypeError: bias is 'yes'; expected True or False
RMSNorm(64, '') -> TypeError: eps is ''; expected a real number
Linear(64, 64, bias=None) -> TypeError: bias is None
TransformerEncoder(ENCODER, 6) -> TypeError: is of type TransformerEncoderLayer; expected a seq
TransformerEncoder([ENCODER, 1]) -> TypeError: layers\[1\] is of type int; expected Transformer
TransformerEncoder([DECODER]) -> TypeError: layers\[0\] is of type TransformerDecoderLayer; exp
TransformerDecoder([ENCODER]) -> TypeError: expected TransformerDecoderLayer
TransformerEncoder([ENCODER], 'rms_norm') -> TypeError: norm is of type str; expected a LayerNorm
TransformerEncoder([ENCODER], LayerNorm(8)) -> ValueError: norm.features is 8; expected 64, as
TransformerEncoder([ENCODER, TransformerEncoderLayer(32, 4)])
    -> ValueError: layers\[1\].d_model is 32; expected 64, as layers\[0\] has
TransformerEncoder([ENCODER]).new_cache('int8')
    -> TypeError: ^TransformerEncoder.new_cache\(\): capacity is 'int8'; expected an integer
TransformerDecoder([DECODER]).new_cache(dtype='uint4')
    -> TypeError: ^TransformerDecoder.new_cache\(\): dtype is 'uint4'; expected .*, int8 or int4
MultiHeadAttention(2 ** 33, 1, rng=0)
    -> ValueError: ^MultiHeadAttention\(\): in_proj_weight would have shape \(25769803776, 8589934592\)
"""


@refused(REFUSED)
def test_what_cannot_be_built(code, error):
    assert_refused(code, error, ENCODER=ENCODER, DECODER=DECODER)


@pytest.mark.parametrize("dtype", [np.int8, np.dtype("int8"), "i1", np.float64, ml_dtypes.bfloat16])
def test_types_of_weights_may_be_those_of_numpy(dtype):
    """They are kept by name."""
    name = np.dtype(dtype).name
    x = (
        np.random.default_rng(0)
        .standard_normal((1, 3, 64))
        .astype("float64" if name == "float64" else "float32")
    )
    for kind in (TransformerEncoderLayer, MultiHeadAttention):
        expected, layer = (kind(64, 4, weights_dtype=d, rng=0) for d in (name, dtype))
        assert layer.weights_dtype == name
        np.testing.assert_array_equal(output(layer(x)), output(expected(x)))
    layer = MultiHeadAttention(64, 4, rng=0)
    layer.load_state_dict(layer.state_dict(), weights_dtype=dtype)
    assert layer.weights_dtype == name


def test_stacks_of_what_can_be_iterated():
    assert len(TransformerEncoder(TransformerEncoderLayer(64, 4) for _ in range(3)).layers) == 3
    assert TransformerEncoder((ENCODER,), RMSNorm(64)).layers == [ENCODER]


@pytest.mark.parametrize("kind", [TransformerEncoderLayer, TransformerDecoderLayer, Transformer])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 0}, "d_model is 0; expected at least 1"),
        ({"d_model": 9}, "d_model is 9; expected a multiple of num_heads, 2, or head_dim in attention"),
        ({"num_heads": "2"}, "num_heads is '2'; expected an integer"),
        ({"dim_feedforward": 0}, "dim_feedforward is 0"),
        ({"activation": "tanh"}, "activation is 'tanh'; expected one of relu"),
        ({"norm": "batch"}, "norm is 'batch'; expected one of layer_norm, rms_norm"),
        ({"norm_first": None}, "norm_first is None"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0; expected 0 or more"),
        ({"bias": 1}, "bias is 1; expected True or False"),
        ({"weights_dtype": "int3"}, "weights_dtype is 'int3'"),
        ({"activations": "int4"}, "activations is 'int4'; expected int8"),
        (
            {"activations": "int8"},
            "activations is 'int8' for weights in float32; expected weights in int8, q8, int4",
        ),
        ({"attention": {"nheads": 3}}, "attention has 'nheads'; expected .*window"),
        ({"attention": 3}, "attention is 3; expected a dict of .*window"),
        ({"rng": "x"}, "rng is 'x'"),
    ],
)
def test_what_is_built_of_layers_complains_in_its_own_name(kind, options, message):
    with pytest.raises((TypeError, ValueError), match=rf"^{kind.__name__}\(\): {message}"):
        kind(**{"d_model": 8, "num_heads": 2, **options})


def test_a_width_that_no_number_of_heads_divides():
    layer = TransformerEncoderLayer(9, 2, 8, attention={"head_dim": 5}, rng=0)
    assert layer(np.ones((1, 3, 9), np.float32)).shape == (1, 3, 9)
    with pytest.raises(ValueError, match=r"d_model is 9; expected .* head_dim in cross_attention"):
        TransformerDecoderLayer(9, 2, 8, attention={"head_dim": 5})
