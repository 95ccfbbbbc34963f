"""Caches of layers with windows: keys that no later token attends are dropped, and nothing else changes."""

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, forced
from safetensors.numpy import load_file
from sessions import answer, computed, load, refused_session

from fastattn.layers import KVCache
from fastattn.models import _model_cache
from fastattn.models._model_cache import PART, ModelCache

RNG = np.random.default_rng(11)
NEAR = ["mistral", "gemma3-causal", "gemma4_text", "gpt_oss"]  # with windows of 4 or 5 tokens


@pytest.fixture
def few(monkeypatch):
    """Keys are dropped in multiples of so many tokens, which changes results by rounding alone."""
    monkeypatch.setattr(_model_cache, "PART", 16)
    return 16


def some_ids(n):
    return RNG.integers(tiny.VOCAB, size=n)


def hidden(model, cache, *parts):
    """Hidden states of tokens that are computed in several calls, dropping keys after each."""
    longest = sum(map(len, parts))
    found = []
    for part in parts:
        found.append(model._hidden(part, np.array([len(part)]), longest, cache))
        cache.forget()
    return found


def assert_same_keys(session, prompt, count):
    """Compare keys and values with those of a session that begins with `prompt` and `count` new tokens."""
    fresh = session._model.session()
    answer(session._model, prompt, count, cache=fresh)
    assert fresh.ids == session.ids
    own, other = ([*zip(x._cache.groups, x._cache.firsts, strict=True)] for x in (session, fresh))
    for (group, first), (group_of_fresh, first_of_fresh) in zip(own, other, strict=True):
        begin, end = max(first, first_of_fresh), len(fresh.ids)
        for got, expected in zip(group._held, group_of_fresh._held, strict=True):
            got = got[:, :, begin - first : end - first]
            expected = expected[:, :, begin - first_of_fresh : end - first_of_fresh]
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("window", "implementation"),
    [*((window, isa) for window in (64, PART + 100) for isa in COMPILED), (64, "numpy")],
)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        *(("float32", kept) for kept in (None, "int8", "bfloat16", "float16")),
        *((dtype, kept) for dtype in ("float64", "bfloat16") for kept in (None, "int8")),
    ],
)
def test_results_have_the_same_bits(window, dtype, cache_dtype, implementation, tmp_path, monkeypatch):
    """Single tokens, some that the kernel of few rows takes, and many, across a multiple of keys."""
    model = load(tmp_path, "mistral", {"sliding_window": window}, dtype=dtype)
    n = max(window + 2 * PART, 3 * PART + 20)  # windows reach over a multiple of it
    parts = np.split(some_ids(n + 80), [n, n + 1, n + 2, n + 7])
    with forced(implementation):
        cache = model._cache(0, cache_dtype)
        got = hidden(model, cache, *parts)
        assert cache.firsts == (PART if window > PART else 2 * PART,)
        assert cache.length == n + 80
        with monkeypatch.context() as patch:
            patch.setattr(ModelCache, "forget", lambda self: None)
            whole = model._cache(0, cache_dtype)
            expected = hidden(model, whole, *parts)
    assert whole.firsts == (0,)
    assert cache.nbytes < whole.nbytes
    for one, other in zip(got, expected, strict=True):
        if implementation == "numpy":  # its products round by their shapes
            np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=0, atol=0.02)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", NEAR)
def test_memory_is_bounded(kind, tmp_path, few):
    """Layers with a window hold few keys, however long the text; the others hold all."""
    model = load(tmp_path, kind, {"max_position_embeddings": 1000})
    session = model.session()
    prompt = some_ids(300).tolist()
    expected = answer(model, prompt, 40)
    assert answer(model, prompt, 40, cache=session) == expected
    near = 0
    for heads, first, group in zip(
        model.key_heads, session._cache.firsts, session._cache.groups, strict=True
    ):
        assert first + group.length == 339
        if heads.left is None:
            assert first == 0
            continue
        near += 1
        assert first % few == 0
        assert heads.left + few <= group.length < heads.left + 2 * few
        assert group.capacity == heads.left + 2 * few + 16
    assert near == 1
    assert session.nbytes == sum(x.nbytes for group in session._cache.groups for x in group._held)


