"""Texts and conversations that models continue: the pieces, where they end, and templates."""

import json

import pytest

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


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ids": [{"content": "no role"}]}, ValueError, r"the message .*; expected a 'role' in each"),
        ({"ids": ""}, ValueError, "a prompt without a token"),
        ({"stop": ["a", ""]}, ValueError, "stop has an empty text"),
        ({"stop": ["a", 1.5]}, TypeError, "stop has dtype float64"),
        ({"attention_mask": [1]}, ValueError, "attention_mask is given with a text; expected None"),
        ({"template_values": {}}, ValueError, "template_values are given with a text"),
        ({"ids": [1], "template_values": {}}, ValueError, "template_values are given with ids"),
        ({"ids": [{"role": "user", "content": ""}], "template_values": 3}, TypeError, "expected a mapping"),
        ({"ids": [1], "stop": "a"}, TypeError, "stop has dtype <U1; expected integers"),
        ({"top_k": 3}, ValueError, "top_k is 3 and temperature 0"),
    ],
)
def test_what_is_refused_before_anything_is_computed(model, changed, error, message):
    with pytest.raises(error, match=rf"^generate\(\): .*{message}|^.*{message}"):
        model.generate(**{"ids": "Once", "max_new_tokens": 4, **changed})
