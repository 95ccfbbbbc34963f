"""Gradients of attention: every option alone and with every other, against their definition in float64."""

from itertools import pairwise

import numpy as np
import pytest
from backward_oracle import OPTIONAL, check, cotangents, needed, run
from oracle import assert_same_bits, case

import fastattn
from fastattn import functional
from fastattn._bench.cases import DTYPES, STRUCTURES, VARIANTS, Shape, as_dtype, pairs
from fastattn.functional import attention_backward, varlen_attention_backward
from fastattn.grad import vjp

CROSS = Shape("cross", batch=2, heads_q=4, heads_kv=2, len_q=37, len_k=200, head_dim=24, head_dim_v=20)
SQUARE = Shape("square", batch=2, heads_q=3, heads_kv=3, len_q=67, len_k=67, head_dim=16)
DECODE = Shape("decode", batch=2, heads_q=6, heads_kv=2, len_q=1, len_k=300, head_dim=40)
LONGER_Q = Shape("longer_q", batch=1, heads_q=2, heads_kv=1, len_q=190, len_k=50, head_dim=33)
LARGE = Shape("large", batch=1, heads_q=2, heads_kv=1, len_q=600, len_k=1100, head_dim=16)
FEW = Shape("few", batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=1100, head_dim=16)
SHAPES = [CROSS, SQUARE, DECODE, LONGER_Q]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
RAGGED = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "sinks": {"sinks": np.ones(4, np.float32)},
    "dropout": {"dropout": 0.2, "seed": 3, "causal": True},
    "alibi, softcap": {"alibi_slopes": np.float32([[0.1, 0.2, 0.3, 0.4]]), "softcap": 3.0},
}
# "alibi" has alibi_slopes.
DIFFERENTIABLE = [name for name in VARIANTS if any(option.startswith(name) for option in OPTIONAL)]
MODIFIED = ["plain", "causal", "window", "block_mask", "bias_heads", "softcap", "t5_bias"]


def check_case(shape, variants, dtype, seed=0):
    this = case(shape, variants, dtype, telling=False)
    dout, dlse = cotangents(this.q, this.v, np.random.default_rng(seed))
    got = run(this.q, this.k, this.v, dout, dlse, this.arguments)
    check(got, this.q, this.k, this.v, dout, dlse, this.arguments, telling=variants == ("plain",))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@every_shape
