"""Changes, and how they are undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any


class Undo:
    """A change that is undone by `undo`, or at the end of a ``with`` block. Prints what was changed."""

    def __init__(self, steps: Iterable[Callable[[], None]], report: Callable[[], str] = str) -> None:
        self._steps = list(steps)
        self._report = report

    def undo(self) -> None:
        """Undo the change; further calls do nothing."""
        steps, self._steps = self._steps, []
        with ExitStack() as stack:  # which takes the last step first, and the others where one fails
            for step in steps:
                stack.callback(step)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo()

    def __repr__(self) -> str:
        return self._report() if self._steps else f"{self._report()}\n(undone)"


class Shared:
    """A change of the whole process: made for the first of its users, undone after the last."""

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        self.users: dict[object, Any] = {}
        self._make = make  # returns what undoes it
        self._lock = threading.Lock()

    def use(self, value: Any = None) -> Callable[[], None]:
        """Add a user, whose `value` is among `users` until the function that is returned is called."""
        user = object()
        with self._lock:
            if not self.users:
                self._undo = self._make()
            self.users[user] = value

        def end() -> None:
            with self._lock:
                if user in self.users:
                    del self.users[user]
                    if not self.users:
                        self._undo()

        return end
