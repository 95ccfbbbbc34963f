"""The compiled layer by itself: no size that it is given leads C beyond an array."""

import dataclasses

import numpy as np
import pytest
from implementations import COMPILED, NOTHING_COMPILED

import fastattn
from fastattn import ops
from fastattn._args.packed import LinearArgs, PackArgs, RowBlock
from fastattn._args.types import ACTIVATIONS, ModifiersArgs, RopeArgs, RowsArgs, plain_args
from fastattn._bench.cases import as_dtype
from fastattn._engine import settings
from fastattn._engine.program import build
from fastattn._engine.slots import Slots
from fastattn._engine.steps import (
    INPUTS,
    OUT,
    AddStep,
    AttendStep,
    GateStep,
    LinearStep,
    NormStep,
    ScaleStep,
    Sequences,
    X,
)
from fastattn._formats import FORMATS
from fastattn._reference import activations as twins
from fastattn.layers._mixers import ConvolutionMixer, MixStep

pytestmark = pytest.mark.parametrize("core", [settings.core] if COMPILED else [NOTHING_COMPILED])


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def weight(n, k, dtype="float32"):
    return ops.pack(ones(n, k), dtype=dtype)


# X and OUT have 8 features.
PLACES = {"narrow": (0, 8), "qkv": (8, 24), "wide": (32, 16)}
GOOD = {
    "linear": LinearStep(X, OUT, weight(8, 8), ones(8), residual="narrow"),
    "norm": NormStep(X, OUT, "layer_norm", ones(8), ones(8), 1e-5),
    "head_norm": NormStep("qkv", "qkv", "rms_norm", ones(6, 4), None, 1e-5),
    "add": AddStep(X, OUT, "narrow", 8),
    "gate": GateStep(X, OUT, "wide", 8, 8),
    "scale": ScaleStep(X, OUT, ones(8)),
    "attend": AttendStep("qkv", OUT, 2, 2, 4, ModifiersArgs(0.5)),
    "queries": AttendStep(X, OUT, 2, 2, 4, ModifiersArgs(0.5), keys="qkv", keys_begin=8),
}


def run(core, steps, places=PLACES, call=None, dtype=np.float32, m=6, **arrays):
    sizes = {"x": 8, "out": 8, "memory": 48}
    given = [arrays.get(name, ones(m, size, dtype=dtype)) for name, size in sizes.items()]
    core.Program(steps, places).run(*given, call or Sequences(2), 1)


@pytest.mark.parametrize("step", GOOD.values(), ids=GOOD)
def test_a_program_that_fits(core, step):
    run(core, [step])


MISFITS = {
    "linear": [
        {"x": "qkv"}, {"out": "qkv"}, {"residual": "wide"}, {"weight": weight(8, 9)},
        {"weight": weight(40, 8)}, {"bias": ones(7)}, {"bias": ones(16)[::2]},
        {"bias": ones(8, dtype=np.float64)}, {"x": "none"}, {"out": "none"}, {"residual": "none"},
        {"weight": weight(8, 8, "float64")}, {"activations": "int8"},
        {"weight": weight(8, 8, "bfloat16"), "activations": "int8"},
    ],
    "norm": [
        {"x": "qkv"}, {"out": "qkv"}, {"weight": ones(3)}, {"bias": ones(3)},
        {"weight": ones(8, dtype=np.float64)}, {"weight": ones(8, dtype=np.float16)}, {"x": "none"},
    ],
    "head_norm": [
        {"weight": ones(7, 4)}, {"weight": ones(6, 8)[:, ::2]}, {"begin": 12}, {"begin": -4}, {"x": "none"},
        {"out": "wide"},
    ],
    "add": [
        {"x": "qkv"}, {"out": "qkv"}, {"residual": "wide"}, {"residual": "none"}, {"features": 4},
    ],
    "gate": [
        {"x": "wide"}, {"out": "wide"}, {"gate": X}, {"gate": "none"}, {"gate": INPUTS}, {"begin": 9},
        {"begin": -1}, {"features": 7},
    ],
    "scale": [
        {"x": "wide"}, {"out": "wide"}, {"weight": ones(7)}, {"weight": ones(8, dtype=np.float64)},
        {"weight": ones(16)[::2]},
    ],
    "attend": [
        {"x": "wide"}, {"out": "none"}, {"heads": 8, "heads_kv": 4}, {"head_dim": 16}, {"heads": 3},
        {"heads_kv": 0}, {"head_dim": 0}, {"first_kv": -1}, {"size": -1}, {"query_rotation": 0},
        {"sinks": ones(3)}, {"sinks": ones(2, dtype=np.float64)},
    ],
    "queries": [
        {"keys": "none"}, {"keys": "wide"}, {"keys_begin": 9}, {"keys_begin": -1}, {"x": INPUTS},
    ],
}  # fmt: skip  # a gate in INPUTS: the call has none