def test_alone(shape, variant, dtype, implementation):
    check_case(shape, (variant,), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_alone_in_many_blocks(variant, dtype, implementation):
    check_case(LARGE, (variant,), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", pairs(), ids="+".join)
def test_pairwise(pair, dtype, implementation):
    check_case(CROSS, pair, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "causal", "window", "sinks", "bias", "softcap", "mask"])
@every_shape
def test_dropout(shape, variant, dtype, implementation):
    """The backward pass draws the mask of the forward pass."""
    q, k, v, arguments, _ = case(shape, (variant,), dtype, telling=False)
    arguments = {**arguments, "dropout": 0.3, "seed": 2**63 + 5}
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    check(run(q, k, v, dout, dlse, arguments), q, k, v, dout, dlse, arguments, telling=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name, dtype, implementation):
    shape = SQUARE._replace(len_q=300, len_k=300)
    this = case(shape, ("plain",), dtype)
    arguments = {"mask": STRUCTURES[name](shape, np.random.default_rng(0))}
    dout, dlse = cotangents(this.q, this.v, np.random.default_rng(1))
    got = run(this.q, this.k, this.v, dout, dlse, arguments)
    check(got, this.q, this.k, this.v, dout, dlse, arguments, telling=False)


@pytest.mark.parametrize("variant", ["plain", "causal", "t5_bias", *DIFFERENTIABLE])
def test_finite_differences(variant, implementation):
    """Each gradient is the slope of the scalar sum(dout * out) + sum(dlse * lse)."""
    this = case(SQUARE._replace(len_q=9, len_k=9), (variant,), "float64")
    rng = np.random.default_rng(0)
    dout, dlse = cotangents(this.q, this.v, rng)
    inputs = {"q": this.q, "k": this.k, "v": this.v, "scale": 0.3}
    inputs |= {name: np.asarray(x, float) for name, x in this.arguments.items() if name in OPTIONAL}
    fixed = {name: x for name, x in this.arguments.items() if name not in OPTIONAL}
    need = [f"d{name}" for name in inputs]

    def loss(inputs):
        inputs = {**inputs, "scale": float(inputs["scale"])}
        out, lse = fastattn.attention(**inputs, **fixed, return_lse=True)
        return (out * dout).sum() + (lse * dlse).sum()

    q, k, v = (inputs.pop(name) for name in "qkv")
    got = run(q, k, v, dout, dlse, {**inputs, **fixed}, need)
    inputs |= {"q": q, "k": k, "v": v}
    for name, x in inputs.items():
        step = 1e-5 * rng.standard_normal(np.shape(x))
        slope = (loss({**inputs, name: x + step}) - loss({**inputs, name: x - step})) / 2
        np.testing.assert_allclose((got[f"d{name}"] * step).sum(), slope, rtol=1e-6, err_msg=name)


def test_nan_reaches_the_gradients_of_those_who_attend_it(implementation):
    """A causal row of NaN: later rows and the keys that they attend are NaN, what it cannot touch is not."""
    shape = Shape("", batch=1, heads_q=1, heads_kv=1, len_q=200, len_k=200, head_dim=8)
    q, k, v, arguments, _ = case(shape, ("causal",), "float32")
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout)):
        inputs = {"q": q, "k": k, "v": v, "dout": dout, name: x.copy()}
        inputs[name][..., 150, :] = np.nan
        got = run(**inputs, dlse=dlse, arguments=arguments, need=["dq", "dk", "dv"])
        rows = slice(150, None) if name in "kv" else slice(150, 151)
        others = np.delete(np.arange(200), np.arange(200)[rows])
        assert np.isnan(got["dq"][..., rows, :]).all(), name
        assert np.isfinite(got["dq"][..., others, :]).all(), name
        if name in "kv":
            assert np.isnan(got["dk"][..., 150, :]).all(), name
        else:
            assert np.isnan(got["dk"][..., :151, :]).all(), name
            assert np.isfinite(got["dk"][..., 151:, :]).all(), name


@pytest.mark.parametrize("rows", [1, 3, 19])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_key_whose_score_is_minus_infinity_is_attended(implementation, dtype, rows):
    """It has no gradients that are numbers, whether or not a mask hides something of other rows."""
    q, k, v, dout = (
        np.full((1, n, 4), x, as_dtype(dtype)) for n, x in ((20, -1), (1, np.inf), (1, 1), (20, 1))
    )
    mask = np.arange(20)[:, None] < 19  # the last row attends nothing
    out, lse = fastattn.attention(q, k, v, mask=mask, return_lse=True)
    (whole,) = attention_backward(dout, q, k, v, out, lse, mask=mask, need=("dq",))
    some = np.s_[:, :rows]
    (alone,) = attention_backward(dout[some], q[some], k, v, out[some], lse[some], need=("dq",))
    assert np.isnan(alone.astype(float)).all()
    assert np.isnan(whole[:, :19].astype(float)).all()
    assert not whole[:, 19].any()


