"""Readers that families share: from the names of tensors to the model, and parts of config.json.

The parts are rotary positions, windows and numbers of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastattn._args.packed import PackedLinear
from fastattn._args.types import Array, Shape
from fastattn._engine.program import build
from fastattn._engine.steps import OUT, LinearStep, NormStep, Step, X
from fastattn.layers._block import Window, held_heads, model_program
from fastattn.models._blocks import BlockNames, Blocks
from fastattn.models._decoder import Decoder, QueryGrowth
from fastattn.models._embeddings import AlibiBiases, BucketBiases, Embeddings, Frequencies, SequenceRules
from fastattn.models._encoder import Encoder
from fastattn.models._files import Config, ModelError, stop_ids
from fastattn.models._model_cache import KeyHeads
from fastattn.models._sentences import Sentences
from fastattn.models._source import NOTHING, Source
from fastattn.models._text import Text
from fastattn.positions import rope_frequencies
from fastattn.positions._rotary_scaling import SCALINGS, keys_of

ALL, NEAR = "full_attention", "sliding_attention"  # kinds of layers
_OLDER_SCALINGS = {"phi3": ("su", "yarn")}  # names that "longrope" has there, too


class ModelNames(NamedTuple):
    """The names of a model's tensors, without ".weight" and ".bias". A decoder's output is "lm_head"."""

    block: BlockNames
    tokens: str
    first_norm: str | None = None  # before the first block
    positions: str | None = None
    types: str | None = None
    widened: str | None = None  # a map from the tokens' vectors to the blocks' width
    last_norm: str | None = None  # after the last block
    prefixes: tuple[str, ...] = ()  # of all tensors but a decoder's output; some files leave it out
    ignored: re.Pattern[str] = NOTHING  # tensors that were not learned, in old files


def read_encoder(
    names: ModelNames,
    blocks: Blocks,
    *,
    types: int = 0,
    positions: int = 0,
    first: int = 0,
    longest: int | None = None,
    scales: Sequence[float] | None = None,
    windows: Sequence[Window] | None = None,
    rotations: Sequence[int | None] | None = None,
    causal: bool = False,
    token_scale: float = 1.0,
    features: int | None = None,
    order: Sequence[int] | None = None,
    frequencies: Callable[[], tuple[Frequencies, ...]] | None = None,
    biases: Callable[[], BucketBiases | AlibiBiases] | None = None,
    others: Mapping[str, Shape] | None = None,
    sentences: Sentences | None = None,
    before: Callable[[], Sequence[Step]] | None = None,
    inputs: int = 0,
) -> Encoder:
    """The encoder of `blocks`; `scales`, `windows` and `rotations` are those of `Blocks.read`.

    It has `types` token types, whose vectors have `features`; by default as many as the blocks. Those of
    tokens are times `token_scale`. Blocks run in `order`, in which they may be more than once.

    Positions are a table of `positions` rows, or rotary with what `frequencies` returns. Of a table, those
    from `first` on are counted: the one before is padding's, as is the token of that id. Texts are then cut
    at `longest`. `biases` makes those of `SequenceRules`, of more tensors, whose shapes are `others`. Where
    there are no `sentences`, the folder says what is done with texts. Steps `before` all others make what
    blocks read beside the rows, so many `inputs`.
    """
    source = blocks.source
    config, precision = source.config, source.precision
    features = features or blocks.hidden
    vocab = config.size("vocab_size")
    source.drop_prefix(*names.prefixes)
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
    source.expect(shapes, own=own, ignored=names.ignored)
    rotary = () if frequencies is None else frequencies()  # of a size that tensors confirm

    each = blocks.read(scales, windows, rotations)
    program, all_windows = model_program(
        each if order is None else [each[i] for i in order],
        None if names.first_norm is None else blocks.norm(names.first_norm),
        None if names.last_norm is None else blocks.norm(names.last_norm),
        None if names.widened is None else blocks.map(names.widened),
        () if before is None else before(),
        rounds=True,
    )
    types_table = None
    if names.types in tables:
        types_table = source.vector(f"{names.types}.weight", dtype=precision.dtype)
    table = None
    if names.positions is not None:
        table = source.vector(
            f"{names.positions}.weight",
            begin=max(first - 1, 0),
            added=None if types_table is None else f"{names.types}.weight",
            dtype=precision.dtype,
        )
        longest = positions - first
    return Encoder(
        model_type=config.get("model_type", str),
        hidden_size=blocks.hidden,
        num_heads=blocks.heads,
        num_layers=blocks.num_layers if order is None else len(order),
        vocab_size=vocab,
        program=program,
        precision=precision,
        text=Text(source.folder, longest, vocab, other=source.tokenizer),
        max_length=None if table is None else longest,
        embeddings=Embeddings(
            source.table(f"{names.tokens}.weight"),
            types_table,
            table,
            token_scale,
            padding=first - 1 if first else None,
        ),
        sequence_rules=SequenceRules(
            all_windows, causal, rotary, None if biases is None else biases(), inputs
        ),
        sentences=sentences or Sentences.of(source, blocks.hidden),
        origin=source.origin(),
    )


class LayerInputs(NamedTuple):
    """Vectors of tokens that blocks read beside the rows that they change: `Sequences.inputs`."""

    tokens: Array | PackedLinear  # (vocab, features)
    scale: float  # of these
    steps: list[Step]  # what is done with them before the blocks


def read_decoder(
    names: ModelNames,
    blocks: Blocks,
    *,
    scales: Sequence[float] | None = None,
    windows: Sequence[Window] | None = None,
    rotations: Sequence[int | None] | None = None,
    max_length: int | None = None,
    token_scale: float = 1.0,
    frequencies: Callable[[], tuple[Frequencies, ...]] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    query_growth: QueryGrowth | None = None,
    inputs: Callable[[], LayerInputs] | None = None,
    tied: bool,
) -> Decoder:
    """The decoder of `blocks`; `scales`, `windows` and `rotations` are those of `Blocks.read`.

    Positions are a table of `max_length`, or rotary with what `frequencies` returns, by default the first of
    it. Tokens' vectors are times `token_scale`; in a `tied` model they are the weight of the output layer,
    too, unless the file has another. Logits are times `logit_scale`, which the last norm has, and kept within
    `softcap`. With `query_growth`, queries are rotated by tables of their own. `inputs` makes those of the
    blocks, of tensors that `blocks` expects.
    """
    source = blocks.source
    config, precision = source.config, source.precision
    vocab = config.size("vocab_size")
    source.drop_prefix(*names.prefixes)
    tokens = f"{names.tokens}.weight"
    output = source.tied(tokens, "lm_head.weight", tied)
    positions = None if names.positions is None else f"{names.positions}.weight"
    assert names.last_norm is not None
    shapes: dict[str, Shape] = dict.fromkeys((tokens, output), (vocab, blocks.hidden))
    shapes |= blocks.norm_shapes(names.last_norm)
    if positions is not None and max_length is not None:
        shapes[positions] = (max_length, blocks.hidden)
    own = [name for name in (names.tokens, names.positions, names.last_norm) if name is not None]
    of_blocks = blocks.shapes()
    firsts = (f"{name.partition('.')[0]}." for name in (*own, *of_blocks))
    source.expect(
        {**shapes, **of_blocks},
        own=tuple({names.block.prefix.partition("{")[0], *firsts}),
        ignored=names.ignored,
    )
    rotary = () if frequencies is None else frequencies()  # of a size that tensors confirm
    if rotary and rotations is None:
        rotations = [0] * blocks.num_layers
    if query_growth is not None:
        blocks = replace(blocks, query_rotation=len(rotary))
    each = blocks.read(scales, windows, rotations)
    for block in each:  # keys that are forgotten for one must not be needed by another
        assert block.keys_from is None or each[block.keys_from].window == block.window
    of_layers = None if inputs is None else inputs()
    program, all_windows = model_program(each, before=() if of_layers is None else of_layers.steps)
    weight = source.pack([output])
    norm = NormStep(X, "normed", *blocks.norm(names.last_norm, logit_scale))
    logits = build("model", [norm, LinearStep("normed", OUT, weight, None, precision.rounding(weight))])
    table = None if positions is None else source.vector(positions, dtype=precision.dtype)
    return Decoder(
        model_type=config.get("model_type", str),
        hidden_size=blocks.hidden,
        num_heads=blocks.heads,
        num_layers=blocks.num_layers,
        vocab_size=vocab,
        program=program,
        precision=precision,
        text=Text(source.folder, max_length, other=source.tokenizer, is_prompt=True),
        num_kv_heads=blocks.heads_kv,
        head_dim=blocks.head_dim,
        key_heads=tuple(KeyHeads(n, *kept) for kept, n in held_heads(each).items())
        or (KeyHeads(0, blocks.head_dim, None),),
        states=tuple(
            kind for block in each if block.mixer for kind in [tuple(block.mixer.kinds(precision.dtype))]
        ),
        max_length=max_length,
        tokens=weight if output == tokens else source.table(tokens),
        positions=table,
        frequencies=rotary,
        windows=all_windows,
        logits=logits,
        stop=stop_ids(config, source.folder),
        token_scale=token_scale,
        softcap=softcap,
        query_growth=query_growth,
        layer_tokens=None if of_layers is None else of_layers.tokens,
        layer_scale=1.0 if of_layers is None else of_layers.scale,
        origin=source.origin(),
    )


def frequencies(
    config: Config, head_dim: int, theta: float = 10000.0, in_part: bool = False, usual: float = 1.0
) -> Frequencies:
    """The frequencies of rotary positions, or a function from a sequence's length to them.

    Where a part of each head may be rotated, `partial_rotary_factor` says how much, or it is the `usual`
    part: the first dimensions.
    `rope_parameters` describes them; older files have `rope_theta`, by default `theta`, and, if there is one,
    `rope_scaling`.
    """
    scaling = {**config.get("rope_scaling", dict, {}), **config.get("rope_parameters", dict, {})}
    scaling.setdefault("rope_theta", config.number("rope_theta", theta))
    older = _OLDER_SCALINGS.get(str(config.values.get("model_type")), ())
    if kind(scaling) in older:
        scaling |= {"rope_type": "longrope"}
    if kind(scaling) in ("yarn", "llama3", "longrope"):  # the trained length may be beside it, or the same
        trained = config.optional_size("original_max_position_embeddings")
        longest = config.optional_size("max_position_embeddings")
        if trained is not None:
            scaling["original_max_position_embeddings"] = trained
        elif longest is not None:
            scaling.setdefault("original_max_position_embeddings", longest)
    said = [scaling.pop("partial_rotary_factor", None), config.values.get("partial_rotary_factor")]
    factor = next((x for x in said if x is not None), usual)
    if not (isinstance(factor, (int, float)) and 0 < factor <= 1 and (in_part or factor == 1)):
        expected = "a number above 0 and at most 1" if in_part else "1.0, the only supported value"
        raise config.wrong("partial_rotary_factor", factor, expected)
    return scaled(config, int(head_dim * factor), scaling, config.optional_size("max_position_embeddings"))


def kind(scaling: dict[str, Any]) -> Any:
    """The type of a scaling."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


