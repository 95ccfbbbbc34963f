"""Heads against sentence-transformers' CrossEncoder and transformers: tiny models made and saved here."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tiny_tokenizers import WORDS, write_byte_tokenizer, write_tokenizer
from transformers_folders import DISTIL_SIZES, SIZES, randomised, save_tokenizer

from fastattn import models

TOLERANCE = 1e-5
KINDS = {
    "bert": (transformers.BertConfig, {"type_vocab_size": 2}),
    "roberta": (transformers.RobertaConfig, {"type_vocab_size": 1, "pad_token_id": 0}),
    "xlm-roberta": (transformers.XLMRobertaConfig, {"type_vocab_size": 1, "pad_token_id": 0}),
    "camembert": (transformers.CamembertConfig, {"type_vocab_size": 2, "pad_token_id": 0}),
    "mpnet": (
        transformers.MPNetConfig,
        {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 66},
    ),
    "distilbert": (transformers.DistilBertConfig, {**DISTIL_SIZES, "type_vocab_size": 1}),
    "albert": (transformers.AlbertConfig, {"type_vocab_size": 2, "embedding_size": 16}),
    "deberta-v2": (
        transformers.DebertaV2Config,
        {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "modernbert": (transformers.ModernBertConfig, {"type_vocab_size": 1, "pad_token_id": 0}),
    "eurobert": (transformers.EuroBertConfig, {"num_key_value_heads": 2, "pad_token_id": 0}),
    **{
        f"eurobert-{name}": (transformers.EuroBertConfig, {"classifier_pooling": name, "pad_token_id": 0})
        for name in ("bos", "mean")
    },
    "jina": (transformers.JinaEmbeddingsV3Config, {"type_vocab_size": 1, "pad_token_id": 0}),
    "gte": (transformers.GteConfig, {"pad_token_id": 0, "type_vocab_size": 1}),
    "nomic_bert": (transformers.NomicBertConfig, {"pad_token_id": 0, "type_vocab_size": 1}),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 2, "pad_token_id": 0}),
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 2, "pad_token_id": 0}),
    "mistral": (transformers.MistralConfig, {"num_key_value_heads": 2, "pad_token_id": 0}),
    "modernbert-mean": (
        transformers.ModernBertConfig,
        {"pad_token_id": 0, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "modernbert-eps": (transformers.ModernBertConfig, {"pad_token_id": 0, "norm_eps": 1e-2}),
}
OF_TEXTS = [kind for kind in KINDS if kind != "qwen2"]  # for which transformers makes another tokenizer
RNG = np.random.default_rng(5)
PAIRS = [tuple(" ".join(RNG.choice(WORDS[4:], RNG.integers(0, 16))) for _ in range(2)) for _ in range(20)] + [
    ("the cat " * 30, "a dog"),
    ("a dog", "the cat " * 30),
    ("the cat " * 30, "a dog " * 30),
]


def made(folder, kind, task, labels, **tokenizer):
    """The folder of a tiny model and its tokenizer, as transformers writes it; and the model."""
    write_tokenizer(folder)
    if kind == "mpnet":  # which takes the token 1 for padding, whatever its configuration says
        path = folder / "tokenizer.json"
        read = json.loads(path.read_text())
        read["model"]["vocab"] |= {"<s>": 0, "<pad>": 1}
        read["post_processor"]["special_tokens"]["<s>"]["ids"] = [0]
        read["added_tokens"][0]["id"] = 0
        path.write_text(json.dumps(read))
    save_tokenizer(folder, **tokenizer)
    config, changes = KINDS[kind]
    config = config(**{**SIZES, **changes}, num_labels=labels)
    model = randomised(getattr(transformers, f"AutoModelFor{task}").from_config(config), 4)
    model.save_pretrained(folder)
    return model


def require_close(got, expected):
    expected = np.asarray(expected)
    assert got.shape == expected.shape
    assert np.abs(expected).mean() > 0.01, "a result next to nothing shows nothing"
    assert np.abs(got - expected).max() < TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", OF_TEXTS)
def test_predict(kind, labels, tmp_path, implementation):
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if kind == "bert" else {}
    made(tmp_path, kind, "SequenceClassification", labels, model_max_length=40, **names)
    theirs, ours = CrossEncoder(str(tmp_path), device="cpu"), models.load(tmp_path)
    assert ours.num_labels == theirs.num_labels == labels
    expected = theirs.predict(PAIRS)
    require_close(ours.predict(PAIRS), expected)
    require_close(ours.predict(PAIRS, batch_size=3), expected)
    require_close(ours.predict(PAIRS, prompt="a tree "), theirs.predict(PAIRS, prompt="a tree "))
    require_close(ours.predict(PAIRS, apply_softmax=True), theirs.predict(PAIRS, apply_softmax=True))
    plain = {"activation_fn": torch.nn.Identity()}, {"activation_fn": lambda x: x}
    require_close(ours.predict(PAIRS, **plain[1]), theirs.predict(PAIRS, **plain[0]))
    require_close(ours.predict(PAIRS[0]), theirs.predict(PAIRS[0]))
    require_close(ours.predict("the cat"), theirs.predict("the cat"))


@pytest.mark.parametrize("name", ["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"])
def test_activations_and_prompts_that_it_saves(name, tmp_path):
    made(tmp_path, "bert", "SequenceClassification", 5)
    with warnings.catch_warnings():  # what it has to say is not ours to mend
        warnings.simplefilter("ignore")
        theirs = CrossEncoder(
            str(tmp_path), device="cpu", activation_fn=getattr(torch.nn, name)(), max_length=16,
            prompts={"rank": "the dog "}, default_prompt_name="rank",
        )  # fmt: skip
        theirs.save_pretrained(str(tmp_path / "saved"))
        theirs = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    ours = models.load(tmp_path / "saved")
    assert ours.activation == name
    assert ours.text.limit == 16
    require_close(ours.predict(PAIRS), theirs.predict(PAIRS))
    require_close(ours.predict(PAIRS, prompt=""), theirs.predict(PAIRS, prompt=""))


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind, tmp_path, implementation):
    theirs = made(tmp_path, kind, "SequenceClassification", 4)
    ours = models.load(tmp_path)
    ids = RNG.integers(3, len(WORDS), (5, 24))
    mask = np.arange(24) < np.array([24, 1, 9, 17, 5])[:, None]
    types = RNG.integers(0, KINDS[kind][1].get("type_vocab_size") or 1, ids.shape)
    ids[~mask] = theirs.config.pad_token_id
    names = ("input_ids", "attention_mask", "token_type_ids")
    with torch.no_grad():
        inputs = {
            name: torch.tensor(x) for name, x in zip(names, (ids, mask.astype(int), types), strict=True)
        }
        expected = theirs(**inputs).logits.numpy()
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
    """A language model that scores pairs, as sentence-transformers saves it; and its CrossEncoder."""
    write_byte_tokenizer(folder)
    written = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token=SPECIAL[0], eos_token=SPECIAL[2],
        additional_special_tokens=SPECIAL[1:], chat_template=template, **tokenizer,
    )  # fmt: skip
    written.save_pretrained(folder)
    config, changes = KINDS[kind]
    changes = {**SIZES, **changes, "vocab_size": 256 + len(SPECIAL), "max_position_embeddings": 2048}
    model = transformers.AutoModelForCausalLM.from_config(config(**changes, tie_word_embeddings=tied))
    randomised(model, 6).save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = Transformer(
            str(folder),
            transformer_task="text-generation",
            processing_kwargs=processing and {"chat_template": processing},
        )
        score = LogitScore(90, 91 if negative else None)
        prompts = {"short": "Is it so?"}
        theirs = CrossEncoder(
            modules=[transformer, score], device="cpu", prompts=prompts, activation_fn=torch.nn.Tanh()
        )
        theirs.save_pretrained(str(folder / "saved"))
        return CrossEncoder(str(folder / "saved"), device="cpu")


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
    theirs = made_reranker(tmp_path, kind, **changes)
    ours = models.load(tmp_path / "saved")
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
    require_close(
        *(np.array([each["score"] for each in ranked]) for ranked in (got, expected))
    )  # cut, some tie
    assert isinstance(models.load(tmp_path), models.Decoder)


def test_a_reranker_that_takes_texts_without_a_template(tmp_path):
    theirs = made_reranker(tmp_path, "qwen3", template=None, model_max_length=60)
    ours = models.load(tmp_path / "saved")
    assert ours.template is None
    require_close(ours.predict(LONGER), theirs.predict(LONGER))
    require_close(ours.predict(LONGER, prompt="Is it? "), theirs.predict(LONGER, prompt="Is it? "))
