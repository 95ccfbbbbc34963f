"""Texts to ids, and ids to texts."""

import json
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import write_modules
from tiny_models import CONFIGS
from tiny_tokenizers import TEXTS, write_byte_tokenizer, write_tokenizer
from tokenizers import Tokenizer, normalizers

from fastattn import models, train
from fastattn.models import ModelError
from fastattn.models import _text as tokenizing
from fastattn.models._text import Said
from fastattn.sentence_transformers import SentenceTransformer


def test_long_texts_are_cut(encoder):
    model = models.load(encoder)
    long = "the cat " * 50
    assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [32, 4]  # special tokens included
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    model = models.load(encoder)
    assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [9, 4]
    assert np.isfinite(model.encode([long])).all()
    (encoder / "sentence_bert_config.json").unlink()
    for most, length in ((8, 8), (10**30, 32), (33, 32)):  # no limit is a large one
        (encoder / "tokenizer_config.json").write_text(f'{{"model_max_length": {most}}}')
        assert len(models.load(encoder).text.encode([long])[0]) == length
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    assert models.load(encoder).text.limit == 9  # which counts, where both say one
    (encoder / "tokenizer_config.json").unlink()
    for wrong, message in (('"9"', "is '9'; expected an integer of at least 1"), (2**64, "is above")):
        (encoder / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {wrong}}}')
        with pytest.raises(ModelError, match=f"'max_seq_length' {message}"):
            models.load(encoder).encode(["the"])


def test_settings_of_a_module_count_only_with_modules_json(encoder):
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    (encoder / "modules.json").unlink()
    model = models.load(encoder)
    assert model.max_seq_length == 32
    assert model.text.encode(["THE the"]) == [[1, 3, 4, 2]]


def test_a_decoder_has_no_attribute_that_can_be_set(writer):
    model = models.load(writer)
    for name in ("max_seq_length", "stop"):
        with pytest.raises(AttributeError, match=rf"^Decoder.{name} cannot be set: weights change by with_s"):
            setattr(model, name, 3)


@pytest.mark.parametrize("kind", ["t5", "mt5", "gemma3_text", "qwen3"])
def test_long_texts_are_cut_of_models_without_a_limit(kind, tmp_path):
    tiny.write(tmp_path, kind, max_position_embeddings=None)
    write_tokenizer(tmp_path)
    write_modules(tmp_path)
    long = "the cat " * 100
    for most, length in (("null", 202), (8, 8), (10**30, 202), (2**63 - 1, 202)):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"model_max_length": {most}}}')
        model = models.load(tmp_path)
        assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [length, 4]
        assert model.max_seq_length == (length if most == 8 else None)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    assert models.load(tmp_path).max_seq_length == 9


def test_prompts_of_a_decoder_without_a_limit_stay_whole(tmp_path):
    tiny.write(tmp_path, "llama")
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    assert len(models.load(tmp_path).text.encode(["the cat " * 100])[0]) == 202


