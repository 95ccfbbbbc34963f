"""What the families of encoders have in common: from the names of tensors to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastattn.layers._block import model_program
from fastattn.models._embeddings import Embeddings, Places
from fastattn.models._encoder import Encoder
from fastattn.models._sentences import Sentences
from fastattn.models._tensors import NOTHING
from fastattn.models._text import Text

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

    from fastattn._args.types import Shape
    from fastattn.layers._block import Window
    from fastattn.models._blocks import BlockNames, Blocks
    from fastattn.models._buckets import BucketBiases
    from fastattn.models._embeddings import Frequencies


class EncoderNames(NamedTuple):
    """What a family calls an encoder's tensors, without ".weight" and ".bias"."""

    block: BlockNames
    tokens: str
    first_norm: str | None = None  # before the first block
    positions: str | None = None
    types: str | None = None
    widened: str | None = None  # a map from the tokens' vectors to the blocks' width
    last_norm: str | None = None  # behind the last block
    prefixes: tuple[str, ...] = ()  # of all tensors; some files leave it out
    ignored: re.Pattern[str] = NOTHING  # tensors that were not learned, in old files


def read_encoder(
    names: EncoderNames,
    blocks: Blocks,
    *,
    types: int = 0,
    positions: int = 0,
    first: int = 0,
    longest: int | None = None,
    scales: Sequence[float] | None = None,
    windows: Sequence[Window] | None = None,
    rotations: Sequence[int] | None = None,
    causal: bool = False,
    token_scale: float = 1.0,
    features: int | None = None,
    order: Sequence[int] | None = None,
    frequencies: Callable[[], tuple[Frequencies, ...]] | None = None,
    biases: Callable[[], BucketBiases] | None = None,
    others: Mapping[str, Shape] | None = None,
    sentences: Sentences | None = None,
) -> Encoder:
    """The encoder of `blocks`; `scales`, `windows` and `rotations` are those of `Blocks.read`.

    It has `types` token types, whose vectors have `features`; by default as many as the blocks. Those of
    tokens are times `token_scale`. Blocks run in `order`, in which they may be more than once.

    Positions are a table of `positions` rows, or rotary with what `frequencies` returns. Of a table, those
    from `first` on are counted: the one before is padding's, as is the token of that id. Texts are then cut
    at `longest`. `biases` makes those of `Places`, of more tensors, whose shapes are `others`. Of texts, the
    folder says what is done with them, unless `sentences` do.
    """
    source = blocks.source
    folder, config, tensors, precision, _ = source
    features = features or blocks.hidden
    vocab = config.size("vocab_size")
    tensors.drop_prefix(*names.prefixes)
    tables = {names.tokens: vocab}
    if names.positions is not None:
        tables[names.positions] = positions
    if names.types is not None and types:
        tables[names.types] = types
    shapes: dict[str, Shape] = {f"{name}.weight": (n, features) for name, n in tables.items()}
    if names.first_norm is not None:
        shapes |= blocks.norm_shapes(names.first_norm, features)
    if names.last_norm is not None:
        shapes |= blocks.norm_shapes(names.last_norm)
    if names.widened is not None:
        shapes[f"{names.widened}.weight"] = blocks.hidden, features
        shapes[f"{names.widened}.bias"] = (blocks.hidden,)
    shapes |= {**blocks.shapes(), **(others or {})}
    own = tuple({f"{name.partition('.')[0]}.": None for name in shapes})
    tensors.expect(shapes, own=own, ignored=names.ignored)
    rotary = () if frequencies is None else frequencies()  # of a size that tensors confirm

    each = blocks.read(scales, windows, rotations)
    program, all_windows = model_program(
        each if order is None else [each[i] for i in order],
        None if names.first_norm is None else blocks.norm(names.first_norm),
        None if names.last_norm is None else blocks.norm(names.last_norm),
        None if names.widened is None else blocks.map(names.widened),
    )
    kinds = source.vector(f"{names.types}.weight") if names.types in tables else None
    types_table = None if kinds is None else source.same(kinds.astype(precision.dtype), kinds)
    places = None
    if names.positions is not None:
        table = source.vector(f"{names.positions}.weight")
        skipped = max(first - 1, 0)
        places = table[skipped:] if kinds is None else table[skipped:] + kinds[0]
        places = places.astype(precision.dtype)
        (whole,) = tensors.origins.of(table)
        tensors.origins.note(places, [whole._replace(rows=len(places), begin=skipped)])
        longest = positions - first
    return Encoder(
        model_type=config.get("model_type", str),
        hidden_size=blocks.hidden,
        num_heads=blocks.heads,
        num_layers=blocks.num_layers if order is None else len(order),
        vocab_size=vocab,
        program=program,
        precision=precision,
        text=Text(folder, longest, vocab),
        max_length=None if places is None else longest,
        embeddings=Embeddings(
            tensors[f"{names.tokens}.weight"],
            types_table,
            places,
            token_scale,
            padding=first - 1 if first else None,
        ),
        places=Places(all_windows, causal, rotary, biases=None if biases is None else biases()),
        sentences=sentences or Sentences.of(folder, blocks.hidden, precision.dtype),
        origin=source.origin(),
    )
