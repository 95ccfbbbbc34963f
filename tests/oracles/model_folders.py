"""Changes to the folders of tiny models, and a check of the error that a wrong folder gives."""

import json

import pytest
import tiny_models as tiny
from safetensors.numpy import save_file

from fastattn import models
from fastattn.models import ModelError


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
