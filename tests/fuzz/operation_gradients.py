"""Recipes for the gradients of `fastattn.grad`, with difference quotients of the operations."""

from functools import wraps

import numpy as np
from judge import Like
from operations import how, rows
from recipes import RECIPES, Call, native, recipe, right, same
from slopes import wrong_slope

from fastattn import grad, ops, positions
from fastattn._args.types import ACTIVATIONS, lane_dtype


def into(d, need, shapes):
    """Arrays for some of the gradients that are needed."""
    if not need or not d.chance(0.15):
        return {}
    return {"into": [d.choose(None, np.empty(*shapes[name])) for name in need]}


def needed(d, names):
    """Draw which gradients are asked for: by default all of `names`."""
    if d.chance(0.7):
        return names, {}
    need = tuple(d.rng.permutation(names)[: d.size(0, len(names))].tolist())
    return need, {"need": need}


def slopes(d, at, function, need, shapes, first=(), smooth=True):
    """A check of the gradients `need`, of these `shapes`: in float64 they are the slopes of `function(at)`.

    What comes before them is like `first`. Only `smooth` functions have slopes everywhere.
    """

    def check(found):
        gradients = dict(zip(need, found[len(first) :], strict=True))
        return wrong_slope(function, {n: at[n] for n in need}, gradients, d.rng)

    likes = [*first, *(Like(*shapes[name]) for name in need)]
    return right(likes, check if d.dtype == np.float64 and need and smooth else None)


@recipe
def linear_gradients(d):
    lane, gated = lane_dtype(d.dtype), d.chance(0.3)
    dtype = {"float64": "float64"}.get(d.dtype.name) or d.choose("float32", "float32", "bfloat16", "int8")
    shape, k, n = (*d.batch(), d.size(0, 6)), d.size(), d.size()
    matrix, inner = d.rng.standard_normal((1 + gated, n, k)), (2, n) if gated else (n,)
    activation = d.choose(None, *ACTIVATIONS)

    def packed(x):
        gate = {"gate": x[0]} if gated else {}
        return ops.pack(x[-1], dtype=dtype, **gate)

    weight = packed(matrix.astype(lane))
    x, dout, bias = d.floats(*shape, k), d.floats(*shape, n), d.floats(*inner, dtype=lane)
    shapes = {"dx": ((*shape, k), d.dtype), "dweight": ((*inner, k), lane), "dbias": (inner, lane)}
    names = ("dx", "dbias") if dtype == "int8" else tuple(shapes)
    need, more = needed(d, names)
    more = {"need": need} if dtype == "int8" else more
    more |= d.some(0.4, activation=lambda: activation)
    if (activation or gated) and d.chance(0.3):
        more["pre"] = np.empty((*shape, *inner), d.dtype)
        ops.linear(x, weight, bias, activation=more.get("activation"), pre=more["pre"])
        more["pre"].flags.writeable = False

    def function(at):
        at = {"dx": x, "dweight": matrix[0] if not gated else matrix, "dbias": bias, **at}
        weight = packed(at["dweight"] if gated else at["dweight"][None])
        out = ops.linear(at["dx"], weight, at["dbias"], activation=more.get("activation"))
        return float((out * dout).sum())

    at = {"dx": x, "dweight": matrix if gated else matrix[0], "dbias": bias}
    arguments = {"dout": dout, "x": x, "weight": weight, "bias": bias, **more}
    arguments |= {**into(d, need, shapes), **how(d)}
    check = slopes(d, at, function, need, shapes, smooth=more.get("activation") != "relu")
    kinks = more.get("activation") == "relu" and (dtype in ("bfloat16", "int8") or d.dtype.itemsize == 2)
    tolerance = np.inf if kinks else 30.0  # what is rounded more coarsely may fall on the other side
    return Call(grad.linear, arguments, None, ("linear",), tolerance, check=check)


RECIPES += [linear_gradients] * 2


