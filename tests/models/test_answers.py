"""Parts of answers: reasoning and calls of tools, wherever their texts are cut."""

import json
import shutil

import pytest
import tiny_models as tiny
from tiny_models import CONFIGS
from tiny_tokenizers import write_byte_tokenizer

from fastattn import models
from fastattn.models._answers import Part, Parts

QWEN = "{% if tools %}<tool_call></tool_call>{{ tools | tojson }}{% endif %}<think></think>"
MISTRAL = "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS]' }}"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary} <|python_tag|>'
HARMONY = "<|start|>assistant<|channel|>analysis<|message|><|end|>"
CALL = '{"name": "f", "arguments": {"x": 1}}'
READ = {"name": "f", "arguments": {"x": 1}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def said(text):
    return Part(text)


def thought(text):
    return Part(text, "reasoning")


def called(text):
    return Part(text, "tool_call", READ)


def bad(text):
    return Part(text, "malformed_call")


NAMELESS, CUT = '<tool_call>{"name": 3, "arguments": {}}</tool_call>', '[TOOL_CALLS]f[ARGS]{"x":'
BEGIN, JSON_OF, TO_F = "<|start|>assistant", '<|message|>{"x": 1}<|call|>', " to=functions.f"
FINAL, THINKS, TELLS = (f"<|channel|>{kind}" for kind in ("final", "analysis", "commentary"))
# Template, end of the prompt, answer, and its parts.
CASES = [
    (QWEN, "", "no marker < or > at all", [said("no marker < or > at all")]),
    (QWEN, "", "<think>why?</think>so", [thought("why?"), said("so")]),
    (QWEN, "<think>\n", "why?</think>so", [thought("why?"), said("so")]),
    (QWEN, "<think>\n\n</think>\n\n", "so</thin", [said("so</thin")]),
    (QWEN, "<think>", "why <tool_call>", [thought("why <tool_call>")]),
    (QWEN, "", f"a<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
        [said("a"), called(f"\n{CALL}\n"), said("\n"), called(CALL)]),
    (QWEN, "", '<tool_call>{"name": </tool_call>b', [bad('<tool_call>{"name": </tool_call>'), said("b")]),
    (QWEN, "", f"<tool_call>{CALL}", [bad(f"<tool_call>{CALL}")]),
    (QWEN, "", NAMELESS, [bad(NAMELESS)]),
    (MISTRAL, "", f"a[TOOL_CALLS] [{CALL}, {CALL}]", [said("a"), called(f" [{CALL}, {CALL}]"), called("")]),
    (MISTRAL, "", '[TOOL_CALLS]f[ARGS]{"x": 1}' + CUT, [called('f[ARGS]{"x": 1}'), bad(CUT)]),
    (LLAMA, "", "\n" + CALL.replace("arguments", "parameters"),
        [called("\n" + CALL.replace("arguments", "parameters"))]),
    (LLAMA, "", f"<|python_tag|>{CALL}", [called(CALL)]),
    (LLAMA, "", " say {}", [said(" say {}")]),
    (LLAMA, "", "  ", [said("  ")]),
    (LLAMA, "", "{x", [bad("{x")]),
    (HARMONY, BEGIN, f"{THINKS}<|message|>why?<|end|>{BEGIN}{FINAL}<|message|>a < b<|return|>",
        [thought("why?"), said("a < b")]),
    (HARMONY, "", f"{TELLS}{TO_F} <|constrain|>json{JSON_OF}", [called('{"x": 1}')]),
    (HARMONY, "", f"{TELLS}<|message|>first<|end|>{BEGIN}{TO_F}{TELLS}{JSON_OF}",
        [said("first"), called('{"x": 1}')]),
    (HARMONY, "", TELLS + TO_F + '<|message|>{"x"', [bad('<|message|>{"x"')]),
    (HARMONY, "", "no header", [said("no header")]),
    (HARMONY, BEGIN, f"{TO_F}{TELLS}{JSON_OF}", [called('{"x": 1}')]),
    (HARMONY, "", "Hello world<|return|>", [said("Hello world")]),
    (HARMONY, "", f"{FINAL}<|message|>a<|end|>b{BEGIN}{FINAL} analysis<|message|>c", [said("abc")]),
    (HARMONY, "", "<|channel|>anal", [said("<|channel|>anal")]),
    ("<tool_call> alone", "", "<think>", [said("<think>")]),
]  # fmt: skip


def joined(parts):
    """Parts with neighbours of one kind joined, but for calls."""
    found = []
    for part in parts:
        if found and part.kind == found[-1].kind and part.kind in ("text", "reasoning"):
            found[-1] = Part(found[-1].text + part.text, part.kind)
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(("template", "prompt", "answer", "expected"), CASES)
def test_an_answer_has_the_same_parts_however_it_is_cut(template, prompt, answer, expected):
    for size in range(1, len(answer) + 1):
        parts, found = Parts(template, prompt, tools=True), []
        for begin in range(0, len(answer), size):
            found += parts.add(answer[begin : begin + size])
        assert joined([*found, *parts.rest()]) == expected


def test_text_comes_as_soon_as_it_is_clear():
    parts = Parts(QWEN, "", tools=True)
    assert parts.add("a <") == [Part("a ")]
    assert parts.add("b") == [Part("<b")]
    assert parts.add("<think>c") == [Part("c", "reasoning")]
    without = Parts(QWEN, "", tools=False)
    assert without.add("<tool_call>") == [Part("<tool_call>")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT-2 over bytes, and one special token, with a template that writes contents and tools."""
    folder = tmp_path_factory.mktemp("tools")
    changes = {"vocab_size": 257, "n_positions": 512}
    tiny.write(folder, "gpt2", tiny.tensors("gpt2", {**CONFIGS["gpt2"], **changes}), **changes)
    tokenizer = write_byte_tokenizer(folder)
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def told(folder, tmp_path, template):
    """A model with this template, and what makes `generate` write a text."""
    shutil.copytree(folder, tmp_path / "model")
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}{{ end }}{# "
    (tmp_path / "model" / "chat_template.jinja").write_text(f"{source}{template} #}}")
    model = models.load(tmp_path / "model")

    def saying(text, prompt):
        (ids,) = model.text.encode([text])

        def processor(seen, logits):
            logits[ids[len(seen) - len(prompt)]] = 1e6
            return logits

        return {"max_new_tokens": len(ids), "logits_processor": processor}

    return model, saying


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_pieces_of_an_answer(folder, tmp_path):
    model, saying = told(folder, tmp_path, QWEN.replace("{%", "").replace("%}", ""))
    text = f"<think>é?</think>so<tool_call>{CALL}</tool_call>"
    how = saying(text, model.conversation_ids(MESSAGES, tools=[TOOL]))
    pieces = list(model.generate(MESSAGES, tools=[TOOL], logprobs=0, **how))
    assert [i for piece in pieces for i in piece.ids] == model.text.encode([text])[0]
    assert all(len(piece.ids) == len(piece.logprobs) for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert [piece.tool_call for piece in pieces if piece.kind == "tool_call"] == [READ]
    assert models.message_of(pieces) == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "é?",
        "tool_calls": [{"type": "function", "function": READ}],
    }
    values = {"tools": [TOOL]}
    assert list(model.generate(MESSAGES, template_values=values, logprobs=0, **how)) == pieces
    begun = {"end": "<think>\n"}
    how = saying("é?</think>so", model.conversation_ids(MESSAGES, begun))
    pieces = list(model.generate(MESSAGES, template_values=begun, stop=["o"], **how))
    assert models.message_of(pieces) == {"role": "assistant", "content": "s", "reasoning_content": "é?"}
    assert pieces[-1].finish_reason == "stop"
    how = saying("<tool_call>{x</tool_call>", model.conversation_ids(MESSAGES, tools=[TOOL]))
    (piece, *_) = model.generate(MESSAGES, tools=[TOOL], **how)
    assert (piece.kind, piece.text, piece.tool_call) == ("malformed_call", "<tool_call>{x</tool_call>", None)


@pytest.mark.parametrize(
    ("template", "token", "ends"),
    [
        *((token, token, True) for token in ("<|im_end|>", "<end_of_turn>", "<|end|>")),
        ("{{ eos_token }}", "[END]", True), ("<|end|><|return|>", "<|end|>", False),
        ("plain", "<|im_end|>", False),
    ],
)  # fmt: skip
def test_an_answer_ends_where_the_template_ends_a_turn(template, token, ends, folder, tmp_path):
    model, saying = told(folder, tmp_path, template.replace("{{", "").replace("}}", ""))
    path = tmp_path / "model/tokenizer.json"
    path.write_text(path.read_text().replace("[TOOL_CALLS]", token))
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    model = models.load(path.parent)
    assert model.stop == ()
    text = f"an answer{token}more"
    how = saying(text, model.conversation_ids(MESSAGES))
    pieces = list(model.generate(MESSAGES, **how))
    assert "".join(map(str, pieces)) == ("an answer" if ends else "an answermore")
    assert pieces[-1].finish_reason == ("stop" if ends else "length")
    assert "".join(map(str, model.generate(MESSAGES, stop=(), **how))) == "an answermore"


def test_a_marker_that_is_a_special_token(folder, tmp_path):
    """The text of an answer leaves such tokens out, and they begin a call nevertheless."""
    model, saying = told(folder, tmp_path, "[TOOL_CALLS]")
    text = f"a[TOOL_CALLS][{CALL}]"
    for tools, count in (([TOOL], 1), (None, 0)):
        how = saying(text, model.conversation_ids(MESSAGES, tools=tools))
        pieces = list(model.generate(MESSAGES, tools=tools, **how))
        assert sum(piece.tool_call == READ for piece in pieces) == count
        assert "".join(map(str, pieces)) == text.replace("[TOOL_CALLS]", "")


def test_nothing_changes_without_markers(folder, tmp_path):
    model, saying = told(folder, tmp_path, "plain")
    text = f"<think>a</think><tool_call>{CALL}</tool_call>"
    how = saying(text, model.conversation_ids(MESSAGES, tools=[TOOL]))
    pieces = list(model.generate(MESSAGES, tools=[TOOL], **how))
    assert "".join(map(str, pieces)) == text
    assert {piece.kind for piece in pieces} == {"text"}


def test_tools_are_what_the_template_sees(folder, tmp_path):
    model, _ = told(folder, tmp_path, "plain")
    (expected,) = model.text.encode([f"Hi{json.dumps([TOOL])}"])
    assert model.conversation_ids(MESSAGES, tools=[TOOL]) == expected
    for given, error, message in (
        ({"ids": "Hi", "tools": [TOOL]}, ValueError, "tools are given with a text; expected messages"),
        ({"ids": [1], "tools": [TOOL]}, ValueError, "tools are given with ids; expected a text or messages"),
        ({"ids": MESSAGES, "tools": TOOL}, TypeError, "tools is of type dict; expected a list of JSON"),
        ({"ids": MESSAGES, "tools": [len]}, TypeError, "tools is of type builtin.*; expected a list of JSON"),
        ({"ids": MESSAGES, "tools": [TOOL], "template_values": {"tools": []}}, ValueError,
            "template_values has 'tools', which is given, too; expected one of the two"),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"^generate\(\): {message}"):
            model.generate(**given)


def test_reasoning_goes_by_the_name_that_the_template_has(folder, tmp_path):
    model, _ = told(folder, tmp_path, " #}{{ messages[-1].thinking }}{# ")
    answer = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    (expected,) = model.text.encode(["Hisonullwhy"])
    assert model.conversation_ids([*MESSAGES, answer], {"tools": None}) == expected


def test_tools_need_a_template_that_writes_them(folder, tmp_path):
    model, _ = told(folder, tmp_path, "")
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(source)
    for call in (model.conversation_ids, model.generate):
        with pytest.raises(ValueError, match=r"tools are given, and the chat template of .* writes none"):
            call(MESSAGES, tools=[TOOL])
    assert model.conversation_ids(MESSAGES, tools=[]) == model.conversation_ids(MESSAGES)
