"""Recipes for training: optimizers by their definitions, norms, schedules, batches, runs that go on."""

import inspect
import math
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import layers as layer_recipes
import numpy as np
import optimizers as definitions
from judge import arrays_in
from recipes import RECIPES, Call, recipe

from fastattn import layers, train

REFUSED = (TypeError, ValueError, FloatingPointError)


def lane(d):
    return np.dtype("float64" if d.dtype == np.float64 else "float32")


def untouched(function, *objects):
    """`function`, which must leave the state of optimizers as it was where it refuses its arguments."""

    def checked(*values, **options):
        before = [x.copy() for each in objects for x in arrays_in(each.state_dict())]
        try:
            return function(*values, **options)
        except REFUSED as error:
            after = [x for each in objects for x in arrays_in(each.state_dict())]
            if any(x.tobytes() != y.tobytes() for x, y in zip(before, after, strict=True)):
                raise AssertionError("a refused call has changed the state") from error
            raise

    checked.__signature__ = inspect.signature(function)
    return checked


def arrays_of(d):
    """Parameters of an optimizer."""
    shapes = [
        d.choose((), (d.size(0, 9),), (d.size(0, 9), d.size()), (2, 3, d.size()))
        for _ in range(d.size(1, 4) % 7)
    ]
    return {f"p{i}": d.rng.standard_normal(shape).astype(lane(d)) for i, shape in enumerate(shapes or [(3,)])}


def gradients_of(d, parameters):
    return {
        name: d.laid_out(d.rng.standard_normal(x.shape).astype(x.dtype)) for name, x in parameters.items()
    }


def optimizer_options(d):
    """A class, and its options."""
    options = d.some(0.5, lr=lambda: d.choose(0.0, 1e-3, 0.1), weight_decay=lambda: d.choose(0.0, 0.1))
    options |= d.some(0.3, decay_vectors=lambda: True)
    if d.chance(0.5):
        return train.AdamW, {**options, **d.some(0.3, betas=lambda: (0.5, 0.6), eps=lambda: 1e-3)}
    options |= d.some(0.6, momentum=lambda: 0.9)
    return train.SGD, {**options, **({"nesterov": True} if "momentum" in options and d.chance(0.5) else {})}


def grouped(d, parameters):
    """Options that name parameters."""
    name = d.choose(*parameters)
    more = d.some(
        0.25, groups=lambda: [{"params": name, **d.some(0.7, lr=lambda: 0.05, weight_decay=lambda: 0.2)}]
    )
    return more | (d.some(0.25, frozen=lambda: [name]) if len(parameters) > 1 else {})


class Definition:
    """An optimizer of each parameter by its definition, in float64."""

    def __init__(self, cls, options, parameters):
        defaults = {"lr": 1e-3, "weight_decay": 0.01 if cls is train.AdamW else 0.0}
        named = {name: x for name, x in options.items() if name in ("betas", "eps", "momentum", "nesterov")}
        frozen = options.get("frozen", [])
        self.values = {name: np.array(x, np.float64) for name, x in parameters.items()}
        self.each, self.rates = {}, {}
        for name, x in parameters.items():
            own = next((g for g in options.get("groups", ()) if g["params"] == name), {})
            rates = {rate: own.get(rate, options.get(rate, value)) for rate, value in defaults.items()}
            if x.ndim < 2 and not options.get("decay_vectors") and "weight_decay" not in own:
                rates["weight_decay"] = 0.0
            if name not in frozen:
                self.each[name] = getattr(definitions, cls.__name__)(**rates, **named)
                self.rates[name] = rates["lr"]

    def step(self, grads, factor=1.0, max_norm=None, scale=1.0):
        grads = {name: scale * np.asarray(grads[name], np.float64) for name in self.each}
        norm = math.sqrt(sum(np.square(x).sum() for x in grads.values()))
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for name, each in self.each.items():
            each.lr = factor * self.rates[name]
            self.values[name] = np.asarray(each.step(self.values[name], clip * grads[name]))
        return norm


