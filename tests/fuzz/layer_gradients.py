"""Recipes for gradients of layers, of functions of several layers."""

import inspect

import numpy as np
from judge import Like, arrays_in
from layers import NAMES, TOLERANCE, changed, inputs, make, result
from recipes import RECIPES, Call, recipe, right
from slopes import wrong_slope

from fastattn import grad, layers

INPUTS = ("x", "y", "inducing", "seeds", "latents", "query", "key", "value", "src", "tgt", "memory")
TRAINED = ("float32", "float64", "bfloat16")
NOT_RECORDED = ("need_weights", "average_attn_weights", "residual")


def pulled(forward):
    """A function that calls `vjp` of `forward` and then its pullback with the argument `dout`."""
    own = {name: x for name, x in inspect.signature(forward).parameters.items() if name != "out"}
    more = inspect.signature(forward._vjp).parameters
    own |= {name: x for name, x in more.items() if x.kind == x.KEYWORD_ONLY}
    own = sorted(own.values(), key=lambda parameter: parameter.kind)
    dout = inspect.Parameter("dout", inspect.Parameter.KEYWORD_ONLY)
    last = [x for x in own if x.kind == x.VAR_KEYWORD]
    places = [x.name for x in own if x.kind == x.POSITIONAL_OR_KEYWORD]

    def both(*values, dout, **options):
        out, pullback = grad.vjp(forward, **dict(zip(places, values, strict=False)), **options)
        return out, pullback(dout)

    both.__signature__ = inspect.Signature([*(x for x in own if x not in last), dout, *last])
    return both


def training(d, forward):
    """Options of a forward pass with gradients."""
    more = d.some(0.25, checkpoint=lambda: True)
    if "dropout" in inspect.signature(getattr(forward, "_vjp", forward)).parameters and d.chance(0.2):
        more |= {"dropout": 0.3, "seed": int(d.rng.integers(2**40))}
    return more


def gradients_like(arguments, parts):
    """Describe the gradients of the inputs and of the parameters of `parts`; None for int8 and 4 bits."""
    if not all(part.weights_dtype in TRAINED for it in parts for _, part in it._walk()):
        return None
    given = [np.asarray(x) for name, x in arguments.items() if name in INPUTS]
    state = [x for it in parts for x in it.state_dict().values()]
    return [Like(x.shape, x.dtype.newbyteorder("=")) for x in given] + [Like(x.shape, x.dtype) for x in state]


def slopes(d, forward, arguments, dout, parts):
    """A check in float64: gradients are the slopes along all inputs and parameters."""
    names = [name for name in arguments if name in INPUTS]

    def check(found):
        places = [f"{i}.{name}" for i, it in enumerate(parts) for name in it.state_dict()]
        gradients = dict(zip([*names, *places], found[1:], strict=True))
        state = {f"{i}.{name}": x for i, it in enumerate(parts) for name, x in it.state_dict().items()}
        state = {} if shared(parts) else state
        moved = {**{name: arguments[name] for name in names}, **state}

        def value(at):
            for i, it in enumerate(parts) if state else ():
                it.load_state_dict(
                    {name.partition(".")[2]: x for name, x in at.items() if name.startswith(f"{i}.")}
                )
            out, _ = grad.vjp(forward, **{**arguments, **{name: at[name] for name in names}})
            return float((arrays_in(out)[0] * dout).sum())

        try:
            return wrong_slope(value, moved, gradients, d.rng)
        finally:
            value(moved)

    return check


def shared(parts):
    """Tell whether a layer stands in two places, so that its gradients are a sum."""
    every = [id(part) for it in parts for _, part in it._walk()]
    return len(set(every)) < len(every)


def pulled_call(d, forward, arguments, like, names, parts, inside, abused, tolerance=TOLERANCE):
    """A call of `forward` and of its pullback."""
    dout = d.floats(*like.shape, dtype=like.dtype)
    likes = None if abused else gradients_like(arguments, parts)
    every = [part for it in parts for _, part in it._walk()]
    kinks = {getattr(part, "activation", arguments.get("activation")) for part in every} & {"relu", "reglu"}
    if kinks and (d.dtype.itemsize == 2 or any(x.weights_dtype not in TRAINED[:2] for x in every)):
        tolerance = np.inf  # what is rounded more coarsely may fall on the other side
    slope = slopes(d, forward, arguments, dout, parts) if d.dtype == np.float64 and not kinks else None
    check, given = likes and right([like, *likes], slope), {**arguments, "dout": dout}
    return Call(pulled(forward), given, None, names, tolerance, inside, abused, check=check)


@recipe
def layer_gradients(d):
    """Gradients of a layer, perhaps of one that was called and changed before."""
    it = make(d)
    arguments = {name: x for name, x in inputs(d, it).items() if name not in NOT_RECORDED}
    if d.chance(0.2):
        it(**arguments)
    changes, abused = changed(d, it, 0.2)
    if isinstance(it, layers.Linear):
        arguments |= d.some(0.3, activation=lambda: d.choose("relu", "gelu", "silu"))
    arguments |= training(d, it)
    names = (type(it).__name__, *NAMES)
    names = (*(f"pullback of {name}" for name in names), *names)
    like = result(it, arguments)[0]
    return pulled_call(d, it, arguments, like, names, [it], (it, changes), abused)


RECIPES += [layer_gradients] * 6
