"""Generation step by step: the next tokens of sequences over a cache, until each has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from fastattn._args.errors import wrong_type
from fastattn._args.types import Array, Bools, DTypeLike, Ints
from fastattn._args.values import short
from fastattn._engine.steps import Sequences
from fastattn.layers._mixers import by_rows
from fastattn.models._embeddings import of_length
from fastattn.models._model_cache import MOST
from fastattn.models._sampling import Sampler
from fastattn.models._session import Session
from fastattn.models._text import NO_TOKEN

Proposer = Callable[[list[int], int], list[int]]

_MOST_AT_FIRST, _LEAST = 4, 2  # tokens proposed at a time
_SIZES = 8, 4, 2  # tokens of the ends that are looked up
# Rows that may be wasted. One costs about a tenth of a step, and one that is accepted saves a step.
_EVERY_STEP, _EVERY_ACCEPTED, _AT_FIRST, _AT_MOST = 0.1, 4.0, 4.0, 16.0
_ROW = 0.1  # of a step


class Speculation:
    """The text of one sequence so far, and proposed continuations.

    A wrong proposal costs a row of a step, and what the proposer took, `cost` steps. Such rows have a credit,
    which grows a little with every step and much with what is accepted, and proposals stay within it: where
    they fail, they are rare.
    """

    def __init__(self, proposer: Proposer, ids: Ints, cost: float = 0.0):
        self._propose, self._ids = proposer, ids.tolist()
        self._price = 1 + cost / _ROW
        self._proposed: list[int] = []
        self._most, self._credit = _MOST_AT_FIRST, _AT_FIRST

    def after(self, tokens: list[int], most: int) -> list[int]:
        """Propose at most `most` tokens after `tokens`, the accepted ones and one more."""
        accepted, proposed = len(tokens) - 1, len(self._proposed)
        if proposed:
            self._most = min(2 * self._most, MOST) if accepted == proposed else max(accepted + 1, _LEAST)
        earned = (_EVERY_STEP + _EVERY_ACCEPTED * accepted) / self._price
        self._credit = min(self._credit + earned, _AT_MOST)
        self._credit -= proposed - accepted
        self._ids += tokens
        most = min(most, self._most, int(self._credit))
        self._proposed = self._propose(self._ids, most) if most >= _LEAST else []
        return self._proposed


class _Lookup:
    """Proposals from the text itself: what followed its end where that occurred last."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # the index after the last occurrence of some tokens
        self._known = 0  # how much of the text is in it

    def __call__(self, ids: list[int], most: int) -> list[int]:
        """Tokens that followed the longest end: as many as are alike before them, and at most `most`."""
        for after in range(self._known + 1, len(ids)):
            for size in _SIZES:
                if size <= after:
                    self._places[tuple(ids[after - size : after])] = after
        self._known = len(ids) - 1
        places = (self._places.get(tuple(ids[-size:])) for size in _SIZES)
        place = next((place for place in places if place is not None), None)
        if place is None:
            return []
        alike = 0
        while alike < min(most, place) and ids[place - 1 - alike] == ids[-1 - alike]:
            alike += 1
        found = ids[place : place + alike]
        while len(found) < alike:  # the end overlaps its last occurrence, and is repeated
            found += found[: alike - len(found)]
        return found


class _Draft:
    """Proposals of a smaller model: the tokens that it finds best."""

    def __init__(self, model: Any):
        self._model, self._session = model, model.session()

    def __call__(self, ids: list[int], most: int) -> list[int]:
        if self._model.max_length is not None:
            most = max(0, min(most, self._model.max_length - len(ids)))
        return list(self._model.generate(ids, most, stop=(), cache=self._session)) if most else []


def _weights(model: Any) -> int:
    """Weights that a token reads, about: a layer has 12 for each pair of features."""
    found: int = model.hidden_size * (12 * model.hidden_size * model.num_layers + model.vocab_size)
    return found


def proposals_of(given: Any, model: Any, prompts: list[Ints]) -> Speculation | None:
    """Proposals for the only one of `prompts`, as the argument `speculate` says."""
    if given is None:
        return None
    if len(prompts) != 1:
        raise ValueError(f"(): speculate is given with {len(prompts)} prompts; expected one")
    if isinstance(given, str):
        if given != "lookup":
            raise ValueError(f"(): speculate is {short(given)}; expected 'lookup', a smaller model, or None")
        return Speculation(_Lookup(), prompts[0])
    if not isinstance(given, type(model)):
        raise wrong_type("speculate", given, "'lookup', or a language model that load() made")
    if given.vocab_size != model.vocab_size:
        came = f"speculate is a model of {given.vocab_size} tokens"
        raise ValueError(f"(): {came}; expected the tokens of this one, {model.vocab_size}")
    return Speculation(_Draft(given), prompts[0], _weights(given) / _weights(model))