def off(got, expected, bound):
    """Name the first of `got`, arrays in the order of `expected`, that is off by more than `bound`."""
    for x, (name, y) in zip(got, expected.items(), strict=True):
        far = (abs(x - y) / (1 + abs(y))).max(initial=0)
        if not far <= bound:
            return f"{name} is off by {far}"
    return None


@recipe
def step(d):
    """A step of an optimizer that has done some."""
    parameters = arrays_of(d)
    cls, options = optimizer_options(d)
    options |= grouped(d, parameters)
    expected, optimizer = Definition(cls, options, parameters), cls(parameters, **options)
    for _ in range(d.choose(0, 1, 3)):
        grads = gradients_of(d, parameters)
        optimizer.step(grads)
        expected.step(grads)
    how = d.some(
        0.3, factor=lambda: d.choose(0.0, 0.5), max_norm=lambda: d.choose(0.1, 100.0), scale=lambda: -0.5
    )
    grads = gradients_of(d, parameters)
    bound = 1e-9 if lane(d) == np.float64 else 1e-4

    def function(grads, *, factor=1.0, max_norm=None, scale=1.0, nonfinite="raise"):
        options = {"factor": factor, "max_norm": max_norm, "scale": scale, "nonfinite": nonfinite}
        norm = optimizer.step(grads, **options)
        return np.asarray(norm, lane(d)), {name: x.copy() for name, x in optimizer.parameters.items()}

    def check(found):
        norm = expected.step(grads, **how)
        return off(found, {"the norm": norm, **expected.values}, bound)

    more = d.some(0.2, nonfinite=lambda: "skip")
    names = (f"{cls.__name__}.step", cls.__name__)
    return Call(untouched(function, optimizer), {"grads": grads, **how, **more}, None, names, check=check)


RECIPES += [step] * 3


@recipe
def step_of_layer(d):
    """A step of an optimizer of a layer, which has the new weights afterwards, as it stores them."""
    it = layer_recipes.make(d)
    cls, options = optimizer_options(d)
    state = it.state_dict()
    narrow = any(part.weights_dtype in ("int8", "int4", "uint4", "nf4") for _, part in it._walk())
    if narrow and not any(x.ndim < 2 for x in state.values()):
        it, narrow = layers.LayerNorm(3), False
        state = it.state_dict()
    optimizer = cls(it, **options)
    grads = gradients_of(d, state)
    for _ in range(d.choose(0, 1)):
        optimizer.step(gradients_of(d, state))

    def function(grads, *, factor=1.0, max_norm=None, scale=1.0, nonfinite="raise"):
        optimizer.step(grads, factor=factor, max_norm=max_norm, scale=scale, nonfinite=nonfinite)
        return it.state_dict(), optimizer.parameters

    def check(found):
        ours, kept = found[: len(state)], found[len(state) :]
        coarse = {"bfloat16": 0.01, "float32": 0, "float64": 0}.get(it.weights_dtype, np.inf)
        far = max(
            ((abs(x - y) / (1 + abs(y))).max(initial=0) for x, y in zip(ours, kept, strict=True)), default=0
        )
        return None if far <= coarse else f"the layer's weights differ from the optimizer's by {far}"

    names = (f"{cls.__name__}.step", cls.__name__, *layer_recipes.NAMES)
    how = d.some(0.3, factor=lambda: 0.5, max_norm=lambda: 1.0)
    far = np.inf if narrow else 1.0
    return Call(untouched(function, optimizer), {"grads": grads, **how}, None, names, far, check=check)


@recipe
def optimizer_made(d):
    parameters = d.choose(
        arrays_of(d), layer_recipes.make(d), {"layer": layer_recipes.make(d), **arrays_of(d)}
    )
    cls, options = optimizer_options(d)
    if type(parameters) is dict and "layer" not in parameters:
        options |= grouped(d, parameters)
    return Call(cls, {"parameters": parameters, **options}, names=(cls.__name__,))


