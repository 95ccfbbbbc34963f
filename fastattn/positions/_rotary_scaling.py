"""Frequencies of rotary positions, and how models stretch them to sequences longer than they were trained on.

A scaling is one function: its keyword arguments are the keys that it takes from a Hugging Face dict, those
without a default are needed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.types import FLOAT64
from fastattn._args.values import MOST_SIZE, as_array, flag, integer, number, short

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FUNC = "rope_frequencies"  # for messages


class RopeFrequencies(NamedTuple):
    """What `rope_tables` makes tables of: angles are ``position * inv_freq``."""

    inv_freq: NDArray[np.float64]  # (rotary_dim / 2,), in radians a position
    attention_factor: float = 1.0  # cos and sin are multiplied by it


class _Rope(NamedTuple):
    """What every scaling starts from."""

    inv_freq: Floats  # not scaled: base ** (-2k / rotary_dim)
    base: float
    max_position_embeddings: int | None
    seq_len: int | None


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> RopeFrequencies:
    """Frequencies of rotary positions, ``base ** (-2 k / rotary_dim)`` [1]_, scaled as a model's config says.

    Parameters
    ----------
    rotary_dim : int
        How many dimensions of a head are rotated; even. ``head_dim``, or less where rotation is partial
        (``int(head_dim * partial_rotary_factor)``).
    base : float, optional
        Above 1; ``rope_theta`` of configs. Default: the one in `scaling`; without a scaling 10000, as in the
        paper. A scaling without either is an error: older configs have ``rope_theta`` beside the dict, and
        10000 in its place would be wrong and say nothing.
    scaling : mapping, optional
        ``rope_scaling`` or ``rope_parameters`` of a Hugging Face config, as it is; its type is under
        ``rope_type`` or, in old ones, ``type``. Per type the keys needed, and [optional ones]:

        - ``default``
        - ``linear``: factor. Position interpolation [2]_
        - ``ntk``: factor. NTK-aware: base becomes ``base * factor ** (d / (d - 2))`` [3]_
        - ``dynamic``: factor. NTK-aware, with a factor that grows with `seq_len` from
          `max_position_embeddings` on
        - ``yarn``: original_max_position_embeddings [factor, attention_factor, beta_fast, beta_slow, mscale,
          mscale_all_dim, truncate] [3]_
        - ``llama3``: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings [4]_
        - ``longrope``: short_factor, long_factor, original_max_position_embeddings [factor,
          attention_factor] [5]_; long where `seq_len` is above original_max_position_embeddings
        - ``proportional``: [partial_rotary_factor, factor]; `rotary_dim` is the whole head, and the
          frequencies past that part are 0

        A key that is None counts as left out. With any type there may be ``rope_theta`` and
        ``partial_rotary_factor``, which `rotary_dim` contains already. Keys that models keep beside the dict
        (``original_max_position_embeddings`` of Phi-3) have to be put into it.
    max_position_embeddings : int, optional
        Of the config. Needed by ``dynamic``, and where ``yarn`` or ``longrope`` have no factor, which then is
        its ratio to original_max_position_embeddings.
    seq_len : int, optional
        Length of the sequence: largest position + 1. Needed by ``dynamic`` and ``longrope``; without effect
        in the others.

    Returns
    -------
    RopeFrequencies
        ``(inv_freq, attention_factor)``: float64 (rotary_dim / 2,), and what cos and sin are multiplied by.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or `scaling` has a type that is not known, lacks a key, or has one that
        its type does not use (which might have been meant to do something).

    Notes
    -----
    Where frequencies depend on `seq_len`, keys in a cache that were rotated for another do not fit new
    queries. Choose them once for the longest sequence, or rotate the cached keys anew.

    References
    ----------
    .. [1] J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
       arXiv:2104.09864.
    .. [2] S. Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
       2023, arXiv:2306.15595.
    .. [3] B. Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023,
       arXiv:2309.00071; NTK-aware and dynamic are its sections 3.1 and 3.3.
    .. [4] A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, arXiv:2407.21783; the formula is that of
       ``apply_scaling`` in Meta's code for Llama 3.1.
    .. [5] Y. Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024,
       arXiv:2402.13753.

    Examples
    --------
    >>> from fastattn.positions import rope_frequencies
    >>> rope_frequencies(4, base=10000.0, scaling={"rope_type": "linear", "factor": 2.0}).inv_freq
    array([0.5  , 0.005])
    """
    rotary_dim = integer(_FUNC, "rotary_dim", rotary_dim, 2, MOST_SIZE)
    if rotary_dim % 2:
        raise ValueError(f"{_FUNC}(): rotary_dim is {rotary_dim}; expected an even number")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"{_FUNC}(): scaling is of type {type(scaling).__name__}; expected a dict or None")
    given = {key: x for key, x in (scaling or {}).items() if x is not None}
    old_name = given.pop("type", "default")
    name = given.pop("rope_type", old_name)
    if not isinstance(name, str) or name not in _SCALINGS:
        raise ValueError(f"{_FUNC}(): scaling has type {short(name)}; expected one of {', '.join(_SCALINGS)}")
    rope_theta = given.pop("rope_theta", None)
    value = _base(base, rope_theta)
    options = _options(name, given, rotary_dim // 2)
    if max_position_embeddings is not None:
        max_position_embeddings = integer(_FUNC, "max_position_embeddings", max_position_embeddings, 1)
    if seq_len is not None:
        seq_len = integer(_FUNC, "seq_len", seq_len, 0)
    if scaling and base is None and rope_theta is None:
        raise ValueError(
            f"{_FUNC}(): base is None and scaling has no rope_theta; expected one of them:"
            f" base=config['rope_theta'], or 10000.0 for a config that has none"
        )
    inv_freq = value ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    return _SCALINGS[name](_Rope(inv_freq, value, max_position_embeddings, seq_len), **options)


def _base(base: Any, rope_theta: Any) -> float:
    """The one that is given, or 10000."""
    named = {"base": base, "scaling['rope_theta']": rope_theta}
    values = {
        name: number(_FUNC, name, x, FLOAT64, positive=True) for name, x in named.items() if x is not None
    }
    for name, value in values.items():
        if value <= 1:
            raise ValueError(f"{_FUNC}(): {name} is {value}; expected a number above 1")
    if len(set(values.values())) > 1:
        raise ValueError(f"{_FUNC}(): base is {base} and scaling['rope_theta'] {rope_theta}; expected one")
    return next(iter(values.values()), 10000.0)


def _options(name: str, given: dict[str, Any], half: int) -> dict[str, Any]:
    """Keyword arguments of the scaling called `name`, from the keys that are `given`."""
    _, *parameters = inspect.signature(_SCALINGS[name]).parameters.values()
    known = [p.name for p in parameters]
    needed = [p.name for p in parameters if p.default is p.empty]
    if missing := [key for key in needed if key not in given]:
        raise ValueError(
            f"{_FUNC}(): scaling of type {name} has no {', '.join(missing)}; expected {', '.join(needed)}"
        )
    if unknown := [key for key in given if key not in (*known, "partial_rotary_factor")]:
        raise ValueError(
            f"{_FUNC}(): scaling of type {name} has {', '.join(map(str, unknown))}, which it does not use;"
            f" expected {', '.join(known) or 'nothing else'} (leave out what does not change frequencies)"
        )
    return {key: _value(key, x, half) for key, x in given.items() if key in known}


def _value(key: str, x: Any, half: int) -> Any:
    """`x`, what is under `key`, as the scalings take it."""
    name = f"scaling[{key!r}]"
    if key == "truncate":
        return flag(_FUNC, name, x)
    if key == "original_max_position_embeddings":
        return integer(_FUNC, name, x, 2)
    if key not in ("short_factor", "long_factor"):
        # 0 stands for "not given" in mscale and mscale_all_dim.
        return number(_FUNC, name, x, FLOAT64, positive=not key.startswith("mscale"))
    factors = as_array(_FUNC, name, x)
    if factors.dtype.kind not in "iuf":
        raise TypeError(f"{_FUNC}(): {name} has dtype {factors.dtype}; expected numbers")
    if factors.shape != (half,):
        raise ValueError(f"{_FUNC}(): {name} has shape {factors.shape}; expected ({half},), rotary_dim / 2")
    if (wrong := factors[~((factors > 0) & (factors < np.inf))]).size:
        raise ValueError(f"{_FUNC}(): {name} has {wrong[0]}; expected finite numbers above 0")
    return factors


def _default(rope: _Rope) -> RopeFrequencies:
    return RopeFrequencies(rope.inv_freq)


def _linear(rope: _Rope, *, factor: float) -> RopeFrequencies:
    return RopeFrequencies(rope.inv_freq / factor)


def _proportional(rope: _Rope, *, partial_rotary_factor: float = 1.0, factor: float = 1.0) -> RopeFrequencies:
    half = rope.inv_freq.size
    rotated = np.arange(half) < int(partial_rotary_factor * half)
    return RopeFrequencies(np.where(rotated, rope.inv_freq / factor, 0.0))


def _ntk(rope: _Rope, *, factor: float) -> RopeFrequencies:
    # (base * factor**(d / (d-2))) ** (-2k/d) = base ** (-2k/d) * factor**(-2k / (d-2)): exponents from 0 to
    # -1, so the fastest pair is left alone and the slowest interpolated. Also right for d = 2.
    return RopeFrequencies(rope.inv_freq * factor ** -np.linspace(0, 1, rope.inv_freq.size))


def _dynamic(rope: _Rope, *, factor: float) -> RopeFrequencies:
    trained = _needed("max_position_embeddings", rope.max_position_embeddings, "dynamic")
    length = max(_needed("seq_len", rope.seq_len, "dynamic"), trained)
    return _ntk(rope, factor=factor * length / trained - (factor - 1))


def _yarn(
    rope: _Rope,
    *,
    original_max_position_embeddings: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float = 0.0,
    mscale_all_dim: float = 0.0,
    truncate: bool = True,
) -> RopeFrequencies:
    """Pairs that turn over beta_fast times are kept, under beta_slow times interpolated, others between."""
    factor = _factor("yarn", factor, rope, original_max_position_embeddings)
    _require_above("beta_fast", beta_fast, "beta_slow", beta_slow)
    half = rope.inv_freq.size
    # Pair k turns original * base ** (-k / half) / (2 pi) times in the trained length; solved for k.
    fast, slow = (
        half * math.log(original_max_position_embeddings / (2 * math.pi * turns)) / math.log(rope.base)
        for turns in (beta_fast, beta_slow)
    )
    if truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, 2 * half - 1)  # 2 half, not half: as in the authors' code
    if fast == slow:
        slow += 0.001  # a step in place of a ramp
    interpolated = np.clip((np.arange(half) - fast) / (slow - fast), 0, 1)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    if attention_factor is None:
        both = mscale and mscale_all_dim
        attention_factor = temperature(mscale) / temperature(mscale_all_dim) if both else temperature(1.0)
    return RopeFrequencies(rope.inv_freq * (1 - interpolated + interpolated / factor), attention_factor)


def _llama3(
    rope: _Rope,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> RopeFrequencies:
    """Pairs that turn over high_freq_factor times are kept, under low_freq_factor times interpolated."""
    _require_above("high_freq_factor", high_freq_factor, "low_freq_factor", low_freq_factor)
    turns = original_max_position_embeddings * rope.inv_freq / (2 * math.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return RopeFrequencies(rope.inv_freq * (kept + (1 - kept) / factor))


def _longrope(
    rope: _Rope,
    *,
    short_factor: Floats,
    long_factor: Floats,
    original_max_position_embeddings: int,
    factor: float | None = None,
    attention_factor: float | None = None,
) -> RopeFrequencies:
    original = original_max_position_embeddings
    factors = long_factor if _needed("seq_len", rope.seq_len, "longrope") > original else short_factor
    if attention_factor is None:
        factor = _factor("longrope", factor, rope, original)
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    return RopeFrequencies(rope.inv_freq / factors, attention_factor)


def _needed(name: str, value: int | None, scaling: str) -> int:
    if value is None:
        raise ValueError(f"{_FUNC}(): {name} is None; expected an integer, on which type {scaling} depends")
    return value


def _factor(scaling: str, factor: float | None, rope: _Rope, original: int) -> float:
    if factor is not None:
        return factor
    length = _needed("max_position_embeddings", rope.max_position_embeddings, f"{scaling} without factor")
    return length / original


def _require_above(name: str, value: float, low_name: str, low: float) -> None:
    if not value > low:
        raise ValueError(
            f"{_FUNC}(): scaling[{name!r}] is {value}; expected more than {low}, scaling[{low_name!r}]"
        )


_SCALINGS: dict[str, Callable[..., RopeFrequencies]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
