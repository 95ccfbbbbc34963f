"""AdamW and SGD against their definitions; norms, clipping, groups, what is frozen, errors."""

import math
import signal

import numpy as np
import optimizers as oracle
import pytest
from implementations import each_isa, forced
from refused import assert_refused, refused

from fastattn import train
from fastattn._args.updates import UPDATE_BLOCK
from fastattn._engine import settings
from fastattn.grad import vjp
from fastattn.layers import LayerNorm, Linear, TransformerEncoder, TransformerEncoderLayer
from fastattn.train._gradients import norm_of

RNG = np.random.default_rng(1)
DTYPES = [np.float32, np.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
# Blocks, vectors, and what is left of both; nothing.
SHAPES = [(1,), (3, 5), (0, 4), (UPDATE_BLOCK,), (UPDATE_BLOCK + 1,), (17, 1000), (8 * 16 + 15,), ()]
DECAY = {"weight_decay": 0.1}
OPTIMIZERS = {
    "adamw": (train.AdamW, oracle.AdamW, {"lr": 1e-2, **DECAY}),
    "adamw, other betas": (
        train.AdamW,
        oracle.AdamW,
        {"lr": 1e-3, "betas": (0.5, 0.6), "eps": 1e-3, **DECAY},
    ),
    "sgd": (train.SGD, oracle.SGD, {"lr": 1e-2}),
    "sgd, decay": (train.SGD, oracle.SGD, {"lr": 1e-2, **DECAY}),
    "sgd, momentum": (train.SGD, oracle.SGD, {"lr": 1e-2, "momentum": 0.9, **DECAY}),
    "sgd, nesterov": (train.SGD, oracle.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, **DECAY}),
}


def arrays(dtype, shapes=SHAPES):
    return {f"p{i}": RNG.standard_normal(shape).astype(dtype) for i, shape in enumerate(shapes)}


@every_dtype
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_definition(name, dtype, implementation):
    make, define, options = OPTIMIZERS[name]
    weights = arrays(dtype)
    exact = {key: x.astype(float) for key, x in weights.items()}
    defined = {key: define(**options) for key in weights}
    optimizer = make(weights, **options, decay_vectors=True)
    for _ in range(6):
        grads = arrays(dtype)
        optimizer.step(grads)
        for key, x in exact.items():
            exact[key] = defined[key].step(x, grads[key].astype(float))
    for key, x in weights.items():
        # Six steps, each rounded some times: of the weight, and of the step, which here is below 1.
        bound = 20 * np.finfo(dtype).eps * (1 + abs(exact[key]))
        assert (abs(x - exact[key]) <= bound).all(), key


def norm(grads):
    return norm_of(grads.values(), 2)


@every_dtype
def test_norm_and_clipping(dtype, implementation):
    grads = arrays(dtype)
    exact = math.sqrt(sum((x.astype(float) ** 2).sum() for x in grads.values()))
    assert norm(grads) == pytest.approx(exact, rel=10 * float(np.finfo(dtype).eps))
    most = exact / 3
    weights = {key: x.copy() for key, x in grads.items()}
    optimizer = train.SGD(weights, 1.0)
    half = optimizer.step(grads, max_norm=2 * most, scale=-0.5)  # of the norm: it is not clipped
    assert half == pytest.approx(exact / 2, rel=1e-6)
    np.testing.assert_allclose(weights["p5"], grads["p5"] * 1.5, rtol=1e-6)
    optimizer.step(grads, max_norm=most)
    np.testing.assert_allclose(weights["p5"], grads["p5"] * (1.5 - 1 / 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e25, 1e200])
def test_norms_of_numbers_whose_squares_are_none(size):
    dtype = np.float64 if size > 1e38 else np.float32
    x = np.full((3, 5000), size, dtype)
    expected = 0.0 if size < 1 else size * math.sqrt(15000)  # squares of 1e-60 are 0 in float32
    assert norm({"x": x}) == pytest.approx(expected, rel=1e-6)


