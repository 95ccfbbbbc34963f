"""Texts to vectors, with the names that sentence-transformers has for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from fastattn._args.options import NoOptions, require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import choice, flag, integer
from fastattn.models import _model
from fastattn.models._files import require
from fastattn.models._text import strings
from fastattn.models._vectors import (
    PRECISIONS,
    RANGED,
    quantize_embeddings,
    similarities,
    single_vector,
    unit,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, Ints
    from fastattn.models._sentences import Sentences

    Names = tuple[str, ...]

# Tokens that go through the layers at a time: so few that their rows stay in the caches, and enough for the
# products. docs/notes/layers-and-models.md has the times by this number.
_CALL_TOKENS = 768
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")  # names of prompts, the first one there is


class EncodeOptions(TypedDict, total=False):
    """Keyword arguments of `Embedder.encode`, which documents them."""

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None
    precision: str
    normalize_embeddings: bool
    truncate_dim: int | None


class Call(NamedTuple):
    """Checked options of a call of `encode`."""

    prompt: str
    prompt_length: int  # tokens
    batch_size: int | None
    progress: bool
    precision: str
    normalize: bool
    features: int  # of a vector, before it is packed

    def packed(self, vectors: Array) -> Array:
        """What the caller gets of pooled vectors (n, features or more)."""
        vectors = vectors[:, : self.features]
        vectors = unit(vectors) if self.normalize else vectors
        if self.precision in ("binary", "ubinary"):
            return quantize_embeddings(vectors, self.precision)
        return np.ascontiguousarray(vectors)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Embedder(_model.Model):
    """The base of models that make vectors of texts: they have hidden states, and this pools them."""

    sentences: Sentences

    def hidden(
        self,
        sequences: Sequence[Ints],
        types: Sequence[Ints] | None = None,
        attended: Sequence[int] | None = None,
    ) -> tuple[Array, Ints]:
        """Hidden states of the last layer, (tokens, hidden_size), of all sequences end to end.

        Parameters
        ----------
        sequences : list of ndarray of int64, (length,)
            Their ids.
        types : list of ndarray of int64, (length,), optional
            Their token types.
        attended : list of int, optional
            How many tokens of each sequence are attended, the first ones; by default all.

        Returns
        -------
        rows : ndarray, (tokens, hidden_size)
            In the model's dtype. A sequence's rows have the same bits alone and in any company.
        cu_seqlens : ndarray of int64, (n + 1,)
            Sequence i is ``rows[cu_seqlens[i] : cu_seqlens[i + 1]]``.
        """
        raise NotImplementedError

    @property
    def prompts(self) -> dict[str, str]:
        """The folder's prompts by their names."""
        return dict(self.sentences.prompts)

    @property
    def default_prompt_name(self) -> str | None:
        """The name of the prompt that `encode` puts before a text unless it is told another."""
        return self.sentences.default_prompt_name

    @property
    def similarity_fn_name(self) -> str:
        """What `similarity` computes: "cosine", "dot", "euclidean" or "manhattan"."""
        return self.sentences.similarity

    @property
    def max_seq_length(self) -> int | None:
        """The most tokens of a text, special ones included; what is longer is cut.

        It can be set, as in sentence-transformers, up to what the model takes. Calls that have begun go on
        with the length that they began with.
        """
        return self.text.limit

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        object.__setattr__(self, "text", self.text.shortened(type(self).__name__, tokens))

    def get_sentence_embedding_dimension(self) -> int:
        """Features of a vector that `encode` makes."""
        sentences = self.sentences
        return min(sentences.features, sentences.truncate_dim or sentences.features)

    def tokenize(self, texts: Iterable[str]) -> dict[str, Array]:
        """Ids of several texts, padded on the right, and which of them count: what a call of the model takes.

        Returns
        -------
        dict of ndarray
            "input_ids" of int64 and "attention_mask" of bool, both (n, length).
        """
        ids, mask = _model.pad(list(self._encoded(strings("tokenize", "texts", texts))))
        return {"input_ids": ids, "attention_mask": mask}

    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        precision: str = "float32",
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        **others: Unpack[NoOptions],
    ) -> Array:
        """One vector for each text.

        A text's vector has the same bits alone and in any company, and for every `batch_size`.

        Parameters
        ----------
        sentences : str or iterable of str
            What is longer than `max_seq_length` is cut.
        prompt_name : str, optional
            Which of `prompts` is put before each text; by default the one of `default_prompt_name`, if any.
        prompt : str, optional
            What is put before each text; `prompt_name` does not count then.
        batch_size : int, optional
            The most texts that go through the layers at a time. By default, and at most, as many as have 768
            tokens. There is no padding, so it says how much memory a call takes and little else.
        show_progress_bar : bool, optional
            Whether to show one, by tqdm; by default not.
        precision : {"float32", "int8", "uint8", "binary", "ubinary"}, default "float32"
            The others are what `quantize_embeddings` makes of the vectors; "int8" and "uint8" take the ranges
            of this call's vectors.
        normalize_embeddings : bool, default False
            Whether to scale vectors to length 1; if the folder says so, they have it already.
        truncate_dim : int, optional
            Keep the first so many features, before vectors are scaled; by default as the folder says, or all.
        **others
            None: an error says what an argument of another library is called here.

        Returns
        -------
        ndarray, (n, features), or (features,) for one str
            float32, or float64 for a model in float64; int8 or uint8 for the other precisions.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        ModelError
            If the folder has no tokenizer.json, or a malformed one.
        """
        options = EncodeOptions(
            prompt_name=prompt_name,
            prompt=prompt,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            precision=precision,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            **others,
        )
        return self._encode("encode", sentences, options)

    def encode_query(self, sentences: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Array:
        """`encode` for what is searched with: without another prompt, with that of the name "query"."""
        return self._encode("encode_query", sentences, options, QUERY)

    def encode_document(self, sentences: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Array:
        """`encode` for what is searched: without another prompt, with that of "document".

        Where `prompts` does not have that name, "passage" counts, and then "corpus".
        """
        return self._encode("encode_document", sentences, options, DOCUMENT)

    def similarity(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Array:
        """Similarity of each vector of (n, features) to each of (m, features): (n, m).

        The folder says which, `similarity_fn_name`; "euclidean" and "manhattan" are negative distances.
        A single vector (features,) counts as one of (1, features).
        """
        return similarities("similarity", self.similarity_fn_name, embeddings1, embeddings2, pairwise=False)

    def similarity_pairwise(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Array:
        """Similarity of each vector of (n, features) to the one in the same place: (n,)."""
        kind = self.similarity_fn_name
        return similarities("similarity_pairwise", kind, embeddings1, embeddings2, pairwise=True)

    def _encode(self, func: str, sentences: Any, options: EncodeOptions, names: Names = ()) -> Array:
        """`encode`, for messages of `func`; `names` are those of prompts that come before the default one."""
        one, lines = self._inputs(func, sentences)
        call = self._checked(func, options, names)
        ranged = call.precision in RANGED
        if one and ranged:
            raise single_vector(func, "sentences", call.precision)
        chunks = deque(watched(self._vectors(lines, call), call.progress, lines))
        if not chunks:
            chunks.append(call.packed(np.empty((0, call.features), lane_dtype(self.dtype))))
        vectors = np.empty((sum(map(len, chunks)), *chunks[0].shape[1:]), chunks[0].dtype)
        done = 0
        while chunks:  # each is freed before the next one is copied
            chunk = chunks.popleft()
            vectors[done : done + len(chunk)] = chunk
            done += len(chunk)
        if ranged:
            if len(vectors) == 1:
                raise single_vector(func, "sentences", call.precision)
            vectors = quantize_embeddings(vectors, call.precision)
        return vectors[0] if one else vectors

    def _inputs(self, func: str, sentences: Any) -> tuple[bool, Iterable[Any]]:
        """Whether `sentences` is one text, and the checked texts."""
        return one_or_several(func, sentences)

    def _encoded(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of each text; texts are read when they are needed."""
        return self.text.encoded(texts)

    def _vectors(self, texts: Iterable[Any], call: Call) -> Iterator[Array]:
        """The vectors in order, an array (n, features) at a time; texts are read when they are needed.

        Precisions for which the ranges of all vectors count are left to the caller.
        """
        encoded = self._encoded(call.prompt + text for text in texts)
        for sequences in calls(encoded, call.batch_size):
            rows, cu_seqlens = self.hidden(sequences)
            yield call.packed(self.sentences.vectors(rows, cu_seqlens, call.prompt_length))

    def _checked(self, func: str, options: EncodeOptions, names: Names = ()) -> Call:
        """The options of a call of `func`."""
        require_options(func, options, EncodeOptions)
        prompt = self.sentences.prompt(func, options.get("prompt_name"), options.get("prompt"), names)
        batch_size, progress = batches(func, options.get("batch_size"), options.get("show_progress_bar"))
        truncate_dim = options.get("truncate_dim")
        truncate_dim = self.sentences.truncate_dim if truncate_dim is None else truncate_dim
        most = self.sentences.features
        precision = choice(func, "precision", options.get("precision", "float32"), PRECISIONS)
        call = Call(
            prompt=prompt,
            prompt_length=0,
            batch_size=batch_size,
            progress=progress,
            precision=precision,
            normalize=flag(func, "normalize_embeddings", options.get("normalize_embeddings", False)),
            features=most
            if truncate_dim is None
            else min(most, integer(func, "truncate_dim", truncate_dim, 1)),
        )
        if call.prompt and not self.sentences.pooling.include_prompt:
            return call._replace(prompt_length=self.text.prompt_length(call.prompt))
        return call


def one_or_several(func: str, sentences: Any) -> tuple[bool, Iterable[str]]:
    """Whether `sentences` is one text, and the checked texts."""
    one = isinstance(sentences, str)
    texts = [sentences] if one else sentences
    return one, strings(func, "sentences", texts, "a string, or several, as [text]")


def batches(func: str, batch_size: Any, show_progress_bar: Any) -> tuple[int | None, bool]:
    """These arguments of a call of `func`, checked."""
    return (
        None if batch_size is None else integer(func, "batch_size", batch_size, 1),
        show_progress_bar is not None and flag(func, "show_progress_bar", show_progress_bar),
    )


def watched(chunks: Iterator[Any], progress: bool, texts: Iterable[Any]) -> Iterator[Any]:
    """`chunks` of what is made of `texts`, shown if asked."""
    total = len(texts) if isinstance(texts, Sized) else None
    return shown(chunks, total=total) if progress else chunks


def shown(chunks: Iterator[Array], **how: Any) -> Iterator[Array]:
    """The same arrays, and a progress bar of tqdm that counts their rows."""
    with require("tqdm").tqdm(unit=" texts", **how) as bar:
        for vectors in chunks:
            yield vectors
            bar.update(len(vectors))


def calls(encoded: Iterable[list[Any]], batch_size: int | None) -> Iterator[list[Ints]]:
    """The ids of the texts, or what there is of each token, that go through the layers together."""
    call: list[Ints] = []
    tokens, most = 0, min(batch_size or _CALL_TOKENS, _CALL_TOKENS)  # texts without tokens count, too
    for ids in encoded:
        if call and (tokens + len(ids) > _CALL_TOKENS or len(call) == most):
            yield call
            call, tokens = [], 0
        call.append(np.array(ids, np.int64))
        tokens += len(ids)
    if call:
        yield call


def at_once(rows: int) -> int:
    """How many inputs of so many rows each go through the layers together."""
    return max(1, _CALL_TOKENS // rows)
