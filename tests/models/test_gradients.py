"""Gradients of models against finite differences in float64, by the names of the tensors in their files."""

import pickle

import numpy as np
import pytest
import tiny_models as tiny
from implementations import forced
from tiny_models import CONFIGS, ENCODERS, TRAINED_DECODERS, UNTRAINED, VOCAB

from fastattn import models
from fastattn.grad import vjp

TRAINED = [kind for kind in ENCODERS if kind not in ("deberta-v2", "nomic-experts")]
STEP = 2e-6  # a quotient errs with its square: of mT5, whose scores are large, by 1e-5 of itself with 1e-5


def loaded(tmp_path, kind, **options):
    tiny.write(tmp_path, kind)
    return models.load(tmp_path, **{"dtype": "float64", **options})


def some_ids(rng, *shape):
    return rng.integers(3, VOCAB, shape)  # the first ones are padding in some families


def two_sequences(kind, padded, tmp_path):
    """A model, ids of two sequences, their mask, and the generator that drew them."""
    rng = np.random.default_rng(0)
    model, ids = loaded(tmp_path, kind), some_ids(rng, 2, 5)
    return model, ids, np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) if padded else None, rng


def slopes(model, compute, gradients, rng):
    """(name, gradient, difference quotient) of each tensor, each along a direction of its own."""
    state = model.state_dict()
    assert gradients.keys() <= state.keys()
    for name, tensor in state.items():
        direction = rng.standard_normal(tensor.shape)
        ends = (
            compute(model.with_state_dict({**state, name: tensor + sign * STEP * direction}))
            for sign in (1, -1)
        )
        above, below = ends
        got = np.sum(gradients[name] * direction) if name in gradients else 0.0
        yield name, got, (above - below) / (2 * STEP)


def states(model):
    """Options with which a model gives its hidden states."""
    return {"logits": False} if isinstance(model, models.Decoder) else {}


def assert_slopes(model, compute, gradients, rng):
    found = list(slopes(model, compute, gradients, rng))
    most = max(abs(expected) for _, _, expected in found)
    for name, got, expected in found:
        assert abs(got - expected) <= 1e-6 * max(1, most), name
    assert most > 0


DROPPED = {"dropout": 0.3, "seed": 5}
TYPES = {"token_type_ids": np.array([[0, 1, 1, 0, 0], [1, 1, 0, 0, 1]])}
CALLS = [
    *((kind, {}) for kind in TRAINED), *((kind, DROPPED) for kind in ("bert", "t5", "modernbert")),
    *((kind, {"logits": logits}) for kind in TRAINED_DECODERS for logits in (False, True)),
    ("bert", TYPES), ("gemma3_text", DROPPED),
]  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_slopes(kind, options, padded, tmp_path, implementation):
    """Of hidden states and logits; checkpoints change no bit."""
    model, ids, mask, rng = two_sequences(kind, padded, tmp_path)
    hidden, pullback = vjp(model, ids, mask, **options)
    if "dropout" not in options and options.get("logits", True):
        given = {name: x for name, x in options.items() if name != "logits"}
        np.testing.assert_array_equal(hidden, model(ids, mask, **given))
    dout = rng.standard_normal(hidden.shape)
    gradients = pullback(dout)
    again, checkpoints = vjp(model, ids, mask, checkpoint=True, **options)
    np.testing.assert_array_equal(hidden, again)
    np.testing.assert_equal(checkpoints(dout), gradients)
    compute = lambda other: np.sum(vjp(other, ids, mask, **options)[0] * dout)  # noqa: E731
    assert_slopes(model, compute, gradients, rng)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_backends_drop_the_same(kind, tmp_path, implementation):
    """Also where each sequence is an attention by itself, because of a bias; and they drop differently."""
    model, ids = loaded(tmp_path, kind), np.tile(some_ids(np.random.default_rng(0), 5), (3, 1))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    results = []
    for name in (implementation, "numpy"):
        with forced(name):
            results.append(vjp(model, ids, mask, dropout=0.3, seed=5)[0])
    np.testing.assert_allclose(*results, rtol=1e-9, atol=1e-9)
    assert np.abs(results[0][0] - results[0][1]).max() > 0.01


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, DROPPED], ids=["plain", "dropout"])
@pytest.mark.parametrize("kind", TRAINED_DECODERS)
def test_losses(kind, options, padded, tmp_path, implementation):
    model, ids, mask, rng = two_sequences(kind, padded, tmp_path)

    def loss(other):
        logits = vjp(other, ids, mask, **options)[0]
        z = logits - logits.max(-1, keepdims=True)
        logs = z - np.log(np.exp(z).sum(-1, keepdims=True))
        ends = (5, 3) if padded else (5, 5)
        terms = [logs[b, i, ids[b, i + 1]] for b in range(2) for i in range(ends[b] - 1)]
        return -np.mean(terms)

    value, gradients = model.loss_and_gradients(ids, mask, **options)
    np.testing.assert_allclose(value, loss(model), rtol=1e-12)
    assert_slopes(model, loss, gradients, rng)
    assert gradients.keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
