"""CLIP and SigLIP: vectors of texts and images against plain NumPy, and what is refused."""

import json
import pickle

import numpy as np
import pytest
import tiny_towers as tiny
from implementations import assert_same_rows, each_isa, forced
from model_folders import change_config, refused, write_settings
from safetensors.numpy import save_file
from tiny_tokenizers import TEXTS, WORDS, write_tokenizer

from fastattn import models
from fastattn.models import _encode_calls

RNG = np.random.default_rng(2)
PIXELS = RNG.standard_normal((5, 3, tiny.SIZE, tiny.SIZE)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (5, tiny.SIZE, tiny.SIZE, 3), np.uint8)
IDS = [[1, 4, 5, 59, 6], [1, 59, 3, 2, 59], [7, 8, 9, 10, 11]]

both = pytest.mark.parametrize("kind", tiny.KINDS)


def ids_of(text):
    return [1, *(WORDS.index(word) for word in text.split()), 2]


def padded(ids):
    return ids + [0] * (tiny.LENGTH - len(ids))


def close(got, expected, bound=1e-5):
    assert got.shape == np.shape(expected)
    assert np.abs(expected).max() > 0.3
    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "change"), [("siglip", {}), *(("clip", {"eos_token_id": end}) for end in (2, 59, 50))]
)
def test_texts(kind, change, tmp_path, implementation):
    """The vector of CLIP is that of the token that ends a text: of old files the largest."""
    weights, values = tiny.write(tmp_path, kind, text=change), tiny.config(kind, text=change)
    got = models.load(tmp_path).text_features(IDS)
    close(got, [tiny.text_vector(kind, values, weights, ids) for ids in IDS])
    assert got.dtype == np.float32


@both
def test_images(kind, tmp_path, implementation):
    weights = tiny.write(tmp_path, kind)
    got = models.load(tmp_path).image_features(PIXELS)
    close(got, [tiny.image_vector(kind, tiny.config(kind), weights, pixels) for pixels in PIXELS])
    assert got.dtype == np.float32


BOUNDS = [
    ({"dtype": "float64"}, 2e-7),  # of the weights' float32 and the vectors' float64
    ({"weights_dtype": "bfloat16"}, 0.03),
    ({"dtype": "bfloat16"}, 0.05),
    ({"weights_dtype": "int8"}, 0.08),
    ({"weights_dtype": "int8", "activations": "int8"}, 0.15),
]


@both
@pytest.mark.parametrize(("options", "bound"), BOUNDS)
def test_other_types(options, bound, kind, tmp_path, implementation):
    weights = tiny.write(tmp_path, kind)
    values, model = tiny.config(kind), models.load(tmp_path, **options)
    texts, images = model.text_features(IDS), model.image_features(PIXELS)
    assert texts.dtype == images.dtype == (np.float64 if "float64" in options.values() else np.float32)
    close(texts, [tiny.text_vector(kind, values, weights, ids) for ids in IDS], bound)
    close(images, [tiny.image_vector(kind, values, weights, pixels) for pixels in PIXELS], bound)


@both
def test_encode_takes_texts_and_images(kind, tmp_path, monkeypatch):
    tiny.write(tmp_path, kind)
    write_tokenizer(tmp_path)
    model = models.load(tmp_path)
    whole = [padded(ids_of(text)) if kind == "siglip" else ids_of(text) for text in TEXTS]
    texts = np.stack([model.text_features(ids)[0] for ids in whole])
    pixels = ((IMAGES / 255 - tiny.MEAN) / tiny.STD).transpose(0, 3, 1, 2)
    images = model.image_features(pixels)
    assert_same_rows(model.encode(TEXTS), texts)
    np.testing.assert_allclose(model.encode(IMAGES), images, rtol=1e-4, atol=1e-5)
    images = model.encode(IMAGES)
    assert_same_rows(model.encode(TEXTS[0]), texts[0])
    assert_same_rows(model.encode(IMAGES[0]), images[0])
    for batch_size, tokens in ((None, 768), (1, 768), (2, 768), (None, 20)):
        monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", tokens)
        mixed = [TEXTS[0], IMAGES[0], IMAGES[1], IMAGES[2], TEXTS[1], TEXTS[2], IMAGES[3]]
        order = [texts[0], *images[:3], *texts[1:3], images[3]]
        assert_same_rows(model.encode(mixed, batch_size=batch_size), order)
        assert_same_rows(model.encode(iter(mixed), batch_size=batch_size), order)
    floats = model.encode(list(IMAGES / 255))
    np.testing.assert_allclose(floats, images, rtol=1e-4, atol=1e-5)
    unit = model.encode(mixed, normalize_embeddings=True, truncate_dim=7)
    assert unit.shape == (7, 7)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
    assert model.encode([]).shape == (0, tiny.FEATURES[kind])
    assert model.get_sentence_embedding_dimension() == tiny.FEATURES[kind]
    np.testing.assert_allclose(model.similarity(texts, images), cosine(texts, images), atol=1e-6)


