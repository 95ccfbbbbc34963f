"""The class SentenceTransformer, over the encoders of `fastattn.models`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from fastattn import models
from fastattn._args.errors import named
from fastattn._args.types import Unpack
from fastattn._args.values import choice, integer
from fastattn.models._encode_calls import model_of, one_or_several
from fastattn.models._similarity import PRECISIONS, quantize_embeddings
from fastattn.sentence_transformers._base import (
    Options,
    Vectors,
    as_asked,
    compared,
    renamed,
)

_INSTRUCTOR = tuple(f"hkunlp/instructor-{size}" for size in ("base", "large", "xl"))  # leave out prompts


class SentenceTransformer(Vectors):
    """`sentence_transformers.SentenceTransformer` for inference, over `fastattn.models.Encoder`.

    Parameters
    ----------
    model_name_or_path, **options
        As in `_base.Base`; names without an organisation are of sentence-transformers.
    similarity_fn_name : {"cosine", "dot", "euclidean", "manhattan"}, optional
        Measure of `similarity`; by default as the folder says.
    truncate_dim : int, optional
        Number of features to keep; by default as the folder says. Both can be set later.
    """

    _kinds = (models.Encoder, models.TwoTowers)
    _organization = "sentence-transformers"

    @renamed(tokenizer_kwargs="processor_kwargs")
    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | None = None,
        *,
        similarity_fn_name: Any = None,
        truncate_dim: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(model_name_or_path, options, similarity_fn_name)
        settings = self.model.sentences
        given = settings.truncate_dim if truncate_dim is None else truncate_dim
        self.truncate_dim: int | None = None if given is None else integer("truncate_dim", given, 1)
        if model_name_or_path in _INSTRUCTOR:
            self.set_pooling_include_prompt(False)

    def get_embedding_dimension(self) -> int:
        """Features of a vector."""
        features: int = self.model.sentences.features
        return min(features, self.truncate_dim or features)

    def set_pooling_include_prompt(self, include_prompt: bool) -> None:
        """Include a prompt's tokens in pooling, or leave them out."""
        settings = self.model.sentences
        pooling = replace(settings.pooling, include_prompt=include_prompt)
        object.__setattr__(self.model, "sentences", replace(settings, pooling=pooling))

    @renamed(sentences="inputs")
    @named("encode")
    def encode(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **others: Any,
    ) -> Any:
        """Make a vector of each text.

        Parameters
        ----------
        inputs : str, or list of str
            {"text": str} is a text, too. Models of images take images, as `fastattn.models.TwoTowers.encode`.
        prompt_name, prompt, batch_size, show_progress_bar, normalize_embeddings : optional
            As in `fastattn.models.Encoder.encode`.
        output_value : "sentence_embedding"
            No others: a call of `model` returns vectors of tokens.
        precision : {"float32", "int8", "uint8", "binary", "ubinary"}
            As in `fastattn.models.quantize_embeddings`, with the ranges of these vectors.
        convert_to_numpy, convert_to_tensor : bool
            Return tensors of torch, one or a list, if the second is true, or the first is false.
        truncate_dim : int, optional
            By default the attribute.
        device, pool, chunk_size, task : optional
            "cpu"; without effect, as one process uses all CPUs; the route of a model that has several.

        Returns
        -------
        ndarray, (n, features), or (features,) for one str
            Or as the arguments say; (0,) for no texts.
        """
        call = self._call(
            SentenceTransformer.encode, prompt_name, prompt, batch_size, show_progress_bar, device, others
        )
        choice("output_value", output_value, ("sentence_embedding",))
        precision = choice("precision", precision or "float32", PRECISIONS)
        dim = self.truncate_dim if truncate_dim is None else truncate_dim
        dim = self.model.sentences.features if dim is None else integer("truncate_dim", dim, 1)
        one, texts = self._texts(inputs)
        model = model_of(self.model, others.get("task"), optional=True)
        vectors = model.encode(
            texts[0] if one else texts,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=dim,
            **call,
        )
        if precision != "float32":
            if (one or len(vectors) == 1) and precision.endswith("int8"):
                raise ValueError(f"(): inputs has one item for precision={precision!r}; expected several")
            vectors = quantize_embeddings(vectors, precision)
        return as_asked(vectors, one, convert_to_numpy, convert_to_tensor)

    def _compared(self, a: Any, b: Any, pairwise: bool) -> Any:
        return compared(self.similarity_fn_name, a, b, pairwise)

    def _texts(self, inputs: Any) -> tuple[bool, Any]:
        """Return whether `inputs` is one, and the list of them."""
        if isinstance(inputs, dict):
            inputs = _content(inputs)
        elif isinstance(inputs, (list, tuple)):
            inputs = [_content(each) for each in inputs]
        images = isinstance(self.model, models.TwoTowers)
        one, texts = self.model._inputs(inputs) if images else one_or_several(inputs, "inputs")
        return one, list(texts)


def _content(x: Any) -> Any:
    """The text of {"text": text}, the image of {"image": image}; anything else as it is."""
    if not isinstance(x, dict):
        return x
    if len(x) != 1 or not x.keys() <= {"text", "image"}:
        there = ", ".join(map(str, x))
        raise ValueError(f"(): inputs has a dict with {there}; expected 'text' or 'image' alone")
    return next(iter(x.values()))
