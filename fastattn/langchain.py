"""Embeddings and a reranker of LangChain: the extra ``[langchain]``. docs/frameworks.md shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastattn.sentence_transformers import CrossEncoder, SentenceTransformer

try:
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from pydantic import Field, PrivateAttr
except ImportError as error:
    raise ImportError(
        f"fastattn.langchain needs langchain-core: pip install langchain-core ({error})"
    ) from error

__all__ = ["FastattnEmbeddings", "FastattnReranker"]


def __dir__() -> list[str]:
    return __all__


class FastattnEmbeddings(Embeddings):  # type: ignore[misc, unused-ignore]
    """Vectors of documents and of queries, by `fastattn.sentence_transformers.SentenceTransformer`.

    Parameters
    ----------
    model_name : str or path
        A folder, or a name of the Hub.
    encode_kwargs, query_encode_kwargs : dict, optional
        Arguments of `encode_document` and of `encode_query`, such as ``{"normalize_embeddings": True}``; the
        second are by default the first.
    **options
        Other arguments of `SentenceTransformer`.
    """

    def __init__(
        self,
        model_name: Any,
        *,
        encode_kwargs: dict[str, Any] | None = None,
        query_encode_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.model: SentenceTransformer = SentenceTransformer(model_name, **options)
        self.encode_kwargs = encode_kwargs or {}
        self.query_encode_kwargs = self.encode_kwargs if query_encode_kwargs is None else query_encode_kwargs

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of documents."""
        vectors: list[list[float]] = self.model.encode_document(texts, **self.encode_kwargs).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        vector: list[float] = self.model.encode_query(text, **self.query_encode_kwargs).tolist()
        return vector


class FastattnReranker(BaseDocumentCompressor):  # type: ignore[misc, unused-ignore]
    """The documents that fit a query best, by `fastattn.sentence_transformers.CrossEncoder`.

    Documents are copies, with "relevance_score" in their metadata, the best one first.
    """

    model_name: str
    top_n: int = Field(3, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of `CrossEncoder`."""
    _model: Any = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        """Load the model."""
        super().model_post_init(context)
        self._model = CrossEncoder(self.model_name, **self.options)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> list[Document]:
        """Return the best `top_n` of `documents` for `query`."""
        documents = list(documents)
        texts = [document.page_content for document in documents]
        best = []
        for found in self._model.rank(query, texts, top_k=self.top_n):
            document = documents[found["corpus_id"]]
            metadata = {**document.metadata, "relevance_score": found["score"]}
            best.append(document.model_copy(update={"metadata": metadata}))
        return best
