"""Log-probabilities of tokens, and of continuations of a prompt."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._args.types import Array, Ints
from fastattn._args.values import several
from fastattn._engine.steps import Sequences
from fastattn.models._model import one_sequence
from fastattn.models._prompts import is_conversation
from fastattn.models._text import strings
from fastattn.positions import RopeFrequencies

_ROWS = 64  # of logits, which are as long as the vocabulary, at a time
# Continuations that `score` computes together: each has a copy of the prompt's keys.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a continuation of a prompt.

    Attributes
    ----------
    logprob : float
        Log-probability of the whole text: the sum of `logprobs`.
    ids : tuple of int
        Tokens of the text.
    logprobs : tuple of float
        Log-probability of each token, given the tokens before it.
    is_greedy : bool
        Whether greedy decoding would choose each token.
    """

    logprob: float
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool


def _score(model: Any, ids: Ints, rows: Array) -> Score:
    """The score of `ids`, of hidden states `rows`."""
    found = []
    for first in range(0, len(ids), _ROWS):
        part = slice(first, first + _ROWS)
        logits = model._capped(model.logits.run(rows[part], Sequences(1)))
        found += chances_of(logits, ids[part], 1)
    tokens, best = tuple(ids.tolist()), all(len(each) == 1 for each in found)
    logprobs = tuple(each[token] for each, token in zip(found, tokens, strict=True))
    return Score(sum(logprobs), tokens, logprobs, best)


def scores(model: Any, prompt: Any, continuations: Any) -> list[Score]:
    """`Decoder.score`."""
    wholes, begin = _continued(model, prompt, continuations)
    longest = max(map(len, wholes), default=0)
    if model.max_length is not None and longest > model.max_length:
        raise ValueError(f"(): {longest} tokens in a sequence; expected at most {model.max_length}")
    scaled = not all(isinstance(each, RopeFrequencies) for each in model.frequencies)
    cache, common, size = model._cache(), 0, 1 if scaled else _AT_ONCE

    if wholes and not scaled:
        rows = np.stack([whole[: begin - 1] for whole in wholes])
        common = int((rows == rows[0]).all(axis=0).cumprod().sum())
        if common:
            model._hidden(wholes[0][:common], np.array([common]), common, cache)
    found: list[Score] = []
    for first in range(0, len(wholes), size):
        group = wholes[first : first + size]
        own = copy.copy(cache)
        if common and model.num_layers:
            own.select(np.zeros(len(group), np.int64))
        lengths = np.array([len(whole) - 1 - common for whole in group])
        new = np.concatenate([whole[common:-1] for whole in group])
        hidden = model._hidden(new, lengths, int(lengths.max()) + common, own)
        for whole, end in zip(group, np.cumsum(lengths).tolist(), strict=True):
            ids = whole[begin:]
            rows = hidden[end - len(ids) : end]
            found.append(_score(model, ids, rows))
    return found


def _continued(model: Any, prompt: Any, continuations: Any) -> tuple[list[Ints], int]:
    """The ids of the prompt with each continuation, and how many of them are the prompt's."""
    if is_conversation(prompt):
        expected = "a text or ids, as conversation_ids(messages) makes them"
        raise TypeError(f"(): prompt is a list of messages; expected {expected}")
    if isinstance(prompt, str):
        texts = list(strings("continuations", continuations))
        said = prompt.rstrip() or prompt  # a space before a word is part of the word's token
        texts = [prompt[len(said) :] + text for text in texts]
        encodings = list(model.text.encodings([said, *(said + text for text in texts)]))
        if any(each.overflowing for each in encodings):
            came = f"a text has more than {model.text.limit} tokens with its prompt"
            raise ValueError(f"(): {came}; expected at most so many")
        start, *found = (np.array(each.ids, np.int64) for each in encodings)
    else:
        start = one_sequence("prompt", prompt, model.vocab_size)
        given = several("continuations", continuations, "several, as [ids]")
        found = [
            np.append(start, one_sequence(f"continuations[{i}]", ids, model.vocab_size))
            for i, ids in enumerate(given)
        ]
    if not start.size:
        raise ValueError("(): prompt has no token; expected at least one")
    for i, whole in enumerate(found):
        if len(whole) <= start.size:
            came = f"continuations[{i}] adds no token to the prompt, with whose end it becomes one"
            raise ValueError(f"(): {came}; expected at least one, or ids")
    return found, start.size


def chances_of(logits: Array, tokens: Ints, best: int) -> list[dict[int, float]]:
    """Logarithms of probabilities, by token: of each of `tokens`, and of the `best` ones of its row."""
    found = []
    for row, token in zip(logits.astype(np.float64), tokens.tolist(), strict=True):
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        order: Ints = np.zeros(0, np.int64)
        if best:
            likely = np.flatnonzero(row >= np.partition(row, -best)[-best])
            order = likely[np.argsort(-row[likely], kind="stable")][:best]
        found.append({i: float(row[i]) for i in (token, *order.tolist())})
    return found