@pytest.mark.parametrize("name", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_older_names_of_the_settings(name, encoder):
    (encoder / f"sentence_{name}_config.json").write_text('{"max_seq_length": 9}')
    for first in ("", "{}"):
        if first:
            (encoder / "sentence_bert_config.json").write_text(first)
        assert models.load(encoder).max_seq_length == 9
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    assert models.load(encoder).max_seq_length == 7


@pytest.mark.parametrize("key", ["tokenizer_args", "processor_kwargs"])
def test_settings_of_the_tokenizer(key, encoder):
    inner = {"model_max_length": 6, "truncation_side": "left", "padding_side": "left"}
    said = json.dumps({"max_seq_length": 9, key: inner})
    (encoder / "sentence_bert_config.json").write_text(said)
    assert models.load(encoder).text.encode(["the cat sat on a mat"]) == [[1, 8, 10, 5, 11, 2]]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_the_side_where_texts_are_cut(place, encoder):
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    assert models.load(encoder).text.encode(["the cat sat"]) == [[1, 4, 6, 2]]
    path = encoder / place
    values = json.loads(path.read_text()) if path.is_file() else {"truncation_side": "left"}
    if "truncation" in values:
        values["truncation"]["direction"] = "Left"
    path.write_text(json.dumps(values))
    assert models.load(encoder).text.encode(["the cat sat"]) == [[1, 6, 8, 2]]


@pytest.mark.parametrize(
    ("key", "value", "text", "ids"),
    [
        ("do_lower_case", False, "The CAT", [3, 3]), ("strip_accents", False, "the cát", [4, 3]),
        ("tokenize_chinese_chars", False, "the 日cat", [4, 3]),
    ],
)  # fmt: skip
def test_what_is_done_with_letters(key, value, text, ids, encoder):
    """tokenizer_config.json counts, unless the class of the tokenizer does not know such keys."""
    path = encoder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.save(str(path))
    (plain,) = models.load(encoder).text.encode([text])
    for kind, expected in (("BertTokenizer", [1, *ids, 2]), ("PreTrainedTokenizerFast", plain)):
        (encoder / "tokenizer_config.json").write_text(json.dumps({key: value, "tokenizer_class": kind}))
        assert models.load(encoder).text.encode([text]) == [expected]
    assert plain != [1, *ids, 2]


def test_what_is_done_with_letters_of_other_tokenizers(encoder):
    said = {"do_lower_case": True, "tokenizer_class": "AlbertTokenizer"}
    (encoder / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"'do_lower_case' is True, unlike in tokenizer.json"):
        models.load(encoder).encode(["the"])
    (encoder / "tokenizer_config.json").write_text(json.dumps({**said, "do_lower_case": False}))
    assert models.load(encoder).text.encode(["the"]) == [[1, 4, 2]]


def test_no_room_for_the_special_tokens(encoder):
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 2}')
    assert models.load(encoder).text.encode(["the cat", ""]) == [[1, 2]] * 2
    with pytest.raises(ModelError, match=r"bert_config.json cuts texts to 2; expected at least .* adds, 3"):
        list(models.load(encoder).text.encoded_pairs([("the", "cat")]))
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 1}')
    with pytest.raises(ModelError, match=r"bert_config.json cuts texts to 1; expected at least .* adds, 2"):
        models.load(encoder).encode(["the cat"])


