"""BERT in GGUF files: names of its tensors, and the values that config.json and modules.json would have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastattn._gguf import GgufFile
    from fastattn.models._files import Config

TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
BLOCK = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "context_length": "max_position_embeddings",
}
_TABLES = {"vocab_size": "token_embd.weight", "type_vocab_size": "token_types.weight"}
_POOLINGS = ("mean", "mean", "cls", "lasttoken")  # the first: none, as where a folder says nothing


def values_of(said: Config, file: GgufFile) -> dict[str, Any]:
    """The values, by config.json's names; and "pooling", a mode of sentence-transformers.

    Files do not say which GELU it is. The models that are converted have the exact one.
    """
    if said.get("bert.attention.causal", bool, False):
        raise said.wrong("bert.attention.causal", True, "False")
    said.number("bert.attention.layer_norm_epsilon")
    kind = said.size("bert.pooling_type", 0, low=0)
    if kind >= len(_POOLINGS):
        raise said.wrong("bert.pooling_type", kind, "0 to 3: vectors of texts, and no scores of pairs")
    values: dict[str, Any] = {"model_type": "bert", "hidden_act": "gelu", "pooling": _POOLINGS[kind]}
    values |= {name: said.values.get(f"bert.{key}") for key, name in SIZES.items()}
    return values | {name: file.shape(x)[0] for name, x in _TABLES.items() if x in file.names}
