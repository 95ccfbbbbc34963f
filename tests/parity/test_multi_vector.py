"""ColBERT against sentence-transformers' MultiVectorEncoder: tiny models made and saved here."""

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tiny_tokenizers import TEXTS
from transformers_folders import made, reloaded, require_close, save_tokenizer

pytestmark = pytest.mark.usefixtures("quiet")
LONG = [*TEXTS, "the cat " * 25]
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
KINDS = {  # changes of their sizes
    "bert": {}, "xlm-roberta": {}, "deberta-v2": {"position_buckets": 8}, "qwen3": {},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 64, **ENDS},
}  # fmt: skip


def both(folder, kind, **knobs):
    """Build one model in sentence-transformers, which writes it to the folder, and here."""
    save_tokenizer(folder, padding_side="right", mask_token="tree")
    made(folder, kind, transformers.AutoModel, **KINDS[kind])
    weight, inner = torch.randn((16, 48), generator=torch.Generator().manual_seed(5)), "token_embeddings"
    function = {"activation_function": torch.nn.Identity(), "init_weight": weight}
    parts = [
        Transformer(str(folder), **knobs),
        Dense(48, 16, bias=False, module_input_name=inner, **function),
    ]
    parts += [MultiVectorMask(("the", "no")), Normalize(module_input_name=inner)]
    return reloaded(MultiVectorEncoder(modules=parts, device="cpu"), folder / "saved")


CASES = [(kind, attend) for kind in KINDS for attend in (False, True) if attend or kind != "deberta-v2"]


@pytest.mark.parametrize(("kind", "attend"), CASES)
def test_queries_that_are_filled_up(kind, attend, tmp_path, implementation):
    """By masks that other tokens attend or not, which DeBERTa has to."""
    expansion = {"strategy": "fixed", "length": 9, "attend": attend}
    theirs, ours = both(tmp_path, kind, query_expansion=expansion, document_length=12)
    for call in ("encode", "encode_query", "encode_document"):
        for options in ({}, {"prompt": "a tree "}, {"normalize_embeddings": True}):
            require_close(getattr(ours, call)(LONG, **options), getattr(theirs, call)(LONG, **options))
    for task in ("query", "document"):
        require_close(ours.encode(LONG, task=task), theirs.encode(LONG, task=task))
    assert ours.similarity_fn_name == theirs.similarity_fn_name
    for name in ("similarity", "similarity_pairwise"):
        got, expected = (
            getattr(each, name)(each.encode_query(LONG), each.encode_document(LONG))
            for each in (ours, theirs)
        )
        assert np.abs(got - expected.numpy()).max() < 1e-4