@pytest.mark.parametrize("kind", NEAR)
def test_a_session_goes_back_as_far_as_windows_allow(kind, tmp_path, few, implementation, monkeypatch):
    model, rng = load(tmp_path / "model", kind, {"max_position_embeddings": 1000}), np.random.default_rng(3)
    (left,) = {heads.left for heads in model.key_heads} - {None}
    session, text, kept, anew = model.session(), [], 0, 0
    for turn in range(24):
        there, cut = session.ids, [0, 0, 12, 40][turn % 4]
        text = text[: max(0, len(there) - cut)] + some_ids(rng.integers(1, 40)).tolist()
        same = int(np.cumprod([a == b for a, b in zip(there, text[:-1], strict=False)], dtype=int).sum())
        first = max(session._cache.firsts)
        reached = same if not first or same - left >= first else 0
        kept, anew = kept + (first > 0 and reached > 0), anew + (same > 0 and not reached)
        expected = answer(model, text, 3)
        for each in (session.copy(), session):
            with monkeypatch.context() as patch:
                counts = computed(patch, model)
                assert answer(model, text, 3, cache=each) == expected
            assert counts[0] == len(text) - reached
        assert_same_keys(session, text, 3)
        if turn % 5 == 4:
            session.save(tmp_path / "session")
            session = model.load_session(tmp_path / "session")
            assert session.ids == (text + expected)[:-1]
    assert kept > 5
    assert anew > 2


@pytest.mark.parametrize("kind", NEAR)
def test_the_earliest_place_to_go_back_to(kind, tmp_path, few, monkeypatch):
    model, ids = load(tmp_path, kind, {"max_position_embeddings": 1000}), some_ids(90).tolist()
    (left,) = {heads.left for heads in model.key_heads} - {None}
    whole = model.session()
    answer(model, ids, 1, cache=whole)
    first = max(whole._cache.firsts)
    assert first > 0
    for length in range(first + left - 3, first + left + 3):
        text, session = [*ids[:length], (ids[length] + 1) % tiny.VOCAB], whole.copy()
        with monkeypatch.context() as patch:
            counts = computed(patch, model)
            answer(model, text, 1, cache=session)
        assert counts == [1 if length >= first + left else len(text)]
        assert_same_keys(session, text, 1)


@pytest.mark.parametrize("kind", NEAR)
def test_several_prompts_drop_what_the_shortest_needs_no_more(kind, tmp_path, few, monkeypatch):
    model = load(tmp_path, kind, {"max_position_embeddings": 1000})
    prompts = [some_ids(n).tolist() for n in (70, 20, 131)]
    firsts = []
    forget = ModelCache.forget

    def told(self):
        forget(self)
        firsts.append(max(self.firsts))

    alone = [answer(model, prompt, 60) for prompt in prompts]
    monkeypatch.setattr(ModelCache, "forget", told)
    together = np.array(list(model.generate(prompts, 60, stop=())))
    assert together.T.tolist() == alone
    assert firsts[0] == 0
    assert firsts[-1] == 48


def test_an_interrupted_drop_changes_nothing(tmp_path, few, monkeypatch):
    model = load(tmp_path, "gemma3-causal")
    session, text = model.session(), some_ids(51).tolist()
    answer(model, text, 1, cache=session)

    def interrupted(self, ends):
        raise KeyboardInterrupt

    firsts, text = session._cache.firsts, text + some_ids(1).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "_end_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(model, text, cache=session)
    assert session._cache.firsts == firsts != (0, 0)
    assert answer(model, text, cache=session) == answer(model, text)
    assert_same_keys(session, text, 6)


def test_proposals_are_taken_back(tmp_path, few):
    model = load(tmp_path, "gemma3-causal")
    prompt = some_ids(30).tolist() * 4
    for session in (None, model.session()):
        got = answer(model, prompt, 80, speculate="lookup", cache=session)
        assert got == answer(model, prompt, 80)
    assert max(session._cache.firsts) > 100


def test_scores_are_those_of_all_keys(tmp_path, few):
    model = load(tmp_path, "gemma3-causal")
    prompt, ends = some_ids(100).tolist(), [some_ids(n).tolist() for n in (3, 1, 7)]
    got = model.score(prompt, ends)
    for one, end in zip(got, ends, strict=True):
        (alone,) = model.score(prompt, [end])
        np.testing.assert_allclose(one.logprobs, alone.logprobs, rtol=1e-12)


def test_files_that_begin_elsewhere(tmp_path, few):
    model, file = load(tmp_path / "model", "gemma3-causal", dtype="float32"), tmp_path / "session"
    session = model.session()
    answer(model, some_ids(90).tolist(), 2, cache=session)
    session.save(file)
    good = load_file(file)
    assert sorted(good["firsts"].tolist()) == [0, 64]
    assert good["firsts"][0] == 64
    swapped = good["firsts"][::-1].copy()
    late = {name: good[name][:, :, 26:].copy() for name in ("k", "v")} | {"firsts": np.array([90, 0])}
    for message, changes in {
        r"keys from the positions \(0, 64\) on; expected 0 where": {"firsts": swapped},
        "keys from the positions .*; expected 0 where": {"firsts": -good["firsts"]},
        "expected the longest to be": {"firsts": good["firsts"] // 2},
        r"keys from the positions \(90, 0\) on; expected all that": late,
        r"firsts \(1,\) in int64; expected \(2,\) in int64": {"firsts": good["firsts"][:1]},
        "in int32; expected": {"firsts": good["firsts"].astype(np.int32)},
    }.items():
        refused_session(model, file, message, {**good, **changes})