@recipe
def norm_gradients(d):
    shape, lane = rows(d), lane_dtype(d.dtype)
    function, backward = d.choose((ops.layer_norm, grad.layer_norm), (ops.rms_norm, grad.rms_norm))
    features, has_bias = shape[-1:], function is ops.layer_norm
    x, dout = d.floats(*shape), d.floats(*shape)
    more = d.some(
        0.4, weight=lambda: d.floats(*features, dtype=lane), residual=lambda: d.floats(*shape),
        dsum=lambda: d.floats(*shape), eps=lambda: 1e-3
    )  # fmt: skip
    shapes = {"dx": (shape, d.dtype), "dweight": (features, lane), "dbias": (features, lane)}
    names = ("dx", "dweight", "dbias") if has_bias else ("dx", "dweight")
    need, which = needed(d, names)
    forward = {name: more[name] for name in ("residual", "eps") if name in more}

    def value(at):
        given = (
            {"weight": at["dweight"]} if "dweight" in at else {n: more[n] for n in ("weight",) if n in more}
        )
        given |= {"bias": at["dbias"]} if "dbias" in at else {}
        out, total = function(at.get("dx", x), **given, **forward, return_sum=True)
        around = (np.asarray(more["dsum"]) * total).sum() if "dsum" in more else 0.0
        return float((out * dout).sum() + around)

    at = {"dx": x, "dweight": more.get("weight", np.ones(features)), "dbias": np.zeros(features)}
    arguments = {"dout": dout, "x": x, **more, **which, **into(d, need, shapes), **how(d)}
    # A row of equal numbers, and one feature alone, have a deviation of 0: eps decides.
    tolerance = 30.0 if features[0] > 1 else np.inf
    check = slopes(d, at, value, need, shapes)
    return Call(backward, arguments, tolerance=tolerance, check=check)


RECIPES += [norm_gradients]


@recipe
def elementwise_gradients(d):
    shape = rows(d)
    x, dout = d.floats(*shape), d.floats(*shape)
    if d.chance(0.4):
        out = ops.softmax(x)
        more = d.some(0.2, into=lambda: d.laid_out_to_write(np.empty(shape, d.dtype)))
        check = slopes(
            d,
            {"dx": x},
            lambda at: float((ops.softmax(at["dx"]) * dout).sum()),
            ("dx",),
            {"dx": (shape, d.dtype)},
        )
        return Call(grad.softmax, {"dout": dout, "out": out, **more, **how(d)}, same("out"), check=check)
    activation, up = d.choose(*ACTIVATIONS), d.some(0.5, up=lambda: d.floats(*shape))
    names = ("dx", "dup") if up else ("dx",)
    shapes = dict.fromkeys(("dx", "dup"), (shape, d.dtype))
    need, which = needed(d, names)

    def value(at):
        given = {"up": at.get("dup", up["up"])} if up else {}
        return float((ops.activate(at.get("dx", x), activation, **given) * dout).sum())

    arguments = {"dout": dout, "x": x, "activation": activation, **up, **which}
    arguments |= {**into(d, need, shapes), **how(d)}
    at = {"dx": x, "dup": up.get("up")}
    check = slopes(d, at, value, need, shapes, smooth=activation != "relu")
    return Call(grad.activate, arguments, tolerance=4.0, check=check)


