"""Recipes for calls, and how to spoil their arguments."""

import inspect
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from judge import Case, Like, arrays_in, described, largest

# Errors that these raise are theirs.
FUNCTIONS = ("score_mod", "predicate", "progress", "activation_fn", "callback", "loss", "schedule", "tokens")
# Arguments that a function writes to: results, and what carries a state.
WRITTEN = ("out", "into", "add_to", "out_state", "stats", "pre", "cache", "rng")
LOOPS = {
    "num_layers": 20,
    "num_encoder_layers": 20,
    "num_decoder_layers": 20,
    "num_steps": 20,
    "accumulate": 20,
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
    same_bits: Any = (
        None  # whether a result of the arguments has the same bits in every run; by default it has
    )
    check: Any = None  # `check(arrays)` says what is wrong with a result of right arguments


RECIPES = []


def recipe(function):
    RECIPES.append(function)
    return function


def draw(d, files=()):
    """Draw a case: a recipe's call, most often with one or two wrong arguments. `files` have the recipes."""
    call = d.choose(*(x for x in RECIPES if not files or x.__module__ in files))(d)
    arguments = dict(call.arguments)
    spoilt = d.chance(0.55)
    if spoilt:
        for _ in range(d.choose(1, 1, 2)):
            spoil(d, call.function, arguments)
    given = call.arguments
    lists = [name for name, x in arguments.items() if type(x) is list is not type(given.get(name))]
    if lists and d.dtype != np.float64:  # in float64, with no more digits than the other arguments have
        call = call._replace(tolerance=np.inf)
    names = call.names or (call.function.__name__,)
    result = None if call.result is None else lambda: call.result(arguments)
    case = Case(
        names,
        lambda: carried_out(call.function, arguments),
        [arguments, call.inside],
        result,
        call.tolerance,
        kept=kept(arguments, call.inside),
        same_bits=call.same_bits is None or call.same_bits(arguments),
        check=None if spoilt else call.check,
    )
    # An object that was changed unseen must not crash; it need be neither explained nor right.
    return case._replace(expected=None, twice=False, clean=any_message) if call.abused else case


def kept(arguments, inside):
    """List the arrays that a call may only read."""
    written = arrays_in([arguments.get(name) for name in WRITTEN])
    read = arrays_in([{name: x for name, x in arguments.items() if name not in WRITTEN}, inside])
    return [x for x in read if not any(np.may_share_memory(x, y) for y in written)]


def any_message(error):
    """Whether it is what Python or NumPy say of a value, warnings among them."""
    known = TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeWarning
    return isinstance(error, known)


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


def right(likes, check=None):
    """A check of a result of moderate arguments: its arrays are like `likes`, and `check` finds no fault."""

    def whole(found):
        got, expected = [(x.shape, x.dtype) for x in found], [(x.shape, np.dtype(x.dtype)) for x in likes]
        if got != expected:
            return f"returned {got}; expected {expected}"
        for x, like in zip(found, likes, strict=True):
            if like.finite and not largest(x) < np.inf:
                return f"NaN or an infinity in {described(x)}, of moderate numbers"
        return None if check is None else check(found)

    return whole
