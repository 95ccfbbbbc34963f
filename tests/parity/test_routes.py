"""Static embeddings and routers against sentence-transformers, which makes and saves the tiny models."""

import json

import numpy as np
import pytest
import sentence_transformers
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseStaticEmbedding, SpladePooling
from tiny_tokenizers import TEXTS, WORDS
from transformers_folders import SIZES, randomised, reloaded, require_close, save_tokenizer

from fastattn import models
from fastattn import sentence_transformers as ours
from fastattn.models import ModelError

pytestmark = pytest.mark.usefixtures("quiet")
PROMPTS = {"query": "the dog sat ", "document": "a tree "}
LONG = [*TEXTS, "the cat sat on a tree " * 20]
CALLS = ("encode", "encode_query", "encode_document")


def static(truncation=None, features=20, seed=0):
    """A StaticEmbedding; the tokenizer pads and puts special tokens around, which it leaves out."""
    words = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    if truncation is not None:
        tokenizer.enable_truncation(truncation)
    table = np.random.default_rng(seed).standard_normal((len(WORDS), features)).astype(np.float32)
    return modules.StaticEmbedding(tokenizer, embedding_weights=table)


def bert(tmp_path, head=False):
    """The folder of a tiny BERT, with the head of a masked language model or without."""
    folder = tmp_path / "bert"
    folder.mkdir()
    save_tokenizer(folder)
    kind = transformers.BertForMaskedLM if head else transformers.BertModel
    randomised(kind(transformers.BertConfig(**SIZES)), 2).save_pretrained(folder)
    return folder


def both(folder, parts, kind="SentenceTransformer", **options):
    """Build one model in sentence-transformers, which writes it to the folder, and read it here."""
    theirs = getattr(sentence_transformers, kind)(modules=parts, device="cpu", **options)
    return *reloaded(theirs, folder), getattr(ours, kind)(str(folder))


@pytest.mark.parametrize("truncation", [None, 5])
def test_static_embeddings(truncation, tmp_path, implementation):
    parts = [static(truncation), randomised(modules.Dense(20, 12), 1), modules.Normalize()]
    theirs, model, shim = both(tmp_path, parts, prompts=PROMPTS)
    for call in CALLS:
        expected = getattr(theirs, call)(LONG)
        require_close(getattr(model, call)(LONG), expected)
        require_close(getattr(shim, call)(LONG), expected)
    require_close(model.encode("the cat", truncate_dim=7), theirs.encode("the cat", truncate_dim=7))
    assert model.get_sentence_embedding_dimension() == theirs.get_embedding_dimension() == 12


def test_a_static_embedding_in_a_folder_of_its_own(tmp_path):
    """Older versions write it there; models of model2vec have other names of tensors."""
    theirs, _, _ = both(tmp_path, [static(), modules.Normalize()])
    inner = tmp_path / "0_StaticEmbedding"
    inner.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).rename(inner / name)
    path = tmp_path / "modules.json"
    entries = json.loads(path.read_text())
    entries[0] |= {"path": inner.name, "type": "sentence_transformers.models.StaticEmbedding"}
    path.write_text(json.dumps(entries))
    require_close(models.load(tmp_path).encode(LONG), theirs.encode(LONG))
    table = theirs[0].embedding.weight.detach().numpy()
    save_file({"embeddings": table.astype(np.float16)}, inner / "model.safetensors")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    got, expected = models.load(tmp_path).encode(LONG[3]), theirs.encode(LONG[3]).astype(np.float32)
    assert np.abs(expected).max() > 0.1
    assert np.abs(got - expected).max() < 2e-3  # theirs computes in float16


def routed(tmp_path, **options):
    """A router of static queries and documents of a BERT, as in mdbr-leaf-ir-asym, and what follows both."""
    first = modules.Transformer(str(bert(tmp_path)), max_seq_length=32)
    document = [first, modules.Pooling(48, "mean"), randomised(modules.Dense(48, 20), 3)]
    return [modules.Router({"query": [static()], "document": document}, **options), modules.Normalize()]


