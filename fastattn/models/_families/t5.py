"""T5's and mT5's encoder (sentence-t5, gtr): the names of its tensors, and the keys of its config.json.

Its norms have no mean and no bias, its maps no bias. Scores are not scaled. Positions are biases of the
scores by distance, from one table for all layers. A decoder in the file is left out.
"""

from __future__ import annotations

import re

from fastattn._args.values import short
from fastattn.models._blocks import ACTIVATIONS, BlockNames, Blocks, Keys
from fastattn.models._embeddings import BucketBiases
from fastattn.models._encoder import Encoder
from fastattn.models._families.shared import ModelNames, read_encoder
from fastattn.models._files import ModelError
from fastattn.models._source import Rows, Source

_NAMES = ModelNames(
    tokens="shared",
    block=BlockNames(
        prefix="encoder.block.{}.layer.",
        attention_norm="0.layer_norm",
        qkv=("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"),
        attended="0.SelfAttention.o",
        inner_norm="1.layer_norm",
        inner="1.DenseReluDense.wi",
        outer="1.DenseReluDense.wo",
        norm="rms_norm",
    ),
    last_norm="encoder.final_layer_norm",
    ignored=re.compile(r"^encoder\.embed_tokens\.weight$"),
)
_TOKENS = "encoder.embed_tokens"  # the same table, in some files; where the two differ, this one
_GATED = _NAMES.block._replace(gate="1.DenseReluDense.wi_0", inner="1.DenseReluDense.wi_1")
_BIASES = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_KEYS = Keys("d_model", "d_ff", "num_heads", "num_layers", "layer_norm_epsilon", activation=None)
# Values of `feed_forward_proj`: the activation, and whether it is that of a gate.
_FEED_FORWARDS = {
    **{name: (activation, False) for name, activation in ACTIVATIONS.items()},
    **{f"gated-{name}": (activation, True) for name, activation in ACTIVATIONS.items()},
    "gated-gelu": (ACTIVATIONS["gelu_new"], True),
}
_USUAL = {"t5": "relu", "mt5": "gated-gelu"}


def t5(source: Source) -> Encoder:
    """Build T5's or mT5's encoder."""
    config = source.config
    usual = config.choice("model_type", _USUAL)
    activation, gated = config.choice("feed_forward_proj", _FEED_FORWARDS, usual)
    config.refuse(is_gated_act=gated)  # which files repeat, as well as the activation
    repeated = config.values.get("dense_act_fn")
    if repeated is not None and ACTIVATIONS.get(str(repeated)) != activation:
        came, expected = f"'dense_act_fn' is {short(repeated)}", "the one of 'feed_forward_proj'"
        raise ModelError(f"{config.path}: {came}; expected {expected}, {activation}")
    config.refuse_others(head_dim="d_kv")
    names = _NAMES._replace(block=_GATED) if gated else _NAMES
    tokens = source.tied(f"{names.tokens}.weight", f"{_TOKENS}.weight")
    names = names._replace(tokens=tokens.removesuffix(".weight"))
    blocks = Blocks.of(
        source,
        names.block,
        _KEYS,
        eps=1e-6,
        head_dim=config.size("d_kv"),
        activation=activation,
        biased=frozenset(),
        bias=0,
    )
    config.refuse(is_decoder=False)
    n_buckets = config.size("relative_attention_num_buckets", 32)
    max_distance = config.size("relative_attention_max_distance", 128)

    def biases() -> BucketBiases:
        found = BucketBiases(source.vector(Rows(_BIASES, (n_buckets, blocks.heads))), max_distance)
        try:
            _ = () if source.is_planning else found(1)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{config.path}: relative positions: {error}") from error
        return found

    layers = blocks.num_layers
    return read_encoder(
        names,
        blocks,
        scales=[1.0] * layers,
        biases=biases if layers else None,
    )
