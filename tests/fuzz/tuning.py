"""Recipes for the tuning of tiny models: what is trained, losses, gradients, and steps."""

from functools import wraps

import numpy as np
from judge import Like, arrays_in
from model_calls import loaded
from recipes import RECIPES, Call, recipe
from slopes import wrong_slope
from training import untouched

from fastattn import train
from fastattn._args.types import lane_dtype

ENCODERS, DECODERS = (
    ("bert", "roberta", "distilbert", "modernbert", "qwen3-embedding"),
    ("gpt2", "llama", "qwen3"),
)
PATTERNS = {"bert": "*query*", "roberta": "*dense.weight", "gpt2": "*c_attn*", "llama": "*_proj*"}
TEXTS = ("the cat sat", "a dog", "the cat ran on the mat", "a tree", "mat", "", "nothing of it")


def model_of(d, kinds):
    kind, dtype = d.choose(*kinds), d.choose("float32", "float64", "bfloat16")
    weights = None if dtype == "float64" else d.choose(None, None, "bfloat16")
    return kind, loaded(kind, dtype, weights)


def options(d, kind, cls):
    """Options of a tuning of a model of this kind."""
    more = d.some(0.4, rank=lambda: d.choose(1, 2), rng=lambda: 5)
    more |= d.some(0.5, alpha=lambda: d.choose(1.0, 4.0)) if "rank" in more else {}
    more |= d.some(0.4, targets=lambda: PATTERNS[kind]) if kind in PATTERNS else {}
    if cls is train.ContrastiveTuning:
        more |= d.some(
            0.25, temperature=lambda: 0.5, symmetric=lambda: True, chunk_size=lambda: d.choose(1, 2, 3),
            checkpoint=lambda: True
        )  # fmt: skip
    return more


def drawn(d):
    """A tuning's class, its arguments, and the model's kind."""
    cls = d.choose(train.ContrastiveTuning, train.ClassifierTuning, train.NextTokenTuning)
    kind, it = model_of(d, DECODERS if cls is train.NextTokenTuning else ENCODERS)
    labels = {"num_labels": d.choose(2, 3)} if cls is train.ClassifierTuning else {}
    return cls, {"model": it, **labels, **options(d, kind, cls)}


def batch_of(d, cls, arguments):
    """Draw a batch for the loss of this tuning."""
    texts = lambda n: [d.choose(*TEXTS) for _ in range(n)]  # noqa: E731
    n = d.choose(1, 2, 4)
    if cls is train.ContrastiveTuning:
        return (texts(n), texts(n), *([texts(d.choose(1, 3))] if d.chance(0.3) else []))
    if cls is train.ClassifierTuning:
        return texts(n), d.rng.integers(0, arguments["num_labels"], n)
    return d.choose(texts(n), [d.rng.integers(3, 60, d.choose(1, 2, 5)).tolist() for _ in range(n)])


@recipe
def tuning_made(d):
    cls, arguments = drawn(d)

    @wraps(cls)
    def made(*values, **options):
        return cls(*values, **options).state_dict()

    names = (cls.__name__, "Tuning", "generator")
    return Call(made, arguments, None, names, np.inf, same_bits=lambda a: type(a.get("rng", 0)) is int)


@recipe
def tuning_loss(d):
    """The loss of a batch and its gradients, perhaps after a step."""
    cls, arguments = drawn(d)
    tuning, kept = cls(**arguments), []
    batch = batch_of(d, cls, arguments)
    state = tuning.state_dict()
    rank = arguments.get("rank")
    if d.chance(0.5) or rank:  # adapters begin with a gradient of 0
        moved = {name: 0.1 * d.rng.standard_normal(x.shape).astype(x.dtype) for name, x in state.items()}
        train.SGD(tuning, 1.0).step(moved)
    lane = lane_dtype(tuning.model.dtype)

    def function(batch):
        loss, gradients = tuning.loss(batch)
        kept[:] = [gradients]
        return np.asarray(loss, lane), gradients

    function.__name__ = "loss"

    def check(found):
        held = tuning.state_dict()
        got, (gradients,) = [(x.shape, x.dtype) for x in found], kept
        expected = [((), lane), *((held[name].shape, held[name].dtype) for name in gradients)]
        if gradients.keys() != held.keys() or got != expected or not all(np.isfinite(x).all() for x in found):
            return f"returned {got}; expected finite gradients of {list(held)}"
        if tuning.model.dtype != np.float64:
            return None

        def value(at):
            tuning.load_state_dict(at)
            return tuning.loss(batch)[0]

        try:
            return wrong_slope(value, held, gradients, d.rng)
        finally:
            tuning.load_state_dict(held)

    names = (f"{cls.__name__}.loss", cls.__name__)
    narrow = tuning.model.dtype == "bfloat16" or tuning.model.weights_dtype == "bfloat16"
    return Call(function, {"batch": batch}, None, names, np.inf if narrow else 100.0, check=check)


