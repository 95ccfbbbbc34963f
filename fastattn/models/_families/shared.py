"""Readers that families share: from the names of tensors to the model, and parts of config.json.

The parts are rotary positions, windows and numbers of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastattn._args.types import Array
from fastattn._engine.program import Program, build
from fastattn._engine.steps import OUT, LinearStep, NormStep, Step, X
from fastattn.layers._block import Norm, Window, held_heads, program_of_blocks
from fastattn.models._blocks import BlockNames, Blocks, linear
from fastattn.models._decoder import Decoder, QueryGrowth
from fastattn.models._embeddings import AlibiBiases, BucketBiases, Embeddings, Frequencies, SequenceRules
from fastattn.models._encoder import Encoder
from fastattn.models._files import Config, ModelError, stop_ids
from fastattn.models._model_cache import KeyHeads
from fastattn.models._sentences import Sentences
from fastattn.models._source import NOTHING, Rows, Source
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
    others: Callable[[], dict[str, Any]] | None = None,
    kind: type[Encoder] = Encoder,
    sentences: Sentences | None = None,
    before: Callable[[], Sequence[Step]] | None = None,
    inputs: int = 0,
) -> Encoder:
    """The encoder of `blocks`; `scales`, `windows` and `rotations` are those of `Blocks.read`.

    It has `types` token types, whose vectors have `features`; by default as many as the blocks. Those of
    tokens are times `token_scale`. Blocks run in `order`, in which they may be more than once.

    Positions are a table of `positions` rows, or rotary with what `frequencies` returns. Of a table, those
    from `first` on are counted: the one before is padding's, as is the token of that id. Texts are then cut
    at `longest`. `biases` makes those of `SequenceRules`. It is of another `kind` where `others` reads more
    fields, last of all. Where there are no `sentences`, the folder says what is done with texts. Steps
    `before` all others make what blocks read beside the rows, so many `inputs`.
    """
    source, config, features = blocks.source, blocks.source.config, features or blocks.hidden
    vocab, precision = config.size("vocab_size"), source.precision
    source.drop_prefix(*names.prefixes)
    if frequencies is not None and rotations is None:
        rotations = [0] * blocks.num_layers
    most = None if names.positions is None else positions - first

    def table(name: str | None, rows: int, begin: int = 0, added: str | None = None) -> Array | None:
        if name is None or not rows:
            return None
        shape = rows, features
        return source.vector(Rows(f"{name}.weight", shape, begin), dtype=precision.dtype, added=added)

    def norm(name: str | None, size: int) -> Norm | None:
        return None if name is None else blocks.norm(name, features=size)

    def read() -> Encoder:
        rotary = () if frequencies is None or source.is_planning else frequencies()
        each = blocks.read(scales, windows, rotations)
        norms, widened = (norm(names.first_norm, features), norm(names.last_norm, blocks.hidden)), None
        if names.widened is not None:
            widened = linear(source, names.widened, blocks.hidden, features, biased=True)
        steps = () if before is None else before()
        own = each if order is None else [each[i] for i in order]
        program, all_windows = program_of_blocks(own, *norms, widened, steps, rounds=True)
        kinds = table(names.types, types)
        added = None if kinds is None else f"{names.types}.weight"
        places = table(names.positions, positions, max(first - 1, 0), added)
        tokens = source.table(Rows(f"{names.tokens}.weight", (vocab, features)))
        by_distance, scale = None if biases is None else biases(), precision.dtype.type(token_scale)
        found = {
            **_fields(blocks, len(own), program),
            "text": Text(source.folder, most or longest, vocab, other=source.tokenizer),
            "max_length": most,
            "embeddings": Embeddings(tokens, kinds, places, scale, first - 1 if first else None),
            "sequence_rules": SequenceRules(all_windows, causal, rotary, by_distance, inputs),
            "sentences": sentences,
        }
        return kind(**found | ({} if others is None else others()))

    in_blocks = names.block.prefix.partition("{")[0]  # known to be the model's even if it has no block
    encoder = source.checked(read, names.ignored, also=(in_blocks,))
    return encoder if sentences else replace(encoder, sentences=Sentences.of(source, blocks.hidden))


def _fields(blocks: Blocks, layers: int, program: Program) -> dict[str, Any]:
    """Fields of both kinds of models."""
    source = blocks.source
    return {
        "model_type": source.config.get("model_type", str),
        "hidden_size": blocks.hidden,
        "num_heads": blocks.heads,
        "num_layers": layers,
        "vocab_size": source.config.size("vocab_size"),
        "program": program,
        "precision": source.precision,
        "origin": source.origin(),
    }


class LayerInputs(NamedTuple):
    """Vectors of tokens that blocks read beside the rows that they change: `Sequences.inputs`."""

    embeddings: Embeddings | None
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
    logits_cap: float | None = None,
    logit_scale: float = 1.0,
    query_growth: QueryGrowth | None = None,
    inputs: Callable[[], LayerInputs] | None = None,
    tied: bool,
) -> Decoder:
    """The decoder of `blocks`; `scales`, `windows` and `rotations` are those of `Blocks.read`.

    Positions are a table of `max_length`, or rotary with what `frequencies` returns, by default the first of
    it. Tokens' vectors are times `token_scale`; in a `tied` model they are the weight of the output layer,
    too, unless the file has another. Logits are times `logit_scale`, which the last norm has, and kept within
    `logits_cap`. With `query_growth`, queries are rotated by separate tables, after all others. `inputs`
    reads those of the blocks.
    """
    source, precision = blocks.source, blocks.source.precision
    config, vocab = source.config, source.config.size("vocab_size")
    source.drop_prefix(*names.prefixes)
    tokens = f"{names.tokens}.weight"
    output = source.tied(tokens, "lm_head.weight", tied)
    if frequencies is not None and rotations is None:
        rotations = [0] * blocks.num_layers

    def read() -> Decoder:
        rotary = () if frequencies is None or source.is_planning else frequencies()
        rotation = None if query_growth is None else len(rotary)
        each = replace(blocks, query_rotation=rotation).read(scales, windows, rotations)
        for block in each:  # keys that are forgotten for one must not be needed by another
            assert block.keys_from is None or each[block.keys_from].window == block.window
        of_layers = LayerInputs(None, []) if inputs is None else inputs()
        program, all_windows = program_of_blocks(each, before=of_layers.steps)
        weight = source.pack([Rows(output, (vocab, blocks.hidden))])
        assert names.last_norm is not None
        norm, table = blocks.norm(names.last_norm, logit_scale), None
        last = LinearStep("normed", OUT, weight, None, precision.rounding(weight))
        if names.positions is not None and max_length is not None:
            rows = Rows(f"{names.positions}.weight", (max_length, blocks.hidden))
            table = source.vector(rows, dtype=precision.dtype)
        own: Any = weight if output == tokens else source.table(Rows(tokens, (vocab, blocks.hidden)))
        held = tuple(KeyHeads(n, *kept) for kept, n in held_heads(each).items())
        return Decoder(
            **_fields(blocks, blocks.num_layers, program),
            text=Text(source.folder, max_length, other=source.tokenizer, is_prompt=True),
            num_kv_heads=blocks.heads_kv,
            head_dim=blocks.head_dim,
            key_heads=held or (KeyHeads(0, blocks.head_dim, None),),
            states=tuple(tuple(block.mixer.kinds(precision.dtype)) for block in each if block.mixer),
            max_length=max_length,
            embeddings=Embeddings(own, None, table, precision.lane.type(token_scale)),
            layer_embeddings=of_layers.embeddings,
            frequencies=rotary,
            windows=all_windows,
            logits=build("model", [NormStep(X, "normed", *norm), last]),
            stop=stop_ids(config, source.folder),
            logits_cap=logits_cap,
            query_growth=query_growth,
        )

    firsts = names.block.prefix.partition("{")[0], f"{names.tokens.partition('.')[0]}."
    return source.checked(read, names.ignored, also=firsts, others=("lm_head.",))


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
