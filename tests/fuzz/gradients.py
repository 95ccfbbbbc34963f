"""Recipes for gradients: of a right call of any function that has one, and of operations."""

import inspect
from functools import wraps

import attention
import numpy as np
import recurrent
import variants
from judge import Like
from recipes import RECIPES, Call, native, recipe

from fastattn import functional

FORWARD = [
    *[attention.attention] * 6,
    *[attention.sparse] * 2,
    attention.sigmoid_attention,
    attention.talking_heads_attention,
    attention.additive_attention,
    attention.location_attention,
    attention.neighborhood_attention,
    attention.linformer_attention,
    variants.gated_attention,
    variants.forgetting_attention,
    variants.cosine_attention,
    variants.qk_norm_attention,
    variants.general_attention,
    variants.memory_attention,
    variants.transformer_xl_attention,
    variants.disentangled_attention,
    variants.dilated_window_attention,
    variants.strided_attention,
    variants.differential_attention,
    variants.latent_attention,
    *[recurrent.linear_attention] * 3,
    recurrent.by_its_paper,
]
RESULTS = ("out", "return_lse", "stats", "out_state", "return_state")  # what only the forward pass takes
GIVEN = ("dout", "dlse", "need", "into", "dstate_out", "no_option")  # what only the gradients take


def gradients_of(function):
    """The gradients of a function, which is run first if they take its results."""
    backward = getattr(functional, f"{function.__name__}_backward")
    parameters = inspect.signature(backward).parameters
    if "lse" not in parameters:
        return backward

    @wraps(backward)
    def both(*values, **arguments):
        arguments |= zip(signature.parameters, values, strict=False)
        forward = {name: x for name, x in arguments.items() if name not in GIVEN}
        out, lse = function(**forward, return_lse=True)
        return backward(**arguments, out=out, lse=lse)

    both.__signature__ = signature = inspect.Signature(
        [x for name, x in parameters.items() if name not in ("out", "lse")]
    )
    return both


@recipe
def gradients(d):
    call = d.choose(*FORWARD)(d)
    arguments = {name: x for name, x in call.arguments.items() if name not in RESULTS}
    function, name = call.function, call.function.__name__
    backward = getattr(functional, f"{name}_backward")
    with_lse = "lse" in inspect.signature(backward).parameters
    try:
        found = function(**arguments, **({"return_lse": True} if with_lse else {}))
    except (TypeError, ValueError):  # not all recipes give right calls only
        return call
    out = found[0] if isinstance(found, tuple) else found
    given = {"dout": d.floats(*out.shape, dtype=out.dtype), **arguments}
    if with_lse and d.chance(0.4):
        given["dlse"] = d.floats(*d.broadcast(*found[1].shape), dtype=found[1].dtype)
    names = [f"d{x}" for x in (*arguments, "scale", "bias_diagonals")]
    if d.chance(0.4):
        given["need"] = tuple(d.rng.permutation(names)[: d.size(1, 4)].tolist())
    tolerance = 4 * call.tolerance
    need = given.get("need", inspect.signature(backward).parameters["need"].default) or ()
    sources = [given.get(x[1:], 0.0) for x in need]  # in float64 a gradient has no more digits than d.dtype
    if d.dtype != np.float64 and not all(is_narrow(x) for x in sources):
        tolerance = np.inf
    if with_lse and d.chance(0.3):  # wrong ones may be anything: exp(score - lse) overflows
        given |= {"out": d.laid_out(out), "lse": d.laid_out(found[1])}
        return Call(backward, given, like(backward), tolerance=np.inf)
    return Call(gradients_of(function), given, like(backward), (backward.__name__, name), tolerance)


RECIPES += [gradients] * 7


def like(backward):
    """Each gradient is like what it is the gradient of."""

    def found(a):
        need = a.get("need", inspect.signature(backward).parameters["need"].default)
        sources = [a.get(name[1:]) for name in need or ()]
        if not sources or not all(isinstance(x, (np.ndarray, memoryview)) for x in sources):
            return None
        return [Like(np.shape(x), native(x), finite=False) for x in sources]

    return found


def is_narrow(x):
    """Whether `x` is an array whose gradient is not in float64."""
    return isinstance(x, (np.ndarray, memoryview)) and np.ndim(x) > 0 and native(x) != np.float64
