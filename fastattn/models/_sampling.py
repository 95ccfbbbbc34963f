"""Sampling of the next token from its logits.

The order is that of transformers: `logit_bias`, penalties, `logits_processor`; then, with a temperature above
0, temperature, `top_k`, `top_p`, `min_p`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.options import SamplingOptions, require_options
from fastattn._args.types import FLOAT32, FLOAT64, Array, Ints, lane_dtype
from fastattn._args.values import integer, is_float, number, short

# Options from 0 to 1 that choose what may be drawn, and their values that allow all.
_SHARES = {"top_p": 1.0, "min_p": 0.0}


class Sampling:
    """Checked sampling options; `named` are the other arguments of the function."""

    def __init__(self, options: SamplingOptions, *named: str):
        require_options(options, SamplingOptions, *named)
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self.temperature = number("temperature", given.get("temperature", 0.0), FLOAT64)
        if self.temperature < 0:
            raise ValueError(f"(): temperature is {self.temperature}; expected 0 or more")
        self.top_k = integer("top_k", given.get("top_k", 0), 0)
        self.shares: dict[str, float] = {}
        for name, off in _SHARES.items():
            share = number(name, given.get(name, off), FLOAT64)
            if not 0 <= share <= 1:
                raise ValueError(f"(): {name} is {share}; expected 0 to 1")
            if share != off:
                self.shares[name] = share
        if self.temperature == 0:
            for name in ("top_k", *_SHARES):
                if name in self.shares or (name == "top_k" and self.top_k):
                    came = f"{name} is {short(given[name])} and temperature 0, which does not sample"
                    raise ValueError(f"(): {came}; expected a temperature above 0")
        self.repetition = number("repetition_penalty", given.get("repetition_penalty", 1.0), FLOAT64)
        if not self.repetition > 0:
            raise ValueError(f"(): repetition_penalty is {self.repetition}; expected a number above 0")
        self.presence = number("presence_penalty", given.get("presence_penalty", 0.0), FLOAT64)
        self.frequency = number("frequency_penalty", given.get("frequency_penalty", 0.0), FLOAT64)
        self.bias = _bias(given.get("logit_bias", {}))
        self.processor: Callable[[Ints, Array], Any] | None = given.get("logits_processor")
        if self.processor is not None and not callable(self.processor):
            raise wrong_type("logits_processor", self.processor, "a function of ids and logits")
        self.seed = _seed(given.get("seed"))

    @property
    def counts(self) -> bool:
        """Tell whether tokens that were there count."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    def candidates(self, logits: Array) -> tuple[Ints, Array]:
        """The tokens that may be drawn for logits (vocab_size,), and their probabilities."""
        tokens = np.arange(len(logits))
        if 0 < self.top_k < len(logits):
            tokens = np.flatnonzero(logits >= np.partition(logits, -self.top_k)[-self.top_k])
        scores = logits[tokens].astype(np.float64)
        best = scores.max()
        if best == np.inf:  # infinitely better than the others
            probs = (scores == best).astype(np.float64)
        else:
            with np.errstate(over="ignore"):  # a tiny temperature
                probs = np.exp((scores - best) / self.temperature)
        probs /= probs.sum()
        for name, keeps in (("top_p", _fewest), ("min_p", _likely)):
            if name in self.shares:
                stay = keeps(probs, self.shares[name])
                tokens, probs = tokens[stay], probs[stay] / probs[stay].sum()
        return tokens, probs


