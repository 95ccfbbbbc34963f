"""Recipes for gradients of layers, of functions of several layers, and for a language model."""

import inspect
from functools import wraps
from itertools import islice

import numpy as np
from judge import Like, arrays_in
from layers import MAKERS, NAMES, TOLERANCE, changed, inputs, made_of, make, result, width
from recipes import RECIPES, Call, recipe, right
from slopes import wrong_slope

from fastattn import grad, layers
from fastattn._args.types import lane_dtype
from fastattn.layers._basic import ACTIVATIONS

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


@recipe
def sets_gradients(d):
    """Gradients of set attention and of other functions that take layers."""
    kind, fields = MAKERS["TransformerEncoderLayer"](d)
    first, second = (kind(**fields, **made) for made in [made_of(d, kind)] * 2)
    changes, abused = changed(d, first, 0.2)
    batch, n, m = d.size(1, 3), d.size(), d.size()
    x, few = d.floats(batch, n, width(first)), d.floats(m, width(first))
    more = d.some(0.3, key_padding_mask=lambda: d.rng.random((batch, n)) < 0.3)
    second = d.choose(first, second)
    name, arguments, parts, rows = d.choose(
        ("set_attention", {"layer": first, "x": few, "y": x}, [first], m),
        (
            "induced_set_attention",
            {"first": first, "second": second, "inducing": few, "x": x},
            [first, second],
            n,
        ),
        ("pooling_by_attention", {"layer": first, "seeds": few, "x": x}, [first], m),
        ("perceiver", {"cross": first, "latent": second, "latents": few, "x": x}, [first, second], m),
    )
    forward = getattr(layers, name)
    arguments |= {**more, **training(d, forward)}
    names = (f"pullback of {name}", name, *(f"pullback of {x}" for x in NAMES), *NAMES)
    like = Like((batch, rows, width(first)), d.dtype)
    return pulled_call(d, forward, arguments, like, names, parts, (parts, changes), abused)


RECIPES += [sets_gradients] * 2


def language_model_fields(d):
    head_dim = d.choose(2, 4, 8)
    num_heads = d.choose(1, 2)
    more = d.some(
        0.3, activation=lambda: d.choose(*ACTIVATIONS), positions=lambda: "rope", bias=lambda: False,
        tie_word_embeddings=lambda: False, norm=lambda: "rms_norm", dim_feedforward=d.size,
        attention=lambda: d.some(0.4, num_kv_heads=lambda: 1, qk_norm=lambda: True, window=lambda: (2, 0)),
    )  # fmt: skip
    sizes = {"d_model": num_heads * head_dim, "num_heads": num_heads, "num_layers": d.choose(1, 2)}
    return {"vocab_size": d.size(2, 12), "max_length": d.size(6, 12), **sizes, **more}


@recipe
def language_model_made(d):
    made = made_of(d, layers.LanguageModel)
    names = ("LanguageModel", "TransformerEncoderLayer", "TransformerEncoder", *NAMES, "rope_frequencies")
    return Call(layers.LanguageModel, {**language_model_fields(d), **made}, names=names)


@recipe
def language_model(d):
    """Logits, loss, gradients and tokens of a language model."""
    made = made_of(d, layers.LanguageModel)
    it = layers.LanguageModel(**language_model_fields(d), **made)
    lane = lane_dtype(np.dtype("float64" if made["weights_dtype"] == "float64" else "float32"))
    shape = (*d.choose((), (1,), (3,)), d.size(0, it.max_length if it.max_length < 13 else 6))
    ids, kind = (
        d.integers(0, it.vocab_size, *shape),
        d.choose("call", "cache", "loss", *["gradients"] * 4, "generate"),
    )
    trained = made["weights_dtype"] in TRAINED
    names = (f"LanguageModel.{kind}", "LanguageModel", "TransformerEncoder", *NAMES)
    if kind == "call":
        check = right([Like((*shape, it.vocab_size), lane)])
        return Call(it, {"ids": ids}, None, names, TOLERANCE, it, check=check)
    if kind == "cache":
        cache = it.new_cache(d.choose(0, 4))
        ids = d.integers(0, it.vocab_size, 2, 2)
        for _ in range(d.choose(0, 1, 2)):
            it(ids, cache=cache)
        return Call(it, {"ids": ids, "cache": cache}, None, names, TOLERANCE, it)
    if kind == "generate":
        drawn = d.some(0.5, top_k=d.size, top_p=lambda: 0.8)
        more = {"temperature": 0.7, "rng": 3, **drawn} if drawn else {}

        @wraps(it.generate)
        def generate(*values, **options):
            return list(islice(it.generate(*values, **options), 3))

        return Call(
            generate, {"ids": ids, "max_new_tokens": d.size(0, 4), **more}, None, names, np.inf, it,
            same_bits=lambda a: "temperature" not in a or type(a.get("rng")) is int,
        )  # fmt: skip
    targets = d.rng.integers(0, it.vocab_size, shape)
    more = d.some(0.3, label_smoothing=lambda: 0.1, ignore_index=lambda: d.choose(0, -100))
    if d.chance(0.3):
        targets[d.rng.random(shape) < 0.4] = more.get("ignore_index", -100)
    function = it.loss if kind == "loss" else it.loss_and_gradients
    names = (f"LanguageModel.{function.__name__}", "pullback of TransformerEncoder", *names)
    forward = {"ids": ids, "targets": targets, **more}
    arguments = forward | (training(d, function) if kind == "gradients" else {})

    def both(ids, targets, **options):
        found = function(ids, targets, **options)
        loss, gradients = found if isinstance(found, tuple) else (found, {})
        return np.asarray(loss, lane), gradients

    both.__signature__ = inspect.signature(function)
    likes = [Like((), lane)]
    if kind == "gradients":
        likes += [Like(x.shape, x.dtype) for x in it.state_dict().values()]

    def slope(found):
        state = it.state_dict()

        def value(at):
            it.load_state_dict(at)
            return function(**arguments)[0]

        try:
            return wrong_slope(value, state, dict(zip(state, found[1:], strict=True)), d.rng)
        finally:
            it.load_state_dict(state)

    exact = kind == "gradients" and made["weights_dtype"] == "float64" and "relu" not in it.activation
    check = right(likes, slope if exact else None) if trained or kind == "loss" else None
    return Call(both, arguments, None, names, TOLERANCE, it, check=check)


RECIPES += [language_model] * 3
