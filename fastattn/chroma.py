"""An embedding function of Chroma: the extra ``[chroma]``.

Importing it registers the function, so that a client opens collections that were made with it.
docs/frameworks.md shows it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from fastattn._args.errors import named, wrong_type
from fastattn._args.values import flag
from fastattn.models._text import strings
from fastattn.sentence_transformers import SentenceTransformer

try:
    from chromadb import Documents, EmbeddingFunction
    from chromadb.utils.embedding_functions import register_embedding_function
except ImportError as error:
    raise ImportError(f"fastattn.chroma needs chromadb: pip install chromadb ({error})") from error

__all__ = ["FastattnEmbeddingFunction"]


def __dir__() -> list[str]:
    return __all__


@register_embedding_function  # type: ignore[untyped-decorator, unused-ignore]
class FastattnEmbeddingFunction(EmbeddingFunction[Documents]):  # type: ignore[misc, unused-ignore]
    """Vectors of documents and of queries, by `fastattn.sentence_transformers.SentenceTransformer`.

    The model is loaded by the first call. A collection keeps the arguments, never weights: where it is used,
    the folder must be, or a name of the Hub.

    Parameters
    ----------
    model_name : str
        A folder, or a name of the Hub.
    normalize_embeddings : bool, default False
        Whether to scale vectors to length 1.
    **options
        Other arguments of `SentenceTransformer`, of which JSON can be made, such as
        ``model_kwargs={"weights_dtype": "int8"}``.

    Examples
    --------
    >>> import chromadb
    >>> from fastattn.chroma import FastattnEmbeddingFunction
    >>> function = FastattnEmbeddingFunction("sentence-transformers/all-MiniLM-L6-v2")
    >>> collection = chromadb.Client().create_collection("texts", embedding_function=function)
    """

    @named("FastattnEmbeddingFunction")
    def __init__(self, model_name: str, normalize_embeddings: bool = False, **options: Any):
        if not isinstance(model_name, str):
            raise wrong_type("model_name", model_name, "a string")
        self._name, self._options = model_name, options
        self._normalize = flag("normalize_embeddings", normalize_embeddings)

    @cached_property
    def _model(self) -> SentenceTransformer:
        model: SentenceTransformer = SentenceTransformer(self._name, **self._options)
        return model

    def __call__(self, input: Any) -> Any:
        """The vectors of documents, each an array of float32."""
        return list(
            self._model.encode_document(list(strings("input", input)), normalize_embeddings=self._normalize)
        )

    def embed_query(self, input: Any) -> Any:
        """The vectors of queries: models may have another prompt for these."""
        return list(
            self._model.encode_query(list(strings("input", input)), normalize_embeddings=self._normalize)
        )

    @staticmethod
    def name() -> str:
        """Name under which Chroma knows the function."""
        return "fastattn"

    def default_space(self) -> Any:
        """The distance of a collection that says none: cosine."""
        return "cosine"

    def get_config(self) -> dict[str, Any]:
        """The arguments, as Chroma keeps them: without the token, for which the variable HF_TOKEN stands."""
        options = {key: x for key, x in self._options.items() if key != "token"}  # no secret is written down
        return {"model_name": self._name, "normalize_embeddings": self._normalize, "options": options}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> FastattnEmbeddingFunction:
        """Make the function of its arguments."""
        options = config.get("options", {})
        function: FastattnEmbeddingFunction = FastattnEmbeddingFunction(
            config["model_name"], config["normalize_embeddings"], **options
        )
        return function
