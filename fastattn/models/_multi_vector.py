"""ColBERT (Khattab and Zaharia 2020): texts to a vector of each token, which MaxSim compares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.errors import named
from fastattn._args.options import NoOptions
from fastattn._args.types import lane_dtype
from fastattn._args.values import choice, short
from fastattn.models._encode_calls import (
    DOCUMENT,
    QUERY,
    Call,
    TextOptions,
    calls,
    given,
    one_or_several,
    watched,
)
from fastattn.models._encoder import EncoderWithHead
from fastattn.models._files import Config, ModelError, tokenizer_config
from fastattn.models._sentences import applied
from fastattn.models._vectors import maxsim, maxsim_pairs, unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Unpack

    from fastattn._args.types import Array, Bools, Ints
    from fastattn.models._sentences import Dense, LayerNorm, Normalize
    from fastattn.models._text import Text

    Names = tuple[str, ...]

TASKS = ("query", "document")


class MultiVectorOptions(TextOptions, total=False):
    """Keyword arguments of `MultiVectorEncoder.encode`, which documents them."""

    normalize_embeddings: bool


class Expansion(NamedTuple):
    """Filling of queries up to a length, by mask tokens, which have vectors, too."""

    length: int  # tokens that a query has at least
    fixed: bool  # and at most
    attend: bool  # whether others attend them
    token: str | None  # by default the tokenizer's mask, or the end of a text


class Settings(NamedTuple):
    """Settings in the folder: filling, tokens without a vector, similarity."""

    expansion: Expansion | None
    skipped: tuple[str, ...]  # tokens that have no vector
    skipped_in: tuple[str, ...]  # tasks of which that is true
    similarity: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiVectorEncoder(EncoderWithHead):
    """An encoder with a vector for each token of a text: `encode` texts with it."""

    modules: tuple[Dense | LayerNorm | Normalize, ...]  # after the encoder, for each token
    features: int  # of a vector
    settings: Settings
    texts: dict[str | None, Text]  # the tokenizers of tasks, which cut texts to their lengths

    @property
    def similarity_fn_name(self) -> str:
        """Name of what `similarity` computes: "maxsim" or "meanmaxsim"."""
        return self.settings.similarity

    def __repr__(self) -> str:
        return self._described(self.features)

    def _replace_text(self, text: Text) -> None:
        """Tasks that have a length of their own keep it."""
        own = {task: each for task, each in self.texts.items() if each is not self.text}
        object.__setattr__(self, "texts", {**dict.fromkeys(self.texts, text), **own})
        super(MultiVectorEncoder, self)._replace_text(text)

    def get_embedding_dimension(self) -> int:
        """Features of a vector."""
        return self.features

    @named("encode")
    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        task: str | None = None,
        **others: Unpack[NoOptions],
    ) -> Any:
        """The vectors of each text's tokens; `encode_query` and `encode_document` are what retrieval needs.

        The bits of vectors depend on their text alone, not on other texts or on `batch_size`.

        Parameters
        ----------
        sentences, prompt_name, prompt, batch_size, show_progress_bar
            As in `Encoder.encode`.
        normalize_embeddings : bool, default False
            Whether to scale vectors to length 1; most folders say so, and they have it already.
        task : {"query", "document"}, optional
            What is done with the tokens: queries are cut to their length and filled up, documents are cut to
            theirs. Tokens that the folder names, as punctuation, have no vector in a document, and in a text
            without a task.
        **others
            None: an error says what an argument of another library is called here.

        Returns
        -------
        list of ndarray, (tokens, features) each; one ndarray for one str
            float32, or float64 for a model in float64.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        ModelError
            If the folder has no tokenizer.json, or one that does not fit the model.
        """
        values = prompt_name, prompt, batch_size, show_progress_bar, normalize_embeddings
        options = given(MultiVectorOptions, *values, **others)
        task = None if task is None else choice("task", task, TASKS)
        return self._encode(sentences, options, task)

    @named("encode_query")
    def encode_query(self, sentences: str | Iterable[str], **options: Unpack[MultiVectorOptions]) -> Any:
        """`encode` for what is searched with: the task "query", and by default the prompt of that name."""
        return self._encode(sentences, options, "query", QUERY)

    @named("encode_document")
    def encode_document(self, sentences: str | Iterable[str], **options: Unpack[MultiVectorOptions]) -> Any:
        """`encode` for what is searched: the task "document", a prompt as in `Encoder.encode_document`."""
        return self._encode(sentences, options, "document", DOCUMENT)

    @named("similarity")
    def similarity(self, embeddings1: Any, embeddings2: Any) -> Array:
        """The score of each query with each document, (n, m).

        MaxSim: the sum over the query's tokens of the largest product with a token of the document; for
        "meanmaxsim" the mean. Both arguments are lists as `encode` makes them, one array (tokens, features),
        or an array (n, tokens, features) that is padded with zeros. A document without tokens has -1e9.
        """
        mean = self.similarity_fn_name == "meanmaxsim"
        return maxsim(embeddings1, embeddings2, mean)

    @named("similarity_pairwise")
    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Array:
        """The score of each query with the document in the same place, (n,); see `similarity`."""
        mean = self.similarity_fn_name == "meanmaxsim"
        return maxsim_pairs(embeddings1, embeddings2, mean)

    def _encode(
        self, sentences: Any, options: MultiVectorOptions, task: str | None, names: Names = ()
    ) -> Any:
        """`encode`; `names` are those of prompts that come before the default one."""
        one, lines = one_or_several(sentences)
        call = Call.of(options, MultiVectorOptions, self.encoder.sentences, names)
        tokens = calls(self._tokens((call.prompt + line for line in lines), task), call.batch_size)
        chunks: Iterator[Any] = (self._vectors(each, task, call.normalize) for each in tokens)
        vectors = [each for chunk in watched(chunks, call.progress, lines) for each in chunk]
        return vectors[0] if one else vectors

    def _tokens(self, texts: Iterable[str], task: str | None) -> Iterator[list[tuple[int, int]]]:
        """Ids of each text, and of each token 1, or 0 if it was filled in and others do not attend it."""
        encoded, expansion = self.texts[task].encoded(texts), self.settings.expansion
        if task != "query" or expansion is None:
            return ([(token, 1) for token in ids] for ids in encoded)
        fill = _filler(self.text, expansion), int(expansion.attend)
        length = expansion.length
        return ([(token, 1) for token in ids] + [fill] * (length - len(ids)) for ids in encoded)

    def _vectors(self, call: list[Ints], task: str | None, normalize: bool) -> list[Array]:
        """Vectors of texts that go through the layers together."""
        call = [each.reshape(-1, 2) for each in call]
        ids, attended = [each[:, 0] for each in call], [int(each[:, 1].sum()) for each in call]
        all_of_them = sum(attended) == sum(map(len, ids))
        rows, cu_seqlens = self.encoder.hidden(ids, None, None if all_of_them else attended)
        kept = self._kept(np.concatenate(ids), task)
        x = rows[kept].astype(lane_dtype(rows.dtype), copy=False)
        x = applied(self.modules, x)
        ends = np.append(0, np.cumsum(kept))[cu_seqlens]
        x = unit(x) if normalize else x
        return [x[begin:end] for begin, end in pairwise(ends.tolist())]

    def _kept(self, ids: Ints, task: str | None) -> Bools:
        """Mask of the tokens that have a vector."""
        if (task or "document") not in self.settings.skipped_in:
            return np.ones(len(ids), np.bool_)
        named = map(self.text.tokenizer.token_to_id, self.settings.skipped)
        return ~np.isin(ids, [token for token in named if token is not None])


def _filler(text: Text, expansion: Expansion) -> int:
    """The id that queries are filled up with."""
    config = tokenizer_config(text.folder)
    special = Config(text.folder / "special_tokens_map.json", optional=True)
    config.refuse(padding_side="right")

    def named(key: str, usual: Names = ()) -> Names:
        said = (config if key in config.values else special).token(key)
        return (said,) if said is not None else () if key in config.values else usual

    names = (*named("mask_token", ("[MASK]", "<mask>")), *named("eos_token"))
    names = names if expansion.token is None else (expansion.token,)
    ids = map(text.tokenizer.token_to_id, names)
    found = next((token for token in ids if token is not None), None)
    if found is None:
        came = f"{text.folder / 'tokenizer.json'} has none of {', '.join(map(short, names)) or 'no names'}"
        raise ModelError(f"{came}; expected a token that queries are filled up with")
    return int(found)
