"""Jina's encoders against transformers, with adapters that are added to its weights here."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tiny_tokenizers import TEXTS
from transformers_folders import SIZES, randomised, require_close, save_tokenizer

from fastattn import models
from fastattn import sentence_transformers as ours

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
RANK, ALPHA = 3, 2.0
PROMPTS = {"retrieval.query": "the dog sat ", "retrieval.passage": "a tree "}
RNG = np.random.default_rng(4)


def model(**changes):
    config = transformers.JinaEmbeddingsV3Config(
        **{**SIZES, "pad_token_id": 0, "type_vocab_size": 1, **changes}
    )
    return randomised(transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=False))


def drawn(*shape):
    return (RNG.standard_normal(shape) * 0.3).astype(np.float32)


def adapters(theirs):
    """An adapter for each task: by the name of a module, matrices (out, rank) and (rank, in)."""
    shapes = {
        name: tuple(x.weight.shape)
        for name, x in theirs.named_modules()
        if isinstance(x, torch.nn.Linear | torch.nn.Embedding)
    }
    return [{name: (drawn(n, RANK), drawn(RANK, m)) for name, (n, m) in shapes.items()} for _ in TASKS]


def with_adapter(theirs, adapter):
    """A copy of transformers' model whose weights have the products of the adapter."""
    copy = type(theirs)(theirs.config, add_pooling_layer=False).eval()
    copy.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for name, (b, a) in adapter.items():
            copy.get_submodule(name).weight += torch.from_numpy(b @ a) * (ALPHA / RANK)
    return copy


def vectors(theirs, folder, prompt=""):
    """Means of hidden states, as sentence-transformers makes them of this model of transformers."""
    first = modules.Transformer(str(folder), max_seq_length=32)
    first.auto_model = first.model = theirs
    model = SentenceTransformer(
        modules=[first, modules.Pooling(48, "mean"), modules.Normalize()], device="cpu"
    )
    assert model[0].auto_model is theirs
    return model.encode(TEXTS, prompt=prompt)


def write_modules(folder, first="sentence_transformers.models.Transformer", **settings):
    kinds = ("Pooling", "Normalize")
    entries = [{"path": "", "type": first, **({"kwargs": ["task"]} if first[0] == "c" else {})}]
    entries += [{"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
                for i, kind in enumerate(kinds, 1)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def write_original(folder, theirs, found):
    """The folder as Jina publishes it: one file, with the names of torch's parametrizations."""
    theirs.save_pretrained(folder)
    tensors = {}
    plain = load_file(folder / "model.safetensors")
    split = {f"self_attn.{part}_proj" for part in "qkv"}
    for module, (b, a) in found[0].items():
        name = module.replace("self_attn.o_proj", "mixer.out_proj").replace("layers.", "encoder.layers.")
        layer, _, last = module.rpartition("self_attn.")
        if f"self_attn.{last}" in split:
            if last != "q_proj":
                continue
            name = f"encoder.{layer}mixer.Wqkv"
            parts = [[each[f"{layer}self_attn.{part}_proj"] for part in "qkv"] for each in found]
            for each in parts:  # one map, and so one first matrix, in the original
                assert all(x[1] is each[0][1] for x in each)
            a, b = (
                np.stack([each[0][1] for each in parts]),
                np.stack([np.concatenate([x[0] for x in each]) for each in parts]),
            )
        else:
            a, b = (np.stack([each[module][i] for each in found]) for i in (1, 0))
        if "embeddings." in name:
            a, b = b, a  # the first one is that of the tokens
        key = f"roberta.{name}.parametrizations.weight"
        tensors |= {
            f"{key}.original": plain.pop(f"{name}.weight"),
            f"{key}.0.lora_A": a,
            f"{key}.0.lora_B": b,
        }
    tensors |= {f"roberta.{name}": x for name, x in plain.items()}
    tensors |= {"roberta.pooler.dense.parametrizations.weight.0.lora_A": drawn(5, RANK, 48)}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": theta,
               "lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA,
               "architectures": ["XLMRobertaLoRA"], "emb_pooler": None}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_modules(folder, "custom_st.Transformer", prompts=PROMPTS)


def test_adapters(tmp_path, quiet_torch, implementation):
    theirs = model()
    found = adapters(theirs)
    for adapter in found:
        for name in [name for name in adapter if name.endswith("q_proj")]:
            for part in "kv":
                other = name.replace("q_proj", f"{part}_proj")
                adapter[other] = adapter[other][0], adapter[name][1]
    plain, folder = tmp_path / "plain", tmp_path / "model"
    for each in (plain, folder):
        each.mkdir()
        save_tokenizer(each)
    theirs.save_pretrained(plain)
    write_original(folder, theirs, found)
    loaded, shim = models.load(folder), ours.SentenceTransformer(str(folder))
    base = vectors(theirs, plain)
    require_close(loaded.encode(TEXTS), base)
    for task, adapter in zip(TASKS, found, strict=True):
        changed = with_adapter(theirs, adapter)
        expected = vectors(changed, plain)
        assert np.abs(expected - base).max() > 0.1, "an adapter that changes nothing shows nothing"
        require_close(loaded.encode(TEXTS, task=task), expected)
        require_close(shim.encode(TEXTS, task=task), expected)
        if task in PROMPTS:
            expected = vectors(changed, plain, PROMPTS[task])
            call = "encode_query" if task == TASKS[0] else "encode_document"
            require_close(getattr(loaded, call)(TEXTS), expected)
            require_close(getattr(shim, call)(TEXTS), expected)
            require_close(shim.encode(TEXTS, task=task, prompt_name=task), expected)
    require_close(loaded.encode(TEXTS, task="base"), base)
    with pytest.raises(ValueError, match=r"task is 'other'; expected one of 'base', 'retrieval\.query', "):
        loaded.encode(TEXTS, task="other")
    loaded.max_seq_length = 3
    require_close(loaded.encode("the cat sat", task=TASKS[2]), loaded.encode("the", task=TASKS[2]))
