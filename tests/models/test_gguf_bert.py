"""BERT in GGUF files, whose names and words are written as llama.cpp's converter does, and its tokenizers."""

import json

import gguf
import numpy as np
import pytest
import tiny_models as tiny
import tokenizers
from safetensors.numpy import load_file

from fastattn import models
from fastattn.models import ModelError, _gguf
from fastattn.models._gguf_tokenizer import tokenizer_of

TEXTS = [
    "Hello, World! It's 12:30 -- isn't it?", "a", " two  spaces\tand a tab ", "Zürich naïve café",
    "漢字 and kanji", "unbelievablyantidisestablishmentarianism", "a\x00b\ufffdc", "Ünïcödé ÀÉÎ", "🙂 emoji",
    "x" * 150, "", "[MASK] [CLS]",
]  # fmt: skip
IDS = np.arange(20).reshape(2, 10)
SPECIAL = {"[PAD]": "padding", "[UNK]": "unknown", "[CLS]": "cls", "[SEP]": "seperator", "[MASK]": "mask"}
OF_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
}  # fmt: skip


def marked(word):
    """A piece as GGUF has it: the first one of a word is marked, not the others."""
    if word.startswith("[") and word.endswith("]"):
        return word
    return word.removeprefix("##") if word.startswith("##") else f"▁{word}"


def write(path, folder, tensors=None, words=(), stored=None, **keys):
    """Write the folder's BERT as llama.cpp's converter does, with words, and matrices in a type `stored`."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors") if tensors is None else tensors
    out = gguf.GGUFWriter(path, "bert")
    for name, key in OF_SIZES.items():
        getattr(out, f"add_{name}")(config[key])
    out.add_layer_norm_eps(config["layer_norm_eps"])
    out.add_causal_attention(False)
    out.add_token_type_count(config["type_vocab_size"])
    out.add_tokenizer_model("bert")
    if words:
        out.add_token_list([marked(word) for word in words])
        out.add_token_types([3 if word in SPECIAL else 1 for word in words])
        for word, name in SPECIAL.items():
            out.add_uint32(f"tokenizer.ggml.{name}_token_id", words.index(word))
    for key, value in keys.items():
        (out.add_bool if isinstance(value, bool) else out.add_uint32)(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, x in tensors.items():
        if not name.endswith("position_ids") and not name.startswith("pooler"):
            name, x = names.get_name(name, try_suffixes=(".weight", ".bias")), x.astype(np.float32)
            kind = None if x.ndim < 2 or stored is None or name.startswith("position") else stored
            out.add_tensor(name, x if kind is None else gguf.quants.quantize(x, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_texts_of_a_real_model(minilm_folder, tmp_path):
    """Words, vectors and the pooling are those of the folder."""
    minilm = minilm_folder
    words = (minilm / "vocab.txt").read_text().splitlines()
    write(tmp_path / "model.gguf", minilm, words=words, bert__pooling_type=1)
    got, expected = models.load(tmp_path / "model.gguf"), models.load(minilm)
    library = tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    for text in TEXTS:
        ours = got.text.tokenizer.encode(text)
        assert ours.ids == library.encode(text).ids, text
        assert got.text.tokenizer.decode(ours.ids) == library.decode(ours.ids)
    wanted = expected.encode(TEXTS)
    vectors = got.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=2e-6)
    write(tmp_path / "model.gguf", minilm, words=words, stored=gguf.GGMLQuantizationType.Q8_0)
    narrow = models.load(tmp_path / "model.gguf")
    vectors = narrow.encode(TEXTS, normalize_embeddings=True)
    assert (vectors * wanted).sum(axis=1).min() > 0.999
    rounded = models.load(tmp_path / "model.gguf", activations="int8")
    assert (rounded.encode(TEXTS, normalize_embeddings=True) * wanted).sum(axis=1).min() > 0.99


@pytest.mark.parametrize(("pooling", "mode"), [(0, "mean"), (1, "mean"), (2, "cls"), (3, "lasttoken")])
def test_a_tiny_model(pooling, mode, tmp_path):
    tensors = tiny.write(tmp_path, "bert")
    write(tmp_path / "model.gguf", tmp_path, tensors, bert__pooling_type=pooling)
    got, expected = models.load(tmp_path / "model.gguf"), models.load(tmp_path)
    np.testing.assert_array_equal(got(IDS), expected(IDS))
    assert got.sentences.pooling.modes == (mode,)


def test_a_table_of_one_type(tmp_path):
    """Older converters wrote it as a vector."""
    tensors = tiny.write(tmp_path, "bert", type_vocab_size=1)
    write(tmp_path / "model.gguf", tmp_path, tensors)
    expected = models.load(tmp_path)(IDS)
    name = next(name for name in tensors if "token_type" in name)
    write(tmp_path / "model.gguf", tmp_path, {**tensors, name: tensors[name][0]})
    np.testing.assert_array_equal(models.load(tmp_path / "model.gguf")(IDS), expected)


def test_marks_come_before_those_of_language_models(tmp_path):
    words = [*SPECIAL, "hello"]
    tensors, ends = tiny.write(tmp_path, "bert"), {"tokenizer__ggml__eos_token_id": 5}
    write(tmp_path / "model.gguf", tmp_path, tensors, words, **ends)
    assert tokenizer_of(tmp_path / "model.gguf").encode("hello").tokens == ["[CLS]", "hello", "[SEP]"]


def test_values_that_are_refused(tmp_path):
    tensors = tiny.write(tmp_path, "bert")
    for key, value, message in (
        ("bert__pooling_type", 4, "'bert.pooling_type' is 4; expected 0 to 3: vectors of texts"),
        ("bert__pooling_type", 9, "'bert.pooling_type' is 9"),
    ):
        write(tmp_path / "model.gguf", tmp_path, tensors, **{key: value})
        with pytest.raises(ModelError, match=message):
            models.load(tmp_path / "model.gguf")


def test_missing_keys_and_tensors_are_errors_of_the_file(tmp_path, monkeypatch):
    """Keys and tensors that are missing; and the file's own, where special tokens are more than a text."""
    tensors, path, opened = tiny.write(tmp_path, "bert"), tmp_path / "model.gguf", _gguf.opened_gguf
    write(path, tmp_path, tensors)
    with opened(path) as file:
        keys = [x for x in file.metadata if x.endswith(("_length", "_count", "epsilon")) and "type" not in x]
        names = file.names
    assert len(keys) == 6
    for name in [*keys, *names]:

        def without(path, name=name):
            file = opened(path)
            file.metadata.pop(name, None)
            file.names = [x for x in file.names if x != name]
            return file

        monkeypatch.setattr(_gguf, "opened_gguf", without)
        with pytest.raises(ModelError, match=rf"^{path}( does not fit its keys)?: '.*' is missing"):
            models.load(path)
    monkeypatch.undo()
    table = next(name for name in tensors if "position_embeddings" in name)
    short = {**tensors, table: tensors[table][:1]}
    write(path, tmp_path, short, [*SPECIAL, "hello"], bert__context_length=1)
    with pytest.raises(
        ModelError, match=rf"{path} cuts texts to 1; expected at least .* that model.gguf adds, 2"
    ):
        models.load(path).encode(["hello"])
    write(path, tmp_path, tensors, [*SPECIAL, "hello"], tokenizer__ggml__cls_token_id=99)
    with pytest.raises(
        ModelError, match=r"'tokenizer.ggml.cls_token_id' is 99; expected less than the number"
    ):
        models.load(path).encode(["hello"])


