"""Recipes for gradients of tiny models, for models with other tensors, and for models of random sizes."""

import inspect
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tiny_models
from judge import Like
from layer_gradients import pulled
from model_calls import model_of, tokens
from recipes import RECIPES, Call, recipe, right
from slopes import wrong_slope

from fastattn import grad, models
from fastattn._args.types import lane_dtype


def training(d):
    more = d.some(0.25, checkpoint=lambda: True)
    return more | ({"dropout": 0.3, "seed": int(d.rng.integers(2**40))} if d.chance(0.2) else {})


def gradients_check(d, it, first, value):
    """A check of results that are like `first`, and then gradients; in float64 they are slopes of `value`.

    Not each tensor has one: the pooler of BERT has none, and types of tokens only where they are read.
    """
    state, lane = it.state_dict(), lane_dtype(it.dtype)

    def check(found):
        got = found.pop()
        for name, x in got.items():
            if x.shape != state[name].shape or x.dtype != lane or not np.isfinite(x).all():
                return f"the gradient of {name} is {x.dtype}{x.shape}, finite: {np.isfinite(x).all()}"
        if fault := right(first)(found):
            return fault
        if it.dtype != np.float64 or not got:
            return None
        moved = {name: state[name] for name in got}
        return wrong_slope(lambda at: value(it.with_state_dict({**state, **at})), moved, got, d.rng)

    return check


@recipe
def model_gradients(d):
    """Hidden states of a model and the gradients of its tensors."""
    it = model_of(d, tiny_models.CONFIGS)
    name = "input_ids" if isinstance(it, models.Encoder) else "ids"
    arguments = {**tokens(d, name), **training(d)}
    if isinstance(it, models.Encoder):
        arguments |= d.some(0.2, token_type_ids=lambda: np.zeros_like(arguments[name]))
    elif d.chance(0.5):
        arguments["logits"] = False
    states = isinstance(it, models.Encoder) or "logits" in arguments
    shape = (*np.atleast_2d(arguments[name]).shape, it.hidden_size if states else it.vocab_size)
    dout = d.floats(*shape, dtype=it.dtype)
    mask = arguments.get("attention_mask")
    counted = np.ones(shape[:2], bool) if mask is None else np.atleast_2d(mask).astype(bool)

    def value(model):
        return float((grad.vjp(model, **arguments)[0] * dout)[counted].sum())

    kept = []
    both = pulled(it)

    def function(*values, **options):
        out, gradients = both(*values, **options)
        kept[:] = [gradients]
        return out, gradients

    function.__signature__ = both.__signature__
    smooth = it.model_type != "t5"  # which has relu
    whole = gradients_check(d, it, [Like(shape, it.dtype)], value)

    def check(found):
        return whole([found[0], kept[0] if smooth else {}])

    names = (it.model_type, f"pullback of {it.model_type}")
    compare = mask is None and it.dtype != "bfloat16" and it.weights_dtype in ("float32", "float64")
    tolerance = 30.0 if compare else np.inf
    return Call(function, {**arguments, "dout": dout}, None, names, tolerance, check=check)


RECIPES += [model_gradients] * 4


@recipe
def loss_and_gradients(d):
    """The loss of a decoder's next tokens and its gradients."""
    it = model_of(d, tiny_models.TRAINED_DECODERS)
    forward = tokens(d)
    shape = np.shape(forward["ids"])
    forward |= d.some(
        0.3, targets=lambda: d.rng.integers(0, it.vocab_size, shape), label_smoothing=lambda: 0.1,
        ignore_index=lambda: d.choose(0, -100)
    )  # fmt: skip
    arguments, kept = {**forward, **training(d)}, []

    def function(*values, **options):
        loss, gradients = it.loss_and_gradients(*values, **options)
        kept[:] = [gradients]
        return np.asarray(loss, lane_dtype(it.dtype)), gradients

    function.__signature__ = inspect.signature(it.loss_and_gradients)
    first = [Like((), lane_dtype(it.dtype))]
    whole = gradients_check(d, it, first, lambda model: model.loss_and_gradients(**arguments)[0])
    names = ("loss_and_gradients", it.model_type)
    compare = it.dtype != "bfloat16" and it.weights_dtype in ("float32", "float64")
    tolerance = 30.0 if compare else np.inf
    check = lambda found: whole([found[0], kept[0]])  # noqa: E731
    return Call(function, arguments, None, names, tolerance, check=check)


