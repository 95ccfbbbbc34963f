"""Arrays as people have them: strided, reversed, unaligned, foreign, read-only, on disk; and out=."""

import weakref

import numpy as np
import pytest
from dlpack import OnlyDLPack, wrapped
from oracle import assert_same_bits, check, expect, spread_inputs

import fastattn
from fastattn import functional, ops
from fastattn._args.values import as_array
from fastattn._bench.cases import DTYPES, Shape, as_dtype, make_inputs

SHAPE = Shape("inputs", batch=2, heads_q=4, heads_kv=2, len_q=21, len_k=70, head_dim=24)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, **arguments, return_lse=True)


def inputs(dtype="float32", shape=SHAPE):
    return spread_inputs(shape, dtype, np.random.default_rng(0))


def strided(array):
    """Copy the array to every other element of a larger one, along each axis."""
    memory = np.full([2 * n for n in array.shape], 99, array.dtype)
    view = memory[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


def rows_strided(array):
    """Copy the array to rows that lie apart, the head dimension contiguous."""
    memory = np.full((*array.shape[:-1], array.shape[-1] + 3), 99, array.dtype)
    memory[..., :-3] = array
    return memory[..., :-3]


def reversed_axes(array):
    """Copy the array to memory that runs backwards along every axis."""
    back = tuple(slice(None, None, -1) for _ in array.shape)
    return array[back].copy()[back]


def reversed_rows(array):
    """Copy the array to memory that runs backwards along all axes but the last."""
    back = (*(slice(None, None, -1) for _ in array.shape[1:]), slice(None))
    return array[back].copy()[back]


def transposed(array):
    """Copy the array to memory with the outer axes in another order, as in (B, L, H, D)."""
    axes = (0, *range(array.ndim - 2, 0, -1), array.ndim - 1) if array.ndim > 2 else range(array.ndim)
    return array.transpose(axes).copy().transpose(axes)


def fortran(array):
    return np.asfortranarray(array)


def unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    assert view.flags.aligned == (array.itemsize == 1)
    return view


def foreign(array):
    return array.astype(array.dtype.newbyteorder())


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def subclass(array):
    class Mine(np.ndarray):
        pass

    return array.view(Mine)


def as_they_are(array):
    return array


LAYOUTS = [as_they_are, strided, rows_strided, reversed_axes, reversed_rows, transposed, fortran, unaligned,
           foreign, read_only, subclass]  # fmt: skip


@every_dtype
@pytest.mark.parametrize("len_q", [1, 21])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(layout, len_q, dtype, implementation):
    q, k, v = inputs(dtype, SHAPE._replace(len_q=len_q))
    laid_out = [layout(x) for x in (q, k, v)]
    before = [x.tobytes() for x in laid_out]
    got = attention(*laid_out)
    check(got, expect(q, k, v))
    assert [x.tobytes() for x in laid_out] == before, "an input was written to"
    assert type(got[0]) is np.ndarray
    assert got[0].dtype == q.dtype
    assert got[0].flags.c_contiguous
    assert got[0].flags.writeable


@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_one_of_them_laid_out_otherwise(layout, which, implementation):
    arrays = list(inputs())
    expected = expect(*arrays)
    arrays[which] = layout(arrays[which])
    check(attention(*arrays), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_of_the_other_arrays(layout, implementation):
    q, k, v = inputs()
    rng = np.random.default_rng(1)
    arguments = {
        "mask": rng.random((2, 4, 21, 70)) < 0.8,
        "bias": rng.standard_normal((2, 4, 21, 70), np.float32),
        "alibi_slopes": rng.random((2, 4), np.float32),
        "sinks": rng.random((2, 4), np.float32),
        "kv_lengths": rng.integers(40, 70, 2),
    }
    ranges = rng.integers(0, 9, (2, 4, 21)), rng.integers(50, 70, (2, 4, 21))
    got = attention(q, k, v, row_ranges=tuple(map(layout, ranges)),
                    **{name: layout(x) for name, x in arguments.items()})  # fmt: skip
    check(got, expect(q, k, v, row_ranges=ranges, **arguments))


def test_batches_that_broadcast(implementation):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 2, 4, 9, 8), np.float32)
    for k_batch, v_batch in [
        ((), ()),
        ((2,), (2,)),
        ((1, 2), (3, 1)),
        ((3, 1), ()),
        ((1, 1), (2,)),
        ((3, 2), (2,)),
    ]:
        k = rng.standard_normal((*k_batch, 2, 30, 8), np.float32)
        v = rng.standard_normal((*v_batch, 2, 30, 8), np.float32)
        check(attention(q, k, v), expect(q, k, v))
    k, v = (rng.standard_normal((3, 2, 2, 30, 8), np.float32) for _ in range(2))
    check(attention(q[0, 0], k, v), expect(q[0, 0], k, v))
    stretched = [np.broadcast_to(x[:1, :1], x.shape) for x in (q, k, v)]
    check(attention(*stretched), expect(*(x.copy() for x in stretched)))


