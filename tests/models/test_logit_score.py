"""Language models that score pairs: their definition, their template, bits, and what is refused."""

import json
import pickle

import numpy as np
import pytest
import tiny_models as tiny
from implementations import each_isa, forced
from model_folders import change_config, refused, write_settings
from safetensors.numpy import save_file
from tiny_tokenizers import write_byte_tokenizer

from fastattn import models
from fastattn.models import CrossEncoder, Decoder, _chat, _encode_calls

pytest.importorskip("jinja2")

TEMPLATE = """{{ bos_token }}{% for message in messages %}
<{{ message.role }}>{{ message.content }}
{% endfor %}<assistant>{{ extra }}"""
PARTS = TEMPLATE.replace("content", "content[0].text")
PAIRS = [("the cat sat?", "a dog ran"), ("a tree?", ""), ("", "the cat"), ("where? " * 4, "on the mat " * 9)]
YES, NO = 60, 61
LOGITS = {"method": "forward", "method_output_name": "logits"}


def write(folder, kind="qwen3", template=TEMPLATE, style="flat", score=None, transformer=None, **changes):
    """A tiny language model with the files of sentence-transformers; its tensors are returned."""
    changes = {"vocab_size": 256, "tie_word_embeddings": False, "max_position_embeddings": 512, **changes}
    weights = tiny.write(folder, kind, **changes)
    write_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "^"}}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    package = "sentence_transformers"
    modules = [
        {"path": "", "type": f"{package}.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": f"{package}.cross_encoder.modules.logit_score.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    score = {"true_token_id": YES, "false_token_id": NO, **(score or {})}
    (folder / "1_LogitScore/config.json").write_text(json.dumps(score))
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": LOGITS, "message": {**LOGITS, "format": style}},
        "module_output_name": "causal_logits",
        **(transformer or {}),
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return weights


def written(pair, prompt="", extra=""):
    """Write a pair, or one text, as the template does."""
    roles = ("query", "document") if len(pair) == 2 else ("user",)
    named = [*([("system", prompt)] if prompt else []), *zip(roles, pair, strict=True)]
    return "^" + "".join(f"<{role}>{text}\n" for role, text in named) + f"<assistant>{extra}"


def logits_of(model, output, text):
    """Compute yes less no of the text's last token, in float64."""
    ids = model.text.tokenizer.encode(text, add_special_tokens=False).ids
    state = model.encoder(ids)[0, -1].astype(np.float64)
    return state @ output[YES] - state @ output[NO]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_scores_by_their_definition(kind, tied, tmp_path, implementation):
    weights = write(tmp_path, kind, tie_word_embeddings=tied)
    model = models.load(tmp_path)
    assert isinstance(model, CrossEncoder)
    assert repr(model) == f"<{kind}: 2 layers of 24, float32; CrossEncoder of 1>"
    output = weights["model.embed_tokens.weight" if tied else "lm_head.weight"].astype(np.float64)
    for prompt in ("", "Is it?"):
        logits = [logits_of(model, output, written(pair, prompt)) for pair in PAIRS]
        got = model.predict(PAIRS, prompt=prompt)
        np.testing.assert_allclose(got, sigmoid(np.array(logits)), rtol=2e-5, atol=2e-5)
    alone = sigmoid(logits_of(model, output, written(("the cat",))))
    assert model.predict("the cat") == pytest.approx(alone, abs=2e-5)
    ranked = model.rank(PAIRS[0][0], [second for _, second in PAIRS])
    scores = model.predict([(PAIRS[0][0], second) for _, second in PAIRS])
    assert [each["corpus_id"] for each in ranked] == np.argsort(-scores, kind="stable").tolist()
    assert ranked[0]["score"] == scores.max()
    (tmp_path / "modules.json").unlink()
    assert isinstance(models.load(tmp_path), Decoder)


def test_only_the_logit_of_yes(tmp_path):
    weights = write(tmp_path, score={"false_token_id": None})
    write_settings(tmp_path, activation_fn="torch.nn.Identity", prompts={"a": "Is it?"})
    model = models.load(tmp_path)
    weights["lm_head.weight"][NO] = 0
    expected = logits_of(model, weights["lm_head.weight"], written(PAIRS[0], "Is it?"))
    assert model.predict(PAIRS[0], prompt_name="a") == pytest.approx(expected, rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("restored", [True, False])
def test_the_templates_end_comes_back_where_a_text_was_cut(side, restored, tmp_path):
    processing = {"chat_template": {"extra": "yes?", "restore_suffix": restored}}
    write(tmp_path, transformer={"processing_kwargs": processing, "max_seq_length": 60})
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "^", "truncation_side": side}))
    model = models.load(tmp_path)
    end = "\n<assistant>yes?"
    for pair in PAIRS:
        ((*got,),) = model._encoded("Is?", [pair])
        whole = written(pair, "Is?", "yes?")
        cut = whole[:60] if side == "right" else whole[-60:]
        if restored and len(whole) > 60:
            cut = cut[: -len(end)] + end
        assert model.text.decode([[token for token, _ in got]]) == [cut]
    write(tmp_path, transformer={"max_seq_length": 5})  # less than the end
    ((*got,),) = models.load(tmp_path)._encoded("", PAIRS[:1])
    assert model.text.decode([[token for token, _ in got]]) == ["tant>"]


