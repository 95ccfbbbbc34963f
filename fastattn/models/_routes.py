"""Models with several ways from a text to its vector, of which a task chooses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastattn._args.values import short

_Model = TypeVar("_Model")


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Models by the names of routes; tasks are these names, or what `mappings` call them.

    One that is None is made when it is first used: by its name, with the tokenizer of the others.
    """

    models: dict[str, Any]
    usual: str | None  # of a text without a task
    mappings: Mapping[str, str]  # of other tasks to routes
    make: Callable[[str], Any] | None = None

    def of(self, task: Any) -> Any:
        """The model of a `task`."""
        if task is None or isinstance(task, str):
            names = self.mappings.get(task or ""), task, "text", self.usual if task is None else None
            found = next((name for name in names if name in self.models), None)
            if found is not None:
                if self.models[found] is None and self.make is not None:
                    self.models[found] = self.make(found)
                return self.models[found]
        expected = ", ".join(map(short, dict.fromkeys([*self.models, *self.mappings])))
        raise ValueError(f"(): task is {short(task)}; expected one of {expected}")


def routed(
    models: Mapping[str, _Model | None],
    usual: str | None,
    mappings: Mapping[str, str],
    make: Callable[[str], _Model] | None = None,
) -> _Model:
    """One of `models`, the `usual` one, which sends texts to the others by their task: see `Routes`.

    It has no tensors of its own that could change: those of the others would not.
    """
    first: Any = models[next(iter(models)) if usual is None else usual]
    routes, encoder = Routes(dict(models), usual, mappings, make), getattr(first, "encoder", None)
    own = {"origin": None} if encoder is None else {"encoder": replace(encoder, origin=None)}
    found: _Model = replace(first, routes=routes, **own)
    return found


def model_of(model: _Model, task: Any, optional: bool = False) -> _Model:
    """Return the model of a `task`; without routes there are no tasks, and one raises unless `optional`."""
    routes: Routes | None = getattr(model, "routes")  # noqa: B009
    if routes is not None:
        found: Any = routes.of(task)
        if routes.make is not None:
            found = replace(found, text=getattr(model, "text"))  # noqa: B009
        same: _Model = found
        return same
    if task is not None and not optional:
        raise ValueError(f"(): task is {short(task)}; expected None: this model has no tasks")
    return model
