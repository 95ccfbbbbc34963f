"""Heads against sentence-transformers' CrossEncoder and transformers: tiny models made and saved here."""

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tiny_tokenizers import WORDS, write_byte_tokenizer
from transformers_folders import KINDS, made, reloaded, require_close

from fastattn import models

pytestmark = pytest.mark.usefixtures("quiet")
RNG = np.random.default_rng(5)
LONG = "the cat " * 30
PAIRS = [tuple(" ".join(RNG.choice(WORDS[4:], RNG.integers(0, 16))) for _ in range(2)) for _ in range(20)]
PAIRS += [(LONG, "a dog"), ("a dog", LONG), (LONG, "a dog " * 30)]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits(kind, tmp_path, implementation):
    theirs = made(tmp_path, kind, transformers.AutoModelForSequenceClassification, num_labels=4)
    ours = models.load(tmp_path)
    ids = RNG.integers(3, len(WORDS), (5, 24))
    mask = np.arange(24) < np.array([24, 1, 9, 17, 5])[:, None]
    types = RNG.integers(0, KINDS[kind][1].get("type_vocab_size") or 1, ids.shape)
    ids[~mask] = theirs.config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask.astype(int), "token_type_ids": types}
    with torch.no_grad():
        expected = theirs(**{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()
    require_close(ours(ids, mask, types), expected)


FLAT = """{%- set rules = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
{%- set asked = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set found = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>system
Only "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ rules | default("Is it an answer?", true) }}
<Query>: {{ asked }}
<Document>: {{ found }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{% if add_generation_prompt %}>{% endif %}"""
STRUCTURED = FLAT.replace('map(attribute="content") | first', 'map(attribute="content.0.text") | first')
STRUCTURED += "{# content[0] #}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
LONGER = [*PAIRS, ("a mat?", "What is said\n\nof <Query>: é 日本 " * 20), ("Who? " * 100, "a cat")]


def made_reranker(folder, kind, template=FLAT, tied=False, negative=True, processing=None, **tokenizer):
    """A CrossEncoder of a language model, as sentence-transformers saves it, and ours."""
    write_byte_tokenizer(folder)
    written = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token=SPECIAL[0], eos_token=SPECIAL[2],
        additional_special_tokens=SPECIAL[1:], chat_template=template, **tokenizer,
    )  # fmt: skip
    written.save_pretrained(folder)
    sizes = {"vocab_size": 256 + len(SPECIAL), "max_position_embeddings": 2048, "tie_word_embeddings": tied}
    made(folder, kind, transformers.AutoModelForCausalLM, **sizes)
    how = {"processing_kwargs": processing and {"chat_template": processing}}
    transformer = Transformer(str(folder), transformer_task="text-generation", **how)
    parts = [transformer, LogitScore(90, 91 if negative else None)]
    prompts, function = {"short": "Is it so?"}, torch.nn.Tanh()
    theirs = CrossEncoder(modules=parts, device="cpu", prompts=prompts, activation_fn=function)
    return reloaded(theirs, folder / "saved")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tied": True, "model_max_length": 220}),
        ("qwen3", {"negative": False, "model_max_length": 220, "truncation_side": "left"}),
        ("qwen3", {"template": STRUCTURED, "model_max_length": 90}),
        ("qwen3", {"processing": {"add_generation_prompt": True}, "model_max_length": 200}),
        ("qwen3", {"processing": {"restore_suffix": False}, "model_max_length": 200}),
        ("qwen3", {"model_max_length": 20}),
        ("llama", {"model_max_length": 220}),
        ("mistral", {"model_max_length": 220}),
    ],
)
def test_rerankers_that_are_language_models(kind, changes, tmp_path, implementation):
    theirs, ours = made_reranker(tmp_path, kind, **changes)
    assert ours.activation == "Tanh"
    assert ours.template.structured == (theirs[0].input_formatter.message_format == "structured")
    for options in ({}, {"prompt": "Is it of cats?"}, {"prompt_name": "short"}):
        expected = theirs.predict(LONGER, **options)
        require_close(ours.predict(LONGER, **options), expected)
        require_close(ours.predict(LONGER, batch_size=3, **options), expected)
    require_close(ours.predict(LONGER[0]), theirs.predict(LONGER[0]))
    plain = {"activation_fn": torch.nn.Identity()}, {"activation_fn": lambda x: x}
    require_close(ours.predict(LONGER, **plain[1]), theirs.predict(LONGER, **plain[0]))
    documents = [second for _, second in LONGER]
    expected, got = (each.rank("the cat sat", documents, top_k=5) for each in (theirs, ours))
    scores = (np.array([each["score"] for each in ranked]) for ranked in (got, expected))
    require_close(*scores)  # cut, some tie
    assert isinstance(models.load(tmp_path), models.Decoder)
