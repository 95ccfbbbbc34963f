"""Packing: the kernel gives the bits of its NumPy twin, and reads rows however they lie."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import tiny_gguf
from implementations import each_isa, forced

from bench import files as model_files
from fastattn import models, ops
from fastattn._args.pack import blocks_args
from fastattn._args.packed import PackArgs, RowBlock
from fastattn._args.weight_types import STORED, WEIGHT_DTYPES
from fastattn._engine import dispatch, settings
from fastattn._formats import FORMATS
from fastattn.layers._attention_parameters import stack

BF16 = ml_dtypes.bfloat16
SOURCES = [np.float32, np.float64, np.float16, BF16]
SHAPES = [(1, 1), (33, 7), (64, 64), (70, 95), (40, 1025), (3, 2050), (35, 8195), (5, 9000), (0, 4), (3, 0)]


def weights(shape, source, seed=0):
    """Numbers of all magnitudes, with ties, zeros and a row of denormal ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[::3] = np.rint(x[::3] * 4) / 4  # ties between magnitudes of either sign, and halfway to the next code
    x[1::5] *= 2.0 ** rng.integers(-20, 4, x[1::5].shape)
    x[2::7, : shape[1] // 2] = -0.0
    x[4:5] *= 2.0**-145
    return x.astype(source)


def layouts(x):
    """Yield copies of x in different strides."""
    yield x
    yield np.asfortranarray(x)
    yield np.repeat(np.repeat(x, 2, axis=0), 3, axis=1)[::2, ::3]
    yield np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    wide = np.zeros((x.shape[0], x.shape[1] + 5), x.dtype)
    wide[:, 3:-2] = x
    yield wide[:, 3:-2]
    yield x.astype(x.dtype.newbyteorder())
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    yield unaligned


def assert_same(a, b):
    np.testing.assert_array_equal(a.panels.view(np.uint8), b.panels.view(np.uint8))
    for name in ("scales", "minima", "sums"):
        first, second = getattr(a, name), getattr(b, name)
        assert (first is None) == (second is None)
        if first is not None:
            np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_bits_are_those_of_the_twin(dtype, source, shape, implementation):
    x, gate = weights(shape, source), weights(shape, source, 1)
    expected = ops.pack(x, dtype=dtype, backend="numpy")
    for array in layouts(x):
        assert_same(ops.pack(array, dtype=dtype), expected)
    gated = ops.pack(x, gate=gate, dtype=dtype)
    assert_same(gated, ops.pack(x, gate=gate, dtype=dtype, backend="numpy"))
    assert gated.panels[1::2].tobytes() == expected.panels.tobytes()
    for threads in (1, 2, 5):
        assert_same(ops.pack(x, dtype=dtype, num_threads=threads), expected)


@pytest.mark.parametrize("unit", [1, 32])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_blocks_of_rows_are_one_weight(dtype, unit, implementation):
    """Blocks of several types count as one array, with rows of 0 up to the next unit."""
    parts = [weights((n, 100), source, n) for n, source in zip((40, 7, 33, 16), SOURCES, strict=True)]
    args = blocks_args([[("x", part) for part in parts]], dtype, 2, unit)
    dispatch.run(args)
    whole = np.zeros((args.out_features, 100))
    for block in args.blocks:
        assert block.first % unit == 0
        whole[block.first :][: len(block.array)] = block.array
    assert_same(args.packed(), ops.pack(whole, dtype=dtype, backend="numpy"))


def holders(layout):
    """Types of blocks that hold a format's codes, with what shares a scale and whether there are minima."""
    own = next(x.packed for x in FORMATS.values() if x.layout is layout)
    for dtype in {own, "q8", "uint4" if own == "int4" else own}:
        least = [dtype == "uint4" or layout.minimum is not None, dtype in ("uint4", "q8")]
        for block in {16, layout.shared}:
            yield from ((dtype, block, minima) for minima in set(least) if minima >= least[0])


def packed_blocks(layouts, dtype, block, minima, data, k, backend, threads=1):
    """A gated pair: each map has rows of all `layouts`, the last of `data` with a distance."""
    n = sum(map(len, data))
    args = PackArgs([], k, n, 2, dtype, threads)
    args.set_blocks(block, minima)
    firsts = np.cumsum([0, *map(len, data[:-1])]).tolist()
    args.blocks = [
        RowBlock(f"x{i}", x[::-1] if map_ else x, first, map_, layout)
        for map_ in (0, 1)
        for i, (layout, x, first) in enumerate(zip(layouts, data, firsts, strict=True))
    ]
    args.bad = np.zeros(len(args.blocks), bool)
    dispatch.run(args, backend)
    return args


@pytest.mark.parametrize("k", [256, 768, 8192 + 256])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_files_have_the_bits_of_the_twin(name, k, implementation):
    """In every type that holds the codes, beside other formats, in rows that lie at any distance."""
    layout = FORMATS[name].layout
    for dtype, block, minima in holders(layout):
        fitting = [x.layout for x in FORMATS.values() if (dtype, block, minima) in {*holders(x.layout)}]
        layouts = [layout, *(x for x in fitting if x is not layout)][:3]
        names = [next(n for n, x in FORMATS.items() if x.layout is each) for each in layouts]
        data = [tiny_gguf.random_blocks(n, 37 + i, k, seed=i) for i, n in enumerate(names)]
        data[-1] = np.repeat(data[-1], 2, axis=0)[::2]
        expected = packed_blocks(layouts, dtype, block, minima, data, k, "numpy")
        assert not expected.bad.any()
        for threads in (1, 3):
            got = packed_blocks(layouts, dtype, block, minima, data, k, None, threads)
            assert_same(got.packed(), expected.packed())


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_files_that_are_not_finite_are_found(name, implementation):
    """In any block of any rows, and in no others; whatever the bytes are, the twin says the same."""
    layout, rng = FORMATS[name].layout, np.random.default_rng(5)
    data = tiny_gguf.random_blocks(name, 40, 768)
    for at in {layout.unit, layout.unit if layout.minimum is None else layout.minimum}:
        spoiled = data.copy()
        blocks = spoiled.reshape(40, -1, layout.nbytes)
        for value in (np.float16(np.inf), np.float16(np.nan), np.float16(-np.inf)):
            place = rng.integers(40), rng.integers(blocks.shape[1])
            blocks[place][at : at + 2] = [255, 0] if layout.exponent else np.array([value]).view(np.uint8)
            both = [data, spoiled]
            minima = STORED[FORMATS[name].packed].has_minima or layout.minimum is not None
            args = (layout, layout), FORMATS[name].packed, layout.shared, minima, both, 768
            assert packed_blocks(*args, None).bad.tolist() == [False, True, False, True]
    for seed in range(20):
        noise = [np.random.default_rng(seed).integers(0, 256, data.shape, np.uint8)]
        args = (layout,), FORMATS[name].packed, layout.shared, minima, noise, 768
        assert packed_blocks(*args, None).bad.tolist() == packed_blocks(*args, "numpy").bad.tolist()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_a_number_that_is_not_finite_is_found_anywhere(dtype, source, value, implementation):
    rng = np.random.default_rng(3)
    for shape in ((1, 1), (33, 31), (40, 2050)):
        for transposed in (False, True):
            x = weights(shape, source)
            x[rng.integers(shape[0]), rng.integers(shape[1])] = value
            x = np.asfortranarray(x) if transposed else x
            with pytest.raises(
                ValueError, match=rf"pack\(\): weight has values that are not finite as {dtype}"
            ):
                ops.pack(x, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.dtype(">f8"), "f4", BF16])
