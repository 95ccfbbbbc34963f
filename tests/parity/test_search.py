"""`fastattn.sentence_transformers.util` beside sentence-transformers' module of this name."""

import numpy as np
import pytest
import torch
from sentence_transformers import util as theirs

from fastattn.sentence_transformers import util as ours

RNG = np.random.default_rng(3)


def around(n, centres, spread=0.15):
    """Vectors around so many centres."""
    middles = RNG.standard_normal((centres, 32), np.float32)
    return middles[np.arange(n) % centres] + spread * RNG.standard_normal((n, 32), np.float32)


@pytest.mark.parametrize("name", ["cos_sim", "dot_score"])
def test_semantic_search(name):
    queries, corpus = around(7, 3), around(500, 50)
    options = {"top_k": 12, "corpus_chunk_size": 200}
    expected = theirs.semantic_search(queries, corpus, score_function=getattr(theirs, name), **options)
    for function in (getattr(ours, name), getattr(theirs, name)):
        got = ours.semantic_search(queries, corpus, score_function=function, **options)
        assert [[x["corpus_id"] for x in each] for each in got] == [
            [x["corpus_id"] for x in each] for each in expected
        ]
        scores = [[[x["score"] for x in each] for each in found] for found in (got, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-5)
    tensors = ours.semantic_search(torch.from_numpy(queries), torch.from_numpy(corpus), **options)
    assert tensors == ours.semantic_search(queries, corpus, **options)
    np.testing.assert_allclose(
        getattr(ours, name)(queries, corpus), getattr(theirs, name)(queries, corpus).numpy(), atol=1e-4
    )
    assert isinstance(getattr(ours, name)(torch.from_numpy(queries), corpus), torch.Tensor)


def test_functions_of_others_are_refused():
    with pytest.raises(ValueError, match=r"score_function is '<lambda>'; expected cos_sim or dot_score"):
        ours.semantic_search(around(2, 1), around(3, 1), score_function=lambda a, b: a @ b.T)
