"""Recipes for calls of tiny models."""

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
    choices = [(None, None)]
    if dtype != "float64":
        choices += [
            ("bfloat16", None),
            ("int8", None),
            ("int8", "int8"),
            ("int4", "int8"),
            ("uint4", "int8"),
            ("nf4", None),
        ]
    return loaded(d.choose(*kinds), dtype, *choices[d.rng.integers(len(choices))])


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

    compare = "attention_mask" not in arguments
    return Call(it, arguments, result, (it.model_type,), 30.0 if compare else np.inf)


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


@recipe
def encode(d):
    it = model_of(d, tiny_models.ENCODERS)
    texts = [d.choose("the cat sat", "", "a dog", "nothing of it") for _ in range(d.size(0, 5))]
    more = d.some(
        0.3,
        batch_size=lambda: d.size(),
        prompt=lambda: d.choose("", "the "),
        normalize_embeddings=lambda: True,
        truncate_dim=lambda: d.size(),
    )
    call = d.choose(it.encode, it.encode_query, it.encode_document)
    return Call(call, {"sentences": d.choose(texts, "a dog"), **more}, tolerance=30.0)


@recipe
def vectors(d):
    it, a = loaded("bert", "float32", None), d.rng.standard_normal((d.size(1, 5), 8)).astype(np.float32)
    if d.chance(0.5):
        precision = d.choose("float32", "binary", "ubinary")
        return Call(models.quantize_embeddings, {"embeddings": a, "precision": precision}, tolerance=np.inf)
    call = d.choose(it.similarity, it.similarity_pairwise)
    return Call(call, {"embeddings1": a, "embeddings2": a[::-1].copy()}, tolerance=30.0)


@recipe
def text(d):
    it = model_of(d, tiny_models.DECODERS).text
    if d.chance(0.4):
        return Call(it.encode, {"texts": ["the cat", "a dog"]})
    if d.chance(0.5):
        return Call(it.decode, {"sequences": [[1, 5, 6], [4, -1]]})

    def pieces(prompt, ids):
        return "".join(it.stream(prompt, ids))

    return Call(pieces, {"prompt": [1, 4], "ids": [5, 6, -1]}, names=("stream",))