RECIPES += [loss_and_gradients] * 2


@recipe
def with_state_dict(d):
    """A model with other tensors, perhaps of wrong ones, and a call of it."""
    it = model_of(d, tiny_models.CONFIGS)
    state, ids = it.state_dict(), [5, 6, 7]
    if moved := d.chance(0.3):
        state = {name: np.asarray(0.5 * x, x.dtype) for name, x in state.items()}

    def function(state_dict):
        return it.with_state_dict(state_dict)(ids)

    def check(found):
        if moved or it.weights_dtype not in ("float32", "float64"):
            return None
        # The tables that DeBERTa computes when it is loaded have the bits of the instruction set of then.
        far = abs(found[0].astype(np.float64) - it(ids).astype(np.float64)).max()
        return f"its own tensors make a model that is off by {far}" if far > 1e-4 else None

    tolerance = 30.0 if it.dtype != "bfloat16" and it.weights_dtype in ("float32", "float64") else np.inf
    return Call(function, {"state_dict": state}, None, ("with_state_dict",), tolerance, check=check)


def sizes(d, kind):
    """Changes to the config of `kind`: numbers of heads, layers and features."""
    heads, head_dim, layers, inner = d.choose(1, 2, 4), d.choose(2, 4, 6, 8), d.choose(1, 2, 3), d.size(1, 20)
    groups = d.choose(*(n for n in (1, 2, 4) if heads % n == 0))
    hidden = heads * head_dim
    if kind == "gpt2":
        return {"n_embd": hidden, "n_head": heads, "n_layer": layers}
    if kind == "distilbert":
        return {"dim": hidden, "n_heads": heads, "n_layers": layers, "hidden_dim": inner}
    if kind in ("t5", "mt5"):
        return {
            "d_model": d.size(1, 20),
            "d_kv": head_dim,
            "d_ff": inner,
            "num_layers": layers,
            "num_heads": heads,
        }
    changes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": inner}
    config = tiny_models.CONFIGS[kind]
    if "layer_types" not in config:  # a list of as many
        changes["num_hidden_layers"] = layers
    if "num_key_value_heads" in config:
        changes["num_key_value_heads"] = heads // groups
    if "head_dim" in config:
        dims = (8, 16) if "partial_rotary_factor" in str(config) else (2, 4, 8)  # at least a pair is rotated
        changes |= {"head_dim": d.choose(*dims), "hidden_size": d.size(1, 20)}
    if "mamba_n_heads" in config:  # whose features are a multiple of these
        del changes["hidden_size"]
    if "sliding_window" in config:
        changes["sliding_window"] = d.size(1, 6)
    if "rope_theta" in config:
        changes["rope_theta"] = d.choose(50.0, 10000.0)
    return changes


@recipe
def model_built(d):
    """A model of random sizes against plain NumPy in float64."""
    kind, seed = d.choose(*tiny_models.CONFIGS), int(d.rng.integers(1000))
    config = {**tiny_models.CONFIGS[kind], **sizes(d, kind)}
    weights = tiny_models.tensors(kind, config, seed)
    dtype = d.choose("float32", "float64")
    ids = d.rng.integers(3, tiny_models.VOCAB, d.size(1, 9) % 20 + 1)

    def function(ids, dtype):
        with TemporaryDirectory() as folder:
            tiny_models.write(Path(folder), kind, weights, **config)
            return models.load(folder, dtype=dtype)(ids)

    def check(found):
        expected = tiny_models.result(kind, config, weights, ids)
        far = abs(found[0][0] - expected).max() / (1 + abs(expected).max())
        return (
            None if far <= (1e-3 if dtype == "float32" else 1e-8) else f"it is off by {far}: {kind}, {config}"
        )

    names = (kind, config.get("model_type", kind), "load")
    return Call(function, {"ids": ids, "dtype": dtype}, None, names, 30.0, (kind, config), check=check)


RECIPES += [model_built] * 3
