"""An embedding function of LanceDB: the extra ``[lancedb]``.

Importing it registers the function, so that tables which were made with it are opened. docs/frameworks.md
shows it.
"""

from __future__ import annotations

from typing import Any

from fastattn.models._text import strings
from fastattn.sentence_transformers import SentenceTransformer

try:
    from lancedb.embeddings import TextEmbeddingFunction, register
    from pydantic import Field, PrivateAttr, field_validator
except ImportError as error:
    raise ImportError(f"fastattn.lancedb needs lancedb: pip install lancedb ({error})") from error

__all__ = ["FastattnEmbeddings"]


def __dir__() -> list[str]:
    return __all__


@register("fastattn")  # type: ignore[untyped-decorator, unused-ignore]
class FastattnEmbeddings(TextEmbeddingFunction):  # type: ignore[misc, unused-ignore]
    """Vectors of texts and of queries, by `fastattn.sentence_transformers.SentenceTransformer`.

    `name` is a folder, or a name of the Hub. The model is loaded by the first call. A table keeps the
    arguments, never weights: where it is opened, the folder must be, or a name of the Hub.
    """

    name: str
    normalize: bool = True
    """Whether to scale vectors to length 1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of `SentenceTransformer`, of which JSON can be made."""
    max_retries: int = 0  # the model fails in the same way again
    _model: Any = PrivateAttr(None)

    @field_validator("options")
    @classmethod
    def _no_secret(cls, options: dict[str, Any]) -> dict[str, Any]:
        if "token" in options:
            raise ValueError("token would be written into tables; expected it in the variable HF_TOKEN")
        return options

    def _loaded(self) -> SentenceTransformer:
        if self._model is None:
            self._model = SentenceTransformer(self.name, **self.options)
        model: SentenceTransformer = self._model
        return model

    def ndims(self) -> int:
        """The number of features."""
        features: int = self._loaded().get_sentence_embedding_dimension()
        return features

    def generate_embeddings(self, texts: Any) -> Any:
        """The vectors of texts, each an array of float32."""
        return list(
            self._loaded().encode_document(list(strings("texts", texts)), normalize_embeddings=self.normalize)
        )

    def compute_query_embeddings(self, query: str) -> Any:
        """The vector of a query, in a list: models may have another prompt for these."""
        return [self._loaded().encode_query(query, normalize_embeddings=self.normalize)]
