"""The nearest of many vectors, by their definition in float64."""

import ml_dtypes
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, forced

from fastattn import models
from fastattn.models import _search

each_implementation = pytest.mark.parametrize("isa", IMPLEMENTATIONS)
RNG = np.random.default_rng(11)


def vectors(n, features=24, centres=0, spread=0.1):
    """Random vectors, or some around so many centres."""
    x = RNG.standard_normal((n, features), np.float32)
    if centres:
        x = RNG.standard_normal((centres, features), np.float32)[np.arange(n) % centres] + spread * x
    return x


def cosines(a, b):
    a, b = (x.astype(np.float64) for x in (a, b))
    return (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


@each_implementation
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("n", "features"), [(1, 24), (7, 1), (300, 33), (70, 131)])
def test_the_nearest_by_their_definition(n, features, dtype, similarity, isa, monkeypatch):
    monkeypatch.setattr(_search, "_RUN", 67)  # several runs
    monkeypatch.setattr(_search, "_CANDIDATES", 100)  # some queries at a time
    corpus = (20 * vectors(n, features)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    queries = vectors(15, features)
    exact = queries.astype(np.float64) @ corpus.astype(np.float64).T
    if similarity == "cosine":
        exact = cosines(queries, corpus)
    with forced(isa):
        found = models.nearest(queries, corpus, 9, similarity=similarity)
        one = models.nearest(queries[2], corpus, 9, similarity=similarity)
        some = models.nearest(queries[1:5], corpus[:, ::-1][:, ::-1], 9, similarity=similarity, num_threads=2)
    assert found.ids.shape == found.scores.shape == (15, min(9, n))
    assert found.scores.dtype == ("float64" if dtype == "float64" else "float32")
    if features > 1:
        order = np.argsort(-exact, axis=1)[:, :9]
        np.testing.assert_array_equal(found.ids, order)
    tolerance = 1e-5 * np.abs(exact).max()
    np.testing.assert_allclose(found.scores, np.take_along_axis(exact, found.ids, axis=1), atol=tolerance)
    np.testing.assert_array_equal(one.ids, found.ids[2])
    if isa != "numpy":  # whatever else is searched for
        np.testing.assert_array_equal(one.scores, found.scores[2])
        np.testing.assert_array_equal(some.scores, found.scores[1:5])


@each_implementation
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(("n", "features"), [(5, 1), (300, 16), (130, 77), (40, 384)])
def test_products_of_bytes_are_exact(n, features, similarity, isa, monkeypatch):
    monkeypatch.setattr(_search, "_RUN", 64)
    corpus, queries = (RNG.integers(-128, 128, (count, features), np.int8) for count in (n, 10))
    corpus[0], queries[0] = -128, -128  # the product that overflows two of 16 bits
    exact = queries.astype(np.int64) @ corpus.astype(np.int64).T
    with forced(isa):
        found = models.nearest(queries, corpus, 7, similarity=similarity)
    if similarity == "cosine":
        exact = cosines(queries, corpus)
        np.testing.assert_allclose(found.scores, np.take_along_axis(exact, found.ids, axis=1), atol=1e-6)
        return
    order = np.argsort(-exact, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(exact, order, axis=1))


@each_implementation
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("n", "width"), [(5, 1), (300, 48), (130, 13), (66, 8)])
def test_the_fewest_bits_that_differ(n, width, dtype, isa, monkeypatch):
    monkeypatch.setattr(_search, "_RUN", 64)
    bits, asked = (RNG.integers(0, 2, (count, 8 * width)) for count in (n, 10))
    exact = (asked[:, None] != bits).sum(axis=-1)
    corpus, queries = (np.packbits(x, axis=1).view(dtype) for x in (bits, asked))
    with forced(isa):
        found = models.nearest(queries, corpus, 7, similarity="hamming")
    order = np.argsort(exact, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(exact, order, axis=1))
    assert found.scores.dtype == np.int64


