"""Attention with other normalisers, or other scores: dense, by the papers' formulas, in any dtype."""

import naive
import numpy as np
from oracle import eps, with_array

from fastattn._bench.cases import Shape, combine, make_inputs

# The options that these functions share with attention(), by their names in cases.VARIANTS.
OPTIONS = ["plain", "scale", "causal", "window", "kv_lengths", "padding_mask", "mask", "block_mask", "bias",
           "bias_heads", "bias_masking", "softcap", "alibi"]  # fmt: skip


def sparsemax(s):
    """Martins and Astudillo 2016, algorithm 1, of finite scores (n,): by sorting."""
    z = np.sort(s)[::-1]
    sums = np.cumsum(z)
    support = 1 + np.arange(1, len(z) + 1) * z > sums
    n = support.sum()
    return np.maximum(s - (sums[n - 1] - 1) / n, 0)


def entmax15(s):
    """Peters, Niculae and Martins 2019, algorithm 2, of finite scores (n,): by sorting."""
    z = np.sort(s / 2)[::-1]
    n = np.arange(1, len(z) + 1)
    mean = np.cumsum(z) / n
    spread = np.cumsum(z**2) - n * mean**2
    tau = mean - np.sqrt(np.maximum((1 - spread) / n, 0))
    support = (tau <= z).sum()
    return np.maximum(s / 2 - tau[support - 1], 0) ** 2


def top_k(k):
    """Gupta et al. 2021: softmax of the k largest scores. Of equal ones the first count."""

    def normalise(s):
        chosen = np.argsort(-s, kind="stable")[:k]
        probs = np.zeros_like(s)
        probs[chosen] = softmax(s[chosen])
        return probs

    return normalise


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def scores(q, k, dtype, product=np.matmul, **options):
    """Scores (..., heads_q, len_q, len_k) in `dtype`, -inf where masked, and who attends whom."""
    return naive.masked_scores(q, k, dtype=dtype, product=product, **with_array(options, q, k))


def weigh(probs, v, attend):
    """probs @ v over the keys that each row attends."""
    v = np.repeat(v.astype(probs.dtype), probs.shape[-3] // v.shape[-3], -3)
    v = np.broadcast_to(v, (*probs.shape[:-2], *v.shape[-2:]))
    if np.isfinite(v).all():
        return probs @ v
    with np.errstate(invalid="ignore"):
        return np.where(attend[..., None], probs[..., None] * v[..., None, :, :], 0).sum(-2)


def rowwise(normalise, q, k, v, dtype=np.float64, product=np.matmul, sparse=True, **arguments):
    """normalise(scores) @ v, and the largest score. If `sparse`, a probability of 0 hides the value."""
    s, attend = scores(q, k, dtype, product, **arguments)
    probs = np.zeros_like(s)
    for row in np.ndindex(s.shape[:-1]):
        if attend[row].any():
            probs[row][attend[row]] = normalise(s[row][attend[row]])
    return weigh(probs, v, probs != 0 if sparse else attend), abs(s[attend & np.isfinite(s)]).max(initial=0)


def check(got, ref, plain, v, dtype, largest=0):
    """The contract's bound; `plain` is the same computation in the accumulator's dtype.

    Where probabilities move as much as scores do, so may the result by the rounding of the `largest` score.
    """
    assert got.dtype == dtype
    assert got.shape == ref.shape
    unit = 4 * eps(dtype) + 4 * eps(lane(dtype)) * float(largest)
    got, unit = got.astype(ref.dtype), unit * abs(v[np.isfinite(v)].astype(float)).max(initial=1)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(ref))
    if ref.size:
        finite = ~np.isnan(ref)
        bound = 2 * abs(plain - ref)[finite].max(initial=0) + unit
        worst = abs(got - ref)[finite].max(initial=0)
        assert worst <= bound, f"{worst / bound:.3g} of the bound"


def lane(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def wider(dtype):
    return np.longdouble if dtype == np.float64 else np.float64


def inputs(
    dtype, variant="plain", seed=0, batch=2, heads=(4, 2), len_q=37, len_k=150, dims=(24, 20), spread=3, **how
):
    """q, k, v and arguments. Scores are spread, so that sparse normalisers leave some out."""
    rng = np.random.default_rng(seed)
    shape = Shape("", batch, *heads, len_q, len_k, *dims)
    q, k, v = make_inputs(shape, np.dtype(dtype).name, rng, **how)
    return q * q.dtype.type(spread), k, v, combine((variant,), shape, rng)