@pytest.mark.parametrize(("name", "changes"), [(name, each) for name in MISFITS for each in MISFITS[name]])
def test_steps_that_do_not_fit(core, name, changes):
    with pytest.raises(ValueError, match="fastattn: "):
        run(core, [dataclasses.replace(GOOD[name], **changes)])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"places": {str(i): (0, 8) for i in range(22)}}, "22 places; expected at most 21"),
        ({"places": PLACES | {"narrow": (-8, 8)}}, "a place at"),
        ({"places": PLACES | {"wide": (32, 1 << 40)}}, "bytes of memory are too few"),
        ({"memory": ones(6, 47)}, "bytes of memory are too few"),
        ({"call": Sequences(0)}, "6 rows of 0 sequences"),
        ({"call": Sequences(4)}, "6 rows of 4 sequences"),
        ({"x": ones(6, 9)}, "step 0 maps 8 features to 8; it has 9"),
        ({"out": ones(6, 4)}, "step 0 maps"),
        ({"out": ones(5, 8)}, "out has shape"),
        ({"x": ones(6, 16)[:, ::2]}, "x has shape"),
        ({"dtype": np.float64}, "parameters of another type"),
    ],
)
def test_calls_that_do_not_fit(core, options, match):
    with pytest.raises(ValueError, match=f"fastattn: .*{match}"):
        run(core, [GOOD["linear"]], **options)


def slots(heads=2, capacity=8, head_dim=4, dtype=np.float32, **changes):
    cache = ones(2, heads, capacity, head_dim, dtype=dtype)
    return (Slots(cache, cache.copy(), 5, None, 8)._replace(**changes),)


def test_what_a_step_asks_of_a_call(core):
    """Its rotation and its bias are there and fit, also the lengths of a ragged batch."""
    rotated, biased = (dataclasses.replace(GOOD["attend"], **{name: 0}) for name in ("rotation", "bias"))
    rotation = ones(1, 3, 2), ones(1, 3, 2)
    begins = np.array([0, 2, 6])
    run(core, [rotated], call=Sequences(2, rotations=(rotation,)))
    run(core, [biased], call=Sequences(2, biases=(ones(2, 5),)))
    run(core, [biased], call=Sequences(2, begins=begins, biases=(ones(2, 7),)))
    for step, call in (
        (rotated, Sequences(2)),
        (rotated, Sequences(2, begins=begins, rotations=(rotation,))),
        (rotated, Sequences(2, rotations=((ones(1, 3, 3), ones(1, 3, 3)),))),
        (biased, Sequences(2)),
        (biased, Sequences(2, biases=(ones(2, 3),))),
        (biased, Sequences(2, biases=(ones(3, 5),))),
        (biased, Sequences(2, biases=(ones(2, 5, dtype=np.float64),))),
        (biased, Sequences(2, biases=(ones(2, 10)[:, ::2],))),
        (biased, Sequences(2, begins=begins, biases=(ones(2, 5),))),
        (biased, Sequences(2, biases=(ones(2, 17),), slots=slots())),
    ):
        with pytest.raises(ValueError, match="fastattn: "):
            run(core, [step], call=call)


def test_a_size_of_heads_that_no_cache_holds(core):
    for step in (GOOD["attend"], GOOD["queries"]):
        with pytest.raises(ValueError, match="size 1 of heads; the cache holds 1"):
            run(core, [dataclasses.replace(step, size=1)], call=Sequences(2, slots=slots()))


