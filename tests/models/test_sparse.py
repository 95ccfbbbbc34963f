"""SPLADE: the weights' definition, bits, what is kept, and what is refused."""

import json
import math
import sys

import numpy as np
import pytest
import tiny_models as tiny
from implementations import assert_same_rows, each_isa, forced
from model_folders import change_config, refused, write_settings
from tiny_tokenizers import TEXTS, WORDS, write_tokenizer

from fastattn import models
from fastattn.models import SparseEncoder, _encode_calls, _sparse

pytest.importorskip("scipy")
RNG = np.random.default_rng(7)
NAMES = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
}


def write(folder, kind="bert", strategy="max", function="relu", first="Transformer", **changes):
    """A tiny masked language model of WORDS, with SpladePooling; its weights are returned."""
    config = {"vocab_size": len(WORDS), **changes}
    weights = tiny.tensors(kind, {**tiny.CONFIGS[kind], **config})
    dense, norm, head = NAMES[kind]
    vectors = (f"{dense}.bias", f"{norm}.weight", f"{norm}.bias")
    shapes = {f"{dense}.weight": (24, 24), **dict.fromkeys(vectors, (24,)), f"{head}.bias": (13,)}
    if not config.get("tie_word_embeddings", True):
        shapes |= {f"{head}.decoder.weight": (13, 24), f"{head}.decoder.bias": (13,)}
    for name, shape in shapes.items():
        weights[name] = 0.3 * RNG.standard_normal(shape, np.float32)
    stored = {name if name in shapes else f"{kind}.{name}": weight for name, weight in weights.items()}
    tiny.write(folder, kind, stored, **config)
    write_tokenizer(folder)
    pooling = folder / "1_SpladePooling"
    pooling.mkdir(exist_ok=True)
    settings = {"pooling_strategy": strategy, "activation_function": function}
    (pooling / "config.json").write_text(json.dumps(settings))
    parts = ((first, ""), ("SpladePooling", pooling.name))
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in parts]
    (folder / "modules.json").write_text(json.dumps(modules))
    return weights


def expected_of(model, t, text, kind="bert", strategy="max", function="relu", tied=True, eps=1e-12):
    """The definition on the encoder's hidden states, in float64."""
    dense, norm, head = NAMES[kind]
    x = model.encoder(model.text.encode([text]))[0].astype(np.float64)
    x = x @ t[f"{dense}.weight"].T + t[f"{dense}.bias"]
    x = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    x = tiny.layer_norm(x, t, norm, eps)
    table, bias = ("embeddings.word_embeddings.weight", f"{head}.bias")
    if not tied:
        table, bias = f"{head}.decoder.weight", f"{head}.decoder.bias"
    x = np.log1p(np.maximum(x @ t[table].T + t[bias], 0))
    x = np.log1p(x) if function == "log1p_relu" else x
    return x.max(axis=0) if strategy == "max" else x.sum(axis=0)


@pytest.mark.parametrize("function", _sparse.FUNCTIONS)
@pytest.mark.parametrize("strategy", _sparse.STRATEGIES)
@pytest.mark.parametrize("kind", NAMES)
def test_weights_by_their_definition(kind, strategy, function, tmp_path, implementation):
    weights = write(tmp_path, kind, strategy, function)
    model = models.load(tmp_path)
    assert isinstance(model, SparseEncoder)
    got = model.encode(TEXTS)
    assert got.shape == (5, 13)
    assert got.dtype == np.float32
    assert got.format == "csr"
    assert 0.2 < got.nnz / (5 * 13) < 0.95
    eps = 1e-5 if kind == "bert" else 1e-12
    expected = [expected_of(model, weights, text, kind, strategy, function, eps=eps) for text in TEXTS]
    np.testing.assert_allclose(got.toarray(), expected, rtol=2e-5, atol=2e-5)


