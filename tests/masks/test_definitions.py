"""fastattn.masks: who attends whom, by each mask's definition, and how masks combine."""

import attention_variants as compositions
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattn import masks

# len_q, len_k, q_offset: queries at the end, at the start, alone, before and after the keys.
SHAPES = [
    (1, 1, None), (1, 130, None), (7, 130, None), (65, 65, None), (130, 33, 0), (33, 130, 5), (20, 64, -9),
    (20, 64, 50), (0, 9, None), (9, 0, 0),
]  # fmt: skip


def places(len_q, len_k, q_offset):
    """Positions of the queries, (len_q, 1), and keys, (1, len_k)."""
    first = len_k - len_q if q_offset is None else q_offset
    return first + np.arange(len_q)[:, None], np.arange(len_k)[None, :]


def in_keys(i, len_k):
    return (i >= 0) & (i < len_k)


def same(numbers, i, len_k):
    """Tell whether i and j have the same number, of numbers (len_k,) by position."""
    own = np.array([numbers[p] if 0 <= p < len_k else -1 for p in i.ravel()])[:, None]
    return own == numbers[None, :]


def ids(len_k, step=7, kinds=3):
    return np.arange(len_k) // step * 5 % kinds


BITMAP = np.random.default_rng(0).random((5, 9)) < 0.4


def by_bitmap(i, j):
    attend = np.zeros(np.broadcast_shapes(i.shape, j.shape), bool)
    for r, c in np.ndindex(attend.shape):
        block_q, block_k = i[r, 0] // 16, j[0, c] // 16
        attend[r, c] = 0 <= block_q < 5 and block_k < 9 and BITMAP[block_q, block_k]
    return attend


