"""Jinja's environment for chat templates: its sandbox, and the names that transformers gives templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# What Jinja raises, or a template by what it does; others come from elsewhere, as from a signal's handler.
FAILURES = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


class _Generation(Extension):  # type: ignore[misc]
    """``{% generation %}``, which marks an answer for training: its text is written as without the tag."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """``dict`` without the methods of the class, by which a template would change what it is given."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):  # type: ignore[misc]
    """``namespace`` without names that Python or Jinja looks up."""

    def __init__(*args: Any, **named: Any):  # `self` is a name that a template may give
        Namespace.__init__(*args, **named)
        for name in args[0]._Namespace__attrs:
            _check(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name {name!r}; expected one without an underscore first")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Text of a value, in which no character is escaped for HTML, as Jinja's own filter does."""
    between: Any = separators
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=between, sort_keys=sort_keys)


def compiled(source: str) -> Template:
    """Compile a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)
