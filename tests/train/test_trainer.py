"""The loop, schedules, batches, and a run in a file, on a logistic regression with gradients by hand."""

import json
import math
import re
import signal
from itertools import islice

import numpy as np
import pytest
from refused import assert_refused, refused
from safetensors import safe_open

from fastattn import train
from fastattn.layers import Linear

RNG = np.random.default_rng(1)
ROWS, FEATURES, CLASSES = 60, 8, 3
TRUE = np.random.default_rng(0).standard_normal((FEATURES, CLASSES))


def data():
    x = RNG.standard_normal((ROWS, FEATURES)).astype(np.float32)
    return x, (x @ TRUE).argmax(axis=-1)


class Run:
    """A trainer and all that belongs to it; `rng` drops inputs, as dropout would."""

    def __init__(self, make=train.AdamW, seed=0, batches=None, **options):
        RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state
        self.layer = Linear(FEATURES, CLASSES, rng=3)
        self.rng = np.random.default_rng(seed)
        self.calls = 0
        self.optimizer = make(self.layer, 0.05)
        self.data = data()
        batches = train.Batches(*self.data, batch_size=7, rng=seed + 1) if batches is None else batches
        schedule = train.Schedule("cosine", 40, warmup=4, final=0.1)
        self.trainer = train.Trainer(
            self.loss,
            self.optimizer,
            batches,
            **{"schedule": schedule, "rng": self.rng, "max_norm": 1.0, **options},
        )

    def loss(self, batch):
        x, y = batch
        self.calls += 1
        x = x * (self.rng.random(x.shape) < 0.9)
        logits = np.asarray(self.layer(x), float)
        probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        loss = -np.log(probs[np.arange(len(y)), y]).mean()
        probs[np.arange(len(y)), y] -= 1
        probs /= len(y)
        return loss, {
            "weight": (probs.T @ x).astype(np.float32),
            "bias": probs.sum(axis=0).astype(np.float32),
        }

    def bits(self):
        """All that decides how it goes on."""
        state = {name: np.copy(x).tobytes() for name, x in self.optimizer.state_dict().items()}
        state |= {name: x.tobytes() for name, x in self.layer.state_dict().items()}
        return state, self.trainer.steps, self.trainer._where()


def test_it_learns_and_tells():
    run = Run(rng=None)
    steps = run.trainer.fit(40)
    assert [step.step for step in steps] == list(range(1, 41))
    assert steps[0].factor == 0.25
    assert steps[-1].loss < 0.5 * steps[0].loss
    assert steps[0].tokens == 7 * FEATURES
    assert run.trainer.fit(40) == []
    assert len(run.trainer.fit(41)) == 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [train.AdamW, train.SGD])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(make, accumulate, tmp_path):
    path = tmp_path / "run.safetensors"
    through, first, second = Run(make, accumulate=accumulate), Run(make, accumulate=accumulate), None
    losses = [step.loss for step in through.trainer.fit(30)]
    begun = [step.loss for step in first.trainer.fit(13)]
    first.trainer.save(path)
    second = Run(make, seed=9, accumulate=accumulate)
    second.trainer.fit(2)
    second.trainer.load(path)
    assert second.bits() == first.bits()
    resumed = [step.loss for step in second.trainer.fit(30)]
    assert begun + resumed == losses
    assert second.bits() == through.bits()


def test_a_run_goes_on_with_the_trainers_schedule(tmp_path):
    path, longer = tmp_path / "run.safetensors", train.Schedule("cosine", np.int64(80), np.int32(4), final=0)
    run = Run()
    run.trainer.fit(40)
    run.trainer.save(path)
    begun, constant = "Schedule(kind='cosine', num_steps=40, warmup=4, final=0.1)", repr(train.Schedule())
    for schedule, own in ((longer, repr(longer)), (None, constant), (np.cos, "a function")):
        other, came = (
            Run(schedule=schedule),
            f"has the schedule {begun}; it continues with the trainer's, {own}, so",
        )
        with pytest.warns(UserWarning, match=re.escape(came)):
            other.trainer.load(path)
        assert other.trainer.schedule == (schedule or train.Schedule())
    run = Run(schedule=longer)
    run.trainer.save(path)
    Run(schedule=train.Schedule("cosine", 80, warmup=4)).trainer.load(path)  # no warning
    Run(schedule=np.cos).trainer.save(path)
    Run(schedule=np.sin).trainer.load(path)


