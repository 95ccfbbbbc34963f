"""Encoders that are decoders without an output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn.layers._block import model_program
from fastattn.models._embeddings import Embeddings
from fastattn.models._encoder import Encoder
from fastattn.models._sentences import Sentences
from fastattn.models._text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fastattn._args.types import Shape
    from fastattn.layers._block import Window
    from fastattn.models._blocks import Blocks
    from fastattn.models._decoder import DecoderNames
    from fastattn.models._embeddings import Places


def read_encoder(
    names: DecoderNames,
    blocks: Blocks,
    places: Callable[[tuple[Window, ...]], Places],
    *,
    scales: Sequence[float] | None = None,
    windows: Sequence[Window] | None = None,
    rotations: Sequence[int | None] | None = None,
    others: Mapping[str, Shape] | None = None,
    embedding_scale: float = 1.0,
) -> Encoder:
    """The encoder of `blocks`, whose hidden states are those behind the last norm.

    `scales`, `windows` and `rotations` are those of `Blocks.read`. `places` makes what the blocks are told,
    of the different windows. It may read tensors that are not in `names`, whose shapes are `others`. Texts
    are cut to `max_position_embeddings`; ids may go beyond it.
    """
    folder, config, tensors, precision = blocks.source
    vocab, tokens = config.size("vocab_size"), f"{names.tokens}.weight"
    longest = config.optional_size("max_position_embeddings")
    tensors.drop_prefix(names.prefix)
    shapes: dict[str, Shape] = {tokens: (vocab, blocks.hidden), **blocks.norm_shapes(names.norm)}
    tensors.expect({**shapes, **blocks.shapes(), **(others or {})}, own=names.own, ignored=names.ignored)
    program, kinds = model_program(blocks.read(scales, windows, rotations), last=blocks.norm(names.norm))
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
        embeddings=Embeddings(tensors[tokens], scale=embedding_scale),
        places=places(kinds),
        sentences=Sentences.of(folder, blocks.hidden, precision.dtype),
    )
