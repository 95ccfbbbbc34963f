"""ColBERT (Khattab and Zaharia 2020): texts to a vector of each token, which MaxSim compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import Array, Bools, Ints, Unpack, lane_dtype
from fastattn._args.values import choice, short
from fastattn.models._encode_calls import (
    EncodeSettings,
    MultiVectorOptions,
    TextEncoder,
    calls,
    one_or_several,
    watched,
)
from fastattn.models._encoder import EncoderWithHead
from fastattn.models._files import Config, ModelError, tokenizer_config
from fastattn.models._sentences import Dense, LayerNorm, Normalize, applied
from fastattn.models._similarity import maxsim, unit
from fastattn.models._text import Text

Names = tuple[str, ...]

TASKS = ("query", "document")


class Expansion(NamedTuple):
    """Expansion of queries with mask tokens, which have vectors, too."""

    length: int  # tokens that a query has at least
    fixed: bool  # and at most
    attend: bool  # whether others attend them
    token: str | None  # by default the tokenizer's mask, or the end of a text


class Settings(NamedTuple):
    """Settings of the folder: query expansion, tokens without a vector, similarity."""

    expansion: Expansion | None
    skipped: tuple[str, ...]  # tokens that have no vector
    skipped_in: tuple[str, ...]  # tasks of which that is true
    similarity: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiVectorEncoder(TextEncoder, EncoderWithHead):
    """A late-interaction encoder, with a vector for each token of a text."""

    modules: tuple[Dense | LayerNorm | Normalize, ...]  # after the encoder, for each token
    features: int  # of a vector
    settings: Settings
    texts: dict[str | None, Text]  # the tokenizers of tasks, which cut texts to their lengths

    @property
    def similarity_fn_name(self) -> str:
        """Measure of `similarity`: "maxsim" or "meanmaxsim"."""
        return self.settings.similarity

    def __repr__(self) -> str:
        return self._described(self.features)

    def _replace_text(self, text: Text) -> None:
        """Replace the tokenizer, except of tasks that have another length."""
        own = {task: each for task, each in self.texts.items() if each is not self.text}
        object.__setattr__(self, "texts", {**dict.fromkeys(self.texts, text), **own})
        super(MultiVectorEncoder, self)._replace_text(text)

    def get_embedding_dimension(self) -> int:
        """Number of features of a vector."""
        return self.features

    @named("encode")
    def encode(
        self,
        sentences: str | Iterable[str],
        *,
        task: str | None = None,
        **options: Unpack[MultiVectorOptions],
    ) -> Any:
        """Make vectors of each text's tokens; retrieval needs `encode_query` and `encode_document`.

        Parameters
        ----------
        sentences, prompt_name, prompt, batch_size, show_progress_bar, normalize_embeddings
            As in `Encoder.encode`.
        task : {"query", "document"}, optional
            Queries are cut to the folder's query length and filled up to it, documents are cut to the
            document length. In documents, and without a task, tokens that the folder names, such as
            punctuation, have no vector.

        Returns
        -------
        list of ndarray, (tokens, features) each; one ndarray for one str
            float32, or float64 for a model in float64. A text's bits depend on this text alone.

        Raises
        ------
        ModelError
            If the folder has no tokenizer.json, or one that does not fit the model.
        """
        return self._encode(sentences, options, task=None if task is None else choice("task", task, TASKS))

    def _compared(self, a: Any, b: Any, pairwise: bool) -> Array:
        return maxsim(a, b, self.similarity_fn_name == "meanmaxsim", pairwise)

    def _encode(
        self, sentences: Any, options: MultiVectorOptions, names: Names = (), task: str | None = None
    ) -> Any:
        one, lines = one_or_several(sentences)
        call = EncodeSettings.of(options, MultiVectorOptions, self.encoder.sentences, names)
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
        raise ModelError(f"{came}; expected a token for the expansion of queries")
    return int(found)