@pytest.mark.parametrize(
    "call",
    [
        Sequences(2, ((None, ones(2, 1, 2, dtype=np.int64)),)),
        Sequences(2, ((None, ones(2, 1, 1, dtype=np.int32)),)),
        Sequences(2, rotations=((ones(1, 2, 2), ones(1, 2, 2)),)),
        Sequences(2, rotations=((ones(1, 3, 2), ones(1, 3, 4)[..., ::2]),)),
        Sequences(2, rotations=((ones(1, 3, 2), ones(1, 3, 2)),) * 5),
        Sequences(3, begins=np.array([0, 2, 6])),
        Sequences(2, begins=np.array([0, 2, 7])),
        Sequences(2, begins=np.array([1, 2, 6])),
        Sequences(3, begins=np.array([0, 5, 4, 6])),
        Sequences(2, begins=np.array([0, 2, 6], np.int32)),
        Sequences(2, begins=np.array([0, 2, 6]), slots=slots()),
        Sequences(2, ((None, ones(2, 1, 3, dtype=np.int64)),), begins=np.array([0, 2, 6])),
        Sequences(2, slots=slots(heads=1)),
        Sequences(2, slots=slots(capacity=7)),
        Sequences(2, slots=slots(head_dim=3)),
        Sequences(2, slots=slots(dtype=np.float64)),
        Sequences(2, slots=slots(starts=6)),
        Sequences(2, slots=slots(starts=np.array([0, -1]))),
        Sequences(2, slots=slots(starts=np.array([0, 0, 0]))),
        Sequences(2, slots=slots(length=9)),
        Sequences(2, slots=slots(head_dim=3) + slots()),
        Sequences(2, slots=slots() + slots(capacity=7)),
        Sequences(2, inputs=ones(5, 8)),
        Sequences(2, inputs=ones(6, 16)[:, ::2]),
        Sequences(2, inputs=ones(6, 8, dtype=np.float64)),
        Sequences(2, slots=slots(v=ones(2, 2, 8, 3))),
        Sequences(2, slots=slots(k_scale=ones(2, 2, 8), v_scale=ones(2, 2, 8))),
        Sequences(2, slots=slots(dtype=np.int8, k_scale=ones(2, 2, 8))),
        Sequences(2, slots=slots(dtype=np.int8, k_scale=ones(2, 2, 7), v_scale=ones(2, 2, 8))),
    ],
    ids=range(29),
)
def test_sequences_that_do_not_fit(core, call):
    run(core, [GOOD["attend"]], call=Sequences(2, slots=slots()))
    scales = {"k_scale": ones(2, 2, 8), "v_scale": ones(2, 2, 8)}
    run(core, [GOOD["attend"]], call=Sequences(2, slots=slots(dtype=np.int8, **scales)))
    run(
        core, [dataclasses.replace(GOOD["attend"], size=1)], call=Sequences(2, slots=slots(1, 8, 3) + slots())
    )
    with pytest.raises(ValueError, match="fastattn: "):
        run(core, [GOOD["attend"]], call=call)


def test_buffers_share_memory_when_they_are_not_needed_together(core):
    norm = ("layer_norm", ones(8), ones(8), 1e-5)
    steps = [
        LinearStep(X, "a", weight(24, 8), None),
        LinearStep("a", "b", weight(8, 24), None),
        NormStep("b", OUT, *norm),
        LinearStep(OUT, "c", weight(16, 8), None),
        LinearStep("c", "d", weight(8, 16), None, residual="b"),
        LinearStep("d", "a", weight(24, 8), None),  # what was there is not needed any more
        LinearStep("a", OUT, weight(8, 24), None, residual="d"),
    ]
    program = build("test", steps)
    assert program.columns == 8
    assert program.layouts[0].places == {"a": (0, 24), "c": (0, 16), "b": (24, 8), "d": (32, 8)}
    with pytest.raises(ValueError, match="steps read b before anything is there"):
        build("test", steps[2:])


LINEAR = LinearArgs(ones(3, 40), weight(50, 40), ones(50), None, ones(3, 50), ones(3, 50), 1)
ROWS = RowsArgs("layer_norm", ones(3, 8), ones(3, 8), 1, ones(3, 8), ones(3, 8), None, ones(8), ones(8), 1e-5)
ROPE = RopeArgs(ones(2, 3, 8), ones(2, 3, 8), ones(1, 3, 4), ones(1, 3, 4), False, 1)


