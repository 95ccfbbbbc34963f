"""The nearest of many vectors, like pairs and groups, by their definitions in float64."""

import ml_dtypes
import numpy as np
import pytest
from implementations import each_isa, forced

from fastattn import models
from fastattn.models import _search

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


@each_isa
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("n", [1, 7, 300])
def test_the_nearest_by_their_definition(n, dtype, similarity, isa, monkeypatch):
    monkeypatch.setattr(_search, "_ROWS", 64)  # several pieces
    monkeypatch.setattr(_search, "_NUMBERS", 500)
    corpus = (20 * vectors(n)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    queries = vectors(5)
    exact = queries.astype(np.float64) @ corpus.astype(np.float64).T
    if similarity == "cosine":
        exact = cosines(queries, corpus)
    with forced(isa):
        found = models.nearest(queries, corpus, 9, similarity=similarity)
        one = models.nearest(queries[2], corpus, 9, similarity=similarity)
    assert found.ids.shape == found.scores.shape == (5, min(9, n))
    order = np.argsort(-exact, axis=1)[:, :9]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_allclose(found.scores, np.take_along_axis(exact, order, axis=1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(one.ids, found.ids[2])
    np.testing.assert_array_equal(one.scores, found.scores[2])


def test_equal_vectors_come_in_order(monkeypatch):
    monkeypatch.setattr(_search, "_ROWS", 4)
    corpus = np.tile(np.eye(3, dtype=np.float32), (4, 1))
    assert models.nearest(corpus[:3], corpus, 4).ids.tolist() == [[i, i + 3, i + 6, i + 9] for i in range(3)]


def test_vectors_of_length_1_are_not_copied():
    x = vectors(50)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    assert _search._at_length_1(x, x.dtype) is x
    longer = x * np.float32(1.01)
    np.testing.assert_allclose(_search._at_length_1(longer, x.dtype), x, rtol=1e-6)


def test_like_pairs_by_their_definition(monkeypatch):
    x = vectors(90, centres=30)
    exact = cosines(x, x)
    i, j = np.triu_indices(len(x), 1)
    order = np.argsort(-exact[i, j])[:40]
    for numbers in (1 << 22, 200):
        monkeypatch.setattr(_search, "_NUMBERS", numbers)
        scores, pairs = models.like_pairs(x, max_pairs=40, top_k=20)
        np.testing.assert_array_equal(pairs, np.stack([i[order], j[order]], axis=1))
        np.testing.assert_allclose(scores, exact[i, j][order], rtol=1e-5)
    _, pairs = models.like_pairs(x, top_k=1)
    nearest = np.argmax(exact - 2 * np.eye(len(x)), axis=1)
    assert set(map(tuple, pairs.tolist())) == {(min(a, b), max(a, b)) for a, b in enumerate(nearest.tolist())}
    assert len(models.like_pairs(x[:1])[0]) == 0


def test_communities_by_their_definition(monkeypatch):
    x = np.concatenate([vectors(120, centres=3, spread=0.2), vectors(40)])
    exact = cosines(x, x)
    for numbers in (1 << 22, 100):
        monkeypatch.setattr(_search, "_NUMBERS", numbers)
        groups = models.communities(x, 0.8, 5)
        assert len(groups) == 3
        assert [len(group) for group in groups] == sorted((len(group) for group in groups), reverse=True)
        assert len(np.concatenate(groups)) == len(set(np.concatenate(groups).tolist()))
        for group in groups:
            assert (exact[group[0], group] >= 0.8).all()
            assert len({i % 3 for i in group.tolist()}) == 1
            assert list(exact[group[0], group[1:]]) == sorted(exact[group[0], group[1:]], reverse=True)
    assert models.communities(x, 0.8, 60) == []
    assert models.communities(x[:4], 0.8, 5) == []
    everything = models.communities(np.ones((30, 4), np.float32), 0.9, 2)
    assert [group.tolist() for group in everything] == [list(range(30))]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((np.ones(3), np.ones((2, 4))), ValueError, r"queries has shape \(3,\); expected .* of 4 features"),
        ((np.ones(4), np.ones(4)), ValueError, r"corpus has shape \(4,\); expected \(vectors, features\)"),
        (
            (np.ones(4), np.ones((2, 4), np.int32)),
            TypeError,
            r"corpus has dtype int32; expected floats or int8",
        ),
        ((np.ones(4), np.ones((2, 4)), 0), ValueError, r"top_k is 0; expected at least 1"),
    ],
)
def test_what_is_wrong_is_named(given, error, message):
    with pytest.raises(error, match=rf"^nearest\(\): {message}"):
        models.nearest(*given)


def test_an_empty_corpus_has_no_nearest():
    found = models.nearest(np.ones((2, 4), np.float32), np.empty((0, 4), np.float32))
    assert found.ids.shape == found.scores.shape == (2, 0)