RECIPES += [tuning_loss] * 3


@recipe
def tuning_steps(d):
    """Some steps of an optimizer, and a model that stays as it was when it was asked for."""
    cls, arguments = drawn(d)
    tuning = cls(**arguments)
    optimizer = d.choose(train.AdamW, train.SGD)(tuning, 1e-3)
    batch, ids = batch_of(d, cls, arguments), [[5, 6, 7]]
    grads = tuning.loss(batch)[1]
    before = tuning.model

    def function(grads, *, factor=1.0, max_norm=None, scale=1.0):
        expected = before(ids)
        optimizer.step(grads, factor=factor, max_norm=max_norm, scale=scale)
        return expected, before(ids), tuning.model(ids), tuning.state_dict()

    def check(found):
        if found[0].tobytes() != found[1].tobytes():
            return "a model that was handed out has changed"
        held = tuning.model.state_dict()
        own = {name: x for name, x in tuning.state_dict().items() if name in held}
        wrong = [name for name, x in own.items() if not np.array_equal(x, held[name])]
        return f"the model has another {wrong[0]} than the tuning" if wrong else None

    names = (f"{type(optimizer).__name__}.step", cls.__name__)
    how = d.some(0.3, factor=lambda: 0.5, max_norm=lambda: 1.0)
    narrow = tuning.model.dtype == "bfloat16" or tuning.model.weights_dtype == "bfloat16"
    far = np.inf if narrow else 100.0
    return Call(untouched(function, optimizer), {"grads": grads, **how}, None, names, far, check=check)


@recipe
def tuning_loaded(d):
    """Load the state of one tuning into another."""
    cls, arguments = drawn(d)
    first, second = cls(**arguments), cls(**arguments)
    state = {
        name: x + np.asarray(0.1 * d.rng.standard_normal(x.shape), x.dtype)
        for name, x in first.state_dict().items()
    }

    def function(state_dict, *, prefix=""):
        second.load_state_dict(state_dict, prefix=prefix)
        return second.state_dict()

    def check(found):
        same = all(np.array_equal(x, y) for x, y in zip(found, arrays_in(state), strict=True))
        return None if same else "what was loaded is not there"

    names = (f"{cls.__name__}.load_state_dict", cls.__name__)
    call = Call(untouched(function, second), {"state_dict": state}, None, names, check=check)
    return call


@recipe
def predictions(d):
    """Probabilities of labels, which add up to 1."""
    _, it = model_of(d, ENCODERS)
    tuning = train.ClassifierTuning(it, 3, rng=2)
    texts = [d.choose(*TEXTS) for _ in range(d.size(1, 4) % 9 + 1)]

    def predict(texts):
        return tuning.predict(texts)

    def check(found):
        like = Like((len(texts), 3), lane_dtype(it.dtype))
        if (found[0].shape, found[0].dtype) != (like.shape, like.dtype):
            return f"returned {found[0].dtype}{found[0].shape}"
        return None if np.allclose(found[0].sum(axis=-1), 1, atol=1e-5) else "they do not add up to 1"

    narrow = it.dtype == "bfloat16" or it.weights_dtype == "bfloat16"
    far = np.inf if narrow else 30.0
    return Call(predict, {"texts": texts}, None, ("ClassifierTuning.predict",), far, check=check)