def cosine(a, b):
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return a @ b.T


@both
def test_logits(kind, tmp_path):
    weights = tiny.write(tmp_path, kind)
    model = models.load(tmp_path)
    texts, images = model.text_features(IDS), model.image_features(PIXELS)
    bias = weights.get("logit_bias", 0.0)
    got = model.logits(images, texts)
    assert got.shape == (5, 3)
    assert got.dtype == np.float32
    expected = cosine(images, texts) * np.exp(weights["logit_scale"]) + bias
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"logits\(\): embeddings2 has shape"):
        model.logits(images, texts[:, :3])


@both
@each_isa
def test_bits_do_not_depend_on_the_batch(kind, isa, tmp_path):
    tiny.write(tmp_path, kind)
    with forced(isa):
        model = models.load(tmp_path)
        texts, images = model.text_features(IDS), model.image_features(PIXELS)
    for threads in (1, 2, 5):
        with forced(isa, num_threads=threads):
            np.testing.assert_array_equal(model.image_features(PIXELS[::-1]), images[::-1])
            np.testing.assert_array_equal(model.image_features(PIXELS[3]), images[3:4])
            np.testing.assert_array_equal(model.text_features(IDS[1]), texts[1:2])


def test_padding_is_left_out(tmp_path):
    tiny.write(tmp_path, "siglip")
    model = models.load(tmp_path)
    ids, mask = [[5, 6, 7, 0], [0, 8, 9, 3]], [[1, 1, 1, 0], [0, 1, 1, 1]]
    alone = [model.text_features(each)[0] for each in ([5, 6, 7], [8, 9, 3])]
    assert_same_rows(model.text_features(ids, mask), alone)


@both
def test_no_tokens_and_no_images(kind, tmp_path, implementation):
    weights = tiny.write(tmp_path, kind)
    model = models.load(tmp_path)
    assert_same_rows(model.text_features([[]])[0], weights.get("text_model.head.bias", np.zeros(20)))
    assert model.text_features(np.zeros((0, 4), int)).shape == (0, tiny.FEATURES[kind])
    assert model.image_features(PIXELS[:0]).shape == (0, tiny.FEATURES[kind])


@both
def test_a_call_gives_hidden_states_of_texts(kind, tmp_path):
    tiny.write(tmp_path, kind)
    model = models.load(tmp_path)
    hidden = model(IDS)
    assert hidden.shape == (3, 5, 24)
    assert isinstance(model, models.TwoTowers)
    assert repr(model) == f"<{kind}: 2 layers of 24, float32>"
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.image_features(PIXELS), model.image_features(PIXELS))
    np.testing.assert_array_equal(again.text_features(IDS), model.text_features(IDS))


@both
def test_other_tensors_make_the_model_of_a_folder_with_them(kind, tmp_path):
    tiny.write(tmp_path, kind)
    model = models.load(tmp_path)
    state = {name: np.asarray(1.25 * x, np.float32) for name, x in model.state_dict().items()}
    other, before = model.with_state_dict(state), model.text_features(IDS)
    tiny.write(tmp_path, kind, state)
    expected = models.load(tmp_path)
    np.testing.assert_array_equal(other.text_features(IDS), expected.text_features(IDS))
    np.testing.assert_array_equal(other.image_features(PIXELS), expected.image_features(PIXELS))
    assert (other.logit_scale, other.logit_bias) == (expected.logit_scale, expected.logit_bias)
    np.testing.assert_array_equal(model.text_features(IDS), before)


def test_padding_is_the_tokenizer_s(tmp_path):
    tiny.write(tmp_path, "siglip")
    write_tokenizer(tmp_path)
    model = models.load(tmp_path)
    assert model.tokenize(["a"])["input_ids"].tolist() == [padded([1, 5, 2])]
    assert model.tokenize(["a"])["attention_mask"].all()
    for token in ('"<unk>"', '{"content": "<unk>"}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"pad_token": {token}}}')
        assert models.load(tmp_path).tokenize(["a"])["input_ids"].tolist() == [[1, 5, 2] + [3] * 13]