def scaled(config: Config, head_dim: int, scaling: dict[str, Any], longest: int | None) -> Frequencies:
    """`frequencies` of a `scaling` with its `rope_theta`, for a model trained for `longest` positions.

    Keys that its type does not use are left out, as transformers does.
    """
    name = kind(scaling)
    if isinstance(name, str) and name in SCALINGS:
        used = {"rope_type", "type", "rope_theta", *keys_of(name)}
        scaling = {key: x for key, x in scaling.items() if key in used}
    by_length = partial(rope_frequencies, head_dim, scaling=scaling, max_position_embeddings=longest)
    try:
        shortest = by_length(seq_len=0)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{config.path}: rotary positions: {error}") from error
    return by_length if kind(scaling) in ("dynamic", "longrope") else shortest


def frequencies_by_kind(
    config: Config,
    thetas: Mapping[str, tuple[str, float]],
    head_dim: int,
    longest: int | None = None,
    rescaled: Collection[str] = (ALL,),
) -> tuple[Frequencies, ...]:
    """The frequencies of each kind of layer in `thetas`: the older name of its base, and the usual base.

    `rope_parameters` describes each; in older files `rope_scaling` is of the kinds that are `rescaled`.
    `longest` is the default of `max_position_embeddings`.
    """
    given = tables_of_kinds(config, thetas)
    longest = config.optional_size("max_position_embeddings") or longest
    found = []
    for kind, (name, theta) in thetas.items():
        scaling: dict[str, Any] = {**(given.get(kind) or {})}
        if kind in rescaled:
            scaling |= config.get("rope_scaling", dict, {})
        scaling.setdefault("rope_theta", config.number(name, theta))
        found.append(scaled(config, head_dim, scaling, longest))
    return tuple(found)


