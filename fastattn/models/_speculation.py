"""Speculation: tokens that are proposed before a language model has computed those before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastattn._args.errors import wrong_type
from fastattn._args.types import Ints
from fastattn._args.values import short

Proposer = Callable[[list[int], int], list[int]]

# Tokens proposed at a time. With 15, a step takes 1.9 times as long in float32 weights, 4 times in 4 bits.
MOST, _MOST_AT_FIRST, _LEAST = 15, 4, 2
_SIZES = 8, 4, 2  # tokens of the ends that are looked up
# Rows that may be wasted. One costs about a tenth of a step, and one that is accepted saves a step.
_EVERY_STEP, _EVERY_ACCEPTED, _AT_FIRST, _AT_MOST = 0.1, 4.0, 4.0, 16.0
_ROW = 0.1  # of a step


class Speculation:
    """The text of one sequence so far, and proposals of how it goes on.

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
        """Propose at most `most` tokens after `tokens`: those that were accepted, and one more."""
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