def test_norms_of_both_types_together():
    grads = {"a": np.full(4, 1e39), "b": np.full(4, 1e38, np.float32)}
    assert norm(grads) == pytest.approx(2e39 * math.sqrt(1.01))
    grads["a"] *= 1e261
    assert norm(grads) == pytest.approx(2e300)


@each_isa
@every_dtype
def test_bits_do_not_depend_on_threads(dtype, isa):
    shapes = [(300, 700), (5,), (65, 999), (1, 1)]
    results = []
    for num_threads in (1, 2, 5):
        RNG.bit_generator.state = np.random.default_rng(3).bit_generator.state
        with forced(isa, num_threads=num_threads):
            weights = arrays(dtype, shapes)
            optimizer = train.AdamW(weights, 1e-2)
            norms = [optimizer.step(arrays(dtype, shapes), max_norm=10.0) for _ in range(3)]
        results.append((norms, [x.tobytes() for x in weights.values()]))
    assert results[0] == results[1] == results[2]


def small_encoder(**options):
    layers = [TransformerEncoderLayer(32, 4, 48, "gelu", norm_first=True, rng=i, **options) for i in range(2)]
    return TransformerEncoder(layers, LayerNorm(32, weights_dtype=layers[0].weights_dtype))


@pytest.mark.parametrize("weights_dtype", ["float32", "float64", "bfloat16"])
def test_a_layer_gets_its_new_weights(weights_dtype):
    layer = small_encoder(weights_dtype=weights_dtype)
    optimizer = train.AdamW(layer, 1e-3)
    grads = {name: RNG.standard_normal(x.shape) for name, x in layer.state_dict().items()}
    before = layer.state_dict()
    optimizer.step(grads)
    again = small_encoder(weights_dtype=weights_dtype)
    again.load_state_dict(optimizer.parameters)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, again.state_dict()[name])
        assert (array != before[name]).any()
    x = RNG.standard_normal((2, 7, 32)).astype(layer.state_dict()["norm.weight"].dtype)
    np.testing.assert_array_equal(layer(x), again(x))


def test_weights_in_bfloat16_gain_from_steps_that_are_too_small_for_it():
    layer = small_encoder(weights_dtype="bfloat16")
    optimizer = train.SGD(layer, 1e-4)
    grads = {name: np.ones(x.shape, np.float32) for name, x in layer.state_dict().items()}
    before = layer.state_dict()["layers.0.linear1.weight"]
    for _ in range(100):
        optimizer.step(grads)
    after = layer.state_dict()["layers.0.linear1.weight"]
    assert abs(before - after).mean() == pytest.approx(0.01, rel=0.03)


def test_what_is_frozen_stays_and_is_not_packed_again():
    layer = small_encoder()
    optimizer = train.AdamW(layer, 1e-3, frozen=["layers.0.*", "*norm*"])
    assert not any("layers.0" in name or "norm" in name for name in optimizer.moments["first"])
    before = layer.state_dict()
    fields = [(path, part, dict(vars(part))) for path, part in layer._walk()]
    optimizer.step({name: np.ones_like(x) for name, x in before.items() if "layers.0" not in name})
    moved = {name for name, x in layer.state_dict().items() if (x != before[name]).any()}
    assert moved == {name for name in before if "layers.1" in name and "norm" not in name}
    changed = {path for path, part, old in fields if any(old[n] is not x for n, x in vars(part).items())}
    assert changed == {"layers.1.self_attn.", "layers.1.self_attn.out_proj.", "layers.1."}


@pytest.mark.parametrize("weights_dtype", ["int8", "q8", "int4", "uint4", "nf4"])
def test_quantised_weights_are_frozen_without_being_named(weights_dtype):
    layer = small_encoder(weights_dtype=weights_dtype)
    optimizer = train.AdamW(layer, 1e-2, frozen="layers.0.*")
    before = layer.state_dict()
    out, pullback = vjp(layer, RNG.standard_normal((2, 7, 32)).astype(np.float32))
    _, grads = pullback(out)
    for _ in range(5):
        optimizer.step(grads)
    moved = {name for name, x in layer.state_dict().items() if (x != before[name]).any()}
    assert moved == {name for name in grads if "layers.0" not in name}
    layer.load_state_dict(before, weights_dtype="float32")
    with pytest.raises(TypeError, match=r"^AdamW.step\(\): the weights of the layer .* float32 now"):
        optimizer.step(grads)


