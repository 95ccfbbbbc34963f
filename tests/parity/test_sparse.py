"""SPLADE against sentence-transformers' SparseEncoder: tiny models made and saved here."""

import pytest
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from tiny_tokenizers import TEXTS
from transformers_folders import made, reloaded, require_close, save_tokenizer

pytest.importorskip("scipy")
pytestmark = pytest.mark.usefixtures("quiet")
KINDS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "jina")


def both(folder, kind="bert", strategy="max", function="relu", **options):
    """Build one model in sentence-transformers, which writes it to the folder, and here."""
    save_tokenizer(folder)
    eps = {"layer_norm_eps": 1e-2}  # of which DistilBERT takes no notice
    made(folder, kind, transformers.AutoModelForMaskedLM, tie_word_embeddings=True, **eps)
    parts = [MLMTransformer(str(folder), max_seq_length=30), SpladePooling(strategy, function)]
    return reloaded(SparseEncoder(modules=parts, device="cpu", **options), folder / "saved")


@pytest.mark.parametrize("function", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_encode(kind, strategy, function, tmp_path, implementation):
    theirs, ours = both(tmp_path, kind, strategy, function)
    texts = [*TEXTS, "the cat " * 40]
    require_close(ours.encode(texts), theirs.encode(texts))
    require_close(ours.encode(texts, max_active_dims=3), theirs.encode(texts, max_active_dims=3))
