"""Fine-tuning: losses, gradients against finite differences, adapters, steps; what is saved and loaded."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED
from refused import assert_refused, refused
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn.grad import vjp
from fastattn.train import AdamW, ClassifierTuning, ContrastiveTuning, NextTokenTuning, Trainer

pytest.importorskip("tokenizers")
STEP = 1e-5
TEXTS = ["the cat sat on the mat", "a dog ran", "the cat", "a tree ran on the dog", "a mat sat", "dog"]


def loaded(tmp_path, kind="bert", pooling=None, **options):
    tiny.write(tmp_path, kind)
    write_tokenizer(tmp_path)
    if pooling is not None:
        tiny.write_modules(tmp_path, pooling)
    return models.load(tmp_path, **{"dtype": "float64", **options})


def assert_slopes(tuning, batch, seed=0):
    """Each gradient is the slope of the loss along a direction."""
    rng = np.random.default_rng(seed)
    _, grads = tuning.loss(batch)
    params = tuning._parameters
    assert grads.keys() == params.keys()
    most = 0.0
    for name, array in params.items():
        step = STEP * rng.standard_normal(array.shape)
        ends = []
        for sign in (1, -1):
            moved = {**params, name: array + sign * step}
            before = array.copy()
            array[...] = moved[name]
            tuning._repack(params, {name})
            ends.append(tuning.loss(batch)[0])
            array[...] = before
        tuning._repack(params, {name})
        slope = (ends[0] - ends[1]) / 2
        np.testing.assert_allclose((grads[name] * step).sum(), slope, rtol=1e-5, atol=1e-12, err_msg=name)
        most = max(most, abs(slope))
    assert most > 1e-7


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("parts", [2, 3])
def test_contrastive(parts, symmetric, tmp_path):
    tuning = ContrastiveTuning(loaded(tmp_path), symmetric=symmetric, temperature=0.3)
    assert_slopes(tuning, (TEXTS[:2], TEXTS[2:4], TEXTS[4:])[:parts])


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_chunks_change_nothing(chunk_size, tmp_path):
    model, batch = loaded(tmp_path), (TEXTS[:3], TEXTS[3:])
    loss, grads = ContrastiveTuning(model).loss(batch)
    got, other = ContrastiveTuning(model, chunk_size=chunk_size).loss(batch)
    assert got == pytest.approx(loss, rel=1e-12)
    for name, x in grads.items():
        np.testing.assert_allclose(other[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_classifier_with_every_pooling(mode, tmp_path):
    tuning = ClassifierTuning(loaded(tmp_path, pooling=mode), 3)
    assert tuning.model.sentences.pooling.modes == (mode,)
    assert_slopes(tuning, (TEXTS[:4], [0, 1, 2, 1]))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_next_tokens(kind, tmp_path):
    tuning = NextTokenTuning(loaded(tmp_path, kind))
    assert_slopes(tuning, [[3, 5, 4, 6], [7, 3, 3]])


@pytest.mark.parametrize(("kind", "tuning"), [("bert", ContrastiveTuning), ("gpt2", NextTokenTuning)])
def test_adapters(kind, tuning, tmp_path):
    model = loaded(tmp_path, kind)
    batch = (TEXTS[:2], TEXTS[2:4]) if kind == "bert" else [[3, 5, 4, 6], [7, 3, 3]]
    whole, adapted = tuning(model), tuning(model, rank=2, alpha=3.0)
    assert adapted.loss(batch)[0] == whole.loss(batch)[0]
    params = adapted._parameters
    assert params
    assert all(name.endswith((".lora_a", ".lora_b")) for name in params)
    for name, x in params.items():
        if name.endswith(".lora_b"):
            x[...] = 0.1 * np.random.default_rng(0).standard_normal(x.shape)
    adapted._repack(params, set(params))
    assert_slopes(adapted, batch)
    name = next(iter(params)).removesuffix(".lora_a")
    merged = adapted.model.state_dict()[name]
    expected = model.state_dict()[name] + 1.5 * params[name + ".lora_b"] @ params[name + ".lora_a"]
    np.testing.assert_allclose(merged, expected, rtol=1e-12)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_pullbacks_of_an_earlier_step_stay_right(kind, checkpoint, tmp_path):
    tuning = (NextTokenTuning if kind == "gpt2" else ContrastiveTuning)(loaded(tmp_path, kind))
    optimizer, model = AdamW(tuning, 0.1), tuning.model
    (out, first), (_, second) = (vjp(model, [3, 5, 4], checkpoint=checkpoint) for _ in range(2))
    expected = first(out)
    optimizer.step({name: np.ones_like(x) for name, x in tuning.state_dict().items()})
    assert tuning.model is not model
    np.testing.assert_equal(second(out), expected)


def test_training_learns(tmp_path):
    texts, labels = TEXTS[:4], [0, 1, 0, 1]
    tuning = ClassifierTuning(loaded(tmp_path, dtype="float32"), 2)
    before = tuning.predict(texts)
    np.testing.assert_allclose(before.sum(axis=-1), 1, rtol=1e-6)
    trainer = Trainer(tuning.loss, AdamW(tuning, lr=1e-2), [(texts, labels)])
    steps = trainer.fit(40)
    assert steps[-1].loss < 0.5 * steps[0].loss
    assert steps[0].tokens == sum(map(len, tuning.model.text.encode(texts)))
    assert (tuning.predict(texts).argmax(axis=-1) == labels).all()


def test_a_model_without_gradients_is_refused_at_once(tmp_path):
    message = r"^ContrastiveTuning\(\): model is deberta-v2, which has no gradients; expected one of another"
    with pytest.raises(ValueError, match=message):
        ContrastiveTuning(loaded(tmp_path, "deberta-v2", dtype="float32"))


REFUSED = r"""
NextTokenTuning(model) -> TypeError: model is of type Encoder; expected a Decoder
ContrastiveTuning(3) -> TypeError: model is of type int; expected an Encoder
ContrastiveTuning(model, temperature=0) -> ValueError: temperature is 0
ContrastiveTuning(model, rank=0) -> ValueError: rank is 0; expected at least 1
ContrastiveTuning(model, targets='nothing')
    -> ValueError: has 'nothing', which fits no name; expected a pattern of whole names, as '