def test_forms_of_templates(tmp_path):
    write(tmp_path)
    expected = models.load(tmp_path).predict(PAIRS, prompt="Is it?")
    for style in ("structured", "auto", None):
        message = LOGITS if style is None else {**LOGITS, "format": style}
        changed = {"modality_config": {"text": LOGITS, "message": message}, "transformer_task": "any-to-any"}
        write(tmp_path, template=PARTS, transformer=changed)
        got = models.load(tmp_path).predict(PAIRS, prompt="Is it?")
        np.testing.assert_array_equal(got, expected)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "other", "template": "{{ 0"}, {"name": "default", "template": PARTS}]
    for found in (PARTS, named):
        config.write_text(json.dumps({"bos_token": "^", "chat_template": found}))
        got = models.load(tmp_path).predict(PAIRS, prompt="Is it?")
        np.testing.assert_array_equal(got, expected)


def test_without_messages_the_tokenizer_takes_both_texts(tmp_path):
    for modalities in ({"text": LOGITS}, None):
        write(tmp_path, template=None, transformer={"modality_config": modalities})
        model = models.load(tmp_path)
        assert model.template is None
        got = model.predict([("a ", "cat")], prompt="the ")
        np.testing.assert_array_equal(got, model.predict([("the a cat",)]))


@each_isa
def test_bits_do_not_depend_on_company(isa, tmp_path, monkeypatch):
    write(tmp_path, transformer={"max_seq_length": 70})
    with forced(isa):
        model = models.load(tmp_path)
        pairs = [*PAIRS, *(tuple(reversed(pair)) for pair in PAIRS)] * 2
        expected = model.predict(pairs)
        assert len(set(expected.tolist())) > 4
        for batch_size in (1, 3, 100):
            np.testing.assert_array_equal(model.predict(iter(pairs), batch_size=batch_size), expected)
        for pair, score in zip(pairs, expected, strict=True):
            assert model.predict(pair) == score
        monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", 100)
        np.testing.assert_array_equal(model.predict(pairs), expected)
        copy = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(copy.predict(pairs), expected)


