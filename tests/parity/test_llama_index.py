"""Embeddings and the reranker of LlamaIndex, on tiny models, in an index of its own."""

import asyncio

import numpy as np
import pytest
import tiny_models as tiny
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import NodeWithScore, TextNode
from model_folders import write_reranker
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.llama_index import FastattnEmbedding, FastattnRerank

PROMPTS = {"query": "the dog sat ", "document": "a tree "}


def test_embeddings(tmp_path):
    tiny.write(tmp_path, "bert")
    write_tokenizer(tmp_path)
    ours = FastattnEmbedding(
        model_name=str(tmp_path), options={"prompts": PROMPTS}, encode_kwargs={"normalize_embeddings": True}
    )
    model = models.load(tmp_path)
    texts = [text for text in TEXTS if text]
    expected = model.encode(texts, prompt=PROMPTS["document"], normalize_embeddings=True)
    query = model.encode("the cat", prompt=PROMPTS["query"], normalize_embeddings=True)
    np.testing.assert_array_equal(np.float32(ours.get_text_embedding_batch(texts)), expected)
    assert ours.get_text_embedding(texts[0]) == expected[0].tolist()
    assert ours.get_query_embedding("the cat") == query.tolist()
    assert asyncio.run(ours.aget_query_embedding("the cat")) == query.tolist()
    index = VectorStoreIndex([TextNode(text=text) for text in texts], embed_model=ours)
    found = index.as_retriever(similarity_top_k=3).retrieve("the cat")
    np.testing.assert_allclose([x.score for x in found], np.sort(expected @ query)[::-1][:3], atol=1e-5)


def test_reranker(tmp_path):
    write_reranker(tmp_path)
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i)), score=0.5) for i, text in enumerate(TEXTS)]
    expected = models.load(tmp_path).rank("the cat", TEXTS, top_k=2)
    ours = FastattnRerank(model_name=str(tmp_path))
    found = ours.postprocess_nodes(nodes, query_str="the cat")
    assert [(x.node_id, x.score) for x in found] == [(str(x["corpus_id"]), x["score"]) for x in expected]
    assert {x.score for x in nodes} == {0.5}
    with pytest.raises(ValueError, match="query_bundle is None; expected a query"):
        ours.postprocess_nodes(nodes)
