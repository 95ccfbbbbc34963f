"""Changes to the folders of tiny models, and a check of the error that a wrong folder gives."""

import json

import numpy as np
import pytest
import tiny_models as tiny
from safetensors.numpy import save_file
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn.models import ModelError


def write_reranker(folder, labels=("score",)):
    """Write the folder of a tiny BERT with a head of these labels, and its tokenizer."""
    names = {str(i): label for i, label in enumerate(labels)}
    scores = {"architectures": ["BertForSequenceClassification"], "id2label": names}
    config = {**tiny.CONFIGS["bert"], "type_vocab_size": 2}
    weights = {f"bert.{name}": x for name, x in tiny.tensors("bert", config).items()}
    rng = np.random.default_rng(0)
    for name, features in (("bert.pooler.dense", 24), ("classifier", len(labels))):
        weights[f"{name}.weight"] = rng.standard_normal((features, 24)).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(features, np.float32)
    tiny.write(folder, "bert", weights, type_vocab_size=2, **scores)
    write_tokenizer(folder)


def write_parts(folder, kind, n_parts=3):
    """Write a model's folder with its tensors in several files, and return the index."""
    weights = tiny.write(folder, kind)
    (folder / "model.safetensors").unlink()
    places = {}
    for i in range(n_parts):
        file = f"model-{i + 1:05}-of-{n_parts:05}.safetensors"
        part = dict(list(weights.items())[i::n_parts])
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def change_config(folder, **changes):
    """Change values of config.json. None removes a value."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def refused(folder, *parts, error=ModelError, **options):
    """Loading raises one error, whose message has all of `parts`."""
    with pytest.raises(error) as raised:
        models.load(folder, **options)
    message = str(raised.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    return message


def write_modules(folder, *modules, pooling=None, package="sentence_transformers.models"):
    """modules.json with Transformer, Pooling and others: (kind, config.json[, tensors])."""
    modules = [("Pooling", {"pooling_mode": "mean"} if pooling is None else pooling), *modules]
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"}]
    for i, (kind, config, *tensors) in enumerate(modules, 1):
        path = folder / f"{i}_{kind}"
        entries.append({"idx": i, "name": str(i), "path": path.name, "type": f"{package}.{kind}"})
        if config is not None:
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file(*tensors, path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(entries))


def write_settings(folder, **values):
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))