OPERATIONS = {
    "linear": (LINEAR, [
        {"x": ones(3, 39)}, {"x": ones(2, 40)}, {"residual": ones(3, 49)}, {"bias": ones(49)},
        {"residual": ones(3, 50, dtype=np.float64)}, {"x": ones(3, 80)[:, ::2]},
        {"weight": weight(50, 40, "float64")}, {"transposed": True},
        {"transposed": True, "x": ones(3, 50), "out": ones(3, 40), "residual": None},
    ]),
    "rows": (ROWS, [
        {"x": ones(3, 7)}, {"residual": ones(2, 8)}, {"total": ones(3, 8, dtype=np.float16)},
        {"weight": ones(7)}, {"bias": ones(8, dtype=np.float64)}, {"up": ones(3, 9)},
    ]),
    "rope": (ROPE, [
        {"out": ones(2, 3, 8, dtype=np.float16)}, {"out": ones(2, 2, 8)},
        {"cos": ones(1, 3, 5), "sin": ones(1, 3, 5)}, {"sin": ones(1, 2, 4)},
        {"cos": ones(1, 3, 4, dtype=np.float64)}, {"out": ones(2, 3, 8), "scale": ones(2, 3)},
        {"out": ones(2, 3, 8, dtype=np.int8), "scale": ones(3, 3)},
        {"out": ones(2, 3, 8, dtype=np.int8), "scale": ones(2, 3, dtype=np.float64)},
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "args", "changes"),
    [(name, args, each) for name, (args, all_) in OPERATIONS.items() for each in all_],
)
def test_operations_that_do_not_fit(core, function, args, changes):
    getattr(core, function)(args)
    with pytest.raises(ValueError, match="fastattn: "):
        getattr(core, function)(dataclasses.replace(args, **changes))


ATTENTION = [
    {"v": ones(2, 2, 7, 8, dtype=np.float16)}, {"q": ones(2, 4, 5, 7)}, {"k": ones(2, 2, 6, 8)},
    {"v": ones(2, 2, 9, 8)}, {"k": ones(2, 3, 7, 8)}, {"out": ones(1, 2, 4, 5, 8)}, {"out": ones(2, 4, 4, 8)},
    {"lse": ones(2, 4, 4)}, {"mask": ones(5, 6, dtype=bool)}, {"lse": ones(2, 4, 5, dtype=np.float64)},
    {"row_end": ones(1, 4, dtype=np.int64)}, {"sinks": ones(3)}, {"row_begin": ones(1, 5)},
    {"q": ones(2, 4, 5, 16)[..., ::2]},
]  # fmt: skip
OF_INT8 = [
    {"k": ones(2, 2, 7, 8)}, {"v": ones(2, 2, 7, 8)}, {"k_scale": ones(2, 2, 6)}, {"v_scale": ones(3, 7)},
    {"v_scale": ones(2, 2, 7, dtype=np.float64)}, {"v_scale": None},
]  # fmt: skip
SCALES = {"k_scale": ones(2, 2, 7), "v_scale": ones(2, 2, 7)}


def attention_args(keys, **changes):
    made = plain_args(ones(2, 4, 5, 8), keys, keys, ones(2, 4, 5, 8), 1)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("changes", ATTENTION, ids=lambda changes: "-".join(changes))
def test_attention_that_does_not_fit(core, changes):
    keys = ones(2, 2, 7, 8)
    core.attention(attention_args(keys))
    with pytest.raises(ValueError, match=f"fastattn: {'|'.join(changes)} has shape"):
        core.attention(attention_args(keys, **changes))


@pytest.mark.parametrize("changes", OF_INT8, ids=lambda changes: "-".join(changes))
def test_int8_keys_that_do_not_fit(core, changes):
    codes = ones(2, 2, 7, 8, dtype=np.int8)
    core.attention(attention_args(codes, **SCALES))
    with pytest.raises(ValueError, match=r"fastattn: (v|k|k_scale|v_scale) has shape"):
        core.attention(attention_args(codes, **SCALES | changes))
    with pytest.raises(TypeError, match="no kernel reads int8"):
        core.attention(attention_args(codes))


def test_one_list_of_activations(core):
    """C, Python and the twins in NumPy have the same names."""
    assert core.ACTIVATIONS == ACTIVATIONS == tuple(twins.ACTIVATIONS)


@pytest.mark.parametrize(
    ("dtype", "block", "message"),
    [
        ("bfloat16", None, "become bfloat16; expected 4 bits or q8"),
        ("float32", None, "become float32; expected 4 bits or q8"),
        ("int8", None, "become int8; expected 4 bits or q8"),
        ("q8", 1, "blocks of 1 features; expected 16 or 32"),
        ("q8", 8, "blocks of 8 features; expected 16 or 32"),
        ("q8", 0, "blocks of 0 features; expected 16 or 32"),
    ],
)
def test_blocks_of_files_that_do_not_fit(core, dtype, block, message):
    layout = FORMATS["Q4_0"].layout
    rows = np.zeros((32, 64 // layout.features * layout.nbytes), np.uint8)
    args = PackArgs([RowBlock("w", rows, 0, 0, layout)], 64, 32, 1, dtype, 1)
    if block is not None:
        args.set_blocks(32, True)
        args.block = block
    with pytest.raises(ValueError, match=message):
        core.pack(args)


def mixed(core, states, layer=0, weight=(8, 1, 3)):
    step = MixStep("wide", OUT, ConvolutionMixer(ones(*weight), None), layer)
    x, out, memory = ones(4, 8), ones(4, 8), ones(4 * 24)
    core.Program([step], {"wide": (0, 24)}).run(x, out, memory, Sequences(2, states=states), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": []}, "states of 0 layers; expected some of layer 0"),
        ({"states": [[{}]], "layer": 5}, "states of 1 layers; expected some of layer 5"),
        ({"states": [[{}]], "layer": -9}, "states of 1 layers; expected some of layer -9"),
        ({"states": None, "weight": (8, 2, 3)}, "conv_weight"),
        ({"states": None, "weight": (8, 3)}, "conv_weight"),
    ],
)
def test_states_that_do_not_fit(core, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        mixed(core, **arguments)


def test_a_state_that_may_not_be_written(core):
    state = ones(2, 2, 8)
    mixed(core, [[{"out_state": state}]])
    state.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match="writable"):
        mixed(core, [[{"out_state": state}]])


def test_caches_of_two_sizes_have_the_same_tokens(core):
    step = AttendStep("qkv", OUT, 2, 2, 4, ModifiersArgs(0.5), size=1)
    first = Slots(ones(1, 2, 64, 4), ones(1, 2, 64, 4), np.array([40]), None, 42)
    other = Slots(ones(1, 2, 4, 4), ones(1, 2, 4, 4), np.array([1]), None, 3)
    call = Sequences(1, begins=np.array([0, 2]), slots=(first, other))
    with pytest.raises(ValueError, match="caches of two sizes of heads have other lengths"):
        run(core, [step], call=call, m=2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 1, 3)])
