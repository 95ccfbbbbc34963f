"""Embeddings and the reranker of LangChain, on tiny models, in its own store and with its documents."""

import asyncio

import numpy as np
import pytest
import tiny_models as tiny
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from model_folders import write_reranker
from pydantic import ValidationError
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.langchain import FastattnEmbeddings, FastattnReranker

PROMPTS = {"query": "the dog sat ", "document": "a tree "}


def test_embeddings(tmp_path):
    tiny.write(tmp_path, "bert")
    write_tokenizer(tmp_path)
    model = models.load(tmp_path)
    ours = FastattnEmbeddings(tmp_path, prompts=PROMPTS, encode_kwargs={"normalize_embeddings": True})
    expected = model.encode(TEXTS, prompt=PROMPTS["document"], normalize_embeddings=True)
    np.testing.assert_array_equal(ours.embed_documents(TEXTS), expected)
    query = model.encode("the cat", prompt=PROMPTS["query"], normalize_embeddings=True)
    assert ours.embed_query("the cat") == query.tolist()
    assert asyncio.run(ours.aembed_query("the cat")) == query.tolist()
    assert ours.embed_documents([]) == []
    store = InMemoryVectorStore(ours)
    store.add_texts(TEXTS)
    best = np.argsort(-(expected @ query), kind="stable")[:3]
    found = store.similarity_search_with_score("the cat", k=3)
    np.testing.assert_allclose([score for _, score in found], (expected @ query)[best], atol=1e-5)


def test_reranker(tmp_path):
    write_reranker(tmp_path)
    documents = [
        Document(page_content=text, metadata={"place": i}, id=str(i)) for i, text in enumerate(TEXTS)
    ]
    expected = models.load(tmp_path).rank("the cat", TEXTS, top_k=2)
    found = FastattnReranker(model_name=str(tmp_path), top_n=2).compress_documents(documents, "the cat")
    assert [document.metadata["place"] for document in found] == [each["corpus_id"] for each in expected]
    assert [document.metadata["relevance_score"] for document in found] == [
        each["score"] for each in expected
    ]
    assert [document.id for document in found] == [str(document.metadata["place"]) for document in found]
    assert "relevance_score" not in documents[0].metadata
    assert FastattnReranker(model_name=str(tmp_path)).compress_documents([], "the cat") == []
    with pytest.raises(ValidationError):
        FastattnReranker(model_name=str(tmp_path), top_n=0)
