"""ColBERT: the vectors' definition, MaxSim, bits, the forms of folders, and what is refused."""

import json
import pickle
import re

import numpy as np
import pytest
import tiny_models as tiny
from implementations import assert_same_rows, each_isa, forced
from model_folders import change_config, refused, write_settings
from safetensors.numpy import load_file, save_file
from tiny_tokenizers import TEXTS, WORDS, write_tokenizer

from fastattn import models
from fastattn.models import ModelError, MultiVectorEncoder, _encode_calls, _similarity

RNG = np.random.default_rng(7)
FIXED = {"strategy": "fixed", "length": 8, "token": "tree"}
DENSE = {"in_features": 24, "out_features": 6, "bias": False, "activation_function": "torch.nn.Identity"}
SKIPPED = {"skiplist_words": ["the", "no"], "skiplist_tasks": ["document"]}
MODULES = (("Dense", DENSE), ("MultiVectorMask", SKIPPED), ("Normalize", {}))


def write(folder, kind="bert", modules=MODULES, settings=None, **knobs):
    """A tiny model of WORDS with a vector of each token; the weight of its map is returned."""
    tiny.write(folder, kind, **({} if kind == "deberta-v2" else {"vocab_size": len(WORDS)}))
    write_tokenizer(folder)
    entries = [{"type": "sentence_transformers.Transformer", "path": ""}]
    weight = RNG.standard_normal((6, 24), np.float32)
    for i, (name, config) in enumerate(modules, 1):
        inner = folder / f"{i}_{name}"
        inner.mkdir(exist_ok=True)
        (inner / "config.json").write_text(json.dumps(config))
        if name == "Dense":
            save_file({"linear.weight": weight}, inner / "model.safetensors")
        entries.append({"type": f"sentence_transformers.{name}", "path": inner.name})
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps(knobs))
    if settings:
        write_settings(folder, **settings)
    return weight


def ids_of(words):
    return [WORDS.index(word) for word in words.split()]