def test_what_is_not_copied():
    """A transposed (B, L, H, D) array is read in place. explain says what is copied."""
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(0), layout="blhd")
    assert fastattn.explain(q, k, v)["copies"] == ()
    for layout, reason in [(strided, "not contiguous"), (unaligned, "not aligned"), (foreign, "byte order")]:
        copies = fastattn.explain(q, layout(k), v)["copies"]
        assert len(copies) == 1
        assert copies[0].startswith("k")
        assert reason in copies[0]


def test_memory_maps(tmp_path, implementation):
    q, k, v = inputs()
    maps = []
    for name, array in zip("qkv", (q, k, v), strict=True):
        np.save(tmp_path / name, array)
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    got = attention(*maps)
    check(got, expect(q, k, v))
    assert type(got[0]) is np.ndarray


def test_anything_that_becomes_an_array(implementation):
    q, k, v = ([[1.0, 0.5], [0.25, 2.0]] for _ in range(3))
    expected = expect(*map(np.array, (q, k, v)))
    check(attention(q, k, v), expected)
    check(attention(tuple(q), k, np.array(v)), expected)


def outs(like):
    """Arrays that may take a result like `like`, each with the memory that it is a view of."""
    batch, heads, length, dim = like.shape
    yield (memory := np.full(like.shape, 7, like.dtype)), memory
    memory = np.full((batch, heads, length + 2, dim + 6), 7, like.dtype)
    yield memory[:, :, 1:-1, 2:-4], memory
    memory = np.full((length, 2 * heads, batch, dim), 7, like.dtype)
    yield memory[:, ::2].transpose(2, 1, 0, 3), memory
    memory = np.full(like.shape, 7, like.dtype)
    yield memory[::-1, ::-1, ::-1], memory


@every_dtype
def test_out(dtype, implementation):
    q, k, v = inputs(dtype)
    plain, plain_lse = attention(q, k, v)
    for out, memory in outs(plain):
        assert fastattn.attention(q, k, v, out=out) is out
        assert_same_bits([out], [plain])
        returned, lse = attention(q, k, v, out=out)
        assert returned is out
        assert_same_bits([out, lse], [plain, plain_lse])
        out[...] = 7
        assert (memory == 7).all(), "written beside out"


def test_out_of_two_dimensions(implementation):
    q, k, v = (x[0, 0] for x in inputs())
    out = np.empty((21, 24), np.float32)
    assert fastattn.attention(q, k, v, out=out) is out
    check((out, attention(q, k, v)[1]), expect(q, k, v))


def test_out_beside_q_in_one_memory(implementation):
    """A result may lie between the elements of an input if no byte is shared."""
    memory = np.zeros((2, 4, 21, 48), np.float32)
    q, k, v = inputs()
    memory[..., :24] = q
    fastattn.attention(memory[..., :24], k, v, out=memory[..., 24:])
    assert_same_bits([memory[..., 24:]], [fastattn.attention(q, k, v)])
    assert_same_bits([memory[..., :24]], [q])


