"""Recipes for tiny models with something after their encoder, and for those of texts and images."""

import json
from functools import cache, wraps
from pathlib import Path

import numpy as np
import tiny_models
import tiny_towers
from judge import Like
from model_calls import home, tokens
from recipes import RECIPES, Call, recipe, right
from safetensors.numpy import save_file
from tiny_tokenizers import WORDS, write_tokenizer

from fastattn import models

WIDTH, LABELS = 24, 3
# Each head's tensors beside those of BERT, and its architecture.
HEADS = {
    "pairs": (
        {"bert.pooler.dense": (WIDTH, WIDTH), "classifier": (LABELS, WIDTH)},
        "BertForSequenceClassification",
    ),
    "score": (
        {"bert.pooler.dense": (WIDTH, WIDTH), "classifier": (1, WIDTH)},
        "BertForSequenceClassification",
    ),
    "sparse": ({"cls.predictions.transform.dense": (WIDTH, WIDTH)}, "BertForMaskedLM"),
    "vectors": ({}, "BertModel"),
}
VECTORS = {
    "Dense": {
        "in_features": WIDTH,
        "out_features": 6,
        "bias": False,
        "activation_function": "torch.nn.Identity",
    },
    "MultiVectorMask": {"skiplist_words": ["the", "no"], "skiplist_tasks": ["document"]},
    "Normalize": {},
}
SPARSE = {"SpladePooling": {"pooling_strategy": "max", "activation_function": "relu"}}


