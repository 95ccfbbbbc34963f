"""The recipes of docs/howto/frameworks.md, as they are there, in the libraries that they are for."""

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import write_reranker
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models

PAGE = Path(__file__).parents[2] / "docs/howto/frameworks.md"
BLOCK = re.compile(r"^### (.*)\n(?:(?!###).*\n)*?```py\n((?:.*\n)*?)```", re.MULTILINE)
RECIPES = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))  # by their headings
NEEDS = {
    "Chroma": "chromadb",
    "LanceDB": "lancedb",
    "LangChain": "langchain_core",
    "LlamaIndex": "llama_index.core",
    "scikit-learn": "sklearn",
    "Ray": "ray",
    "Spark": "pyspark",
}
NOT_IN_THE_GATE = ("Ray", "Spark")  # hundreds of megabytes, and Java: run where they are
NAME = "sentence-transformers/all-MiniLM-L6-v2"
# The page's texts, as ones whose words the tiny model knows.
WORDS = {"A sentence.": "the cat sat", "Another one.": "a dog ran on the mat", "One sentence?": "the cat"}
*PAIR, QUERY = WORDS.values()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Recipes run in this folder, where they find tiny models; documents and queries have prompts."""
    (tmp_path / NAME).parent.mkdir()
    tiny.write(tmp_path / NAME, "bert")
    write_tokenizer(tmp_path / NAME)
    prompts = {"prompts": {"query": "the dog sat ", "document": "a tree "}}
    (tmp_path / NAME / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "cross-encoder").mkdir()
    write_reranker(tmp_path / "cross-encoder/ms-marco-MiniLM-L6-v2")
    monkeypatch.chdir(tmp_path)


def run(name, changes=WORDS):
    """Run a recipe, after `changes` of its text, and return the names that it defines."""
    there = find_spec(NEEDS[name].partition(".")[0])
    if not there and (name in NOT_IN_THE_GATE or not os.environ.get("FASTATTN_REQUIRE_PARITY")):
        pytest.skip(f"not installed: {NEEDS[name]}")
    code = RECIPES[name]
    for old, new in changes.items():
        code = code.replace(old, new)
    names = {"__name__": "recipe"}
    exec(compile(code, f"{PAGE}: {name}", "exec"), names)
    return names


def vectors(normalize=False):
    """Vectors of the documents, and of the query, by `encode`."""
    model = models.load(NAME)
    options = {"normalize_embeddings": normalize}
    return model.encode_document(PAIR, **options), model.encode_query(QUERY, **options)


def test_every_recipe_is_tested():
    assert set(RECIPES) == set(NEEDS)


def test_chroma():
    names = run("Chroma")
    documents, query = vectors()
    kept = names["collection"].get(include=["embeddings"])["embeddings"]
    np.testing.assert_allclose(kept, documents, rtol=0, atol=1e-6)
    again = names["chromadb"].PersistentClient("store").get_collection("texts")  # by the function's name
    found = again.query(query_texts=[QUERY], n_results=2)["distances"][0]
    cosines = documents @ query / np.linalg.norm(documents, axis=1) / np.linalg.norm(query)
    np.testing.assert_allclose(found, np.sort(1 - cosines), rtol=0, atol=1e-5)


def test_lancedb():
    names = run("LanceDB")
    documents, query = vectors(True)
    kept = names["table"].to_arrow().to_pydict()
    np.testing.assert_allclose(kept["vector"], documents, rtol=0, atol=1e-6)
    distances = np.square(documents - query).sum(axis=1)
    assert names["found"][0].text == PAIR[distances.argmin()]
    found = names["lancedb"].connect("store").open_table("texts").search(QUERY).to_list()
    np.testing.assert_allclose([row["_distance"] for row in found], np.sort(distances), rtol=0, atol=1e-5)


def test_langchain():
    names = run("LangChain")
    documents, query = vectors()
    embeddings = names["store"].embeddings
    np.testing.assert_array_equal(embeddings.embed_documents(PAIR), documents)
    assert embeddings.embed_query(QUERY) == query.tolist()
    assert sorted(document.page_content for document in names["found"]) == sorted(PAIR)
    ranked = models.load("cross-encoder/ms-marco-MiniLM-L6-v2").rank(
        QUERY, [document.page_content for document in names["found"]], return_documents=True
    )
    assert [document.page_content for document in names["best"]] == [each["text"] for each in ranked]


def test_llama_index():
    names = run("LlamaIndex")
    documents, query = vectors()
    embedding = names["embedding"]
    np.testing.assert_array_equal(embedding.get_text_embedding_batch(PAIR), documents)
    assert embedding.get_text_embedding(PAIR[0]) == documents[0].tolist()
    assert embedding.get_query_embedding(QUERY) == query.tolist()
    cosines = documents @ query / np.linalg.norm(documents, axis=1) / np.linalg.norm(query)
    np.testing.assert_allclose([x.score for x in names["found"]], np.sort(cosines)[::-1], atol=1e-5)


def test_scikit_learn():
    names = run("scikit-learn", {})
    expected = models.load(NAME).encode(names["texts"], normalize_embeddings=True)
    vectorizer = names["vectorizer"].__sklearn_clone__()
    np.testing.assert_array_equal(vectorizer.fit_transform(names["texts"]), expected)
    assert names["model"].cache_info().misses == 1  # clones and folds share it
    assert names["scores"].shape == (5,)


@pytest.fixture
def tables(tmp_path):
    """A Parquet file of texts, for the folder that recipes read; and what becomes of their paths."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "texts").mkdir()
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table, tmp_path / "texts/part.parquet")
    changes = {"/data/": f"{tmp_path}/", "/models/": f"{tmp_path}/sentence-transformers/"}
    return {**changes, "concurrency=15": "concurrency=1"}


def written(tmp_path):
    """Assert that the vectors which a recipe has written are those of `encode`, to the bit."""
    from pyarrow import dataset

    files = [str(path) for path in (tmp_path / "vectors").glob("*.parquet")]
    found = dataset.dataset(files).to_table().sort_by("id").to_pydict()
    assert found["text"] == TEXTS
    expected = models.load(NAME).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_array_equal(np.array(found["vector"], np.float32), expected)


@pytest.mark.filterwarnings("default")  # of what Ray itself calls
def test_ray(tables, tmp_path):
    names = run("Ray", tables)
    written(tmp_path)
    names["ray"].shutdown()


@pytest.mark.filterwarnings("default")  # of a newer pandas than Spark knows
def test_spark(tables, tmp_path, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # else the first of the path
    names = run("Spark", tables)
    written(tmp_path)
    names["spark"].stop()