class Watched:
    """A tokenizer that notes what it gets, and in which thread."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.batches, self.threads = [], []

    def encode_batch(self, texts):
        self.batches.append(texts)
        self.threads.append(threading.current_thread())
        return self.tokenizer.encode_batch(texts)


@pytest.fixture
def watched(encoder):
    """A model, and its tokenizer, watched."""
    model = models.load(encoder)
    tokenizer = Watched(model.text.tokenizer)
    vars(model.text)["tokenizer"] = tokenizer
    return model, tokenizer


def test_texts_are_tokenized_some_at_a_time(watched, monkeypatch):
    """Encodings are dropped early: they are many times as large as the text."""
    model, tokenizer = watched
    monkeypatch.setattr(tokenizing, "_BATCH_CHARACTERS", 100)
    texts = [" ".join(TEXTS[:n]) for n in (1, 5, 0, 2, 3) * 20]
    expected = [encoding.ids for encoding in tokenizer.tokenizer.encode_batch(texts)]
    assert model.text.encode(texts) == expected
    assert [line for batch in tokenizer.batches for line in batch] == texts
    assert all(len(batch) == 1 or sum(map(len, batch)) <= 100 for batch in tokenizer.batches)
    assert len(tokenizer.batches) < 80
    assert model.text.encode([]) == []


def test_texts_of_no_characters_are_tokenized_some_at_a_time(watched, monkeypatch):
    model, tokenizer = watched
    monkeypatch.setattr(tokenizing, "_BATCH_TEXTS", 10)
    assert model.text.encode([""] * 25) == [[1, 2]] * 25
    assert list(map(len, tokenizer.batches)) == [10, 10, 5]


def test_a_tokenizer_of_another_model(encoder):
    """Its ids may be above those that the model has; an error says so before anything is computed."""
    tiny.write(encoder, "bert", tiny.tensors("bert", {**CONFIGS["bert"], "vocab_size": 6}), vocab_size=6)
    model = models.load(encoder)
    assert model.encode(["the a"]).shape == (1, 24)
    with pytest.raises(ModelError, match=r"tokenizer.json gives a token the id 8; expected less than 'vo"):
        model.encode(["the a", "the sat"])


def test_long_texts_are_tokenized_where_ctrl_c_does_not_wait_for_them(watched):
    model, tokenizer = watched
    long = "the cat " * 2000
    assert model.text.encode(["the cat", "a dog"]) == [[1, 4, 6, 2], [1, 5, 7, 2]]
    assert model.text.encode([long]) == [[1, *(4, 6) * 15, 2]]
    short, other = tokenizer.threads
    assert short is threading.main_thread()
    assert other is not short
    tokenizer.tokenizer = None
    with pytest.raises(AttributeError, match="NoneType"):  # what is raised there is raised here
        model.text.encode([long])


def test_a_tokenizer_that_names_what_it_does_not_have(tmp_path):
    """The library panics, which is no Exception."""
    tiny.write(tmp_path, "bert")
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    special = values["post_processor"]["special_tokens"]
    special["other"] = special.pop("<s>")
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"tokenizer.json (cannot encode a text|is no tokenizer): "):
        models.load(tmp_path).encode(["the cat"])


def test_threads_may_tokenize_at_once(encoder):
    model = models.load(encoder)
    texts = ["the cat " * 20_000, "a dog"]
    expected = model.text.encode(texts)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: model.text.encode(texts), range(8))) == [expected] * 8


def test_texts_are_strings(encoder):
    encode = models.load(encoder).text.encode
    scalar = SimpleNamespace(as_py=None)  # as pyarrow's
    for wrong, message in (
        ("one text", r"texts is of type str; expected several, as"),
        (None, r"texts is of type NoneType; expected several"),
        (["one", 2], r"texts\[1\] is 2; expected a string"),
        ([scalar], r"texts\[0\] is .*; expected a string, as its column's .to_pylist"),
    ):
        with pytest.raises(TypeError, match=message):
            encode(wrong)


class Table:
    """As tables of pandas, polars and others are: the names of columns come one by one."""

    columns = property(lambda self: ["body"])

    def __iter__(self):
        return iter(self.columns)

    def __array__(self, dtype=None, copy=None):
        return np.array([["the cat"], ["a dog"]])


CALLS = {
    "encode": lambda folder, x: models.load(folder).encode(x),
    "tokenize": lambda folder, x: models.load(folder).tokenize(x),
    "ids": lambda folder, x: models.load(folder).text.encode(x),
    "the facade": lambda folder, x: SentenceTransformer(folder).encode(x),
    "tuning": lambda folder, x: train.ContrastiveTuning(models.load(folder)).loss((x, ["the cat", "a dog"])),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_several_texts_are_in_order_and_no_table(call, encoder):
    (encoder / "lines").write_text("the cat\na dog\n")
    with (encoder / "lines").open() as file:
        for wrong in (Table(), {"the cat": 1, "a dog": 2}, {"the cat", "a dog"}, file, {"a": "the"}.values()):
            with pytest.raises((TypeError, ValueError), match=r"\(\): .+; expected"):
                call(encoder, wrong)
    for several in (("the cat", "a dog"), np.array(["the cat", "a dog"]), deque(["the cat", "a dog"])):
        call(encoder, several)
    call(encoder, iter(["the cat", "a dog"]))


def test_tokenizers_that_are_none(encoder, monkeypatch):
    model = models.load(encoder)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ImportError, match=r"models need tokenizers: pip install tokenizers"):
            model.encode(["one"])
    (encoder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer.json is no tokenizer"):
        model.encode(["one"])
    (encoder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        model.encode(["one"])


@pytest.mark.parametrize("text", ["plain", "Grüße an 日本 und 😀!", " two  spaces ", "\n\n"])
def test_text_is_streamed_in_whole_characters(text, writer):
    """With one token a byte, a character comes with its last byte, and nothing before."""
    model = models.load(writer)
    prompt, ids = model.text.encode(["Once ", text])
    assert len(ids) == len(text.encode())
    taken = 0

    def counted():
        nonlocal taken
        for token in ids:
            taken += 1
            yield token

    seen = ""
    for piece in model.text.stream(prompt, counted()):
        seen += piece
        assert len(seen.encode()) == taken
    assert seen == text


def test_bytes_that_are_no_text_do_not_hold_back_what_follows(writer):
    model = models.load(writer)
    ids = model.text.encode(["é"])[0][:1] * 9 + model.text.encode(["end"])[0]
    pieces = list(model.text.stream([], ids))
    assert "".join(pieces).endswith("end")
    assert len(pieces) >= 5


def test_special_tokens_in_a_row_are_not_decoded_again_and_again(writer, monkeypatch):
    text, sizes, decoded = models.load(writer).text, [], Said._text
    text.tokenizer.add_special_tokens(["<none>"])
    none = text.tokenizer.token_to_id("<none>")

    def counted(self, first, last=None):
        sizes.append(len(self._tokens[first:last]))
        return decoded(self, first, last)

    monkeypatch.setattr(Said, "_text", counted)
    prompt, (first, *rest) = text.encode(["Once", "é!"])
    assert "".join(text.stream(prompt, [first, *[none] * 100, *rest])) == "é!"
    assert max(sizes) < 10


def test_streams_of_any_bytes_are_their_text(tmp_path):
    """Valid characters, cut ones and stray bytes, in any order and in tokens of one or more bytes."""
    tiny.write(tmp_path, "gpt2")
    tokenizer = write_byte_tokenizer(tmp_path, ["Ã ©", "ð Ł", "ĺ Ģ", "a ð", "© ð"])
    rng = np.random.default_rng(0)
    alphabet = tokenizer.get_vocab()
    pieces = [tokenizer.encode(text).ids for text in ("é", "😀", "日", "a", "éa", "é😀")]
    stray = [[i] for byte, i in alphabet.items() if len(byte) > 1 or tokenizer.decode([i]) == "\ufffd"]
    text = models.load(tmp_path).text
    for _ in range(1000):
        chosen = [pieces[i] if i < len(pieces) else stray[rng.integers(len(stray))] for i in
                  rng.integers(0, len(pieces) + 3, rng.integers(1, 12))]  # fmt: skip
        ids = [token for piece in chosen for token in piece][: int(rng.integers(1, 30))]
        assert "".join(text.stream([], ids)) == tokenizer.decode(ids)


class Broken:
    """An integer by its class, which fails when it is asked for its value."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("nothing there")