@pytest.mark.parametrize("default", ["document", "query", None])
def test_a_router(default, tmp_path, implementation):
    parts = routed(tmp_path, default_route=default)
    theirs, model, shim = both(tmp_path / "saved", parts, prompts=PROMPTS)
    assert isinstance(model, models.Encoder)
    results = []
    for call in CALLS:
        results.append(getattr(theirs, call)(LONG))
        require_close(getattr(model, call)(LONG), results[-1])
        require_close(getattr(shim, call)(LONG), results[-1])
    assert np.abs(results[1] - results[2]).max() > 0.1, "two routes that are one show nothing"
    for task in ("query", "document"):
        expected = theirs.encode(LONG, task=task)
        require_close(model.encode(LONG, task=task), expected)
        require_close(shim.encode(LONG, task=task), expected)


def test_max_seq_length_of_all_routes(tmp_path):
    _, model, _ = both(tmp_path / "saved", routed(tmp_path))
    model.max_seq_length = 4
    for task in ("query", "document"):
        assert model.routes.of(task).max_seq_length == 4
    np.testing.assert_array_equal(
        model.encode_query("the cat sat on a mat"), model.encode_query("the cat sat on")
    )


@pytest.mark.parametrize("first", ["query", "document"])
def test_sparse_routes(first, tmp_path, implementation):
    """Queries of the weights of their tokens, as in OpenSearch's models, and documents of SPLADE."""
    folder = bert(tmp_path, head=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=9)
    weight = torch.tensor([0.0, 1, 2, 3, 0, 0.5, -0.25, 4, 1.5, 2.5, 3.5, 1, 2])
    query = [SparseStaticEmbedding(tokenizer, weight)]
    document = [MLMTransformer(str(folder), max_seq_length=30), SpladePooling("max", "log1p_relu")]
    routes = {"query": query, "document": document}
    routes = dict(sorted(routes.items(), reverse=first == "query"))
    router = modules.Router(routes)
    theirs, model, shim = both(
        tmp_path / "saved", [router], "SparseEncoder", similarity_fn_name="dot", prompts=PROMPTS
    )
    assert isinstance(model, models.SparseEncoder)
    for call in CALLS:
        expected = getattr(theirs, call)(LONG)
        require_close(getattr(model, call)(LONG), expected)
        require_close(getattr(shim, call)(LONG), expected)
        for most in (1, 3):
            expected = getattr(theirs, call)(LONG, max_active_dims=most)
            require_close(getattr(model, call)(LONG, max_active_dims=most), expected)
    q, d = model.encode_query(TEXTS), model.encode_document(TEXTS)
    expected = theirs.similarity(
        theirs.encode_query(TEXTS).to_dense(), theirs.encode_document(TEXTS).to_dense()
    )
    assert np.abs(model.similarity(q, d) - expected.numpy()).max() < 1e-4
    got, there = model.decode(q, 2), theirs.decode(theirs.encode_query(TEXTS), 2)
    assert [[word for word, _ in each] for each in got] == [[word for word, _ in each] for each in there]


def test_a_router_after_pooling(tmp_path):
    """The older use of the name Asym: another map for queries than for documents."""
    first = modules.Transformer(str(bert(tmp_path)), max_seq_length=32)
    maps = {task: [randomised(modules.Dense(48, 20), i)] for i, task in enumerate(("query", "document"))}
    theirs, model, _ = both(tmp_path / "saved", [first, modules.Pooling(48, "mean"), modules.Router(maps)])
    for call in CALLS:
        require_close(getattr(model, call)(LONG), getattr(theirs, call)(LONG))


@pytest.mark.parametrize(("change", "message"), [
    ({"types": {}}, "route 'query' is .*; expected a list of names in 'types'"),
    ({"structure": {}}, "'structure' is {}; expected a table of routes"),
    ({"parameters": {"default_route": "x"}}, "there is no route 'x'; expected query, document"),
    ({"parameters": {"route_mappings": {"query": "query"}}}, "'route_mappings' is .*; only {} is supported"),
    ({"structure": {"query": ["../x"]}}, "route 'query' is .*; expected a list"),
    ({"structure": {"query": [["x"]]}}, "route 'query' is .*; expected a list"),
])  # fmt: skip
def test_a_router_that_does_not_fit(change, message, tmp_path):
    both(tmp_path / "saved", routed(tmp_path))
    path = tmp_path / "saved" / "router_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=f"router_config.json.*{message}"):
        models.load(tmp_path / "saved")