@recipe
def optimizer_loaded(d):
    """The state of an optimizer goes into another."""
    parameters = arrays_of(d)
    cls, options = optimizer_options(d)
    first = cls({name: x.copy() for name, x in parameters.items()}, **options)
    second = cls(parameters, **options)
    for _ in range(d.choose(1, 2)):
        first.step(gradients_of(d, parameters))
    state = {name: np.copy(x) if isinstance(x, np.ndarray) else x for name, x in first.state_dict().items()}

    def function(state_dict):
        second.load_state_dict(state_dict)
        return second.state_dict()

    def check(found):
        expected = {name: x for name, x in state.items() if name != "steps"}
        return off(found, expected, 0.0)

    names = (f"{cls.__name__}.load_state_dict", cls.__name__)
    return Call(untouched(function, second), {"state_dict": state}, None, names, check=check)


@recipe
def schedule(d):
    warmup = d.choose(0, 0, d.size())
    kind = d.choose("constant", "cosine", "linear")
    last = {"num_steps": warmup + d.size()} if kind != "constant" else {}
    arguments = {"kind": kind, **last, **d.some(0.5, final=lambda: d.choose(0.0, 0.1, 1.0))}
    arguments |= {"warmup": warmup} if warmup else {}

    def factors(kind, num_steps=None, warmup=0, final=0.0):
        made = train.Schedule(kind, num_steps, warmup, final)
        return np.array([made(i) for i in range(40)])

    def check(found):
        final, n = arguments.get("final", 0.0), last.get("num_steps", math.inf)
        for i, factor in enumerate(found[0]):
            done = min(1.0, (i - warmup) / (n - warmup))
            left = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[kind]
            expected = (
                (i + 1) / warmup if i < warmup else 1.0 if kind == "constant" else final + (1 - final) * left
            )
            if not math.isclose(factor, expected, rel_tol=1e-12, abs_tol=1e-12):
                return f"step {i} has {factor}; expected {expected}"
        return None

    return Call(factors, arguments, names=("Schedule",), check=check)


def seeded(arguments):
    return type(arguments.get("rng")) is int


