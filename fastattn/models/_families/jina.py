"""Jina's encoders: BERTs with other positions, and adapters.

jina-embeddings-v2 (Günther et al. 2023) has a gated feed-forward, and takes from scores what grows with the
distance, to either side (ALiBi). The one for code norms queries and keys, and once more after attention.

jina-embeddings-v3 (Sturua et al. 2024) has rotary positions, and for each task an adapter: a product of two
narrow matrices is added to a tensor. Adapters are in the file of the weights, under torch's names for
parametrizations; transformers' port has them in folders, which are not read.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._args.types import Activation, Array
from fastattn.models._blocks import BlockNames, Blocks, Keys
from fastattn.models._embeddings import AlibiBiases, Frequencies
from fastattn.models._encode_calls import routed
from fastattn.models._encoder import Encoder
from fastattn.models._families.bert import BERT, bert
from fastattn.models._families.shared import ModelNames, frequencies, read_encoder, scaled
from fastattn.models._files import Config, ModelError
from fastattn.models._parameters import Precision
from fastattn.models._source import Source
from fastattn.positions import alibi_slopes

Pairs = dict[str, tuple[Array, Array]]  # of a tensor (n, m), by its name: (n, rank) and (rank, m)

_V2 = BERT._replace(
    positions=None,
    block=BERT.block._replace(
        inner="mlp.gated_layers", gate="mlp.gated_layers", outer="mlp.wo", inner_norm="mlp.layernorm"
    ),
    prefixes=("bert.",),
)
_V2_CODE = _V2._replace(  # jina-embeddings-v2-base-code
    block=_V2.block._replace(
        inner="mlp.up_gated_layer",
        gate="mlp.up_gated_layer",
        gate_first=False,
        outer="mlp.down_layer",
        head_norms=("attention.self.layer_norm_q", "attention.self.layer_norm_k"),
        norms_of_all=True,
        head_norm="layer_norm",
        second_norm="layer_norm_1",
        inner_norm="layer_norm_2",
    )
)
_GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}
_ORIGINAL, _LORA = ".parametrizations.weight.original", ".parametrizations.weight.0.lora_"
_V3 = ModelNames(
    tokens="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    first_norm="emb_ln",
    block=BlockNames(
        prefix="encoder.layers.{}.",
        qkv=("mixer.Wqkv",),
        attended="mixer.out_proj",
        attention_norm="norm1",
        inner="mlp.fc1",
        outer="mlp.fc2",
        inner_norm="norm2",
        norm_first=False,
    ),
    prefixes=("roberta.",),
    ignored=re.compile(re.escape(_LORA) + "[AB]$"),
)
TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
_USUAL = "base"  # of a text without a task: no adapter
_ROUTES = {"query": TASKS[0], "document": TASKS[1]}  # of encode_query and encode_document


def by_positions(source: Source) -> Encoder:
    """Build BERT, or a model of Jina's, whose config.json calls it BERT or XLM-RoBERTa, too."""
    builders = {"alibi": v2, "rotary": v3}
    positions: Any = source.config.values.get("position_embedding_type")
    return builders.get(positions if isinstance(positions, str) else "", bert)(source)


def v2(source: Source) -> Encoder:
    """Build jina-embeddings-v2; the one for code has more norms, and other names of tensors."""
    for_code = any(name.endswith(".layer_norm_q.weight") for name in source.names)
    config, all_names = source.config, _V2_CODE if for_code else _V2
    names = all_names.block
    config.refuse(is_decoder=False, add_cross_attention=False)
    keys = Keys(activation="feed_forward_type")
    biased = names.maps - {names.inner}
    blocks = Blocks.of(source, names, keys, activation=None, activations=_GATES, biased=biased, bias=0)
    slopes = alibi_slopes(blocks.heads).astype(source.precision.lane)
    return read_encoder(
        all_names,
        blocks,
        types=config.size("type_vocab_size", 2),
        longest=config.size("max_position_embeddings"),
        biases=lambda: AlibiBiases(slopes),
    )


def v3(source: Source) -> Encoder:
    """Build jina-embeddings-v3, with a route for each adapter."""
    config, found = source.config, _base(source)
    tasks: Any = config.values.get("lora_adaptations")
    if tasks is not None and (
        not isinstance(tasks, list)
        or not all(isinstance(task, str) and task not in ("", _USUAL) for task in tasks)
        or len(set(tasks)) < len(tasks)
    ):
        raise config.wrong("lora_adaptations", tasks, f"a list of different tasks, none of them {_USUAL!r}")
    if not tasks and (ported := sorted(source.folder.glob("*/adapter_config.json"))):
        came = f"{ported[0]}: an adapter in a separate file is not supported"
        raise ModelError(f"{came}; expected the folder jinaai/jina-embeddings-v3, which holds all of them")
    if not tasks or source.route is not None:
        return found
    prompts = dict(found.sentences.prompts)
    for name, task in _ROUTES.items():
        prompts[name] = prompts.get(name) or prompts.get(task, "")
    found = replace(found, sentences=replace(found.sentences, prompts=prompts))
    make = partial(_adapted, source.folder, source.outer, source.precision, found.sentences)
    mappings = {key: task for key, task in _ROUTES.items() if task in tasks}
    encoders: dict[str, Encoder | None] = {_USUAL: found, **dict.fromkeys(tasks)}
    return routed(encoders, _USUAL, mappings, make)


def _base(source: Source) -> Encoder:
    """The encoder of the tensors of `source`."""
    config, original = source.config, "rotary_emb_base" in source.config.values
    source.rename(lambda name: name.replace(_ORIGINAL, ".weight"))
    blocks = Blocks.of(source, _V3.block, eps=1e-5)
    config.refuse(is_decoder=False, add_cross_attention=False, rotary_emb_scale_base=None, emb_pooler=None)

    def rotary() -> Frequencies:
        if not original:
            return frequencies(config, blocks.head_dim, 20000.0)
        return scaled(config, blocks.head_dim, {"rope_theta": config.number("rotary_emb_base")}, None)

    return read_encoder(
        _V3,
        blocks,
        types=config.size("type_vocab_size", 1),
        longest=config.size("max_position_embeddings"),
        frequencies=lambda: (rotary(),),
    )


def _adapted(folder: Path, outer: Path, precision: Precision, sentences: Any, task: str) -> Encoder:
    """The encoder with the adapter of a `task`."""
    with ExitStack() as stack:
        config = Config(folder / "config.json")
        source = Source(folder, config, precision, stack, outer)
        source.rename(lambda name: name.replace(_ORIGINAL, ".weight"))
        source.drop_prefix(*_V3.prefixes)
        source.add(_of_file(source, config.values["lora_adaptations"].index(task)))
        return replace(_base(source), sentences=sentences, origin=None)


def _of_file(source: Source, number: int) -> Pairs:
    """The pairs of the adapter with this number."""
    scale = source.config.number("lora_alpha", 1) / source.config.size("lora_rank", 4)
    pairs: Pairs = {}
    for name in source.names:
        if not name.endswith(f"{_LORA}A") or name.startswith("pooler."):
            continue
        base = name.removesuffix(f"{_LORA}A")
        a, b = (source.table(f"{base}{_LORA}{part}") for part in "AB")
        if a.ndim != 3 or b.ndim != 3 or number >= min(len(a), len(b)):
            raise ModelError(
                f"{source.tensors.where}: {name!r} has shape {a.shape}; expected one for each task"
            )
        one, other = (x[number].astype(np.float32) for x in ((a, b) if "embeddings." in base else (b, a)))
        pairs[f"{base}.weight"] = one * np.float32(scale), other
    return pairs
