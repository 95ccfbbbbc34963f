"""Jinja's sandbox with bounds: a template makes no more than so much, and takes no more than so many steps.

Each expression is metered before its value is used. So no value is larger than the bound, and what is done
with one costs as many steps as it is large. Operations that make much of little are counted before they run;
functions, methods, filters and tags that are not listed here are not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MOST_SOURCE = 1 << 16  # characters of a template
_SIZE, _STEPS = (
    1 << 20,
    1 << 20,
)  # what any template may make and do; and more for each character of its input
_MORE_SIZE, _MORE_STEPS = 16, 1
_DEPTH, _BITS = 32, 128  # of lists in one another, and of an integer
_PACE, _LOOK, _CALL = 64, 4, 16  # characters that are read in a step; steps of an expression, and of a call
_REFUSED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_KINDS = (str, list, tuple, dict)  # that have methods
_HELD: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_METHODS = {
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal"),
    *("isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip"),
    *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"),
    *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
    *("copy", "get", "items", "keys", "values"),
}
_FILTERS = {
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort", "string"),
    *("title", "tojson", "trim", "unique", "upper", "wordcount"),
}
_OF_JINJA = ("_loop_vars", "_block_vars")  # which it passes beside the arguments of any call
# Tests, and the values that they may take: of others they would make a text, or format one.
_TAKES: dict[str, Any] = {
    **dict.fromkeys(("odd", "even", "divisibleby"), (int, float)),
    "lower": str,
    "upper": str,
}


class _Meter:
    """The budget of one run of a template, which grows with its input."""

    def __init__(self, given: int):
        self.most = self.room = _SIZE + _MORE_SIZE * given
        self.steps = _STEPS + _MORE_STEPS * given

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError("it takes too many steps")

    def grow(self, size: int) -> None:
        """Raise if something of this size may not be made."""
        if size > self.most:
            raise SecurityError(f"it makes more than {self.most} characters or elements")
        self.spend(max(size, 0) // _PACE)

    def size(self, value: Any, written: bool = False) -> int:
        """Characters and elements of a value, at most a little more than `most`; see `_size`."""
        self.spend(_LOOK)
        size = _size(value, self.most, self.spend, written)
        self.grow(size)
        return size


def _size(
    value: Any, most: float, spend: Callable[[int], None], written: bool = False, depth: int = _DEPTH
) -> int:
    """Characters and elements of a value; what it holds twice counts twice, as where it is `written`."""
    spend(1)
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise SecurityError(f"it has an integer of more than {_BITS} bits")
    if isinstance(value, Namespace) and (written or depth < _DEPTH):  # which could hold itself
        raise SecurityError("it takes a namespace for a value")
    if isinstance(value, range):
        return len(value)
    held: Iterable[Any] = ()
    if isinstance(value, Mapping):
        held = (x for pair in value.items() for x in pair)
    elif isinstance(value, _HELD):
        held = value
    size = 1
    for x in held:
        if depth == 0:
            raise SecurityError(f"it has more than {_DEPTH} lists in one another")
        size += _size(x, most, spend, written, depth - 1)
        if size > most:
            break
    return size


# Checks of methods and filters that may make more than they are given, before they run.


def _formatted(meter: _Meter, pattern: Any, *values: Any, **named: Any) -> None:
    pattern = str(pattern)
    wide = r"\*|\d{3}"  # a width, which may follow a name with anything in it
    if re.search(wide if "%(" in pattern else f"%[^%a-zA-Z]*({wide})", pattern):
        raise SecurityError(f"it formats with {pattern[:80]!r}; expected widths of at most two digits")
    meter.grow(len(pattern) + pattern.count("%") * (400 + meter.size((values, named), True)))


def _replaced(meter: _Meter, text: Any, old: Any, new: Any, count: Any = None) -> None:
    meter.grow(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def _joined(meter: _Meter, values: Any, between: Any = "", attribute: Any = None) -> None:
    meter.grow(meter.size(values, True) * (1 + len(str(between))))


def _indented(meter: _Meter, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    meter.grow(len(str(text).splitlines()) * (width if isinstance(width, int) else len(str(width))))


def _as_json(
    meter: _Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    size, (elements, depth) = meter.size(value, True), _nested(value)
    width = indent if isinstance(indent, int) else meter.size(indent)
    meter.grow(size + elements * (4 + max(width, 0) * depth + meter.size(separators)))


def _nested(value: Any) -> tuple[int, int]:
    """The number of elements that a value holds, and of lists in one another."""
    if not isinstance(value, (list, tuple, Mapping)):
        return 0, 0
    inner = [_nested(x) for x in (value.values() if isinstance(value, Mapping) else value)]
    return len(inner) + sum(n for n, _ in inner), 1 + max((depth for _, depth in inner), default=0)


def _searched(meter: _Meter, text: Any, characters: Any = None, *others: Any) -> None:
    """Spend a step for each pair of characters that may be compared."""
    meter.spend(len(str(text)) * len(str(characters)) // _PACE)


_GROWING_METHODS: dict[str, Callable[..., None]] = {
    "join": lambda meter, between, values: _joined(meter, values, between),
    "replace": _replaced,
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"), _searched),
}
_GROWING_FILTERS: dict[str, Callable[..., None]] = {
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "tojson": _as_json,
    "trim": _searched,
}


class _Context(Context):  # type: ignore[misc]
    """The variables of a run, and its meter."""

    def __init__(self, environment: Any, parent: dict[str, Any], *others: Any, **named: Any):
        super().__init__(environment, parent, *others, **named)
        self.meter = _Meter(sum(_size(x, float("inf"), lambda steps: None) for x in parent.values()))


def _metered(context: _Context, value: Any) -> Any:
    context.meter.size(value)
    return value


def _plain(context: _Context, value: Any) -> Any:
    context.meter.size(value, True)
    return value


def _text(context: _Context, value: Any) -> str:
    context.meter.size(value, True)
    text = value if isinstance(value, str) else str(value)
    context.meter.grow(len(text))
    return text


def _written(context: _Context, value: Any) -> str:
    text: str = _text(context, value)
    context.meter.room -= len(text)
    if context.meter.room < 0:
        raise SecurityError(f"it writes more than {context.meter.most} characters")
    return text


def _counted(context: _Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        context.meter.spend(_LOOK)
        yield value


def _filter(name: str, plain: Any) -> Callable[..., Any]:
    """The filter that is called so in the environment `plain`, metered."""

    def filtered(context: _Context, value: Any, *args: Any, **named: Any) -> Any:
        meter = context.meter
        meter.spend(_CALL)
        for each in (value, *args, *named.values()):
            meter.size(each, True)
        if name in _GROWING_FILTERS:
            _GROWING_FILTERS[name](meter, value, *args, **named)
        found = plain.call_filter(name, value, args, named, context)
        return _metered(context, list(found) if isinstance(found, Iterator) else found)

    return filtered


def _test(name: str, test: Callable[..., bool]) -> Callable[..., bool]:
    """The test of this name, for values of the kind that it takes."""

    def tested(*values: Any) -> bool:
        for x in values:
            if not isinstance(x, _TAKES[name]):
                raise TypeError(f"the test {name!r} takes no {type(x).__name__}")
        return test(*values)

    return tested


class _Metering(NodeTransformer):  # type: ignore[misc]
    """Puts what meters around the expressions of a template."""

    def _around(self, name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def _value(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._around("_metered", node)

    visit_Name = visit_List = visit_Tuple = visit_Dict = _value

    def visit_Const(self, node: nodes.Const) -> Any:
        return self._value(node) if isinstance(node.value, str) and len(node.value) > _PACE else node

    def visit_Getattr(self, node: nodes.Getattr) -> Any:
        if not isinstance(node.node, nodes.Name):  # which may be a namespace, and is not read as a whole
            node.node = self.visit(node.node)
        return self._around("_metered", node)

    def visit_Getitem(self, node: nodes.Getitem) -> Any:
        arg = self.visit(node.arg)
        node.arg = arg if isinstance(arg, nodes.Slice) else self._around("_plain", arg)
        return self.visit_Getattr(node)

    def visit_Assign(self, node: nodes.Assign) -> Any:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):  # no namespace holds another one
            node.node = self._around("_plain", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        node.nodes = [self._around("_text", self.visit(each)) for each in node.nodes]
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        node.nodes = [self._around("_written", self.visit(each)) for each in node.nodes]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> Any:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        node.iter = self._around("_counted", node.iter)
        return node


class Sandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """An environment for templates of others, which may call `functions`, too, and have more `filters`."""

    context_class = _Context
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, functions: Mapping[str, Any], filters: Mapping[str, Any]):
        extensions = ["jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        plain = ImmutableSandboxedEnvironment()
        plain.filters |= filters
        own = {name: _filter(name, plain) for name in _FILTERS}
        own |= {each.__name__: each for each in (_metered, _plain, _text, _written, _counted)}
        self.filters = {name: pass_context(each) for name, each in own.items()}
        self.tests |= {name: _test(name, self.tests[name]) for name in _TAKES}
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals: dict[str, Any] = {**kept, **functions}
        self._functions = tuple(self.globals.values())

    def template(self, source: str) -> Any:
        """The template of this text."""
        if len(source) > _MOST_SOURCE:
            raise SecurityError(f"it has {len(source)} characters; expected at most {_MOST_SOURCE}")
        tree = self.parse(source)
        for node in tree.find_all(_REFUSED):
            raise SecurityError(f"line {node.lineno}: {type(node).__name__.lower()} is not there")
        tree = _Metering().visit(tree)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter: _Meter = context.meter
        if operator == "*":
            for x, times in ((left, right), (right, left)):
                if isinstance(x, _KINDS) and isinstance(times, int):
                    meter.grow(meter.size(x) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _BITS:
                raise SecurityError(f"it has an integer of more than {_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _formatted(meter, left, right)
        return _metered(context, super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        meter: _Meter = context.meter
        meter.spend(_CALL)
        owner, name = None, type(function).__name__
        if not isinstance(function, Undefined):  # whose error says more
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", name)
        if isinstance(function, LoopContext):
            args = tuple(_counted(context, each) for each in args)
        elif isinstance(owner, _KINDS) and name in _METHODS:
            meter.size(owner)
            if name in _GROWING_METHODS:
                given = {key: x for key, x in named.items() if key not in _OF_JINJA}
                _GROWING_METHODS[name](meter, owner, *args, **given)
        elif any(function is each for each in self._functions):
            for each in (*args, *named.values()):
                meter.size(each, True)
        elif not isinstance(function, (Macro, Undefined)) and not isinstance(owner, LoopContext):
            raise SecurityError(f"{name} is not there")
        return _metered(context, super().call(context, function, *args, **named))