@each_implementation
def test_equal_vectors_come_in_order(isa, monkeypatch):
    monkeypatch.setattr(_search, "_RUN", 4)
    corpus = np.tile(np.eye(3, dtype=np.float32), (400, 1))
    with forced(isa):
        for count in (4, 90):
            found = models.nearest(corpus[:3], corpus, count).ids.tolist()
            assert found == [list(range(i, i + 3 * count, 3)) for i in range(3)]


@each_implementation
@pytest.mark.parametrize("ascending", [False, True])
def test_sorted_vectors_and_odd_numbers(ascending, isa):
    corpus = np.arange(5000, dtype=np.float32)[:: 1 if ascending else -1, None].copy()
    corpus[[7, 4500]] = np.nan
    corpus[[8, 4000]] = np.inf
    with forced(isa):
        found = models.nearest(np.ones(1, np.float32), corpus, 300, similarity="dot")
        low = models.nearest(-np.ones(1, np.float32), corpus[9:4000], 3991, similarity="dot")
    assert found.ids[:4].tolist() == [7, 4500, 8, 4000]
    assert np.isnan(found.scores[:2]).all()
    rest = np.delete(np.arange(5000), [7, 8, 4000, 4500])
    np.testing.assert_array_equal(found.ids[4:], (rest[::-1] if ascending else rest)[:296])
    np.testing.assert_array_equal(low.ids, np.arange(3991)[:: 1 if ascending else -1])


@each_implementation
def test_the_least_scores_are_found(isa):
    infinite = np.array([[-np.inf, 0], [1, 2], [-np.inf, 1]], np.float32)
    with forced(isa):
        found = models.nearest(np.ones((1, 2), np.float32), infinite, 3, similarity="dot")
        assert found.ids.tolist() == [[1, 0, 2]]
        assert found.scores.tolist() == [[3, -np.inf, -np.inf]]
        far = np.array([[-1e30], [-2e30]], np.float32)
        assert models.nearest(-far[:1], far, 2, similarity="dot").ids.tolist() == [[0, 1]]


@each_implementation
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4"])
def test_vectors_lie_anywhere_in_memory(dtype, isa):
    x = vectors(70).astype(dtype)
    odd = np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(np.uint8)
    corpus = np.ndarray(x.shape, dtype, odd.data)
    assert x.dtype.itemsize == 1 or not corpus.flags.aligned
    with forced(isa):
        want = models.nearest(x[:3].astype(x.dtype.newbyteorder("=")), x.astype(x.dtype.newbyteorder("=")))
        got = models.nearest(corpus[:3], corpus)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.scores, want.scores)


def test_queries_in_float64_are_narrowed_at_length_1():
    corpus = np.ones((2, 5), np.float32)
    found = models.nearest(np.full((1, 5), 1e100), corpus, 1)
    np.testing.assert_allclose(found.scores, 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^nearest\(\): queries has values beyond float32"):
        models.nearest(np.full((1, 5), 1e100), corpus, 1, similarity="dot")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((np.ones(3), np.ones((2, 4))), ValueError, r"queries has shape \(3,\); expected .* of 4 features"),
        ((np.ones(4), np.ones(4)), ValueError, r"corpus has shape \(4,\); expected \(vectors, features\)"),
        ((np.ones(4, np.int8), np.ones((2, 4), np.uint8), 1, "hamming"), TypeError,
            "queries has dtype int8; expected the corpus's, uint8"),
        ((np.ones(4), np.ones((2, 4)), 1, "hamming"), TypeError, "corpus has dtype float64; expected uint8"),
        ((np.ones(4), np.ones((2, 4), np.int32)), TypeError, "corpus has dtype int32; expected floats or"),
        ((np.ones(4), np.ones((2, 4)), 0), ValueError, r"top_k is 0; expected at least 1"),
        ((np.ones((0, 4)), np.ones((2, 4)), 1, "dot", -4), ValueError, r"num_threads is -4"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given, error, message):
    with pytest.raises(error, match=rf"^nearest\(\): {message}"):
        models.nearest(*given[:3], **dict(zip(("similarity", "num_threads"), given[3:], strict=False)))


def test_an_empty_corpus_has_no_nearest():
    found = models.nearest(np.ones((2, 4), np.float32), np.empty((0, 4), np.float32))
    assert found.ids.shape == found.scores.shape == (2, 0)
