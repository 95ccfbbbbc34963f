"""LanguageModel: gradients against finite differences, generation against the full pass, what it refuses."""

import numpy as np
import pytest
from implementations import each_isa, forced

from fastattn import train
from fastattn.layers import LanguageModel, TransformerEncoder

RNG = np.random.default_rng(1)
VOCAB, LONGEST, WIDTH, HEADS, LAYERS = 11, 8, 16, 2, 2
KINDS = {
    "learned": {},
    "rope": {"positions": "rope"},
    "untied": {"tie_word_embeddings": False},
    "llama": {
        "positions": "rope", "tie_word_embeddings": False, "norm": "rms_norm", "bias": False,
        "activation": "swiglu", "dim_feedforward": 24, "attention": {"num_kv_heads": 1},
    },
    "shared keys": {"positions": "rope", "keys_from": [0, 0]},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


def model_of(kind, dtype="float64", rng=0, spread=0.3):
    """A model whose parameters are far from where training begins: each of them matters."""
    model = LanguageModel(VOCAB, LONGEST, WIDTH, HEADS, LAYERS, weights_dtype=dtype, rng=rng, **KINDS[kind])
    state = model.state_dict()
    model.load_state_dict({name: x + spread * RNG.standard_normal(x.shape) for name, x in state.items()})
    return model


def tokens(*shape):
    return RNG.integers(VOCAB, size=shape)


def nll(model, ids, targets):
    """The loss by its definition, from the logits."""
    logits = np.asarray(model(ids), float)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    each = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return -each[targets >= 0].mean()


@every_kind
def test_gradients_are_finite_differences(kind, implementation):
    model = model_of(kind)
    ids, targets = tokens(3, 7), tokens(3, 7)
    targets[0, 3:] = -100
    loss, grads = model.loss_and_gradients(ids, targets)
    state = model.state_dict()
    assert list(grads) == list(state)
    assert loss == pytest.approx(nll(model, ids, targets), rel=1e-12)
    assert loss == pytest.approx(model.loss(ids, targets), rel=1e-12)
    for name, x in state.items():
        assert grads[name].shape == x.shape
        assert grads[name].dtype == x.dtype
        along, step = RNG.standard_normal(x.shape), 1e-5
        losses = []
        for sign in (1, -1):
            model.load_state_dict({**state, name: x + sign * step * along})
            losses.append(model.loss(ids, targets))
        expected = (losses[0] - losses[1]) / (2 * step)
        assert (grads[name] * along).sum() == pytest.approx(expected, rel=1e-6, abs=1e-8), name


@every_kind
def test_checkpoints_and_one_sequence_change_nothing(kind):
    model = model_of(kind, "float32")
    ids, targets = tokens(2, 8), tokens(2, 8)
    loss, grads = model.loss_and_gradients(ids, targets)
    again, same = model.loss_and_gradients(ids, targets, checkpoint=True)
    assert again == loss
    for name, x in grads.items():
        np.testing.assert_array_equal(x, same[name])
    single, alone = model.loss_and_gradients(ids[0], targets[0])
    batched, one = model.loss_and_gradients(ids[:1], targets[:1])
    assert single == batched
    for name, x in alone.items():
        np.testing.assert_array_equal(x, one[name])


@each_isa
def test_a_step_has_the_same_bits_for_any_threads(isa):
    results = []
    for num_threads in (1, 2, 5):
        RNG.bit_generator.state = np.random.default_rng(3).bit_generator.state
        with forced(isa, num_threads=num_threads):
            model = model_of("learned", "float32")
            optimizer = train.AdamW(model, 1e-2)
            for _ in range(2):
                loss, grads = model.loss_and_gradients(tokens(4, 8), tokens(4, 8))
                optimizer.step(grads, max_norm=1.0)
        results.append((loss, [x.tobytes() for x in model.state_dict().values()]))
    assert results[0] == results[1] == results[2]


@every_kind
def test_generation_takes_the_best_of_the_full_pass(kind, implementation):
    model = model_of(kind)
    prompts = tokens(3, 2)
    found = np.stack(list(model.generate(prompts, 6)), axis=1)
    text = prompts
    for i in range(6):
        best = model(text)[:, -1].argmax(axis=-1)
        np.testing.assert_array_equal(found[:, i], best)
        text = np.concatenate((text, best[:, None]), axis=1)
    assert list(model.generate(prompts[0], 6)) == found[0].tolist()
    drawn = [list(model.generate(prompts[0], 6, temperature=1.0, top_k=3, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    cache = model.new_cache()
    parts = [model(text[:, :3], cache=cache), model(text[:, 3:], cache=cache)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), model(text), rtol=1e-9, atol=1e-12)


def test_it_learns_and_its_weights_go_over():
    text = np.tile(np.arange(VOCAB), 20)
    windows = np.lib.stride_tricks.sliding_window_view(text, LONGEST + 1)
    model = LanguageModel(VOCAB, LONGEST, WIDTH, HEADS, LAYERS, rng=0)
    assert model.loss(windows[:, :-1], windows[:, 1:]) == pytest.approx(np.log(VOCAB), rel=0.02)
    trainer = train.Trainer(
        lambda batch: model.loss_and_gradients(batch[:, :-1], batch[:, 1:]),
        train.AdamW(model, 1e-2),
        train.Batches(windows, batch_size=8, rng=0),
    )
    trainer.fit(60)
    assert model.loss(windows[:, :-1], windows[:, 1:]) < 0.05
    assert list(model.generate([3, 4], 5)) == [5, 6, 7, 8, 9]
    other = LanguageModel(VOCAB, LONGEST, WIDTH, HEADS, LAYERS)
    other.load_state_dict(trainer.optimizer.parameters)
    np.testing.assert_array_equal(other(windows[:3, :-1]), model(windows[:3, :-1]))


def test_parameters_begin_as_gpt2_s():
    model = LanguageModel(500, 64, 64, 4, 8, rng=0)
    state = model.state_dict()
    assert "head.weight" not in state
    assert state["token_embedding.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert state["encoder.layers.3.linear1.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert state["encoder.layers.3.linear2.weight"].std() == pytest.approx(0.005, rel=0.03)
    assert state["encoder.layers.3.self_attn.out_proj.weight"].std() == pytest.approx(0.005, rel=0.03)
    assert not state["encoder.layers.3.linear1.bias"].any()
    assert (state["encoder.norm.weight"] == 1).all()


MODEL = LanguageModel(VOCAB, LONGEST, WIDTH, HEADS, LAYERS, rng=0)
ERRORS = {
    r"^LanguageModel.loss\(\): targets has -1; expected 0 to 10": lambda: MODEL.loss([1], [-1]),
    r"^LanguageModel.loss\(\): targets has shape \(1,\); expected \(2,\), as ids": lambda: MODEL.loss(
        [1, 2], [1]
    ),
    r"^LanguageModel.loss_and_gradients\(\): label_smoothing is 3.0; expected 0 to 1": lambda: (
        MODEL.loss_and_gradients([1], [1], label_smoothing=3.0)
    ),
    r"^LanguageModel.loss_and_gradients\(\): ignore_index": lambda: MODEL.loss_and_gradients(
        [1], [1], ignore_index="x"
    ),
    r"^LanguageModel.loss_and_gradients\(\): the weights are kept in int8, which has no gradients": lambda: (
        LanguageModel(11, 8, 16, 2, 1, weights_dtype="int8", rng=0).loss_and_gradients([1], [1])
    ),
    r"^LanguageModel.loss_and_gradients\(\): seed is None; expected an integer": lambda: (
        MODEL.loss_and_gradients([1], [1], dropout=0.1)
    ),
    r"^LanguageModel.loss_and_gradients\(\): checkpoint is 1": lambda: MODEL.loss_and_gradients(
        [1], [1], checkpoint=1
    ),
    r"^LanguageModel\(\): vocab_size is 0": lambda: LanguageModel(0, 8),
    r"^LanguageModel\(\): positions is 'alibi'": lambda: LanguageModel(5, 8, positions="alibi"),
    r"^LanguageModel\(\): attention is \(2,\); expected a dict of kdim": lambda: LanguageModel(
        5, 8, attention=(2,)
    ),
    r"^LanguageModel\(\): attention has 'causal'": lambda: LanguageModel(5, 8, attention={"causal": True}),
    r"^LanguageModel\(\): head_dim is 3; expected an even one for rope": lambda: LanguageModel(
        5, 8, 6, 2, positions="rope"
    ),
    r"^LanguageModel\(\): head_dim is 0": lambda: LanguageModel(
        5, 8, positions="rope", attention={"head_dim": 0}
    ),
    r"^LanguageModel\(\): tie_word_embeddings is 1": lambda: LanguageModel(5, 8, tie_word_embeddings=1),
    r"^LanguageModel\(\): ids has 11; expected 0 to 10": lambda: MODEL([11]),
    r"^LanguageModel\(\): ids has dtype float64": lambda: MODEL([0.5]),
    r"^LanguageModel\(\): ids has shape \(1, 1, 1\)": lambda: MODEL([[[1]]]),
    r"^LanguageModel\(\): ids has 9 tokens; expected at most 8": lambda: MODEL([1] * 9),
    r"^LanguageModel.loss\(\): ids has 9 tokens": lambda: MODEL.loss([1] * 9, [1] * 9),
    r"^LanguageModel.loss_and_gradients\(\): targets has shape \(2,\)": lambda: MODEL.loss_and_gradients(
        [1], [1, 2]
    ),
    r"^LanguageModel.loss_and_gradients\(\): targets has 11": lambda: MODEL.loss_and_gradients([1], [11]),
    r"^LanguageModel.generate\(\): ids has no tokens": lambda: MODEL.generate([]),
    r"^LanguageModel.generate\(\): max_new_tokens is 8 behind 1 tokens": lambda: MODEL.generate([1], 8),
    r"^LanguageModel.generate\(\): temperature is -1": lambda: MODEL.generate([1], 2, temperature=-1.0),
}


def test_errors_of_steps_name_the_method():
    model = LanguageModel(11, 8, 16, 2, 1, rng=0)
    model.embedding[...] = np.nan
    with pytest.raises(ValueError, match=r"^LanguageModel.generate\(\): the logits have NaN"):
        next(model.generate([1], 2))


@pytest.mark.parametrize("match", ERRORS)
def test_errors_say_what_is_wrong(match, monkeypatch):
    for name in ("__call__", "_vjp"):  # nothing is computed before
        monkeypatch.setattr(TransformerEncoder, name, None)
    with pytest.raises((TypeError, ValueError), match=match):
        ERRORS[match]()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_without_tokens_the_loss_is_0(shape, positions):
    model, ids = LanguageModel(11, 8, 16, 2, 1, positions=positions, rng=0), np.zeros(shape, np.int64)
    assert model.loss(ids, ids) == 0
    loss, grads = model.loss_and_gradients(ids, ids)
    assert loss == 0
    assert grads.keys() == model.parameters().keys()
    assert not any(x.any() for x in grads.values())
    assert model.loss_and_gradients(ids.tolist(), ids.tolist())[0] == 0
