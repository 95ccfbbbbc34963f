"""GLiNER: probabilities of spans by their definition, which spans are chosen, bits, and what is refused."""

import json
import pickle
import sys

import numpy as np
import pytest
import tiny_gliner as tiny
from implementations import COMPILED, each_isa, forced
from model_folders import refused

from fastattn import models
from fastattn.__main__ import main
from fastattn.models import Entity, EntityRecognizer

LABELS = ["city", "a thing", "the_name"]
TEXTS = ["the city, Paris.", "", "x", "a-b the city_of the best " * 6, " \n", "the the city is no city!"]


def scores(model, texts, labels=LABELS, **options):
    return [each for *_, each in model._scores(texts, labels, options.get("batch_size"))]


def expected_of(values, threshold, flat, multi_label):
    """Choose spans as the paper says: the best one first, then each that fits to those chosen."""
    spans = [(-values[place], place) for place in np.ndindex(values.shape) if values[place] > threshold]
    chosen = []
    for value, (start, width, label) in sorted(spans, key=lambda span: span[0]):
        keys = set(range(start, start + width + 1))
        fits = True
        for _, (other, other_width, _) in chosen:
            theirs = set(range(other, other + other_width + 1))
            nested = keys <= theirs or theirs <= keys
            fits &= multi_label if keys == theirs else not keys & theirs or (nested and not flat)
        if fits:
            chosen.append((value, (start, width, label)))
    return sorted((place for _, place in chosen), key=lambda place: place[0])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_rnn_layers": 0, "embed_ent_token": False},
        {"num_rnn_layers": 2, "hidden_size": 24, "max_width": 30},
        {"model_type": None, "max_len": 4, "max_width": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_probabilities_by_their_definition(changes, dtype, tmp_path, implementation):
    config, weights = tiny.write(tmp_path, **changes)
    model = models.load(tmp_path, dtype=dtype)
    assert isinstance(model, EntityRecognizer)
    found = scores(model, TEXTS)
    assert np.concatenate([each.ravel() for each in found]).std() > 0.1
    for text, got in zip(TEXTS, found, strict=True):
        expected = tiny.probabilities(config, weights, text, LABELS)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("layers", [0, 1])
def test_a_word_without_a_token_moves_no_other(layers, tmp_path):
    """Each word's vector is its own; the one without has zeros."""
    config, weights = tiny.write(tmp_path, num_rnn_layers=layers)
    model = models.load(tmp_path)
    text = f"the {tiny.NO_TOKEN} city of {tiny.NO_TOKEN}{tiny.NO_TOKEN} x"
    (got,) = scores(model, [text])
    assert len(got) == 7
    expected = tiny.probabilities(config, weights, text, LABELS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_width", [10**6, 2**40])
def test_a_width_takes_no_more_than_the_words_of_a_text(max_width, tmp_path, implementation):
    config, weights = tiny.write(tmp_path, max_width=max_width)
    model = models.load(tmp_path)
    for text, got in zip(TEXTS, scores(model, TEXTS), strict=True):
        assert got.shape == (len(got), len(got), len(LABELS))
        expected = tiny.probabilities(config, weights, text, LABELS)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.7, 1.0])
def test_spans_that_are_chosen(threshold, multi_label, flat, tmp_path, implementation):
    config, _ = tiny.write(tmp_path)
    model = models.load(tmp_path)
    found = model.entities(TEXTS, LABELS, threshold, flat, multi_label)
    for text, values, entities in zip(TEXTS, scores(model, TEXTS), found, strict=True):
        words = tiny.words_of(text, config)
        expected = []
        for start, width, label in expected_of(values, threshold, flat, multi_label):
            begin, end = words[start].start(), words[start + width].end()
            score = float(values[start, width, label])
            expected.append(Entity(begin, end, text[begin:end], LABELS[label], score))
        assert entities == expected
    assert threshold < 1 or found == [[]] * len(TEXTS)
    assert threshold > 0.5 or max(map(len, found)) > 5  # one span of the longest text would show little
    assert model.entities(TEXTS, [*LABELS, "city"], threshold, flat, multi_label) == found
    alone = model.entities(TEXTS[0], LABELS, threshold, flat, multi_label)
    assert alone == model.entities([TEXTS[0]], LABELS, threshold, flat, multi_label)[0]


@each_isa
def test_bits_do_not_depend_on_threads_and_other_texts(isa, tmp_path):
    tiny.write(tmp_path, num_rnn_layers=2)
    model = models.load(tmp_path)
    with forced(isa, num_threads=1):
        expected = scores(model, TEXTS)
    for threads in (1, 3):
        with forced(isa, num_threads=threads):
            for size in (1, 2, None):
                for got, own in zip(scores(model, TEXTS[::-1], batch_size=size), expected[::-1], strict=True):
                    assert got.tobytes() == own.tobytes()


def test_other_tensors_files_and_types(tmp_path, implementation):
    config, weights = tiny.write(tmp_path / "a")
    model = models.load(tmp_path / "a")
    found = model.entities(TEXTS, LABELS)
    assert pickle.loads(pickle.dumps(model)).entities(TEXTS, LABELS) == found
    state = model.state_dict()
    assert state.keys() == weights.keys()
    changed = {name: 1.2 * x if "out_project" in name else x for name, x in state.items()}
    other = model.with_state_dict(changed)
    for text, got in zip(TEXTS, scores(other, TEXTS), strict=True):
        expected = tiny.probabilities(config, changed, text, LABELS)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    models.save(model, tmp_path / "b")
    assert not (tmp_path / "b/config.json").exists()
    assert models.load(tmp_path / "b").entities(TEXTS, LABELS) == found
    for options in ({"dtype": "bfloat16"}, {"weights_dtype": "int8"}):
        other = scores(models.load(tmp_path / "a", **options), TEXTS)
        for got, own in zip(other, scores(model, TEXTS), strict=True):
            np.testing.assert_allclose(got, own, rtol=0, atol=0.1)


