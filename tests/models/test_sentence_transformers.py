"""`fastattn.sentence_transformers` without torch, of folders and of names; tests/parity compares results."""

import json
import re

import numpy as np
import pytest
import tiny_models as tiny
import tiny_towers
from PIL import Image
from small_hub import small_hub
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.sentence_transformers import SentenceTransformer, util


def test_torch_is_not_imported(encoder, python):
    """Neither for vectors nor for an error that says how to install it."""
    code = f"""
import sys
from fastattn.sentence_transformers import SentenceTransformer, util
model = SentenceTransformer({str(encoder)!r})
vectors = model.encode({TEXTS!r})
model.similarity(vectors, vectors)
assert "torch" not in sys.modules
sys.modules["torch"] = None
for options in ({{"convert_to_tensor": True}}, {{"convert_to_numpy": False}}):
    try:
        model.encode("a", **options)
    except ImportError as error:
        print(error)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    for line, word in zip(
        done.stdout.splitlines(), ("convert_to_tensor=True", "convert_to_numpy=False"), strict=True
    ):
        assert line.startswith(f"encode(): {word} needs torch: pip install torch (")


def test_models_of_the_hub(encoder, python, tmp_path_factory):
    """Names without an organisation are theirs; the cache is the argument, or the variable."""
    pytest.importorskip("huggingface_hub")
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    with small_hub({"sentence-transformers/tiny": encoder, "tiny/bert": encoder}) as hub:
        code = f"""
from fastattn.sentence_transformers import SentenceTransformer, util
for name, options in (("tiny", {{}}), ("tiny/bert", {{"cache_folder": {str(second)!r}, "token": "hf_own"}})):
    print(SentenceTransformer(name, revision="v1", **options).encode("the cat").tolist())
print(SentenceTransformer("tiny", revision="v1", local_files_only=True).encode("the cat").tolist())
"""
        done = python(code, HF_ENDPOINT=hub.url, SENTENCE_TRANSFORMERS_HOME=str(first))
        assert done.returncode == 0, done.stderr
        expected = models.load(encoder).encode("the cat").tolist()
        assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 3
        assert "Bearer hf_own" in hub.tokens
    assert [path.name for path in first.glob("models--*")] == ["models--sentence-transformers--tiny"]
    assert [path.name for path in second.glob("models--*")] == ["models--tiny--bert"]


def test_texts_and_images(tmp_path):
    """Two towers take both, alone or in tables."""
    tiny_towers.write(tmp_path, "clip")
    write_tokenizer(tmp_path)
    model, plain = SentenceTransformer(tmp_path), models.load(tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))
    expected = plain.encode([image, "the cat"])
    np.testing.assert_array_equal(model.encode([image, "the cat"]), expected)
    np.testing.assert_array_equal(model.encode([{"image": image}, {"text": "the cat"}]), expected)
    for one in (image, {"image": image}, np.asarray(image)):
        np.testing.assert_array_equal(model.encode(one), expected[0])
    with pytest.raises(ValueError, match=r"^encode\(\): inputs has a dict with image, text; expected 'text'"):
        model.encode({"image": image, "text": "the cat"})


def test_instructor_models_leave_their_prompts_out(encoder, tmp_path, monkeypatch):
    """By their names, as in sentence-transformers."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hkunlp/instructor-base"
    folder.mkdir(parents=True)
    tiny.write(folder, "bert")
    write_tokenizer(folder)
    got = SentenceTransformer("hkunlp/instructor-base").encode(TEXTS[0], prompt="the dog ")
    assert np.abs(got - SentenceTransformer(encoder).encode(TEXTS[0], prompt="the dog ")).max() > 1e-3
    theirs = SentenceTransformer(encoder)
    theirs.set_pooling_include_prompt(False)
    np.testing.assert_array_equal(got, theirs.encode(TEXTS[0], prompt="the dog "))


def test_inputs_that_are_no_texts(encoder):
    model = SentenceTransformer(encoder)
    for inputs in (3, None, [3], b"the cat"):
        with pytest.raises(TypeError, match=r"^encode\(\): inputs(\[\d\])? "):
            model.encode(inputs)
    for device in ("cuda", ["cpu", "cuda:0"]):
        with pytest.raises(ValueError, match=r"^encode\(\): device is 'cuda"):
            model.encode("a", device=device)
    with pytest.raises(TypeError, match=r"^encode\(\): prompt is of type int; expected a string"):
        model.encode("a", prompt=3)
    with pytest.raises(ValueError, match=r"^encode\(\): truncate_dim is 0; expected at least 1"):
        model.encode("a", truncate_dim=0)
    with pytest.raises(ValueError, match=r"^encode\(\): output_value is 'token_embeddings'; expected sent"):
        model.encode("a", output_value="token_embeddings")


WORDS = np.array(["a", "b"])
ROWS = np.eye(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: util.cos_sim("a", "b"), "cos_sim(): a "),
        (lambda: util.dot_score(ROWS, WORDS), "dot_score(): b "),
        (lambda: util.dot_score(ROWS, ROWS[:, :2]), "dot_score(): b has shape (3, 2); expected (m, 3)"),
        (lambda: util.normalize_embeddings("a"), "normalize_embeddings(): embeddings "),
        (lambda: util.semantic_search(WORDS, ROWS), "semantic_search(): query_embeddings "),
        (lambda: util.semantic_search(ROWS, WORDS), "semantic_search(): corpus_embeddings "),
        (lambda: util.semantic_search(ROWS, ROWS[0]), "semantic_search(): corpus_embeddings has shape (3,)"),
        (lambda: util.semantic_search(ROWS, ROWS, top_k=0), "semantic_search(): top_k is 0"),
        (lambda: util.quantize_embeddings("a", "int8"), "quantize_embeddings(): embeddings "),
    ],
)
def test_functions_of_util_name_what_is_wrong(call, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        call()


def test_the_name_of_an_argument_in_another_library(encoder):
    message = r"^encode\(\): normalize is not an .*; expected normalize_embeddings$"
    with pytest.raises(ValueError, match=message):
        SentenceTransformer(encoder).encode("a", normalize=True)
