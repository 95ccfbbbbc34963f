"""Decoders as programs: the same bits for any threads and batch, the same results on both implementations."""

import copy

import numpy as np
import pytest
import tiny_hybrid
import tiny_models as tiny
from implementations import COMPILED, each_isa, forced
from tiny_models import DECODERS, EXPERTS, VOCAB

from fastattn import models
from fastattn._engine.steps import GateStep
from fastattn.layers._mixers import MixStep
from fastattn.models import _generation as generation
from fastattn.models._sampling import Sampler

TOLERANCE = 1e-5


class Recorded(Sampler):
    """A sampler that keeps the logits it is shown, and chooses the tokens it is told, if it is told any."""

    seen: list = []  # noqa: RUF012
    told = None

    def __call__(self, logits):
        self.seen.append(logits.copy())
        return super().__call__(logits) if self.told is None else self.told[len(self.seen) - 1]


@pytest.fixture
def logits_of(monkeypatch):
    """The logits (steps, batch, vocab) of generating after prompts: the best tokens, or those `told`."""
    monkeypatch.setattr(generation, "Sampler", Recorded)

    def run(model, prompts, steps=6, told=None, **options):
        monkeypatch.setattr(Recorded, "seen", [])
        monkeypatch.setattr(Recorded, "told", told)
        list(model.generate(prompts, steps, stop=(), **options))
        return np.stack(Recorded.seen)

    return run


def loaded(tmp_path, kind, **options):
    tiny.write(tmp_path, kind)
    return models.load(tmp_path, **options)


def some_ids(*shape):
    return np.random.default_rng(0).integers(0, VOCAB, shape)


NARROW = {"weights_dtype": "int4", "activations": "int8"}


@pytest.mark.parametrize("options", [{}, NARROW], ids=str)
@pytest.mark.parametrize("kind", DECODERS)
def test_bits_do_not_depend_on_threads(kind, options, tmp_path, implementation, logits_of):
    """There are so many tokens that every step has work for several threads."""
    model, ids = loaded(tmp_path, kind, **options), some_ids(120, 30)
    results = []
    for threads in (1, 2, 5):
        with forced(implementation, num_threads=threads):
            results.append((model(ids), logits_of(model, ids, 2)))
    for full, cached in results[1:]:
        np.testing.assert_array_equal(full, results[0][0])
        np.testing.assert_array_equal(cached, results[0][1])