def test_missing_values_are_those_of_transformers(tmp_path):
    """The table `text_config_dict` counts where old files have it, alone."""
    tiny.write(tmp_path, "clip")
    expected = models.load(tmp_path).text_features(IDS)
    given = {**tiny.TEXT, "eos_token_id": 2}
    change_config(tmp_path, text_config={"hidden_size": 7}, text_config_dict=given)
    np.testing.assert_array_equal(models.load(tmp_path).text_features(IDS), expected)
    for name in ("text_config", "text_config_dict"):
        change_config(tmp_path, **{name: None})
    refused(tmp_path, "embeddings.token_embedding.weight' has shape (60, 24); expected (49408, 512)")
    change_config(tmp_path, text_config={**given, "layer_norm_eps": None})
    np.testing.assert_array_equal(models.load(tmp_path).text_features(IDS), expected)


WRONG = [
    ("clip", {"text": {"hidden_size": 25}}, "'text_config': 'hidden_size' is 25; expected a multiple of"),
    ("clip", {"text": {"hidden_act": "tanh"}}, "'text_config': 'hidden_act' is 'tanh'; expected one of relu"),
    ("clip", {"text": {"eos_token_id": "2"}}, "'text_config': 'eos_token_id' is '2'; expected an integer"),
    ("clip", {"text": {"num_hidden_layers": 10**9}}, "'num_hidden_layers' is 1000000000; expected no more"),
    ("clip", {"vision": {"patch_size": 21}}, "'vision_config': 'patch_size' is 21; expected at most 'image"),
    ("clip", {"vision": {"num_channels": 4}}, "'vision_config': 'num_channels' is 4; only 3 is supported"),
    ("clip", {"vision": {"image_size": 40}}, "has shape (10, 24); expected (37, 24)"),
    ("clip", {"text_config": 3}, "config.json: 'text_config' is 3; expected a table"),
    ("clip", {"projection_dim": 0}, "config.json: 'projection_dim' is 0; expected an integer of at least 1"),
    ("siglip", {"vision": {"vision_use_head": False}}, "'vision_use_head' is False; only True is supported"),
    ("siglip", {"text": {"projection_size": 9}}, "'projection_size' is 9; expected 'hidden_size' of the im"),
    ("siglip", {"text": {"pad_token_id": -1}}, "'text_config': 'pad_token_id' is -1; expected an integer of"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG)
def test_configs_that_describe_no_model(kind, changes, message, tmp_path):
    tiny.write(tmp_path, kind, tiny.tensors(kind, tiny.config(kind)), processor=None, **changes)
    refused(tmp_path, message)


@both
def test_tensors_that_are_missing_or_not_known(kind, tmp_path):
    weights = tiny.tensors(kind, tiny.config(kind))
    for name in weights:
        rest = {other: x for other, x in weights.items() if other != name}
        save_file(rest, tmp_path / "model.safetensors")
        tiny.write(tmp_path, kind, rest)
        refused(tmp_path, f"{name!r} is missing")
    more = "vision_model.encoder.layers.2.mlp.fc1.weight"
    tiny.write(tmp_path, kind, {**weights, more: np.ones((2, 2), "f4")})
    refused(tmp_path, f"{more!r} is not known")
    places = np.arange(tiny.LENGTH)[None]  # which old files hold
    tiny.write(tmp_path, kind, {**weights, "text_model.embeddings.position_ids": places})
    models.load(tmp_path)
    name = "vision_model.embeddings.patch_embedding.weight"
    bad = weights[name].copy()
    bad[0, 0, 0, 0] = np.nan
    tiny.write(tmp_path, kind, {**weights, name: bad})
    refused(tmp_path, f"{name!r} has values that are not finite")


def test_wrong_arguments(tmp_path):
    tiny.write(tmp_path, "clip")
    write_tokenizer(tmp_path)
    model = models.load(tmp_path)
    for call, error, message in (
        (lambda: model.image_features(PIXELS[:, :, 1:]), ValueError, r"clip\(\): pixels has shape \(5, 3,"),
        (lambda: model.image_features(IMAGES), ValueError, r"expected \(batch, 3, 20, 20\)"),
        (lambda: model.image_features(["a"]), TypeError, r"pixels has dtype <U1; expected float32"),
        (lambda: model.text_features([[60]]), ValueError, "ids"),
        (lambda: model.text_features([[3] * 17]), ValueError, "17 tokens in a sequence; expected at most 16"),
        (lambda: model.encode(3), TypeError, r"encode\(\): sentences is of type int; expected a string, an"),
        (lambda: model.encode(b"a"), TypeError, "sentences is of type bytes; expected"),
        (lambda: model.encode({"a": 1}), TypeError, "sentences is of type dict; expected a string, an"),
        (lambda: model.encode([3]), TypeError, r"sentences\[0\] is of type int; expected a string, or an a"),
        (lambda: model.encode(["a", None]), TypeError, r"sentences\[1\] is of type NoneType"),
        (lambda: model.encode([IMAGES[0], IMAGES[0, 0]]), ValueError, r"\(20, 3\); expected \(height, width"),
        (lambda: model.encode(IMAGES[:, :, :, :2]), ValueError, r"\(20, 20, 2\); expected \(height, wi"),
        (lambda: model.encode(IMAGES.astype(np.int64)), TypeError, "dtype int64; expected uint8, from 0 to"),
        (lambda: model.encode(IMAGES.astype(float)), ValueError, "values from 0 to 255; expected 0 to 1 in"),
        (lambda: model.encode(np.full((9, 9, 3), np.nan)), ValueError, "values from nan to nan"),
        (lambda: model.encode(IMAGES[0, :0]), ValueError, "an image without pixels"),
        (lambda: model.encode("\ud800"), ValueError, "half of a surrogate pair"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("module", ["CLIPModel", "Transformer"])
def test_a_folder_of_sentence_transformers(module, tmp_path):
    inner = tmp_path / "0_CLIPModel" if module == "CLIPModel" else tmp_path
    tiny.write(inner, "clip")
    write_tokenizer(inner)
    plain = models.load(inner)
    package, path = "sentence_transformers.models", inner.name if inner != tmp_path else ""
    first = {"path": path, "type": f"{package}.{module}"}
    others = {kind: f"{package}.{kind}" for kind in ("Normalize", "Dropout", "Pooling")}

    def write(*entries):
        (tmp_path / "modules.json").write_text(json.dumps(entries))

    write(first, *({"path": f"1_{kind}", "type": others[kind]} for kind in ("Normalize", "Dropout")))
    write_settings(tmp_path, prompts={"query": "the "}, similarity_fn_name="dot")
    model = models.load(tmp_path)
    for inputs in (TEXTS, IMAGES):
        expected = plain.encode(inputs, normalize_embeddings=True)
        np.testing.assert_array_equal(model.encode(inputs), expected)
    assert_same_rows(model.encode_query("cat"), plain.encode("the cat", normalize_embeddings=True))
    assert model.similarity_fn_name == "dot"
    if module == "CLIPModel":
        change_config(inner, model_type="bert")
        refused(tmp_path, "'model_type' is 'bert'; expected clip or", "modules.json has a CLIPModel")
        change_config(inner, model_type="clip")
    write(first, first)
    refused(tmp_path, f"modules.json has {module}, {module}; expected Transformer or CLIPModel first, once")
    write(first, {"path": "1", "type": others["Pooling"]})
    refused(tmp_path, "modules.json has a module 'Pooling'; expected one of Transformer, CLIPModel, Dense")


def test_the_tokenizer_of_the_first_folders(tmp_path):
    """vocab.json and merges.txt in place of tokenizer.json."""
    tiny.write(tmp_path, "clip")
    tokens = ["<|startoftext|>", "c", "a", "t</w>", "t", "c</w>", "'s</w>", "'", "s</w>", "ca", "cat</w>"]
    vocab = {token: i for i, token in enumerate([*tokens, "<|endoftext|>"])}
    (tmp_path / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\n' s</w>\n")
    refused_text(tmp_path, r"tokenizer\.json is missing; expected a tokenizer")
    (tmp_path / "vocab.json").write_text("{")
    refused_text(tmp_path, r"vocab\.json and merges\.txt are no tokenizer: ")
    (tmp_path / "vocab.json").write_text(json.dumps({**vocab, "<|endoftext|>": None} | {"c": 1}))
    refused_text(tmp_path, r"vocab\.json")
    rest = {token: i for token, i in vocab.items() if token != "<|startoftext|>"}
    (tmp_path / "vocab.json").write_text(json.dumps(rest))
    refused_text(tmp_path, r"vocab\.json has no <\|startoftext\|>; expected CLIP's vocabulary")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    text = models.load(tmp_path).text
    assert text.encode(["Cat's  c", "", "a<|endoftext|>"]) == [[0, 10, 6, 5, 11], [0, 11], [0, 11, 11, 11]]
    assert text.encode(["cat " * 40]) == [[0] + [10] * 14 + [11]]
    write_tokenizer(tmp_path)
    assert models.load(tmp_path).text.encode(["the"]) == [[1, 4, 2]]


def refused_text(folder, message):
    with pytest.raises(models.ModelError, match=message):
        models.load(folder).text.encode(["cat"])