def of_chances(tmp_path):
    """A tokenizer of SentencePiece as XLM-R has one, and the keys of a GGUF file of it."""
    wanted = tokenizers.Tokenizer(tokenizers.models.Unigram())
    wanted.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Strip(), tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    wanted.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    wanted.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    wanted.train_from_iterator(TEXTS * 3, trainer)
    pieces = json.loads(wanted.to_str())["model"]["vocab"]
    path = tmp_path / "tokenizer.gguf"
    out = gguf.GGUFWriter(path, "bert")
    out.add_tokenizer_model("t5")
    out.add_token_list([piece for piece, _ in pieces])
    out.add_token_scores([score for _, score in pieces])
    out.add_token_types([3 if piece in special else 1 for piece, _ in pieces])
    for name, i in (("bos", 0), ("padding", 1), ("eos", 2), ("unknown", 3)):
        out.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    out.add_add_bos_token(True)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return wanted, path


def test_likeliest_pieces(tmp_path):
    """XLM-R's tokenizer, "t5" in GGUF."""
    wanted, path = of_chances(tmp_path)
    got = tokenizer_of(path)
    for text in TEXTS:
        found = got.encode(text)
        assert found.ids == [0, *wanted.encode(text).ids, 2], text
        assert got.decode(found.ids) == wanted.decode(found.ids)