def test_types_may_be_those_of_numpy(dtype, implementation):
    x = np.random.default_rng(0).standard_normal((5, 7))
    packed = ops.pack(x, dtype=dtype)
    assert packed.dtype == np.dtype(dtype).name
    assert_same(packed, ops.pack(x, dtype=packed.dtype))
    with pytest.raises(ValueError, match=r"dtype is <class 'numpy.int16'>; expected one of float32"):
        ops.pack(x, dtype=np.int16)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_what_becomes_infinite_is_refused(dtype, implementation):
    """The first number that does, and the last that does not."""
    beyond = {"float32": 2.0**128, "float64": np.inf, "bfloat16": 2.0**128 - 2.0**119, "int8": 2.0**128}
    first = beyond.get(dtype, 65520.0 * {"int4": 8, "q8": 127, "iq4": 127, "fp4": 12}.get(dtype, 1))
    lane = np.float64 if dtype in ("float32", "float64", "int8") else np.float32
    last = np.nextafter(lane(2.0**128 - 2.0**103 if first == 2.0**128 else first), lane(0))
    for sign in (1, -1):
        x = np.ones((3, 5), lane)
        x[2, 3] = sign * last
        packed = ops.pack(x, dtype=dtype)
        assert dtype == "int8" or np.isfinite(packed.unpack()).all()  # 127 scales may be beyond float32
        x[2, 3] = sign * first
        with pytest.raises(ValueError, match="not finite"):
            ops.pack(x, dtype=dtype)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_unpack_takes_rows_from_where_they_were_put(dtype):
    x, gate = weights((70, 95), np.float32), weights((70, 95), np.float32, 1)
    packed = ops.pack(x, gate=gate, dtype=dtype)
    both = packed.unpack()
    np.testing.assert_array_equal(both[0], ops.pack(gate, dtype=dtype).unpack())
    np.testing.assert_array_equal(both[1], ops.pack(x, dtype=dtype).unpack())