def test_ids_become_texts(writer):
    model = models.load(writer)
    texts = ["Once, a café", "", "日本"]
    ids = model.text.encode(texts)
    assert model.text.decode(ids) == texts
    assert model.text.decode([]) == []
    prompts = model.text.encode(["Once", "a"])
    free = np.stack(list(model.generate(prompts, 8, stop=())), axis=1)
    batch = np.stack(list(model.generate(prompts, 8, stop=free[0, 2])), axis=1)
    assert (batch == -1).any()
    rows = [row[row >= 0].tolist() for row in batch]
    assert model.text.decode(batch) == [model.text.tokenizer.decode(row) for row in rows]
    pieces, wanted = (list(model.text.stream(prompts[0], ids)) for ids in (batch[0], rows[0]))
    assert pieces == wanted
    stream, decode = model.text.stream, model.text.decode
    for call, error, message in (
        (lambda: decode(ids[0]), TypeError, r"decode\(\): sequences is not a list of sequences of ids"),
        (lambda: decode([[1, -2]]), ValueError, r"decode\(\): sequences is -2; expected -1 to 4294967295"),
        (lambda: list(stream([Broken()], [])), TypeError, r"stream\(\): prompt is .*Broken.*; expected an i"),
        (lambda: list(stream(prompts[0], model.generate(prompts, 8))), TypeError,
            r"stream\(\): ids has an array of shape \(2,\).*; expected ids"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_a_words_space_is_kept_between_prompt_and_text(encoder):
    """Decoders drop a space at the beginning; what follows on a prompt is no beginning."""
    text = models.load(encoder).text
    prompt, ids = text.encode(["the cat", "sat on"])
    assert "".join(text.stream(prompt[:-1], ids[1:-1])) == " sat on"