def write_head(folder, kind):
    """A tiny BERT of WORDS with this head."""
    rng, (maps, architecture) = np.random.default_rng(5), HEADS[kind]
    changes = {"vocab_size": len(WORDS), "architectures": [architecture]}
    if kind in ("pairs", "score", "tokens"):
        changes["id2label"] = {str(i): f"kind {i}" for i in range(LABELS if kind != "score" else 1)}
    config = {**tiny_models.CONFIGS["bert"], **changes}
    prefix = "" if kind == "vectors" else "bert."
    weights = {f"{prefix}{name}": x for name, x in tiny_models.tensors("bert", config).items()}
    shapes = {f"{name}.weight": shape for name, shape in maps.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in maps.items()}
    if kind == "sparse":
        norm = "cls.predictions.transform.LayerNorm"
        shapes |= {
            f"{norm}.weight": (WIDTH,),
            f"{norm}.bias": (WIDTH,),
            "cls.predictions.bias": (len(WORDS),),
        }
    weights |= {name: 0.3 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tiny_models.write(folder, "bert", weights, **changes)
    write_tokenizer(folder)
    modules = {"sparse": SPARSE, "vectors": VECTORS}.get(kind)
    if modules is not None:
        entries = [{"type": "sentence_transformers.Transformer", "path": ""}]
        for i, (name, values) in enumerate(modules.items(), 1):
            inner = folder / f"{i}_{name}"
            inner.mkdir()
            (inner / "config.json").write_text(json.dumps(values))
            if name == "Dense":
                save_file(
                    {"linear.weight": rng.standard_normal((6, WIDTH), np.float32)},
                    inner / "model.safetensors",
                )
            entries.append({"type": f"sentence_transformers.{name}", "path": inner.name})
        (folder / "modules.json").write_text(json.dumps(entries))


@cache
def loaded(kind, dtype, weights_dtype):
    folder = Path(home().name, f"head-{kind}")
    if not folder.exists() and kind in HEADS:
        write_head(folder, kind)
    elif not folder.exists():
        tiny_towers.write(folder, kind, text={"vocab_size": len(WORDS)})
        write_tokenizer(folder)
    return models.load(folder, dtype=dtype, weights_dtype=weights_dtype)


def model_of(d, *kinds):
    dtype = d.choose("float32", "float32", "float64", "bfloat16")
    weights = None if dtype == "float64" else d.choose(None, None, "bfloat16", "int8", "int4", "uint4", "nf4")
    return loaded(d.choose(*kinds), dtype, weights)


def lane(it):
    return np.dtype("float64" if getattr(it, "encoder", it).dtype == np.float64 else "float32")


def tolerance(it):
    it = getattr(it, "encoder", it)
    return 30.0 if it.dtype != "bfloat16" and it.weights_dtype in ("float32", "float64") else np.inf


def words(d):
    return d.choose("the cat sat", "", "a dog", "nothing of it", "the dog " * 9, "the no tree")


@recipe
def classifier_call(d):
    it = model_of(d, "pairs", "score")
    arguments = tokens(d, "input_ids")
    arguments["input_ids"] = arguments["input_ids"] % len(WORDS)
    shape = np.atleast_2d(arguments["input_ids"]).shape
    each = shape[:1]
    check = right([Like((*each, it.num_labels), lane(it))])
    mask = np.atleast_2d(arguments.get("attention_mask", np.ones(shape)))
    if shape[1] == 0 or not mask.any(axis=1).all():  # what a text without tokens has is the head's of nothing
        check = right([Like((*each, it.num_labels), lane(it), finite=False)])
    return Call(it, arguments, None, (it.model_type,), tolerance(it), check=check)


@recipe
def predicted(d):
    it = model_of(d, "pairs", "score")
    pairs = [d.choose((words(d), words(d)), [words(d), words(d)], (words(d),)) for _ in range(d.size(0, 4))]
    more = d.some(0.3, batch_size=d.size, prompt=lambda: "the ", apply_softmax=lambda: True)
    shape = (len(pairs),) if it.num_labels == 1 else (len(pairs), it.num_labels)
    check = right([Like(shape, lane(it))])
    return Call(it.predict, {"inputs": pairs, **more}, None, ("predict",), tolerance(it), check=check)


@recipe
def ranked(d):
    it = model_of(d, "score")
    documents = [words(d) for _ in range(d.size(0, 4))]
    more = d.some(0.3, batch_size=d.size, top_k=d.size, return_documents=lambda: True)

    @wraps(it.rank)
    def rank(*arguments, **options):
        return sorted(float(x["score"]) for x in it.rank(*arguments, **options))

    return Call(rank, {"query": words(d), "documents": documents, **more}, None, ("rank",), np.inf)


@recipe
def sparse(d):
    it = model_of(d, "sparse")
    texts = [words(d) for _ in range(d.size(0, 4))]
    more = d.some(0.3, batch_size=d.size, prompt=lambda: "the ", max_active_dims=d.size)
    encode = d.choose(it.encode, it.encode_query, it.encode_document)

    @wraps(encode)
    def function(*arguments, **options):
        found = encode(*arguments, **options)
        return found.toarray(), it.similarity(found, found), it.decode(found, top_k=2) and []

    n, compare = len(texts), "max_active_dims" not in more  # which of two equal ones is kept may differ
    check = right([Like((n, len(WORDS)), lane(it)), Like((n, n), lane(it))])
    far = tolerance(it) if compare else np.inf
    return Call(function, {"sentences": texts, **more}, None, (encode.__name__,), far, check=check)


@recipe
def vectors_of_tokens(d):
    it = model_of(d, "vectors")
    texts = [words(d) for _ in range(d.size(0, 4))]
    more = d.some(0.3, batch_size=d.size, prompt=lambda: "the ", normalize_embeddings=lambda: True)
    encode = d.choose(it.encode, it.encode_query, it.encode_document)
    if encode.__name__ == "encode":
        more |= d.some(0.5, task=lambda: d.choose("query", "document"))

    @wraps(encode)
    def function(*arguments, **options):
        found = encode(*arguments, **options)
        several = found if isinstance(found, list) else [found]
        return several, it.similarity(several, several), it.similarity_pairwise(several, several)

    return Call(function, {"sentences": texts, **more}, None, (encode.__name__,), tolerance(it))


@recipe
def towers(d):
    """Texts, pixels and images of CLIP and SigLIP, and what their vectors are compared by."""
    it, size = model_of(d, *tiny_towers.KINDS), tiny_towers.SIZE
    names, far = (it.model_type,), tolerance(it)
    kind = d.choose("texts", "pixels", "encode", "logits")
    if kind == "texts":
        ids = d.integers(3, len(WORDS), d.choose(1, 3), tiny_towers.LENGTH)
        ids[..., -1] = 2
        check = right([Like((len(ids), it.text_head.linear.weight.out_features), lane(it))])
        return Call(it.text_features, {"ids": ids}, None, names, far, check=check)
    if kind == "pixels":
        pixels = d.floats(d.size(0, 3), 3, size, size, dtype=np.float32)
        return Call(it.image_features, {"pixels": pixels}, None, names, far)
    if kind == "encode":
        image = d.rng.integers(0, 256, (size, size, 3), np.uint8)
        several = d.choose([words(d), image], [image], image, image[None], [words(d)], words(d), [])
        more = d.some(0.3, batch_size=d.size, normalize_embeddings=lambda: True, truncate_dim=d.size)
        return Call(it.encode, {"sentences": several, **more}, None, ("encode",), far)
    a, b = (d.rng.standard_normal((d.size(1, 4), 8)).astype(np.float32) for _ in range(2))
    return Call(it.logits, {"embeddings1": a, "embeddings2": b}, None, ("logits",), 30.0)


RECIPES += [towers] * 2
