"""Gradients of variants that are made of calls of attention, with options and shapes drawn at random.

Each draw has batch dimensions that broadcast, masks, positions and options, whatever fits together. The
gradients are the slopes; those of any number of threads, and those that are asked for alone, have their bits.
"""

import numpy as np
import pytest
from oracle import assert_same_bits

from fastattn import functional
from fastattn.grad import vjp

HOW_MANY = 3  # draws of each function in a default run
NO_LSE = ("differential",)


class Draw:
    """One call: `arrays` have gradients, `fixed` have none."""

    def __init__(self, name, seed):
        self.name, self.rng = name, np.random.default_rng([seed, *name.encode()])
        pick = self.rng.choice
        self.lead = [(3,), (2, 3), ()][pick(3)]
        self.heads_kv, group = int(pick([1, 2])), int(pick([1, 2]))
        self.heads = self.heads_kv * group
        self.len_q, self.len_k = (int(n) for n in pick([1, 2, 9, 34], 2))
        self.dim, self.dim_v = (int(n) for n in pick([5, 8, 17], 2))
        self.heads_out = self.heads
        self.arrays, self.fixed = {}, {}
        if name == "differential":
            self.heads, self.heads_kv = 2 * self.heads, 2 * self.heads_kv
        q, k = (*self.lead, self.heads, self.len_q), (*self.some(), self.heads_kv, self.len_k)
        v = (*self.some(), self.heads_kv, self.len_k, self.dim_v)
        if name == "differential":
            v = (*v[:-3], self.heads_kv // 2, *v[-2:])
        self.put(q=(*q, self.dim), k=(*k, self.dim), v=v)
        getattr(self, f"_{name}", lambda: None)()
        self._options()

    def maybe(self, share=0.3):
        return bool(self.rng.random() < share)

    def some(self):
        """Batch dimensions that broadcast to `lead`."""
        found = tuple(1 if self.maybe() else n for n in self.lead)
        return found[1:] if self.maybe() else found

    def put(self, **shapes):
        self.arrays |= {name: self.rng.standard_normal(shape) for name, shape in shapes.items()}

    def _differential(self):
        self.arrays["lambda_"] = np.array(0.4) if self.maybe() else self.rng.random(self.heads_out)
        if self.maybe():
            self.put(norm_weight=(self.dim_v,))
            self.fixed["lambda_init"] = 0.2

    def _gated(self):
        self.put(
            gate=(*self.lead, self.heads, self.len_q, self.dim_v) if self.maybe() else (self.heads, 1, 1)
        )

    def _latent(self):
        self.arrays = {}
        self.put(q=(*self.lead, self.heads, self.len_q, 5), cache=(*self.lead, self.len_k, 6))
        self.put(key_weight=(self.heads, 3, 4), value_weight=(self.heads, self.dim_v, 4))

    def _disentangled(self):
        self.put(position_keys=(self.heads, 6, self.dim))
        if self.maybe(0.6):
            self.put(position_queries=(self.heads, 6, self.dim))

    def _options(self):
        """Draw about a third of the options that the function takes."""
        rng, fixed, heads = self.rng, self.fixed, (1 if self.maybe(0.5) else self.heads_out)
        scores = (*self.some(), heads, self.len_q if self.maybe(0.7) else 1, self.len_k)
        if self.maybe():
            fixed["mask"] = rng.random(scores) < 0.7
        if self.maybe():
            fixed["kv_lengths"] = rng.integers(0, self.len_k + 1, self.lead)
        if self.maybe() or "kv_lengths" in fixed:
            fixed["q_offset"] = int(rng.integers(-3, self.len_k))
        if self.maybe():
            fixed["window"] = (int(rng.integers(20)), None if self.maybe() else int(rng.integers(20)))
        if self.maybe():
            self.put(bias=scores if self.maybe(0.7) else (*scores[:-1], 1))
        if self.maybe():
            self.put(alibi_slopes=(self.heads_out,))
        if self.maybe():
            fixed["causal"] = True
        if self.maybe():
            self.put(sinks=(self.heads_out,))
        if self.maybe() and self.name != "disentangled":
            self.arrays["softcap"] = np.array(2.5)
        if self.maybe(0.5) and self.name != "disentangled":
            self.arrays["scale"] = np.array(rng.choice([0.4, 1.0]))

    def numbers(self, arrays):
        """`arrays`, with floats for what takes no array."""
        return {name: float(x) if name in ("softcap", "scale") else x for name, x in arrays.items()}

    def forward(self, arrays):
        """The results, as a tuple."""
        lse = {} if self.name in NO_LSE else {"return_lse": True}
        function = getattr(functional, f"{self.name}_attention")
        found = function(**self.numbers(arrays), **self.fixed, **lse)
        return found if lse else (found,)

    def backward(self, results, cotangents, need, **how):
        """The gradients by name."""
        function = getattr(functional, f"{self.name}_attention")
        more = {} if self.name in NO_LSE else {"return_lse": True}
        again, pullback = vjp(function, **self.numbers(self.arrays), **self.fixed, **more, **how)
        assert_same_bits(again if more else [again], results)
        return dict(zip(need, pullback(*cotangents, need=need), strict=True))


NAMES = [name[1:] for name in vars(Draw) if name[:1] == "_" and name[:2] != "__" and name != "_options"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Calls are cut also where they are as short as here."""
    monkeypatch.setattr("fastattn.functional._split_calls._PIECE_SCORES", 1)


@pytest.mark.parametrize("name", NAMES)
def test_draws(name, request, implementation):
    for seed in range(40 if request.config.getoption("full") else HOW_MANY):
        draw = Draw(name, seed)
        results = draw.forward(draw.arrays)
        rng = np.random.default_rng(seed)
        cotangents = [rng.standard_normal(x.shape) for x in results]
        need = [f"d{source}" for source in draw.arrays]
        rng.shuffle(need)
        one = draw.backward(results, cotangents, need, num_threads=1)
        for threads in (2, 5):
            for each, x in draw.backward(results, cotangents, need, num_threads=threads).items():
                np.testing.assert_array_equal(x, one[each], err_msg=f"{seed} {each} of {threads} threads")
        alone = draw.backward(results, cotangents, need[:1])
        np.testing.assert_array_equal(alone[need[0]], one[need[0]], err_msg=f"{seed} {need[0]} alone")

        def value(results, cotangents=cotangents):
            terms = (np.where(np.isfinite(x), x * d, 0) for x, d in zip(results, cotangents, strict=True))
            return sum(x.sum() for x in terms)

        size = sum(abs(np.where(np.isfinite(x), x, 0)).sum() for x in results)
        for source, x in draw.arrays.items():
            got = one[f"d{source}"]
            assert np.shape(got) == x.shape
            step = 1e-6 * rng.standard_normal(x.shape)
            ends = [value(draw.forward({**draw.arrays, source: x + sign * step})) for sign in (1, -1)]
            np.testing.assert_allclose(
                (got * step).sum(),
                (ends[0] - ends[1]) / 2,
                rtol=1e-5,
                atol=1e-13 * (1 + size),
                err_msg=f"{seed} {source}",
            )