def test_plain_attention_has_the_bits_of_any_other(batch, dtype, core):
    draw = np.random.default_rng(0).standard_normal
    q, k, v = draw((*batch, 4, 9, 8)), draw((*batch, 2, 13, 8)), draw((*batch, 2, 13, 5))
    q, k, v = (x.astype(as_dtype(dtype)) for x in (q, k, v))
    strided = (x.swapaxes(-3, -2).copy().swapaxes(-3, -2) for x in (q, k, v))
    read_only = np.broadcast_to(k, k.shape)
    expected = fastattn.attention(q, k, v, scale=8**-0.5)
    for given in ((q, k, v), strided, (q, read_only, v)):
        out = core.plain_attention(*given, 2)
        assert out.dtype == q.dtype
        assert out.tobytes() == expected.tobytes()


def test_plain_attention_leaves_all_else(core):
    """To whom converts, broadcasts, and says what is wrong."""
    q, k, v = ones(2, 4, 9, 8), ones(2, 2, 13, 8), ones(2, 2, 13, 5)
    swapped = v.astype(">f4")
    unaligned = np.frombuffer(bytes(1) + v.tobytes(), np.uint8)[1:].view(np.float32).reshape(v.shape)
    integers = [x.astype(np.int8) for x in (q, k, v)]
    for given in (
        (q.tolist(), k, v), (q[0, 0], k[0, 0], v[0, 0]), (q, k, v[0]), (q[:1], k, v), (q, k[:1], v[:1]),
        (q, k[:, :, :, :7], v), (q, k[:, :, :12], v), (q, k[:, :1], v), (q[:, :3], k, v),
        (q, k[:, :0], v[:, :0]), (q, k[:, :, :0], v[:, :, :0]), (q[:, :, :0], k, v),
        (q[..., :0], k[..., :0], v), (q, k, v[..., :0]),
        (q, k, swapped), (q, k, unaligned), (q, k, v.astype(np.float64)), (q, k, v.swapaxes(2, 3)), integers,
        (q, k, np.ma.array(v)), (q, k, None), [x[(None,) * 5] for x in (q, k, v)],
    ):  # fmt: skip
        assert core.plain_attention(*given, 2) is None