def test_a_limit_of_tokens_cuts_words_and_refuses_prompts_beyond_it(tmp_path):
    """Words past the limit have no vector, as in the library; a label past it cannot be found."""
    tiny.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 24}')
    model = models.load(tmp_path)
    (got,) = scores(model, [TEXTS[3]])
    assert got.shape == (20, 3, 3)
    assert np.isfinite(got).all()
    with pytest.raises(models.ModelError, match="expected 9, one a label, within the 24 tokens of a text"):
        model.entities("x", [f"label{i}" for i in map(str, "abcdefghi")])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.entities("x", "city"), TypeError, "labels is"),
        (lambda m: m.entities("x", []), ValueError, "labels has none, or an empty one"),
        (lambda m: m.entities("x", ["a", " "]), ValueError, "labels has none, or an empty one"),
        (
            lambda m: m.entities("x", ["a", "<<ENT>>"]),
            ValueError,
            "labels has '<<ENT>>'; expected labels wit",
        ),
        (lambda m: m.entities("x", ["a <<SEP>>"]), ValueError, "expected labels without the mark '<<SEP>>'"),
        (lambda m: m.entities("x", [tiny.NO_TOKEN, "a"]), ValueError, r"labels has '.u200b', which gives no"),
        (lambda m: m.entities("x", ["a", tiny.NO_TOKEN]), ValueError, r"labels has '.u200b', which gives no"),
        (lambda m: m.entities(["x", 3], ["a"]), TypeError, r"texts\[1\] is 3; expected a string"),
        (
            lambda m: m.entities("x", ["a"], 1.5),
            ValueError,
            "threshold is 1.5; expected a number from 0 to 1",
        ),
        (lambda m: m.entities("x", ["a"], flat=1), TypeError, "flat is 1; expected True or False"),
        (lambda m: m.entities("x", ["a"], batch_size=0), ValueError, "batch_size is 0"),
    ],
    ids=range(11),
)
def test_arguments_that_do_not_fit(call, error, message, tmp_path):
    tiny.write(tmp_path)
    with pytest.raises(error, match=message) as raised:
        call(models.load(tmp_path))
    assert str(raised.value).startswith("entities(): ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span_mode": "token_level"}, "'span_mode' is 'token_level'; only 'markerV0' is supported"),
        ({"model_type": "gliner_bi_encoder_span"}, "expected one of gliner, gliner_uni_encoder_span"),
        ({"labels_encoder": "x"}, "'labels_encoder' is 'x'; only None is supported"),
        ({"subtoken_pooling": "mean"}, "'subtoken_pooling' is 'mean'; only 'first' is supported"),
        ({"words_splitter_type": "spacy"}, "'words_splitter_type' is 'spacy'"),
        ({"post_fusion_schema": "l2l"}, "'post_fusion_schema' is 'l2l'"),
        ({"fuse_layers": True}, "'fuse_layers' is True; only False is supported"),
        ({"encoder_config": None}, "'encoder_config' is missing; expected the sizes of the encoder"),
        ({"hidden_size": 15}, "'hidden_size' is 15; expected an even size"),
        ({"num_rnn_layers": 10**9}, "'num_rnn_layers' is 1000000000; expected at most"),
        ({"class_token_index": None}, "'class_token_index' is missing"),
        ({"max_width": 0}, "'max_width' is 0; expected an integer of at least 1"),
    ],
    ids=range(12),
)
def test_folders_that_are_refused(changes, message, tmp_path):
    config, _ = tiny.write(tmp_path)
    (tmp_path / "gliner_config.json").write_text(json.dumps({**config, **changes}))
    refused(tmp_path, "gliner_config.json", message)


def test_tensors_that_do_not_fit(tmp_path):
    config, _ = tiny.write(tmp_path)
    (tmp_path / "gliner_config.json").write_text(json.dumps({**config, "num_rnn_layers": 0}))
    refused(tmp_path, "'rnn.lstm.bias_hh_l0' is not known")
    (tmp_path / "gliner_config.json").write_text(json.dumps({**config, "hidden_size": 24}))
    refused(tmp_path, "does not fit gliner_config.json: 'rnn.lstm.weight_ih_l0' has shape (32, 16)")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    how = "gliner converts: from_pretrained(), save_pretrained(..., safe_serialization=True)"
    refused(tmp_path, "there is pytorch_model.bin", how)


@pytest.mark.skipif(not COMPILED, reason="of the command line, which is the same")
def test_the_command_embed_names_what_takes_it(tmp_path, monkeypatch, capsys):
    tiny.write(tmp_path / "a")
    (tmp_path / "x.txt").write_text("x\n")
    command = ["fastattn", "embed", "--model", str(tmp_path / "a"), str(tmp_path / "x.txt")]
    monkeypatch.setattr(sys, "argv", command)
    assert main() != 0
    said = capsys.readouterr().err
    assert "holds a EntityRecognizer (deberta-v2); expected an Encoder. Its entities finds spans" in said
