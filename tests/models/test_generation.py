"""Texts and conversations that models continue: the pieces, where they end, and templates."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_models as tiny
from tiny_models import DECODERS

from fastattn import models
from fastattn.models import ModelError, Piece

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra }}"
)
HOW = {"temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def model(writer):
    return models.load(writer)


def test_pieces_are_the_text_of_the_tokens(model):
    (prompt,) = model.text.encode(["Once, a café"])
    ids = list(model.generate(prompt, 40, **HOW))
    pieces = list(model.generate("Once, a café", 40, **HOW))
    assert all(type(piece) is Piece for piece in pieces)
    assert "".join(map(str, pieces)) == "".join(model.text.stream(prompt, iter(ids)))
    assert [i for piece in pieces for i in piece.ids] == ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.text for piece in pieces[:-1])
    end = ids[5]
    pieces = list(model.generate("Once, a café", 40, stop=end, **HOW))
    assert [i for piece in pieces for i in piece.ids] == ids[: ids.index(end) + 1]
    assert pieces[-1].finish_reason == "stop"
    assert [str(piece) for piece in model.generate("Once", 0)] == [""]


def test_texts_that_end_an_answer(model):
    """Wherever tokens are cut; a text that only seems to begin is not lost."""
    whole = "".join(map(str, model.generate("Once, a café", 40, **HOW)))
    for begin in range(len(whole) - 3):
        stop = whole[begin : begin + 3]
        pieces = list(model.generate("Once, a café", 40, stop=stop, **HOW))
        assert "".join(map(str, pieces)) == whole[: whole.index(stop)]
        assert pieces[-1].finish_reason == "stop"
        near = [stop[:2] + "\0", "\0" + stop]
        pieces = list(model.generate("Once, a café", 40, stop=near, **HOW))
        assert "".join(map(str, pieces)) == whole
        assert pieces[-1].finish_reason == "length"
    both = list(model.generate("Once, a café", 40, stop=[whole[4], whole[2]], **HOW))
    first = min(whole.index(whole[4]), whole.index(whole[2]))
    assert "".join(map(str, both)) == whole[:first]


def test_a_conversation_is_what_the_template_writes(writer, tmp_path):
    for path in writer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = models.load(tmp_path)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What?"}]
    with pytest.raises(ModelError, match=r"chat_template\.jinja is missing"):
        model.generate(messages)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    said = "<system>Be short.\n<user>What?\n<assistant>"
    for values, text in (
        (None, said),
        ({"extra": "!"}, said + "!"),
        ({"add_generation_prompt": False}, said[:-11]),
    ):
        got = list(model.generate(messages, 9, template_values=values))
        (prompt,) = model.text.encode([text])
        assert [i for piece in got for i in piece.ids] == list(model.generate(prompt, 9))
        assert model.conversation_ids(messages, values) == prompt
    half = [{"role": "user", "content": "a \ud800"}]
    for name, call in (("generate", model.generate), ("conversation_ids", model.conversation_ids)):
        with pytest.raises(ValueError, match=rf"^{name}\(\): a text has '\\ud800', half of a surr"):
            call(half)
    with pytest.raises(TypeError, match=r"conversation_ids\(\): messages is of type str; expected a list"):
        model.conversation_ids("What?")
    (tmp_path / "chat_template.jinja").unlink()
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "^"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    pieces = list(models.load(tmp_path).generate(messages[1:], 9))
    (prompt,) = model.text.encode(["^What?"])
    assert [i for piece in pieces for i in piece.ids] == list(model.generate(prompt, 9))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no') }}"})
    )
    with pytest.raises(ModelError, match=r"the chat template fails, .*no; expected one for these messages"):
        models.load(tmp_path).generate(messages)


def test_several_texts_are_each_as_it_is_alone(writer):
    """In tokens, where they end, and in draws: number i has the seed's i-th child."""
    model, texts = models.load(writer), ["Once, a café", "On", "a time, and"]
    children = np.random.SeedSequence(3).spawn(len(texts))
    alone = [
        list(model.generate(text, 40, temperature=0.9, seed=child))
        for text, child in zip(texts, children, strict=True)
    ]
    said = ["".join(map(str, each)) for each in alone]
    for stop in (None, said[0][9:11], said[1][4], [said[0][20], said[2][7]]):
        expected = [
            list(model.generate(text, 40, stop=stop, temperature=0.9, seed=child))
            for text, child in zip(texts, children, strict=True)
        ]
        got: list = [[], [], []]
        for piece in model.generate(texts, 40, stop=stop, **HOW):
            got[piece.index].append(replace(piece, index=0))
        assert got == expected
    assert [piece.index for piece in model.generate(["Once"], 2)] == [0] * 3
    assert list(model.generate(("Once",), 2)) == list(model.generate("Once", 2))