def test_an_output_of_its_own(tmp_path):
    weights = write(tmp_path, tie_word_embeddings=False, first="MLMTransformer")
    model = models.load(tmp_path)
    expected = expected_of(model, weights, "the cat", tied=False, eps=1e-5)
    np.testing.assert_allclose(model.encode("the cat").toarray()[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", _sparse.STRATEGIES)
@each_isa
def test_bits_do_not_depend_on_company(isa, strategy, tmp_path, monkeypatch):
    write(tmp_path, strategy=strategy)
    texts = [*TEXTS, *reversed(TEXTS)] * 3
    with forced(isa):
        model = models.load(tmp_path)
        expected = model.encode(texts).toarray()
        for logits, tokens in ((1, 768), (13 * 4, 768), (13 * 7, 40), (1 << 23, 20)):
            monkeypatch.setattr(_sparse, "_LOGITS", logits)
            monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", tokens)
            for batch_size in (None, 1, 4):
                got = model.encode(texts, batch_size=batch_size).toarray()
                np.testing.assert_array_equal(got, expected)
        for text, weights in zip(texts, expected, strict=True):
            np.testing.assert_array_equal(model.encode(text).toarray()[0], weights)


def test_the_largest_weights(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    every = model.encode(TEXTS).toarray()
    for most in (1, 3, 20):
        got = model.encode(TEXTS, max_active_dims=most).toarray()
        least = np.sort(every, axis=1)[:, -min(most, 13)][:, None]
        np.testing.assert_array_equal(got, np.where(every >= least, every, 0))
    write_settings(tmp_path, max_active_dims=2)
    folder = models.load(tmp_path)
    assert np.diff(folder.encode(TEXTS).indptr).tolist() == [2] * 5
    assert np.diff(folder.encode(TEXTS, max_active_dims=3).indptr).tolist() == [3] * 5


def test_prompts_and_other_forms(tmp_path):
    write(tmp_path)
    write_settings(tmp_path, prompts={"query": "the dog ", "passage": "a tree "})
    model = models.load(tmp_path)
    for call, prompt in ((model.encode, ""), (model.encode_query, "the dog "), (model.encode_document, "")):
        expected = model.encode([prompt + text for text in TEXTS]).toarray()
        assert_same_rows(call(iter(TEXTS), batch_size=2).toarray(), expected)
    got = model.encode_query(TEXTS, prompt_name="passage").toarray()
    np.testing.assert_array_equal(got, model.encode(TEXTS, prompt="a tree ").toarray())
    assert model.encode([]).shape == (0, 13)
    assert model.get_sentence_embedding_dimension() == 13
    assert repr(model) == "<bert: 2 layers of 24, float32; SparseEncoder of 13>"


def test_similarity(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    x = model.encode(TEXTS)
    dense = x.toarray().astype(np.float64)
    assert model.similarity_fn_name == "dot"
    np.testing.assert_allclose(model.similarity(x, x[:2]), dense @ dense[:2].T, rtol=1e-6)
    write_settings(tmp_path, similarity_fn_name="cosine")
    norms = np.linalg.norm(dense, axis=1)
    got = models.load(tmp_path).similarity(x, x)
    np.testing.assert_allclose(got, dense @ dense.T / np.outer(norms, norms), rtol=1e-6)
    for a, b, error, message in (
        (x, dense, TypeError, "embeddings2 is of type ndarray; expected a sparse array"),
        (x[:, :4], x, ValueError, r"embeddings1 has shape \(5, 4\); expected \(n, 13\)"),
    ):
        with pytest.raises(error, match=rf"similarity\(\): {message}"):
            model.similarity(a, b)


def test_decode(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    dense = model.encode(TEXTS).toarray()
    for top_k in (None, 2):
        for words, weights in zip(model.decode(model.encode(TEXTS), top_k), dense, strict=True):
            order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)][:top_k]
            assert words == [(WORDS[i], float(weights[i])) for i in order]
    with pytest.raises(ValueError, match=r"decode\(\): top_k is 0; expected at least 1"):
        model.decode(model.encode("a"), 0)


@pytest.mark.parametrize("types", [("float64", None), ("float32", "int8"), ("bfloat16", None)])
def test_other_types(types, tmp_path):
    write(tmp_path)
    expected = models.load(tmp_path).encode(TEXTS).toarray()
    dtype, weights_dtype = types
    got = models.load(tmp_path, dtype=dtype, weights_dtype=weights_dtype).encode(TEXTS)
    assert got.dtype == ("float64" if dtype == "float64" else "float32")
    assert 0 < np.abs(got.toarray() - expected).max() < (1e-5 if dtype == "float64" else 0.2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sentences": 3}, TypeError, r"encode\(\): sentences is of type int"),
        ({"max_active_dims": 0}, ValueError, r"encode\(\): max_active_dims is 0; expected at least 1"),
    ],
)
def test_wrong_arguments(options, error, message, tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()  # nothing is read before all is checked
    model = models.load(tmp_path)
    with pytest.raises(error, match=message):
        model.encode(**{"sentences": TEXTS, **options})
    with pytest.raises(TypeError, match=r"encode_query\(\): truncate_dim is not an argument"):
        model.encode_query(TEXTS, truncate_dim=3)


def test_folders_that_do_not_fit(tmp_path):
    write(tmp_path, strategy="mean")
    refused(tmp_path, "1_SpladePooling/config.json: 'pooling_strategy' is 'mean'; expected one of max, sum")
    write(tmp_path, function="gelu")
    refused(tmp_path, "'activation_function' is 'gelu'; expected one of relu, log1p_relu")
    write(tmp_path)
    write_settings(tmp_path, similarity_fn_name="maxsim")
    refused(tmp_path, "'similarity_fn_name' is 'maxsim'; expected one of cosine, dot")
    write_settings(tmp_path)
    tiny.write(tmp_path, "bert", vocab_size=len(WORDS))
    for name in ("bias", "transform.dense.weight"):
        refused(tmp_path, f"'cls.predictions.{name}' is missing")
    write(tmp_path)
    change_config(tmp_path, tie_word_embeddings="no")
    refused(tmp_path, "'tie_word_embeddings' is 'no'; expected true or false")


def test_without_scipy(tmp_path, monkeypatch):
    write(tmp_path)
    model = models.load(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.sparse", raising=False)
    with pytest.raises(ImportError, match=r"models need scipy: pip install scipy "):
        model.encode(TEXTS)
