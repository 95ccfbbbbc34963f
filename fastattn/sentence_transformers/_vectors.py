"""The base of `SentenceTransformer` and `SparseEncoder`: queries, documents and similarities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._args.errors import named
from fastattn._args.values import choice
from fastattn.models._encode_calls import DOCUMENT, QUERY
from fastattn.models._text import strings
from fastattn.models._vectors import SIMILARITIES
from fastattn.sentence_transformers._base import Base, Options, renamed

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from fastattn._args.types import Array


class Vectors(Base):
    """A model that makes a vector of each text, which `similarity` compares."""

    def __init__(
        self, model_name_or_path: str | os.PathLike[str] | None, options: Options, similarity_fn_name: Any
    ):
        super().__init__(model_name_or_path, options)
        usual = self.model.similarity_fn_name
        self.similarity_fn_name = usual if similarity_fn_name is None else similarity_fn_name

    @property
    def similarity_fn_name(self) -> str:
        """Name of what `similarity` computes; it can be set, to a member of their enum, too."""
        return self._similarity

    @similarity_fn_name.setter
    @named("{cls}")
    def similarity_fn_name(self, name: Any) -> None:
        name = getattr(name, "value", name)
        self._similarity = choice("similarity_fn_name", name or SIMILARITIES[0], SIMILARITIES)

    def get_embedding_dimension(self) -> int:
        """Features of a vector."""
        features: int = self.model.get_sentence_embedding_dimension()
        return features

    def get_sentence_embedding_dimension(self) -> int:
        """`get_embedding_dimension` under its older name."""
        return self.get_embedding_dimension()

    @renamed(sentences="inputs")
    def encode_query(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """`encode` for what is searched with: without another prompt, with that of the name "query"."""
        name = self._named(prompt_name, prompt, QUERY)
        return self.encode(inputs, name, prompt, *more, **options, task="query")

    @renamed(sentences="inputs")
    def encode_document(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """`encode` for what is searched: by default with the prompt "document", "passage" or "corpus"."""
        name = self._named(prompt_name, prompt, DOCUMENT)
        return self.encode(inputs, name, prompt, *more, **options, task="document")

    def encode_multi_process(self, sentences: Any, pool: Any = None, *more: Any, **options: Any) -> Any:
        """`encode`, in this process: it uses all CPUs."""
        return self.encode(sentences, *more, **options)

    @named("preprocess")
    def preprocess(self, inputs: Any, prompt: str | None = None) -> dict[str, Array]:
        """Ids of several texts and which of them count, (n, length) each, in NumPy."""
        encoder: Any = getattr(self.model, "encoder", self.model)
        tokens: dict[str, Array] = encoder.tokenize(
            [(prompt or "") + text for text in strings("inputs", inputs)]
        )
        return tokens

    tokenize = preprocess

    @named("similarity")
    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each vector with each, (n, m): an array, or a tensor of tensors."""
        return self._compared(embeddings1, embeddings2, pairwise=False)

    @named("similarity_pairwise")
    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Similarity of each vector with the one in the same place, (n,)."""
        return self._compared(embeddings1, embeddings2, pairwise=True)

    def _named(self, name: str | None, prompt: str | None, names: Sequence[str]) -> str | None:
        """Name of the prompt: `name`, or without another prompt the first of `names` that there is."""
        if name is not None or prompt is not None:
            return name
        return next((each for each in names if each in self.prompts), None)