def by_bigbird(i, j):
    n = -(-j.size // 8)
    bitmap = masks.bigbird(8, random=2, rng=3).bitmap(j.size)
    window = abs(np.arange(n)[:, None] - np.arange(n)) <= 1
    window[:1] = window[:, :1] = True
    extra = np.minimum(2, n - window.sum(1))
    assert (bitmap >= window).all()
    assert np.array_equal((bitmap & ~window).sum(1), extra)
    attend = np.zeros((i.size, j.size), bool)
    for r, c in np.ndindex(attend.shape):
        attend[r, c] = 0 <= i[r, 0] < 8 * n and bitmap[i[r, 0] // 8, j[0, c] // 8]
    return attend


IDS = np.repeat([0, 1, 2, 3], [19, 40, 40, 41])  # three continuations of one prefix
TILES, TILE = (4, 6), 4  # tiles of 4 tokens each


def in_training(i, j):
    """Blocks of the noised half attend themselves, and clean blocks before; clean ones are block-causal."""
    own = (i % 48 // 8 == j % 48 // 8) & ((i >= 48) == (j >= 48))
    past = (i % 48 // 8 > j % 48 // 8) & (i < 48) & (j >= 48)
    clean = (i % 48 // 8 >= j % 48 // 8) & (i >= 48) & (j >= 48)
    return own | past | clean


def near_tiles(i, j):
    """The window of 3 x 3 tiles around the query's, whose middle keeps a tile's distance from the border."""
    found = True
    for axis, n in enumerate(TILES):
        tile_i, tile_j = (np.unravel_index(x // TILE, TILES)[axis] for x in (i, j))
        found = found & (abs(np.clip(tile_i, 1, n - 2) - tile_j) <= 1)
    return found


# Published masks that are expressions of others, over 96 tokens.
EXPRESSIONS = {
    "block diffusion": (masks.causal() | masks.chunked(10), lambda i, j: j // 10 <= i // 10),
    "block diffusion, training": (masks.block_sparse(compositions.block_diffusion(8, 48), 8), in_training),
    "shared prefix": (masks.causal() & (masks.first_keys(19) | masks.documents(IDS[:96])),
                      lambda i, j: (j <= i) & ((j < 19) | (IDS[i] == IDS[j]))),
    "sliding tiles": (masks.block_sparse(masks.neighborhood(TILES, 3).to_array(24), TILE), near_tiles),
    "criss-cross": (masks.axial((8, 12), 0) | masks.axial((8, 12), 1),
                    lambda i, j: (i // 12 == j // 12) | (i % 12 == j % 12)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name):
    mask, attends = EXPRESSIONS[name]
    want = attends(*np.ogrid[:96, :96])
    assert 0 < want.mean() < 1
    np.testing.assert_array_equal(mask.to_array(96), want)


CASES = {
    "all": (masks.window(None, None), lambda i, j: (i == i) & (j == j)),
    "causal": (masks.causal(), lambda i, j: j <= i),
    "window": (masks.window(5), lambda i, j: (i - 5 <= j) & (j <= i)),
    "window both": (masks.window(5, 70), lambda i, j: (i - 5 <= j) & (j <= i + 70)),
    "window left open": (masks.window(None, 3), lambda i, j: (j <= i + 3)),
    "window right open": (masks.window(3, None), lambda i, j: (i - 3 <= j)),
    "prefix": (masks.causal() | masks.first_keys(9), lambda i, j: (j <= i) | (j < 9)),
    "lengths": (masks.first_keys(50), lambda i, j: (j < 50) & (i == i)),
    "streaming": (masks.causal() & (masks.window(6) | masks.first_keys(4)),
                  lambda i, j: (j <= i) & ((j < 4) | (i - j <= 6))),
    "chunked": (masks.chunked(12), lambda i, j: i // 12 == j // 12),
    "chunked causal": (masks.causal() & masks.chunked(12), lambda i, j: (i // 12 == j // 12) & (j <= i)),
    "dilated": (masks.dilated(3, 5), lambda i, j: (abs(i - j) <= 15) & ((i - j) % 5 == 0)),
    "dilated far": (masks.dilated(1000, 5), lambda i, j: (abs(i - j) <= 5000) & ((i - j) % 5 == 0)),
    "strided": (masks.strided(9), lambda i, j: (j <= i) & ((i - j <= 9) | ((i - j) % 9 == 0))),
    "fixed": (masks.fixed(10, 2), lambda i, j: (j <= i) & ((i // 10 == j // 10) | (j % 10 >= 8))),
    "block_sparse": (masks.block_sparse(BITMAP, 16), by_bitmap),
    "bigbird": (masks.bigbird(8, random=2, rng=3), by_bigbird),
    "global": (masks.global_tokens([0, 20]) | masks.window(4, 4),
               lambda i, j: (abs(i - j) <= 4) | np.isin(i, [0, 20]) | np.isin(j, [0, 20])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    mask, attends = CASES[name]
    for shape in SHAPES:
        len_q, len_k, q_offset = shape
        array = mask.to_array(len_q, len_k, q_offset=q_offset)
        want = np.broadcast_to(attends(*places(*shape)), (len_q, len_k))
        np.testing.assert_array_equal(array, want, err_msg=f"{shape}")
        np.testing.assert_array_equal((~mask).to_array(len_q, len_k, q_offset=q_offset), ~want)


@pytest.mark.parametrize("shape", SHAPES)
def test_documents(shape):
    len_q, len_k, q_offset = shape
    i, _ = places(*shape)
    for numbers in (ids(len_k), ids(len_k, 1, 2), ids(len_k) * 1000 - 1000):
        want = same(numbers, i, len_k) & (numbers >= 0) & in_keys(i, len_k)  # negative: padding
        array = masks.documents(numbers).to_array(len_q, len_k, q_offset=q_offset)
        np.testing.assert_array_equal(array, want)
    own = np.arange(len_q) % 4
    array = masks.documents(ids(len_k), own).to_array(len_q, len_k, q_offset=q_offset)
    np.testing.assert_array_equal(array, own[:, None] == ids(len_k))


def test_of_each_sequence_and_head():
    rng = np.random.default_rng(1)
    numbers, n, bitmap = (
        rng.integers(-2, 3, (2, 1, 40)),
        np.array([[3] * 3, [0] * 3]),
        rng.random((3, 5, 5)) < 0.5,
    )
    array = masks.documents(numbers).to_array(40, batch_shape=(2, 3))
    want = (numbers[..., None] == numbers[..., None, :]) & (numbers[..., None] >= 0)
    np.testing.assert_array_equal(array, np.repeat(want, 3, 1))
    array = masks.first_keys(n).to_array(40, batch_shape=(2, 3), num_heads=2)
    np.testing.assert_array_equal(
        array, np.broadcast_to(np.arange(40) < n[..., None, None, None], (2, 3, 2, 40, 40))
    )
    array = masks.block_sparse(bitmap, 8).to_array(40, num_heads=3)
    np.testing.assert_array_equal(array, bitmap.repeat(8, 1).repeat(8, 2))
    dense = rng.random((2, 1, 3, 1, 40)) < 0.5
    array = masks.dense(dense).to_array(40, batch_shape=(2, 5), num_heads=3, q_offset=[[1, 2, 3, 4, 5]] * 2)
    np.testing.assert_array_equal(array, np.broadcast_to(dense, (2, 5, 3, 40, 40)))
    array = masks.causal().to_array(4, 6, batch_shape=(2,), q_offset=[0, 2])
    np.testing.assert_array_equal(
        array, np.arange(6) <= np.array([[0], [2]])[..., None] + np.arange(4)[:, None]
    )


def test_tree():
    #        0
    #      1   2
    #     3 4    5
    parents = [-1, 0, 0, 1, 1, 2]
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}]
    array = masks.tree(parents).to_array(8, 20)
    for row in range(8):
        node = row - 2
        context = set(range(14)) if node >= 0 else set(range(13 + row))
        assert set(np.flatnonzero(array[row])) == context | {
            14 + n for n in (ancestors[node] if node >= 0 else ())
        }
    two = masks.tree([parents, [-1, 0, 1, 2, 3, 4]]).to_array(6, 6, batch_shape=(2,))
    np.testing.assert_array_equal(two[0], array[2:, 14:])
    np.testing.assert_array_equal(two[1], np.tri(6, dtype=bool))


def grid_places(shape):
    return list(np.ndindex(shape))


@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 6), 0), ((4, 6), 1), ((4, 6), (0, 1)), ((2, 3, 5), -1), ((7,), 0)]
)
def test_axial(shape, axis):
    axes = {a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,))}
    at = grid_places(shape)
    want = [[all(a in axes or p[a] == q[a] for a in range(len(shape))) for q in at] for p in at]
    np.testing.assert_array_equal(masks.axial(shape, axis).to_array(len(at)), want)


@pytest.mark.parametrize(
    ("shape", "window", "shift"), [((8, 12), 4, 0), ((8, 12), 4, 2), ((8, 6), (4, 3), (1, 2))]
)
def test_swin(shape, window, shift):
    """The paper's code rolls, cuts into windows, and masks what the roll brought together."""
    windows, shifts = (x if isinstance(x, tuple) else (x, x) for x in (window, shift))

    def slices(n, w, s):
        return [slice(0, n - w), slice(n - w, n - s), slice(n - s, n)] if s else [slice(0, n)]

    region, number = np.zeros(shape, int), np.zeros(shape, int)
    for count, (a, b) in enumerate((a, b) for a in slices(shape[0], windows[0], shifts[0])
                                   for b in slices(shape[1], windows[1], shifts[1])):  # fmt: skip
        region[a, b] = count
    number[...] = np.arange(shape[0])[:, None] // windows[0] * 100 + np.arange(shape[1]) // windows[1]
    rolled = np.stack([np.roll(x, shifts, (0, 1)).ravel() for x in (region, number)])
    want = (rolled[:, :, None] == rolled[:, None, :]).all(0)
    np.testing.assert_array_equal(masks.swin(shape, window, shift).to_array(want.shape[0]), want)


def test_no_score_costs_nothing():
    for len_q, len_k in ((0, 5), (5, 0)):
        shape = (2**40, 2**20, len_q, len_k)
        assert masks.causal().to_array(len_q, len_k, batch_shape=shape[:1], num_heads=2**20).shape == shape


def test_swin_windows_larger_than_the_grid():
    assert masks.swin((3, 4), 2**48).to_array(12).all()
    assert masks.swin((3, 4), 2**48, 2**47).to_array(12).all()
    array = masks.swin((3, 4), (2**48, 3), (5, 2)).to_array(12)
    np.testing.assert_array_equal(array, masks.swin((3, 4), (3, 3), (0, 2)).to_array(12))


def natten_window(p, n, kernel, dilation, causal):
    """The keys of place p along one axis of n places, by NATTEN's get_window_start and get_window_end."""
    if causal:
        return {p - m * dilation for m in range(kernel) if p - m * dilation >= 0}
    group = list(range(p % dilation, n, dilation))
    index = group.index(p)
    left = kernel // 2
    right = kernel - 1 - left
    start = max(index - left, 0)
    if index + right >= len(group):
        start = len(group) - kernel
    return set(group[start : start + kernel])


@pytest.mark.parametrize(
    ("shape", "kernel", "dilation", "causal"),
    [
        ((9,), 3, 1, False),
        ((9,), 4, 2, False),
        ((9,), 9, 1, False),
        ((11,), 3, 3, True),
        ((6, 9), (3, 5), 1, False),
        ((6, 9), (3, 4), (2, 2), False),
        ((6, 9), (6, 9), 1, False),
        ((7, 8), 3, (1, 2), (True, False)),
        ((3, 4, 6), (3, 2, 3), (1, 2, 1), False),
        ((3, 4, 5), (2, 3, 2), 1, (True, False, True)),
        ((5, 1), (3, 1), 1, False),
    ],
)
def test_neighborhood(shape, kernel, dilation, causal):
    n = len(shape)
    kernels, dilations, causals = (
        x if isinstance(x, tuple) else (x,) * n for x in (kernel, dilation, causal)
    )
    at = grid_places(shape)
    sets = [
        [natten_window(p[a], shape[a], kernels[a], dilations[a], causals[a]) for a in range(n)] for p in at
    ]
    want = [[all(q[a] in near[a] for a in range(n)) for q in at] for near in sets]
    mask = masks.neighborhood(shape, kernel, dilation, causal)
    np.testing.assert_array_equal(mask.to_array(len(at)), want)
    if not any(causals):
        assert (np.sum(want, 1) == np.prod(kernels)).all()


dense_masks = st.integers(0, 2**20).flatmap(
    lambda seed: st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]).map(
        lambda share: np.random.default_rng(seed).random((7, 11)) < share
    )
)


@given(dense_masks, dense_masks, dense_masks)
def test_algebra(a, b, c):
    """The operators &, | and ~ do what they do for arrays."""
    x, y, z = map(masks.dense, (a, b, c))
    for mask, want in (
        (x & y, a & b), (x | y, a | b), (~x, ~a), (~(x & y) | z, ~(a & b) | c), (x & y & z, a & b & c),
        ((x | y) & masks.causal(), (a | b) & np.tri(7, 11, 4, dtype=bool)), (~~x, a),
        ((x & masks.causal()) | (y & masks.window(2)), (a & np.tri(7, 11, 4, dtype=bool))
         | (b & np.tri(7, 11, 4, dtype=bool) & ~np.tri(7, 11, 1, dtype=bool))),
    ):  # fmt: skip
        np.testing.assert_array_equal(mask.to_array(7, 11), want)


@pytest.mark.parametrize("shape", [(2, 3, 5, 9), (3, 5, 9), (1, 1, 40, 70), (2, 2, 0, 4), (2, 2, 4, 0)])
def test_compile(shape):
    calls = []

    def by_all(b, h, i, j):
        calls.append(i.shape)
        return (i - j) % (b + h + 2) == 0

    *batch, heads, len_q, len_k = shape
    i, j = places(len_q, len_k, 3)
    b = np.arange(np.prod(batch, dtype=int)).reshape(*batch, 1, 1, 1)
    compiled = masks.compile(by_all, shape, q_offset=3)
    array = compiled.to_array(len_q, len_k, batch_shape=tuple(batch), num_heads=heads, q_offset=3)
    want = (i - j) % (b + np.arange(heads)[:, None, None] + 2) == 0
    np.testing.assert_array_equal(array, np.broadcast_to(want, shape))
    n = len(calls)
    compiled.to_array(len_q, len_k, batch_shape=tuple(batch), num_heads=heads, q_offset=3)
    assert len(calls) == n  # what was compiled is not computed again
    again = masks.compile(compiled & masks.causal(), shape, q_offset=3)
    array = again.to_array(len_q, len_k, batch_shape=tuple(batch), num_heads=heads, q_offset=3)
    np.testing.assert_array_equal(array, np.broadcast_to(want & (j <= i), shape))


def test_compile_looks_at_blocks():
    largest = []

    def causal(b, h, i, j):
        largest.append(np.broadcast_shapes(i.shape, j.shape))
        return j <= i

    mask = masks.compile(causal, (4, 8, 3000, 3000))
    assert max(np.prod(shape) for shape in largest) <= 2**20
    assert len(mask.resolved.begin.ravel()) == 3000  # it depends on no sequence and no head


def test_compiled_fits_one_shape():
    mask = masks.compile(masks.causal(), (2, 4, 4))
    with pytest.raises(ValueError, match=r"compiled for \(2, 4, 4\)"):
        mask.to_array(5, num_heads=2)
    with pytest.raises(ValueError, match="another q_offset"):
        mask.to_array(4, num_heads=2, q_offset=1)


def test_repr_shows_construction():
    mask = masks.causal() & (masks.window(128) | ~masks.documents([0, 0, 1]))
    assert repr(mask) == "(causal() & (window(128, 0) | ~documents([0, 0, 1], None)))"
    assert repr(masks.documents(np.zeros((2, 50), int))) == "documents(<int64 2x50>, None)"
    assert repr(masks.compile(masks.first_keys(3), (2, 4, 4))) == "compile(first_keys(3), (2, 4, 4))"
    assert repr(masks.neighborhood((4, 4), 3)) == "neighborhood((4, 4), (3, 3), (1, 1), (False, False))"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.window(-1), ValueError, r"window\(\): left is -1"),
        (lambda: masks.window(1.5), TypeError, r"window\(\): left is 1.5"),
        (lambda: masks.chunked(0), ValueError, r"chunked\(\): size is 0"),
        (lambda: masks.first_keys(-1), ValueError, r"first_keys\(\): n has -1"),
        (lambda: masks.first_keys(1.0), TypeError, r"first_keys\(\): n has dtype float64"),
        (lambda: masks.documents([0.5]), TypeError, r"documents\(\): ids has dtype float64"),
        (lambda: masks.documents(3), ValueError, r"documents\(\): ids has shape \(\)"),
        (lambda: masks.documents(None), TypeError, r"documents\(\): ids is None; expected an array"),
        (lambda: masks.documents([0, 1]).to_array(3), ValueError, r"to_array\(\): ids of documents\(\) has"),
        (lambda: masks.causal().to_array(-1), ValueError, r"to_array\(\): len_q is -1; expected at least 0"),
        (lambda: masks.causal().to_array(2, 1.5), TypeError, r"to_array\(\): len_k is 1.5; expected an int"),
        (lambda: masks.causal().to_array(2, num_heads=0), ValueError, r"to_array\(\): num_heads is 0; exp"),
        (lambda: masks.causal().to_array(2, batch_shape=3), TypeError, r"to_array\(\): batch_shape is 3;"),
        (lambda: masks.axial((2**32, 2**32), 0).to_array(0), ValueError, "has 18446744073709551616 places"),
        (lambda: masks.documents([0, 1], [0]).to_array(2), ValueError, r"query_ids of documents\(\) has"),
        (lambda: masks.dilated(2, 0), ValueError, r"dilated\(\): dilation is 0"),
        (lambda: masks.fixed(4, 5), ValueError, r"fixed\(\): summary is 5"),
        (lambda: masks.tree([0]), ValueError, r"tree\(\): parents has a node"),
        (lambda: masks.tree([]), TypeError, r"tree\(\): parents has dtype float64"),
        (lambda: masks.tree([-1, 0]).to_array(1), ValueError, r"to_array\(\): parents of tree\(\) has 2"),
        (lambda: masks.dense([0.0]), TypeError, r"dense\(\): array has dtype float64"),
        (lambda: masks.dense([True, False]).to_array(3), ValueError, r"\(\): array of dense\(\) has shape"),
        (lambda: masks.block_sparse([True], 4), ValueError, r"block_sparse\(\): bitmap has shape \(1,\)"),
        (lambda: masks.block_sparse([[True]], (4, 4, 4)), ValueError, r"block_sparse\(\): block is"),
        (lambda: masks.bigbird(4, window=2), ValueError, r"bigbird\(\): window is 2"),
        (lambda: masks.axial((2, 3), 2), ValueError, r"axial\(\): axis is 2"),
        (lambda: masks.axial((2, 3), 0).to_array(5), ValueError, r"\(\): shape of axial\(\) has 6 places"),
        (lambda: masks.swin((4, 4), 2, 2), ValueError, r"swin\(\): shift is \(2, 2\)"),
        (lambda: masks.swin((4, 4), (2, 2, 2)), ValueError, r"swin\(\): window is"),
        (lambda: masks.neighborhood((4, 4), 5), ValueError, r"neighborhood\(\): kernel \(5, 5\)"),
        (lambda: masks.neighborhood((4, 4), 2, 1, 1), TypeError, r"neighborhood\(\): causal is 1"),
        (lambda: masks.compile(3, (1, 2, 2)), TypeError, r"compile\(\): mask is of type int"),
        (
            lambda: masks.compile(masks.causal(), (2, 2)),
            TypeError,
            r"compile\(\): shape is \(2, 2\); expected at least three integers, \(..., heads_q, len_q,",
        ),
        (
            lambda: masks.compile(lambda i, j: i >= j, (1, 2, 2)),
            TypeError,
            r"^compile\(\): mask is a function of \(i, j\); expected f\(b, h, i, j\): batch item, head, ",
        ),
        (
            lambda: masks.compile(lambda b, h, i, j: i >= j and j > 0, (1, 2, 2)),
            ValueError,
            r"^compile\(\): mask is a function that asks whether an array is true; expected &, \|",
        ),
        (lambda: masks.compile(lambda b, h, i, j: int + j, (1, 2, 2)), TypeError, "^unsupported operand"),
        (lambda: masks.compile(lambda b, h, i, j: int("x"), (1, 2, 2)), ValueError, "^invalid literal"),
        (lambda: masks.compile(lambda b, h, i, j: i - j, (1, 2, 2)), TypeError, "what mask returns"),
        (
            lambda: masks.compile(lambda b, h, i, j: np.ma.masked_array(i >= j), (1, 2, 2)),
            TypeError,
            r"compile\(\): what mask returns is a masked array",
        ),
        (lambda: masks.causal() & np.ones((2, 2), bool), TypeError, r"^&: an operand is an array.*dense"),
        (lambda: np.ones((2, 2), bool) & masks.causal(), TypeError, r"^&: an operand is an array.*dense"),
        (lambda: masks.causal | masks.first_keys(3), TypeError, r"^\|: an operand is the class causal;"),
        (lambda: masks.first_keys(3) | None, TypeError, r"^\|: an operand is None"),
        (lambda: bool(masks.causal()), TypeError, "combine masks with"),
    ],
)  # fmt: skip
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("offset", [-3, 0, 5, 8, 12, 28, 29, 100, -100])
@pytest.mark.parametrize(
    "size", [(5, 4), (1, 4), (2, 4), (3, 1), (100, 3), (2**48, 3), (2, 10**12), (9, 2**48)]
)
def test_dilated_outside_the_keys(size, offset):
    width, dilation = size
    distance = np.arange(8) - offset
    expected = [d % dilation == 0 and abs(d) <= width * dilation for d in distance.tolist()]
    np.testing.assert_array_equal(masks.dilated(*size).to_array(1, 8, q_offset=offset), [expected])


@pytest.mark.parametrize("size", [10**12, 2**63, 2**48])
def test_sizes_beyond_every_sequence(size):
    """Huge sizes take no more memory than the keys do, and nothing overflows."""
    lower = np.tri(6, dtype=bool)
    for mask in (masks.strided(size), masks.fixed(size), masks.chunked(size) & masks.causal()):
        np.testing.assert_array_equal(mask.to_array(6), lower)
    for mask in (masks.block_sparse([[True, False]], size), masks.chunked(size)):
        assert mask.to_array(6).all()


def test_masks_are_values():
    array = np.ones((4, 4), bool)
    both = masks.dense(array), masks.block_sparse(array, 1)
    array[:] = False
    for mask in both:
        assert mask.to_array(4).all()
