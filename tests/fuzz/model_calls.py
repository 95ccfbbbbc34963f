"""Recipes for tiny models: calls, answers, and models of random sizes."""

from functools import cache, wraps
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tiny_models
from judge import Like
from recipes import RECIPES, Call, recipe
from tiny_tokenizers import write_tokenizer

from fastattn import models


@cache
def home():
    """Folder of this process's models, which read their tensors again for gradients."""
    return TemporaryDirectory(prefix="fuzz-models-")


@cache
def loaded(kind, dtype, weights_dtype, activations=None):
    folder = Path(home().name, kind)
    if not folder.exists():
        tiny_models.write(folder, kind)
        write_tokenizer(folder)
    return models.load(folder, dtype=dtype, weights_dtype=weights_dtype, activations=activations)


def model_of(d, kinds):
    dtype = d.choose("float32", "float32", "float64", "bfloat16")
    stored = None if dtype == "float64" else d.choose(None, "bfloat16", "int8", "int4", "uint4", "nf4")
    activations = d.choose(None, "int8") if stored in ("int8", "int4", "uint4", "nf4") else None
    return loaded(d.choose(*kinds), dtype, stored, activations)


def tokens(d, name="ids"):
    """Ids, the argument `name`, and which of them count."""
    shape = (*d.choose((), (1,), (3,)), d.size(0, 9))
    mask = lambda: d.choose(d.rng.random(shape) < 0.7, (d.rng.random(shape) < 0.7).astype(int))  # noqa: E731
    return {name: d.integers(0, tiny_models.VOCAB, *shape), **d.some(0.4, attention_mask=mask)}


@recipe
def model(d):
    it = model_of(d, tiny_models.CONFIGS)
    name = "input_ids" if isinstance(it, models.Encoder) else "ids"
    arguments = tokens(d, name)
    if isinstance(it, models.Encoder):
        arguments |= d.some(0.2, token_type_ids=lambda: np.zeros_like(arguments[name]))
    features = it.hidden_size if isinstance(it, models.Encoder) else it.vocab_size

    def result(a):  # what stands where a token does not count has no meaning
        return [Like((*np.atleast_2d(a[name]).shape, features), it.dtype, a.get("attention_mask") is None)]

    tolerance = 100.0 if it.activations else 30.0  # near ties of int8 may go either way
    narrow = it.weights_dtype != it.dtype or it.dtype not in ("float32", "float64")
    chooses = narrow and any("expert" in each for each in it.state_dict())  # as the CPU rounds to 16 bits
    compare = "attention_mask" not in arguments and not chooses
    return Call(it, arguments, result, (it.model_type,), tolerance if compare else np.inf)


RECIPES += [model] * 2


@recipe
def generate(d):
    it = model_of(d, tiny_models.DECODERS)
    drawn = d.some(0.5, top_k=d.size, top_p=lambda: 0.8, rng=lambda: 3)
    more = {"temperature": 0.7, **drawn} if drawn else {}
    more |= d.some(0.3, stop=lambda: d.choose(3, [3, 4], ()))
    prompts = d.choose(tokens(d)["ids"], [[1, 2, 3], [4]], [1, 2])

    @wraps(it.generate)
    def some(*arguments, **options):
        return list(islice(it.generate(*arguments, **options), 3))

    arguments = {"ids": prompts, "max_new_tokens": d.size(0, 6), **more}

    def same_bits(a):  # without a seed, each run draws other tokens
        return "temperature" not in a or type(a.get("rng")) is int

    return Call(some, arguments, names=("generate",), tolerance=np.inf, same_bits=same_bits)


def sizes(d, kind):
    """Changes to the config of `kind`: numbers of heads, layers and features."""
    heads, head_dim, layers, inner = d.choose(1, 2, 4), d.choose(2, 4, 6, 8), d.choose(1, 2, 3), d.size(1, 20)
    groups = d.choose(*(n for n in (1, 2, 4) if heads % n == 0))
    hidden = heads * head_dim
    if kind in ("gpt2", "nomic-experts"):
        return {"n_embd": hidden, "n_head": heads, "n_layer": layers}
    if kind == "distilbert":
        return {"dim": hidden, "n_heads": heads, "n_layers": layers, "hidden_dim": inner}
    if kind in ("t5", "mt5"):
        t5 = {"d_model": d.size(1, 20), "d_kv": head_dim, "d_ff": inner}
        return {**t5, "num_layers": layers, "num_heads": heads}
    changes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": inner}
    config = tiny_models.CONFIGS[kind]
    if "position_embedding_type" in config:  # whose slopes are those of three heads
        changes = {"intermediate_size": inner}
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
    dtype, bound = d.choose(("float32", 1e-3), ("float64", 1e-8))
    ids = d.rng.integers(3, tiny_models.VOCAB, d.size(1, 9) % 20 + 1)

    def function(ids, dtype):
        with TemporaryDirectory() as folder:
            tiny_models.write(Path(folder), kind, weights, **config)
            return models.load(folder, dtype=dtype)(ids)

    def check(found):
        expected = tiny_models.result(kind, config, weights, ids)
        far = abs(found[0][0] - expected).max() / (1 + abs(expected).max())
        return None if far <= bound else f"it is off by {far}: {kind}, {config}"

    names = (kind, config.get("model_type", kind), "load")
    return Call(function, {"ids": ids, "dtype": dtype}, None, names, 30.0, (kind, config), check=check)


RECIPES += [model_built] * 3
