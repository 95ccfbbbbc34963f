"""Steps of a language model over a cache, and the caches that outlive a call."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named
from fastattn._engine.steps import Sequences
from fastattn.layers._mixers import by_rows
from fastattn.models import _session
from fastattn.models._embeddings import of_length
from fastattn.models._generation import Step
from fastattn.models._next_tokens import NextTokens
from fastattn.models._session import Session, cache_dtypes
from fastattn.models._speculation import MOST, Speculation

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from numpy.typing import DTypeLike

    from fastattn._args.types import Bools, Ints
    from fastattn.models._sampling import Sampler

# The cache has room for so many new tokens at first; it doubles when it is full.
_ROOM = 256


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Stepping(NextTokens):
    """A model that computes answers token by token, or several tokens in a step; and its sessions."""

    @named("session")
    def session(self, cache_dtype: DTypeLike | None = None) -> Session:
        """Make an empty session, for ``generate(cache=)``, whose `cache_dtype` is as there."""
        return Session(self, self.frequencies, self._cache(dtype=self._kept_as(cache_dtype)))

    def _kept_as(self, given: Any) -> str | None:
        """The argument `cache_dtype`, checked."""
        if given is None:
            return None
        dtypes = cache_dtypes(self.dtype)
        why = "" if self.dtype == np.float32 else f" of a model in {self.dtype}"
        return dtype_choice("cache_dtype", given, dtypes, why)

    @named("load_session")
    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Read a session that `Session.save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            If no file is there, or it holds no session of this model with these weights in these types.
        """
        return _session.load(path, self, self.frequencies, self.key_heads, self.states)

    def _steps(
        self,
        prompts: list[Ints],
        max_new_tokens: int,
        sampler: Sampler,
        stop: Ints,
        ended: Bools,
        cache_dtype: DTypeLike | None,
        session: Session | None,
        speculation: Speculation | None,
    ) -> Iterator[Step]:
        """Steps until all sequences have reached `stop`, or are `ended` by whoever reads them."""
        if not prompts or max_new_tokens == 0:
            return
        lengths = np.array([len(prompt) for prompt in prompts])
        batch, longest = len(prompts), int(lengths.max())
        new, turn = np.concatenate(prompts), None
        if session is None:
            cache = self._cache(longest + min(max_new_tokens - 1, _ROOM), cache_dtype)
        else:
            cache, (known, turn) = session._cache, session._begin(new, longest)
            *earlier, new = session._parts(new[known:])
            for part in earlier:
                self._hidden(part, np.array([len(part)]), longest, cache)
                session._add(part, turn)
            lengths = np.array([len(new)])
        hidden = self._hidden(new, lengths, longest, cache)[np.cumsum(lengths) - 1]
        running = np.arange(batch)  # sequences that have not ended; the others are computed no more
        proposed: list[int] = []
        program = None if speculation is None or not self.states else by_rows(self.program)
        seen, step = cache, 0
        while True:
            cache.forget()
            logits = self._capped(self.logits.run(hidden, Sequences(len(hidden))))
            accepted: list[int] = []
            for row, each in enumerate(np.split(logits, len(proposed) + 1)):
                if proposed:
                    cache.go_on(seen, row)
                if session is not None:
                    session._add(new, turn)
                new, step = sampler(each), step + 1
                yield Step(running, new, each)
                # np.isin takes three times as long.
                kept = np.flatnonzero((new[:, None] != stop).all(axis=1) & ~ended[running])
                if not kept.size or step == max_new_tokens:
                    return
                accepted += new.tolist()
                if accepted != proposed[: len(accepted)]:
                    break
            if kept.size < len(running):
                running, new = running[kept], new[kept]
                sampler.select(kept)
                if self.num_layers:  # without layers, nothing is in the cache
                    cache.select(kept)
            if session is not None:
                session._require(turn)
            if speculation is not None:
                proposed = self._proposed(speculation, accepted, max_new_tokens - step - 1, longest + step)
                if self.num_layers:
                    cache.truncate(longest + step - 1)
            if proposed:
                rows = np.append(new, proposed)
                seen = cache.staggered(len(rows)) if self.num_layers else cache
                hidden = self._hidden(rows, np.ones(len(rows), np.int64), longest + step, seen, program)
            else:
                hidden = self._hidden(new, np.ones(len(new), np.int64), longest + step, cache)

    def _proposed(self, speculation: Speculation, accepted: list[int], most: int, length: int) -> list[int]:
        """Proposals of what follows `accepted`, in a text that has `length` tokens with it.

        Keys of all rows are rotated alike. So nothing is proposed where a scaling changes between them.
        """
        most = min(most, MOST)
        for each in self.frequencies:
            one, other = (of_length(each, n) for n in (length, length + most))
            if one is not other and not (
                np.array_equal(one.inv_freq, other.inv_freq)
                and one.attention_factor == other.attention_factor
            ):
                most = 0
        return speculation.after(accepted, most)


def one_at_a_time(steps: Iterator[Step], session: Session | None) -> Iterator[Step]:
    """The same steps, each under the session's lock: a cache between two states has no meaning."""
    while True:
        with nullcontext() if session is None else session.lock:
            step = next(steps, None)
        if step is None:
            return
        yield step