def test_results_are_new_arrays(implementation):
    q, k, v = inputs()
    out, lse = attention(q, k, v)
    assert out.base is None
    assert lse.base is None
    again = attention(q, k, v)
    assert not np.shares_memory(out, again[0])
    assert not np.shares_memory(lse, again[1])


def test_inputs_are_released(implementation):
    q, k, v = (x.copy() for x in inputs())
    references = [weakref.ref(x) for x in (q, k, v)]
    out = fastattn.attention(q, k, v, causal=True, mask=np.ones((21, 70), bool))
    del q, k, v
    assert [reference() for reference in references] == [None] * 3
    assert np.isfinite(out).all()


@every_dtype
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_mixed_dtypes(dtype, kv_dtype, implementation):
    """A 16-bit cache with float32 queries; every other mixture is an error."""
    q, k, v = make_inputs(SHAPE, dtype, np.random.default_rng(0), kv_dtype=kv_dtype)
    if dtype in ("float32", kv_dtype):
        out, lse = attention(q, k, v)
        assert out.dtype == as_dtype(dtype)
        check((out, lse), expect(q, k, v), telling=dtype == "float32")
    else:
        with pytest.raises(TypeError, match="q, k and v have dtypes"):
            attention(q, k, v)


@every_dtype
@pytest.mark.parametrize("q_dtype", ["float32", "float64"])
def test_values_of_heads_may_have_any_dtype(q_dtype, dtype, implementation):
    """Values of heads in other dtypes act as the same numbers in q's dtype would."""
    q, k, v = inputs(q_dtype)
    values = np.array([0.25, 0.5, 1, -2])
    for name in ("alibi_slopes", "sinks"):
        got = attention(q, k, v, **{name: values.astype(as_dtype(dtype))})
        assert_same_bits(got, attention(q, k, v, **{name: values.astype(q_dtype)}))


INTEGER_VALUES = {
    "alibi_slopes": (lambda x, n: attention(*x, alibi_slopes=n), [2, 1, 0, 1]),
    "sinks": (lambda x, n: attention(*x, sinks=n), [2, 1, 0, -1]),
    "one sink for all": (lambda x, n: attention(*x, sinks=n), 0),
    "log_decay": (lambda x, n: functional.linear_attention(*x, rule="decay", log_decay=n), [0, -1]),
    "beta": (
        lambda x, n: functional.linear_attention(*x, rule="delta", beta=np.broadcast_to(n, (2, 70))),
        0,
    ),
}


@pytest.mark.parametrize("name", INTEGER_VALUES)
def test_integers_do_where_numbers_are_converted_anyway(name, implementation):
    call, values = INTEGER_VALUES[name]
    x = inputs(shape=SHAPE._replace(len_q=70))
    expected = call(x, np.array(values, np.float64))
    for integers in (values, np.array(values, np.int8), np.array(values, ">i4")):
        for one, other in zip(call(x, integers), expected, strict=True):
            assert one.tobytes() == other.tobytes()
    with pytest.raises(TypeError, match=r"has dtype bool; expected .* or integers"):
        call(x, np.array(values, bool))


