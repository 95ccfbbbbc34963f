"""Texts to vectors: what is pooled, the modules after it, prompts, bytes and similarities."""

import copy

import numpy as np
import pytest
import tiny_numpy
from implementations import each_isa, forced
from model_folders import write_modules, write_settings
from tiny_numpy import gelu, silu
from tiny_tokenizers import TEXTS, WORDS
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from fastattn import models
from fastattn.models import _encode_calls
from fastattn.models import _text as tokenizing
from fastattn.models._sentences import POOLINGS, Pooling

RNG = np.random.default_rng(1)
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@pytest.fixture
def folder(encoder):
    return encoder


def hidden_states(model, text):
    return model([1, *(WORDS.index(word) for word in text.split()), 2])[0].astype(np.float64)


def pooled(hidden, mode, skipped=0):
    """The definition of each mode, in float64; tokens are counted from the beginning of the text."""
    tokens, count = hidden[skipped:], len(hidden) - skipped
    weights = np.arange(skipped + 1, len(hidden) + 1)
    return {
        "cls": lambda: tokens[0],
        "max": lambda: tokens.max(axis=0),
        "mean": lambda: tokens.sum(axis=0) / count,
        "mean_sqrt_len_tokens": lambda: tokens.sum(axis=0) / np.sqrt(count),
        "weightedmean": lambda: weights @ tokens / weights.sum(),
        "lasttoken": lambda: hidden[-1],
    }[mode]()


def length(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("form", ["flag", "name"])
def test_vectors_are_pooled_hidden_states(form, mode, folder, implementation):
    flags = {flag: name == mode for name, flag in FLAGS.items()}
    write_modules(folder, pooling=flags if form == "flag" else {"pooling_mode": mode})
    model = models.load(folder)
    got = model.encode(TEXTS, batch_size=2)
    assert got.shape == (5, 24)
    assert got.dtype == np.float32
    for text, vector in zip(TEXTS, got, strict=True):
        np.testing.assert_allclose(vector, pooled(hidden_states(model, text), mode), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {FLAGS["max"]: True, FLAGS["cls"]: True, "word_embedding_dimension": 24},
        {"pooling_mode": ["cls", "max"], "embedding_dimension": 24},
    ],
)
def test_several_modes_stand_side_by_side(config, folder):
    write_modules(folder, pooling=config)
    model = models.load(folder)
    assert model.get_sentence_embedding_dimension() == 48
    hidden = hidden_states(model, "the cat")
    expected = np.concatenate([pooled(hidden, "cls"), pooled(hidden, "max")])
    np.testing.assert_allclose(model.encode("the cat"), expected, rtol=1e-6)


def test_a_folder_without_modules_has_the_mean(folder):
    model = models.load(folder)
    assert model.sentences.pooling == Pooling(("mean",), include_prompt=True)
    assert model.get_sentence_embedding_dimension() == 24
    expected = pooled(hidden_states(model, "a dog"), "mean")
    np.testing.assert_allclose(model.encode("a dog"), expected, rtol=1e-5, atol=1e-6)


def test_a_text_without_tokens_gives_zeros():
    rows = RNG.standard_normal((3, 4)).astype(np.float32)
    for mode in POOLINGS:
        got = Pooling((mode,))(rows, np.array([0, 0, 3, 3]))
        np.testing.assert_array_equal(got[[0, 2]], 0)
        assert got[1].any()
        without = Pooling((mode,), include_prompt=False)(rows, np.array([0, 1, 3]), prompt_length=2)
        np.testing.assert_array_equal(without, 0)


def test_a_tokenizer_may_find_no_token(folder):
    ids = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(tokenizer_models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    model = models.load(folder)
    got = model.encode(["", "the cat", " "])
    assert got[1].any()
    np.testing.assert_array_equal(got[[0, 2]], 0)
    np.testing.assert_array_equal(model.encode(""), 0)
    assert np.isfinite(model.encode(["", "a"], prompt="", normalize_embeddings=True)).all()


ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "SiLU": silu,
    "GELU": gelu,
}