def unit(x):
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def maxsim(query, document):
    return (query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_vectors_by_their_definition(kind, tmp_path, implementation):
    weight = write(tmp_path, kind, query_length=5, document_length=7)
    model = models.load(tmp_path)
    assert isinstance(model, MultiVectorEncoder)
    for task, most in (("query", 5), ("document", 7), (None, 100)):
        got = model.encode(TEXTS, task=task)
        assert isinstance(got, list)
        for text, vectors in zip(TEXTS, got, strict=True):
            (ids,) = model.text.encode([text])
            ids = [*ids[: min(len(ids), most) - 1], ids[-1]]
            states = model.encoder([ids])[0].astype(np.float64)
            if task != "query":
                states = states[[WORDS[token] != "the" for token in ids]]
            assert vectors.dtype == np.float32
            np.testing.assert_allclose(vectors, unit(states @ weight.T), rtol=2e-5, atol=2e-6)


def test_max_seq_length_is_that_of_tasks_without_a_length_of_their_own(tmp_path):
    write(tmp_path, query_length=5)
    model = models.load(tmp_path)
    assert model.max_seq_length == 32
    model.max_seq_length = 4
    long = "cat " * 9
    assert [len(model.encode([long], task=task)[0]) for task in ("query", "document", None)] == [5, 4, 4]
    assert model.max_seq_length == 4


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_queries_are_filled_up(strategy, attend, tmp_path, implementation):
    expansion = {"strategy": strategy, "length": 8, "token": "tree", "attend": attend}
    weight = write(tmp_path, query_expansion=expansion)
    model = models.load(tmp_path)
    tree = WORDS.index("tree")
    for text in TEXTS:
        (ids,) = model.text.encode([text])
        if strategy == "fixed" and len(ids) > 8:
            ids = [*ids[:7], ids[-1]]
        filled = ids + [tree] * (8 - len(ids))
        if attend:
            states = model.encoder([filled])[0]
        else:  # one after another, each mask has the states that it has after the text where none sees it
            whole, _ = model.encoder.hidden([np.array(filled)], None, [len(ids)])
            np.testing.assert_allclose(whole[: len(ids)], model.encoder([ids])[0], rtol=1e-5, atol=1e-5)
            states = whole
            if len(filled) > len(ids):
                seen = model.encoder([filled])[0]
                assert np.abs(seen - whole).max() > 1e-3, "a mask that others do not see changes nothing"
        np.testing.assert_allclose(model.encode_query(text), unit(states @ weight.T), rtol=1e-4, atol=1e-5)
    lengths = [len(x) for x in model.encode_query(TEXTS)]
    assert lengths == ([8] * 5 if strategy == "fixed" else [8, 8, 8, 14, 8])


@each_isa
def test_bits_do_not_depend_on_company(isa, tmp_path, monkeypatch):
    write(tmp_path, query_expansion=FIXED)
    texts = [*TEXTS, *reversed(TEXTS)] * 3
    with forced(isa):
        model = models.load(tmp_path)
        for task in ("query", "document"):
            expected = model.encode(texts, task=task)
            for tokens in (768, 40, 20):
                monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", tokens)
                for batch_size in (None, 1, 4):
                    got = model.encode(texts, batch_size=batch_size, task=task)
                    assert all(map(np.array_equal, got, expected))
            for text, vectors in zip(texts, expected, strict=True):
                np.testing.assert_array_equal(model.encode(text, task=task), vectors)


@each_isa
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_have_the_same_bits_in_any_company(isa, dtype, tmp_path, monkeypatch):
    write(tmp_path)
    model = models.load(tmp_path)
    queries = [RNG.standard_normal((n, 21)).astype(dtype) for n in (3, 32, 1, 0, 40, 7)]
    documents = [RNG.standard_normal((n, 21)).astype(dtype) for n in (30, 1, 0, 200, 77, 16, 33, 0)]
    with forced(isa):
        expected = model.similarity(queries, documents)
        assert expected.dtype == dtype
        for query_tokens, products in ((1, 1), (35, 300), (1000, 5000)):
            monkeypatch.setattr(_similarity, "_QUERY_TOKENS", query_tokens)
            monkeypatch.setattr(_similarity, "_PRODUCTS", products)
            np.testing.assert_array_equal(model.similarity(queries, documents), expected)
        np.testing.assert_array_equal(model.similarity_pairwise(queries, documents[:6]), np.diag(expected))
    for query, row in zip(queries, expected, strict=True):
        for document, score in zip(documents, row, strict=True):
            if not len(document):
                assert score == _similarity.NO_TOKEN
            elif not len(query):
                assert score == 0
            else:
                np.testing.assert_allclose(score, maxsim(query, document), rtol=1e-5, atol=1e-4)


def test_forms_of_vectors(tmp_path):
    write(tmp_path, settings={"similarity_fn_name": "meanmaxsim"})
    model = models.load(tmp_path)
    assert model.similarity_fn_name == "meanmaxsim"
    a, b = RNG.standard_normal((4, 6), np.float32), RNG.standard_normal((9, 6), np.float32)
    got = model.similarity(a, [b, b[:3]])
    np.testing.assert_allclose(got, [[maxsim(a, b) / 4, maxsim(a, b[:3]) / 4]], rtol=1e-5)
    padded = np.zeros((2, 9, 6), np.float32)
    padded[0], padded[1, :3] = -b, -b[:3]
    np.testing.assert_array_equal(model.similarity(a, padded), model.similarity(a, [-b, -b[:3]]))
    np.testing.assert_array_equal(model.similarity([a.tolist()], [b.astype(np.float16)]).shape, (1, 1))
    assert model.similarity([], [b]).shape == (0, 1)
    assert model.similarity([a], []).shape == (1, 0)
    assert model.similarity_pairwise([], []).shape == (0,)
    for n, vectors in ((2, ([a], [np.where(b > 1, np.nan, b)])), (1, ([np.where(a > 1, np.inf, a)], [b]))):
        with pytest.raises(ValueError, match=f"similarity.*: embeddings{n} has values that are not finite"):
            model.similarity(*vectors)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (3, [[[1.0]]], TypeError, "embeddings1"),
        (["a"], [[[1.0]]], TypeError, "embeddings1"),
        ([[1.0]], [[[1.0]]], ValueError, "embeddings1 has shape (1,); expected (tokens, features) of each"),
        ([[[1.0]]], [[[1.0, 2.0]]], ValueError, "embeddings2 has shape (1, 2); expected (tokens, 1), as oth"),
    ],
)
def test_wrong_vectors(a, b, error, message, tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    for call in (model.similarity, model.similarity_pairwise):
        with pytest.raises(error, match=re.escape(message)):
            call(a, b)
    with pytest.raises(ValueError, match="embeddings2 is of 2 texts; expected 1, as many as embeddings1"):
        model.similarity_pairwise([[[1.0]]], [[[1.0]], [[1.0]]])


def test_prompts_and_other_forms(tmp_path):
    prompts = {"query": "the dog ", "passage": "a tree "}
    write(tmp_path, settings={"prompts": prompts})
    model = models.load(tmp_path)
    for call, task, prompt in (
        (model.encode, None, ""),
        (model.encode_query, "query", "the dog "),
        (model.encode_document, "document", ""),
    ):
        expected = model.encode([prompt + text for text in TEXTS], task=task)
        for got, vectors in zip(call(iter(TEXTS), batch_size=2), expected, strict=True):
            assert_same_rows(got, vectors)
    got = model.encode_query(TEXTS, prompt_name="passage")
    assert all(map(np.array_equal, got, model.encode(TEXTS, prompt="a tree ", task="query")))
    assert model.encode([]) == []
    assert model.get_embedding_dimension() == 6
    assert repr(model) == "<bert: 2 layers of 24, float32; MultiVectorEncoder of 6>"
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.encode("a dog"), model.encode("a dog"))


