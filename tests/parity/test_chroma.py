"""The embedding function of Chroma: a collection on disk, which another client opens again."""

import chromadb
import numpy as np
import pytest
import tiny_models as tiny
from chromadb.utils.embedding_functions import known_embedding_functions
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.chroma import FastattnEmbeddingFunction

PROMPTS = {"query": "the dog sat ", "document": "a tree "}


@pytest.fixture
def folder(tmp_path):
    tiny.write(tmp_path / "model", "bert")
    write_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_collection_finds_its_documents_and_is_opened_again(folder, tmp_path):
    """Documents and queries have their prompts; the second client knows the function by its name."""
    texts = [text for text in TEXTS if text]
    function = FastattnEmbeddingFunction(folder, True, prompts=PROMPTS, model_kwargs={"dtype": "float64"})
    client = chromadb.PersistentClient(str(tmp_path / "store"))
    collection = client.create_collection("texts", embedding_function=function)
    collection.add(ids=[str(i) for i in range(len(texts))], documents=texts)
    model = models.load(folder, dtype="float64")
    expected = model.encode(texts, prompt=PROMPTS["document"], normalize_embeddings=True)
    kept = collection.get(include=["embeddings"])["embeddings"]
    np.testing.assert_allclose(kept, expected, rtol=0, atol=1e-6)
    again = chromadb.PersistentClient(str(tmp_path / "store")).get_collection("texts")
    found = again.query(query_texts=["the cat"], n_results=3)
    query = model.encode("the cat", prompt=PROMPTS["query"], normalize_embeddings=True)
    distances = np.sort(1 - expected @ query)[:3]
    np.testing.assert_allclose(found["distances"][0], distances, rtol=0, atol=1e-5)


def test_the_function_is_made_of_its_config(folder):
    function = FastattnEmbeddingFunction(folder, model_kwargs={"weights_dtype": "int8"})
    kind = known_embedding_functions[function.name()]
    other = kind.build_from_config(function.get_config())
    assert isinstance(other, FastattnEmbeddingFunction)
    assert other.get_config() == function.get_config()
    assert not function.is_legacy()
    np.testing.assert_array_equal(other(["the cat"]), function(["the cat"]))
    with pytest.raises(TypeError, match=r"^FastattnEmbeddingFunction\(\): model_name is of type int"):
        FastattnEmbeddingFunction(3)
