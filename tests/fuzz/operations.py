"""Recipes for the operations between attention calls, masks, and positions."""

from functools import wraps

import numpy as np
from judge import Like
from packed import FIELDS, false, tampered
from recipes import RECIPES, Call, native, recipe, same
from scores import MASKS, PREDICATES, Scores, any_mask

import fastattn
from fastattn import masks, ops, plot, positions
from fastattn._args.packed import PackedLinear
from fastattn._args.types import ACTIVATIONS, lane_dtype
from fastattn._args.weight_types import WEIGHT_DTYPES

NARROW = ("float32", "bfloat16", "int8", "int4", "uint4", "nf4")


def how(d):
    return d.some(0.15, num_threads=lambda: d.choose(1, 2), backend=lambda: None)


def rows(d):
    return (*d.batch(), d.size(0, 6), d.size())


@recipe
def linear(d):
    dtype = "float64" if d.dtype == np.float64 else d.choose(*NARROW)
    k, n, gated = d.size(), d.size(), d.chance(0.3)
    source = np.float64 if dtype == "float64" else d.choose(np.float32, np.float16)
    weight = ops.pack(
        d.floats(n, k, dtype=source), gate=d.floats(n, k, dtype=source) if gated else None, dtype=dtype
    )
    shape = (*d.batch(), d.size(0, 6))
    more = d.some(
        0.3, bias=lambda: d.floats(*((2, n) if gated else (n,)), dtype=lane_dtype(d.dtype)),
        activation=lambda: d.choose(*ACTIVATIONS), residual=lambda: d.floats(*shape, n),
        out=lambda: d.laid_out_to_write(np.empty((*shape, n), d.dtype))
    )  # fmt: skip
    if dtype in NARROW[2:] and d.chance(0.5):
        more["activations"] = "int8"
    if "residual" in more and d.chance(0.2):
        more["residual"] = more["out"] = np.asarray(more["residual"]).copy().astype(d.dtype)
    abused = d.chance(0.15)
    weight = tampered(d, weight) if abused else false(d, weight) if d.chance(0.2) else weight

    def result(a):
        return [Like((*np.shape(a["x"])[:-1], a["weight"].out_features), native(a["x"]))]

    return Call(
        ops.linear,
        {"x": d.floats(*shape, k), "weight": weight, **more, **how(d)},
        result,
        ("linear",),
        30.0 if dtype == "bfloat16" or "activations" in more else 1.0,
        abused=abused,
    )  # some kernels round x to bfloat16, too; in int8, a near tie may go either way


RECIPES += [linear] * 2


@recipe
def pack(d):
    n, k = d.size(), d.size()
    more = d.some(0.4, gate=lambda: d.floats(n, k), dtype=lambda: d.choose(*WEIGHT_DTYPES))
    return Call(ops.pack, {"weight": d.floats(n, k), **more})


@recipe
def unpacked(d):
    """Unpack a packed weight, perhaps a false one."""
    weight = ops.pack(d.floats(d.size(), d.size(), dtype=np.float32), dtype=d.choose(*NARROW))
    abused = d.chance(0.2)
    weight = tampered(d, weight) if abused else false(d, weight)
    return Call(lambda: (weight.unpack(), weight.nbytes, repr(weight)), {}, names=("unpack",), abused=abused)


@recipe
def packed_by_hand(d):
    weight = ops.pack(d.floats(d.size(), d.size(), dtype=np.float32), dtype=d.choose(*WEIGHT_DTYPES))
    return Call(PackedLinear, {name: getattr(weight, name) for name in FIELDS})


@recipe
def norm(d):
    shape, lane = rows(d), lane_dtype(d.dtype)
    function = d.choose(ops.layer_norm, ops.rms_norm)
    n = shape[-1]
    more = d.some(
        0.3, weight=lambda: d.floats(n, dtype=lane), bias=lambda: d.floats(n, dtype=lane), eps=lambda: 1e-3,
        residual=lambda: d.floats(*shape), return_sum=lambda: True,
        out=lambda: d.laid_out_to_write(np.empty(shape, d.dtype))
    )  # fmt: skip
    if function is ops.rms_norm:
        more.pop("bias", None)
        if not {"residual", "return_sum"} & {*more}:
            more |= d.some(
                0.5, gate=lambda: d.floats(*shape), activation=lambda: d.choose(*ACTIVATIONS)
            )  # fmt: skip
            more |= d.some(0.5, gate_first=lambda: True) if "gate" in more else {}

    def result(a):  # a row of equal numbers has a deviation of 0, and without eps nothing is added to it
        like = Like(np.shape(a["x"]), native(a["x"]), a.get("eps") != 0)
        return [like, like] if a.get("return_sum") else [like]

    return Call(function, {"x": d.floats(*shape), **more, **how(d)}, result)


@recipe
def elementwise(d):
    shape = rows(d)
    x, out = d.floats(*shape), d.some(0.2, out=lambda: d.laid_out_to_write(np.empty(shape, d.dtype)))
    if d.chance(0.4):
        return Call(ops.softmax, {"x": x, **out, **how(d)}, same("x"))
    up = d.some(0.4, up=lambda: d.floats(*shape))
    arguments = {"x": x, "activation": d.choose(*ACTIVATIONS), **up, **out, **how(d)}
    return Call(ops.activate, arguments, same("x"))


@recipe
def embedding(d):
    n, k = d.size(), d.size()
    ids = d.integers(0, n, *d.batch(), d.length())
    out = d.some(0.2, out=lambda: np.empty((*ids.shape, k), d.dtype))
    return Call(ops.embedding, {"ids": ids, "table": d.floats(n, k), **out}, lambda a: [
        Like((*np.shape(a["ids"]), np.shape(a["table"])[1]), native(a["table"]))])  # fmt: skip