def test_vectors_are_scaled_where_asked(tmp_path):
    write(tmp_path, modules=MODULES[:2])
    model = models.load(tmp_path)
    plain, scaled = model.encode("a dog ran"), model.encode("a dog ran", normalize_embeddings=True)
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).max() > 0.1
    np.testing.assert_allclose(scaled, unit(plain), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_types(dtype, tmp_path):
    write(tmp_path, query_expansion=FIXED)
    near = 1e-5 if dtype == "float64" else 0.1
    expected = models.load(tmp_path).encode_query(TEXTS)
    got = models.load(tmp_path, dtype=dtype).encode_query(TEXTS)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == (np.float64 if dtype == "float64" else np.float32)
        np.testing.assert_allclose(a, b, atol=near)


def test_a_document_of_skipped_words_has_no_vectors(tmp_path):
    skipped = {"skiplist_words": ["<s>", "</s>", "the", "cat"], "skiplist_tasks": "document"}
    write(tmp_path, modules=(MODULES[0], ("MultiVectorMask", skipped), MODULES[2]))
    model = models.load(tmp_path)
    vectors = model.encode_document(["the cat", "the dog"])
    assert [x.shape for x in vectors] == [(0, 6), (1, 6)]
    assert model.encode_query("the cat").shape == (4, 6)
    assert model.similarity(model.encode_query(["the cat"]), vectors)[0, 0] == _similarity.NO_TOKEN


def test_the_folder_names_the_mask(tmp_path):
    write(tmp_path, query_expansion={**FIXED, "token": None})
    model = models.load(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer.json has none of '\[MASK\]', '<mask>'; expected a to"):
        model.encode_query("a")
    for says in ({"mask_token": {"content": "tree"}}, {"mask_token": None, "eos_token": "tree"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(says))
        assert next(iter(models.load(tmp_path)._tokens(["a"], "query")))[-1] == (WORDS.index("tree"), 0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"padding_side": "left"}))
    with pytest.raises(ModelError, match="'padding_side' is 'left'; only 'right' is supported"):
        models.load(tmp_path).encode_query("a")


def test_a_folder_of_pylate(tmp_path):
    settings = {
        "model_type": "ColBERT", "query_prefix": "dog ", "document_prefix": "cat ", "query_length": 7,
        "document_length": 6, "attend_to_expansion_tokens": True, "skiplist_words": ["mat"],
    }  # fmt: skip
    write(tmp_path, modules=MODULES[:1], settings=settings, max_seq_length=9)
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": "tree"}')
    model = models.load(tmp_path)
    weight = load_file(tmp_path / "1_Dense/model.safetensors")["linear.weight"]
    ids = ids_of("<s> dog the mat </s> tree tree")
    expected = unit(model.encoder([ids])[0] @ weight.T)
    np.testing.assert_allclose(model.encode_query("the mat"), expected, rtol=1e-4, atol=1e-5)
    ids = ids_of("<s> cat the mat on </s>")
    expected = unit(model.encoder([ids])[0] @ weight.T)[[0, 1, 2, 4, 5]]
    np.testing.assert_allclose(model.encode_document("the mat on a"), expected, rtol=1e-4, atol=1e-5)
    write_settings(tmp_path, **{**settings, "do_query_expansion": False})
    assert len(models.load(tmp_path).encode_query("the mat")) == 5


def test_a_folder_of_stanford(tmp_path):
    tiny.write(tmp_path, "bert", vocab_size=len(WORDS))
    write_tokenizer(tmp_path)
    change_config(tmp_path, architectures=["HF_ColBERT"])
    refused(tmp_path, "'architectures' has 'HF_ColBERT'; expected a folder with modules.json: sent")


@pytest.mark.parametrize(
    ("knobs", "parts"),
    [
        ({"query_expansion": {"strategy": "all", "length": 4}}, ["'strategy' is 'all'", "fixed, min"]),
        ({"query_expansion": {"strategy": "fixed"}}, ["'length' is missing"]),
        ({"query_expansion": {**FIXED, "attend": 1}}, ["'attend' is 1"]),
        ({"query_expansion": {**FIXED, "token": 4}}, ["'token' is 4"]),
        ({"query_expansion": {**FIXED, "length": 10**6}}, ["is 1000000", "the model's positions"]),
        ({"query_expansion": FIXED, "query_length": 7}, ["'query_length' is 7; expected at least", "8"]),
        ({"document_length": 0}, ["'document_length' is 0"]),
    ],
)
def test_settings_that_do_not_fit(knobs, parts, tmp_path):
    write(tmp_path, **knobs)
    refused(tmp_path, "sentence_bert_config.json", *parts)


def test_modules_that_do_not_fit(tmp_path):
    mask = MODULES[1]
    write(tmp_path, modules=(MODULES[0], ("MultiVectorMask", {"keep_only_token_ids": [3]})))
    refused(tmp_path, "2_MultiVectorMask", "keep_only_token_ids")
    write(tmp_path, modules=(MODULES[0], ("MultiVectorMask", {"skiplist_words": [3]})))
    refused(tmp_path, "'skiplist_words' is [3]; expected a list of strings")
    write(tmp_path, modules=(("Dense", {**DENSE, "module_input_name": "sentence_embedding"}), mask))
    refused(tmp_path, "'module_input_name' is 'sentence_embedding'; only 'token_embeddings'")
    for modules in ((mask, mask), MODULES[:1], (mask, ("Pooling", {}))):
        write(tmp_path, modules=modules)
        refused(tmp_path, "modules.json has Transformer", "expected Transformer and Pooling first")
    write(tmp_path, "deberta-v2", query_expansion=FIXED)
    refused(tmp_path, "'attend' of 'query_expansion' is false for deberta-v2; expected true")


def test_wrong_arguments(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    for call, given, error, message in (
        (model.encode, {"task": "passage"}, ValueError, r"encode\(\): task is 'passage'; expected one of"),
        (model.encode_query, {"truncate_dim": 3}, TypeError, r"encode_query\(\): truncate_dim"),
        (model.encode_document, {"batch_size": 0}, ValueError, r"encode_document\(\): batch_size is 0"),
    ):
        with pytest.raises(error, match=message):
            call("a", **given)
