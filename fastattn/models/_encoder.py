"""Models that make vectors of tokens and of texts; `_bert.py` and its like build them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.options import require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import integer, short
from fastattn.models import _model
from fastattn.models._text import strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, Ints
    from fastattn.models._embeddings import Embeddings, Places
    from fastattn.models._sentences import Pooling, Sentences

# Texts, and their tokens, that `embed` sorts by length at a time. With 2^13 texts there is up to 1% more
# padding than if all were sorted, with 2^12 up to 2%. Their ids and vectors take 20 MB.
_WINDOW_TEXTS, _WINDOW_TOKENS = 1 << 13, 1 << 20


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `Encoder.embed`, which documents them."""

    batch_size: int
    pooling: str | None
    normalize: bool | None
    progress: Callable[[int], object] | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Encoder(_model.Model):
    """An encoder: call it for hidden states, or `embed` texts with it."""

    max_length: int | None  # tokens of a sequence
    embeddings: Embeddings
    places: Places
    pooling: Pooling
    sentences: Sentences

    def __call__(
        self, ids: ArrayLike, attention_mask: ArrayLike | None = None, token_type_ids: ArrayLike | None = None
    ) -> Array:
        """Hidden states of the last layer.

        Parameters
        ----------
        ids : array_like of int, (batch, length) or (length,)
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1: which tokens count. Padding may be on either side: positions are counted from the first
            token that counts.
        token_type_ids : array_like of int, (batch, length), optional
            0 for all by default.

        Returns
        -------
        ndarray, (batch, length, hidden_size)
            In the model's dtype; one sequence (length,) is a batch of one. 0 where a token does not count.
        """
        name, types = self.model_type, None
        tokens = _model.token_ids(name, ids, self.vocab_size)
        mask = _model.attended(name, attention_mask, tokens)
        if token_type_ids is not None:
            n_types = 1 if self.embeddings.types is None else len(self.embeddings.types)
            types = _model.token_ids(name, token_type_ids, n_types, "token_type_ids")
            if types.shape != tokens.shape:
                raise wrong_shape(name, "token_type_ids", types, tokens.shape)
        batch, length = tokens.shape
        lengths = np.full(batch, length) if mask is None else mask.sum(axis=1)
        longest = lengths.max(initial=0)
        if self.max_length is not None and longest > self.max_length:
            came = f"{longest} tokens in a sequence"
            raise ValueError(f"{name}(): {came}; expected at most {self.max_length}")
        if mask is None:
            rows = self._rows(tokens.ravel(), lengths, None if types is None else types.ravel())
            return rows.reshape(batch, length, self.hidden_size)
        out = np.zeros((batch, length, self.hidden_size), self.dtype)
        out[mask] = self._rows(tokens[mask], lengths, None if types is None else types[mask])
        return out

    def hidden(self, sequences: Sequence[Ints]) -> tuple[Array, Ints]:
        """Hidden states of sequences of checked ids (length,), end to end, and where each sequence begins.

        A sequence's rows (tokens, hidden_size) have the same bits in any company.
        """
        lengths = np.array([len(ids) for ids in sequences], np.int64)
        tokens = np.concatenate([*sequences, np.zeros(0, np.int64)])
        return self._rows(tokens, lengths, None), np.append(0, np.cumsum(lengths))

    def _rows(self, tokens: Ints, lengths: Ints, types: Ints | None) -> Array:
        """Hidden states (tokens, hidden_size) of sequences of `lengths` end to end."""
        sequences, places = self.places(lengths, self.dtype)
        return self.program.run(self.embeddings(tokens, places, types, self.dtype), sequences)

    def embed(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Array:
        """One vector for each text.

        Parameters
        ----------
        texts : iterable of str
            Texts beyond the model's longest sequence are cut; white space around a text is dropped. Where the
            folder says so, texts become lower case or get a prompt.
        batch_size : int, default 32
            Texts at a time. Those of similar length go together, so that there is little padding.
        pooling : {"mean", "cls", "max", "lasttoken"}, optional
            How a text's hidden states become one vector; by default as the folder says, or else "mean".
        normalize : bool, optional
            Whether to scale vectors to length 1; by default as the folder says, or else not.
        progress : callable, optional
            Called after each batch with the number of its texts.

        Returns
        -------
        ndarray, (len(texts), hidden_size)
            float32, or float64 for a model in float64.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        ModelError
            If the folder has no tokenizer.json, or a malformed one.

        See Also
        --------
        embed_stream : the same for more texts than vectors fit into memory.
        """
        windows = deque(self._vectors("embed", texts, **options))
        vectors = np.empty((sum(map(len, windows)), self.hidden_size), lane_dtype(self.dtype))
        done = 0
        while windows:  # each is freed before the next one is copied
            window = windows.popleft()
            vectors[done : done + len(window)] = window
            done += len(window)
        return vectors

    def embed_stream(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Iterator[Array]:
        """Vectors of the texts in order, as `embed` makes them, an array (n, hidden_size) at a time.

        Parameters and errors are those of `embed`. Thousands of texts are read at a time, when they are
        needed; of these, those of similar length go together.
        """
        return self._vectors("embed_stream", texts, **options)

    def _vectors(self, func: str, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Iterator[Array]:
        """`embed_stream`, for messages of `func`."""
        require_options(func, options, EmbedOptions)
        lines = strings(func, "texts", texts)
        batch_size = integer(func, "batch_size", options.get("batch_size", 32), 1)
        pool = self.pooling.changed(func, options.get("pooling"), options.get("normalize"))
        progress = options.get("progress")
        if progress is not None and not callable(progress):
            raise TypeError(f"{func}(): progress is {short(progress)}; expected a function")
        encoded = self.text.encoded(self.sentences(text) for text in lines)

        def vectors_of(window: list[Ints]) -> Array:
            vectors = np.empty((len(window), self.hidden_size), lane_dtype(self.dtype))
            order = sorted(range(len(window)), key=lambda i: -len(window[i]))
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                vectors[chosen] = pool(*self.hidden([window[i] for i in chosen]))
                if progress is not None:
                    progress(len(chosen))
            return vectors

        return map(vectors_of, _windows(encoded, batch_size))


def _windows(encoded: Iterable[list[int]], batch_size: int) -> Iterator[list[Ints]]:
    """The ids of the texts that `embed` sorts by length together: whole batches."""
    window: list[Ints] = []
    tokens = 0
    for ids in encoded:
        window.append(np.array(ids, np.int64))
        tokens += len(ids)
        enough = len(window) >= _WINDOW_TEXTS or tokens >= _WINDOW_TOKENS
        if enough and len(window) % batch_size == 0:
            yield window
            window, tokens = [], 0
    if window:
        yield window
