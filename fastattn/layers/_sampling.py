"""The choice of the next token from its logits."""

from __future__ import annotations

import numpy as np

from fastattn._args.errors import named
from fastattn._args.types import Array, Ints, lane_dtype
from fastattn._args.values import generator, integer, number, short


class Sampler:
    """Chooses a token for each sequence; every sequence draws from a random generator of its own.

    It divides the logits by `temperature`, keeps the `top_k` best tokens and those that equal the last of
    them, and of these the fewest whose probabilities reach `top_p`. A temperature of 0 takes the best token.
    """

    def __init__(
        self,
        batch: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        rng: np.random.Generator | int | None,
    ):
        float64 = np.dtype(np.float64)
        self.temperature = number("temperature", temperature, float64)
        if self.temperature < 0:
            raise ValueError(f"(): temperature is {temperature}; expected 0 or more")
        self.top_k = None if top_k is None else integer("top_k", top_k, 1)
        self.top_p = 1.0 if top_p is None else number("top_p", top_p, float64)
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"(): top_p is {top_p}; expected 0 to 1")
        source = generator("rng", rng)
        if self.temperature == 0:
            for name, value in (("top_k", top_k), ("top_p", top_p), ("rng", rng)):
                if value is not None:
                    came = f"{name} is {short(value)} and temperature 0, which draws nothing"
                    raise ValueError(f"(): {came}; expected a temperature above 0")
        self.generators = source.spawn(batch)

    @named("generate")
    def __call__(self, logits: Array) -> Ints:
        """The next tokens (batch,) for logits (batch, vocab_size)."""
        logits = logits.astype(lane_dtype(logits.dtype), copy=False)
        best: Ints = np.argmax(logits, axis=1)  # NaN if there is one
        best_logits = logits[np.arange(len(best)), best]
        if np.isnan(best_logits).any():
            raise ValueError("(): the model's logits have NaN; expected numbers")
        if (best_logits == -np.inf).any():
            raise ValueError("(): the model's logits are all -inf; expected a token to choose")
        if self.temperature == 0:
            return best
        return np.array([self._drawn(*row) for row in zip(logits, self.generators, strict=True)], np.int64)

    def select(self, sequences: Ints) -> None:
        """Keep only these sequences, in this order."""
        self.generators = [self.generators[i] for i in sequences]

    def _drawn(self, logits: Array, generator: np.random.Generator) -> int:
        tokens, probs = self.candidates(logits)
        sums = np.cumsum(probs)
        chosen = np.searchsorted(sums, generator.random() * sums[-1], side="right")
        return int(tokens[min(int(chosen), len(tokens) - 1)])

    def candidates(self, logits: Array) -> tuple[Ints, Array]:
        """The tokens that may be drawn for logits (vocab_size,), and their probabilities."""
        tokens = np.arange(len(logits))
        if self.top_k is not None and self.top_k < len(logits):
            tokens = np.flatnonzero(logits >= np.partition(logits, -self.top_k)[-self.top_k])
        scores = logits[tokens].astype(np.float64)
        best = scores.max()
        if best == np.inf:  # infinitely better than the others
            probs = (scores == best).astype(np.float64)
        else:
            with np.errstate(over="ignore"):  # a tiny temperature
                probs = np.exp((scores - best) / self.temperature)
        probs /= probs.sum()
        if self.top_p < 1:
            order = np.argsort(-probs, kind="stable")
            tokens, probs = tokens[order], probs[order]
            # A token stays if those before it do not reach top_p; the first always does.
            before = np.concatenate(([0.0], np.cumsum(probs)[:-1]))
            stay = before < self.top_p
            stay[0] = True
            tokens, probs = tokens[stay], probs[stay] / probs[stay].sum()
        return tokens, probs
