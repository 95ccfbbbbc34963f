"""Answers of which several tokens are computed in a step: they are those of plain decoding."""

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED
from tiny_hybrid import CONFIGS as HYBRIDS
from tiny_models import DECODERS, EXPERTS, VOCAB

from fastattn import models
from fastattn.models._next_tokens import Speculation, proposals_of

HOWS = (
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.5, "seed": 1, "top_k": 9, "top_p": 0.9},
    {"presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"repetition_penalty": 1.05, "temperature": 0.2, "seed": 8},
    {"logit_bias": {3: 0.5}, "logits_processor": lambda ids, logits: logits + 0.1 * (ids[-1] % 2)},
)


def load(folder, kind="llama", seed=0, changes=None, **options):
    config = {**tiny.CONFIGS[kind], **(changes or {})}
    if "n_positions" in config:
        config["n_positions"] = 160
    tiny.write(folder, kind, tiny.tensors(kind, config, seed), **config)
    return models.load(folder, **options)


def prompt_of(seed):
    """Tokens of which some are there twice."""
    ids = np.random.default_rng(seed).integers(VOCAB, size=12).tolist()
    return ids + ids[:7]


@pytest.fixture
def passes(monkeypatch):
    """The rows of each pass of a language model."""
    rows, hidden = [], models.Decoder._hidden

    def counted(self, tokens, *others):
        rows.append(len(tokens))
        return hidden(self, tokens, *others)

    monkeypatch.setattr(models.Decoder, "_hidden", counted)
    return rows


@pytest.mark.parametrize("how", range(len(HOWS)))
@pytest.mark.parametrize("kind", DECODERS)
def test_the_tokens_are_those_of_plain_decoding(kind, how, tmp_path, implementation):
    model = load(tmp_path, kind, dtype="float64")
    for seed in range(3):
        plain = list(model.generate(prompt_of(seed), 40, stop=(), **HOWS[how]))
        assert list(model.generate(prompt_of(seed), 40, stop=(), speculate="lookup", **HOWS[how])) == plain
        stop = plain[len(plain) // 2]
        got = list(model.generate(prompt_of(seed), 40, stop=stop, speculate="lookup", **HOWS[how]))
        assert got == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"weights_dtype": "int8", "activations": "int8"}, {"weights_dtype": "uint4"}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma2", *dict.fromkeys((*EXPERTS, *HYBRIDS))])
def test_the_bits_are_those_of_plain_decoding(kind, options, tmp_path, passes):
    """Logits, and keys in sessions: tokens beside others are computed as alone."""
    if not COMPILED:
        pytest.skip("NumPy's BLAS has other bits for other numbers of rows")
    model = load(tmp_path, kind, **options)
    for cache_dtype in (None, "int8", *(("float16",) if model.dtype == np.float32 else ())):
        several = 0
        for seed in range(2):
            plain, speculated = model.session(cache_dtype), model.session(cache_dtype)
            for how in HOWS[:3]:
                prompt, seen = prompt_of(seed), ([], [])
                for session, speculate, logits in zip(
                    (plain, speculated), (None, "lookup"), seen, strict=True
                ):
                    session._begin(np.array(prompt[:1]), 1)  # so that both compute the prompt
                    options = {"stop": (), "cache": session, "speculate": speculate, **how}
                    options["logits_processor"] = lambda ids, x, to=logits: to.append(x.copy()) or x
                    passes.clear()
                    tokens = list(model.generate(prompt, 30, **options))
                    several += max(passes[1:]) > 1
                    assert len(tokens) == len(logits) == 30
                np.testing.assert_array_equal(*seen)
                assert speculated.ids == plain.ids
            one, other = (session._settled()[0]._arrays() for session in (plain, speculated))
            for name, x in one.items():
                np.testing.assert_array_equal(x, other[name])
        assert several


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_that_sessions_copy(kind, tmp_path, passes):
    """Copies within a step of several tokens are those of steps of one."""
    if not COMPILED:
        pytest.skip("NumPy's BLAS has other bits for other numbers of rows")
    model = load(tmp_path, kind)
    prompt = prompt_of(2) * 13

    def again(ids, logits):
        logits[prompt[len(ids) % 19]] += 1000
        return logits

    found = []
    for speculate in (None, "lookup"):
        session = model.session()
        passes.clear()
        options = {"stop": (), "cache": session, "speculate": speculate, "logits_processor": again}
        assert len(list(model.generate(prompt, 30, **options))) == 30
        cache, ids = session._settled()
        assert [each.length for each in cache._snapshots][-1] == 256 < len(ids)
        found.append((ids, cache._arrays()))
    assert max(passes[1:]) > 8
    (ids, arrays), (others, other) = found
    assert others == ids
    for name, x in arrays.items():
        np.testing.assert_array_equal(x, other[name])


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_models_with_states_propose_and_are_proposed_to(kind, how, tmp_path, passes):
    hybrid, plain = load(tmp_path / "one", kind, dtype="float64"), load(tmp_path / "other", dtype="float64")
    same = load(tmp_path / "one", kind, dtype="float64")
    for model, draft in ((hybrid, plain), (plain, hybrid), (hybrid, same)):
        expected = list(model.generate(prompt_of(1), 30, stop=(), **how))
        passes.clear()
        assert list(model.generate(prompt_of(1), 30, stop=(), speculate=draft, **how)) == expected
    assert how or sum(rows > 1 for rows in passes) > 3


