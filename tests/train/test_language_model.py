"""The example's language model: gradients against finite differences, generation against the full pass."""

import numpy as np
import pytest
from language_model import LanguageModel

from fastattn import train

VOCAB, LONGEST = 11, 8


def model_of(dtype="float64"):
    return LanguageModel(VOCAB, LONGEST, 16, 2, 2, dtype, rng=0)


def test_gradients_are_finite_differences(implementation):
    model, rng = model_of(), np.random.default_rng(1)
    ids, targets = rng.integers(VOCAB, size=(2, 3, 7))
    loss, grads = model.loss_and_gradients(ids, targets)
    assert loss == pytest.approx(model.loss(ids, targets), rel=1e-12)
    optimizer = train.SGD(model.parameters, lr=1.0)
    assert grads.keys() == optimizer.parameters.keys()
    for name, x in optimizer.parameters.items():
        along, nothing = rng.standard_normal(x.shape), {key: np.zeros_like(g) for key, g in grads.items()}
        losses = []
        for step in (1e-5, -2e-5, 1e-5):  # and back
            optimizer.step({**nothing, name: -step * along})
            losses.append(model.loss(ids, targets))
        expected = (losses[0] - losses[1]) / 2e-5
        assert (grads[name] * along).sum() == pytest.approx(expected, rel=1e-5, abs=1e-8), name


def test_it_learns_and_generates_the_best_of_the_full_pass():
    windows = np.lib.stride_tricks.sliding_window_view(np.tile(np.arange(VOCAB), 20), LONGEST + 1)
    model = model_of("float32")
    trainer = train.Trainer(
        lambda batch: model.loss_and_gradients(batch[:, :-1], batch[:, 1:]),
        train.AdamW(model.parameters, 1e-2),
        train.Batches(windows, batch_size=8, rng=0),
    )
    trainer.fit(60)
    assert model.loss(windows[:, :-1], windows[:, 1:]) < 0.05
    found = list(model.generate([3, 4], 5))
    assert found == [5, 6, 7, 8, 9]
    assert model(np.array([[3, 4, *found[:-1]]]))[0, 1:].argmax(axis=-1).tolist() == found
    drawn = [
        list(model.generate([3], 7, temperature=5.0, rng=np.random.default_rng(seed))) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