def test_several_layers_and_arrays_train_as_one():
    """They get the steps of the same arrays in one mapping, and the layers have the new weights."""
    table = RNG.standard_normal((5, 32)).astype(np.float32)
    encoder, head = small_encoder(), Linear(32, 3, rng=1)
    made = train.AdamW({"table": table, "encoder": encoder, "head": head}, 1e-2, frozen="encoder.norm*")
    whole = {"table": table.copy()} | {
        f"{name}.{inner}": x
        for name, layer in (("encoder", encoder), ("head", head))
        for inner, x in layer.state_dict().items()
    }
    plain = train.AdamW(whole, 1e-2, frozen="encoder.norm*")
    assert list(made.parameters) == list(whole)
    for _ in range(3):
        grads = {name: RNG.standard_normal(x.shape).astype(np.float32) for name, x in whole.items()}
        assert made.step(grads, max_norm=1.0) == plain.step(grads, max_norm=1.0)
    assert_same({"table": table}, {"table": whole["table"]})
    for name, layer in (("encoder.", encoder), ("head.", head)):
        own = {n.removeprefix(name): x for n, x in whole.items() if n.startswith(name)}
        assert_same(layer.state_dict(), own)
    head.load_state_dict({"weight": np.full((3, 32), 2.0), "bias": np.ones(3)})  # counts, as of a layer alone
    made.step({name: np.zeros_like(x) for name, x in whole.items()}, factor=0.0)
    assert (made.parameters["head.weight"] == 2).all()


def test_groups_have_their_own_rates():
    weights = {
        name: np.ones(shape)
        for name, shape in (("a.w", (2, 3)), ("a.b", 3), ("c.w", (2, 3)), ("d.w", (1, 1)))
    }
    groups = [{"params": "c.*", "lr": 0.5}, {"params": ["*.b", "c.w"], "weight_decay": 0.3}]
    optimizer = train.SGD(weights, 0.1, weight_decay=0.2, groups=groups)
    optimizer.step({name: np.zeros_like(x) for name, x in weights.items()})
    assert repr(optimizer) == "<SGD: 16 numbers, lr 0.1 and 0.5, step 1>"
    moved = {name: 1 - x.mean() for name, x in weights.items()}
    expected = {"a.w": 0.02, "a.b": 0.03, "c.w": 0.1, "d.w": 0.02}
    assert moved == pytest.approx(expected)
    plain = {"w": np.ones((2, 2)), "b": np.ones(2)}
    train.AdamW(plain, 0.1, weight_decay=0.5).step({"w": np.zeros((2, 2)), "b": np.zeros(2)}, factor=0.5)
    assert (plain["w"] == 1 - 0.05 * 0.5).all()
    assert (plain["b"] == 1).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite_change_nothing(value, implementation):
    weights = arrays(np.float32)
    optimizer = train.AdamW(weights, 1e-2)
    optimizer.step(arrays(np.float32))
    before = {name: x.copy() for name, x in optimizer.state_dict().items() if name != "steps"}
    bad = arrays(np.float32)
    bad["p5"][3, 7] = value
    counts = "1 NaN and 0 infinities" if np.isnan(value) else "0 NaN and 1 infinities"
    match = rf"^AdamW.step\(\): the gradient of p5 has {counts} among its 17000 elements; .* step 2"
    with pytest.raises(FloatingPointError, match=match):
        optimizer.step(bad)
    assert not math.isfinite(optimizer.step(bad, nonfinite="skip"))
    assert optimizer.steps == 1
    for name, x in before.items():
        np.testing.assert_array_equal(x, optimizer.state_dict()[name])