def dense(n_in, n_out, name, **more):
    """A Dense module, and its tensors."""
    tensors = {"linear.weight": RNG.standard_normal((n_out, n_in)), "linear.bias": RNG.standard_normal(n_out)}
    config = {"in_features": n_in, "out_features": n_out, "bias": True, **more}
    config["activation_function"] = f"torch.nn.modules.activation.{name}"
    if not config["bias"]:
        del tensors["linear.bias"]
    if config.get("use_residual") and n_in != n_out:
        tensors["residual.weight"] = RNG.standard_normal((n_out, n_in))
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    return ("Dense", config, tensors), tensors


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("more", [{}, {"bias": False}, {"use_residual": True}])
@pytest.mark.parametrize("n_out", [24, 7])
def test_dense(n_out, more, name, folder, implementation):
    plain = models.load(folder).encode(TEXTS).astype(np.float64)
    module, tensors = dense(24, n_out, name, **more)
    write_modules(folder, module)
    model = models.load(folder)
    expected = ACTIVATIONS[name](plain @ tensors["linear.weight"].T + tensors.get("linear.bias", 0))
    if more.get("use_residual"):
        expected += plain if n_out == 24 else plain @ tensors["residual.weight"].T
    np.testing.assert_allclose(model.encode(TEXTS), expected, rtol=1e-4, atol=1e-4)
    assert model.get_sentence_embedding_dimension() == n_out


def layer_norm(n):
    vectors = {f"norm.{name}": RNG.standard_normal(n).astype(np.float32) for name in ("weight", "bias")}
    return ("LayerNorm", {"dimension": n}, vectors), vectors


def test_modules_in_a_row(folder, implementation):
    plain = models.load(folder).encode(TEXTS).astype(np.float64)
    (first, dense_tensors), (second, norm_tensors) = dense(24, 10, "Tanh"), layer_norm(10)
    write_modules(folder, ("Dropout", {"dropout": 0.1}), first, second, ("Normalize", None))
    model = models.load(folder)
    x = np.tanh(plain @ dense_tensors["linear.weight"].T + dense_tensors["linear.bias"])
    x = tiny_numpy.layer_norm(x, norm_tensors, "norm")
    np.testing.assert_allclose(model.encode(TEXTS), x / length(x), rtol=1e-4, atol=1e-5)
    wide = models.load(folder, dtype="float64").encode(TEXTS)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, x / length(x), rtol=1e-4, atol=1e-5)
    half = models.load(folder, dtype="bfloat16", weights_dtype="int8").encode(TEXTS)
    assert half.dtype == np.float32
    assert 0.9 < (half * wide).sum(axis=1).min() < 1


@pytest.mark.parametrize("mode", POOLINGS)
@each_isa
def test_a_vector_has_the_same_bits_in_any_company(isa, mode, folder, monkeypatch):
    """Bits are equal for every batch size, and every number of tokens that go through the layers together."""
    (first, _), (second, _) = dense(24, 10, "Tanh"), layer_norm(10)
    write_modules(folder, first, second, ("Normalize", None), pooling={"pooling_mode": mode})
    counts = [1, 2, 3, 4, 5, 6, 7, 12, 17, 25] * 3
    texts = [" ".join(RNG.choice(WORDS[4:], count)) for count in counts]
    model = models.load(folder)
    with forced(isa):
        alone = np.stack([model.encode(text, normalize_embeddings=True) for text in texts])
        for batch_size, tokens in ((None, 2048), (3, 2048), (32, 2048), (None, 40)):
            monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", tokens)
            together = model.encode(texts, batch_size=batch_size, normalize_embeddings=True)
            np.testing.assert_array_equal(together, alone)
        scores = model.similarity(alone, alone[:3])
        for i, row in enumerate(scores):
            np.testing.assert_array_equal(model.similarity(alone[i], alone[:3])[0], row)


