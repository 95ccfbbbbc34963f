"""The embedding function of LanceDB: a table on disk, which is opened again."""

import lancedb
import numpy as np
import pytest
import tiny_models as tiny
from lancedb.embeddings import get_registry
from lancedb.pydantic import LanceModel, Vector
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.lancedb import FastattnEmbeddings

PROMPTS = {"query": "the dog sat ", "document": "a tree "}


@pytest.fixture
def folder(tmp_path):
    tiny.write(tmp_path / "model", "bert")
    write_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("normalize", [True, False])
def test_a_table_finds_its_texts_and_is_opened_again(folder, tmp_path, normalize):
    """Texts and queries have their prompts; the second connection knows the function by its name."""
    texts = [text for text in TEXTS if text]
    options = {"prompts": PROMPTS, "model_kwargs": {"dtype": "float64"}}
    function = get_registry().get("fastattn").create(name=folder, normalize=normalize, options=options)

    class Row(LanceModel):
        text: str = function.SourceField()
        vector: Vector(function.ndims()) = function.VectorField()

    table = lancedb.connect(tmp_path / "store").create_table("texts", schema=Row)
    table.add([{"text": text} for text in texts])
    model = models.load(folder, dtype="float64")
    expected = model.encode(texts, prompt=PROMPTS["document"], normalize_embeddings=normalize)
    kept = table.to_arrow().to_pydict()
    assert kept["text"] == texts
    np.testing.assert_allclose(kept["vector"], expected, rtol=0, atol=1e-6)
    again = lancedb.connect(tmp_path / "store").open_table("texts")
    found = again.search("the cat").limit(3).to_list()
    query = model.encode("the cat", prompt=PROMPTS["query"], normalize_embeddings=normalize)
    distances = np.square(expected - query).sum(axis=1)
    assert [row["text"] for row in found] == [texts[i] for i in np.argsort(distances)[:3]]
    np.testing.assert_allclose([row["_distance"] for row in found], np.sort(distances)[:3], rtol=0, atol=1e-5)


def test_what_is_wrong_is_named(folder):
    function = FastattnEmbeddings.create(name=folder)
    assert function.ndims() == 24
    with pytest.raises(TypeError, match=r"texts\[1\] is 3; expected a string"):
        function.compute_source_embeddings(["the cat", 3])
    with pytest.raises(ValueError, match="token would be written into tables; expected it in the variable"):
        FastattnEmbeddings.create(name=folder, options={"token": "secret"})