@pytest.mark.parametrize("variant", MODIFIED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [LARGE, SQUARE, FEW], ids=lambda shape: shape.name)
def test_threads_change_no_bit(shape, variant, dtype, implementation):
    q, k, v, arguments, _ = case(shape, (variant,), dtype, telling=False)
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    one = run(q, k, v, dout, dlse, arguments, num_threads=1)
    for num_threads in (2, 3, 7):
        other = run(q, k, v, dout, dlse, arguments, num_threads=num_threads)
        assert_same_bits(map(np.asarray, other.values()), map(np.asarray, one.values()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["plain", "causal", "kv_lengths", "sinks"])
def test_a_batch_of_one_is_a_row_of_the_batch(variant, dtype, implementation):
    q, k, v, arguments, _ = case(CROSS, (variant,), dtype, telling=False)
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    names = ["dq", "dk", "dv"]
    whole = run(q, k, v, dout, dlse, arguments, names)
    for b in range(CROSS.batch):
        row = slice(b, b + 1)
        alone = {name: x[row] if name == "kv_lengths" else x for name, x in arguments.items()}
        got = run(q[row], k[row], v[row], dout[row], dlse[row], alone, names)
        assert_same_bits(got.values(), [x[row] for x in whole.values()])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("len_q", range(1, 9))
def test_where_one_key_has_all_the_weight_of_few_queries_dv_is_dout(len_q, dtype, implementation):
    """However large lse is: its last bit is 1e-5 here in float32."""
    rng = np.random.default_rng(0)
    q = 4 * rng.standard_normal((2, 3, len_q, 72)).astype(dtype)
    k = rng.standard_normal((2, 3, 300, 72)).astype(dtype)
    k[..., 100 : 100 + len_q, :] = q
    dout, dlse = cotangents(q, k, rng)
    got = run(q, k, k, dout, dlse, {}, ["dv"])["dv"][..., 100 : 100 + len_q, :]
    np.testing.assert_allclose(got, dout, rtol=2 * np.finfo(dtype).eps)


@pytest.mark.parametrize("len_q", [3, 67])
def test_parts_that_share_out_and_lse_give_the_gradients_of_the_whole(len_q, implementation):
    """Their probabilities are those of the whole, and do not become 1 in sum."""
    q, k, v, _, _ = case(SQUARE._replace(len_q=len_q), ("plain",), "float64")
    dout, _ = cotangents(q, v, np.random.default_rng(0))
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    whole = attention_backward(dout, q, k, v, out, lse)
    for part in (slice(30), slice(30, None), slice(66)):
        got = attention_backward(dout, q, k[..., part, :], v[..., part, :], out, lse)
        for x, y in zip(got[1:], whole[1:], strict=True):
            np.testing.assert_allclose(x, y[..., part, :], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_part_of_the_keys_gives_the_sinks_of_the_whole(dtype, implementation):
    """out and lse are those of the whole, also for rows that attend none of the part, as in compositions."""
    q, k, v, _, _ = case(SQUARE, ("plain",), dtype)
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    sinks = np.asarray([0.5, -1, 2], dtype)
    out, lse = fastattn.attention(q, k, v, sinks=sinks, return_lse=True)
    [whole] = attention_backward(dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, need=("dsinks",))
    for part in ({"kv_lengths": 0}, {"row_ranges": (np.zeros(67, int), np.arange(67))}):
        [got] = attention_backward(dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, need=("dsinks",), **part)
        assert_same_bits([got], [whole])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", RAGGED.values(), ids=RAGGED)
def test_ragged_sequences_have_the_gradients_of_their_own_calls(options, dtype, implementation):
    lengths_q, lengths_k = [5, 0, 70, 1, 40], [9, 4, 70, 0, 133]
    begins_q, begins_k = (np.append(0, np.cumsum(x)) for x in (lengths_q, lengths_k))
    shape = Shape("", 1, 4, 2, int(begins_q[-1]), int(begins_k[-1]), 24, 20)
    this = case(shape, ("plain",), dtype)
    dout, dlse = cotangents(this.q, this.v, np.random.default_rng(0))
    q, k, v, ragged_dout = (x[0].swapaxes(0, 1) for x in (this.q, this.k, this.v, dout))
    out, lse = fastattn.varlen_attention(q, k, v, begins_q, begins_k, return_lse=True, **options)
    need = needed(options)
    got = varlen_attention_backward(
        ragged_dout, q, k, v, out, lse, begins_q, begins_k, dlse=dlse[0], need=need, **options
    )
    got = dict(zip(need, got, strict=True))
    totals = dict.fromkeys(need[3:], 0.0)
    bounds = zip(*(pairwise(x) for x in (begins_q, begins_k)), strict=True)
    for i, ((q0, q1), (k0, k1)) in enumerate(bounds):
        arrays = this.q[:, :, q0:q1], this.k[:, :, k0:k1], this.v[:, :, k0:k1], dout[:, :, q0:q1]
        arrays = *arrays, dlse[:, :, q0:q1]
        if "dropout" in options:  # which counts heads over the batch: this is the last item of as many
            batch = run(*(np.repeat(x, i + 1, 0) for x in arrays), options)
            alone = {name: x[-1:] if name in ("dq", "dk", "dv") else 0.0 for name, x in batch.items()}
        else:
            alone = run(*arrays, options)
        if q1 > q0:
            assert_same_bits([got["dq"][q0:q1].swapaxes(0, 1)], [alone["dq"][0]])
        for name in ("dk", "dv"):
            assert_same_bits([got[name][k0:k1].swapaxes(0, 1)], [alone[name][0]])
        for name in totals:
            totals[name] = totals[name] + np.asarray(alone[name], float)
    for name, total in totals.items() if "dropout" not in options else ():
        np.testing.assert_allclose(got[name], total, rtol=1e-4, atol=1e-4)


@every_shape
def test_results_go_into_given_arrays(shape, implementation):
    q, k, v, _, _ = case(shape, ("plain",), "float32")
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    expected = run(q, k, v, dout, dlse, {}, ["dq", "dk", "dv"])
    into = [
        np.empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype).swapaxes(1, 2) for x in (q, k)
    ]
    got = run(q, k, v, dout, dlse, {}, ["dq", "dk", "dv"], into=(*into, None))
    assert got["dq"] is into[0]
    assert got["dk"] is into[1]
    assert_same_bits([np.ascontiguousarray(x) for x in got.values()], expected.values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_broadcast_inputs_have_summed_gradients(dtype, implementation):
    q, k, v, _, _ = case(CROSS, ("plain",), dtype)
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    wide = run(q, *(np.broadcast_to(x[:1], x.shape) for x in (k, v)), dout, dlse, {}, ["dq", "dk", "dv"])
    got = run(q, k[0], v[:1], dout, dlse, {}, ["dq", "dk", "dv"])
    assert_same_bits([got["dq"]], [wide["dq"]])
    assert got["dk"].shape == k[0].shape
    assert got["dv"].shape == v[:1].shape
    for name in ("dk", "dv"):
        total = wide[name].astype(float).sum(0)
        np.testing.assert_allclose(got[name].astype(float).reshape(total.shape), total, rtol=2e-3, atol=2e-3)


def test_a_sum_too_large_for_float16_is_infinite(implementation):
    """Without a warning, as where kernels round."""
    q, dout, k = np.ones((2, 1, 1, 2), np.float16), np.full((2, 1, 1, 2), 6e4, np.float16), np.ones((1, 1, 2))
    k = v = k.astype(np.float16)
    assert (run(q, k, v, dout, np.zeros((2, 1, 1), np.float32), {}, ["dv"])["dv"] == np.inf).all()


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_nothing_to_attend(len_q, len_k, implementation):
    shape = Shape("", 2, 4, 2, len_q, len_k, 8)
    q, k, v, _, _ = case(shape, ("plain",), "float32", telling=False)
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    bias = np.zeros((4, len_q, len_k), np.float32)
    arguments = {"sinks": np.float32([1, 2, 3, 4]), "softcap": 2.0, "bias": bias}
    got = run(q, k, v, dout, dlse, arguments)
    check(got, q, k, v, dout, dlse, arguments, telling=False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "function", [fastattn.attention, functional.sparsemax_attention, functional.talking_heads_attention]
)
def test_softcap_has_slopes_down_to_0(function, dtype, implementation):
    """The slope 1 - tanh(x)^2 has all its digits where it is small, and is 0 where scores are large."""
    q, v = np.ones((1, 1, 1), dtype), np.array([[[0.0], [1.0]]], dtype)
    for large, slope in [(6.0, 4 * np.exp(-24) / (1 + np.exp(-24)) ** 2), (1e30, 0)]:
        k = np.array([[[large], [-0.5]]], dtype)
        out, pullback = vjp(function, q, k, v, scale=1.0, softcap=0.5)
        dq, dk, dsoftcap = pullback(np.ones_like(out), need=("dq", "dk", "dsoftcap"))
        np.testing.assert_allclose(dk[0, 0, 0] / -dk[0, 1, 0] / np.cosh(1) ** 2, slope, rtol=1e-5)
        assert np.isfinite(dq).all()
        assert np.isfinite(dsoftcap)


def test_scale_of_0_has_a_gradient(implementation):
    q, k, v, _, _ = case(SQUARE, ("plain",), "float32")
    dout, dlse = cotangents(q, v, np.random.default_rng(0))
    check(run(q, k, v, dout, dlse, {"scale": 0.0}), q, k, v, dout, dlse, {"scale": 0.0}, telling=False)


def test_a_dlse_beyond_the_type_is_infinite(implementation):
    q, k, v, _, _ = case(SQUARE, ("plain",), "float32")
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    slopes = np.zeros(lse.shape)
    slopes[..., 3] = 1e300
    got = attention_backward(out, q, k, v, out, lse, dlse=slopes)
    slopes[slopes > 0] = np.inf
    for x, y in zip(got, attention_backward(out, q, k, v, out, lse, dlse=slopes), strict=True):
        np.testing.assert_array_equal(x, y)


def test_errors():
    x = np.zeros((2, 4, 8, 16), np.float32)
    out, lse = fastattn.attention(x, x, x, return_lse=True)
    good = {"dout": out, "q": x, "k": x, "v": x, "out": out, "lse": lse}
    for changes, kind, message in [
        ({"dout": out[0]}, ValueError, r"dout has shape \(4, 8, 16\); expected \(2, 4, 8, 16\)"),
        ({"dout": out.astype(float)}, TypeError, "dout has dtype float64; expected float32, as q has"),
        ({"lse": lse[..., :3]}, ValueError, r"lse has shape \(2, 4, 3\)"),
        ({"lse": lse.astype(float)}, TypeError, "lse has dtype float64; expected float32"),
        ({"lse": None}, TypeError, "lse is None; expected an array, as return_lse=True gives it"),
        ({"dlse": np.zeros(3)}, ValueError, r"dlse has shape \(3,\); expected one that fits"),
        ({"need": "dq"}, TypeError, "need is 'dq'; expected a tuple of names"),
        ({"need": ("dx",)}, ValueError, "need has 'dx'; expected dq, dk, dv"),
        ({"need": ("dbias",)}, ValueError, "need has dbias, but bias is not given"),
        ({"need": ("dq", "dq")}, ValueError, "expected each name once"),
        ({"into": (None,)}, ValueError, "into has length 1; expected 3"),
        ({"into": (x, None, None)}, ValueError, r"into\[0\] shares memory with q"),
        ({"into": (np.zeros(3, np.float32), None, None)}, ValueError, r"into\[0\] has shape \(3,\)"),
        ({"need": ("dscale",), "into": (np.zeros(()),)}, TypeError, r"into\[0\] is for dscale, a float"),
        ({"k_scale": 1}, TypeError, "k_scale is not an argument"),
        ({"return_lse": True}, TypeError, "return_lse is not an argument"),
    ]:
        with pytest.raises(kind, match=message):
            attention_backward(**{**good, **changes})
    y = np.zeros_like(x)
    with pytest.raises(ValueError, match=r"into\[1\] shares memory with into\[0\]"):
        attention_backward(**good, into=(y, y, None))


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "changes"),
    [
        ("q", np.float32, (2, 4, 8, 16), {}),
        ("dout", np.float32, (2, 4, 8, 16), {}),
        ("lse", np.float32, (2, 4, 8), {}),
        ("mask", np.bool_, (8, 8), {}),
        ("kv_lengths", np.int64, (2,), {}),
        ("q_offset", np.int64, (2,), {"causal": True}),
        ("row_ranges", np.int64, (2, 1, 8), {}),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_results_share_no_memory_with_what_is_read(name, dtype, shape, changes, wrapped):
    """The memory may come as a view or as a buffer."""
    x = np.ones((2, 4, 8, 16), np.float32)
    out, lse = fastattn.attention(x, x, x, return_lse=True)
    memory = np.zeros(x.nbytes, np.uint8)
    given = memory.view(dtype)[: np.prod(shape)].reshape(shape)
    if name in ("kv_lengths", "q_offset", "row_ranges"):
        if wrapped:
            return  # of these, other arrays are made first
        given[...] = 1
    given = memoryview(given) if wrapped else given
    options = {name: (np.zeros_like(given), given) if name == "row_ranges" else given, **changes}
    arguments = {"dout": out, "q": x, "k": x, "v": x, "out": out, "lse": lse, **options}
    into = (memory.view(np.float32).reshape(x.shape), None, None)
    with pytest.raises(ValueError, match=rf"into\[0\] shares memory with {name};"):
        attention_backward(**arguments, into=into)
    if name not in ("dout", "lse"):
        with pytest.raises(ValueError, match=f"out shares memory with {name};"):
            fastattn.attention(**{"q": x, "k": x, "v": x, **options}, out=into[0])
    assert not wrapped or not memory.any()
