"""Frequencies of rotary positions, and how models scale them for sequences longer than in training.

Each scaling is one function. Its keyword arguments are the keys that it takes from a Hugging Face dict; keys
without a default are required.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import FLOAT64, NDArray
from fastattn._args.values import MOST_SIZE, as_array, flag, integer, number, short

if TYPE_CHECKING:
    Floats = NDArray[np.float64]


class RopeFrequencies(NamedTuple):
    """Frequencies for `rope_tables`: the angle of pair k at a position is ``position * inv_freq[k]``."""

    inv_freq: NDArray[np.float64]  # (rotary_dim / 2,), radians per position
    attention_factor: float = 1.0  # multiplies cos and sin


class _Rope(NamedTuple):
    """Angles that every scaling starts from."""

    inv_freq: Floats  # not scaled: base ** (-2k / rotary_dim)
    base: float
    max_position_embeddings: int | None
    seq_len: int | None

    def needed(self, name: str, scaling: str) -> int:
        """Return the field `name`; raise if the caller left it out, as the type `scaling` depends on it."""
        value: int | None = getattr(self, name)
        if value is None:
            expected = f"an integer, on which type {scaling} depends"
            raise ValueError(f"(): {name} is None; expected {expected}")
        return value

    def stretch(self, original: int, scaling: str) -> float:
        """Return how many times longer sequences are than the `original` ones: the default of `factor`."""
        return self.needed("max_position_embeddings", f"{scaling} without factor") / original


@named("rope_frequencies")
def rope_frequencies(
    rotary_dim: int,
    *,
    base: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> RopeFrequencies:
    """Frequencies of rotary positions [1]_: ``base ** (-2 k / rotary_dim)``, scaled as a model's config says.

    Parameters
    ----------
    rotary_dim : int
        Rotated dimensions of a head, even: ``head_dim``, or ``int(head_dim * partial_rotary_factor)``.
    base : float, optional
        Above 1; ``rope_theta`` in configs. Default: that of `scaling`, or 10000 without a scaling, as in the
        paper. A scaling needs one of the two: older configs have ``rope_theta`` beside the dict, where a
        default of 10000 would silently be wrong.
    scaling : mapping, optional
        ``rope_scaling`` or ``rope_parameters`` of a Hugging Face config, unchanged, with its type in
        ``rope_type`` or ``type`` (older configs). Types, required keys and [optional keys]:

        - ``default``
        - ``linear``: factor. Position interpolation [2]_
        - ``ntk``: factor. NTK-aware: base becomes ``base * factor ** (d / (d - 2))`` [3]_
        - ``dynamic``: factor. NTK-aware, with a factor that grows with `seq_len` beyond
          `max_position_embeddings`
        - ``yarn``: original_max_position_embeddings [factor, attention_factor, beta_fast, beta_slow, mscale,
          mscale_all_dim, truncate] [3]_
        - ``llama3``: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings [4]_
        - ``longrope``: short_factor, long_factor, original_max_position_embeddings [factor,
          attention_factor] [5]_; long_factor applies where `seq_len` exceeds
          original_max_position_embeddings
        - ``proportional``: [partial_rotary_factor, factor]; `rotary_dim` is the whole head, and
          frequencies after its rotated part are 0

        Keys of None are ignored. Every type accepts ``rope_theta`` and ``partial_rotary_factor``, which
        `rotary_dim` includes. Add keys that a model keeps beside
        the dict (``original_max_position_embeddings`` of Phi-3).
    max_position_embeddings : int, optional
        From the config. Required by ``dynamic``, and by ``yarn`` and ``longrope`` without factor, which is
        then its ratio to original_max_position_embeddings.
    seq_len : int, optional
        Length of the sequence: the largest position + 1. Required by ``dynamic`` and ``longrope``, ignored by
        other types.

    Returns
    -------
    RopeFrequencies
        ``(inv_freq, attention_factor)``: frequencies (rotary_dim / 2,) in float64, and the factor of cos and
        sin.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or `scaling` has an unknown type, or missing or unused keys.

    Notes
    -----
    Where frequencies depend on `seq_len`, cached keys rotated for another one do not match new queries.
    Compute frequencies once for the longest sequence, or rotate the cached keys again.

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
    rotary_dim = integer("rotary_dim", rotary_dim, 2, MOST_SIZE)
    if rotary_dim % 2:
        raise ValueError(f"(): rotary_dim is {rotary_dim}; expected an even number")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"(): scaling is of type {type(scaling).__name__}; expected a dict or None")
    given = {key: x for key, x in (scaling or {}).items() if x is not None}
    old_name = given.pop("type", "default")
    name = given.pop("rope_type", old_name)
    if not isinstance(name, str) or name not in SCALINGS:
        raise ValueError(f"(): the type of scaling is {short(name)}; expected one of {', '.join(SCALINGS)}")
    rope_theta = given.pop("rope_theta", None)
    value = _base(base, rope_theta, scaled=bool(scaling))
    options = _options(name, given, rotary_dim // 2)
    if max_position_embeddings is not None:
        max_position_embeddings = integer("max_position_embeddings", max_position_embeddings, 1)
    if seq_len is not None:
        seq_len = integer("seq_len", seq_len, 0)
    inv_freq = value ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    return SCALINGS[name](_Rope(inv_freq, value, max_position_embeddings, seq_len), **options)


def _base(base: Any, rope_theta: Any, scaled: bool) -> float:
    """The base that the caller or the config gives; without a scaling, the paper's by default."""
    named = {"base": base, "scaling['rope_theta']": rope_theta}
    given = {key: number(key, x, FLOAT64, positive=True) for key, x in named.items() if x is not None}
    for key, value in given.items():
        if value <= 1:
            raise ValueError(f"(): {key} is {value}; expected a number above 1")
    if len(set(given.values())) > 1:
        raise ValueError(f"(): base is {base} and scaling['rope_theta'] {rope_theta}; expected one")
    if scaled and not given:
        expected = "one of them: base=config['rope_theta'], or 10000.0 for a config that has none"
        raise ValueError(f"(): base is None and scaling has no rope_theta; expected {expected}")
    return next(iter(given.values()), 10000.0)


def keys_of(name: str) -> dict[str, bool]:
    """The keys that the scaling `name` uses, and whether each is required."""
    _, *parameters = inspect.signature(SCALINGS[name]).parameters.values()
    return {p.name: p.default is p.empty for p in parameters}


def _options(name: str, given: dict[str, Any], half: int) -> dict[str, Any]:
    """Check the keys that are `given` for the scaling `name`; return its keyword arguments."""
    known = keys_of(name)
    needed = [key for key, required in known.items() if required]
    has = f"(): scaling of type {name} has"
    if missing := [key for key in needed if key not in given]:
        raise ValueError(f"{has} no {', '.join(missing)}; expected {', '.join(needed)}")
    if unknown := [str(key) for key in given if key not in (*known, "partial_rotary_factor")]:
        expected = f"{', '.join(known) or 'nothing else'} (leave out what does not change frequencies)"
        raise ValueError(f"{has} {', '.join(unknown)}, which it does not use; expected {expected}")
    return {key: _value(key, x, half) for key, x in given.items() if key in known}


def _value(key: str, x: Any, half: int) -> Any:
    """Check the value `x` of `key`."""
    name = f"scaling[{key!r}]"
    if key == "truncate":
        return flag(name, x)
    if key == "original_max_position_embeddings":
        return integer(name, x, 2)
    if key not in ("short_factor", "long_factor"):
        # mscale and mscale_all_dim may be 0, which means that they are not given.
        return number(name, x, FLOAT64, positive=not key.startswith("mscale"))
    factors = as_array(name, x)
    if factors.dtype.kind not in "iuf":
        raise TypeError(f"(): {name} has dtype {factors.dtype}; expected numbers")
    if factors.shape != (half,):
        raise ValueError(f"(): {name} has shape {factors.shape}; expected ({half},), rotary_dim / 2")
    if (wrong := factors[~((factors > 0) & (factors < np.inf))]).size:
        raise ValueError(f"(): {name} has {wrong[0]}; expected finite numbers above 0")
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
    # (base * factor**(d / (d-2))) ** (-2k/d) = base ** (-2k/d) * factor**(-2k / (d-2)). The exponents of
    # factor go from 0 to -1: the fastest pair is unchanged, the slowest is interpolated. True for d = 2, too.
    return RopeFrequencies(rope.inv_freq * factor ** -np.linspace(0, 1, rope.inv_freq.size))


def _dynamic(rope: _Rope, *, factor: float) -> RopeFrequencies:
    trained = rope.needed("max_position_embeddings", "dynamic")
    length = max(rope.needed("seq_len", "dynamic"), trained)
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
    """Keep pairs that turn more than beta_fast times, interpolate below beta_slow times, blend in between."""
    if factor is None:
        factor = rope.stretch(original_max_position_embeddings, "yarn")
    _require_above("beta_fast", beta_fast, "beta_slow", beta_slow)
    half = rope.inv_freq.size
    # In the trained length, pair k turns original * base ** (-k / half) / (2 pi) times. Solve that for k.
    fast, slow = (
        half * math.log(original_max_position_embeddings / (2 * math.pi * turns)) / math.log(rope.base)
        for turns in (beta_fast, beta_slow)
    )
    if truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, 2 * half - 1)  # 2 * half, not half, as in the authors' code
    if fast == slow:
        slow += 0.001  # a step instead of a ramp
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
    """Keep pairs that turn more than high_freq_factor times, interpolate below low_freq_factor times."""
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
    factors = long_factor if rope.needed("seq_len", "longrope") > original else short_factor
    if attention_factor is None:
        factor = rope.stretch(original, "longrope") if factor is None else factor
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    return RopeFrequencies(rope.inv_freq / factors, attention_factor)


def _require_above(name: str, value: float, low_name: str, low: float) -> None:
    if not value > low:
        expected = f"more than {low}, scaling[{low_name!r}]"
        raise ValueError(f"(): scaling[{name!r}] is {value}; expected {expected}")


SCALINGS: dict[str, Callable[..., RopeFrequencies]] = {
    function.__name__[1:]: function
    for function in (_default, _linear, _ntk, _dynamic, _yarn, _llama3, _longrope, _proportional)
}
