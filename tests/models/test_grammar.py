"""Answers that follow a JSON schema or a grammar, of a model that writes bytes at random."""

import gc
import json
import sys
import weakref

import numpy as np
import pytest
import tiny_models
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn.models import _grammar

END = 198  # the id that ends a text here: of the line break, which is part of the answer
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HOW = {"stop": END, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(writer):
    return models.load(writer)


def written(pieces, count=1):
    said, last = [""] * count, [None] * count
    for piece in pieces:
        said[piece.index] += piece.text
        last[piece.index] = piece.finish_reason
    said = [text.removesuffix("\n") if why == "stop" else text for text, why in zip(said, last, strict=True)]
    return said, last


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_of_the_schema(model, seed):
    schema = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
    (said,), (reason,) = written(model.generate("Once", 50, grammar=schema, seed=seed, **HOW))
    assert reason == "stop"
    found = json.loads(said)
    assert list(found) == ["a", "b"]
    assert 0 <= found["a"] <= 99
    assert found["b"] in ("x", "yy")


def test_several_answers_and_ids(model):
    """Each follows the grammar by itself, ends by itself, and has the draws that it has alone."""
    grammar, texts = r"start: /[ab]{2,6}/", ["Once", "A", "a time"]
    children = np.random.SeedSequence(3).spawn(3)
    said, reasons = written(model.generate(texts, 20, grammar=grammar, seed=3, **HOW), 3)
    assert reasons == ["stop"] * 3
    for text, child, whole in zip(texts, children, said, strict=True):
        assert 2 <= len(whole) <= 6
        assert set(whole) <= set("ab")
        assert written(model.generate(text, 20, grammar=grammar, seed=child, **HOW))[0] == [whole]
    (prompt,) = model.text.encode(["Once"])
    ids = list(model.generate(prompt, 20, grammar=grammar, seed=children[0], **HOW))
    assert ids[-1] == END
    assert model.text.decode([ids[:-1]]) == said[:1]


def test_the_best_of_what_may_follow(model):
    """With a bias that would choose otherwise, with log-probabilities of the model, and with a session."""
    (prompt,) = model.text.encode(["Once"])
    allowed = model.text.encode(["b", "d"])
    logits = model(prompt)[0, -1]
    best = max(allowed, key=lambda ids: logits[ids[0]])[0]
    how = {"grammar": 'start: "b" | "d"', "stop": END}
    (first, *_) = model.generate(prompt, 2, **how)
    assert first == best
    pieces = list(model.generate("Once", 2, logprobs=1, cache=model.session(), logit_bias={5: 90.0}, **how))
    token, chances = pieces[0].ids[0], pieces[0].logprobs[0]
    assert token == best
    shifted = logits.astype(float) - logits.max()
    assert chances[token] == pytest.approx(shifted[token] - np.log(np.exp(shifted).sum()), abs=1e-5)


def test_a_file_that_is_replaced(writer, tmp_path):
    """Its tokenizer, of as many tokens, has other ids: the one of before does not count any more."""
    for path in writer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for turned in (False, True):
        if turned:
            path = tmp_path / "tokenizer.json"
            file = json.loads(path.read_text(encoding="utf-8"))
            file["model"]["vocab"] = {token: 255 - i for token, i in file["model"]["vocab"].items()}
            path.write_text(json.dumps(file), encoding="utf-8")
        model = models.load(tmp_path)
        (stop,) = model.text.encode(["\n"])[0]
        before = _grammar._tokenizer.cache_info()
        for _ in range(2):
            assert written(model.generate("Once", 12, grammar='start: "yes"', stop=stop))[0] == ["yes"]
        after = _grammar._tokenizer.cache_info()
        assert (after.misses, after.hits) == (before.misses + 1, before.hits + 1)
    gone = weakref.ref(model.text)
    del model
    gc.collect()
    assert gone() is None


def test_an_answer_that_is_cut_says_so(model):
    (said,), (reason,) = written(model.generate("Once", 3, grammar="start: /[ab]{5}/", seed=1, **HOW))
    assert (len(said), reason) == (3, "length")


@pytest.mark.parametrize(
    ("grammar", "error", "message"),
    [
        ({"type": "nothing"}, ValueError, "grammar is invalid: .*nothing"),
        ("start: [", ValueError, "grammar is invalid: "),
        (json.dumps(PERSON), ValueError, "grammar is a string of JSON; expected the schema"),
        (3, TypeError, "grammar is of type int; expected a JSON schema"),
        ([PERSON], TypeError, "grammar is of type list"),
    ],
)
def test_what_is_refused(model, grammar, error, message):
    with pytest.raises(error, match=rf"^generate\(\): {message}"):
        model.generate("Once", 5, grammar=grammar, **HOW)


def test_something_must_end_an_answer(model):
    with pytest.raises(
        ValueError, match=r"^generate\(\): grammar is given, and stop has no id; expected one"
    ):
        model.generate("Once", 5, grammar=PERSON, stop=())


def test_a_tokenizer_that_the_library_cannot_read(tmp_path):
    tiny_models.write(tmp_path, "llama")
    write_tokenizer(tmp_path)  # without a decoder
    with pytest.raises(
        ValueError, match=r"^generate\(\): grammar is given, .* tokenizer: .*; expected one with"
    ):
        models.load(tmp_path).generate([1, 2], 5, grammar=PERSON, stop=3)


def test_without_the_package(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        ImportError, match=r"grammar needs llguidance: pip install llguidance, or fastattn with"
    ):
        model.generate("Once", 5, grammar=PERSON, **HOW)
