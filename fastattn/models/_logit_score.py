"""Language models that score pairs, as Qwen3-Reranker: the logit of "yes" less that of "no"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastattn import ops
from fastattn._args.types import lane_dtype
from fastattn.models._chat import ChatTemplate
from fastattn.models._classify import CrossEncoder
from fastattn.models._files import Config, ModelError
from fastattn.models._sentences import Dense, Pooling

if TYPE_CHECKING:
    from fastattn._args.types import Array
    from fastattn.models._blocks import Source
    from fastattn.models._encoder import Encoder

_KINDS = ("llama", "mistral", "qwen2", "qwen3")


def logit_score_encoder(source: Source, encoder: Encoder, inner: str, activation: str) -> CrossEncoder:
    """Of the last token, as the folder `inner` of the module LogitScore says."""
    if encoder.model_type not in _KINDS:
        came = f"'model_type' of LogitScore is {encoder.model_type!r}"
        raise ModelError(f"{source.config.path}: {came}; expected one of {', '.join(_KINDS)}")
    config = Config(source.folder / inner / "config.json")
    config.refuse(module_input_name="causal_logits")
    names = ["true_token_id"]
    if config.values.get("false_token_id") is not None:  # else the first one's logit is the score
        names.append("false_token_id")
    ids = [config.size(name, low=0) for name in names]
    for name, token in zip(names, ids, strict=True):
        if token >= encoder.vocab_size:
            expected = f"less than 'vocab_size' of config.json, {encoder.vocab_size}"
            raise ModelError(f"{config.path}: {name!r} is {token}; expected {expected}")
    head = (Dense(ops.pack(_row(source, encoder, ids)), None, "Identity"),)
    template = ChatTemplate.of(source.folder)
    return CrossEncoder(encoder, head, ("LABEL_0",), activation, Pooling(("lasttoken",)), template)


def _row(source: Source, encoder: Encoder, ids: list[int]) -> Array:
    """The output layer's row of the first id, less that of the second: (1, hidden_size)."""
    tied = source.config.get("tie_word_embeddings", bool, False)
    output = "embed_tokens.weight" if tied else "lm_head.weight"
    source.tensors.expect({output: (encoder.vocab_size, encoder.hidden_size)}, ())
    rows = source.tensors.rows(output, ids).astype(lane_dtype(source.precision.dtype))
    return np.array(rows[:1] if len(ids) == 1 else rows[:1] - rows[1:])