def calls_of(model, monkeypatch):
    """Count the texts, and the tokens, that go through the layers at a time."""
    seen, hidden = [], type(model).hidden

    def noted(self, sequences, types=None):
        seen.append((len(sequences), sum(map(len, sequences))))
        return hidden(self, sequences, types)

    monkeypatch.setattr(type(model), "hidden", noted)
    return seen


def test_batches_hold_as_many_tokens_as_they_may(folder, monkeypatch):
    model = models.load(folder)
    calls = calls_of(model, monkeypatch)
    texts = ["the cat", "a dog ran", "the", "the cat sat on the mat", "a"]  # 4, 5, 3, 8, 3 tokens
    for tokens, batch_size, expected in (
        (9, None, [(2, 9), (1, 3), (1, 8), (1, 3)]),
        (11, None, [(2, 9), (2, 11), (1, 3)]),
        (5, None, [(1, 4), (1, 5), (1, 3), (1, 8), (1, 3)]),
        (100, 2, [(2, 9), (2, 11), (1, 3)]),
        (100, 5, [(5, 23)]),
    ):
        monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", tokens)
        model.encode(texts, batch_size=batch_size)
        assert calls == expected
        calls.clear()


def test_batches_of_texts_without_tokens_end(monkeypatch):
    monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", 10)
    assert [len(call) for call in _encode_calls.calls([[]] * 25, None)] == [10, 10, 5]
    assert [len(call) for call in _encode_calls.calls([[]] * 5, 3)] == [3, 2]


def test_texts_are_read_as_they_are_needed(folder, monkeypatch):
    monkeypatch.setattr(tokenizing, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", 30)
    model = models.load(folder)
    texts, taken = [f"{TEXTS[n % 5]} {TEXTS[n % 3]}" for n in range(100)], []
    seen, ahead = 0, 0
    for vectors in model._vectors((taken.append(text) or text for text in texts), model._checked({})):
        seen += len(vectors)
        ahead = max(ahead, len(taken) - seen)
    assert taken == texts
    assert seen == 100
    assert ahead <= 100 / min(map(len, texts)) + 1  # a batch of the tokenizer's, and one text more


def test_kinds_of_sentences(folder):
    model = models.load(folder)
    several = model.encode(TEXTS)
    assert model.encode("the cat").shape == (24,)
    np.testing.assert_array_equal(model.encode("the cat"), several[-1])
    np.testing.assert_array_equal(model.encode(text for text in TEXTS), several)
    np.testing.assert_array_equal(model.encode(np.array(TEXTS)), several)
    options = {"prompt": "", "batch_size": 2, "show_progress_bar": False, "truncate_dim": 10}
    np.testing.assert_array_equal(model.encode(TEXTS, **options), several[:, :10])
    assert model.encode([]).shape == (0, 24)


def test_a_bar_is_shown_only_if_asked(folder, capsys):
    model = models.load(folder)
    model.encode(TEXTS)
    model.encode(TEXTS, show_progress_bar=False)
    assert capsys.readouterr().err == ""
    model.encode(TEXTS, show_progress_bar=True)
    assert "5/5" in capsys.readouterr().err


def test_prompts(folder):
    prompts = {"query": "the dog ", "passage": "the tree ", "other": None}
    write_settings(folder, prompts=prompts, default_prompt_name="passage")
    model = models.load(folder)
    assert model.prompts == {"query": "the dog ", "document": "", "passage": "the tree ", "other": ""}
    assert model.default_prompt_name == "passage"

    def expected(prompt):
        return model.encode([prompt + text for text in TEXTS], prompt="")

    plain = expected("")
    for got, prompt in (
        (model.encode(TEXTS), "the tree "),
        (model.encode(TEXTS, prompt="a "), "a "),
        (model.encode(TEXTS, prompt_name="query"), "the dog "),
        (model.encode(TEXTS, prompt_name="query", prompt="a "), "a "),
        (model.encode_query(TEXTS), "the dog "),
        (model.encode_query(TEXTS, prompt="a "), "a "),
        (model.encode_document(TEXTS), ""),  # an empty one that is always there
        (model.encode_document(TEXTS, prompt_name="passage"), "the tree "),
    ):
        np.testing.assert_array_equal(got, expected(prompt))
    np.testing.assert_array_equal(model.encode_query("a dog"), model.encode("a dog", prompt_name="query"))
    assert (expected("the dog ") != plain).any()


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_prompt_may_not_count(mode, folder):
    write_modules(folder, pooling={"pooling_mode": mode, "include_prompt": False})
    write_settings(folder, prompts={"query": "the dog "})
    model = models.load(folder)
    got = model.encode_query(TEXTS)
    for text, vector in zip(TEXTS, got, strict=True):
        expected = pooled(hidden_states(model, f"the dog {text}"), mode, skipped=3)  # with <s>, without </s>
        np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-5)
    expected = pooled(hidden_states(model, "a dog"), mode)
    np.testing.assert_allclose(model.encode("a dog"), expected, rtol=1e-5, atol=1e-5)


