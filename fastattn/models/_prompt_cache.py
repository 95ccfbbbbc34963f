"""A cache of prompts: sessions of a language model, found by what a prompt begins with."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from fastattn.models._session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._args.types import Ints

# Tokens that a prompt has to share with a session, for the copy of a part of it to be worth its memory.
_LEAST = 16


class PromptCache:
    """Sessions of a model, of which each call of ``generate(cache=)`` takes the one that helps most.

    `Decoder.prompt_cache` makes it. A prompt that goes on from all tokens of a session continues it, and so
    does one that begins with the session's last prompt, whose answer is then forgotten. One that shares a
    part with a session, as an instruction before all conversations, or whose session is in use, gets a copy
    cut to that part: of several such sessions, of the longest. Any other prompt begins a session. When a call
    begins and all take more than `most_bytes`, those that were used longest ago, also for a copy, are
    forgotten, but for sessions of answers that are still read. Finding one takes time in proportion to the
    tokens in the cache.

    Several answers may be read in turn, also by several threads, of which one computes at a time.
    """

    def __init__(self, make: Callable[[], Session], most_bytes: int):
        self._make, self._most, self.empty = make, most_bytes, make()
        self._sessions: list[Session] = []  # the latest comes last
        self.lock = RLock()  # of who computes with one of them

    def __repr__(self) -> str:
        return f"<PromptCache: {len(self)} sessions, {self.nbytes} of {self._most} bytes>"

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all sessions."""
        return sum(session.nbytes for session in self._sessions)

    def taken(self, prompt: Ints) -> Session:
        """The session for a call with this prompt, which is then the latest."""
        while self.nbytes > self._most and (idle := [x for x in self._sessions if not x.busy]):
            self._sessions.remove(idle[0])
        session, best = None, (0, False, 0)
        for each in self._sessions:
            shared, length = each.shared(prompt), len(each.ids)
            # Of those that share as much, the longest: it would take the longest to compute again, and is
            # forgotten later if it is used.
            again = np.array_equal(prompt[: each._prompt], each._ids[: each._prompt])
            goes_on = not each.busy and (shared == length or again)
            rank = shared, goes_on, length
            if rank > best:
                session, best = each, rank
        shared, goes_on, length = best
        if session is None or shared < min(_LEAST, length):
            session = self._make()
        else:
            self._sessions.remove(session)
            if not goes_on:
                self._sessions.append(session)
                session = session.copy(shared)
        self._sessions.append(session)
        return session
