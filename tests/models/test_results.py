"""Models on random weights: against plain NumPy, padded against alone, generation against the full pass."""

import pickle

import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny
from implementations import each_isa, forced
from tiny_models import CONFIGS, DECODERS, ENCODERS, EXPERTS, VOCAB

from fastattn import models
from fastattn._args.packed import PackedLinear
from fastattn._engine import memory
from fastattn.models import _generation as generation
from fastattn.models._parameters import Parameters
from fastattn.models._sampling import Sampler, Sampling

KINDS = list(CONFIGS)
# A few hundred roundings of float32 on results of size 1 to 10.
TOLERANCE = 1e-5


def loaded(tmp_path, kind, **options):
    tiny.write(tmp_path, kind)
    return models.load(tmp_path, **options)


def some_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_plain_numpy(kind, tmp_path, implementation):
    tensors, ids = tiny.write(tmp_path, kind), some_ids(2, 11)
    expected = np.stack([tiny.result(kind, CONFIGS[kind], tensors, row) for row in ids])
    assert np.abs(expected).mean() > 0.1, "a result next to nothing shows nothing"
    got = models.load(tmp_path)(ids)
    assert got.dtype == np.float32
    assert_near(got, expected)
    exact = models.load(tmp_path, dtype="float64")(ids)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(exact, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["roberta", "mpnet"])
def test_padding_tokens_in_a_text(kind, tmp_path):
    """They have a position of their own, and are not counted."""
    tensors, ids = tiny.write(tmp_path, kind), [[1, 5, 1, 1, 7, 8], [5, 1, 6, 7, 1, 1], [9, 8, 7, 6, 5, 4]]
    expected = np.stack([tiny.result(kind, CONFIGS[kind], tensors, row) for row in ids])
    model = models.load(tmp_path)
    assert_near(model(ids), expected)
    for row, states in zip(ids, model(ids), strict=True):
        np.testing.assert_array_equal(model(row)[0], states)
    with pytest.raises(ValueError, match="33 tokens in a sequence; expected at most 32"):
        model([[3] * 33])


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_where_they_are_written(kind, tmp_path, implementation, monkeypatch):
    """A model keeps the memory of a call for the next one if it is large."""
    model = loaded(tmp_path, kind)
    ids = some_ids(2, 11)
    mask = np.arange(11) < np.array([[11], [4]])
    small = model(ids), model(ids, mask)[mask]
    monkeypatch.setattr(memory, "_LEAST_SCRATCH", 0)
    np.testing.assert_array_equal(model(ids), small[0])
    np.testing.assert_array_equal(model(ids, mask)[mask], small[1])