def test_bits_do_not_depend_on_threads(kind, tmp_path, implementation):
    rng = np.random.default_rng(0)
    model, ids = loaded(tmp_path, kind, dtype="float32"), some_ids(rng, 40, 30)
    dout, results = rng.standard_normal((40, 30, model.hidden_size), np.float32), []
    for threads in (1, 2, 5):
        with forced(implementation, num_threads=threads):
            results.append(vjp(model, ids, **states(model))[1](dout))
    for other in results[1:]:
        for name, gradient in results[0].items():
            np.testing.assert_array_equal(gradient, other[name], err_msg=name)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_frozen_weights_have_no_gradient(weights, tmp_path, implementation):
    rng = np.random.default_rng(0)
    model, ids = loaded(tmp_path, "bert", dtype="float32", weights_dtype=weights), some_ids(rng, 2, 5)
    hidden, pullback = vjp(model, ids)
    gradients = pullback(np.ones_like(hidden))
    assert "encoder.layer.0.intermediate.dense.weight" not in gradients
    assert np.abs(gradients["encoder.layer.0.intermediate.dense.bias"]).max() > 0
    assert np.abs(gradients["embeddings.word_embeddings.weight"]).max() > 0


def test_states(tmp_path):
    model = loaded(tmp_path, "bert", dtype="float32")
    state = model.state_dict()
    same, ids = model.with_state_dict(state), some_ids(np.random.default_rng(0), 2, 5)
    np.testing.assert_array_equal(model(ids), same(ids))
    assert same.text is model.text
    again = pickle.loads(pickle.dumps(same))
    for name, tensor in again.state_dict().items():
        np.testing.assert_array_equal(tensor, state[name])
    out, pullback = vjp(again, ids)
    assert pullback(np.ones_like(out)).keys() == state.keys()
    for wrong, expected in (
        ({**state, "a.weight": np.ones(3)}, "not known: 'a.weight'"),
        ({k: v for k, v in state.items() if "LayerNorm" not in k}, "missing: "),
        ({**state, "embeddings.word_embeddings.weight": np.ones(3)}, "expected \\("),
        ({**state, "embeddings.word_embeddings.weight": np.full((VOCAB, 8), 1)}, "expected"),
    ):
        with pytest.raises(ValueError, match=expected):
            model.with_state_dict(wrong)


def test_errors(tmp_path):
    model = loaded(tmp_path, "bert", dtype="float32")
    hidden, pullback = vjp(model, np.ones((1, 3), int))
    with pytest.raises(ValueError, match="dout has shape"):
        pullback(hidden[0])
    with pytest.raises(TypeError, match="dout"):
        pullback(hidden.astype(np.float64))
    with pytest.raises(TypeError, match=r"^pullback of bert\(\): need is not an argument; expected dout"):
        pullback(hidden, need=("dx",))
    pullback(hidden)
    with pytest.raises(RuntimeError, match="called before"):
        pullback(hidden)
    with pytest.raises(TypeError, match="checkpoint"):
        vjp(model, np.ones((1, 3), int), checkpoint="yes")
    with pytest.raises(TypeError, match=r"^bert\(\) got an unexpected keyword argument 'bogus'"):
        vjp(model, np.ones((1, 3), int), bogus=1)


def test_what_has_no_gradients(tmp_path):
    model = loaded(tmp_path, "deberta-v2")
    message = r"^deberta-v2\(\): models of type deberta-v2 have no gradients yet"
    with pytest.raises(NotImplementedError, match=message):
        vjp(model, np.ones((1, 3), int))


WRONG = {
    "targets has 99; expected 0 to": {"targets": [[3, 99]]},
    "targets has shape": {"targets": [[3]]},
    "targets has dtype float64": {"targets": [[3.0, 4.0]]},
    "label_smoothing is 3.0; expected 0 to 1": {"label_smoothing": 3.0},
    "ignore_index": {"ignore_index": "x"},
}


@pytest.mark.parametrize("match", WRONG)
def test_a_wrong_loss_computes_nothing(match, tmp_path, monkeypatch):
    model = loaded(tmp_path, "gpt2")
    monkeypatch.setattr(models.Decoder, "_record", None)
    with pytest.raises((TypeError, ValueError), match=rf"^loss_and_gradients\(\): {match}"):
        model.loss_and_gradients([[3, 4]], **WRONG[match])


@pytest.mark.parametrize("kind", UNTRAINED)
def test_experts_and_caps_of_logits_have_none(kind, tmp_path):
    tiny.write(tmp_path, kind)
    model = models.load(tmp_path)
    said = CONFIGS[kind].get("model_type", kind)
    with pytest.raises(NotImplementedError, match=f"models of type {said} have no gradients yet"):
        model.loss_and_gradients([[1, 2, 3]])
    with pytest.raises(NotImplementedError, match="have no gradients yet"):
        vjp(model, [[1, 2, 3]])
