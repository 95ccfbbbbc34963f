"""Results of fine-tuning: models that stay as they were, states that are saved and loaded."""

from functools import partial

import numpy as np
import pytest
import tiny_models as tiny
from tiny_tokenizers import write_tokenizer

from fastattn import models
from fastattn.train import AdamW, ClassifierTuning, ContrastiveTuning, NextTokenTuning, Trainer

pytest.importorskip("tokenizers")
TEXTS = ["the cat sat on the mat", "a dog ran", "the cat", "a tree ran on the dog", "a mat sat", "dog"]


def loaded(tmp_path, kind="bert"):
    tiny.write(tmp_path, kind)
    write_tokenizer(tmp_path)
    return models.load(tmp_path)


def test_a_run_is_saved_and_resumed_to_the_bit(tmp_path):
    pytest.importorskip("safetensors")
    model = loaded(tmp_path)

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
    tuning = ClassifierTuning(loaded(tmp_path), 2, **options)
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
    model, run, own = loaded(tmp_path), tmp_path / "run.st", tmp_path / "own.st"
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
    model, ids = loaded(tmp_path, kind), [[3, 5, 4, 6]]
    tuning = (NextTokenTuning if isinstance(model, models.Decoder) else ContrastiveTuning)(model)
    tuning.load_state_dict({name: 1.1 * x for name, x in tuning.state_dict().items()})
    save_file(tuning.model.state_dict(), tmp_path / "model.safetensors")
    again = models.load(tmp_path)
    np.testing.assert_array_equal(again(ids), tuning.model(ids))
    assert not np.array_equal(again(ids), model(ids))


def test_adapters_that_do_not_fit_when_merged_change_nothing(tmp_path):
    tuning = ContrastiveTuning(loaded(tmp_path), rank=2)
    before, vectors = tuning.state_dict(), tuning.model.encode(TEXTS)
    with pytest.raises(ValueError, match=r"ContrastiveTuning.load_state_dict\(\): .* not finite"):
        tuning.load_state_dict({name: np.full(x.shape, 3e38) for name, x in before.items()})
    for name, x in tuning.state_dict().items():
        np.testing.assert_array_equal(x, before[name])
    np.testing.assert_array_equal(tuning.model.encode(TEXTS), vectors)


def test_a_run_belongs_to_its_alpha_and_its_model(tmp_path):
    pytest.importorskip("safetensors")
    model, path = loaded(tmp_path), tmp_path / "run.safetensors"

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