def test_weights_that_grow_beyond_their_type_leave_the_layer_as_it_was():
    layer = small_encoder(weights_dtype="bfloat16")
    optimizer = train.SGD(layer, 1.0)
    before = layer.state_dict()
    # A float32 that bfloat16 rounds to infinity: its largest number is 3.39e38.
    grads = {name: np.full(x.shape, -3.4e38, np.float32) for name, x in before.items()}
    with pytest.raises(FloatingPointError, match=r"^SGD.step\(\): the weights of step 1 cannot be stored"):
        optimizer.step(grads)
    for name, x in layer.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


def copied(optimizer):
    return {name: np.copy(x) for name, x in optimizer.state_dict().items()}


def assert_same(first, second):
    for name, x in second.items():
        np.testing.assert_array_equal(first[name], x, err_msg=name)


BEYOND = {
    "sgd": (lambda weights: train.SGD(weights, 1e38, momentum=0.5), 9.0),
    "adamw": (lambda weights: train.AdamW(weights, 3e38, eps=1.0, weight_decay=30), 9.0),
    "adamw, of squares": (lambda weights: train.AdamW(weights, 1e-3), 1e25),
}


@pytest.mark.parametrize("stored", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("name", BEYOND)
def test_steps_beyond_the_type_change_nothing(name, stored):
    make, grad = BEYOND[name]
    layer = None if stored is None else Linear(4, 3, weights_dtype=stored, rng=0)
    weights = Linear(4, 3, rng=0).state_dict() if layer is None else layer
    optimizer = make(weights)
    optimizer.step({name: 1e-3 * np.ones_like(x) for name, x in optimizer.parameters.items()}, factor=1e-38)
    before, held = copied(optimizer), layer and layer.state_dict()
    grads = {name: np.full(x.shape, grad, np.float32) for name, x in optimizer.parameters.items()}
    with pytest.raises(FloatingPointError):
        optimizer.step(grads)
    assert optimizer.step(grads, nonfinite="skip") == np.inf
    assert_same(copied(optimizer), before)
    assert optimizer.steps == 1
    if layer is not None:
        assert_same(layer.state_dict(), held)


def test_a_state_that_cannot_be_stored_changes_nothing():
    optimizer = train.SGD(Linear(4, 3, weights_dtype="bfloat16", rng=0))
    before = copied(optimizer)
    state = {**before, "steps": 7, "params.weight": np.full((3, 4), np.inf, np.float32)}
    with pytest.raises(FloatingPointError):
        optimizer.load_state_dict(state)
    assert_same(copied(optimizer), before)


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_weights_that_were_loaded_meanwhile_count(weights_dtype):
    layer, other = (small_encoder(weights_dtype=weights_dtype) for _ in range(2))
    optimizer = train.SGD(layer, 0.5)
    zeros = {name: np.zeros_like(x) for name, x in optimizer.parameters.items()}
    optimizer.step(zeros)
    loaded = {name: x + np.float32(0.25) for name, x in layer.state_dict().items()}
    layer.load_state_dict(loaded)
    expected = layer.state_dict()
    held = optimizer.state_dict()  # before a step, too
    assert_same({name: held[f"params.{name}"] for name in expected}, expected)
    optimizer.step(zeros)
    assert_same(layer.state_dict(), expected)
    part = next(iter(layer._children()))
    other.load_state_dict({name: 2 * x for name, x in loaded.items()})
    own = {name.removeprefix(part): x for name, x in other.state_dict().items() if name.startswith(part)}
    dict(layer._children())[part].load_state_dict(own)  # of one part
    expected |= {part + name: x for name, x in own.items()}
    optimizer.step(zeros)
    assert_same(layer.state_dict(), expected)
    ones = {name: np.ones_like(x) for name, x in zeros.items()}
    optimizer.step(ones)
    for name, x in optimizer.parameters.items():
        np.testing.assert_array_equal(x, expected[name] - np.float32(0.5))
    layer = Linear(4, 3, rng=0)
    optimizer = train.SGD(layer)
    layer.load_state_dict(layer.state_dict(), weights_dtype="float64")
    with pytest.raises(TypeError, match="the layer's weight is float64 now; expected float32"):
        optimizer.step({"weight": np.ones((3, 4)), "bias": np.ones(3)})
    with pytest.raises(TypeError, match=r"^SGD.state_dict\(\): the layer's weight is float64 now"):
        optimizer.state_dict()


@pytest.mark.parametrize("make", [train.AdamW, train.SGD])
def test_a_state_goes_over(make):
    options = {"momentum": 0.5} if make is train.SGD else {}
    runs = [arrays(np.float32) for _ in range(2)]
    first, second = (make(weights, 1e-2, **options) for weights in runs)
    first.step(arrays(np.float32))
    second.load_state_dict(
        {name: np.copy(x) if name != "steps" else x for name, x in first.state_dict().items()}
    )
    grads = arrays(np.float32)
    for optimizer in (first, second):
        optimizer.step(grads)
    for name in runs[0]:
        np.testing.assert_array_equal(runs[0][name], runs[1][name])


def test_ctrl_c_comes_after_the_step():
    layer = small_encoder()
    optimizer = train.AdamW(layer, 1e-3)
    grads = {name: np.ones(x.shape, np.float32) for name, x in layer.state_dict().items()}
    kept = optimizer._update

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        kept(*args)

    optimizer._update = interrupted
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(grads)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, old)
    assert optimizer.steps == 1
    for name, x in layer.state_dict().items():
        np.testing.assert_array_equal(x, optimizer.parameters[name])