@recipe
def cross_entropy(d):
    lane, classes, shape = lane_dtype(d.dtype), d.size(), (*d.batch(), d.size(0, 6))
    more = d.some(
        0.3, label_smoothing=lambda: 0.2, reduction=lambda: d.choose("mean", "sum", "none"),
        dloss=lambda: 0.5, ignore_index=lambda: d.choose(0, -100, classes)
    )  # fmt: skip
    targets = d.rng.integers(0, classes, shape)
    if d.chance(0.3):
        targets[d.rng.random(shape) < 0.4] = more.get("ignore_index", -100)
    with_map, k = d.chance(0.7), d.size()
    if not with_map:
        weight, bias, k = None, {}, classes
        at = {"dx": d.floats(*shape, classes)}
    else:
        dtype = "float64" if d.dtype == np.float64 else d.choose("float32", "bfloat16", "int8")
        matrix = d.rng.standard_normal((classes, k)).astype(lane)
        weight = ops.pack(matrix, dtype=dtype)
        bias = d.some(0.5, bias=lambda: d.floats(classes, dtype=lane))
        at = {"dx": d.floats(*shape, k)} | ({} if dtype == "int8" else {"dweight": matrix})
        at |= {"dbias": bias["bias"]} if bias else {}
    need, which = needed(d, tuple(at))
    if weight is not None and weight.dtype == "int8":
        which = {"need": need}
    shapes = {"dx": ((*shape, k), d.dtype), "dweight": ((classes, k), lane), "dbias": ((classes,), lane)}
    arguments = {"x": at["dx"], "weight": weight, "targets": targets, **bias, **more, **which}
    arguments |= {**into(d, need, shapes), **how(d)}

    def value(moved):
        given = {**at, **moved}
        by = None if weight is None else ops.pack(given["dweight"])
        loss = grad.cross_entropy(
            given["dx"], by, targets, need=(), **more, **({"bias": given["dbias"]} if bias else {})
        )
        return float(np.sum(loss[0])) * more.get("dloss", 1.0)

    @wraps(grad.cross_entropy)
    def function(*args, **options):
        loss, *gradients = grad.cross_entropy(*args, **options)
        return np.asarray(loss, lane), *gradients  # a float has the digits of the arrays

    losses = Like(shape if more.get("reduction") == "none" else (), lane)
    check = slopes(d, at, value, need, shapes, [losses])
    return Call(function, arguments, None, ("cross_entropy", "linear"), 30.0, check=check)


RECIPES += [cross_entropy]


@recipe
def embedding_gradients(d):
    ids, n, k = d.integers(0, 5, *d.batch(), d.length()), d.size(5, 9), d.size()
    dout = d.floats(*ids.shape, k)
    more = d.some(0.3, add_to=lambda: d.rng.standard_normal((n, k)).astype(lane_dtype(d.dtype)))
    expected = np.zeros((n, k)) + more.get("add_to", 0.0)
    np.add.at(expected, ids, np.asarray(dout, np.float64))

    def check(found):
        far = abs(found[0] - expected).max(initial=0)
        return None if far <= 1e-4 else f"sums are off by {far}"

    def result(a):
        return [Like((a["num_rows"], np.shape(a["dout"])[-1]), lane_dtype(native(a["dout"])))]

    return Call(grad.embedding, {"dout": dout, "ids": ids, "num_rows": n, **more}, result, check=check)


@recipe
def rope_gradients(d):
    batch, length, half = d.batch(), d.length(), d.size()
    dout = d.floats(*batch, d.size(1, 3), length, 2 * half + d.size(0, 3))
    cos, sin = positions.rope_tables(
        d.integers(0, 99, *d.broadcast(*batch), length), positions.rope_frequencies(2 * half)
    )
    more = d.some(0.3, interleaved=lambda: True, out=lambda: np.empty(dout.shape, d.dtype))
    turned = {name: x for name, x in more.items() if name != "out"}

    def check(found):  # a rotation turned back is what it was
        back = positions.apply_rope(found[0], cos, sin, **turned)
        far = abs(back - np.asarray(dout)).max(initial=0) if d.dtype.itemsize > 2 else 0
        return None if far <= 1e-4 else f"turned back it is off by {far}"

    arguments = {"dout": dout, "cos": d.laid_out(cos), "sin": d.laid_out(sin), **more}
    return Call(grad.rope, arguments, same("dout"), ("rope", "apply_rope"), check=check)


@recipe
def dropout(d):
    shape, rate = rows(d), d.choose(0.0, 0.1, 0.5, 0.99)
    more = d.some(0.4, stream=lambda: d.size(), out=lambda: d.laid_out_to_write(np.empty(shape, d.dtype)))
    x = d.floats(*shape)

    def check(found):
        kept = found[0] != 0
        with np.errstate(all="ignore"):
            far = abs(found[0].astype(float) * (1 - rate) - np.asarray(x, float))[kept]
        bound = 0.02 * (1 + abs(np.asarray(x, float))[kept])
        return None if (far <= bound).all() else "what is kept is not x / (1 - rate)"

    arguments = {"x": x, "rate": rate, "seed": int(d.rng.integers(2**32)), **more}
    return Call(grad.dropout, arguments, same("x"), tolerance=0.01, check=check)
