"""Static embeddings, and routers that send texts to one of several models."""

import pickle

import numpy as np
import pytest
from model_folders import refused
from tiny_routes import PACKAGE, mean_of, write_entries, write_router, write_static
from tiny_tokenizers import TEXTS

from fastattn import models
from fastattn.models import ModelError


def test_a_static_embedding_is_a_mean_of_rows(tmp_path, implementation):
    table = write_static(tmp_path)
    write_entries(tmp_path, "StaticEmbedding")
    model = models.load(tmp_path)
    expected = np.stack([mean_of(table, text) for text in TEXTS])
    np.testing.assert_allclose(model.encode(TEXTS), expected, rtol=0, atol=1e-6)
    assert model.encode(TEXTS[1]).tobytes() == model.encode(TEXTS)[1].tobytes()
    assert model.max_seq_length is None
    model.max_seq_length = 2
    np.testing.assert_allclose(model.encode(TEXTS[0]), mean_of(table, TEXTS[0], 2), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(model([4, 5])[0], table[[4, 5]])
    assert model.encode([]).shape == (0, 24)
    assert not model.has_gradients


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_types_of_a_static_embedding(dtype, tmp_path):
    table = write_static(tmp_path)
    write_entries(tmp_path, "StaticEmbedding")
    got = models.load(tmp_path, dtype=dtype).encode(TEXTS)
    assert got.dtype == (np.float64 if dtype == "float64" else np.float32)
    expected = np.stack([mean_of(table, text) for text in TEXTS])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 if dtype == "float64" else 0.02)


def test_a_static_embedding_is_saved(tmp_path):
    write_static(tmp_path / "a")
    write_entries(tmp_path / "a", "StaticEmbedding", "Normalize")
    model = models.load(tmp_path / "a")
    models.save(model, tmp_path / "b")
    assert not (tmp_path / "b/config.json").exists()
    np.testing.assert_array_equal(models.load(tmp_path / "b").encode(TEXTS), model.encode(TEXTS))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": np.ones((13, 4), np.float32)}, "'embedding.weight' is missing"),
        ({"embedding.weight": np.ones(13, np.float32)}, "'embedding.weight' has shape (13,)"),
        ({"embeddings": np.ones((13, 4), np.int8)}, "'embeddings' has dtype I8; expected one of F32"),
        ({"embeddings": np.ones((13, 4), np.float32), "mapping": np.arange(13)}, "'mapping' is not known"),
        ({"embedding.weight": np.full((13, 4), np.nan, np.float32)}, "values that are not finite"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit(tensors, message, tmp_path):
    write_static(tmp_path, **tensors)
    write_entries(tmp_path, "StaticEmbedding")
    refused(tmp_path, message)


def test_a_task_chooses_a_route(tmp_path, implementation):
    table = write_router(tmp_path)
    model = models.load(tmp_path)
    queries = np.stack([mean_of(table, text) for text in TEXTS])
    queries /= np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(model.encode_query(TEXTS), queries, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(model.encode(TEXTS, task="query"), model.encode_query(TEXTS))
    np.testing.assert_array_equal(model.encode(TEXTS), model.encode_query(TEXTS))  # the first route
    first = models.load(tmp_path / "document_0_Transformer")(**model.routes.of("document").tokenize(TEXTS))[
        :, 0
    ]
    expected = first / np.linalg.norm(first, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode_document(TEXTS), expected, rtol=0, atol=1e-6)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.encode_document(TEXTS), model.encode_document(TEXTS))
    with pytest.raises(ValueError, match=r"encode\(\): task is 3; expected one of 'query', 'document'"):
        model.encode(TEXTS, task=3)
    with pytest.raises(ModelError, match=r"^save\(\): model has routes for tasks; expected one that is"):
        models.save(model, tmp_path / "saved")
    with pytest.raises(ModelError, match="holds one module of several; expected a model in one folder"):
        models.save(model.routes.of("query"), tmp_path / "saved")
    for change in (model.state_dict, lambda: model.with_state_dict({})):
        with pytest.raises(ValueError, match="the model has no files"):
            change()


def test_routers_that_are_not_known(tmp_path):
    write_router(tmp_path)
    write_entries(tmp_path, "Router", "Pooling")
    refused(tmp_path, "has StaticEmbedding, Pooling on the route 'query'; expected Transformer and Pooling")
    write_entries(tmp_path, "Router", "Router")
    refused(tmp_path, "modules.json has 2 routers; expected one")
    write_entries(tmp_path, "Router")
    path = tmp_path / "router_config.json"
    path.write_text(path.read_text().replace(f"{PACKAGE}.Transformer", f"{PACKAGE}.WordEmbeddings"))
    refused(
        tmp_path, "router_config.json has a module 'WordEmbeddings'; expected one of Transformer, Pooling"
    )
    path.unlink()
    refused(tmp_path, "router_config.json is missing")
