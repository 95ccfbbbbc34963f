"""Every error of every public function: its type, and that it names function, argument and what came."""

import inspect
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import functional, grad, ops
from fastattn.grad import vjp
from fastattn.layers import KVCache


class Bad(NamedTuple):
    """A call that must fail: the error, a pattern for its message, and the wrong arguments."""

    error: type
    message: str
    arguments: dict


def bad(error, message, **arguments):
    return Bad(error, message, arguments)


def floats(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class Tensor:
    """An array whose conversion fails, as that of a torch tensor in bfloat16 does."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


class Broken:
    """An integer by its class, which fails when it is asked for its value."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("nothing there")


SHAPE = (2, 4, 5, 8)  # batch, heads, length, head_dim
Q = floats(*SHAPE)
SHARED = floats(*SHAPE)
MASKED = np.ma.masked_array(Q)
LONGER = floats(2, 4, 6, 8)
TURNED = r"\(of arrays \(..., length, heads, head_dim\): x.transpose\(0, 2, 1, 3\)\)$"
ONE_EACH = r"expected one number, or one for each sequence, shape \(2,\)$"

BAD_CALLS = [
    bad(TypeError, "q has dtype int64; expected float32, float64, float16 or bfloat16",
        q=np.ones(SHAPE, int)),
    bad(TypeError, "k is None; expected an array", k=None),
    bad(TypeError, "v is of type list and holds NoneType, float; expected an array", v=[[1.0, None]]),
    bad(TypeError, "q is of dtype object and holds float; expected an array of one", q=Q.astype(object)),
    bad(TypeError, r"k is of type KVCache; expected an array \(append returns its arrays: .*append\(k, v\)",
        k=KVCache()),
    bad(TypeError, "mask is {}; expected an array", mask={}),
    bad(TypeError, r"mask is causal, not called; .* such as masks.causal\(\)",
        mask=fastattn.masks.causal),
    bad(TypeError, r"mask is a function; .* as masks.compile\(f, shape\) makes of f\(b, h, i, j\)$",
        mask=lambda b, h, i, j: i >= j),
    bad(TypeError, "q has dtype", q=Q.astype(np.longdouble)),
    bad(TypeError, "q has dtype <U4", q="text"),
    bad(TypeError, "q is of type list; expected an array", q=[[1.0], [1.0, 2.0]]),
    bad(TypeError, r"q is of type Tensor; expected an array \(.*BFloat16; .float\(\) makes it", q=Tensor()),
    bad(TypeError, "q is a masked array", q=np.ma.masked_array(Q)),
    bad(TypeError, "v is a masked array", v=np.ma.masked_array(Q)),
    bad(TypeError, "q is a list that holds masked arrays; expected plain ones", q=list(MASKED)),
    bad(TypeError, "k is a tuple that holds masked arrays", k=(MASKED[0], Q[1])),
    bad(TypeError, "v is a list that holds masked arrays", v=[Q[0].tolist(), [Q[1, 0], *MASKED[1, 1:]]]),
    bad(TypeError, "mask is a list that holds masked arrays", mask=[[np.ma.ones(5, bool)] * 5]),
    bad(TypeError, "kv_lengths is of type list; expected an array .*masked", kv_lengths=[np.ma.masked, 5]),
    bad(ValueError, r"q has shape \(\); expected \(..., heads, length, head_dim\)", q=np.float32(1)),
    bad(ValueError, r"k has shape \(8,\)", k=floats(8)),
    bad(TypeError, "q, k and v have dtypes float32, float64 and float32; .* with k_scale and v_scale$",
        k=Q.astype(np.float64)),
    bad(TypeError, r"q, k and v have dtypes float32, float32 and float64; .*: np.array\(v, np.float32\)\)$",
        v=Q.tolist()),
    bad(TypeError, "q, k and v have dtypes float16, float32 and float32", q=Q.astype(np.float16)),
    bad(ValueError, r"k has a head_dim of 7, shape \(2, 4, 5, 7\); expected a head_dim of 8, as q has",
        k=floats(2, 4, 5, 7)),
    bad(ValueError, r"v has a length of 6, shape \(2, 4, 6, 8\); expected a length of 5, as k has",
        v=floats(2, 4, 6, 8)),
    bad(ValueError, r"v has 2 heads, shape \(2, 2, 5, 8\); expected 4 heads, as k has", v=floats(2, 2, 5, 8)),
    bad(ValueError, r"q has 6 heads, shape \(2, 6, 5, 8\); expected a multiple of k's 4 heads",
        q=floats(2, 6, 5, 8)),
    bad(ValueError, r"q has 2 heads, shape \(2, 2, 5, 8\); expected a multiple", q=floats(2, 2, 5, 8)),
    bad(ValueError, r"q has 1 head, shape \(5, 8\); expected a multiple of k's 4 heads, shape \(2, 4, 5, 8\)",
        q=Q[0, 0]),
    bad(ValueError, rf"q has 6 heads, shape .*; expected a multiple of k's 5 heads, shape .* {TURNED}",
        q=floats(2, 6, 4, 8), k=floats(2, 5, 4, 8), v=floats(2, 5, 4, 8)),
    bad(ValueError, r"q has 6 heads, shape .*; expected a multiple of k's 5 heads, shape \(2, 5, 3, 8\)$",
        q=floats(2, 6, 4, 8), k=floats(2, 5, 3, 8), v=floats(2, 5, 3, 8)),
    bad(ValueError, r"q has 6 heads, .*: x.swapaxes\(-3, -2\)\)$",
        q=floats(6, 4, 8), k=floats(5, 4, 8), v=floats(5, 4, 8)),
    bad(ValueError, r"k has a head_dim of 7, shape \(5, 7\); expected a head_dim of 8, as q has",
        k=floats(5, 7)),
    bad(ValueError, r"v has 1 head, shape \(5, 8\); expected 4 heads, as k has", v=Q[0, 0]),
    bad(ValueError, "q has 0 heads, shape .*; expected at least 1", q=floats(2, 0, 5, 8)),
    bad(ValueError, "k has 0 heads, shape", k=floats(2, 0, 5, 8), v=floats(2, 0, 5, 8)),
    bad(ValueError, "v has a head_dim of 0, shape", v=floats(2, 4, 5, 0)),
    bad(ValueError, "q has a head_dim of 0, shape .*; expected at least 1",
        q=floats(2, 4, 5, 0), k=floats(2, 4, 5, 0)),
    bad(ValueError, r"q, k and v have batch dimensions \(3,\), \(2,\) and \(2,\)", q=floats(3, 4, 5, 8)),
    bad(ValueError, r"q, k and v have batch dimensions \(2,\), \(2,\) and \(3,\)", v=floats(3, 4, 5, 8)),
    bad(TypeError, r"mask has dtype int64; expected bool, .* attends \(mask != 0, where 1 attends\)$",
        mask=np.ones((5, 5), int)),
    bad(TypeError, "mask has dtype float32; expected bool.*bias=", mask=floats(5, 5)),
    bad(ValueError, r"mask has shape \(5, 6\); expected .* \(2, 4, 5, 5\)", mask=np.ones((5, 6), bool)),
    bad(ValueError, r"mask has shape .* = \(2, 4, 5, 5\)$", mask=np.ones((2, 1, 5), bool)),
    bad(ValueError, r"mask has shape \(2, 5\); .* mask\[:, None, None, :\]\)$", mask=np.ones((2, 5), bool)),
    bad(ValueError, r"mask has shape \(2, 5, 5\); .* mask\[:, None, :, :\]\)$",
        mask=np.ones((2, 5, 5), bool)),
    bad(ValueError, "mask has shape", mask=np.ones((1, 2, 4, 5, 5), bool)),
    bad(TypeError, "mask is a masked array", mask=np.ma.ones((5, 5), bool)),
    bad(TypeError, "bias has dtype bool; expected float32.*mask=", bias=np.ones((5, 5), bool)),
    bad(TypeError, "bias has dtype float64; expected float32$", bias=np.ones((5, 5))),
    bad(TypeError, "bias has dtype float16; expected float32$", bias=np.ones((5, 5), np.float16)),
    bad(ValueError, r"bias has shape \(4, 5\); expected", bias=floats(4, 5)),
    bad(ValueError, r"bias has shape \(2, 5\); .*: bias\[:, None, None, :\]\)$", bias=floats(2, 5)),
    bad(ValueError, "scale is nan; expected a number that is finite", scale=np.nan),
    bad(ValueError, "scale is 1e.39", scale=1e39),
    bad(TypeError, "scale is '0.5'; expected a real number", scale="0.5"),
    bad(TypeError, "scale is True; expected a real number", scale=True),
    bad(TypeError, r"scale is an array of shape \(4,\)", scale=floats(4)),
    bad(TypeError, "scale is .*Broken.*; expected a real number", scale=Broken()),
    bad(ValueError, "softcap is 0.0; expected a number above 0", softcap=0.0),
    bad(ValueError, "softcap is -1", softcap=-1),
    bad(ValueError, "softcap is 1e-39; expected at least 1.175.*e-38, the least normal number in float32",
        softcap=1e-39),
    bad(TypeError, r"softcap is 'x{35}\.\.\.'; expected a real number", softcap="x" * 100),
    bad(TypeError, "alibi_slopes has dtype bool; expected .* or integers", alibi_slopes=np.ones(4, bool)),
    bad(ValueError, r"alibi_slopes has shape \(3,\); expected .* \(2, 4\)", alibi_slopes=floats(3)),
    bad(TypeError, "sinks has dtype bool; expected .* or integers", sinks=np.ones(4, bool)),
    bad(ValueError, r"sinks has shape \(4, 4\)", sinks=floats(4, 4)),
    bad(TypeError, "causal is 1; expected True or False", causal=1),
    bad(TypeError, r"causal is an array of shape \(5, 5\)", causal=np.ones((5, 5), bool)),
    bad(TypeError, r"window is 3; expected a pair \(left, right\) .*, as \(2, 0\) for the last 3", window=3),
    bad(TypeError, r"window is \(1, 2, 3\)", window=(1, 2, 3)),
    bad(TypeError, r"window is an array of shape \(3,\) and dtype int64; expected a pair",
        window=np.arange(3)),
    bad(TypeError, r"window\[0\] is 1.0; expected an integer", window=np.ones(2)),
    bad(TypeError, r"window is an array of shape .* and dtype float32; expected a pair", window=Q),
    bad(ValueError, r"backend is an array of shape .* and dtype float32; expected", backend=Q),
    bad(ValueError, r"window\[1\] is -1; expected at least 0, or None .*, where flash-attn has -1",
        window=(3, -1)),
    bad(ValueError, r"window\[1\] is -2; expected at least 0, or None for no bound$", window=(3, -2)),
    bad(TypeError, r"window\[0\] is 1.5; expected an integer", window=(1.5, 0)),
    bad(TypeError, r"window\[0\] is True; expected an integer", window=(True, 0)),
    bad(TypeError, "kv_lengths has dtype float64; expected integers", kv_lengths=[3.0, 5.0]),
    bad(ValueError, rf"kv_lengths has shape \(3,\); {ONE_EACH}", kv_lengths=[1, 2, 3]),
    bad(ValueError, rf"kv_lengths has shape \(1,\); {ONE_EACH}", kv_lengths=[3]),
    bad(ValueError, rf"q_offset has shape \(2, 1\); {ONE_EACH}", q_offset=[[0], [0]]),
    bad(ValueError, rf"n of first_keys\(\) has shape \(1,\); {ONE_EACH}",
        mask=fastattn.masks.first_keys([3])),
    bad(ValueError, "kv_lengths has 6; expected 0 to 5", kv_lengths=[5, 6]),
    bad(ValueError, "kv_lengths has -1; expected 0 to 5", kv_lengths=-1),
    bad(TypeError, "q_offset has dtype float64; expected integers", q_offset=0.0),
    bad(ValueError, r"q_offset has shape \(3,\)", q_offset=[0, 0, 0]),
    bad(ValueError, "q_offset has 1152921504606846976; expected", q_offset=2**60),
    bad(ValueError, "kv_lengths has 3 for 5 queries.*q_offset=0", kv_lengths=[5, 3], causal=True),
    bad(ValueError, "kv_lengths has 3.*q_offset=0", kv_lengths=[5, 3], window=(2, None)),
    bad(ValueError, "kv_lengths has 3.*q_offset=0", kv_lengths=[5, 3], alibi_slopes=floats(4)),
    bad(TypeError, r"row_ranges is of type ndarray; expected \(begin, end\)",
        row_ranges=np.zeros((2, 5), int)),
    bad(TypeError, r"row_ranges has length 1; expected 2, \(begin, end\)", row_ranges=(0,)),
    bad(TypeError, r"row_ranges\[0\] has dtype float64; expected integers", row_ranges=(0.0, 5)),
    bad(ValueError, r"row_ranges\[1\] has shape \(6,\)", row_ranges=(0, np.arange(6))),
    bad(ValueError, "num_threads is 0; expected 1 to", num_threads=0),
    bad(ValueError, "num_threads is 1000000000; expected 1 to", num_threads=10**9),
    bad(TypeError, "num_threads is 2.0; expected an integer", num_threads=2.0),
    bad(TypeError, "num_threads is True; expected an integer", num_threads=True),
    bad(TypeError, "return_lse is 1; expected True or False", return_lse=1),
    bad(ValueError, "backend is 'cuda'; expected one of compiled, numpy", backend="cuda"),
    bad(TypeError, "out is of type list; expected an ndarray", out=[1.0]),
    bad(TypeError, "out is of type MaskedArray", out=np.ma.masked_array(Q.copy())),
    bad(TypeError, "out has dtype float64; expected q's, float32$", out=floats(*SHAPE, dtype=np.float64)),
    bad(TypeError, "out has dtype >f4; expected q's, float32 in native byte order", out=Q.astype(">f4")),
    bad(ValueError, r"out has shape \(2, 4, 5, 9\); expected \(2, 4, 5, 8\)", out=floats(2, 4, 5, 9)),
    bad(ValueError, r"out has shape \(5, 8\)", out=floats(5, 8)),
    bad(ValueError, "out is read-only", out=np.broadcast_to(np.float32(0), SHAPE)),
    bad(ValueError, "out .*aligned", out=np.zeros(1281, np.uint8)[1:].view(np.float32).reshape(SHAPE)),
    bad(ValueError, "out has strides .* last axis to be contiguous", out=floats(2, 4, 5, 16)[..., ::2]),
    bad(ValueError, "out has strides .* no two elements to overlap",
        out=np.lib.stride_tricks.as_strided(floats(400), SHAPE, (640, 160, 16, 4))),
    bad(ValueError, "out shares memory with q", q=SHARED, out=SHARED),
    bad(ValueError, "out shares memory with v", v=SHARED, out=SHARED),
    bad(ValueError, "out shares memory with q", out=LONGER[:, :, :5], q=LONGER[:, :, 1:]),
    bad(ValueError, "out shares memory with bias", out=SHARED, bias=SHARED[..., :5]),
    bad(ValueError, "out shares memory with mask", out=SHARED, mask=SHARED.view(bool)[0, 0, 0, :5]),
    bad(ValueError, "out shares memory with sinks", out=SHARED, sinks=SHARED[0, 0, 0, :4]),
    bad(ValueError, "out shares memory with alibi_slopes", out=SHARED, alibi_slopes=SHARED[0, 0, 0, :4]),
]  # fmt: skip


def messages(calls):
    """Parametrise over the calls of a table, named by their messages."""
    names = [call.message.replace("\\", "")[:60] for call in calls]
    return pytest.mark.parametrize("call", calls, ids=names)


@messages(BAD_CALLS)
@pytest.mark.parametrize("function", [fastattn.attention, fastattn.explain])
def test_attention(call, function):
    with pytest.raises(call.error, match=rf"^{function.__name__}\(\): {call.message}") as caught:
        function(**{"q": Q, "k": Q, "v": Q, **call.arguments})
    assert re.fullmatch(r"(?=.{,299}$).*expected.*", str(caught.value))  # one line, that says what is wanted


# It has no values, and nothing that says how to compute.
NOT_FOR_WEIGHTS = {"k", "v", "out", "num_threads", "return_lse", "backend"}
WEIGHTS = [
    call
    for call in BAD_CALLS
    if not NOT_FOR_WEIGHTS & call.arguments.keys() and not call.message.startswith("q, k and v")
] + [
    bad(TypeError, "q and k have dtypes float32 and float64", k=Q.astype(float)),
    bad(ValueError, r"q and k have batch dimensions \(3,\) and \(2,\)", q=floats(3, 4, 5, 8)),
]


@messages(WEIGHTS)
def test_attention_weights(call):
    with pytest.raises(call.error, match=rf"^attention_weights\(\): {call.message}"):
        fastattn.attention_weights(**{"q": Q, "k": Q, **call.arguments})


def test_nothing_is_written_before_everything_is_checked():
    out = np.full(SHAPE, 7, np.float32)
    with pytest.raises(ValueError, match="num_threads"):
        fastattn.attention(Q, Q, Q, out=out, num_threads=0)
    assert (out == 7).all()


class Alarm:
    """A number during whose conversion a signal's handler raises."""

    def __float__(self):
        raise TimeoutError("enough")

    def __array__(self, dtype=None, copy=None):
        raise TimeoutError("enough")


@pytest.mark.parametrize("name", ["q", "mask", "scale", "softcap", "sinks", "kv_lengths"])
def test_what_no_conversion_raises_is_passed_on(name):
    with pytest.raises(TimeoutError, match=r"^enough$"):
        fastattn.attention(**{"q": Q, "k": Q, "v": Q, name: Alarm()})


def test_recurrences_know_the_other_layout():
    x = floats(2, 5, 4, 8)
    with pytest.raises(ValueError, match=rf"^linear_attention\(\): v has a length of 8; .* {TURNED}"):
        functional.linear_attention(x, x, floats(2, 5, 8, 8), rule="linear")


@pytest.mark.parametrize(
    ("function", "more", "name"),
    [
        (fastattn.attention, [np.ones((5, 5), bool)], "mask="),
        (fastattn.attention, [fastattn.masks.causal()], "mask="),
        (fastattn.attention, [floats(5, 5)], "bias="),
        (fastattn.attention, [True], "causal="),
        (fastattn.attention, [0.0, None, True], "dropout= or scale="),  # flash-attn's order
        (fastattn.varlen_attention, [[0, 5], [0, 5], True], "causal="),
        (functional.sigmoid_attention, [np.ones((5, 5), bool)], "mask="),
        (functional.top_k_attention, [7.5], "top_k="),
    ],
)
def test_options_are_keywords(function, more, name):
    expected = rf"^{function.__name__}\(\): \d arguments are given by position; expected .*, as {name}$"
    with pytest.raises(TypeError, match=expected):
        function(Q, Q, Q, *more)


def test_a_backend_that_is_missing():
    if fastattn.show_config()["isas_available"]:
        assert fastattn.attention(Q, Q, Q, backend="compiled").shape == SHAPE
    else:
        expected = r"^attention\(\): backend is 'compiled', but there are no kernels: .*\. (Install|Compile) "
        with pytest.raises(ValueError, match=expected):
            fastattn.attention(Q, Q, Q, backend="compiled")


SDPA = [
    bad(ValueError, r"key has shape \(8,\)", key=floats(8)),
    bad(ValueError, "seed is None; expected an integer, 0 to 18446744073709551615", dropout_p=0.1),
    bad(ValueError, "dropout_p is 1.0; expected at least 0 and less than 1", dropout_p=1.0, seed=1),
    bad(TypeError, "dropout_p is 'no'; expected a real number", dropout_p="no"),
    bad(ValueError, "dropout_p is nan", dropout_p=np.nan),
    bad(TypeError, "is_causal is an array", is_causal=np.ones((5, 5), bool)),
    bad(ValueError, "attn_mask is given and is_causal", attn_mask=np.ones((5, 5), bool), is_causal=True),
    bad(TypeError, "enable_gqa is 1; expected True or False", enable_gqa=1),
    bad(ValueError, "query, key and value have 8, 4 and 4 heads; expected .* enable_gqa=True",
        query=floats(2, 8, 5, 8)),
    bad(ValueError, f"query, key and value have 6, 5 and 5 heads; .* {TURNED}",
        query=floats(2, 6, 4, 8), key=floats(2, 5, 4, 8), value=floats(2, 5, 4, 8)),
    bad(TypeError, r"attn_mask has dtype int64; expected float32 or bool \(attn_mask != 0, where 1 att",
        attn_mask=np.ones((5, 5), int)),
    bad(TypeError, "attn_mask has dtype float16", attn_mask=np.ones((5, 5), np.float16)),
    bad(ValueError, r"attn_mask has shape \(5, 6\)", attn_mask=np.ones((5, 6), bool)),
    bad(ValueError, r"attn_mask has shape \(5, 6\)", attn_mask=floats(5, 6)),
    bad(ValueError, r"attn_mask has shape \(2, 5\); .* attn_mask\[:, None, None, :\]\)$",
        attn_mask=floats(2, 5)),
    bad(ValueError, "key has a head_dim of 7, shape .* expected a head_dim of 8, as query has",
        key=floats(2, 4, 5, 7)),
    bad(ValueError, "query has 3 heads, .* expected a multiple of key's 4 heads",
        query=floats(2, 3, 5, 8), enable_gqa=True),
    bad(ValueError, "query, key and value have batch dimensions", key=floats(3, 4, 5, 8)),
    bad(TypeError, "query, key and value have dtypes float32, float64 and float32", key=Q.astype(float)),
]  # fmt: skip


@messages(SDPA)
def test_scaled_dot_product_attention(call):
    with pytest.raises(call.error, match=rf"^scaled_dot_product_attention\(\): {call.message}"):
        fastattn.scaled_dot_product_attention(**{"query": Q, "key": Q, "value": Q, **call.arguments})


LSE = floats(*SHAPE[:-1])
MERGES = [
    bad(TypeError, "outs is of type int", outs=3),
    bad(TypeError, "lses is of type list_iterator", lses=iter([LSE])),
    bad(TypeError, "lses is of type ndarray; expected a list of arrays", lses=np.array(1.0)),
    bad(ValueError, "outs has length 2 and lses 1; expected the same", outs=[Q, Q], lses=[LSE]),
    bad(ValueError, "outs has length 0 and lses 0; expected .* at least 1", outs=[], lses=[]),
    bad(TypeError, r"outs\[1\] has dtype int64", outs=[Q, np.ones(SHAPE, int)]),
    bad(TypeError, r"lses\[0\] has dtype int64", lses=[np.ones(SHAPE[:-1], int), LSE]),
    bad(TypeError, r"outs\[1\] has dtype float64; expected float32", outs=[Q, Q.astype(float)]),
    bad(ValueError, r"outs\[1\] has shape \(1, 4, 5, 8\); expected \(2, 4, 5, 8\)", outs=[Q, Q[:1]]),
    bad(ValueError, r"lses\[1\] has shape \(2, 4, 5, 8\); expected \(2, 4, 5\)", lses=[LSE, Q]),
    bad(ValueError, r"outs\[0\] has shape \(\)", outs=[np.float32(1), Q]),
]  # fmt: skip


@messages(MERGES)
def test_merge_states(call):
    with pytest.raises(call.error, match=rf"^merge_states\(\): {call.message}"):
        fastattn.merge_states(**{"outs": [Q, Q], "lses": [LSE, LSE], **call.arguments})


@messages([
    bad(ValueError, "num_threads is 0; expected 1 to", num_threads=0),
    bad(ValueError, "num_threads is -1", num_threads=-1),
    bad(TypeError, "num_threads is 1.0; expected an integer", num_threads=1.0),
    bad(TypeError, "num_threads is '2'", num_threads="2"),
    bad(TypeError, "num_threads is True", num_threads=True),
    bad(TypeError, "num_threads is None", num_threads=None),
])  # fmt: skip
def test_set_num_threads(call):
    before = fastattn.get_num_threads()
    with pytest.raises(call.error, match=rf"^set_num_threads\(\): {call.message}"):
        fastattn.set_num_threads(**call.arguments)
    assert fastattn.get_num_threads() == before


# Types of one byte, one of them of kind "f": taken for bfloat16 they would be read past their ends.
NARROW = [dtype for name in ml_dtypes.__all__ if isinstance(dtype := getattr(ml_dtypes, name), type)
          and issubclass(dtype, np.generic) and dtype is not ml_dtypes.bfloat16]  # fmt: skip


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.__name__)
def test_the_other_types_of_ml_dtypes(dtype):
    assert len(NARROW) > 5
    x, good = np.zeros((4, 4), dtype), np.ones((4, 4), np.float32)
    packed = ops.pack(good)
    for call in (
        lambda: fastattn.attention(x, x, x),
        lambda: fastattn.attention(good, x, x),
        lambda: fastattn.attention(good, good, good, bias=x),
        lambda: fastattn.attention(good, good, good, sinks=x[0, :1]),
        lambda: fastattn.attention_weights(x, x),
        lambda: fastattn.scaled_dot_product_attention(x, x, x),
        lambda: fastattn.merge_states([x], [good[0]]),
        lambda: ops.linear(x, packed),
        lambda: ops.linear(good, packed, bias=x[0]),
        lambda: ops.linear(good, packed, residual=x),
        lambda: ops.pack(x),
        lambda: ops.layer_norm(x),
        lambda: ops.layer_norm(good, x[0]),
        lambda: ops.rms_norm(x),
        lambda: ops.softmax(x),
        lambda: ops.activate(x, "relu"),
        lambda: ops.embedding([0], x),
    ):
        with pytest.raises(TypeError, match=f"has dtype {np.dtype(dtype)}; expected"):
            call()


