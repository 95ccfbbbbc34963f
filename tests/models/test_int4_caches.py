"""Models whose keys and values are kept in 4 bits: near others, the same in any company, in files."""

import numpy as np
import pytest
from implementations import COMPILED, each_isa, forced
from sessions import answer, load
from tiny_models import VOCAB

from fastattn import models

RNG = np.random.default_rng(5)
FIRST, NEXT = (RNG.integers(VOCAB, size=n).tolist() for n in (19, 4))
every_kind = pytest.mark.parametrize("kind", ["qwen3", "mistral"])  # mistral's keys have a window


def logits(model, prompt, cache_dtype):
    """Logits of each token of `prompt`, of which each but the first three is computed alone."""
    cache = model._cache(dtype=cache_dtype)
    parts = [prompt[:3], *([token] for token in prompt[3:])]
    hidden = [model._hidden(np.array(part), np.array([len(part)]), len(prompt), cache) for part in parts]
    return np.concatenate(hidden).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@every_kind
def test_near_caches_that_are_not_rounded(kind, dtype, tmp_path, implementation):
    model = load(tmp_path, kind, {"head_dim": 32}, dtype=dtype)
    expected, got = (logits(model, FIRST, kept) for kept in (None, "int4"))
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert 3e-3 < error < 0.3


@pytest.mark.skipif(not COMPILED, reason="compares the kernels with NumPy, and there are none")
@every_kind
def test_the_same_in_the_fallback(kind, tmp_path):
    model = load(tmp_path, kind, {"head_dim": 32})
    with forced("numpy"):
        expected = logits(model, FIRST, "int4")
    np.testing.assert_allclose(logits(model, FIRST, "int4"), expected, rtol=1e-11, atol=1e-11)


@each_isa
@every_kind
def test_prompts_of_different_lengths_are_as_alone(kind, isa, tmp_path):
    model = load(tmp_path, kind, {"head_dim": 32}, dtype="float32")
    prompts = [FIRST, NEXT, FIRST[:7]]
    with forced(isa):
        together = [[] for _ in prompts]
        for row in model.generate(prompts, 6, stop=(), cache_dtype="int4"):
            for each, token in zip(together, row, strict=True):
                each.append(token)
        for prompt, each in zip(prompts, together, strict=True):
            assert answer(model, prompt, cache_dtype="int4") == each
            assert answer(model, prompt, cache_dtype="int4", speculate="lookup") == each


@every_kind
def test_a_file_holds_a_session(kind, tmp_path):
    model = load(tmp_path / "model", kind, {"head_dim": 32}, dtype="float32")
    session = model.session("int4")
    first = answer(model, FIRST, cache=session)
    session.save(tmp_path / "session")
    again = FIRST + first + NEXT
    expected = answer(model, again, cache=session)
    read = models.load(tmp_path / "model", dtype="float32").load_session(tmp_path / "session")
    assert answer(read._model, again, cache=read) == expected


def test_heads_that_are_no_whole_blocks_are_refused(tmp_path):
    model = load(tmp_path, "qwen3")
    message = r"^generate\(\): the model has a head_dim of 8; expected a multiple of 32 in int4"
    with pytest.raises(ValueError, match=message):
        model.generate(FIRST, cache_dtype="int4")