def test_gradients_of_other_types_and_layouts():
    weights = {"w": np.ones((4, 6), np.float32)}
    grad = RNG.standard_normal((6, 4))
    train.SGD(weights, 1.0).step({"w": grad.T})
    np.testing.assert_array_equal(weights["w"], np.float32(1) - grad.T.astype(np.float32))


W = {"w": np.ones((2, 3), np.float32)}
G = {"w": np.ones((2, 3), np.float32)}
READ_ONLY = np.ones(3)
READ_ONLY.flags.writeable = False
SHARED = np.ones(5)
LAYER = Linear(4, 3, rng=0)
ERRORS = r"""
AdamW([W['w']]) -> TypeError: ^AdamW\(\): parameters is of type list
AdamW({}) -> ValueError: ^AdamW\(\): parameters is empty
AdamW({'w': np.ones(3, np.float16)}) -> TypeError: ^AdamW\(\): parameters\['w'\] is .*float16
AdamW({'w': READ_ONLY}) -> ValueError: ^AdamW\(\): parameters\['w'\] is read-only
AdamW({'w': np.ones((4, 4))[:, :2]}) -> ValueError: ^AdamW\(\): parameters\['w'\] is not C-contiguous
AdamW({'a': SHARED[:3], 'b': SHARED[2:]})
    -> ValueError: ^AdamW\(\): parameters\['b'\] shares memory with parameters\['a'\]
AdamW({3: np.ones(2)}) -> TypeError: ^AdamW\(\): parameters has the key 3
AdamW(W, -1.0) -> ValueError: ^AdamW\(\): lr is -1
AdamW(W, 'x') -> TypeError: ^AdamW\(\): lr is 'x'
AdamW(W, betas=0.9) -> ValueError: ^AdamW\(\): betas is 0.9
AdamW(W, betas=(0.9, 1.0))
    -> ValueError: ^AdamW\(\): betas\[1\] is 1.0; expected a number from 0 up, below 1
AdamW(W, eps=-0.1) -> ValueError: ^AdamW\(\): eps is -0.1
AdamW(W, eps=0) -> ValueError: ^AdamW\(\): eps is 0; expected a number above 0 in float
AdamW({'w': np.ones(2, np.float32)}, eps=1e-46)
    -> ValueError: ^AdamW\(\): eps is 1e-46; expected a number above 0 in float32
AdamW(W, frozen='v*') -> ValueError: ^AdamW\(\): frozen has 'v\*'
AdamW(W, frozen='*') -> ValueError: ^AdamW\(\): frozen is '\*'; expected one that leaves
AdamW(Linear(4, 3, bias=False, weights_dtype='int8', rng=0))
    -> ValueError: ^AdamW\(\): frozen is \(\); expected one that leaves a parameter beside weights in int8
AdamW({'a': LAYER, 'b': LAYER})
    -> ValueError: ^AdamW\(\): parameters\['a'\] and parameters\['b'\] share a layer
AdamW({'a': LAYER, 'a.weight': np.ones(2)}) -> ValueError: ^AdamW\(\): parameters has 'a.weight' twice
AdamW({3: LAYER}) -> TypeError: ^AdamW\(\): parameters has the key 3; expected names of layers
AdamW({'a': LAYER, 'b': [1.0]})
    -> TypeError: ^AdamW\(\): parameters\['b'\] is of type list; expected a layer, or an
AdamW(W, frozen=3) -> TypeError: ^AdamW\(\): frozen is 3
AdamW(W, groups=[{'params': 'w', 'rate': 1}]) -> ValueError: ^AdamW\(\): groups\[0\] has 'rate'
AdamW(W, groups=[{'lr': 1}]) -> ValueError: ^AdamW\(\): groups\[0\] lacks 'params'
AdamW(W, groups=[{'params': 'w', 'lr': -1}]) -> ValueError: ^AdamW\(\): groups\[0\]\['lr'\] is -1
AdamW(W, groups=[{'params': 'q'}]) -> ValueError: ^AdamW\(\): groups\[0\]\['params'\] has 'q'
AdamW(W, groups='w') -> TypeError: ^AdamW\(\): groups is 'w'
AdamW(W, decay_vectors=1) -> TypeError: ^AdamW\(\): decay_vectors is 1
SGD(W, momentum=1.5) -> ValueError: ^SGD\(\): momentum is 1.5
SGD(W, nesterov=True) -> ValueError: ^SGD\(\): nesterov is True with a momentum of 0
SGD(W).step([]) -> TypeError: ^SGD.step\(\): grads is of type list
SGD(W).step({}) -> ValueError: ^SGD.step\(\): grads lacks w
SGD(W).step({**G, 'v': G['w']}) -> ValueError: ^SGD.step\(\): grads has 'v'
SGD(W).step({**G, 'v': G['w'], 3: G['w']}) -> ValueError: ^SGD.step\(\): grads has 3, which is
SGD(W).load_state_dict({'params.w': W['w'], 3: 1}) -> ValueError: ^SGD.load_state_dict\(\): state_dict has 3
AdamW(W, groups=[{'params': 'w', 'rate': 1, 3: 1}]) -> ValueError: ^AdamW\(\): groups\[0\] has 3; exp
SGD(W).step({'w': G['w'].T}) -> ValueError: ^SGD.step\(\): the gradient of w has shape \(3, 2\)
SGD(W).step({'w': np.ones((2, 3), np.int64)}) -> TypeError: ^SGD.step\(\): the gradient of w has dtype int64
SGD(W).step(G, max_norm=0) -> ValueError: ^SGD.step\(\): max_norm is 0
SGD(W).step(G, nonfinite='ignore') -> ValueError: ^SGD.step\(\): nonfinite is 'ignore'
SGD(W).step(G, factor=np.nan) -> ValueError: ^SGD.step\(\): factor is nan
SGD(W).step(G, factor=-1) -> ValueError: ^SGD.step\(\): factor is -1.0; expected a number of at least 0
SGD(W).load_state_dict({'params.w': W['w']})
    -> ValueError: ^SGD.load_state_dict\(\): state_dict lacks 'steps', .*; a file that Trainer.save wrote
SGD(W).load_state_dict({'params.w': W['w'][0], 'steps': 1})
    -> ValueError: ^SGD.load_state_dict\(\): params.w is an array of shape \(3,\)
"""


@refused(ERRORS)
def test_errors_say_what_is_wrong(code, error):
    before = W["w"].copy()
    assert_refused(code, error, W=W, G=G, READ_ONLY=READ_ONLY, SHARED=SHARED, LAYER=LAYER)
    np.testing.assert_array_equal(W["w"], before)
    assert (SHARED == 1).all()


@pytest.mark.skipif(not settings.core, reason="nothing is compiled")
def test_blocks_are_those_of_the_kernels():
    assert settings.core.UPDATE_BLOCK == UPDATE_BLOCK