def tables_of_kinds(config: Config, kinds: Collection[str]) -> dict[str, Any]:
    """`rope_parameters`, with a table for each of these kinds of layers, or for some."""
    given = config.get("rope_parameters", dict, {})
    if not (given.keys() <= set(kinds) and all(isinstance(x, dict | None) for x in given.values())):
        raise config.wrong("rope_parameters", given, f"a table for each of {', '.join(kinds)}")
    return given


def kinds_of(
    config: Config, count: int, slides: Callable[[int], bool], kinds: tuple[str, str] = (ALL, NEAR)
) -> list[str]:
    """The kind of each layer, by default the second of `kinds` where ``slides(i)``."""
    said = config.words("layer_types", kinds, count)
    return [kinds[slides(i)] for i in range(count)] if said is None else said


def windows_of(kinds: Sequence[str], width: int | None, causal: bool = True) -> list[Window]:
    """Window of each layer, None where all tokens are seen: a token and the `width - 1` before it.

    If the model is not causal, `width` tokens on either side, as in transformers.
    """
    window = None if width is None else (width - 1, 0) if causal else (width, width)
    return [window if kind == NEAR else None for kind in kinds]


def expert_counts(source: Source, key: str, usual: int | None, chosen: str = "num_experts_per_tok") -> Any:
    """The numbers of experts, under `key`, and of those `chosen` for a token, as `Blocks` has them."""
    config, experts = source.config, source.depth(key)
    count = config.size(chosen) if usual is None else config.size(chosen, usual)
    if count > experts:
        raise config.wrong(chosen, count, f"at most {key!r}, {experts}")
    return {"experts": experts, "chosen": count}