@pytest.mark.parametrize("best", [0, 1, 3])
def test_logprobs_are_the_models(writer, best):
    """Whatever changes the draw; of each token that was drawn, and of the best ones."""
    model = models.load(writer)
    pieces = list(model.generate("Once", 12, logprobs=best, logit_bias={97: 3.0}, temperature=2.0, seed=1))
    ids = [i for piece in pieces for i in piece.ids]
    found = [each for piece in pieces for each in piece.logprobs or ()]
    (prompt,) = model.text.encode(["Once"])
    logits = np.asarray(model(prompt + ids)[0], float)[len(prompt) - 1 : -1]
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert len(found) == len(ids) == 12
    for token, each, row in zip(ids, found, expected, strict=True):
        assert list(each) == list(dict.fromkeys([token, *np.argsort(-row)[:best].tolist()]))
        np.testing.assert_allclose(list(each.values()), row[list(each)], atol=1e-5)
    assert all(len(piece.ids) == len(piece.logprobs) for piece in pieces)
    assert pieces[-1].logprobs is not None
    assert all(piece.logprobs is None for piece in model.generate("Once", 3))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 3}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": 0.6, "top_k": None, "top_p": 0.95, "min_p": 0.1, "other": 3},
         {"temperature": 0.6, "top_k": 50, "top_p": 0.95, "min_p": 0.1}),
    ],
)  # fmt: skip
def test_what_the_files_recommend(said, expected, writer, tmp_path):
    for path in writer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    model = models.load(tmp_path)
    assert model.usual_sampling() == expected
    list(model.generate("Once", 2, **model.usual_sampling()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": "0.9"}))
    with pytest.raises(ModelError, match=r"generation_config.json: 'top_p' is '0.9'; expected a number"):
        model.usual_sampling()


def expected_score(model, whole, begin):
    """The log-probability of each token from `begin` on, and whether it is the best, by the full pass."""
    logits = np.asarray(model(whole[:-1])[0], float)[begin - 1 :]
    chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    own = np.array(whole[begin:])
    return chances[np.arange(len(own)), own], (logits.argmax(axis=1) == own).all()


@pytest.mark.parametrize("kind", [*DECODERS, "scaled"])
def test_scores_are_those_of_the_full_pass(kind, tmp_path, implementation):
    changes = {}
    if kind == "scaled":
        scaling = {"rope_type": "dynamic", "factor": 2.0}
        kind, changes = "llama", {"max_position_embeddings": 8, "rope_scaling": scaling}
    tiny.write(tmp_path, kind, **changes)
    model, rng = models.load(tmp_path, dtype="float64"), np.random.default_rng(2)
    prompt = rng.integers(tiny.VOCAB, size=7).tolist()
    continuations = [rng.integers(tiny.VOCAB, size=n).tolist() for n in (3, 1, 5, 2, 1, 4, 2, 3, 9, 1)]
    continuations[4] = list(model.generate(prompt, 3, stop=()))
    found = model.score(prompt, continuations)
    for got, ids in zip(found, continuations, strict=True):
        logprobs, greedy = expected_score(model, prompt + ids, len(prompt))
        np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-10)
        assert got.logprob == pytest.approx(logprobs.sum())
        assert (got.ids, got.is_greedy) == (tuple(ids), greedy)
    assert found[4].is_greedy
    assert model.score(prompt[:1], [[3]])[0].ids == (3,)
    assert model.score(prompt, []) == []


def test_scores_of_texts(writer):
    model = models.load(writer)
    (got, other) = model.score("Once, a", [" café", "!"])
    (whole,) = model.text.encode(["Once, a café"])
    logprobs, _ = expected_score(model, whole, 7)
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
    assert list(got.ids) == model.text.encode([" café"])[0]
    assert len(other.ids) == 1
    for prompt, text in (("Once, a ", "café"), ("Once, a", " café"), ("Once, ", "a café"), (" ", "café")):
        (spaced,) = model.score(prompt, [text])
        begin = len(model.text.encode([prompt.rstrip() or prompt])[0])
        assert list(spaced.ids) == model.text.encode([prompt + text])[0][begin:]
    for arguments, error, message in (
        (("", ["a"]), ValueError, "prompt has no token"),
        (("a", "b"), TypeError, "continuations is of type str"),
        (("a", ["b", ""]), ValueError, r"continuations\[1\] adds no token to the prompt, with whose end"),
        (([{"role": "user"}], ["a"]), TypeError, r"prompt is a list of messages; expected a text or ids"),
        (("a", [3]), TypeError, r"continuations\[0\] is 3; expected a string"),
        (([[1]], [[2]]), ValueError, r"prompt has shape \(1, 1\); expected \(length,\)"),
        (([1], [[2], [999]]), ValueError, r"continuations\[1\] has 999; expected 0 to 255"),
        (("a", ["b" * 64]), ValueError, "a text has more than 64 tokens with its prompt; expected at most"),
        (([1], [[2] * 64]), ValueError, "65 tokens in a sequence; expected at most 64"),
    ):
        with pytest.raises(error, match=rf"^score\(\): {message}"):
            model.score(*arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ids": [{"content": "no role"}]}, ValueError, r"the message .*; expected a 'role' in each"),
        ({"ids": ""}, ValueError, "a prompt without a token"),
        ({"stop": ["a", ""]}, ValueError, "stop has an empty text"),
        ({"stop": ["a", 1.5]}, TypeError, "stop has dtype float64"),
        ({"stop": b"x"}, TypeError, "stop is of type bytes; expected ids and texts"),
        ({"stop": bytearray(b"x")}, TypeError, "stop is of type bytearray; expected ids and texts"),
        ({"ids": "a \ud800"}, ValueError, r"ids has '\\ud800', half of a surrogate pair"),
        ({"ids": [{"role": "user", "content": ""}], "template_values": {"messages": []}}, ValueError,
         "template_values has 'messages', which are given as such; expected other names"),
        ({"attention_mask": [1]}, ValueError, "attention_mask is given with a text; expected None"),
        ({"template_values": {}}, ValueError, "template_values are given with a text"),
        ({"ids": [1], "template_values": {}}, ValueError, "template_values are given with ids"),
        ({"ids": [{"role": "user", "content": ""}], "template_values": 3}, TypeError, "expected a mapping"),
        ({"ids": [1], "logprobs": 2}, ValueError, "logprobs is given with ids; expected a text or messages"),
        ({"logprobs": -1}, ValueError, "logprobs is -1; expected 0 to 256"),
        ({"ids": ["Once", 3]}, TypeError, "ids has texts or conversations, and 3; expected no ids"),
        ({"ids": [{"role": "user"}]}, ValueError, "the message .*; expected a 'content', too"),
        ({"ids": ["Once", ""]}, ValueError, "a prompt without a token"),
        ({"ids": ["Once"], "template_values": {}}, ValueError, "template_values are given with a text"),
        ({"ids": [1], "stop": "a"}, TypeError, "stop has dtype <U1; expected integers"),
        ({"top_k": 3}, ValueError, "top_k is 3 and temperature 0"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_computed(model, changed, error, message):
    with pytest.raises(error, match=rf"^generate\(\): .*{message}|^.*{message}"):
        model.generate(**{"ids": "Once", "max_new_tokens": 4, **changed})