def test_scores_that_do_not_fit(tmp_path):
    config = "config.json: "
    for score, *parts in (
        ({"true_token_id": None}, config, "'true_token_id' is missing; expected an integer of at least 0"),
        ({"true_token_id": -1}, config, "'true_token_id' is -1; expected an integer of at least 0"),
        ({"true_token_id": "yes"}, config, "'true_token_id' is 'yes'"),
        ({"true_token_id": 256}, "'true_token_id' is 256; expected less than 'vocab_size' of config.json"),
        ({"false_token_id": 999}, "'false_token_id' is 999; expected less than 'vocab_size'"),
        ({"module_input_name": "x"}, "'module_input_name' is 'x'; only 'causal_logits' is supported"),
    ):
        write(tmp_path, score=score)
        refused(tmp_path, "1_LogitScore", *parts)
    write(tmp_path, transformer={"transformer_task": "fill-mask"})
    refused(tmp_path, "'transformer_task' is 'fill-mask'; only 'text-generation' is supported")
    weights = write(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    tiny.write(tmp_path, "qwen3", {k: x for k, x in weights.items() if k != "lm_head.weight"}, **values)
    refused(tmp_path, "'lm_head.weight' is missing")
    for token, wrong in ((YES, True), (NO, True), (NO + 1, False)):  # other rows are not read
        bad = weights["lm_head.weight"].copy()
        bad[token, 3] = np.nan
        tiny.write(tmp_path, "qwen3", {**weights, "lm_head.weight": bad}, **values)
        if wrong:
            refused(tmp_path, "'lm_head.weight' has values that are not finite")
        else:
            models.load(tmp_path)


def test_other_models_have_no_logits(tmp_path):
    write(tmp_path)
    tiny.write(tmp_path, "bert")
    refused(tmp_path, "'model_type' of LogitScore is 'bert'; expected one of llama, mistral, qwen2, qwen3")
    write(tmp_path)
    change_config(tmp_path, architectures=["Any"])
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps(modules[1:]))
    refused(tmp_path, "modules.json has LogitScore; expected Transformer and Pooling first")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat_template.jinja: the chat template fails, TemplateSyntaxError: Expected an expr"),
        ("{{ raise_exception('no\nway') }}", "the chat template fails, TemplateError: no way; expected one"),
        ("{{ 1 / 0 }}", "the chat template fails, ZeroDivisionError"),
        ("{{ messages.append(1) }}", "the chat template fails, SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails, SecurityError"),
        ("{{ messages[0].content }}", "leaves out what role 'document' says; expected both texts"),
        ("{% for m in messages if m.role == 'user' %}{{ m }}{% endfor %}", "leaves out what role 'query'"),
    ],
)
def test_templates_that_fail(template, message, tmp_path):
    write(tmp_path, template=template)
    refused(tmp_path, message)


def test_a_template_that_fails_later(tmp_path):
    refusing = "{% if messages[0].content == 'b' %}{{ raise_exception('not b') }}{% endif %}"
    write(tmp_path, template=refusing + TEMPLATE)
    with pytest.raises(models.ModelError, match=r"chat_template\.jinja: the chat template fails, .*: not b;"):
        models.load(tmp_path).predict([("a", "b"), ("b", "a")])


def test_templates_that_are_not_there(tmp_path):
    write(tmp_path, template=None)
    refused(tmp_path, "chat_template.jinja is missing, and", "tokenizer_config.json has no 'chat_template'")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    refused(tmp_path, "tokenizer_config.json: 'chat_template' is 3; expected a string")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    refused(tmp_path, "chat_template.jinja cannot be read")
    write(tmp_path, transformer={"processing_kwargs": {"chat_template": {"max_length": 3}}})
    refused(tmp_path, "'processing_kwargs' has 'max_length' for the chat template; expected values that")
    write(tmp_path, style="other")
    refused(tmp_path, "'format' is 'other'; expected one of flat, structured, auto")


def test_without_jinja(tmp_path, python, monkeypatch):
    write(tmp_path)
    code = f"""
import sys
sys.modules["jinja2"] = None
from fastattn import models
try:
    models.load({str(tmp_path)!r})
except ImportError as error:
    print(error)
"""
    said = python(code).stdout
    assert "chat templates need Jinja: pip install 'jinja2>=3.1.6', or" in said
    assert "fastattn with the extra 'rerank'" in said
    monkeypatch.setattr(_chat, "version", lambda name: "3.1.5")
    _chat._compiled.cache_clear()
    refused(tmp_path, "chat templates need a newer Jinja than 3.1.5", error=ImportError)


@pytest.mark.parametrize("tied", [False, True])
def test_other_tensors_make_the_model_of_a_folder_with_them(tied, tmp_path):
    write(tmp_path, tie_word_embeddings=tied)
    model = models.load(tmp_path)
    state = {name: np.asarray(1.25 * x, np.float32) for name, x in model.state_dict().items()}
    other, before = model.with_state_dict(state), model.predict(PAIRS)
    save_file(state, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(other.predict(PAIRS), models.load(tmp_path).predict(PAIRS))
    np.testing.assert_array_equal(model.predict(PAIRS), before)
    assert (other.predict(PAIRS) != before).any()
