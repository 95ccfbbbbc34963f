"""Parts of config.json that several families share: rotary positions, and numbers of heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastattn._args.values import short
from fastattn.models._files import ModelError
from fastattn.positions import rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fastattn.models._embeddings import Frequencies
    from fastattn.models._files import Config


def frequencies(config: Config, head_dim: int, theta: float = 10000.0) -> Frequencies:
    """The frequencies of rotary positions, or a function from a sequence's length to them.

    `rope_parameters` describes them; older files have `rope_theta`, by default `theta`, and, if there is one,
    `rope_scaling`.
    """
    scaling = {**config.get("rope_scaling", dict, {}), **config.get("rope_parameters", dict, {})}
    scaling.setdefault("rope_theta", config.number("rope_theta", theta))
    if kind(scaling) in ("yarn", "llama3", "longrope"):  # the trained length may be beside it, or the same
        trained = config.optional_size("original_max_position_embeddings")
        longest = config.optional_size("max_position_embeddings")
        if trained is not None:
            scaling["original_max_position_embeddings"] = trained
        elif longest is not None:
            scaling.setdefault("original_max_position_embeddings", longest)
    for factor in (config.values.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if factor not in (None, 1.0):
            raise ModelError(f"{config.path}: 'partial_rotary_factor' is {factor!r}; only 1.0 is supported")
    return scaled(config, head_dim, scaling, config.optional_size("max_position_embeddings"))


def kind(scaling: dict[str, Any]) -> Any:
    """The type of a scaling."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def scaled(config: Config, head_dim: int, scaling: dict[str, Any], longest: int | None) -> Frequencies:
    """`frequencies` of a `scaling` with its `rope_theta`, for a model trained for `longest` positions."""
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
    longest: int | None,
    rescaled: Collection[str],
) -> tuple[Frequencies, ...]:
    """The frequencies of each kind of layer in `thetas`: the older name of its base, and the usual base.

    `rope_parameters` describes each; in older files `rope_scaling` is of the kinds that are `rescaled`.
    """
    given = config.get("rope_parameters", dict, {})
    if not (given.keys() <= thetas.keys() and all(isinstance(x, dict | None) for x in given.values())):
        expected = f"a table for each of {', '.join(thetas)}"
        raise ModelError(f"{config.path}: 'rope_parameters' is {short(given)}; expected {expected}")
    found = []
    for kind, (name, theta) in thetas.items():
        scaling: dict[str, Any] = {**(given.get(kind) or {})}
        if kind in rescaled:
            scaling |= config.get("rope_scaling", dict, {})
        scaling.setdefault("rope_theta", config.number(name, theta))
        found.append(scaled(config, head_dim, scaling, longest))
    return tuple(found)


def head_counts(config: Config, usual: int | None = None) -> tuple[int, int]:
    """The numbers of heads of queries and of keys: without a number `usual` ones, or as many as queries."""
    heads = config.size("num_attention_heads")
    heads_kv = config.optional_size("num_key_value_heads") or usual or heads
    if heads % heads_kv:
        expected = f"a multiple of 'num_key_value_heads', {heads_kv}"
        raise ModelError(f"{config.path}: 'num_attention_heads' is {heads}; expected {expected}")
    return heads, heads_kv