NEEDING = [
    getattr(module, name)
    for module in (functional, grad)
    for name in module.__all__
    if callable(getattr(module, name)) and "need" in inspect.signature(getattr(module, name)).parameters
]
# A right value for each required parameter, by its name; some functions want others than most.
RIGHT = {
    "lse": LSE, "log_decay": -LSE, "beta": LSE, "rule": "linear", "top_k": 1, "window": 1,
    "activation": "gelu", "cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 4],
    "key_weight": floats(4, 8, 8), "value_weight": floats(4, 8, 8), "targets": [0] * 4, "cache": floats(5, 8),
    "weight": ops.pack(floats(5, 5)),
}  # fmt: skip
OTHERS = {
    "additive_attention": {"weight": floats(8)},
    "varlen_attention_backward": dict.fromkeys(("q", "k", "v", "dout", "out"), Q[0]) | {"lse": LSE[0].T},
    "linear": {"dout": LSE[0], "x": LSE[0]},
    "causal_conv1d": {"weight": floats(8, 4)},
    "selected_attention": {"selected": [[[0, 1]]]},
    "deformable_attention": {
        "spatial_shapes": [(1, 5)],
        "locations": floats(2, 4, 3, 2, 2),
        "weights": floats(2, 4, 3, 2),
    },
    "selective_scan": {
        "dt": abs(Q),
        "A": -abs(floats(8, 3)),
        "B": floats(2, 4, 5, 3),
        "C": floats(2, 4, 5, 3),
    },
    "mamba2_scan": {"dt": floats(2, 4, 5), "A": -abs(floats(4))},
    "cross_entropy": {"x": LSE[0]},
}


