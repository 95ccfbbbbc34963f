"""From texts to vectors and on, and from ids to texts: tokenizers and pooling."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny_models as tiny
from implementations import each_isa, forced
from tiny_models import CONFIGS
from tiny_tokenizers import TEXTS, WORDS, write_byte_tokenizer, write_tokenizer

from fastattn import models
from fastattn.models import ModelError, _encoder
from fastattn.models import _text as tokenizing
from fastattn.models._sentences import Pooling


def write_pooling(folder, config, normalize=False, prefix="sentence_transformers.models"):
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{prefix}.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{prefix}.Pooling"})
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{prefix}.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.fixture
def encoder(tmp_path):
    """The folder of a tiny BERT that knows WORDS."""
    tiny.write(tmp_path, "bert")
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """The folder of a tiny GPT-2 over bytes, which writes them at random."""
    folder = tmp_path_factory.mktemp("gpt2")
    changes = {"vocab_size": 256, "n_positions": 64}
    config = {**CONFIGS["gpt2"], **changes}
    tiny.write(folder, "gpt2", tiny.tensors("gpt2", config), **changes)
    write_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "lasttoken"])
def test_vectors_are_pooled_hidden_states(mode, encoder, implementation):
    model = models.load(encoder)
    got = model.embed(TEXTS, pooling=mode, batch_size=2)
    assert got.shape == (5, 24)
    assert got.dtype == np.float32
    for text, vector in zip(TEXTS, got, strict=True):
        ids = [1, *(WORDS.index(word) for word in text.split()), 2]
        hidden = model(ids)[0]
        expected = {
            "mean": hidden.mean(axis=0),
            "cls": hidden[0],
            "max": hidden.max(axis=0),
            "lasttoken": hidden[-1],
        }
        np.testing.assert_allclose(vector, expected[mode], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
@each_isa
def test_a_vector_has_the_same_bits_in_any_company(isa, mode, encoder):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS[4:], count)) for count in [1, 2, 3, 4, 5, 6, 7, 12, 17, 25] * 3]
    model = models.load(encoder)
    with forced(isa):
        alone = np.concatenate([model.embed([text], pooling=mode, normalize=True) for text in texts])
        for batch_size in (3, 32):
            together = model.embed(texts, pooling=mode, normalize=True, batch_size=batch_size)
            np.testing.assert_array_equal(together, alone)


def test_pooling_of_texts_of_any_length(implementation):
    rows, begins = (
        np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32),
        np.array([0, 2, 2, 6, 6]),
    )
    expected = {
        "mean": [rows[:2].mean(axis=0), 0 * rows[0], rows[2:].mean(axis=0), 0 * rows[0]],
        "cls": [rows[0], 0 * rows[0], rows[2], 0 * rows[0]],
        "max": [rows[:2].max(axis=0), 0 * rows[0], rows[2:].max(axis=0), 0 * rows[0]],
        "lasttoken": [rows[1], 0 * rows[0], rows[5], 0 * rows[0]],
    }
    for mode, vectors in expected.items():
        np.testing.assert_allclose(Pooling(mode)(rows, begins), vectors, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(Pooling(mode)(rows[:0], np.zeros(3, np.int64)), np.zeros((2, 5)))
        assert Pooling(mode)(rows[:0], np.zeros(1, np.int64)).shape == (0, 5)
    assert np.isfinite(Pooling("mean", normalize=True)(rows, begins)).all()


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": False}, "max"),
        ({"pooling_mode": "cls", "embedding_dimension": 24}, "cls"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_folder_says_how_to_pool(config, mode, normalize, encoder):
    write_pooling(encoder, config, normalize)
    model = models.load(encoder)
    assert model.pooling == Pooling(mode, normalize)
    got = model.embed(TEXTS)
    np.testing.assert_array_equal(got, model.embed(TEXTS, pooling=mode, normalize=normalize))
    assert np.allclose(np.linalg.norm(got, axis=1), 1) == normalize


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": ["mean"]},
    ],
)
def test_a_pooling_that_is_not_known(config, encoder):
    write_pooling(encoder, config)
    with pytest.raises(ModelError, match=r"1_Pooling/config.json says .*; expected one of"):
        models.load(encoder)


@pytest.mark.parametrize("path", ["..", ".", "../..", "/etc", "a/b", "1_Pooling/../..", None])
def test_a_pooling_outside_of_the_folder(path, encoder):
    modules = [{"type": "sentence_transformers.models.Pooling", "path": path}]
    (encoder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules.json: .* of Pooling is .*; expected a folder beside it"):
        models.load(encoder)


def test_texts_as_the_folder_says(encoder):
    """Prompt, strip, lower: as sentence-transformers does it."""
    plain = models.load(encoder).embed(TEXTS)
    np.testing.assert_array_equal(models.load(encoder).embed([f" \n{text}\t" for text in TEXTS]), plain)
    upper = [text.upper() for text in TEXTS]
    assert (models.load(encoder).embed(upper) != plain).any()
    (encoder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    np.testing.assert_array_equal(models.load(encoder).embed(upper), plain)
    path = encoder / "config_sentence_transformers.json"
    path.write_text('{"prompts": {"query": "The dog "}, "default_prompt_name": null}')
    np.testing.assert_array_equal(models.load(encoder).embed(upper), plain)
    path.write_text('{"prompts": {"query": "The dog "}, "default_prompt_name": "query"}')
    prompted = models.load(encoder).embed(upper)
    path.unlink()
    model = models.load(encoder)
    np.testing.assert_array_equal(prompted, model.embed([f"the dog {text}" for text in TEXTS]))
    path.write_text('{"default_prompt_name": "query"}')
    with pytest.raises(ModelError, match=r"'default_prompt_name' is 'query'; expected one of 'prompts'"):
        models.load(encoder)
    path.write_text('{"prompts": {"query": "the "}, "default_prompt_name": "query"}')
    write_pooling(encoder, {"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(ModelError, match=r"'include_prompt' is False; only True is supported where there is"):
        models.load(encoder)


def test_a_module_that_is_not_known(encoder):
    path = encoder / "modules.json"
    path.write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    with pytest.raises(ModelError, match=r"modules.json has a module 'Dense'; expected Transformer, Pooling"):
        models.load(encoder)
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"modules.json holds a dict; expected a list"):
        models.load(encoder)
    path.write_text('[{"type": "a.Pooling", "path": "elsewhere"}]')
    with pytest.raises(ModelError, match=r"elsewhere/config.json is missing"):
        models.load(encoder)


def test_long_texts_are_cut(encoder):
    model = models.load(encoder)
    long = "the cat " * 50
    assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [32, 4]  # special tokens included
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    model = models.load(encoder)
    assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [9, 4]
    assert np.isfinite(model.embed([long])).all()
    for wrong, message in (('"9"', "is '9'; expected an integer of at least 1"), (2**64, "is above")):
        (encoder / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {wrong}}}')
        with pytest.raises(ModelError, match=f"'max_seq_length' {message}"):
            models.load(encoder).embed(["the"])


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


def test_long_texts_are_tokenized_where_ctrl_c_does_not_wait_for_them(watched):
    model, tokenizer = watched
    long = "the cat " * 2000
    assert model.text.encode(["the cat", "a dog"]) == [[1, 4, 6, 2], [1, 5, 7, 2]]
    assert model.text.encode([long]) == [[1, *(4, 6) * 15, 2]]
    short, other = tokenizer.threads
    assert short is threading.main_thread()
    assert other is not short
    tokenizer.tokenizer = None
    with pytest.raises(ModelError, match="NoneType"):  # what is raised there is raised here
        model.text.encode([long])


def test_threads_may_tokenize_at_once(encoder):
    model = models.load(encoder)
    texts = ["the cat " * 20_000, "a dog"]
    expected = model.text.encode(texts)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: model.text.encode(texts), range(8))) == [expected] * 8


def test_embed_reads_texts_as_it_needs_them(watched, monkeypatch):
    model, tokenizer = watched
    monkeypatch.setattr(tokenizing, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(_encoder, "_WINDOW_TEXTS", 8)
    texts = [f"{TEXTS[n % 5]} {TEXTS[n % 3]}" for n in range(100)]
    taken = []
    stream = model.embed_stream((taken.append(line) or line for line in texts), batch_size=4)
    assert not taken
    sizes, ahead = [], 0
    for vectors in stream:
        sizes.append(len(vectors))
        ahead = max(ahead, len(taken) - sum(sizes))
    assert sizes == [8] * 12 + [4]
    assert taken == texts
    assert ahead <= 100 / min(map(len, texts)) + 1  # a batch of the tokenizer's, and one text more
    assert max(map(len, tokenizer.batches)) < 20


def test_windows_end_with_whole_batches(encoder, monkeypatch):
    model = models.load(encoder)
    for texts, tokens, batch_size, sizes in [
        (5, 10**6, 3, [6, 6, 1]),
        (10**6, 20, 2, [4, 4, 4, 1]),
        (1, 1, 9, [9, 4]),
    ]:
        monkeypatch.setattr(_encoder, "_WINDOW_TEXTS", texts)
        monkeypatch.setattr(_encoder, "_WINDOW_TOKENS", tokens)
        stream = model.embed_stream(["the cat on the mat"] * 13, batch_size=batch_size)
        assert [len(vectors) for vectors in stream] == sizes


def test_vectors_stay_in_order_across_windows(encoder, monkeypatch):
    """The vectors are the same where a batch is one text."""
    model = models.load(encoder)
    texts = [TEXTS[n] for n in np.random.default_rng(0).integers(0, 5, 50)]
    expected = model.embed(texts, batch_size=1)
    monkeypatch.setattr(_encoder, "_WINDOW_TEXTS", 7)
    np.testing.assert_array_equal(model.embed(texts, batch_size=1), expected)
    np.testing.assert_array_equal(np.concatenate(list(model.embed_stream(texts, batch_size=1))), expected)
    np.testing.assert_allclose(model.embed(texts, batch_size=4), expected, rtol=1e-5, atol=1e-5)
    assert list(model.embed_stream([])) == []


def test_embed_refuses(encoder):
    model = models.load(encoder)
    for function in (model.embed, model.embed_stream, model.text.encode):
        with pytest.raises(TypeError, match=r"texts is of type str; expected several, as"):
            function("one text")
        with pytest.raises(TypeError, match=r"texts is of type NoneType; expected several"):
            function(None)
        with pytest.raises(TypeError, match=r"texts has one of type int; expected strings"):
            function(["one", 2])
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        model.embed(["one"], batch_size=0)
    with pytest.raises(ValueError, match="pooling is 'last'; expected one of mean, cls, max"):
        model.embed(["one"], pooling="last")
    with pytest.raises(ValueError, match=r"embed_stream\(\): pooling is 'last'"):  # before a vector is wanted
        model.embed_stream(["one"], pooling="last")
    done = []
    with pytest.raises(TypeError, match="texts has one of type int; expected strings"):
        model.embed([*TEXTS, 3], batch_size=1, progress=done.append)
    assert not done
    assert model.embed([]).shape == (0, 24)
    assert model.embed(text for text in TEXTS).shape == (5, 24)


def test_progress_is_told(encoder):
    done = []
    models.load(encoder).embed(TEXTS, batch_size=2, progress=done.append)
    assert done == [2, 2, 1]


def test_tokenizers_that_are_none(encoder):
    model = models.load(encoder)
    (encoder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer.json is no tokenizer"):
        model.embed(["one"])
    (encoder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        model.embed(["one"])


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
    with pytest.raises(TypeError, match=r"decode\(\): sequences is no list of sequences of ids"):
        model.text.decode(ids[0])
    with pytest.raises(ValueError, match=r"decode\(\): sequences is -2; expected -1 to 4294967295"):
        model.text.decode([[1, -2]])
    with pytest.raises(TypeError, match=r"stream\(\): prompt is .*Broken.*; expected an integer"):
        list(model.text.stream([Broken()], []))
    with pytest.raises(TypeError, match=r"stream\(\): ids has an array of shape \(2,\).*; expected ids"):
        list(model.text.stream(prompts[0], model.generate(prompts, 8)))


def test_a_words_space_is_kept_between_prompt_and_text(encoder):
    """Decoders drop a space at the beginning; what follows on a prompt is no beginning."""
    text = models.load(encoder).text
    prompt, ids = text.encode(["the cat", "sat on"])
    assert "".join(text.stream(prompt[:-1], ids[1:-1])) == " sat on"


def test_a_missing_library_is_named(encoder, monkeypatch):
    model = models.load(encoder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"models need tokenizers: pip install tokenizers"):
        model.embed(["one"])