def test_text_that_repeats_takes_fewer_steps(tmp_path, passes):
    """A model that says its prompt again and again; the limit is how much is asked for."""
    model, prompt = load(tmp_path, dtype="float64"), [5, 9, 2, 7, 11, 30]

    def again(ids, logits):
        logits[prompt[(len(ids) - 6) % 6]] += 1000
        return logits

    for count in (1, 2, 3, 17, 60):
        passes.clear()
        got = list(model.generate(prompt, count, stop=(), logits_processor=again, speculate="lookup"))
        assert got == (prompt * 10)[:count]
        assert sum(passes[1:]) >= count - 1
        assert count < 60 or (len(passes) < 18 and max(passes[1:]) == 16)
        assert max(passes[1:], default=0) < count


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_smaller_model_proposes(how, tmp_path, passes):
    model, other = load(tmp_path / "a", dtype="float64"), load(tmp_path / "b", "gpt2", 1, dtype="float64")
    plain = list(model.generate(prompt_of(0), 40, stop=(), **how))
    passes.clear()
    assert list(model.generate(prompt_of(0), 40, stop=(), speculate=other, **how)) == plain
    passes.clear()
    same = load(tmp_path / "c", dtype="float64")
    assert list(model.generate(prompt_of(0), 40, stop=(), speculate=same, **how)) == plain
    assert how or sum(rows > 1 for rows in passes) < 12  # whose proposals are right
    short = load(tmp_path / "d", "gpt2", 1)  # with fewer positions than the text gets
    tiny.write(tmp_path / "d", "gpt2", n_positions=32)
    short = models.load(tmp_path / "d")
    assert list(model.generate(prompt_of(0), 40, stop=(), speculate=short, **how)) == plain


