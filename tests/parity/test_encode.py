"""`encode` against sentence-transformers: tiny models of every pooling, made and saved here."""

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.util import quantization
from tiny_tokenizers import TEXTS
from transformers_folders import SIZES, randomised, reloaded, require_close, save_tokenizer

from fastattn import models
from fastattn import sentence_transformers as in_place
from fastattn.models import quantize_embeddings

pytestmark = pytest.mark.usefixtures("quiet")
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
    first = modules.Transformer(str(base), max_seq_length=32)
    pool = modules.Pooling(48, pooling_mode=pooling, include_prompt=include_prompt)
    behind = [randomised(module, i) for i, module in enumerate(behind)]
    return reloaded(SentenceTransformer(modules=[first, pool, *behind], device="cpu", **options), folder)


GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
T5_SIZES = {"vocab_size": 13, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6}
LINEAR = {"bias": False, "activation_function": torch.nn.Identity()}
GEMMA = {"use_bidirectional_attention": True, "sliding_window": 6}
FAMILIES = {  # as their folders are: the model, how it pools, and what comes after that
    "qwen3-embedding": (lambda: transformers.Qwen3Model(transformers.Qwen3Config(**GROUPED)), "lasttoken",
        lambda: []),
    "sentence-t5": (lambda: transformers.T5EncoderModel(transformers.T5Config(**T5_SIZES)), "mean",
        lambda: [modules.Dense(48, 48, **LINEAR)]),
    "embedding-gemma": (
        lambda: transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**GROUPED, **GEMMA)), "mean",
        lambda: [modules.Dense(48, 96, **LINEAR), modules.Dense(96, 48, **LINEAR)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path, implementation):
    make, pooling, behind = FAMILIES[name]
    folder = tmp_path / "base"
    folder.mkdir()
    options = {"pooling": pooling, "prompts": PROMPTS}
    behind = [*behind(), modules.Normalize()]
    theirs, ours = both(written(make(), folder), tmp_path / "model", *behind, **options)
    assert isinstance(ours, models.Encoder)
    shim = in_place.SentenceTransformer(str(tmp_path / "model"))
    for prompt_name in (None, "query"):
        how = {"prompt_name": prompt_name}
        require_close(ours.encode(TEXTS, **how), theirs.encode(TEXTS, **how))
        require_close(shim.encode(TEXTS, **how), theirs.encode(TEXTS, **how))
    assert ours.get_sentence_embedding_dimension() == theirs.get_embedding_dimension()
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