@pytest.mark.skipif(not COMPILED, reason="compares the kernels with NumPy, and there are none")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", DECODERS)
def test_the_fallback_agrees(kind, dtype, tmp_path, logits_of):
    """Prompts of several lengths, beyond a window, past the cache's first room.

    Both go along the fallback's tokens: where two logits are nearly equal, rounding decides which is the
    best, and the texts part there.
    """
    model = loaded(tmp_path, kind, dtype=dtype)
    prompts = [some_ids(n).tolist() for n in (1, 13, 6)]
    with forced("numpy"):
        expected = logits_of(model, prompts, 19)
    got = logits_of(model, prompts, 19, told=expected.argmax(axis=-1)).astype(np.float64)
    expected = expected.astype(np.float64)
    bound = {"float32": TOLERANCE, "float64": 1e-12, "bfloat16": 0.1}[dtype]  # there 2 to 3 digits a rounding
    if dtype == "bfloat16" and kind in EXPERTS:  # where two experts are nearly equal, rounding chooses
        assert np.isclose(got, expected, rtol=bound, atol=bound).all(axis=-1).mean() > 0.9
        return
    np.testing.assert_allclose(got, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "least", "most"),
    [
        *((dtype, "int8", 1e-3, 0.04) for dtype in ("float32", "float64", "bfloat16")),
        ("float32", "bfloat16", 1e-4, 2e-2), ("float32", "float16", 1e-5, 2e-3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", DECODERS)
def test_narrow_caches(kind, dtype, cache_dtype, least, most, tmp_path, implementation, logits_of):
    """Logits are near those of keys and values that are not rounded, and are not the same."""
    model = loaded(tmp_path, kind, dtype=dtype)
    prompts = [some_ids(n).tolist() for n in (1, 13, 6)]
    expected = logits_of(model, prompts, 19)
    told = expected.argmax(axis=-1)
    expected = expected.astype(np.float64)
    got = logits_of(model, prompts, 19, told=told, cache_dtype=cache_dtype).astype(np.float64)
    rows = np.mean((got - expected) ** 2, axis=-1) / np.mean(expected**2)
    # Rounding may choose other experts for a token, whose logits are then quite different.
    error = np.sqrt(np.median(rows) if kind in EXPERTS and cache_dtype == "int8" else np.mean(rows))
    assert least < error < most
    again = logits_of(model, prompts, 19, told=told, cache_dtype=cache_dtype)
    np.testing.assert_array_equal(got, again.astype(np.float64))


@pytest.mark.skipif(not COMPILED, reason="compares the kernels with NumPy, and there are none")
@pytest.mark.parametrize("kind", DECODERS)
def test_a_cache_in_int8_is_the_same_in_the_fallback(kind, tmp_path, logits_of):
    """In float64 nearly no element lies so near the middle of two integers that the two part."""
    model = loaded(tmp_path, kind, dtype="float64")
    prompts = [some_ids(n).tolist() for n in (1, 13, 6)]
    with forced("numpy"):
        expected = logits_of(model, prompts, 19, cache_dtype="int8")
    got = logits_of(model, prompts, 19, told=expected.argmax(axis=-1), cache_dtype="int8")
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)


@each_isa
@pytest.mark.parametrize("options", [{}, NARROW], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, "int8", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", DECODERS)
def test_prompts_of_different_lengths_are_as_alone(kind, cache_dtype, options, isa, tmp_path, logits_of):
    """Bit for bit, in any threads: a batch is not padded, and what follows is a step of equal lengths."""
    model, lengths = loaded(tmp_path, kind, **options), (4, 1, 11, 4)
    prompts = [row[:n].tolist() for row, n in zip(some_ids(4, 11), lengths, strict=True)]
    with forced(isa, num_threads=1):
        together = logits_of(model, prompts, cache_dtype=cache_dtype)
    with forced(isa, num_threads=3):
        np.testing.assert_array_equal(logits_of(model, prompts, cache_dtype=cache_dtype), together)
        for b, prompt in enumerate(prompts):
            alone = logits_of(model, [prompt], cache_dtype=cache_dtype)
            np.testing.assert_array_equal(together[:, b : b + 1], alone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", tiny_hybrid.CONFIGS)
def test_states_go_on_where_a_call_ended(kind, dtype, tmp_path, implementation):
    """Token by token, and in calls of several lengths, beyond a chunk of the kernels."""
    model, ids = loaded(tmp_path, kind, dtype=dtype), some_ids(90)
    expected = model._hidden(ids, np.array([len(ids)]), len(ids))
    bound = {"float32": TOLERANCE, "float64": 1e-12}[dtype] * np.abs(expected).max()
    for cuts in (range(1, 90), (1, 2, 7, 40, 41, 80), (5, 6, 88)):
        cache, got = model._cache(), []
        for part in np.split(ids, cuts):
            cache = copy.deepcopy(cache)
            got.append(model._hidden(part, np.array([len(part)]), len(ids), cache))
        np.testing.assert_allclose(np.concatenate(got), expected, rtol=0, atol=bound)


def test_no_other_type_of_cache(tmp_path):
    model = loaded(tmp_path, "gpt2")
    wide = models.load(tmp_path, dtype="float64")
    for other in ("float64", "uint4", 8):
        message = rf"cache_dtype is {other!r}; expected one of int8, int4, bfloat16, float16$"
        with pytest.raises(ValueError, match=rf"^generate\(\): {message}"):
            model.generate([1, 2], cache_dtype=other)
    message = r"cache_dtype is 'float16'; expected one of int8, int4 of a model in float64$"
    with pytest.raises(ValueError, match=message):
        wide.session("float16")
    expected = list(model.generate([1, 2], 4, cache_dtype="int8"))
    for int8 in (np.int8, np.dtype("int8"), "i1"):
        assert list(model.generate([1, 2], 4, cache_dtype=int8)) == expected


def test_a_model_without_layers(tmp_path, implementation):
    tensors = tiny.write(tmp_path, "gpt2", n_layer=0)
    ids = some_ids(2, 5)
    expected = [tiny.result("gpt2", tiny.CONFIGS["gpt2"] | {"n_layer": 0}, tensors, row) for row in ids]
    model = models.load(tmp_path)
    np.testing.assert_allclose(model(ids), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert len(list(model.generate(ids[0], 3, stop=()))) == 3
    best = next(model.generate(ids, 1))
    assert len(list(model.generate(ids, 3, stop=best[0]))) > 1 or best[0] == best[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", tiny_hybrid.CONFIGS)
def test_mixers_have_the_bits_of_their_operations(kind, dtype, tmp_path, monkeypatch, logits_of):
    """In one call, as when each kernel is called from Python: also of texts of different lengths."""
    ids, mask = some_ids(4, 70), np.arange(70) < np.array([[70], [3], [1], [33]])
    prompts = [row[:n].tolist() for row, n in zip(ids, (40, 1, 2, 70), strict=True)]

    def results():
        model = loaded(tmp_path, kind, dtype=dtype)
        return model(ids), model(ids, mask), logits_of(model, prompts, 5)

    together = results()
    monkeypatch.setattr(MixStep, "op", None)
    monkeypatch.setattr(GateStep, "op", None)
    for one, other in zip(together, results(), strict=True):
        np.testing.assert_array_equal(one, other)