def test_accumulated_batches_are_one_large_batch():
    x, y = data()
    small, large = (
        Run(rng=None, accumulate=n, batches=train.Batches(x, y, batch_size=30 // n, shuffle=False))
        for n in (3, 1)
    )
    for run in (small, large):
        run.rng = type("", (), {"random": staticmethod(lambda shape: np.zeros(shape))})
    for a, b in zip(small.trainer.fit(8), large.trainer.fit(8), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert a.tokens == b.tokens


def test_a_file_holds_arrays_and_json(tmp_path):
    path = tmp_path / "run.safetensors"
    run = Run()
    run.trainer.fit(5)
    run.layer.load_state_dict({name: 2 * x for name, x in run.layer.state_dict().items()})
    run.trainer.save(path)
    with safe_open(path, framework="numpy") as file:
        values = json.loads(file.metadata()["fastattn.train"])
        assert set(file.keys()) == {
            f"{part}.{name}" for part in ("params", "first", "second") for name in ("weight", "bias")
        }
    assert values["steps"] == values["optimizer_steps"] == 5
    layer = Linear(FEATURES, CLASSES)
    layer.load_state_dict(path, prefix="params.")
    np.testing.assert_array_equal(layer.packed_weight.unpack(), run.layer.packed_weight.unpack())
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_files_that_do_not_fit_change_nothing(tmp_path):
    path = tmp_path / "run.safetensors"
    run, sgd = Run(), Run(train.SGD)
    run.trainer.fit(3)
    run.trainer.save(path)
    with pytest.raises(ValueError, match="is of the optimizer AdamW; expected SGD"):
        sgd.trainer.load(path)
    with pytest.raises(FileNotFoundError, match=r"^Trainer.load\(\): .*nothing.safetensors is missing"):
        run.trainer.load(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="has the place of batches, rng; expected batches"):
        Run(rng=None).trainer.load(path)
    other = Run(batches=train.Batches(*data(), batch_size=8))
    before = other.bits()
    with pytest.raises(ValueError, match="batch_size is 7; expected 8"):
        other.trainer.load(path)
    assert other.bits() == before
    wide = train.AdamW({"weight": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)})
    other = Run(lambda layer, lr: wide)
    before = other.bits()
    with pytest.raises(ValueError, match=r"params.weight is an array of shape \(3, 8\)"):
        other.trainer.load(path)
    assert other.bits() == before
    layer = Linear(FEATURES, CLASSES, rng=0)
    weights = tmp_path / "weights.safetensors"
    from safetensors.numpy import save_file

    save_file(layer.state_dict(), weights)
    with pytest.raises(ValueError, match="holds no training run"):
        run.trainer.load(weights)
    with pytest.raises(ValueError, match="is a folder"):
        run.trainer.save(tmp_path)
    for call in (run.trainer.load, run.trainer.save):
        with pytest.raises(TypeError, match=rf"^Trainer.{call.__name__}\(\): path is of type int; expected"):
            call(3)
    with pytest.raises(FileNotFoundError, match=r"the folder .* is missing"):
        run.trainer.save(tmp_path / "there" / "x.safetensors")


WHOLE = {"optimizer": "AdamW", "optimizer_steps": 1, "steps": 1, "schedule": None, "place": {}}
HEADERS = {
    r"'optimizer' in the header of .* is missing; expected a name": {},
    r"'steps' in the header of .* is -1; expected a number": {**WHOLE, "steps": -1},
    r"'optimizer_steps' in the header of .* is 'x'; expected a number": {**WHOLE, "optimizer_steps": "x"},
    r"'place' in the header of .* is \[1\]; expected a place in the data": {**WHOLE, "place": [1]},
    r"'schedule' in the header of .* is \{\}; expected a schedule's name": {**WHOLE, "schedule": {}},
    r"batches has length 2; expected None, as": {**WHOLE, "place": {"sequence": 3}},
    r"taken is 9; expected 0 to 2": {**WHOLE, "place": {"sequence": {"length": 2, "taken": 9}}},
    r"the format of the training run in .* is 1; expected 2": {"format": 1},
}


@pytest.mark.parametrize("match", HEADERS)
def test_headers_that_are_not_whole(match, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    run, path = Run(rng=None, batches=lists(2)), tmp_path / "run.safetensors"
    values = {"format": 2, **HEADERS[match]}
    arrays = {name: x for name, x in run.optimizer.state_dict().items() if name != "steps"}
    save_file(arrays, path, {"fastattn.train": json.dumps(values)})
    before = run.bits()
    with pytest.raises(ValueError, match=match):
        run.trainer.load(path)
    assert run.bits() == before


def test_steps_that_cannot_be_stored_are_skipped():
    layer = Linear(4, 3, weights_dtype="bfloat16", rng=0)
    before = layer.state_dict()
    grads = {name: np.full(x.shape, 9, np.float32) for name, x in before.items()}
    run = train.Trainer(lambda b: (1.0, grads), train.SGD(layer, 1e38), [1], nonfinite="skip")
    steps = run.fit(2)
    assert [step.grad_norm for step in steps] == [np.inf, np.inf]
    assert (run.steps, run.optimizer.steps) == (2, 0)
    for name, x in layer.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize("where", ["loss", "update"])
def test_ctrl_c_leaves_whole_steps(where):
    through, run = Run(accumulate=2), Run(accumulate=2)
    through.trainer.fit(20)
    run.trainer.fit(5)
    loss, update = run.trainer.loss, run.optimizer._update

    def interrupted(function):
        def call(*args):
            result = function(*args)
            if run.calls == 19:
                run.calls += 1
                signal.raise_signal(signal.SIGINT)
            return result

        return call

    if where == "loss":
        run.trainer.loss = interrupted(loss)
    else:
        run.optimizer._update = interrupted(update)
        run.calls += 1
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.trainer.fit(20)
    finally:
        signal.signal(signal.SIGINT, old)
    assert 5 < run.trainer.steps < 20
    assert run.optimizer.steps == run.trainer.steps
    run.trainer.fit(20)
    assert run.bits() == through.bits()


def test_losses_and_gradients_that_are_not_finite():
    run = Run()
    loss, bad = run.trainer.loss, {3: (math.nan, 1.0), 6: (1.0, math.inf)}

    def spoilt(batch):
        value, grads = loss(batch)
        factors = bad.get(run.calls, (1.0, 1.0))
        return value * factors[0], {**grads, "bias": grads["bias"] * np.float32(factors[1])}

    run.trainer.loss = spoilt
    with pytest.raises(FloatingPointError, match=r"^Trainer.fit\(\): the loss is nan at step 3"):
        run.trainer.fit(10)
    assert run.trainer.steps == 2
    with pytest.raises(FloatingPointError, match="the gradient of bias has"):
        run.trainer.fit(10)
    run.trainer.nonfinite, run.calls, done = "skip", 2, run.trainer.steps
    steps = run.trainer.fit(10)
    assert [step.skipped for step in steps].count(True) == 2
    assert run.trainer.steps == 10
    assert run.optimizer.steps == 8
    assert done == 4


def lists(count=3):
    """Batches in a list."""
    x, y = Run().data
    return [(x[i::count], y[i::count]) for i in range(count)]


def test_finite_batches_begin_anew():
    x, y = data()
    batches = [(x, y), (x[:9], y[:9])]
    for kind in (batches, dict(enumerate(batches)).values()):
        run = Run(rng=None, batches=kind)
        assert [step.tokens for step in run.trainer.fit(5)] == [480, 72, 480, 72, 480]


def test_the_end_of_batches_is_told():
    run = Run(batches=iter(lists(5)), accumulate=3)
    with pytest.warns(UserWarning, match=r"after step 1 of 10, 2 left over, fewer than accumulate=3$"):
        assert len(run.trainer.fit(10)) == 1
    with pytest.raises(ValueError, match=r"^Trainer.fit\(\): batches is of type list_iterator and has none"):
        run.trainer.fit(10)
    run = Run(batches=iter(lists(3)))
    with pytest.warns(UserWarning, match=r"^Trainer.fit\(\): batches ended after step 3 of 4$"):
        run.trainer.fit(4)
    for nothing in ([], np.zeros((0, 2)), iter(()), set()):
        with pytest.raises(ValueError, match="has none for step 1; expected at least one"):
            Run(batches=nothing).trainer.fit(1)


def test_a_sequence_goes_on_at_its_place(tmp_path):
    path, batches = tmp_path / "run.safetensors", lists()
    through, first, second = (Run(batches=kind(batches), accumulate=2) for kind in (list, tuple, list))
    begun = [step.loss for step in first.trainer.fit(5)]
    first.trainer.save(path)
    second.trainer.fit(1)
    second.trainer.load(path)
    assert second.bits() == first.bits()
    losses = [step.loss for step in through.trainer.fit(9)]
    assert begun + [step.loss for step in second.trainer.fit(9)] == losses
    other = Run(batches=batches[:2])
    before = other.bits()
    with pytest.raises(ValueError, match=r"^Trainer.load\(\): batches has length 2; expected 3"):
        other.trainer.load(path)
    assert other.bits() == before
    with pytest.raises(ValueError, match="has the place of rng, sequence; expected batches, rng"):
        Run().trainer.load(path)


@pytest.mark.parametrize("make", [iter, lambda batches: dict(enumerate(batches)).values()])
def test_other_iterables_begin_anew_with_a_warning(make, tmp_path):
    path, batches = tmp_path / "run.safetensors", lists()
    first, run = Run(batches=batches), Run(batches=make(batches))
    first.trainer.fit(2)
    first.trainer.save(path)
    run.trainer.fit(1)
    with pytest.warns(
        UserWarning, match=r"^Trainer.load\(\): batches is of type .* place is not known: it restarts"
    ):
        run.trainer.load(path)
    seen, loss = [], run.trainer.loss
    run.trainer.loss = lambda batch: seen.append(batch) or loss(batch)
    run.trainer.fit(3)
    assert seen[0] is batches[1 if make is iter else 0]


def test_what_it_prints_and_calls(capsys):
    run = Run()
    seen = []
    run.trainer.fit(10, log_every=4, callback=lambda step: seen.append(step) or step.step == 9)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 4 of 10", "step 8 of 10"]
    assert lines[0].endswith("tokens/s")
    assert len(seen) == 9
    run.trainer.fit(10, log_every=4)
    assert capsys.readouterr().out.startswith("step 10 of 10: loss ")


def test_the_log_says_what_was_skipped(capsys):
    pairs = iter([(1.0, 1.0), (math.nan, 1.0), (3.0, math.inf), (math.inf, 1.0), (math.nan, 1.0)])
    run = trainer(loss=lambda b: ((pair := next(pairs))[0], {"w": np.full(3, pair[1])}), nonfinite="skip")
    steps = run.fit(5, log_every=2)
    assert [step.skipped for step in steps] == [False, True, True, True, True]
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(",")[0] for line in lines] == ["loss 1.0000", "loss 3.0000", "loss nan"]
    assert [line.rpartition("s, ")[2] for line in lines] == [
        f"{n} steps skipped" for n in ("1 of 2", "2 of 2", "1 of 1")
    ]


def endless(batches):
    while True:
        yield from batches


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.Philox, np.random.PCG64])
def test_batches_go_where_they_were(generator):
    x = np.arange(23)
    first = train.Batches(x, batch_size=5, rng=np.random.Generator(generator(1)))
    stream = endless(first)
    for count in (0, 1, 3, 4):
        state = json.loads(json.dumps(first.state_dict()))
        second = train.Batches(x, batch_size=5, rng=np.random.Generator(generator(2)))
        second.load_state_dict(state)
        again = endless(second)
        for _ in range(6 + count):
            np.testing.assert_array_equal(next(stream), next(again))
    before = second.state_dict()
    for wrong in ({"rng": None}, {"drawn_at": {"bit_generator": generator.__name__}}):
        with pytest.raises(ValueError, match=r"^Batches.load_state_dict\(\): the (generator's )?state is"):
            second.load_state_dict({**state, "done": 1, **wrong})
        assert second.state_dict() == before


