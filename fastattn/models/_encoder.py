"""Encoders of the BERT family; `_bert.py` builds them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from fastattn import ops
from fastattn._args.errors import wrong_shape
from fastattn._args.options import require_options
from fastattn._args.types import lane_dtype
from fastattn._args.values import integer, short
from fastattn._engine.program import Sequences
from fastattn.models import _model
from fastattn.models._text import strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, Ints
    from fastattn.models._sentences import Pooling, Sentences

# Texts, and their tokens, that `embed` sorts by length at a time. With 2^13 texts there is up to 1% more
# padding than if all were sorted, with 2^12 up to 2%. Their ids and vectors take 20 MB.
_WINDOW_TEXTS, _WINDOW_TOKENS = 1 << 13, 1 << 20


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `Bert.embed`, which documents them."""

    batch_size: int
    pooling: str | None
    normalize: bool | None
    progress: Callable[[int], object] | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bert(_model.Model):
    """An encoder of the BERT family: call it for hidden states, or `embed` texts with it."""

    max_length: int  # tokens of a sequence
    tokens: Array  # (vocab_size, hidden_size), as in the file
    token_types: Array  # (types, hidden_size), like `positions` in the type of the computation
    positions: Array  # (max_length, hidden_size), the first token type's vector added
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
            In the model's dtype; one sequence (length,) is a batch of one. Where a token does not count, the
            result has no meaning.
        """
        name, types = self.model_type, None
        tokens, lengths, order = self._tokens(ids, attention_mask, self.max_length)
        if token_type_ids is not None:
            types = _model.token_ids(name, token_type_ids, len(self.token_types), "token_type_ids")
            if types.shape != tokens.shape:
                raise wrong_shape(name, "token_type_ids", types, tokens.shape)
        batch, length = tokens.shape
        x = ops.embedding(tokens, self.tokens).astype(self.dtype, copy=False)
        x += self.positions[:length]
        if types is not None:
            x += (self.token_types - self.token_types[0])[_model.reorder(types, order)]
        ranges = (None, None if lengths is None else lengths[:, None, None])
        out = self.program.run(x.reshape(batch * length, self.hidden_size), Sequences(batch, (ranges,)))
        return _model.restore(out.reshape(batch, length, self.hidden_size), order)

    def embed(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Array:
        """One vector for each text.

        Parameters
        ----------
        texts : iterable of str
            Texts beyond the model's longest sequence are cut; white space around a text is dropped. Where the
            folder says so, texts become lower case or get a prompt.
        batch_size : int, default 32
            Texts at a time. Those of similar length go together, so that there is little padding.
        pooling : {"mean", "cls", "max"}, optional
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
                ids, mask = _model.pad([window[i] for i in chosen])
                vectors[chosen] = pool(self(ids, mask), mask)
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