@recipe
def mask(d):
    """Build a mask, show it, turn it into an array, and use it."""
    s = Scores.draw(d)
    kind = d.choose(*(x for x in MASKS if x is not masks.compile))  # which has its own recipe
    arguments = MASKS[kind](d, s)
    qkv = s.qkv(d)

    @wraps(kind)
    def use(*args, **options):
        made = kind(*args, **options)
        repr(made)
        batch, heads = s.batch, s.heads_q
        shown = made.to_array(s.len_q, s.len_k, batch_shape=batch, num_heads=heads, q_offset=0)
        return shown, fastattn.attention(**qkv, mask=made, q_offset=0)

    return Call(use, arguments, names=(kind.__name__, "to_array", "attention"))


RECIPES += [mask] * 3


@recipe
def mask_to_array(d):
    s = Scores.draw(d)
    more = {"len_k": s.len_k, "batch_shape": s.batch, "num_heads": s.heads_q, "q_offset": 2}
    more = {name: x for name, x in more.items() if d.chance(0.4)}
    kind = d.choose(masks.causal, masks.window, masks.chunked, masks.global_tokens)
    return Call(kind(**MASKS[kind](d, s)).to_array, {"len_q": s.len_q, **more})


@recipe
def compiled_mask(d):
    s = Scores.draw(d)
    mask = d.choose(any_mask(d, s), *PREDICATES)
    more = d.some(0.3, q_offset=lambda: 0)
    qkv = s.qkv(d)

    def use(predicate, shape, q_offset=None):
        made = masks.compile(predicate, shape, q_offset=q_offset)
        return fastattn.attention(**qkv, mask=made, q_offset=q_offset)

    return Call(use, {"predicate": mask, "shape": s.shape, **more}, names=("compile", "attention"))


@recipe
def position(d):
    length = {"length": d.length(), "d_model": d.size(), **d.some(
        0.3, offset=lambda: d.size(), dtype=lambda: d.dtype, base=lambda: 100.0)}  # fmt: skip
    pair = {"len_q": d.length(), "len_k": d.length()}
    more = d.some(
        0.3, max_distance=lambda: d.size(40, 50), bidirectional=lambda: False, q_offset=lambda: d.size(0)
    )
    return d.choose(
        Call(positions.sinusoidal, length,
             lambda a: [Like((a["length"], a["d_model"]), a.get("dtype", np.float32))]),
        Call(positions.alibi_slopes, {"num_heads": d.size()},
             lambda a: [Like((a["num_heads"],), np.float32)]),
        Call(positions.t5_buckets, {**pair, **more, **d.some(0.4, num_buckets=lambda: d.size(4))},
             lambda a: [Like((a["len_q"], a["len_k"]), np.int64)]),
        Call(positions.t5_bias, {"table": d.floats(d.size(4), d.size()), **pair, **more},
             lambda a: [Like((np.shape(a["table"])[1], a["len_q"], a["len_k"]), native(a["table"]))]),
    )  # fmt: skip


SCALINGS = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "ntk", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "original_max_position_embeddings": 16, "factor": 4.0, "beta_fast": 32.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
     "original_max_position_embeddings": 16, "factor": 4.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
)  # fmt: skip


@recipe
def frequencies(d):
    scaling = d.choose(*SCALINGS)
    more = d.some(0.6, base=lambda: 100.0, max_position_embeddings=lambda: 64, seq_len=lambda: d.size(1, 100))
    more |= d.some(0.8, scaling=lambda: scaling)
    return Call(positions.rope_frequencies, {"rotary_dim": d.choose(8, 8, 2 * d.size()), **more})


@recipe
def tables(d):
    arguments = {
        "positions": d.integers(0, 99, *d.batch(), d.length()),
        "frequencies": positions.rope_frequencies(2 * d.size()),
        **d.some(0.4, dtype=lambda: d.choose(d.dtype, "float32", np.float64)),
    }
    return Call(positions.rope_tables, arguments)


@recipe
def apply_rope(d):
    batch, length, half = d.batch(), d.length(), d.size()
    x = d.floats(*batch, d.size(1, 3), length, 2 * half + d.size(0, 3))
    cos, sin = positions.rope_tables(
        d.integers(0, 99, *d.broadcast(*batch), length), positions.rope_frequencies(2 * half)
    )
    more = d.some(0.3, interleaved=lambda: True, out=lambda: np.empty(x.shape, d.dtype))
    arguments = {"x": x, "cos": d.laid_out(cos), "sin": d.laid_out(sin), **more}
    return Call(positions.apply_rope, arguments, same("x"))


@recipe
def settings(d):
    """Settings of the process, and now and then pictures, which take long."""

    def set_num_threads(num_threads):
        before = fastattn.get_num_threads()
        try:
            fastattn.set_num_threads(num_threads)
        finally:
            fastattn.set_num_threads(before)

    if d.chance(0.7):
        return Call(set_num_threads, {"num_threads": d.size()})
    if d.chance(0.7):
        return Call(lambda: repr(fastattn.show_config()), {}, names=("show_config",), abused=True)
    return d.choose(
        Call(drawn(plot.attention_map), {"weights": d.floats(d.size(), 4), "tokens": list("abcd")}),
        Call(drawn(plot.entropy), {"entropies": abs(d.rng.standard_normal((2, 5)))}),
        Call(drawn(plot.mask), {"mask": masks.causal(), "len_q": d.size(), **d.some(0.5, len_k=d.size)}),
    )


def drawn(function):
    """A function of `plot` whose picture is closed at once."""

    @wraps(function)
    def draw(*args, **options):
        from matplotlib import pyplot

        try:
            function(*args, **options)
        finally:
            pyplot.close("all")

    return draw
