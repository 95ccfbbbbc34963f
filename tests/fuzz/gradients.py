"""Recipes for gradients of a right call of any function that has one."""

import inspect

import attention
import numpy as np
import recurrent
import variants
from judge import Like
from recipes import RECIPES, Call, native, recipe

from fastattn import functional
from fastattn.grad import vjp

FORWARD = [
    *[attention.attention] * 6,
    *[attention.sparse] * 2,
    attention.sigmoid_attention,
    attention.talking_heads_attention,
    attention.additive_attention,
    variants.gated_attention,
    variants.disentangled_attention,
    *[recurrent.linear_attention] * 3,
]
RESULTS = ("out", "return_lse", "stats", "out_state", "return_state")  # arguments of the forward pass alone
FUSED = {  # gradients that take its results
    "attention": functional.attention_backward,
    "varlen_attention": functional.varlen_attention_backward,
}


def gradients_of(function):
    """A function of what `function` takes, and of the arguments of its pullback."""

    def both(*values, dout, dlse=None, dstate_out=None, need=None, **arguments):
        if dlse is not None:
            arguments["return_lse"] = True
        if dstate_out is not None:
            arguments["return_state"] = True
        dmore = dlse if dstate_out is None else dstate_out
        return vjp(function, *values, **arguments)[1](dout, dmore, need=need)

    parameters = dict(inspect.signature(function).parameters)
    for name in RESULTS:
        parameters.pop(name, None)
    taken = [x for x in parameters.values() if x.kind is not x.VAR_KEYWORD]
    options = [x for x in parameters.values() if x.kind is x.VAR_KEYWORD]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("dout", "dlse", "need")]
    both.__signature__ = inspect.Signature([*taken, *more, *options])
    both.__name__ = function.__name__
    return both


@recipe
def gradients(d):
    call = d.choose(*FORWARD)(d)
    arguments = {name: x for name, x in call.arguments.items() if name not in RESULTS}
    function, name = call.function, call.function.__name__
    with_lse = "return_lse" in inspect.signature(function).parameters
    try:
        found = function(**arguments, **({"return_lse": True} if with_lse else {}))
    except (TypeError, ValueError):  # not all recipes give right calls only
        return call
    out = found[0] if isinstance(found, tuple) else found
    given = {"dout": d.floats(*out.shape, dtype=out.dtype), **arguments}
    if with_lse and d.chance(0.4):
        given["dlse"] = d.floats(*d.broadcast(*found[1].shape), dtype=found[1].dtype)
    names = [f"d{x}" for x in (*arguments, "scale", "bias_diagonals")]
    given["need"] = tuple(d.rng.permutation(names)[: d.size(1, 4)].tolist())
    if d.chance(0.6):
        given["need"] = tuple(f"d{x}" for x in ("q", "k", "v") if x in arguments)
    tolerance = 4 * call.tolerance
    # A gradient in float64 has no more digits than d.dtype.
    sources = [given.get(x[1:], 0.0) for x in given["need"]]
    if d.dtype != np.float64 and not all(is_narrow(x) for x in sources):
        tolerance = np.inf
    if name in FUSED and d.chance(0.4):
        given |= {"out": d.laid_out(out), "lse": d.laid_out(found[1])}
        if d.chance(0.3):  # wrong ones may be anything: exp(score - lse) overflows
            tolerance = np.inf
        return Call(FUSED[name], given, like, tolerance=tolerance)
    return Call(
        gradients_of(function),
        given,
        like,
        (f"pullback of {name}", name, f"{name}_backward", "vjp"),
        tolerance,
    )


RECIPES += [gradients] * 7


def like(a):
    """Each gradient is like the argument that it is the gradient of. `need` of None asks for none."""
    sources = [a.get(name[1:]) for name in a["need"] or ()]
    if not sources or not all(isinstance(x, (np.ndarray, memoryview)) for x in sources):
        return None
    dtypes = [np.dtype(float) if native(x).kind in "iu" else native(x) for x in sources]  # a scale of 1
    return [Like(np.shape(x), dtype, finite=False) for x, dtype in zip(sources, dtypes, strict=True)]


def is_narrow(x):
    """Tell whether `x` is an array whose gradient is not in float64."""
    return isinstance(x, (np.ndarray, memoryview)) and np.ndim(x) > 0 and native(x) != np.float64