class Sampler:
    """Choice of the next token of each of the `prompts`, with one random generator per prompt.

    A `single` prompt uses the seed, prompt i of several its i-th child.
    """

    def __init__(
        self,
        prompts: Sequence[Ints],
        vocab_size: int,
        sampling: Sampling,
        single: bool = False,
        matchers: Sequence[Any] = (),
    ):
        self.sampling = sampling
        # Of each prompt: `allowed()` are the tokens that may follow, and `accept` takes the one that does.
        self.matchers = list(matchers)
        if sampling.bias[0].size and sampling.bias[0].max() >= vocab_size:
            came = f"logit_bias has the token {sampling.bias[0].max()}"
            raise ValueError(f"(): {came}; expected ids below the number of tokens, {vocab_size}")
        key = sampling.seed.spawn_key
        keys = [key] if single else [(*key, i) for i in range(len(prompts))]
        entropy: Any = sampling.seed.entropy
        seeds = [np.random.SeedSequence(entropy, spawn_key=key) for key in keys]
        self.generators = [np.random.default_rng(seed) for seed in seeds]
        self.counts: Any = None
        if sampling.counts:
            self.counts = np.stack([np.bincount(prompt, minlength=vocab_size) for prompt in prompts])
        self.tokens = [prompt.tolist() for prompt in prompts] if sampling.processor is not None else []

    @named("generate")
    def __call__(self, logits: Array) -> Ints:
        """The next tokens (batch,) for logits (batch, vocab_size)."""
        logits = self._processed(logits.astype(lane_dtype(logits.dtype), copy=False))
        if self.matchers:
            allowed = np.stack([matcher.allowed() for matcher in self.matchers])
            logits = np.where(allowed, logits, -np.inf)
        chosen: Ints = np.argmax(logits, axis=1)  # NaN if there is one
        best = logits[np.arange(len(chosen)), chosen]
        if np.isnan(best).any():
            raise ValueError("(): the logits contain NaN; expected numbers")
        if (best == -np.inf).any():
            raise ValueError("(): the logits are all -inf; expected a token to choose")
        if self.sampling.temperature > 0:
            rows = zip(logits, self.generators, strict=True)
            chosen = np.array([self._drawn(*row) for row in rows], np.int64)
        if self.counts is not None:
            self.counts[np.arange(len(chosen)), chosen] += 1
        for tokens, token in zip(self.tokens, chosen.tolist(), strict=bool(self.tokens)):
            tokens.append(token)
        for matcher, token in zip(self.matchers, chosen.tolist(), strict=bool(self.matchers)):
            matcher.accept(token)
        return chosen

    def select(self, sequences: Ints) -> None:
        """Keep only these sequences, in this order."""
        self.generators = [self.generators[i] for i in sequences]
        self.tokens = [self.tokens[i] for i in sequences] if self.tokens else []
        self.matchers = [self.matchers[i] for i in sequences] if self.matchers else []
        if self.counts is not None:
            self.counts = self.counts[sequences]

    def _processed(self, logits: Array) -> Array:
        """The logits with biases and penalties, as the function of the caller leaves them."""
        s = self.sampling
        if self.counts is None and not s.bias[0].size and s.processor is None:
            return logits
        logits = logits.copy()
        logits[:, s.bias[0]] += s.bias[1].astype(logits.dtype)
        if self.counts is not None:
            seen = self.counts > 0
            with np.errstate(invalid="ignore", over="ignore"):
                weaker = np.where(logits > 0, logits / s.repetition, logits * s.repetition)
                taken = s.presence * seen + s.frequency * self.counts
                logits = np.where(seen, weaker, logits) - taken.astype(logits.dtype)
        if s.processor is None:
            return logits
        rows = []
        for tokens, row in zip(self.tokens, logits, strict=True):
            found = np.asarray(s.processor(np.array(tokens, np.int64), row))
            if found.shape != row.shape or not is_float(found.dtype):
                what = "None" if found.dtype == object else f"{found.dtype} of shape {found.shape}"
                came = f"logits_processor returns {what}"
                raise ValueError(f"(): {came}; expected logits of shape {row.shape}")
            rows.append(found)
        return np.stack(rows)

    def _drawn(self, logits: Array, generator: np.random.Generator) -> int:
        tokens, probs = self.sampling.candidates(logits)
        sums = np.cumsum(probs)
        chosen = np.searchsorted(sums, generator.random() * sums[-1], side="right")
        return int(tokens[min(int(chosen), len(tokens) - 1)])


def _fewest(probs: Array, share: float) -> Ints:
    """The most probable tokens, the fewest that reach a share; the first always stays."""
    order = np.argsort(-probs, kind="stable")
    before = np.concatenate(([0.0], np.cumsum(probs[order])[:-1]))
    found: Ints = order[: max(1, int((before < share).sum()))]
    return found


def _likely(probs: Array, share: float) -> Ints:
    """Tokens that have at least a share of the most probable one's probability."""
    return np.flatnonzero(probs >= share * probs.max())


def _bias(given: Any) -> tuple[Ints, Array]:
    """The ids of `logit_bias`, and what is added to their logits."""
    if not isinstance(given, Mapping):
        raise wrong_type("logit_bias", given, "a mapping of ids to numbers")
    ids = [integer("an id of logit_bias", i, 0) for i in given]
    values = [-np.inf if x == -np.inf else number(f"logit_bias[{i}]", x, FLOAT32) for i, x in given.items()]
    return np.array(ids, np.int64), np.array(values)


def _seed(given: Any) -> np.random.SeedSequence:
    if isinstance(given, np.random.SeedSequence):
        return given
    return np.random.SeedSequence(None if given is None else integer("seed", given, 0))