class Tensor:
    """Arrays of other libraries share their memory through a protocol."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize("wrap", [memoryview, Tensor, OnlyDLPack])
def test_out_shares_memory_through_a_protocol(wrap, implementation):
    memory = np.ones((16, 16), np.float32)
    square, row, other = wrap(memory), wrap(memory[0]), np.ones((16, 16), np.float32)
    packed, zeros = ops.pack(other), np.zeros(16, np.int32)
    for name, call in (
        ("q", lambda: fastattn.attention(square, other, other, out=memory)),
        ("k", lambda: fastattn.attention(other, square, other, out=memory)),
        ("v", lambda: fastattn.attention(other, other, square, out=memory)),
        ("bias", lambda: fastattn.attention(other, other, other, bias=square, out=memory)),
        ("mask", lambda: fastattn.attention(other, other, other, mask=wrap(memory.view(bool)[:, :16]),
                                            out=memory)),
        ("x", lambda: ops.linear(square, packed, out=memory)),
        ("bias", lambda: ops.linear(other, packed, row, out=memory)),
        ("residual", lambda: ops.linear(other, packed, residual=square, out=memory)),
        ("x", lambda: ops.layer_norm(square, out=memory)),
        ("weight", lambda: ops.layer_norm(other, row, out=memory)),
        ("bias", lambda: ops.layer_norm(other, bias=row, out=memory)),
        ("residual", lambda: ops.rms_norm(other, residual=square, out=memory)),
        ("x", lambda: ops.softmax(square, out=memory)),
        ("up", lambda: ops.activate(other, "relu", up=square, out=memory)),
        ("table", lambda: ops.embedding(np.arange(16), square, out=memory)),
        ("ids", lambda: ops.embedding(wrap(zeros), other[:, :1], out=zeros.view(np.float32)[:, None])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"out shares memory with {name};"):
            call()
    assert (memory == 1).all()


def test_dlpack_shares_memory(implementation):
    """Arrays of other libraries, which NumPy knows by DLPack only: as they stand, in any strides."""
    q, k, v = inputs()
    mask, bias = np.arange(70) % 5 > 0, np.linspace(-1, 1, 70, dtype=np.float32)
    options = {"mask": mask, "bias": bias, "sinks": np.ones(4, np.float32), "kv_lengths": np.array([50, 70])}
    expected = attention(q, k, v, **options)
    assert_same_bits(attention(*map(OnlyDLPack, (q, k, v)), **wrapped(options)), expected)
    assert np.shares_memory(as_array("q", OnlyDLPack(q)), q)
    assert not fastattn.explain(OnlyDLPack(q), OnlyDLPack(k), OnlyDLPack(v))["copies"]
    assert any("contiguous" in why for why in fastattn.explain(OnlyDLPack(strided(q)), k, v)["copies"])
    decays, weights = -np.ones(2, np.float32), np.eye(24, dtype=np.float32)
    for call, arrays in (
        (functional.linear_attention, {"q": q[:, :2, :21], "k": k[:, :, :21], "v": v[:, :, :21],
                                       "log_decay": decays}),
        (ops.layer_norm, {"x": q, "weight": weights[0], "bias": weights[1]}),
        (lambda x, weight: ops.linear(x, ops.pack(weight)), {"x": q, "weight": weights}),
    ):  # fmt: skip
        more = {"rule": "decay"} if "log_decay" in arrays else {}
        assert_same_bits(call(**wrapped(arrays), **more), call(**arrays, **more))


def test_memory_of_a_device_is_refused():
    x = np.ones((2, 3, 4), np.float32)
    expected = (
        r"^attention\(\): k is of type OnlyDLPack; expected an array \(it is on device 1 of DLPack's type 2"
    )
    with pytest.raises(TypeError, match=expected):
        fastattn.attention(x, OnlyDLPack(x, (2, 1)), x)


def test_out_of_operations():
    """The result has the type of the array that decides it, and its rows lie at one distance."""
    x = np.ones((2, 3, 4), np.float32)
    with pytest.raises(TypeError, match=r"softmax.*out has dtype float64; expected x's, float32"):
        ops.softmax(x, out=np.empty((2, 3, 4)))
    with pytest.raises(TypeError, match=r"embedding.*out has dtype float64; expected table's, float32"):
        ops.embedding([0], x[0], out=np.empty((1, 4)))
    with pytest.raises(ValueError, match=r"softmax.*expected rows at one distance"):
        ops.softmax(x, out=np.empty((2, 4, 4), np.float32)[:, :3])
    nothing = np.empty((2, 0, 4), np.float32)
    assert ops.softmax(nothing.copy(), out=nothing) is nothing