def test_lower_case(folder):
    plain, upper = models.load(folder).encode(TEXTS), [text.upper() for text in TEXTS]
    assert (models.load(folder).encode(upper) != plain).any()
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    np.testing.assert_array_equal(models.load(folder).encode(upper), plain)


def test_properties(folder):
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    write_settings(folder, similarity_fn_name="dot", truncate_dim=7)
    model = models.load(folder)
    assert (model.max_seq_length, model.similarity_fn_name) == (5, "dot")
    assert model.get_sentence_embedding_dimension() == 7
    assert model.encode("a").shape == (7,)
    assert model.encode("a", truncate_dim=9).shape == (9,)
    assert model.encode("a", truncate_dim=99).shape == (24,)
    tokens = model.tokenize(["the cat", "the cat sat on the mat", "a"])
    np.testing.assert_array_equal(tokens["input_ids"], [[1, 4, 6, 2, 0], [1, 4, 6, 8, 2], [1, 5, 2, 0, 0]])
    np.testing.assert_array_equal(tokens["attention_mask"].sum(axis=1), [4, 5, 3])
    assert model(**tokens).shape == (3, 5, 24)
    assert model.tokenize([])["input_ids"].shape == (0, 0)


def test_max_seq_length_can_be_set(folder):
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    cut = models.load(folder)
    assert cut.max_seq_length == 4
    (folder / "sentence_bert_config.json").unlink()
    model = models.load(folder)
    whole = model.encode(TEXTS)
    model.max_seq_length = np.int64(4)
    assert model.max_seq_length == 4
    assert model.tokenize(TEXTS)["input_ids"].tolist() == cut.tokenize(TEXTS)["input_ids"].tolist()
    np.testing.assert_array_equal(model.encode(TEXTS), cut.encode(TEXTS))
    np.testing.assert_array_equal(model.with_state_dict(model.state_dict()).encode(TEXTS), cut.encode(TEXTS))
    model.max_seq_length = 32  # what the model takes
    np.testing.assert_array_equal(model.encode(TEXTS), whole)


def test_a_max_seq_length_leaves_room_for_a_token_and_fits_the_model(folder):
    model = models.load(folder)
    for wrong in (-1, 0, 2, 33, 2**99):  # <s> and </s> are two
        with pytest.raises(ValueError, match=rf"^Encoder\(\): max_seq_length is {wrong}; expected 3 to 32$"):
            model.max_seq_length = wrong
    for wrong in (4.0, None, True, "4"):
        with pytest.raises(TypeError, match=r"^Encoder\(\): max_seq_length is .*; expected an integer$"):
            model.max_seq_length = wrong
    assert model.max_seq_length == 32
    model.max_seq_length = 3
    assert model.text.encode(["the cat"]) == [[1, 4, 2]]