@recipe
def batches(d):
    """An epoch of batches, and the rest of it from a place that was saved."""
    n = d.size(1, 12)
    x = np.asarray(d.floats(n, 2, dtype=d.choose(np.float32, np.int64)))
    arrays, size = d.choose((x,), (x, d.rng.integers(0, 9, n))), int(d.rng.integers(1, n + 1))
    more = d.some(0.3, shuffle=lambda: False)
    cut = int(d.rng.integers(0, n // size + 1))

    def epoch(arrays, batch_size, rng, shuffle=True):
        several = arrays if isinstance(arrays, tuple) else (arrays,)
        first, second = (
            train.Batches(*several, batch_size=batch_size, shuffle=shuffle, rng=rng) for _ in range(2)
        )
        count, loop = len(first), iter(first)
        begun = list(islice(loop, min(cut, count)))
        place = first.state_dict()
        rest = list(islice(loop, count - len(begun)))
        second.load_state_dict(place)
        return begun, rest, list(islice(second, len(rest)))

    def check(found):
        found = found[:: len(arrays)]
        count = n // size
        seen, rest = np.concatenate([np.zeros((0, 2), x.dtype), *found[:count]]), found[cut:count]
        again = found[count:]
        if any(a.tobytes() != b.tobytes() for a, b in zip(rest, again, strict=True)):
            return "a saved place goes on with other batches"
        rows = sorted(map(tuple, np.asarray(x).tolist()))
        got = sorted(map(tuple, seen.tolist()))
        whole = got == rows if count * size == n else all(row in rows for row in got)
        return None if whole else "an epoch has other rows than the arrays"

    arguments = {"arrays": arrays, "batch_size": size, "rng": 7, **more}
    names = ("Batches", "Batches.load_state_dict")
    return Call(epoch, arguments, None, names, np.inf, same_bits=seeded, check=check)


@recipe
def trainer(d):
    """A run that is saved and goes on has the bits of one that went through."""
    width, labels, n = d.size(1, 6), d.choose(2, 3), d.size(4, 12)
    x, y = d.rng.standard_normal((n, width)).astype(lane(d)), d.rng.integers(0, labels, n)
    size, kind = d.choose(1, 2, 4), d.choose("batches", "list")
    cls, options = optimizer_options(d)
    several = d.chance(0.3)
    weights = d.rng.standard_normal((labels, width)).astype(lane(d))

    def built(*, accumulate=1, max_norm=None, nonfinite="raise", schedule=None, rng=None, tokens=None):
        held = layers.Linear(width, labels, rng=0, weights_dtype=lane(d).name) if several else None
        parameters = {"map": held, "scale": np.ones(labels, lane(d))} if several else {"w": weights.copy()}
        optimizer = cls(parameters, **options)

        def loss(batch):
            rows, targets = batch
            matrix = optimizer.parameters["map.weight" if several else "w"]
            logits = rows.astype(np.float64) @ matrix.T
            logits = logits - logits.max(axis=-1, keepdims=True)
            probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
            value = -np.log(probs[np.arange(len(targets)), targets]).mean()
            probs[np.arange(len(targets)), targets] -= 1
            grads = {name: np.zeros_like(p) for name, p in optimizer.parameters.items()}
            grads["map.weight" if several else "w"] = (probs.T @ rows / len(targets)).astype(matrix.dtype)
            return value, grads

        whole = train.Batches(x, y, batch_size=size, rng=3)
        source = (
            whole if kind == "batches" else [(x[i : i + size], y[i : i + size]) for i in range(0, n, size)]
        )
        how = {"accumulate": accumulate, "max_norm": max_norm, "nonfinite": nonfinite, "schedule": schedule}
        return train.Trainer(loss, optimizer, source, rng=rng, tokens=tokens, **how), optimizer

    cut = d.choose(0, 1, 3)

    def run(num_steps, *, log_every=None, callback=None, **how):
        through, optimizer = built(**how)
        shown = {"log_every": log_every, "callback": callback}
        with redirect_stdout(StringIO()):
            steps = through.fit(num_steps, **shown)
        first, _ = built(**how)
        first.fit(min(cut, num_steps))
        second, resumed = built(**how)
        with TemporaryDirectory() as folder:
            path = Path(folder, "run.safetensors")
            first.save(path)
            second.load(path)
        second.fit(num_steps)
        losses = np.array([step.loss for step in steps], np.float64)
        return losses.astype(lane(d)), optimizer.parameters, resumed.parameters

    own = inspect.signature(built).parameters.values()
    steps_of = [p for p in inspect.signature(run).parameters.values() if p.kind != p.VAR_KEYWORD]
    run.__signature__ = inspect.Signature([*steps_of, *own])

    def check(found):
        _, *arrays = found
        half = len(arrays) // 2
        pairs = zip(arrays[:half], arrays[half:], strict=True)
        return None if all(a.tobytes() == b.tobytes() for a, b in pairs) else "the run that went on differs"

    more = d.some(
        0.3, accumulate=lambda: d.choose(1, 2, 3), max_norm=lambda: 0.5, nonfinite=lambda: "skip",
        schedule=lambda: train.Schedule("cosine", 9, 2), log_every=lambda: 2
    )  # fmt: skip
    names = ("Trainer", "Trainer.fit", "Trainer.load", "Trainer.save", f"{cls.__name__}.step")
    return Call(run, {"num_steps": d.choose(3, 5, 8), **more}, None, names, 10.0, check=check)


RECIPES += [trainer] * 2