ContrastiveTuning(model, targets=['query']) -> ValueError: has 'query', which fits no name
ContrastiveTuning(model, rank=25) -> ValueError: rank is 25; expected at most 24, as \S+ is \(24, 24\)
ContrastiveTuning(model, alpha=8) -> ValueError: alpha is 8, and rank is None
ContrastiveTuning(model, rank=2, alpha=0) -> ValueError: alpha is 0.0; expected a number above
ContrastiveTuning(model, rank=2, alpha=-1) -> ValueError: alpha is -1.0; expected a number above
ContrastiveTuning(model, lora_rank=4)
    -> TypeError: ContrastiveTuning\(\): lora_rank is not known; expected temperature, .*, rank, .*, rng
AdamW(model) -> TypeError: is of type Encoder; expected a layer, .* ContrastiveTuning\(model\)
models.load(tmp_path, weights_dtype='float64') -> ValueError: comes with dtype='float64'
model.with_state_dict('model.safetensors') -> TypeError: type str; expected a mapping of names
tuning.loss(TEXTS) -> TypeError: expected \(anchors, positives
tuning.loss((TEXTS[:2], TEXTS[:3])) -> ValueError: 2 anchors and 3 positives
tuning.loss(([], [])) -> TypeError: batch\[0\] is \[\]; expected texts
ClassifierTuning(model, 1) -> ValueError: num_labels is 1
ClassifierTuning(model, 2 ** 62) -> ValueError: ^ClassifierTuning\(\): num_labels is 4611686
ClassifierTuning(model, 2).loss((TEXTS[:2], [0, 2])) -> ValueError: has 2; expected 0 to 1
ClassifierTuning(model, 2).loss((TEXTS[:2], [-1, 0])) -> ValueError: batch\[1\] has -1; exp
tuning.loss(('abc', 'def')) -> TypeError: batch\[0\] is of type str; expected texts
ClassifierTuning(model, 2).loss(('ab', [0, 1])) -> TypeError: batch\[0\] is of type str; expected
ClassifierTuning(model, 2).loss((TEXTS[:2], [0.0, 1.0])) -> ValueError: expected 2 integers
ClassifierTuning(model, 2).loss((TEXTS[:2], [[0], [0, 1]]))
    -> TypeError: ^ClassifierTuning.loss\(\): batch\[1\]
"""


@refused(REFUSED)
def test_errors(code, error, tmp_path):
    model = loaded(tmp_path)
    assert_refused(code, error, model=model, tuning=ContrastiveTuning(model), TEXTS=TEXTS, tmp_path=tmp_path)


@pytest.mark.parametrize("weights_dtype", ["int8", "q8", "int4", "uint4", "nf4"])
@pytest.mark.parametrize(("kind", "tuning"), [("bert", ContrastiveTuning), ("gpt2", NextTokenTuning)])
def test_frozen_types_are_refused(kind, tuning, weights_dtype, tmp_path):
    model = loaded(tmp_path, kind, dtype="float32", weights_dtype=weights_dtype)
    for options in ({}, {"rank": 2}):
        with pytest.raises(ValueError, match=f"model has weights_dtype '{weights_dtype}', .*; expected floa"):
            tuning(model, **options)


# Parameters of two axes that are no weight of a linear map. A table of tokens may be the output layer, too.
TABLES = {
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "llama": {"model.embed_tokens.weight"},
    "qwen2": {"model.embed_tokens.weight"},
    "bert": {f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")},
    "mpnet": {
        "embeddings.word_embeddings.weight",
        "embeddings.position_embeddings.weight",
        "encoder.relative_attention_bias.weight",
    },
    "t5": {"shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"},
}


@pytest.mark.parametrize("kind", TABLES)
def test_adapters_are_of_linear_maps(kind, tmp_path):
    model = loaded(tmp_path, kind)
    tuning = NextTokenTuning if isinstance(model, models.Decoder) else ContrastiveTuning
    matrices = {name for name, x in model.state_dict().items() if x.ndim == 2}
    tables = {name for name in matrices if name in TABLES[kind] or f"transformer.{name}" in TABLES[kind]}
    assert len(tables) == len(TABLES[kind])
    adapted = {
        name.removesuffix(".lora_a").removesuffix(".lora_b") for name in tuning(model, rank=2).state_dict()
    }
    assert adapted == matrices - tables
    with pytest.raises(ValueError, match="expected one that fits the weight of a linear map"):
        tuning(model, rank=2, targets=sorted(tables))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "mistral", "albert", "t5", "modernbert", "nomic_bert"])
def test_what_did_not_change_is_not_packed_again(kind, tmp_path):
    model = loaded(tmp_path, kind, dtype="float32")
    tuning = NextTokenTuning if isinstance(model, models.Decoder) else ContrastiveTuning
    for options in ({"rank": 2}, {}):
        adapted = tuning(model, **options)
        params, rng = adapted._parameters, np.random.default_rng(0)
        for name in params:
            params[name] += rng.standard_normal(params[name].shape).astype("f")
            before = held(adapted.model)
            adapted._repack(params, {name})
            there = held(adapted.model)
            base = name.removesuffix(".lora_a").removesuffix(".lora_b")
            for place, (_, names) in there.items():
                assert (place in before) != (base in names), (name, names)
        # All packed anew, and from the same tensors, makes the same model.
        whole = model.with_state_dict(adapted.model.state_dict())
        ids = [[3, 5, 4, 6], [7, 3, 3, 4]]
        np.testing.assert_array_equal(adapted.model(ids), whole(ids))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "mistral", "albert", "t5", "modernbert", "nomic_bert"])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_a_step_packs_in_place(kind, weights_dtype, tmp_path, implementation):
    """Nothing is built again, except after somebody was given the model: that one stays as it was."""
    model, ids = loaded(tmp_path, kind, dtype="float32", weights_dtype=weights_dtype), [[3, 5, 4, 6]]
    decoder = isinstance(model, models.Decoder)
    tuning, batch = (NextTokenTuning, TEXTS) if decoder else (ContrastiveTuning, (TEXTS[:3], TEXTS[3:]))
    for options in ({"rank": 2}, {}):
        tuned = tuning(model, **options)
        optimizer, first = AdamW(tuned, 1e-2), model(ids)

        def step():
            optimizer.step(tuned.loss(batch)[1])  # noqa: B023
            return tuned._model  # noqa: B023

        packed = step()
        parameters = [(each.parameter, np.copy(content(each))) for each in packed.origin.parameters]
        assert step() is packed
        assert all(
            x is each.parameter for (x, _), each in zip(parameters, packed.origin.parameters, strict=True)
        )
        changed = [
            (before != content(each)).any()
            for (_, before), each in zip(parameters, packed.origin.parameters, strict=True)
        ]
        assert any(changed)
        given = tuned.model
        then, held_then = given(ids), given.state_dict()
        assert step() is not given
        step()
        np.testing.assert_array_equal(given(ids), then)
        for name, x in given.state_dict().items():
            np.testing.assert_array_equal(x, held_then[name])
        np.testing.assert_array_equal(model(ids), first)
        state = tuned.model.state_dict()
        np.testing.assert_array_equal(tuned.model(ids), model.with_state_dict(state)(ids))


def content(made):
    return made.parameter if isinstance(made.parameter, np.ndarray) else made.parameter.unpack()


def held(model):
    """Packed weights of a model, by identity, with themselves and the names of their tensors."""
    made = [each for each in model.origin.parameters if not isinstance(each.parameter, np.ndarray)]
    return {id(each.parameter): (each.parameter, {part.name for part in each.parts}) for each in made}


TEXTS_ERRORS = {
    "texts is of type str; expected texts, or sequences of ids": "the cat",
    r"texts is \[\]; expected texts, or sequences of ids, at least one": [],
    r"texts\[0\] has dtype float64; expected integers": [[3.9, 4.2]],
    r"texts\[1\] has dtype bool; expected integers": [[3], [True, False]],
    r"texts\[0\] has -1; expected 0 to ": [[-1, 3]],
    r"texts\[1\] has shape \(\)": [[3], 4],
    "texts holds strings and ids": ["the cat", [3]],
    "texts is of type int": 3,
}


@pytest.mark.parametrize("match", TEXTS_ERRORS)
def test_wrong_texts_of_a_decoder(match, tmp_path):
    tuning = NextTokenTuning(loaded(tmp_path, "gpt2"))
    with pytest.raises((TypeError, ValueError), match=rf"^NextTokenTuning.loss\(\): {match}"):
        tuning.loss(TEXTS_ERRORS[match])
    text = tuning.loss(["the cat"])[0]
    assert text == tuning.loss(tuning.model.text.encode(["the cat"]))[0]


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("kind", [ClassifierTuning, ContrastiveTuning, NextTokenTuning])
def test_tokens_are_those_that_the_loss_was_given(kind, calls, tmp_path):
    decodes = kind is NextTokenTuning
    tuning = kind(loaded(tmp_path, "gpt2" if decodes else "bert"), *[2] * (kind is ClassifierTuning))
    others = {ClassifierTuning: (TEXTS, [0, 1] * 3), ContrastiveTuning: (TEXTS[:3], TEXTS[3:])}
    batch = others.get(kind, TEXTS)
    loss, grads = tuning.loss(batch)  # counts nothing: it is no step

    def own(rows):
        for _ in range(calls):
            tuning.loss(batch)
        return loss, grads

    steps = Trainer(own, AdamW(tuning, lr=0.0), [np.zeros((4, 128))], accumulate=2).fit(2)
    expected = calls * sum(map(len, tuning.model.text.encode(TEXTS))) or 4 * 128
    assert [step.tokens for step in steps] == [2 * expected] * 2


@pytest.mark.parametrize("options", [{}, {"rank": 2}])
def test_a_classifier_in_bfloat16(options, tmp_path):
    tuning = ClassifierTuning(loaded(tmp_path, dtype="bfloat16"), 2, **options)
    steps = Trainer(tuning.loss, AdamW(tuning, lr=1e-2), [(TEXTS[:2], [0, 1])]).fit(20)
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert tuning.predict(TEXTS).dtype == np.float32


# Products as wide as this that NumPy computes have other bits with two threads of OpenBLAS than with one.
BITS = """
import sys
import numpy as np
from fastattn import models
from fastattn.grad import vjp
from fastattn.train import AdamW, ClassifierTuning, ContrastiveTuning, _encoders, _tuning

kind, folder = sys.argv[1:]
rng = np.random.default_rng(0)
if kind == "products":
    a, b, c = (rng.standard_normal(shape, np.float32) for shape in ((700, 900), (900, 500), (700, 600)))
    vectors = rng.standard_normal((600, 700), np.float32)
    found = [_tuning.product(a, b), _tuning.outer(a, c)]
    found += _encoders.info_nce(vectors, 200, 0.1, symmetric=True)
else:
    texts = ["the cat sat on the mat", "a dog ran", "the cat", "a tree ran on the dog"]
    model = models.load(folder)
    make, batch = {
        "contrastive": (ContrastiveTuning, (texts[:2], texts[2:])),
        "classifier": (lambda *x, **y: ClassifierTuning(*x, 2, **y), (texts, [0, 1, 0, 1])),
    }[kind]
    tuning = make(model, rank=16)
    optimizer = AdamW(tuning, lr=1e-2)
    for _ in range(2):
        loss, grads = tuning.loss(batch)
        optimizer.step(grads)
    found = [loss, *tuning.state_dict().values(), tuning.model.encode(texts)]
print([np.asarray(x).tobytes().hex() for x in found])
"""


@pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")
@pytest.mark.parametrize("kind", ["products", "contrastive", "classifier"])
def test_bits_do_not_depend_on_threads_of_numpy(kind, tmp_path):
    tiny.write(tmp_path, "bert", hidden_size=384, intermediate_size=768, num_attention_heads=6)
    write_tokenizer(tmp_path)
    found = set()
    for threads in ("1", "2"):
        env = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", BITS, kind, str(tmp_path)]
        found.add(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
    assert len(found) == 1


def single(tmp_path, kind="bert"):
    return loaded(tmp_path, kind, dtype="float32")


def test_a_run_is_saved_and_resumed_to_the_bit(tmp_path):
    pytest.importorskip("safetensors")
    model = single(tmp_path)

    def run():
        tuning = ContrastiveTuning(model, rank=2)
        return tuning, Trainer(tuning.loss, AdamW(tuning, lr=1e-2), [(TEXTS[:3], TEXTS[3:])])

    tuning, trainer = run()
    steps = trainer.fit(2)
    assert steps[0].tokens == sum(map(len, model.text.encode(TEXTS)))
    trainer.save(tmp_path / "run.safetensors")
    trainer.fit(4)
    other, resumed = run()
    resumed.load(tmp_path / "run.safetensors")
    resumed.fit(4)
    for name, x in tuning.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], x)
    np.testing.assert_array_equal(other.model.encode(TEXTS), tuning.model.encode(TEXTS))


@pytest.mark.parametrize("options", [{}, {"targets": "*query.weight"}, {"rank": 2}])
def test_a_model_keeps_what_it_was(options, tmp_path):
    tuning = ClassifierTuning(single(tmp_path), 2, **options)
    trainer = Trainer(tuning.loss, AdamW(tuning, lr=1e-2), [(TEXTS[:2], [0, 1])])
    trainer.fit(1)
    best = tuning.model
    assert tuning.model is best
    vectors, state = best.encode(TEXTS), best.state_dict()
    trainer.fit(3)
    assert not np.array_equal(tuning.model.encode(TEXTS), vectors)
    again = best.with_state_dict(state)
    for x in state.values():
        x[...] = 0.0
    np.testing.assert_array_equal(again.with_state_dict(best.state_dict()).encode(TEXTS), vectors)
    np.testing.assert_array_equal(best.with_state_dict(again.state_dict()).encode(TEXTS), vectors)


@pytest.mark.parametrize("options", [{}, {"rank": 2, "alpha": 8.0}])
def test_what_was_trained_is_loaded(options, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    model, run, own = single(tmp_path), tmp_path / "run.st", tmp_path / "own.st"
    tuning = ClassifierTuning(model, 2, **options)
    trainer = Trainer(tuning.loss, AdamW(tuning, lr=1e-2), [(TEXTS[:2], [0, 1])])
    trainer.fit(2)
    trainer.save(run)
    save_file(tuning.state_dict(), own)
    for x in tuning.state_dict().values():
        x[...] = 0.0  # they are copies
    expected = tuning.predict(TEXTS)
    for source, prefix in ((run, "params."), (own, ""), (tuning.state_dict(), "")):
        other = ClassifierTuning(model, 2, **options)
        optimizer = AdamW(other, lr=1e-2)
        assert not np.array_equal(other.predict(TEXTS), expected)
        other.load_state_dict(source, prefix=prefix)
        np.testing.assert_array_equal(other.predict(TEXTS), expected)
        np.testing.assert_array_equal(other.model.encode(TEXTS), tuning.model.encode(TEXTS))
    last = list(tuning.state_dict())[-2]
    wrong = tuning.state_dict() | {"more": np.ones(2)}
    wrong[last][...] = np.nan
    with pytest.raises(ValueError, match=f"(?s)not known: more.*{last}: values that are not finite"):
        other.load_state_dict(wrong)
    # Both go on from the same weights; a first step of a new AdamW has no moments.
    AdamW(tuning, lr=1e-2).step(tuning.loss((TEXTS[:2], [0, 1]))[1])
    optimizer.step(other.loss((TEXTS[:2], [0, 1]))[1])
    np.testing.assert_array_equal(other.predict(TEXTS), tuning.predict(TEXTS))
    for wrong, message in (({"a.b": 1}, "missing: "), (3, "is of type int; expected a mapping")):
        with pytest.raises((TypeError, ValueError), match=message):
            other.load_state_dict(wrong)
    with pytest.raises(TypeError, match="prefix is 3"):
        other.load_state_dict({}, prefix=3)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_a_folder_with_what_was_trained_is_loaded(kind, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    model, ids = single(tmp_path, kind), [[3, 5, 4, 6]]
    tuning = (NextTokenTuning if isinstance(model, models.Decoder) else ContrastiveTuning)(model)
    tuning.load_state_dict({name: 1.1 * x for name, x in tuning.state_dict().items()})
    save_file(tuning.model.state_dict(), tmp_path / "model.safetensors")
    again = models.load(tmp_path)
    np.testing.assert_array_equal(again(ids), tuning.model(ids))
    assert not np.array_equal(again(ids), model(ids))


def test_adapters_that_do_not_fit_when_merged_change_nothing(tmp_path):
    tuning = ContrastiveTuning(single(tmp_path), rank=2)
    before, vectors = tuning.state_dict(), tuning.model.encode(TEXTS)
    with pytest.raises(ValueError, match=r"ContrastiveTuning.load_state_dict\(\): .* not finite"):
        tuning.load_state_dict({name: np.full(x.shape, 3e38) for name, x in before.items()})
    for name, x in tuning.state_dict().items():
        np.testing.assert_array_equal(x, before[name])
    np.testing.assert_array_equal(tuning.model.encode(TEXTS), vectors)


def test_a_run_belongs_to_its_alpha_and_its_model(tmp_path):
    pytest.importorskip("safetensors")
    model, path = single(tmp_path), tmp_path / "run.safetensors"

    def run(base, make=ContrastiveTuning, **options):
        tuning = make(base, **options)
        return tuning, Trainer(tuning.loss, AdamW(tuning, lr=1e-2), [(TEXTS[:3], TEXTS[3:])])

    def refused(path, message, *args, **options):
        tuning, trainer = run(*args, **options)
        before = tuning.state_dict()
        for load in (trainer.load, partial(tuning.load_state_dict, prefix="params.")):
            with pytest.raises(ValueError, match=message):
                load(path)
        for name, x in tuning.state_dict().items():
            np.testing.assert_array_equal(x, before[name])

    tuning, trainer = run(model, rank=2, alpha=8)
    trainer.fit(2)
    trainer.save(path)
    refused(path, r"the alpha in .*run.safetensors is 8.0; expected 4.0$", model, rank=2)
    refused(path, "the rank in .* is 2; expected None$", model)
    merged = tuning.model
    refused(
        path, r"tensors' checksum is '\w{8}'; expected '\w{8}', that of the model", merged, rank=2, alpha=8
    )
    # The type that a model computes in is no other model, and of what is trained itself nothing is left over.
    run(models.load(tmp_path), rank=2, alpha=8)[1].load(path)
    run(models.load(tmp_path, dtype="float64"), rank=2, alpha=8)[0].load_state_dict(path, prefix="params.")
    run(model)[1].save(path)
    run(merged)[1].load(path)
    targets = "embeddings.*"
    run(model, targets=targets)[1].save(path)
    refused(path, "checksum is", merged, targets=targets)
