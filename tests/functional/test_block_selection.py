"""Blocks of keys that matter, by their definition, and what attention to them finds."""

import tracemalloc

import numpy as np
import pytest

import fastattn
from fastattn import functional as F
from fastattn._bench.cases import as_dtype


def draw(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(as_dtype(dtype)) for shape in shapes]


def by_definition(q, k, keep, rule, stride, size, offset, first, last):
    """Lists for one key head and the heads (group, len_q, head_dim) of its queries, in float64."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    (group, len_q, width), len_k = q.shape, len(k)
    blocks = -(-len_k // size)
    lists = []
    for begin in range(0, len_q, size):
        scores = np.zeros(blocks)
        rows = np.arange(begin, min(begin + size, len_q))
        for head in range(group):
            for some in np.split(rows, range(stride, len(rows), stride)):
                at = None if offset is None else offset + some[-1]
                if rule == "mean":
                    products = k @ q[head, some].mean(0) * width**-0.5
                    keys = np.arange(len_k)
                else:
                    products = np.zeros(-(-len_k // stride))
                    for i, row in enumerate(some):
                        each = k[stride - 1 - i :: stride] @ q[head, row]
                        products[: len(each)] += each * (width * stride) ** -0.5
                    keys = np.arange(len(products)) * stride
                seen = np.ones(len(keys), bool) if at is None else keys <= at
                if seen.any():
                    weights = np.exp(products[seen] - products[seen].max())
                    np.add.at(scores, keys[seen] // size, weights / weights.sum())
        end = blocks if offset is None else int(np.clip((offset + rows[-1]) // size + 1, 0, blocks))
        count = min(end, max(int(np.ceil(keep * end - 1e-9)), first + last))
        always = [j for j in range(end) if j < first or j >= end - last]
        rest = [j for j in np.argsort(-scores[:end], kind="stable") if j not in always]
        lists += [sorted((*always, *rest)[:count])] * len(rows)
    return lists


@pytest.mark.parametrize("rule", ["mean", "antidiagonal"])
@pytest.mark.parametrize(
    ("causal", "offset"), [(False, None), (True, None), (True, 3), (True, -9), (True, 200)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("len_q", "len_k"), [(37, 90), (64, 64), (5, 41), (90, 37)])
def test_definition(len_q, len_k, dtype, causal, offset, rule):
    q, k = draw((2, 4, len_q, 8), (2, 2, len_k, 8), dtype=dtype)
    options = {"keep": 0.4, "rule": rule, "stride": 4, "block_size": 8, "first": 1, "last": 2}
    found = F.select_blocks(q, k, **options, causal=causal, q_offset=offset)
    assert found.shape[:-1] == (2, 2, len_q)
    assert found.dtype == np.int64
    at = (len_k - len_q if offset is None else offset) if causal else None
    for batch, head in np.ndindex(2, 2):
        group = q[batch, 2 * head : 2 * head + 2]
        expected = by_definition(group, k[batch, head], 0.4, rule, 4, 8, at, 1, 2)
        assert [row[row >= 0].tolist() for row in found[batch, head]] == expected
        assert (np.diff(np.where(found[batch, head] < 0, 99, found[batch, head]), axis=-1) >= 0).all()


def test_inputs_of_other_forms():
    q, k = draw((4, 33, 8), (2, 40, 8))
    options = {"keep": 0.5, "block_size": 16, "causal": True}
    expected = F.select_blocks(q, k, **options)
    one_head = F.select_blocks(q[:2], k[0], **options)
    assert np.array_equal(one_head, F.select_blocks(q[:2], k[:1], **options))
    assert np.array_equal(F.select_blocks(q[0], k[0], **options), F.select_blocks(q[:1], k[:1], **options)[0])
    batch = F.select_blocks(np.stack([q, q]), k[None], **options)
    assert np.array_equal(batch, [expected, expected])
    strided = np.asfortranarray(q), np.asfortranarray(k)
    assert np.array_equal(F.select_blocks(*strided, **options), expected)
    assert np.array_equal(F.select_blocks(q, k, scale=8**-0.5, **options), expected)
    assert F.select_blocks(q[:, :0], k, **options).shape == (2, 0, 0)
    assert F.select_blocks(q, k[:, :0], **options).shape == (2, 33, 0)


def test_a_rule_that_is_a_function(monkeypatch):
    """It is called for whole blocks of queries, some at a time."""
    monkeypatch.setattr("fastattn.functional._block_selection.SCORES", 40)
    q, k = draw((2, 4, 100, 8), (2, 2, 150, 8))
    calls = []

    def rule(rows, begin):
        calls.append((begin, rows.shape))
        assert np.array_equal(rows, q[..., begin : begin + 16, :])
        return np.arange(10.0) % 7

    found = F.select_blocks(q, k, keep=0.3, rule=rule, block_size=16, first=0, last=0)
    assert calls[0] == (0, (2, 4, 16, 8))
    assert calls[-1] == (96, (2, 4, 4, 8))
    assert (found == [4, 5, 6]).all()
    assert found.shape == (2, 2, 100, 3)
    alone = F.select_blocks(q[0, 0], k[0, 0], keep=0.1, rule=lambda rows, begin: rows[:1, :1], last=0)
    assert alone.shape == (100, 1)
    nan = F.select_blocks(q, k, keep=0.1, rule=lambda *_: [0, 1, np.nan, 9], block_size=40, first=0, last=0)
    assert (nan == 2).all()


@pytest.mark.parametrize("rule", ["mean", "antidiagonal"])
def test_all_blocks_are_attention(rule, implementation):
    q, k, v = draw((4, 70, 8), (2, 90, 8), (2, 90, 8))
    lists = F.select_blocks(q, k, keep=1.0, rule=rule, block_size=16, stride=4, causal=True)
    out = F.selected_attention(q, k, v, lists, block_size=16, causal=True)
    np.testing.assert_allclose(out, fastattn.attention(q, k, v, causal=True), rtol=0, atol=2e-6)


def test_planted_keys_are_found():
    """A key that some queries of a block attend with half of their weight and more, among random ones."""
    q, k, directions = draw((4, 2048, 64), (4, 2048, 64), (4, 16, 64), seed=1)
    directions *= 9 / np.linalg.norm(directions, axis=-1, keepdims=True)  # a score of 81 / 8
    places = np.random.default_rng(2).integers(64, 960, (4, 16))
    for head, i in np.ndindex(4, 16):
        q[head, 1024 + 64 * i : 1040 + 64 * i] += directions[head, i]
        k[head, places[head, i]] = directions[head, i]
    found = F.select_blocks(q, k, keep=0.2, rule="mean", causal=True)
    lost = sum(places[head, i] // 64 not in found[head, 1024 + 64 * i] for head, i in np.ndindex(4, 16))
    assert lost == 0


def test_memory():
    q, k = draw((1, 8192, 16), (1, 8192, 16))
    tracemalloc.start()
    try:
        F.select_blocks(q, k, keep=0.2, causal=True)
        assert tracemalloc.get_traced_memory()[1] < 12e6  # of 268 MB of scores
    finally:
        tracemalloc.stop()


def test_what_is_not_finite_selects_what_always_is():
    q, k = draw((1, 64, 8), (1, 64, 8))
    q[0, 20], k[0, 40] = np.nan, np.inf
    found = F.select_blocks(q, k, keep=0.25, block_size=16, stride=4, causal=True)
    assert (found[0, :, 0] == 0).all()
    assert (found.max(-1)[0] == np.arange(64) // 16).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, r"select_blocks\(\): keep is 0.0; expected above 0 and at most 1"),
        ({"keep": 1.5}, "keep is 1.5"),
        ({"keep": np.nan}, "keep is nan"),
        ({"keep": "all"}, "keep is 'all'; expected a real number"),
        ({"rule": "max"}, "rule is 'max'; expected"),
        ({"stride": 7}, "stride is 7; expected a divisor of block_size, 64"),
        ({"stride": 0}, "stride is 0; expected 1 to 64"),
        ({"stride": 4, "rule": lambda *_: 0}, "stride is given with a rule that is a function"),
        ({"rule": lambda *_: np.ones(4)}, r"what rule returns has shape \(4,\)"),
        ({"rule": lambda *_: "x"}, "what rule returns"),
        ({"block_size": 0}, "block_size is 0"),
        ({"first": -1}, "first is -1"),
        ({"last": 1.5}, "last is 1.5"),
        ({"causal": 1}, "causal is 1"),
        ({"q_offset": [3]}, "q_offset is"),
        ({"scale": np.inf}, "scale is inf"),
    ],
)
def test_errors(options, message):
    q, k = draw((2, 100, 8), (2, 130, 8))
    with pytest.raises((TypeError, ValueError), match=message):
        F.select_blocks(q, k, **{"keep": 0.2} | options)


def test_shapes_that_do_not_fit():
    q, k = draw((2, 100, 8), (2, 130, 7))
    with pytest.raises(ValueError, match=r"select_blocks\(\): k has a head_dim of 7"):
        F.select_blocks(q, k, keep=0.2)
