"""Recipes for calls, and how to spoil their arguments."""

import inspect
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from judge import Case, Like

FUNCTIONS = ("score_mod", "predicate", "progress")  # what these raise is theirs
LOOPS = {
    "num_iterations": 100,
    "num_rounds": 20,
    "num_features": 1000,
}  # as many as the caller asks for: more would only take long


class Call(NamedTuple):
    """A function and right arguments. `result` says what it should return for any arguments."""

    function: Any
    arguments: dict
    result: Any = None
    names: tuple[str, ...] = ()  # what messages may begin with, if not with the function's
    tolerance: float = 1.0
    inside: Any = None  # what goes in besides: an object that the function is a method of
    abused: bool = False  # whether something was changed behind that object's back


RECIPES = []


def recipe(function):
    RECIPES.append(function)
    return function


def draw(d):
    """Draw a case: a recipe's call, most often with one or two wrong arguments."""
    call = d.choose(*RECIPES)(d)
    arguments = dict(call.arguments)
    if d.chance(0.55):
        for _ in range(d.choose(1, 1, 2)):
            spoil(d, call.function, arguments)
    names = call.names or (call.function.__name__,)
    result = None if call.result is None else lambda: call.result(arguments)
    case = Case(
        names, lambda: carried_out(call.function, arguments), [arguments, call.inside], result, call.tolerance
    )
    # What was done behind the back of an object must not crash; it need be neither explained nor right.
    return case._replace(expected=None, twice=False, clean=any_message) if call.abused else case


def any_message(error):
    return isinstance(error, (TypeError, ValueError, LookupError, AttributeError, OverflowError))


def spoil(d, function, arguments):
    """Give one argument a wrong value, or give one that was left out or does not exist."""
    parameters = inspect.signature(function).parameters.values()
    optional = [p.name for p in parameters if p.default is not p.empty]
    if optional and d.chance(0.2):
        arguments[d.choose(*optional)] = d.junk()
    elif d.chance(0.05) and any(p.kind == p.VAR_KEYWORD for p in parameters):
        arguments["no_option"] = 0.1
    elif arguments:
        name = d.choose(*arguments)
        arguments[name] = d.wrong(arguments[name])
    for name in FUNCTIONS:
        if callable(arguments.get(name)) and not isinstance(arguments[name], FunctionType):
            arguments[name] = None
    for name, most in LOOPS.items():
        if isinstance(arguments.get(name), int) and arguments[name] > most:
            arguments[name] = most


def carried_out(function, arguments):
    """Call the function with its positional parameters by position."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return function(
        *(arguments[n] for n in places), **{n: x for n, x in arguments.items() if n not in places}
    )


def native(x):
    """The dtype in which results for `x` come."""
    return np.asarray(x).dtype.newbyteorder("=")


def same(name):
    """The result has shape and dtype of that argument."""
    return lambda a: [Like(np.shape(a[name]), native(a[name]))]