COMPOSED = [
    getattr(functional, name) for name in functional.__all__ if hasattr(getattr(functional, name), "_vjp")
]


@pytest.mark.parametrize("function", [*NEEDING, *COMPOSED], ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "need",
    [[np.empty((2, 0, 3))], (None,), {"dq"}, "dq"],
    ids=repr,
)
def test_names_of_gradients(need, function):
    """Any other object is refused, an array that compares element by element included."""
    name, right = function.__name__, {**RIGHT, **OTHERS.get(function.__name__, {})}
    required = [x.name for x in inspect.signature(function).parameters.values()
                if x.default is x.empty and x.kind is not x.VAR_KEYWORD]  # fmt: skip
    arguments = {x: right.get(x, Q) for x in required}
    if function in COMPOSED:
        more = {"position_keys": floats(4, 2, 8)} if name == "disentangled_attention" else {}
        out, function = vjp(function, **arguments, **more)
        name, arguments = f"pullback of {name}", {"dout": out}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\(\): need (is|has) .*; expected "):
        function(**arguments, need=need)


def test_a_pair_of_gradients_is_two_arguments():
    (out, lse), pullback = vjp(fastattn.attention, Q, Q, Q, return_lse=True)
    expected = r"^pullback of attention\(\): dout is of type tuple; expected an array \(dmore takes "
    with pytest.raises(TypeError, match=expected):
        pullback((out, lse))
    assert pullback(out, lse)[0].shape == Q.shape


def test_the_gradient_of_rope_has_its_own_name():
    with pytest.raises(ValueError, match=r"^rope\(\): cos has shape .* as in dout, "):
        grad.rope(Q, np.ones((3, 4)), np.ones((3, 4)))
