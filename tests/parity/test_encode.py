"""`encode` against sentence-transformers: tiny models of every module, made and saved here; MiniLM."""

import json
import warnings

import numpy as np
import pytest
import sentence_similarity as example
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.util import quantization
from tiny_tokenizers import TEXTS
from transformers_folders import SIZES, randomised, save_tokenizer

from fastattn import models
from fastattn import sentence_transformers as in_place
from fastattn.models import quantize_embeddings

TOLERANCE = 1e-5
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PRECISIONS = ("int8", "uint8", "binary", "ubinary")
PROMPTS = {"query": "the dog sat ", "passage": "a tree "}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny BERT and its tokenizer, as transformers writes it."""
    config = transformers.BertConfig(**SIZES)
    return written(transformers.BertModel(config, add_pooling_layer=False), tmp_path_factory.mktemp("base"))


def written(model, folder):
    """The folder of a model, drawn anew, and its tokenizer."""
    save_tokenizer(folder)
    randomised(model).save_pretrained(folder)
    return folder


def both(base, folder, *behind, pooling="mean", include_prompt=True, **options):
    """Build one model in sentence-transformers, which writes it to the folder, and here."""
    with warnings.catch_warnings():  # what they have to say is not ours to mend
        warnings.simplefilter("ignore")
        first = modules.Transformer(str(base), max_seq_length=options.pop("max_seq_length", 32))
        pool = modules.Pooling(48, pooling_mode=pooling, include_prompt=include_prompt)
        behind = [randomised(module, i) for i, module in enumerate(behind)]
        theirs = SentenceTransformer(modules=[first, pool, *behind], device="cpu", **options)
        theirs.save_pretrained(str(folder), create_model_card=False)
        theirs = SentenceTransformer(str(folder), device="cpu")
    return theirs, models.load(folder)


def require_close(got, expected):
    assert got.shape == expected.shape
    assert np.abs(expected).mean() > 0.01, "a result next to nothing shows nothing"
    assert np.abs(got - expected).max() < TOLERANCE * max(1, np.abs(expected).max())


BEHIND = {
    "nothing": lambda: [],
    "dense-without-bias": lambda: [modules.Dense(48, 48, bias=False, activation_function=torch.nn.GELU())],
    "dense-residual": lambda: [
        modules.Dense(48, 20, use_residual=True),
        modules.Dense(20, 20, use_residual=True),
    ],
    "many": lambda: [modules.Dropout(0.5), modules.LayerNorm(48), modules.Dense(48, 20), modules.Normalize()],
}


@pytest.mark.parametrize("name", BEHIND)
def test_modules(name, base, tmp_path, implementation):
    theirs, ours = both(base, tmp_path, *BEHIND[name]())
    require_close(ours.encode(TEXTS), theirs.encode(TEXTS))
    assert ours.get_sentence_embedding_dimension() == theirs.get_embedding_dimension()


GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
T5_SIZES = {"vocab_size": 13, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6}
LINEAR = {"bias": False, "activation_function": torch.nn.Identity()}
FAMILIES = {  # as their folders are: the model, how it pools, and what comes after that
    "qwen3-embedding": (
        lambda: transformers.Qwen3Model(transformers.Qwen3Config(**GROUPED)),
        "lasttoken",
        lambda: [modules.Normalize()],
    ),
    "sentence-t5": (
        lambda: transformers.T5EncoderModel(transformers.T5Config(**T5_SIZES)),
        "mean",
        lambda: [modules.Dense(48, 48, **LINEAR), modules.Normalize()],
    ),
    "embedding-gemma": (
        lambda: transformers.Gemma3TextModel(
            transformers.Gemma3TextConfig(**GROUPED, use_bidirectional_attention=True, sliding_window=6)
        ),
        "mean",
        lambda: [modules.Dense(48, 96, **LINEAR), modules.Dense(96, 48, **LINEAR), modules.Normalize()],
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path, implementation):
    make, pooling, behind = FAMILIES[name]
    folder = tmp_path / "base"
    folder.mkdir()
    options = {"pooling": pooling, "prompts": PROMPTS}
    theirs, ours = both(written(make(), folder), tmp_path / "model", *behind(), **options)
    assert isinstance(ours, models.Encoder)
    shim = in_place.SentenceTransformer(str(tmp_path / "model"))
    for prompt_name in (None, "query"):
        how = {"prompt_name": prompt_name}
        require_close(ours.encode(TEXTS, **how), theirs.encode(TEXTS, **how))
        require_close(shim.encode(TEXTS, **how), theirs.encode(TEXTS, **how))
    for call in ("encode_query", "encode_document"):
        how = {"truncate_dim": 16, "normalize_embeddings": True}
        require_close(getattr(shim, call)(TEXTS, **how), getattr(theirs, call)(TEXTS, **how))
    assert shim.prompts == theirs.prompts


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("pooling", [*MODES, ("mean", "cls"), ("max", "weightedmean", "lasttoken")])
def test_poolings(pooling, include_prompt, base, tmp_path):
    theirs, ours = both(base, tmp_path, pooling=pooling, include_prompt=include_prompt, prompts=PROMPTS)
    for prompt_name in (None, *PROMPTS):
        options = {"prompt_name": prompt_name}
        require_close(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options))


def test_texts_are_cut_and_tokenized_alike(base, tmp_path):
    theirs, ours = both(base, tmp_path, max_seq_length=7)
    texts = [*TEXTS, "the cat " * 40]
    assert ours.max_seq_length == theirs.max_seq_length == 7
    require_close(ours.encode(texts), theirs.encode(texts))
    tokens = theirs.preprocess(texts)
    got = ours.tokenize(texts)
    np.testing.assert_array_equal(got["attention_mask"], tokens["attention_mask"])
    np.testing.assert_array_equal(got["input_ids"], tokens["input_ids"])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sentence_roberta_config.json", {"max_seq_length": 5}),
        ("sentence_bert_config.json", {"max_seq_length": 9, "tokenizer_args": {"model_max_length": 5}}),
        ("sentence_bert_config.json", {"max_seq_length": 5, "processor_kwargs": {"truncation_side": "left"}}),
        ("tokenizer_config.json", {"truncation_side": "left", "model_max_length": 5}),
    ],
)
def test_files_that_say_how_texts_are_cut(name, values, base, tmp_path):
    both(base, tmp_path)
    (tmp_path / "sentence_bert_config.json").unlink()
    path = tmp_path / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **values}))
    theirs, ours = SentenceTransformer(str(tmp_path), device="cpu"), models.load(tmp_path)
    assert ours.max_seq_length == theirs.max_seq_length == 5
    require_close(ours.encode(TEXTS), theirs.encode(TEXTS))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("features", [48, 13])
def test_quantize_embeddings(features, precision):
    """Bit for bit."""
    vectors = np.random.default_rng(0).standard_normal((300, features)).astype(np.float32)
    vectors[:, 3] = 0.5
    others = vectors[100:150]
    theirs = quantization.quantize_embeddings
    np.testing.assert_array_equal(quantize_embeddings(vectors, precision), theirs(vectors, precision))
    if precision.endswith("int8"):
        ranges = np.stack([others.min(axis=0), others.max(axis=0)])
        for options in ({"ranges": ranges}, {"calibration_embeddings": others}):
            expected = theirs(vectors, precision, **options)
            np.testing.assert_array_equal(quantize_embeddings(vectors, precision, **options), expected)


def test_minilm(minilm_folder):
    theirs, ours = SentenceTransformer(str(minilm_folder), device="cpu"), models.load(minilm_folder)
    texts = [*example.SENTENCES, " two  spaces\n", "", "word " * 1000]
    expected = theirs.encode(texts)
    assert np.abs(expected).mean() > 0.01
    np.testing.assert_allclose(ours.encode(texts), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        ours.similarity(expected, expected), theirs.similarity(expected, expected), atol=1e-6
    )
    assert ours.max_seq_length == theirs.max_seq_length == 256
    assert ours.get_sentence_embedding_dimension() == theirs.get_embedding_dimension() == 384