def test_pieces_grammars_and_sessions(writer, passes):
    model = models.load(writer)
    text, several = "abcabcabc", 0
    for options in (
        {"logprobs": 2, "logit_bias": dict.fromkeys(model.text.encode(["abc"])[0], 9.0)},
        {"grammar": "start: /(xyz){4,9}/", "stop": 198},
        {"temperature": 1.0, "seed": 3, "stop": ["ca", "\0"], "logprobs": 0},
        {"logit_bias": {97: 50.0, 98: 50.0}, "stop": "aaa", "cache": None},
    ):
        plain = list(model.generate(text, 40, **options))
        session = model.session()
        for cache in (None, session):
            passes.clear()
            got = list(model.generate(text, 40, **{**options, "cache": cache}, speculate="lookup"))
            several += max(passes[1:], default=0) > 1
            assert [(x.text, x.ids, x.finish_reason) for x in got] == [
                (x.text, x.ids, x.finish_reason) for x in plain
            ]
            for one, other in zip(got, plain, strict=True):
                for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
                    assert list(a) == list(b)
                    np.testing.assert_allclose(list(a.values()), list(b.values()), atol=1e-5)
        assert len(session.ids) <= len(text) + sum(len(piece.ids) for piece in plain)
        again = text + "bc?"
        expected = list(map(str, model.generate(again, 5)))
        assert list(map(str, model.generate(again, 5, cache=session))) == expected
    assert several > 3


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_an_answer_that_is_not_read_to_its_end(kind, tmp_path):
    """A session keeps what was yielded, not what was proposed."""
    model, session = load(tmp_path, kind, dtype="float64"), None
    expected = list(model.generate(prompt_of(1), 40, stop=()))
    for count in (1, 2, 5, 12, 29):
        session = model.session()
        steps = model.generate(prompt_of(1), 40, stop=(), cache=session, speculate="lookup")
        assert [next(steps) for _ in range(count)] == expected[:count]
        assert session.ids == prompt_of(1) + expected[: count - 1]
        assert list(model.generate(prompt_of(1), 40, stop=(), cache=session.copy())) == expected
        assert list(steps) == expected[count:]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_by_length(kind, tmp_path, passes):
    """Nothing is proposed where they change the rotation of the keys."""
    scaling = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    changes = {"max_position_embeddings": 30, "rope_scaling": scaling}
    if kind == "longrope":
        changes |= {"original_max_position_embeddings": 30, "max_position_embeddings": 60}
    model = load(tmp_path, changes=changes, dtype="float64")
    for seed in range(4):
        plain = list(model.generate(prompt_of(seed), 40, stop=()))
        passes.clear()
        assert list(model.generate(prompt_of(seed), 40, stop=(), speculate="lookup")) == plain


def test_proposals_that_fail_become_rare():
    speculation = Speculation(lambda ids, most: [0] * most, np.array([1]))
    wrong = [len(speculation.after([1], 99)) for _ in range(400)]
    assert max(wrong) <= 4
    assert sum(wrong) <= 4 + 0.1 * 400
    assert min(filter(None, wrong)) >= 2
    costly = Speculation(lambda ids, most: [0] * most, np.array([1]), cost=0.4)
    assert sum(len(costly.after([1], 99)) for _ in range(400)) <= 4 + 0.02 * 400
    right = [2]
    for _ in range(4):  # they become more where they are right
        right.append(len(speculation.after([0] * right[-1] + [1], 99)))
    assert right[-1] == 15


def test_a_model_that_people_use(smollm):
    said = "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps. " * 2
    messages = [{"role": "user", "content": f"Repeat this text word for word: {said}"}]
    for how in ({}, {"temperature": 0.7, "seed": 5}):
        plain = list(smollm.generate(messages, 40, logprobs=1, **how))
        got = list(smollm.generate(messages, 40, logprobs=1, speculate="lookup", **how))
        assert [x.ids for x in got] == [x.ids for x in plain]
        if COMPILED:
            assert got == plain


def test_what_is_refused(tmp_path):
    model = load(tmp_path / "a")
    other = load(tmp_path / "b", changes={"vocab_size": 70})
    for error, message, given, ids in (
        (ValueError, "speculate is 'draft'; expected 'lookup', a smaller model, or None", "draft", [1]),
        (TypeError, "speculate is of type int; expected 'lookup', or a language model", 3, [1]),
        (ValueError, "speculate is a model of 70 tokens; expected the tokens of this one, 60", other, [1]),
        (ValueError, "speculate is given with 2 prompts; expected one", "lookup", [[1], [2]]),
    ):
        with pytest.raises(error, match=rf"^generate\(\): {message}"):
            model.generate(ids, 3, speculate=given)
    assert proposals_of(None, model, []) is None