# The cache has room for so many new tokens at first; it doubles when it is full.
_ROOM = 256


class NextTokens(NamedTuple):
    """The next tokens of the sequences that have not ended."""

    running: Ints  # (n,), their numbers
    tokens: Ints  # (n,)
    logits: Array  # (n, vocab_size), as the model gives them


def steps(
    model: Any,
    prompts: list[Ints],
    max_new_tokens: int,
    sampler: Sampler,
    stop: Ints,
    ended: Bools,
    cache_dtype: DTypeLike | None,
    session: Session | None,
    speculation: Speculation | None,
) -> Iterator[NextTokens]:
    """Steps until all sequences have reached `stop`, or are `ended` by whoever reads them."""
    if not prompts or max_new_tokens == 0:
        return
    lengths = np.array([len(prompt) for prompt in prompts])
    batch, longest = len(prompts), int(lengths.max())
    new, turn = np.concatenate(prompts), None
    if session is None:
        cache = model._cache(longest + min(max_new_tokens - 1, _ROOM), cache_dtype)
    else:
        cache, (known, turn) = session._cache, session._begin(new, longest)
        *earlier, new = session._parts(new[known:])
        for part in earlier:
            model._hidden(part, np.array([len(part)]), longest, cache)
            session._add(part, turn)
        lengths = np.array([len(new)])
    hidden = model._hidden(new, lengths, longest, cache)[np.cumsum(lengths) - 1]
    running = np.arange(batch)  # sequences that have not ended; the others are computed no more
    proposed: list[int] = []
    program = None if speculation is None or not model.states else by_rows(model.program)
    seen, step = cache, 0
    while True:
        cache.forget()
        logits = model._capped(model.logits.run(hidden, Sequences(len(hidden))))
        accepted: list[int] = []
        for row, each in enumerate(np.split(logits, len(proposed) + 1)):
            if proposed:
                cache.go_on(seen, row)
            if session is not None:
                session._add(new, turn)
            new, step = sampler(each), step + 1
            yield NextTokens(running, new, each)
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
            if model.num_layers:  # without layers, nothing is in the cache
                cache.select(kept)
        if session is not None:
            session._require(turn)
        if speculation is not None:
            proposed = _proposed(model, speculation, accepted, max_new_tokens - step - 1, longest + step)
            if model.num_layers:
                cache.truncate(longest + step - 1)
        if proposed:
            rows = np.append(new, proposed)
            seen = cache.staggered(len(rows)) if model.num_layers else cache
            hidden = model._hidden(rows, np.ones(len(rows), np.int64), longest + step, seen, program)
        else:
            hidden = model._hidden(new, np.ones(len(new), np.int64), longest + step, cache)


def _proposed(model: Any, speculation: Speculation, accepted: list[int], most: int, length: int) -> list[int]:
    """Proposals of what follows `accepted`, in a text that has `length` tokens with it.

    Keys of all rows are rotated alike. So nothing is proposed where a scaling changes between them.
    """
    most = min(most, MOST)
    for each in model.frequencies:
        one, other = (of_length(each, n) for n in (length, length + most))
        if one is not other and not (
            np.array_equal(one.inv_freq, other.inv_freq) and one.attention_factor == other.attention_factor
        ):
            most = 0
    return speculation.after(accepted, most)


def one_at_a_time(steps: Iterator[NextTokens], session: Session | None) -> Iterator[NextTokens]:
    """The same steps, each under the session's lock: a cache between two states has no meaning."""
    while True:
        with nullcontext() if session is None else session.lock:
            step = next(steps, None)
        if step is None:
            return
        yield step


def tokens_of(steps: Iterator[NextTokens], batch: int, single: bool) -> Iterator[Any]:
    """The tokens of each step: an int of a single prompt, or (batch,), -1 for sequences that have ended."""
    for running, tokens, _ in steps:
        if single:
            yield int(tokens[0])
        else:
            yielded = np.full(batch, NO_TOKEN)
            yielded[running] = tokens
            yield yielded
