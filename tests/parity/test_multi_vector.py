"""ColBERT against sentence-transformers' MultiVectorEncoder: tiny models made and saved here."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tiny_tokenizers import TEXTS
from transformers_folders import SIZES, randomised, reloaded, require_close, save_tokenizer

from fastattn import models

pytestmark = pytest.mark.usefixtures("quiet")
LONG = [*TEXTS, "the cat " * 25]
PADDED = {**SIZES, "pad_token_id": 0}
KINDS = {
    "bert": transformers.BertConfig(**PADDED),
    "xlm-roberta": transformers.XLMRobertaConfig(**PADDED),
    "modernbert": transformers.ModernBertConfig(
        **PADDED, global_attn_every_n_layers=2, local_attention=64, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    ),
    "deberta-v2": transformers.DebertaV2Config(
        **PADDED, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
    ),
    "qwen3": transformers.Qwen3Config(**PADDED, num_key_value_heads=2, head_dim=8),
}  # fmt: skip


def transformer(folder, kind, mask="tree", markers=()):
    """A random model of that kind, and a tokenizer whose mask is a word of it."""
    save_tokenizer(folder, markers, padding_side="right", **({"mask_token": mask} if mask else {}))
    config = KINDS[kind]
    config.vocab_size = 13 + len(markers)
    model = transformers.AutoModel.from_config(config)
    randomised(model, 2).save_pretrained(folder)


def dense(n_in=48, n_out=16, **options):
    weight = torch.randn((n_out, n_in), generator=torch.Generator().manual_seed(5))
    name = {"module_input_name": "token_embeddings"}
    identity = torch.nn.Identity()
    return Dense(n_in, n_out, activation_function=identity, init_weight=weight, **name, **options)


def both(
    folder, kind="bert", extra=(), mask="tree", similarity=None, prompts=None, words=("the", "no"), **knobs
):
    """Build one model in sentence-transformers, which writes it to the folder, and here."""
    transformer(folder, kind, mask)
    tasks = knobs.pop("tasks", None)
    parts = [Transformer(str(folder), **knobs), dense(bias=False), *extra]
    parts += [MultiVectorMask(words, skiplist_tasks=tasks), Normalize(module_input_name="token_embeddings")]
    theirs = MultiVectorEncoder(modules=parts, device="cpu", similarity_fn_name=similarity, prompts=prompts)
    return reloaded(theirs, folder / "saved")


def require_same(theirs, ours, texts=LONG):
    for call in ("encode", "encode_query", "encode_document"):
        for options in ({}, {"prompt": "a tree "}, {"normalize_embeddings": True}):
            require_close(getattr(ours, call)(texts, **options), getattr(theirs, call)(texts, **options))
    for task in ("query", "document"):
        require_close(ours.encode(texts, task=task), theirs.encode(texts, task=task))
    a, b = ours.encode_query(texts), ours.encode_document(texts)
    x, y = theirs.encode_query(texts), theirs.encode_document(texts)
    assert ours.similarity_fn_name == theirs.similarity_fn_name
    assert np.abs(ours.similarity(a, b) - theirs.similarity(x, y).numpy()).max() < 1e-4
    assert np.abs(ours.similarity_pairwise(a, b) - theirs.similarity_pairwise(x, y).numpy()).max() < 1e-4


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_that_are_filled_up(kind, attend, tmp_path, implementation):
    if kind == "deberta-v2" and not attend:
        pytest.skip("refused")
    expansion = {"strategy": "fixed", "length": 9, "attend": attend}
    theirs, ours = both(tmp_path, kind, query_expansion=expansion, document_length=12)
    require_same(theirs, ours)


@pytest.mark.parametrize(
    ("saved_by_it", "model_type"),
    [
        ({"query_length": 8, "document_length": 12, "attend_to_expansion_tokens": False}, "ColBERT"),
        ({"query_length": 8, "document_length": 12, "attend_to_expansion_tokens": True}, None),
        (
            {"query_length": 6, "document_length": 9, "do_query_expansion": False, "skiplist_words": ["a"]},
            "ColBERT",
        ),
        ({"similarity_fn_name": "MaxSim"}, "ColBERT"),
    ],
)
@pytest.mark.parametrize("markers", [("[Q] ", "[D] "), ("[Q]", "[D]"), ()])
def test_folders_of_pylate(saved_by_it, model_type, markers, tmp_path):
    transformer(tmp_path, "bert", "tree", markers)
    (tmp_path / "1_Dense").mkdir()
    dense(bias=False).save(str(tmp_path / "1_Dense"))
    (tmp_path / "1_Dense/config.json").write_text(
        json.dumps({"in_features": 48, "out_features": 16, "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity"})
    )  # fmt: skip
    types = ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")
    modules = [{"idx": i, "name": str(i), "path": path, "type": name} for i, (name, path) in enumerate(types)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 63, "do_lower_case": false}')
    config = {"model_type": model_type} if model_type else {}
    config |= {"query_prefix": "[Q] ", "document_prefix": "[D] ", **saved_by_it}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    theirs, ours = MultiVectorEncoder(str(tmp_path), device="cpu"), models.load(tmp_path)
    assert {**ours.encoder.prompts} == {key: theirs.prompts[key] for key in ("query", "document")}
    if not markers:  # ordinary text then, of words that are not known
        assert ours.text.encode(["[Q] a"]) == [[1, 3, 5, 2]]
    require_same(theirs, ours)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"query_maxlen": 9, "attend_to_mask_tokens": True, "query_token_id": "cat", "doc_token_id": "dog"},
    ],
)
def test_folders_of_stanford(metadata, tmp_path):
    transformer(tmp_path, "bert", "tree", ("[unused0]", "[unused1]", "!"))
    path = tmp_path / "model.safetensors"
    weights = {f"bert.{name}": weight for name, weight in load_file(path).items()}
    weights["linear.weight"] = np.random.default_rng(1).standard_normal((16, 48), np.float32)
    save_file(weights, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    if metadata is not None:
        (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    theirs, ours = MultiVectorEncoder(str(tmp_path), device="cpu"), models.load(tmp_path)
    require_same(theirs, ours, [*LONG, "the ! cat"])
