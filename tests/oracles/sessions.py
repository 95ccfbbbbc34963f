"""What tests of sessions share: answers, how many tokens a pass computes, and files that are refused."""

import json

import pytest
import tiny_models as tiny
from safetensors.numpy import save_file

from fastattn import models
from fastattn.models._session import _digest, digest


def load(folder, kind="llama", changes=None, **options):
    tiny.write(folder, kind, **(changes or {}))
    return models.load(folder, **{"dtype": "float64", **options})


def answer(model, prompt, count=6, **options):
    return list(model.generate(prompt, count, stop=(), **options))


def computed(monkeypatch, model):
    """The numbers of tokens that each pass computes from now on."""
    counts, hidden = [], type(model)._hidden

    def counted(self, tokens, *others):
        counts.append(len(tokens))
        return hidden(self, tokens, *others)

    monkeypatch.setattr(type(model), "_hidden", counted)
    return counts


def refused_session(model, file, message, held, /, key="fastattn.session", **changes):
    """A file of a session of these arrays, with changes of its header, is refused."""
    own = {
        "format": 3,
        "model": digest(model),
        "rotated": None,
        "digest": _digest([None, sorted(held.items())]),
    }
    save_file(held, file, {key: json.dumps({**own, **changes})})
    with pytest.raises(ValueError, match=rf"^load_session\(\): .*{message}"):
        model.load_session(file)
