"""The problems of the suite "training", and which of them are measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._bench import oracle
from fastattn._bench.cases import SHAPES, STRUCTURES, Array, Shape, grouped, shape_of
from fastattn._bench.suite import CallProblem, Request, Section, has_bfloat16
from fastattn._bench.suites.attention.problem import AttentionProblem, fast_bfloat16
from fastattn._bench.suites.training.steps import STEP, StepProblem

BACKWARD, BOTH = "backward", "both"
_ROWS = 512  # that the reference computes at a time
_CHOSEN = 8  # rows of dq, dk and dv that are compared


class GradientProblem(CallProblem):
    """Gradients of q, k and v. `variant` is "backward" or "both" passes, and the variant of attention."""

    @classmethod
    def from_json(cls, fields: list[Any]) -> Any:
        """A problem of the suite, which may be a step."""
        kind = StepProblem if fields[1].startswith(STEP) else GradientProblem
        return kind(Shape(*fields[0]), *fields[1:])

    @property
    def kind(self) -> str:
        """Which passes are timed."""
        return self.variant.split()[0]

    @property
    def attention(self) -> AttentionProblem:
        """The forward pass."""
        return AttentionProblem(self.shape, self.variant.split()[1], self.dtype, self.seed)

    @property
    def name(self) -> str:
        return f"{self.variant} {self.shape.name}"

    def dout(self) -> Array:
        """The gradient that comes in, (B, H, Lq, Dv)."""
        dout = self.rng(2).standard_normal(self.attention.out_shape, np.float32)
        return dout.astype(self.arrays()[0].dtype)

    def reference(self) -> tuple[Array, Array]:
        """Some rows of dq, dk and dv of the last key head, as `joined` counts rows."""
        s, group = self.shape, self.attention.group
        q, k, v = (x[-1:, -n:].astype(float) for x, n in zip(self.arrays(), (group, 1, 1), strict=True))
        dout, scale = self.dout()[-1:, -group:].astype(float), s.head_dim**-0.5
        options = {name: of_heads(x, group) for name, x in self.attention.options().items()}
        if (attended := self.attention.attended()) is not None:
            options = {"mask": attended}
        keys = np.random.default_rng(self.seed).permutation(s.len_k)[:_CHOSEN]
        rows = np.random.default_rng(self.seed).permutation(s.len_q)[:_CHOSEN]
        dq = np.zeros((group, s.len_q, s.head_dim))
        dk, dv = np.zeros((_CHOSEN, s.head_dim)), np.zeros((_CHOSEN, s.dim_v))
        for begin in range(0, s.len_q, _ROWS):
            some = np.arange(begin, min(begin + _ROWS, s.len_q))
            scores = oracle.masked_scores(q, k, rows=some, **options)[0]
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            slopes = dout[0, :, some[0] : some[-1] + 1] @ v[0].swapaxes(-1, -2)
            slopes = probs * (slopes - (probs * slopes).sum(-1, keepdims=True))
            if "softcap" in options:
                products = scale * q[0, :, some[0] : some[-1] + 1] @ k[0].swapaxes(-1, -2)
                slopes *= 1 - np.tanh(products / options["softcap"]) ** 2
            dq[:, some] = scale * slopes @ k[0]
            dk += scale * np.einsum("gij,gid->jd", slopes[..., keys], q[0][:, some])
            dv += np.einsum("gij,gid->jd", probs[..., keys], dout[0][:, some])
        heads_q, heads_kv = s.batch * s.heads_q, s.batch * s.heads_kv
        of_q = ((heads_q - group + np.arange(group))[:, None] * s.len_q + rows).ravel()
        of_k = heads_q * s.len_q + (heads_kv - 1) * s.len_k + keys
        places = np.concatenate([of_q, of_k, of_k + heads_kv * s.len_k])
        return places, np.concatenate([dq[:, rows].reshape(-1, s.head_dim), dk, dv])

    @property
    def tolerance(self) -> float:
        """Of sums over all queries: the rounding of a result in 16 bits grows with its size."""
        return super().tolerance * (16 if self.dtype in ("float16", "bfloat16") else 1)

    @property
    def unit(self) -> str:
        return "flops"

    @property
    def work(self) -> float:
        """Operations of the five products of the backward pass, and of the two of the forward pass."""
        return self.attention.work * (2.5 if self.kind == BACKWARD else 3.5)


def of_heads(x: Any, group: int) -> Any:
    """An option of attention as the last `group` query heads have it."""
    if not isinstance(x, np.ndarray) or not x.ndim:
        return x
    return x[-group:] if x.ndim in (1, 3) else x


def joined(gradients: Any) -> Array:
    """dq, dk and dv, one after another, as rows; head_dim_v is head_dim here."""
    return np.concatenate([np.asarray(x).reshape(-1, x.shape[-1]) for x in gradients])


MASKED = ("sliding_window", "packed_documents", "block_sparse")
MODIFIED = ("bias_heads", "softcap", "alibi")
TEXTS = [shape for shape in SHAPES if not shape.decode]
LONG = shape_of(1, 8, 2048, 2048, 64)
STRUCTURED = shape_of(1, 4, 4096, 4096, 64)
CHARACTERS, GPT2 = shape_of(16, 6, 256, 256, 64), shape_of(4, 12, 256, 256, 64)


def plan(request: Request) -> list[Section]:
    """Short texts, or with `full` all shapes, masks and modifiers; float32 unless `dtype` says otherwise."""
    main = request.dtype or "float32"

    def section(title: str, shapes: list[Shape], *variants: str, dtype: str = main) -> Section:
        return request.section(GradientProblem, title, shapes, dtype, variants)

    def steps(*models: tuple[Shape, str]) -> list[Section]:
        problems = [StepProblem(shape, f"{STEP} {name}", "float32", request.seed) for shape, name in models]
        return [Section("steps, float32", problems)] if main == "float32" else []

    def both(variant: str) -> tuple[str, str]:
        return f"{BACKWARD} {variant}", f"{BOTH} {variant}"

    if not request.full:
        short = [TEXTS[0], TEXTS[2], LONG]
        found = [section("no mask", short, *both("plain")), section("causal", [LONG], *both("causal"))]
        if request.dtype is None and fast_bfloat16():
            found.append(section("no mask", [LONG], *both("plain"), dtype="bfloat16"))
        return found + steps((CHARACTERS, "characters"))
    found = [
        section("no mask", TEXTS, *both("plain")),
        section("causal", TEXTS, *both("causal")),
        section("grouped heads", [grouped(LONG), grouped(TEXTS[4])], *both("plain"), *both("causal")),
        section("masks", [STRUCTURED], *(f"{BACKWARD} {name}" for name in ("plain", *MASKED))),
        section("modifiers", [LONG], *(f"{BACKWARD} {name}" for name in ("plain", *MODIFIED))),
    ]
    if request.dtype is None and has_bfloat16():
        found.append(
            section("no mask", [s for s in TEXTS if s.len_q >= 512], *both("plain"), dtype="bfloat16")
        )
        found.append(section("causal", [LONG], *both("causal"), dtype="bfloat16"))
    return found + steps((CHARACTERS, "characters"), (GPT2, "GPT-2"))


assert set(MASKED) <= set(STRUCTURES)