def test_a_call_that_has_begun_keeps_its_length(folder):
    model = models.load(folder)
    begun = model._encoded(iter(TEXTS))
    first = next(begun)
    model.max_seq_length = 3
    assert [first, *begun] == models.load(folder).text.encode(TEXTS)


@pytest.mark.parametrize("name", ["prompts", "default_prompt_name", "text", "program", "no_such_field"])
def test_nothing_else_of_a_model_can_be_set(name, folder):
    model = models.load(folder)
    for subject in (model, copy.copy(model)):
        with pytest.raises(AttributeError, match=rf"^Encoder.{name} cannot be set: .* max_seq_length can be"):
            setattr(subject, name, None)
        with pytest.raises(AttributeError, match=rf"^Encoder.{name} cannot be deleted"):
            delattr(subject, name)


def test_vectors_are_cut_before_they_are_scaled(folder):
    write_modules(folder, ("Normalize", None))
    model = models.load(folder)
    whole = model.encode(TEXTS)
    np.testing.assert_allclose(length(whole), 1, rtol=1e-6)
    np.testing.assert_array_equal(model.encode(TEXTS, truncate_dim=5), whole[:, :5])
    cut = model.encode(TEXTS, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(cut, whole[:, :5] / length(whole[:, :5]), rtol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_bytes(precision, folder):
    vectors = models.load(folder).encode(TEXTS)
    got = models.quantize_embeddings(vectors, precision)
    assert got.dtype == precision
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    codes = got.astype(np.float64) + (128 if precision == "int8" else 0)
    assert (codes.min(axis=0) == 0).all()
    assert (codes.max(axis=0) >= 254).all()
    back = low + (codes + 0.5) * (high - low) / 255
    assert (np.abs(back - vectors) <= 0.51 * (high - low) / 255 + 1e-6).all()


def test_encode_refuses(folder):
    model = models.load(folder)
    for name in ("encode", "encode_query"):
        for wrong, error, message in (
            (None, TypeError, " is of type NoneType; expected a string, or"),
            (b"text", TypeError, " is of type bytes; expected a string, or"),
            (3, TypeError, " is of type int; expected a string, or"),
            (["one", None], TypeError, r"\[1\] is None; expected a string"),
        ):
            with pytest.raises(error, match=rf"^{name}\(\): sentences{message}"):
                getattr(model, name)(wrong)
    for error, message, options in (
        (ValueError, "batch_size is 0; expected at least 1", {"batch_size": 0}),
        (TypeError, "normalize_embeddings is 1; expected True or False", {"normalize_embeddings": 1}),
        (TypeError, "show_progress_bar is 1; expected True or False", {"show_progress_bar": 1}),
        (ValueError, "truncate_dim is 0; expected at least 1", {"truncate_dim": 0}),
        (ValueError, "prompt_name is 'no'; expected one of query, document", {"prompt_name": "no"}),
        (TypeError, "prompt is 3; expected a string", {"prompt": 3}),
        (ValueError, "prompt has '.ud800', half of a surrogate pair", {"prompt": "\ud800"}),
    ):
        with pytest.raises(error, match=rf"^encode\(\): {message}"):
            model.encode(["one"], **options)
        with pytest.raises(error, match=rf"^encode_document\(\): {message}"):
            model.encode_document(["one"], **options)
    for call in (model.encode, model.encode_query):
        own = ", task" if call.__name__ == "encode" else ""
        message = rf"{call.__name__}\(\): pooling is not an argument; .*, truncate_dim{own}$"
        with pytest.raises(TypeError, match=message):
            call(["one"], pooling="cls")
    with pytest.raises(TypeError, match=r"^encode_query\(\): task is not an argument; expected one of"):
        model.encode_query(["one"], task="query")


def test_nothing_is_computed_before_a_mistake_is_found(folder, monkeypatch):
    model = models.load(folder)
    calls = calls_of(model, monkeypatch)
    with pytest.raises(TypeError, match=r"sentences\[\d+\] is 3; expected a string"):
        model.encode([*TEXTS, 3], batch_size=1)
    assert not calls
