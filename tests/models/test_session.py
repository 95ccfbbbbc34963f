"""Sessions: what a language model keeps between calls, and what a file of it may hold."""

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tiny_models as tiny
from safetensors.numpy import load_file
from sessions import answer, computed, load, refused_session
from tiny_models import DECODERS, VOCAB

from fastattn import models
from fastattn.models import _session
from fastattn.models._session import digest

RNG = np.random.default_rng(5)
FIRST = RNG.integers(VOCAB, size=9).tolist()
NEXT = RNG.integers(VOCAB, size=4).tolist()
SCALED = {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize("kind", DECODERS)
def test_the_next_turn_computes_its_own_tokens_alone(kind, tmp_path, implementation, monkeypatch):
    model = load(tmp_path, kind)
    session = model.session()
    first = answer(model, FIRST, cache=session)
    assert first == answer(model, FIRST)
    assert session.ids == (FIRST + first)[:-1]  # nothing was computed of the last token
    again = FIRST + first + NEXT
    expected = answer(model, again)
    counts = computed(monkeypatch, model)
    assert answer(model, again, cache=session) == expected
    assert counts == [1 + len(NEXT), *[1] * 5]
    assert (
        repr(session) == f"<Session of {model.model_type}: {len(session.ids)} tokens, {session.nbytes} bytes>"
    )
    assert session.ids == again + expected[:-1]


def test_a_prompt_that_differs_is_computed_from_there(tmp_path, monkeypatch):
    model = load(tmp_path)
    session = model.session()
    answer(model, FIRST, cache=session)
    other = [*FIRST[:5], (FIRST[5] + 1) % VOCAB, *NEXT]
    prompts = {
        "other": (other, 5),
        "the same": (other, 1),
        "its begin": (other[:4], 1),
        "new": ([*other[::-1]], None),
    }
    for prompt, count in prompts.values():
        expected = answer(model, prompt)
        with monkeypatch.context() as patch:
            counts = computed(patch, model)
            assert answer(model, prompt, cache=session) == expected
        assert count is None or counts[0] == count
        assert session.ids[: len(prompt)] == prompt


@pytest.mark.parametrize("cache_dtype", [None, "int8", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "lfm2", "gemma4_text"])
def test_a_file_holds_a_session(kind, cache_dtype, tmp_path):
    model = load(tmp_path / "model", kind, dtype="float32")
    session = model.session(cache_dtype)
    first = answer(model, FIRST, cache=session)
    session.save(tmp_path / "session")
    again = FIRST + first + NEXT
    expected = answer(model, again, cache=session)
    read = models.load(tmp_path / "model", dtype="float32").load_session(tmp_path / "session")
    assert read.ids == (FIRST + first)[:-1]
    assert answer(read._model, again, cache=read) == expected


def test_scaled_positions_begin_anew(tmp_path, monkeypatch):
    """Their frequencies depend on the length, and so do all keys."""
    model = load(tmp_path, changes=SCALED)
    session = model.session()
    first = answer(model, FIRST, cache=session)
    again = FIRST + first + NEXT
    expected = answer(model, again)
    counts = computed(monkeypatch, model)
    assert answer(model, again, cache=session) == expected
    assert counts[0] == len(again)
    short = model.session()
    assert answer(model, FIRST[:3], 1, cache=short) == answer(model, FIRST[:3], 1)
    counts.clear()
    answer(model, FIRST[:6], 1, cache=short)
    assert counts == [3]


def test_penalties_and_draws_are_those_without_a_session(tmp_path):
    model = load(tmp_path)
    session, how = model.session(), {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}
    answer(model, FIRST, cache=session)
    again = FIRST + NEXT
    assert answer(model, again, cache=session, **how) == answer(model, again, **how)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_an_interrupted_step_leaves_what_was_complete(kind, tmp_path, monkeypatch):
    model = load(tmp_path, kind)
    expected, session = answer(model, FIRST), model.session()
    steps = model.generate(FIRST, 6, stop=(), cache=session)
    assert [next(steps), next(steps)] == expected[:2]
    run, kind = type(model.program).run, type(model.program)

    def stopped(self, x, call, *others):
        if self.use == "model":
            raise KeyboardInterrupt
        return run(self, x, call, *others)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert session.ids == FIRST + expected[:1]
    assert answer(model, FIRST, cache=session) == expected
    session.save(tmp_path / "session")


def test_one_answer_at_a_time(tmp_path):
    model = load(tmp_path)
    session = model.session()
    one, other = (model.generate(FIRST, 6, stop=(), cache=session) for _ in range(2))
    next(one)
    next(other)
    with pytest.raises(RuntimeError, match=r"^generate\(\): cache has been given to another call meanwhile"):
        next(one)
    assert len(list(other)) == 5


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_one_thread_at_a_time_computes_with_a_session(kind, tmp_path, monkeypatch):
    model = load(tmp_path, kind)
    inside, hidden, errors = [], type(model)._hidden, []
    expected = {i: answer(model, FIRST[i:]) for i in range(4)}

    def alone(self, *others):
        inside.append(1)
        time.sleep(0.001)  # other threads run
        assert len(inside) == 1
        inside.pop()
        return hidden(self, *others)

    monkeypatch.setattr(type(model), "_hidden", alone)
    session = model.session()

    def work(i):
        for _ in range(5):
            try:
                assert answer(model, FIRST[i:], cache=session) == expected[i]
                session.copy()
            except RuntimeError as error:  # noqa: PERF203
                errors.append(str(error))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert set(errors) <= {
        "generate(): cache has been given to another call meanwhile; expected one answer at a time"
    }


@pytest.mark.parametrize("convolutions", [2, 3])  # of 3 layers
def test_states_go_back_to_a_snapshot(convolutions, tmp_path, monkeypatch):
    """At most as many tokens are computed again as are cut off, or as lie between two snapshots."""
    monkeypatch.setattr(_session, "EVERY", 16)
    kinds = ["conv", "full_attention" if convolutions == 2 else "conv", "conv"]
    weights = tiny.tensors("lfm2", {**tiny.CONFIGS["lfm2"], "layer_types": kinds})
    tiny.write(tmp_path / "model", "lfm2", weights, layer_types=kinds)
    model, rng = models.load(tmp_path / "model", dtype="float64"), np.random.default_rng(0)
    session, text, most = model.session(), [], 0
    for turn in range(40):
        there = session.ids
        if turn % 4 == 3:
            text = text[: rng.integers(1, len(there))]
        cut = len(text) if turn % 4 == 3 else len(there)
        text = text + rng.integers(VOCAB, size=rng.integers(1, 30)).tolist()
        same = np.cumprod([a == b for a, b in zip(there, text[:-1], strict=False)], dtype=int).sum()
        expected = answer(model, text, 3)
        with monkeypatch.context() as patch:
            counts = computed(patch, model)
            assert answer(model, text, 3, cache=session) == expected
        again = sum(counts[:-2]) - (len(text) - same)
        assert 0 <= again <= (0 if cut == len(there) else max(16, len(there) - same))
        most = max(most, again)
        lengths = [each.length for each in session._cache._snapshots]
        assert lengths[-1] <= len(session.ids)
        assert len(lengths) <= 2 + 2 * np.log2(1 + len(session.ids) / 16) + 2
        text += expected
    assert most > 0
    session.save(tmp_path / "session")
    text = text[: len(text) // 2] + NEXT
    expected = answer(model, text)
    counts = computed(monkeypatch, model)
    assert answer(model, text, cache=model.load_session(tmp_path / "session")) == expected
    read = counts.copy()
    counts.clear()
    answer(model, text, cache=session)
    assert read == counts
    assert sum(read) < len(text)


def test_files_without_the_states_of_the_model(tmp_path):
    model, file = load(tmp_path / "model", "lfm2", dtype="float32"), tmp_path / "session"
    session = model.session()
    answer(model, FIRST, cache=session)
    session.save(file)
    good = load_file(file)
    states = {name: x for name, x in good.items() if name.startswith("states.")}
    assert sorted(states) == ["states.14.0", "states.14.1", "states.9.0", "states.9.1"]
    few = {name: x for name, x in good.items() if name not in states}
    other = {name: x for name, x in good.items() if not name.startswith("states.14")}
    for held in (
        few, other, {**few, "states.14.0": states["states.14.0"]}, {**good, "states.9.1": good["k"]},
        {**good, "states.9.2": states["states.9.1"]}, {**good, "states.x": good["k"]},
        {**other, "states.15.0": states["states.14.0"], "states.15.1": states["states.14.1"]},
        {**good, "states.9.0": states["states.9.0"].astype(np.float64)},
    ):  # fmt: skip
        refused_session(model, file, " has states after .*; expected what", held)


def test_a_file_whose_states_are_said_to_be_of_another_token(tmp_path, monkeypatch):
    monkeypatch.setattr(_session, "EVERY", 4)
    model, file = load(tmp_path / "model", "lfm2"), tmp_path / "session"
    session = model.session()
    answer(model, FIRST, cache=session)
    session.save(file)
    written = file.read_bytes()
    assert written.count(b"states.4.") == 2
    file.write_bytes(written.replace(b"states.4.", b"states.5."))
    with pytest.raises(ValueError, match=r"^load_session\(\): .* is damaged; expected the ids and keys"):
        model.load_session(file)


@pytest.mark.parametrize("cache_dtype", [None, "int8", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "lfm2", "gemma4_text"])
def test_a_copy_holds_what_is_left(kind, cache_dtype, tmp_path, monkeypatch):
    """As many bytes as its part alone, none of which are the session's."""
    monkeypatch.setattr(_session, "EVERY", 4)
    model = load(tmp_path, kind, dtype="float32")
    session, short = model.session(cache_dtype), model.session(cache_dtype)
    answer(model, FIRST + NEXT, cache=session)
    answer(model, FIRST[:8], 1, cache=short)
    part, whole = session.copy(8), session.copy()
    assert part.ids == FIRST[:8]
    for copied in (part, whole, session.copy(0)):
        assert {each.capacity for each in copied._cache.groups} == {len(copied.ids)}
    assert part.nbytes <= short.copy().nbytes < whole.nbytes <= session.nbytes
    expected = [answer(model, prompt, cache=model.session(cache_dtype)) for prompt in (FIRST, FIRST + NEXT)]
    assert answer(model, FIRST, cache=part) == expected[0]
    assert answer(model, FIRST + NEXT, cache=session) == answer(model, FIRST + NEXT, cache=whole)
    assert answer(model, FIRST + NEXT, cache=session) == expected[1]


def test_where_a_copy_may_end(tmp_path):
    model = load(tmp_path)
    session, empty = model.session(), model.session()
    answer(model, FIRST, 1, cache=session)
    assert empty.copy(0).ids == []
    for given, length, error, message in (
        (session, -1, ValueError, "length is -1; expected 0 to 9"),
        (session, 10, ValueError, "length is 10; expected 0 to 9"),
        (session, "a", TypeError, "length is 'a'; expected an integer"),
        (empty, 5, ValueError, "length is 5; expected 0 to 0"),
    ):
        with pytest.raises(error, match=rf"^Session.copy\(\): {message}"):
            given.copy(length)


@pytest.mark.parametrize("copied", [models.Session.copy, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", ["llama", "lfm2", "gemma4_text"])
def test_copies_go_on_by_themselves(copied, kind, tmp_path):
    model = load(tmp_path, kind)
    session = model.session()
    first = answer(model, FIRST, cache=session)
    other, ids = copied(session), session.ids
    again, elsewhere = FIRST + first + NEXT, FIRST + NEXT
    assert answer(model, elsewhere, cache=other) == answer(model, elsewhere)
    assert session.ids == ids
    assert answer(model, again, cache=session) == answer(model, again)
    with pytest.raises(TypeError, match="a Session belongs to its model; save"):
        pickle.dumps(session)


def test_texts_and_conversations(writer):
    model = models.load(writer)
    session = model.session()
    text = "Once, a café"
    first = "".join(map(str, model.generate(text, 9, cache=session)))
    assert first == "".join(map(str, model.generate(text, 9)))
    assert len(session.ids) == len(text.encode()) + 8


def test_what_is_refused(tmp_path):
    model, other = load(tmp_path / "one"), load(tmp_path / "other")
    session = model.session()
    cases = [
        (TypeError, r"cache is of type dict; expected what session\(\) makes", {"cache": {}}),
        (ValueError, "cache_dtype is given with a cache", {"cache": session, "cache_dtype": "int8"}),
        (ValueError, "cache is a session of another llama", {"cache": other.session()}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=rf"^generate\(\): {message}"):
            model.generate(FIRST, **options)
    with pytest.raises(ValueError, match=r"^generate\(\): cache is given with 2 prompts; expected one"):
        model.generate([FIRST, NEXT], cache=session)
    message = r"^session\(\): cache_dtype is 'float16'; expected one of int8, int4 of a model in float64"
    with pytest.raises(ValueError, match=message):
        model.session("float16")
    with pytest.raises(ValueError, match=r"^Session.save\(\): the session is empty"):
        session.save(tmp_path / "session")


def test_files_that_are_no_session_of_the_model(tmp_path):
    model = load(tmp_path / "model", dtype="float32")
    session, file = model.session(), tmp_path / "session"
    answer(model, FIRST, cache=session)
    session.save(file)
    good = load_file(file)

    refused = partial(refused_session, model, file)
    refused("holds no session", good, key="fastattn.train")
    refused("the format of the session in .* is 2; expected 3", good, format=2)
    refused("is damaged; expected the ids and keys", {**good, "k": good["k"] + 1}, digest="0")
    refused("is damaged; expected the ids and keys", good, rotated="0")
    refused("is a session of another model, or of other weights", good, model="0")
    weights = tiny.write(tmp_path / "model", "llama")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    tiny.write(tmp_path / "model", "llama", weights)
    session.save(file)
    with pytest.raises(ValueError, match="is a session of another model, or of other weights"):
        models.load(tmp_path / "model").load_session(file)
    for changes, message in (
        ({"ids": good["ids"][:-1]}, r"has ids \(13,\) in int64 and keys of \[14\] tokens"),
        ({"ids": good["ids"].astype(float)}, "in float64 and keys"),
        ({"k": good["k"][:, :1]}, r"k \(1, 1, 14, 6\) in float32"),
        ({"v": good["v"].astype(np.int32)}, "expected what a cache holds"),
        ({"lengths": good["lengths"] + 1}, "lengths from 15 to 15; expected the longest to be 14"),
        ({"more": good["k"]}, "has the arrays"),
        (
            {"k": good["k"].repeat(2, 1), "v": good["v"].repeat(2, 1)},
            r"keys and values \(1, 8, 14, 6\) and .*; expected \(1, 4, 14, 6\)",
        ),
        ({"ids": good["ids"] + 10**6}, "'s ids has"),
    ):
        refused(message, {**good, **changes})
    with pytest.raises(FileNotFoundError, match="is missing"):
        model.load_session(tmp_path / "nowhere")


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_files_with_heads_of_two_sizes(cache_dtype, tmp_path):
    """Near layers have 2 heads of 6, those of all tokens one of 10; the last two layers have none."""
    tiny.write(tmp_path / "model", "gemma4_text")
    model, file = models.load(tmp_path / "model"), tmp_path / "session"
    session = model.session(cache_dtype)
    answer(model, FIRST, cache=session)
    session.save(file)
    good = load_file(file)
    n = len(session.ids)
    assert (good["k"].shape, good["k.1"].shape, good["v.1"].shape) == ((1, 2, n, 6), *[(1, 1, n, 10)] * 2)

    def refused(message, **changes):
        held = {name: x for name, x in {**good, **changes}.items() if x is not None}
        refused_session(model, file, message, held)

    refused("has the arrays .*; expected k, v, .*k.1, v.1, ", **{"k.1": None})
    refused("expected what a cache holds", **{"k.1": good["k.1"][:, :, 1:]})
    refused("expected what a cache holds", **{"v.1": good["v.1"].astype(np.float64)})
    halves = {name: np.ascontiguousarray(good[name][..., ::2]) for name in ("k.1", "v.1")}
    refused(rf"keys and values \(1, 1, {n}, 5\) and .*; expected \(1, 1, {n}, 10\)", **halves)
    if cache_dtype is not None:
        refused("expected what a cache holds", k_scale=good["k_scale"][:, :1])


def test_the_digest_is_of_weights_and_types(tmp_path):
    same = [load(tmp_path), load(tmp_path)]
    others = [load(tmp_path, dtype="float32"), load(tmp_path, dtype="float32", weights_dtype="int8")]
    others += [
        load(tmp_path, changes={"rope_theta": 500.0}),
        load(tmp_path, "mistral"),
        load(tmp_path, changes=SCALED),
    ]
    assert len({digest(model) for model in same}) == 1
    assert len({digest(model) for model in same + others}) == 1 + len(others)