def test_a_loop_over_batches_is_one_epoch():
    x = np.arange(23)
    batches = train.Batches(x, batch_size=5, rng=1)
    epochs = [np.concatenate(list(batches)).tolist() for _ in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [20] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    plain = train.Batches(x, x + 1, batch_size=10, shuffle=False)
    assert [tuple(part[0] for part in batch) for batch in plain] == [(0, 1), (10, 11)]
    windows = np.lib.stride_tricks.sliding_window_view(x, 4)
    assert [batch.shape for batch in train.Batches(windows, batch_size=9, rng=0)] == [(9, 4)] * 2


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_loop_that_was_left_begins_anew_and_one_from_a_state_goes_on(taken):
    x = np.arange(23)
    whole = list(train.Batches(x, batch_size=5, rng=1))
    batches = train.Batches(x, batch_size=5, rng=1)
    assert len(list(islice(batches, taken))) == taken
    state = batches.state_dict()
    assert [len(list(batches)) for _ in range(2)] == [4, 4]
    for _ in range(2):  # at the second time it stands there already
        batches.load_state_dict(state)
    rest = list(batches)
    np.testing.assert_array_equal(rest, whole[taken:] or rest)
    assert len(rest) == 4 - taken % 4
    assert len(list(batches)) == 4


def test_a_run_saved_before_its_first_step_goes_on_to_the_bit(tmp_path):
    """Even if something has looked at the batches before."""
    path = tmp_path / "run.safetensors"
    batches = train.Batches(*Run().data, batch_size=7, rng=1)
    next(iter(batches))
    first, second = Run(batches=batches), Run()
    first.trainer.save(path)
    second.trainer.load(path)
    for run in (first, second):
        run.trainer.fit(10)
    assert first.bits() == second.bits()


def test_schedules():
    at = [0, 1, 4, 5, 10, 15, 99]
    cosine = train.Schedule("cosine", 15, warmup=5, final=0.2)
    assert [cosine(i) for i in at] == pytest.approx([0.2, 0.4, 1, 1, 0.6, 0.2, 0.2])
    linear = train.Schedule("linear", 15, warmup=5)
    assert [linear(i) for i in at] == pytest.approx([0.2, 0.4, 1, 1, 0.5, 0, 0])
    assert [train.Schedule(warmup=2)(i) for i in at] == [0.5, 1, 1, 1, 1, 1, 1]
    for step in ("x", -1, 0.5):
        with pytest.raises((TypeError, ValueError), match=rf"^Schedule\(\): step is {step!r}; expected"):
            linear(step)


def loss(batch):
    return 0.0, {}


def trainer(**options):
    return train.Trainer(
        **{"loss": loss, "optimizer": train.SGD({"w": np.ones(3)}), "batches": [1], **options}
    )


BATCHES = train.Batches([1], batch_size=1)
NO_NUMBER = np.ones(2)
ERRORS = r"""
Schedule('exp') -> ValueError: ^Schedule\(\): kind is 'exp'
Schedule('cosine') -> TypeError: ^Schedule\(\): num_steps is None
Schedule('linear', 5, warmup=5) -> ValueError: ^Schedule\(\): num_steps is 5; expected at least 6
Schedule('linear', 5, final=-1.0) -> ValueError: ^Schedule\(\): final is -1
Schedule(final=0.5) -> ValueError: ^Schedule\(\): final is 0.5 for kind 'constant', which
Batches(batch_size=1) -> TypeError: ^Batches\(\): there is no array
Batches([1, 2, 3], [1], batch_size=1) -> ValueError: ^Batches\(\): arrays have shapes \(3,\), \(1,\)
Batches(3, batch_size=1) -> ValueError: ^Batches\(\): arrays have shapes \(\)
Batches([], batch_size=1) -> ValueError: ^Batches\(\): arrays have no rows
Batches([1, 2, 3], batch_size=4) -> ValueError: ^Batches\(\): batch_size is 4; expected 1 to 3
BATCHES.load_state_dict({}) -> ValueError: ^Batches.load_state_dict\(\): state_dict lacks
trainer(loss=3) -> TypeError: ^Trainer\(\): loss is of type int
trainer(optimizer={}) -> TypeError: ^Trainer\(\): optimizer is of type dict
trainer(batches=3) -> TypeError: ^Trainer\(\): batches is of type int
trainer(rng=3) -> TypeError: ^Trainer\(\): rng is of type int
trainer(accumulate=0) -> ValueError: ^Trainer\(\): accumulate is 0
trainer(nonfinite='x') -> ValueError: ^Trainer\(\): nonfinite is 'x'
trainer(max_norm=0.0) -> ValueError: ^Trainer\(\): max_norm is 0
trainer().fit(-1) -> ValueError: ^Trainer.fit\(\): num_steps is -1
trainer().fit(1, log_every=0) -> ValueError: ^Trainer.fit\(\): log_every is 0
trainer().fit(1, callback=3) -> TypeError: ^Trainer.fit\(\): callback is of type int
trainer(loss=lambda b: 1.0).fit(1) -> TypeError: ^Trainer.fit\(\): loss returned 1.0; expected a loss
trainer(loss=lambda b: (NO_NUMBER, {})).fit(1)
    -> TypeError: ^Trainer.fit\(\): loss returned an array .* as the loss
trainer(loss=lambda b: (1.0, [])).fit(1)
    -> TypeError: ^Trainer.fit\(\): loss returned \[\] as gradients; expected a mapping
trainer().save(None) -> TypeError: ^Trainer.save\(\): path is of type NoneType
trainer(loss=lambda b: ({}, 1.0)).fit(1)
    -> TypeError: ^Trainer.fit\(\): loss returned \{\} as the loss; expected a number
trainer(schedule=lambda step: None).fit(1)
    -> TypeError: ^Trainer.fit\(\): schedule\(0\) is None; expected a real number
trainer(schedule=lambda step: -0.5).fit(1)
    -> ValueError: ^Trainer.fit\(\): schedule\(0\) is -0.5; expected a number of at least 0
trainer().fit(1) -> ValueError: ^SGD.step\(\): grads lacks w
trainer(loss=lambda b: (1.0, {'w': np.ones(3), 'typo': np.ones(3)}), accumulate=2).fit(1)
    -> ValueError: ^Trainer.fit\(\): grads has 'typo', which is the name of no
"""


@refused(ERRORS)
def test_errors_say_what_is_wrong(code, error):
    assert_refused(code, error, trainer=trainer, BATCHES=BATCHES, NO_NUMBER=NO_NUMBER)