def assert_near(got, expected):
    """Sums err by their largest terms, not by what is left of them."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def relative(error, exact, kind):
    """The size of an error; where rounding may choose other experts for a token, that of the middle row."""
    if kind in EXPERTS:
        return np.median(np.sqrt(np.square(error).mean(axis=-1) / np.square(exact).mean(axis=-1)))
    return np.sqrt(np.square(error).mean() / np.square(exact).mean())


class Unpacked:
    """Gradients, as `Parameters.gradients` takes them: the values of packed weights."""

    def of(self, parameter):
        return parameter.unpack() if isinstance(parameter, PackedLinear) else None


def rounded_weights(model):
    """The tensors of linear maps as `model` keeps them; one that two parameters have is not added up."""
    found = {}
    for made in model.origin.parameters:
        for name, x in Parameters([made]).gradients(Unpacked()).items():
            found[name] = np.where(x, x, found.get(name, x))
    return found


@pytest.mark.parametrize(
    ("weights_dtype", "bound"),
    [("bfloat16", 0.02), ("int8", 0.06), ("q8", 0.06), *((x, 0.5) for x in ("int4", "uint4", "nf4", "iq4"))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_smaller_weights(kind, weights_dtype, bound, tmp_path, implementation):
    """Results are those of a model whose weights have been rounded, and differ by about that."""
    ids, model = some_ids(3, 11), loaded(tmp_path, kind)
    narrow = models.load(tmp_path, weights_dtype=weights_dtype)
    exact, got = model(ids), narrow(ids)
    # Products in bfloat16 round their inputs, too; DeBERTa's positions meet the weights of the file.
    is_same = weights_dtype != "bfloat16" and kind != "deberta-v2"
    if is_same:
        rounded = model.with_state_dict({**model.state_dict(), **rounded_weights(narrow)})
        assert relative(got - rounded(ids), exact, kind) < 1e-5
    error = relative(got - exact, exact, kind)
    assert error > 1e-4
    if (kind, weights_dtype) != ("jina-v2", "nf4"):  # whose error is 0.59, that of its weights: see above
        assert error < bound


@pytest.mark.parametrize("weights_dtype", ["int8", "q8", "int4", "uint4", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_int8_activations(kind, weights_dtype, tmp_path, implementation):
    """They change results by about their rounding, in full passes and step by step."""
    ids = some_ids(3, 11)
    exact = loaded(tmp_path, kind, weights_dtype=weights_dtype)(ids)
    for dtype in ("float32", "bfloat16"):
        how = {"dtype": dtype, "weights_dtype": weights_dtype, "activations": "int8"}
        model = models.load(tmp_path, **how)
        error = model(ids).astype(np.float32) - exact
        assert 1e-4 < relative(error, exact, kind) < 0.1
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again(ids), model(ids))
        if kind in DECODERS:
            tokens = list(model.generate(ids[0], 4, stop=()))
            full = model(np.append(ids[0], tokens[:-1]))[0, len(ids[0]) - 1 :]
            best = full[np.arange(4), tokens].astype(np.float32)
            assert (best >= full.max(axis=-1).astype(np.float32) - 0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_computing_in_bfloat16(kind, tmp_path):
    ids = some_ids(3, 11)
    exact = loaded(tmp_path, kind)(ids)
    got = models.load(tmp_path, dtype="bfloat16")(ids)
    assert got.dtype == ml_dtypes.bfloat16
    error = got.astype(np.float32) - exact
    assert relative(error, exact, kind) < 0.03


@pytest.mark.parametrize("where", ["left", "right", "between"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_sequence_is_as_alone(kind, where, tmp_path, implementation):
    model = loaded(tmp_path, kind)
    lengths, index = np.array([10, 1, 6, 9]), np.arange(10)
    if where == "left":
        mask = index >= 10 - lengths[:, None]
    elif where == "right":
        mask = index < lengths[:, None]
    else:
        mask = np.random.default_rng(0).permuted(index < lengths[:, None], axis=1)
    ids = some_ids(4, 10)
    together = model(ids, mask)
    for row, counts, result in zip(ids, mask, together, strict=True):
        assert_near(result[counts], model(row[counts])[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"weights_dtype": "int8"},
        {"weights_dtype": "int8", "activations": "int8"},
        {"weights_dtype": "nf4"},
        {"weights_dtype": "int4", "activations": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
@each_isa
def test_a_sequence_has_the_same_bits_in_any_company(isa, kind, options, tmp_path):
    """Padding may turn few queries into many, for which there are other kernels."""
    model = loaded(tmp_path, kind, **options)
    with forced(isa):
        for length in (5, 8, 9, 20):
            ids, index = some_ids(3, length), np.arange(length)
            for own in {1, 2, 3, 4, 7, 8, 11} & set(range(length)):
                alone = model(ids[:1, :own])
                together = model(ids, index < np.array([[own], [length], [length - 1]]))
                np.testing.assert_array_equal(together[:1, :own], alone)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_padding_does_not_lengthen_a_sequence(kind, tmp_path):
    """Frequencies that depend on the longest sequence do not count its padding."""
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [4.0, 6.0, 8.0]}
    changes = {"max_position_embeddings": 8, "rope_scaling": scaling}
    tiny.write(tmp_path, "llama", **changes)
    model = models.load(tmp_path)
    ids = some_ids(2, 20)
    for mask in (np.arange(20) < 5, np.arange(20) >= 15):
        padded = model(ids, np.stack([mask, mask]))[:, mask]
        assert_near(padded, model(ids[:, mask]))


def test_one_sequence_is_a_batch_of_one(tmp_path):
    model = loaded(tmp_path, "llama")
    np.testing.assert_array_equal(model([3, 4, 5]), model([[3, 4, 5]]))
    np.testing.assert_array_equal(model([3, 4, 5], [1, 1, 0]), model([[3, 4, 5]], [[True, True, False]]))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_a_batch_too(kind, tmp_path):
    model = loaded(tmp_path, kind)
    width = model.hidden_size if kind in ENCODERS else VOCAB
    for weights_dtype in ("float32", "bfloat16", "int8", "int4", "uint4", "nf4"):
        model = models.load(tmp_path, weights_dtype=weights_dtype)
        assert model(np.zeros((0, 5), np.int64)).shape == (0, 5, width)
        assert model(np.zeros((2, 0), complex)).shape == (2, 0, width)


def test_token_types(tmp_path):
    tensors = tiny.write(tmp_path, "bert")
    model = models.load(tmp_path)
    ids = some_ids(1, 6)
    second = {**tensors, "embeddings.token_type_embeddings.weight": np.roll(
        tensors["embeddings.token_type_embeddings.weight"], 1, axis=0
    )}  # fmt: skip
    expected = tiny.result("bert", CONFIGS["bert"], second, ids[0])
    got = model(ids, token_type_ids=np.ones_like(ids))[0]
    assert_near(got, expected)
    assert_near(model(ids, token_type_ids=0 * ids), model(ids))


class Recorded(Sampler):
    """A sampler that keeps the logits it is shown."""

    seen: list = []  # noqa: RUF012

    def __call__(self, logits):
        self.seen.append(logits.copy())
        return super().__call__(logits)


@pytest.mark.parametrize("kind", DECODERS)
def test_generation_is_the_full_pass_step_by_step(kind, tmp_path, implementation, monkeypatch):
    monkeypatch.setattr(generation, "Sampler", Recorded)
    monkeypatch.setattr(Recorded, "seen", [])
    model = loaded(tmp_path, kind)
    prompts = [some_ids(n, seed=n).tolist() for n in (7, 1, 4)]
    tokens = np.stack(list(model.generate(prompts, 9, stop=())), axis=1)
    assert tokens.shape == (3, 9)
    assert len(Recorded.seen) == 9
    for b, prompt in enumerate(prompts):
        full = model(prompt + tokens[b].tolist())[0]
        for step, logits in enumerate(Recorded.seen):
            assert logits.shape == (3, VOCAB)  # of last tokens only
            expected = full[len(prompt) - 1 + step]
            assert_near(logits[b], expected)
            assert tokens[b, step] == np.argmax(logits[b])


@pytest.mark.parametrize(
    ("options", "bound"),
    [({"dtype": "float64"}, 1e-12), ({"weights_dtype": "int8"}, 1e-5), ({"weights_dtype": "bfloat16"}, 1e-5),
     ({"weights_dtype": "int4"}, 1e-5),
     ({"dtype": "bfloat16"}, 0.1)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "qwen3"])
def test_generation_in_other_types(kind, options, bound, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "Sampler", Recorded)
    monkeypatch.setattr(Recorded, "seen", [])
    model = loaded(tmp_path, kind, **options)
    prompt = some_ids(5).tolist()
    tokens = list(model.generate(prompt, 6, stop=()))
    full = model(prompt + tokens)[0].astype(np.float64)
    assert Recorded.seen[0].dtype == model.dtype
    for step, logits in enumerate(Recorded.seen):
        np.testing.assert_allclose(logits[0].astype(np.float64), full[4 + step], rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", DECODERS)
def test_prompts_may_be_padded(kind, tmp_path):
    model = loaded(tmp_path, kind)
    prompts = [some_ids(n, seed=n).tolist() for n in (7, 1, 4)]
    together = np.stack(list(model.generate(prompts, 9, stop=())), axis=1)
    assert all(type(token) is int for token in model.generate(prompts[0], 2, stop=()))
    ids, mask = np.full((3, 7), 5), np.zeros((3, 7), np.int64)
    for row, counts, prompt in zip(ids, mask, prompts, strict=True):  # left-padded
        row[7 - len(prompt) :], counts[7 - len(prompt) :] = prompt, 1
    padded = np.stack(list(model.generate(ids, 9, attention_mask=mask, stop=())), axis=1)
    np.testing.assert_array_equal(padded, together)


def test_sequences_end_at_stop_tokens(tmp_path):
    model = loaded(tmp_path, "gpt2")
    prompts = [some_ids(n, seed=n).tolist() for n in (7, 2, 4)]
    free = np.stack(list(model.generate(prompts, 9, stop=())), axis=1)
    stop = [int(free[0, 2]), int(free[2, 5])]
    ends = [next((i for i, token in enumerate(row) if token in stop), 8) for row in free.tolist()]
    assert len(set(ends)) > 1
    got = np.stack(list(model.generate(prompts, 9, stop=stop)), axis=1)
    assert got.shape == (3, max(ends) + 1)
    for row, wanted, end in zip(got, free, ends, strict=True):
        assert row.tolist() == wanted[: end + 1].tolist() + [-1] * (max(ends) - end)
    assert list(model.generate(prompts[0], 9, stop=stop[0]))[-1] == stop[0]
    tiny.write(tmp_path, "gpt2", eos_token_id=stop)
    tokens = np.stack(list(models.load(tmp_path).generate(prompts, 9)), axis=1)
    np.testing.assert_array_equal(tokens, got)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_sequences_that_have_ended_are_computed_no_more(kind, options, tmp_path, monkeypatch):
    """The other sequences go on as before, also where frequencies depend on the longest one."""
    monkeypatch.setattr(generation, "Sampler", Recorded)
    monkeypatch.setattr(Recorded, "seen", [])
    changes = {"max_position_embeddings": 8} if kind == "llama" else {}
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}} if kind == "llama" else {}
    tiny.write(tmp_path, kind, **changes, **scaling)
    model = models.load(tmp_path)
    prompts = [some_ids(n, seed=n).tolist() for n in (7, 2, 4, 3)]
    free = np.stack(list(model.generate(prompts, 12, stop=(), **options)), axis=1)
    stop = [int(free[0, 2]), int(free[2, 5])]
    Recorded.seen.clear()
    got = np.stack(list(model.generate(prompts, 12, stop=stop, **options)), axis=1)
    ended = np.cumsum(np.isin(free, stop), axis=1) - np.isin(free, stop) > 0
    expected = np.where(ended, -1, free)[:, : got.shape[1]]
    np.testing.assert_array_equal(got, expected)
    assert [len(logits) for logits in Recorded.seen] == (expected >= 0).sum(axis=0).tolist()
    assert len(Recorded.seen[-1]) < 4


def test_generation_takes_memory_for_the_tokens_there_are(tmp_path):
    steps = loaded(tmp_path, "llama").generate([1, 2], 10**9, stop=())
    assert all(0 <= next(steps) < VOCAB for _ in range(5))
    model = loaded(tmp_path, "llama")
    short = list(model.generate([1, 2], 300, stop=()))  # past the room that is made at first
    np.testing.assert_array_equal(short, np.argmax(model([1, 2, *short])[0, 1:-1], axis=1))


@pytest.mark.parametrize(
    "options", [{"temperature": 1.5}, {"temperature": 1.0, "top_k": 5}, {"temperature": 2.0, "top_p": 0.7}]
)
def test_draws_follow_the_seed(options, tmp_path):
    model = loaded(tmp_path, "qwen2")
    prompts = [[1, 2, 3], [4], [5, 6]]

    def run(seed, prompts=prompts):
        return np.stack(list(model.generate(prompts, 12, seed=seed, stop=(), **options)), axis=1)

    np.testing.assert_array_equal(run(7), run(7))
    assert (run(7) != run(8)).any()
    np.testing.assert_array_equal(run(7)[:1], run(7, prompts[:1]))
    same = run(7, [[1, 2, 3]] * 3)
    assert (same[0] != same[1]).any(), "sequences draw from generators of their own"


def sampler_of(batch, vocab, prompts=None, **options):
    prompts = [np.zeros(1, np.int64)] * batch if prompts is None else prompts
    return Sampler(prompts, vocab, Sampling(options))


def test_draws_have_the_probabilities():
    logits = np.log([0.5, 0.2, 0.15, 0.1, 0.04, 0.01]).astype(np.float32)

    def shares(**options):
        drawn = sampler_of(5_000, 6, **{"temperature": 1.0, "seed": 3, **options})(
            np.tile(logits, (5_000, 1))
        )
        return np.bincount(drawn, minlength=6) / 5_000

    within = 4 * np.sqrt(0.25 / 5_000)  # four standard deviations
    np.testing.assert_allclose(shares(), np.exp(logits), atol=within)
    np.testing.assert_allclose(shares(top_k=2), [5 / 7, 2 / 7, 0, 0, 0, 0], atol=within)
    np.testing.assert_allclose(shares(top_p=0.71), [50 / 85, 20 / 85, 15 / 85, 0, 0, 0], atol=within)
    np.testing.assert_allclose(shares(top_p=0.69), [5 / 7, 2 / 7, 0, 0, 0, 0], atol=within)
    np.testing.assert_allclose(shares(top_p=0.0), [1, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(shares(temperature=1e-300), [1, 0, 0, 0, 0, 0])
    squares = np.exp(2 * logits) / np.exp(2 * logits).sum()
    np.testing.assert_allclose(shares(temperature=0.5), squares, atol=within)
    np.testing.assert_allclose(shares(temperature=0.0), [1, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(shares(min_p=0.25), [50 / 85, 20 / 85, 15 / 85, 0, 0, 0], atol=within)
    bias = {0: -np.inf, 1: np.log(0.25)}
    np.testing.assert_allclose(shares(logit_bias=bias, top_k=2), [0, 0, 0.6, 0.4, 0, 0], atol=within)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(temperature):
    sampler = sampler_of(1, 3, temperature=temperature)
    with pytest.raises(ValueError, match=r"generate\(\): the logits contain NaN"):
        sampler(np.array([[0.0, np.nan]], np.float32))
    with pytest.raises(ValueError, match=r"generate\(\): the logits are all -inf"):
        sampler(np.full((1, 3), -np.inf, np.float32))


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}])
def test_infinite_logits_are_drawn(options):
    logits = np.tile(np.array([0.0, np.inf, -np.inf, np.inf, 5.0], np.float32), (200, 1))
    drawn = sampler_of(200, 5, temperature=1.0, seed=0, **options)(logits)
    assert set(drawn.tolist()) == {1, 3}


def test_a_prompt_draws_from_its_own_seed(tmp_path):
    """Number i of several from the i-th child of the seed, as alone with that child."""
    model, prompts = loaded(tmp_path, "qwen2"), [[1, 2, 3], [4], [5, 6]]
    how = {"temperature": 1.5, "stop": ()}
    together = np.stack(list(model.generate(prompts, 12, seed=5, **how)), axis=1)
    seed = np.random.SeedSequence(5)
    for prompt, child, tokens in zip(prompts, np.random.SeedSequence(5).spawn(3), together, strict=True):
        assert list(model.generate(prompt, 12, seed=child, **how)) == tokens.tolist()
    assert list(model.generate([1], 9, seed=5, **how)) == list(model.generate([1], 9, seed=seed, **how))
    assert seed.n_children_spawned == 0


def test_penalties_count_prompt_and_answer(tmp_path):
    """By their formulas, in the order that is documented; each sequence its own tokens."""
    model, prompts, seen = loaded(tmp_path, "llama"), [[1, 2, 2, 3], [4]], []
    options = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    options["logit_bias"] = {2: 1.5, 7: -np.inf}

    def processor(ids, logits):
        seen.append((ids.tolist(), logits.copy()))
        return logits

    tokens = np.stack(list(model.generate(prompts, 6, stop=(), logits_processor=processor, **options)), 1)
    for i, (ids, logits) in enumerate(seen):
        b, step = i % 2, i // 2
        assert ids == prompts[b] + tokens[b, :step].tolist()
        expected = model(ids)[0, -1].astype(np.float64)
        expected[2] += 1.5
        expected[7] = -np.inf
        counts = np.bincount(ids, minlength=VOCAB)
        there = counts > 0
        penalised = np.where(expected > 0, expected / 1.7, expected * 1.7)
        expected = np.where(there, penalised, expected) - 0.3 * there - 0.2 * counts
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert tokens[b, step] == np.argmax(logits)
    first = next(
        model.generate([1], 1, logits_processor=lambda ids, logits: -abs(np.arange(VOCAB) - 9.0 - ids))
    )
    assert first == 10


WRONG_CALLS = [
    ({"ids": [1, 99]}, ValueError, r"ids has 99; expected 0 to 59"),
    ({"ids": [-1]}, ValueError, r"ids has -1; expected 0 to 59"),
    ({"ids": [1.0]}, TypeError, r"ids has dtype float64; expected integers"),
    ({"ids": [[[1]]]}, ValueError, r"ids has shape \(1, 1, 1\)"),
    ({"ids": []}, ValueError, r"a prompt without a token"),
    ({"ids": [[1, 2], []]}, ValueError, r"a prompt without a token"),
    ({"ids": [[1, 2]], "attention_mask": [[0, 0]]}, ValueError, r"a prompt without a token"),
    ({"ids": [[1, 2]], "attention_mask": [[1, 2]]}, TypeError, r"attention_mask has dtype int64"),
    ({"ids": [[1, 2]], "attention_mask": [[1]]}, ValueError, r"attention_mask has shape \(1, 1\)"),
    ({"ids": [1] * 20, "max_new_tokens": 13}, ValueError, r"max_new_tokens is 13 after a prompt of 20"),
    ({"ids": b"once"}, TypeError, r"ids is text; expected ids"),
    ({"ids": ["once", [1]]}, TypeError, r"ids has texts or conversations, and \[1\]; expected no ids"),
    ({"ids": [[{"content": "no"}]]}, ValueError, r"the message .*; expected a 'role' in each"),
    ({"ids": {"role": "user"}}, TypeError, r"ids is one message; expected a list of messages"),
    ({"max_new_tokens": -1}, ValueError, r"max_new_tokens is -1; expected at least 0"),
    ({"max_new_tokens": 2.0}, TypeError, r"max_new_tokens is 2.0; expected an integer"),
    ({"temperature": -0.5}, ValueError, r"temperature is -0.5; expected 0 or more"),
    ({"temperature": "hot"}, TypeError, r"temperature is 'hot'"),
    ({"top_k": 5}, ValueError, r"top_k is 5 and temperature 0.*expected a temperature above 0"),
    ({"top_p": 0.9, "temperature": 0}, ValueError, r"top_p is 0.9 and temperature 0"),
    ({"min_p": 0.1}, ValueError, r"min_p is 0.1 and temperature 0"),
    ({"top_k": -1}, ValueError, r"top_k is -1; expected at least 0"),
    ({"repetition_penalty": 0}, ValueError, r"repetition_penalty is 0.0; expected a number above 0"),
    ({"presence_penalty": np.nan}, ValueError, r"presence_penalty is nan"),
    ({"logit_bias": {60: 1.0}}, ValueError, r"logit_bias has the token 60; expected ids below .* 60"),
    ({"logit_bias": {1: np.inf}}, ValueError, r"logit_bias\[1\] is inf"),
    ({"logit_bias": {1: 1e300}}, ValueError, r"logit_bias\[1\] is 1e\+300; .* is finite in float32"),
    ({"logit_bias": {1.5: 1}}, TypeError, r"an id of logit_bias is 1.5; expected an integer"),
    ({"stop": 60}, ValueError, r"stop has 60; expected 0 to 59"),
    ({"stop": [5, -1]}, ValueError, r"stop has -1; expected 0 to 59"),
    ({"logit_bias": [1]}, TypeError, r"logit_bias is of type list; expected a mapping"),
    ({"logits_processor": 5}, TypeError, r"logits_processor is of type int; expected a function"),
    ({"top_p": 1.5}, ValueError, r"top_p is 1.5; expected 0 to 1"),
    ({"seed": -3}, ValueError, r"seed is -3; expected at least 0"),
    ({"seed": 0.5}, TypeError, r"seed is 0.5; expected an integer"),
    ({"rng": 3}, TypeError, r"rng is not an argument; expected seed"),
    ({"stop": 1.5}, TypeError, r"stop has dtype float64; expected integers"),
    ({"stop": [[3, 4]]}, ValueError, r"stop has shape \(1, 2\); expected one that fits \(n,\)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_CALLS)
def test_wrong_arguments_of_generate(arguments, error, message, tmp_path):
    model = loaded(tmp_path, "gpt2")
    arguments = {"ids": [1, 2], "max_new_tokens": 2, **arguments}
    with pytest.raises(error, match=message):
        model.generate(**arguments)  # at the call, before a token is asked for


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet", "gpt2"])
def test_sequences_that_are_too_long(kind, tmp_path):
    model = loaded(tmp_path, kind)
    assert model(some_ids(1, 32)).shape[1] == 32
    with pytest.raises(ValueError, match=rf"{kind}\(\): 33 tokens in a sequence; expected at most 32"):
        model(some_ids(1, 33))


def test_wrong_arguments_of_an_encoder(tmp_path):
    model = loaded(tmp_path, "bert")
    with pytest.raises(ValueError, match=r"bert\(\): input_ids has 60; expected 0 to 59"):
        model([[60]])
    with pytest.raises(ValueError, match=r"bert\(\): token_type_ids has 2; expected 0 to 1"):
        model([[5]], token_type_ids=[[2]])
    with pytest.raises(ValueError, match=r"token_type_ids has shape \(1, 2\); expected \(1, 1\)"):
        model([[5]], token_type_ids=[[0, 1]])
    with pytest.raises(ValueError, match=r"ids has sequences of different lengths.*pass an attention_mask"):
        model([[5, 6], [7]])
    with pytest.raises(ValueError, match="ids"):  # an array of no dimensions has no length
        model([np.array(3), [1, 2]])


def test_models_say_what_they_are(tmp_path):
    assert repr(loaded(tmp_path, "bert")) == "<bert: 2 layers of 24, float32>"
    assert repr(loaded(tmp_path, "qwen3", dtype="bfloat16")) == "<qwen3: 2 layers of 24, bfloat16>"
    for kind in ("bert", "llama"):
        model = loaded(tmp_path, kind, weights_dtype="int8")
        assert repr(model) == f"<{kind}: 2 layers of 24, float32, weights in int8>"
        assert (model.dtype, model.weights_dtype, model.activations) == (np.float32, "int8", None)
    model = loaded(tmp_path, "gpt2", dtype="bfloat16", weights_dtype="nf4", activations="int8")
    assert repr(model) == "<gpt2: 2 layers of 24, bfloat16, weights in nf4, activations in int8>"
    assert (model.weights_dtype, model.activations) == ("nf4", "int8")


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_objects_of_their_own(kind, tmp_path):
    """They compare by identity, and go to another process."""
    changes = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}} if kind == "llama" else {}
    tiny.write(tmp_path, kind, max_position_embeddings=32 + 2 * (kind == "roberta"), **changes)
    model, other = models.load(tmp_path), models.load(tmp_path)
    assert model == model
    assert model != other
    assert len({model, other}) == 2
    again = pickle.loads(pickle.dumps(model))
    ids = some_ids(2, 11)
    np.testing.assert_array_equal(again(ids), model(ids))


def test_scalings_by_length_of_no_sequences(tmp_path):
    tiny.write(tmp_path, "modernbert", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model = models.load(tmp_path)
    rows, begins = model.hidden([])
    assert (rows.shape, begins.tolist()) == ((0, 24), [0])
    assert model(np.zeros((0, 3), np.int64)).shape == (0, 3, 24)
