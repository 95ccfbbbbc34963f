"""Embeddings and a reranker of LlamaIndex: the extra ``[llama-index]``. docs/frameworks.md shows them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastattn.sentence_transformers import CrossEncoder, SentenceTransformer

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode
except ImportError as error:
    how = "pip install llama-index-core"
    raise ImportError(f"fastattn.llama_index needs llama-index-core: {how} ({error})") from error

__all__ = ["FastattnEmbedding", "FastattnRerank"]


def __dir__() -> list[str]:
    return __all__


class FastattnEmbedding(BaseEmbedding):  # type: ignore[misc, unused-ignore]
    """Vectors of texts and of queries, by `fastattn.sentence_transformers.SentenceTransformer`.

    `model_name` is a folder, or a name of the Hub.
    """

    encode_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `encode_document` and `encode_query`, such as ``{"normalize_embeddings": True}``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of `SentenceTransformer`."""
    _model: Any = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        """Load the model."""
        super().model_post_init(context)
        self._model = SentenceTransformer(self.model_name, **self.options)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex writes it down."""
        return "FastattnEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._model.encode_query(query, **self.encode_kwargs).tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._model.encode_document(texts, **self.encode_kwargs).tolist()
        return vectors


class FastattnRerank(BaseNodePostprocessor):  # type: ignore[misc, unused-ignore]
    """The nodes that fit a query best, by `fastattn.sentence_transformers.CrossEncoder`; scores are its."""

    model_name: str
    top_n: int = Field(2, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of `CrossEncoder`."""
    _model: Any = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        """Load the model."""
        super().model_post_init(context)
        self._model = CrossEncoder(self.model_name, **self.options)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex writes it down."""
        return "FastattnRerank"

    def _postprocess_nodes(self, nodes: list[Any], query_bundle: Any = None) -> list[Any]:
        if query_bundle is None:
            raise ValueError("FastattnRerank: query_bundle is None; expected a query")
        texts = [each.node.get_content(metadata_mode=MetadataMode.EMBED) for each in nodes]
        best = self._model.rank(query_bundle.query_str, texts, top_k=self.top_n)
        return [nodes[x["corpus_id"]].model_copy(update={"score": x["score"]}) for x in best]