def peak_of(call):
    """The result of a call, and how many bytes it held at its peak."""
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SLACK = 4 << 20  # the memory of threads, lists, imports


@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
def test_packing_holds_no_copy(source):
    """Neither of one weight nor of several that are stacked."""
    x = np.ones((3000, 2000), source)
    packed, peak = peak_of(lambda: ops.pack(x, dtype="int8"))
    assert peak < packed.nbytes + SLACK
    stacked, peak = peak_of(lambda: stack([x, x[:999]], [], "int8", 1))
    assert peak < stacked.weight.nbytes + SLACK


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_loading_a_model_holds_what_is_packed(dtype, tmp_path):
    """Memory is that, and what two threads read at a time, 4 MB each, where a table of the file has 20."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 2}
    config = {**model_files.LLAMA, **sizes, "vocab_size": 20_000}
    folder = model_files.write(tmp_path / "llama", config, model_files.llama_shapes(config))
    with settings.forced(num_threads=2):
        models.load(folder, weights_dtype=dtype)  # imports what it needs
        model, peak = peak_of(lambda: models.load(folder, weights_dtype=dtype))
    held = sum(np.prod(shape) for shape in model_files.llama_shapes(config).values())
    held *= {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    assert model.num_layers == 2
    assert held < peak < 1.05 * held + SLACK + 2 * (4 << 20)


@each_isa
def test_the_kernel_reads_and_writes_no_further(isa):
    """Arguments that were changed after the checks are refused before C sees them."""
    for change in (
        {"out_features": 3},
        {"in_features": 9},
        {"out": np.empty((1, 4, 32, 2), np.uint16)},
        {"bad": np.zeros(2, bool)},
        {"blocks": [RowBlock("x", np.ones((4, 8), np.float32), 1, 0)]},
        {"blocks": [RowBlock("x", np.ones((4, 8), ">f4"), 0, 0)]},
        {"blocks": [RowBlock("x", np.ones((4, 8), np.int32), 0, 0)]},
    ):
        args = blocks_args([[("x", np.ones((4, 8), np.float32))]], "float32", 1)
        for name, value in change.items():
            setattr(args, name, value)
        with forced(isa), pytest.raises((ValueError, TypeError), match=r"fastattn: |no kernel reads"):
            dispatch.run(args)
    args = blocks_args([[("x", np.ones((4, 8), np.float32))]], "float32", 1)
    args.out = np.empty(args.out.size + 16, np.float32)[1:][: args.out.size].reshape(args.out.shape)
    if args.out.ctypes.data % 64:
        with forced(isa), pytest.raises(ValueError, match="begin at a cache line"):
            dispatch.run(args)
