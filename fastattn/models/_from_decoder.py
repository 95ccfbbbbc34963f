"""Encoders that are decoders without an output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn.layers._block import model_program
from fastattn.models._embeddings import Embeddings, Places
from fastattn.models._encoder import Encoder
from fastattn.models._sentences import Pooling, Sentences
from fastattn.models._text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastattn.layers._block import Window
    from fastattn.models._blocks import Blocks
    from fastattn.models._decoder import DecoderNames
    from fastattn.models._embeddings import Frequencies


def read_encoder(
    names: DecoderNames,
    blocks: Blocks,
    *,
    windows: Sequence[Window],
    frequencies: Callable[[], Frequencies],
    causal: bool,
) -> Encoder:
    """The encoder of `blocks`, whose hidden states are those behind the last norm.

    `windows` are those of `Blocks.read`, and `frequencies` returns those of the rotary positions. Texts are
    cut to `max_position_embeddings`; ids may go beyond it.
    """
    folder, config, tensors, precision = blocks.source
    vocab, tokens = config.size("vocab_size"), f"{names.tokens}.weight"
    longest = config.optional_size("max_position_embeddings")
    tensors.drop_prefix(names.prefix)
    shapes = {tokens: (vocab, blocks.hidden), **blocks.norm_shapes(names.norm), **blocks.shapes()}
    tensors.expect(shapes, own=names.own, ignored=names.ignored)
    rotary = frequencies()  # of a size that tensors confirm
    program, kinds = model_program(
        blocks.read(None, windows, [0] * blocks.num_layers), last=blocks.norm(names.norm)
    )
    return Encoder(
        model_type=config.get("model_type", str),
        hidden_size=blocks.hidden,
        num_heads=blocks.heads,
        num_layers=blocks.num_layers,
        vocab_size=vocab,
        program=program,
        precision=precision,
        text=Text(folder, longest),
        max_length=None,
        embeddings=Embeddings(tensors[tokens]),
        places=Places(kinds, causal, (rotary,)),
        pooling=Pooling.of(folder),
        sentences=Sentences.of(folder),
    )
