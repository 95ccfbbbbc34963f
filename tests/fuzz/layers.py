"""Recipes for layers: as they are made, and after their fields, parts and arrays were changed."""

import copy
import pickle
from contextlib import suppress

import numpy as np
from judge import Like, arrays_in, described
from packed import false, tamper
from recipes import RECIPES, Call, native, recipe

from fastattn import layers, positions
from fastattn._args.packed import PackedLinear
from fastattn._args.types import lane_dtype
from fastattn._args.weight_types import WEIGHT_DTYPES
from fastattn.layers._attention_parameters import StackedMaps
from fastattn.layers._basic import ACTIVATIONS

OPERATIONS = (
    "linear",
    "layer_norm",
    "rms_norm",
    "apply_rope",
    "attention_weights",
    "PackedLinear",
    "KVCache.append",
)
NAMES = (*layers.__all__, *OPERATIONS)
TOLERANCE = (
    30.0  # of several operations on weights in 8 or 4 bits, or in bfloat16 that some kernels multiply as such
)


def made_of(d, cls):
    """Draw how a layer's weights are stored and multiplied, and the generator that draws them."""
    narrow = ("bfloat16", "int8", "int4", "uint4", "nf4")
    dtype = "float64" if d.dtype == np.float64 else d.choose("float32", "float32", *narrow)
    made = {"weights_dtype": dtype, "rng": np.random.default_rng(5)}
    if dtype in narrow[1:] and "activations" in cls.__dataclass_fields__ and d.chance(0.5):
        made["activations"] = "int8"
    return made


def heads(d, head_dim):
    """Options of attention in a layer."""
    return d.some(
        d.choose(0.0, 0.0, 0.2), num_kv_heads=lambda: 1, qk_norm=lambda: True, output_gate=lambda: True,
        sinks=lambda: True, window=lambda: (d.size(0, 3), 0), softcap=lambda: 5.0, scale=lambda: 0.3,
        add_bias_kv=lambda: True, add_zero_attn=lambda: True,
        rope=lambda: layers.Rope(positions.rope_frequencies(head_dim // 2 * 2), d.choose(True, False))
    )  # fmt: skip


def sizes(d):
    """d_model, nhead, head_dim; a whole number of panels is what the compiled programs are for."""
    nhead, head_dim = d.choose((1, 4), (2, 3), (2, 4), (1, 32), (2, 16), (4, 8), (2, 32))
    return nhead * head_dim, nhead, head_dim


def mha(d):
    width, nhead, head_dim = sizes(d)
    more = d.some(0.1, kdim=d.size, vdim=d.size, bias=lambda: False, head_dim=lambda: d.choose(head_dim, 4))
    options = heads(d, more.get("head_dim", head_dim))
    return layers.MultiHeadAttention, {"embed_dim": width, "num_heads": nhead, **options, **more}


def encoder_layer(d):
    width, nhead, head_dim = sizes(d)
    more = d.some(
        0.3, activation=lambda: d.choose(*ACTIVATIONS), norm_first=lambda: True, norm=lambda: "rms_norm",
        bias=lambda: False, attention=lambda: heads(d, head_dim), layer_norm_eps=lambda: 1e-3
    )  # fmt: skip
    return layers.TransformerEncoderLayer, {
        "d_model": width,
        "num_heads": nhead,
        "dim_feedforward": d.size(),
        **more,
    }


def decoder_layer(d):
    _, fields = encoder_layer(d)
    head_dim = fields["d_model"] // fields["num_heads"]
    return layers.TransformerDecoderLayer, {
        **fields,
        **d.some(0.2, cross_attention=lambda: heads(d, head_dim)),
    }


def transformer(d):
    _, fields = encoder_layer(d)
    return layers.Transformer, {**fields, "num_encoder_layers": 1, "num_decoder_layers": d.choose(1, 2)}


def delta_net(d):
    """A GatedDeltaNet, of one or several heads of values for each of keys."""
    groups = d.choose(1, 2, 3)
    sizes = {
        "head_dim": d.size(),
        "head_dim_v": d.size(),
        **d.some(0.3, kernel_size=lambda: d.choose(1, 2, 3, 8)),
    }
    heads = {"num_heads": groups * d.choose(1, 2, 3), "num_key_heads": groups}
    return layers.GatedDeltaNet, {"d_model": d.size(), **heads, **sizes}


def mamba2(d):
    """A Mamba2, of one or several heads in a group."""
    groups = d.choose(1, 2, 3)
    sizes = {"num_heads": groups * d.choose(1, 2, 3), "head_dim": d.size(), "state_size": d.size()}
    more = d.some(
        0.3, bias=lambda: True, conv_bias=lambda: False, kernel_size=lambda: d.choose(1, 2, 3, 8),
        dt_limits=lambda: (0.1, 0.9), eps=lambda: 1e-3
    )  # fmt: skip
    return layers.Mamba2, {"d_model": d.size(), **sizes, "num_groups": groups, **more}


HYBRIDS = {
    "GatedDeltaNet": delta_net,
    "Mamba2": mamba2,
    "KimiDeltaAttention": lambda d: (layers.KimiDeltaAttention, {
        "d_model": d.size(), "num_heads": d.choose(1, 2, 3), "head_dim": d.size()}),
    "Mamba": lambda d: (layers.Mamba, {"d_model": d.size(), **d.some(
        0.3, d_inner=d.size, state_size=d.size, dt_rank=d.size, bias=lambda: True, conv_bias=lambda: False)}),
    "ShortConvolution": lambda d: (layers.ShortConvolution, {"d_model": d.size(), **d.some(
        0.3, bias=lambda: True, kernel_size=lambda: d.choose(1, 2, 3, 8))}),
}  # fmt: skip
MAKERS = {
    **HYBRIDS,
    "Linear": lambda d: (layers.Linear, {"in_features": d.size(), "out_features": d.size(), **d.some(
        0.3, bias=lambda: False)}),
    "LayerNorm": lambda d: (layers.LayerNorm, {"features": d.size(), **d.some(
        0.3, eps=lambda: 1e-3, bias=lambda: False)}),
    "RMSNorm": lambda d: (layers.RMSNorm, {"features": d.size(), **d.some(0.3, eps=lambda: 1e-3)}),
    "FeedForward": lambda d: (layers.FeedForward, {"d_model": d.size(), "dim_feedforward": d.size(), **d.some(
        0.4, activation=lambda: d.choose(*ACTIVATIONS), bias=lambda: False)}),
    "MultiHeadAttention": mha,
    "TransformerEncoderLayer": encoder_layer,
    "TransformerDecoderLayer": decoder_layer,
    "Transformer": transformer,
}  # fmt: skip


def make(d, kind=None):
    """A layer with parameters, or a stack of layers."""
    often = ("MultiHeadAttention", "TransformerEncoderLayer") * 2
    kind = kind or d.choose(*MAKERS, *often, "TransformerEncoder", "TransformerDecoder")
    if kind in MAKERS:
        cls, fields = MAKERS[kind](d)
        return cls(**fields, **made_of(d, cls))
    cls, fields = (encoder_layer if kind == "TransformerEncoder" else decoder_layer)(d)
    how = made_of(d, cls)
    norm = layers.LayerNorm(fields["d_model"], weights_dtype=how["weights_dtype"]) if d.chance(0.5) else None
    # Some layers attend the keys of another, and have none of their own.
    sources, options = (
        d.choose([0], [0, 1], [0, 1], [0, 0], [0, 1, 0], [0, 0, 2]),
        fields.pop("attention", {}),
    )
    own = [cls(**fields, **how, attention={**options, "query_only": i != j}) for i, j in enumerate(sources)]
    return getattr(layers, kind)(own, norm, keys_from=sources)


def width(layer):
    """Features of a layer's input."""
    if isinstance(layer, (layers.TransformerEncoder, layers.TransformerDecoder)):
        layer = layer.layers[0]
    for name in ("in_features", "features", "embed_dim", "d_model"):
        if name in vars(layer):
            return getattr(layer, name)
    raise TypeError(layer)


def rows(d, layer, length, features=None):
    batch = d.choose((), (1,), (2,), (3,))
    return d.floats(*batch, length, features or width(layer)), batch


def inputs(d, layer):
    """Arguments of a call that is right."""
    length = d.choose(1, d.size(0, 6), d.size(0, 6))
    x, batch = rows(d, layer, length)
    kind = type(layer).__name__
    padding = {"key_padding_mask": lambda: d.rng.random((*batch, length)) < 0.3} if batch else {}
    dense = d.choose(
        d.rng.random((length, length)) < 0.3, d.floats(length, length, dtype=lane_dtype(d.dtype))
    )
    causal = lambda: True  # noqa: E731
    p = d.choose(0.0, 0.3)
    if kind in HYBRIDS:
        return {"x": x}
    if kind in ("Linear", "LayerNorm", "RMSNorm", "FeedForward"):
        residual = {"residual": lambda: d.floats(*np.shape(x))} if kind != "Linear" else {}
        return {"x": x, **d.some(p, **residual)}
    if kind == "MultiHeadAttention":
        flags = d.some(p, attn_mask=lambda: dense, is_causal=causal, need_weights=causal, **padding)
        if "need_weights" in flags:
            flags |= d.some(0.3, average_attn_weights=lambda: False)
        if layer.kdim or layer.vdim:
            flags = {}
            other = d.size(0, 6)
            flags["key"] = d.floats(*batch, other, layer.kdim or layer.embed_dim)
            flags["value"] = d.floats(*batch, other, layer.vdim or layer.embed_dim)
        return {"query": x, **flags}
    if kind == "Transformer":
        tgt = d.floats(*batch, d.size(0, 6), width(layer))
        return {"src": x, "tgt": tgt, **d.some(p, src_is_causal=causal, tgt_is_causal=causal)}
    if kind in ("TransformerEncoderLayer", "TransformerEncoder"):
        name = "src_mask" if kind.endswith("Layer") else "mask"
        flags = {name: lambda: dense, "is_causal": causal}
        if padding:
            flags["src_key_padding_mask"] = padding["key_padding_mask"]
        return {"src": x, **d.some(p, **flags)}
    flags = {"tgt_mask": lambda: dense, "tgt_is_causal": causal}
    memory = d.floats(*batch, d.size(0, 6), width(layer))
    return {"tgt": x, "memory": memory, **d.some(p, **flags)}


def result(layer, arguments):
    """The result of a call: x's shape, except for Linear."""
    x = arguments[next(name for name in ("x", "query", "tgt", "src") if name in arguments)]
    shape = np.shape(x)
    if isinstance(layer, layers.Linear):
        shape = (*shape[:-1], layer.packed_weight.out_features)
    found = [Like(shape, native(x))]
    if arguments.get("need_weights"):
        cache, heads = arguments.get("cache"), (layer.num_heads,)
        key = x if arguments.get("key") is None else arguments["key"]
        keys = np.shape(key)[-2] if cache is None else cache.length
        keys += layer.add_zero_attn + (layer.bias_k is not None)
        each = () if arguments.get("average_attn_weights", True) else heads
        found.append(Like((*shape[:-2], *each, shape[-2], keys), native(x)))
    return found


def change(d, layer):
    """Set a field of `layer` or of a part of it, if that can be, or load a part anew. Says what it did."""
    part = d.choose(*(x for _, x in layer._walk()))
    where = type(part).__name__
    if d.chance(0.2):
        dtype = d.choose(*WEIGHT_DTYPES)
        with suppress(ValueError):  # its activations do not fit such weights
            part.load_state_dict(part.state_dict(), weights_dtype=dtype)
        return f"{where}.load_state_dict(weights_dtype={dtype})"
    name = d.choose(*(name for name in vars(part) if not name.startswith("_")))
    after = other(d, getattr(part, name))
    try:
        setattr(part, name, after)
    except (AttributeError, TypeError, ValueError) as refused:
        return str(refused)
    return f"{where}.{name} = {described(after)}"


def abuse(d, layer):
    """Change an array that `layer` holds in place. Says what it did."""
    part = d.choose(*(x for _, x in layer._walk()))
    held = {name: x for name, x in vars(part).items() if arrays_in(x) and not isinstance(x, layers.Layer)}
    if not held:
        return ""
    name = d.choose(*held)
    array = d.choose(*arrays_in(held[name]))
    tamper(d, array, viewed=any(x.base is array for x in arrays_in(layer)))
    return f"{type(part).__name__}.{name} is now {described(held[name])}"


def changed(d, layer, p):
    """Change `layer` with probability `p`. Says what was done, and whether the layer could not see it."""
    if not d.chance(p):
        return [], False
    if d.chance(0.3):
        return [abuse(d, layer)], True
    return [change(d, layer) for _ in range(d.choose(1, 2))], False


def other(d, value):
    """A value to put in place of a field's."""
    if isinstance(value, layers.Layer):
        return make(d, d.choose(type(value).__name__, type(value).__name__, "LayerNorm", "FeedForward"))
    if isinstance(value, list) and all(isinstance(x, layers.Layer) for x in value):
        return d.choose(
            value * 2, value[:-1], [*value, make(d, type(value[0]).__name__)], tuple(value), value[0]
        )
    if isinstance(value, StackedMaps):
        name = d.choose(*value._fields)
        return value._replace(**{name: other(d, getattr(value, name))})
    if isinstance(value, PackedLinear):
        return false(d, value)
    if isinstance(value, np.ndarray) and d.chance(0.6):
        return d.choose(
            np.repeat(value, 2, axis=-1)[..., ::2], np.repeat(value, 2, axis=-1), value[..., :1], None
        )
    if isinstance(value, str) and d.chance(0.5):
        return d.choose(*WEIGHT_DTYPES, *ACTIVATIONS, "rms_norm")
    if value is None and d.chance(0.5):
        return d.choose(d.floats(4, dtype=np.float32), 1, True, layers.LayerNorm(4))
    return d.wrong(value)


@recipe
def layer(d):
    """A call of a layer, most often one that has been called and changed before."""
    it = make(d)
    arguments = inputs(d, it)
    if d.chance(0.5):
        it(**arguments)
    changes, abused = changed(d, it, 0.5)
    if d.chance(0.05) and not abused:
        it = d.choose(copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))(it)
    names = (type(it).__name__, *NAMES)
    return Call(it, arguments, lambda a: result(it, a), names, TOLERANCE, (it, changes), abused)


RECIPES += [layer] * 9


@recipe
def layer_made(d):
    """Build a layer, perhaps of values that do not fit, and call it."""
    cls, fields = MAKERS[d.choose(*MAKERS)](d)
    return Call(cls, {**fields, **made_of(d, cls)}, names=(cls.__name__, *NAMES))


@recipe
def layer_saved(d):
    """Load the state of a layer, perhaps of a changed one, into another."""
    it = make(d)
    other, state = copy.deepcopy(make(d) if d.chance(0.2) else it), {}
    changes, abused = changed(d, it, 0.3)
    if d.chance(0.3):
        return Call(it.state_dict, {}, names=NAMES, inside=(it, changes), abused=abused)
    with suppress(TypeError, ValueError, AttributeError, LookupError):
        state = it.state_dict()
    arguments = {
        "state_dict": state,
        **d.some(0.3, prefix=lambda: "", weights_dtype=lambda: d.choose(*WEIGHT_DTYPES)),
    }
    names = (f"{type(other).__name__}.load_state_dict", *NAMES)
    return Call(other.load_state_dict, arguments, None, names, 1.0, (other, changes), abused)


@recipe
def with_cache(d):
    """Give a layer token after token. Its cache is right, and the last token may be wrong."""
    kind = d.choose(
        "MultiHeadAttention", "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoder"
    )
    it = make(d, kind)
    batch, first = d.size(1, 3), "query" if kind == "MultiHeadAttention" else "tgt" if "De" in kind else "src"
    if kind.endswith("coder"):
        cache = it.new_cache(d.choose(0, 3))
    else:
        cache = layers.KVCache(d.choose(0, 3), d.choose(None, None, d.dtype))
    memory = {"memory": d.floats(batch, 3, width(it))} if "De" in kind else {}
    causal = {"is_causal": True} if not memory and d.chance(0.7) else {}
    if memory or (not getattr(it, "kdim", None) and not getattr(it, "vdim", None)):
        for _ in range(min(d.size(0, 3), 9)):  # all sizes at their largest would take NumPy half a minute
            tokens = min(d.size(1, 4), 33)
            it(**{first: d.floats(batch, tokens, width(it))}, cache=cache, **memory, **causal)
    arguments = {first: d.floats(batch, d.choose(1, 2, 5), width(it)), "cache": cache, **memory, **causal}
    n = np.shape(arguments[first])[1]
    arguments |= d.some(0.2, lengths=lambda: d.rng.integers(0, n + 1, batch))
    changes, abused = changed(d, it, 0.2)
    if isinstance(cache, list) and d.chance(0.1):
        cache[0], changes = d.wrong(cache[0]), [*changes, "another cache"]
    return Call(it, arguments, lambda a: result(it, a), (kind, *NAMES), TOLERANCE, (it, changes), abused)


@recipe
def with_state(d):
    """Give a layer of hybrid models token after token. The last call may be wrong."""
    kind = d.choose(*HYBRIDS)
    it, batch, state = make(d, kind), d.size(1, 3), layers.RecurrentState()
    for _ in range(d.size(0, 3)):
        it(d.floats(batch, d.size(1, 4), width(it)), state=state)
    arguments = {"x": d.floats(batch, d.choose(0, 1, 2, 5), width(it)), "state": state}
    changes, abused = changed(d, it, 0.2)
    return Call(it, arguments, lambda a: result(it, a), (kind, *NAMES), TOLERANCE, (it, changes), abused)


RECIPES += [with_cache] * 3


@recipe
def kv_cache(d):
    """Fill a cache by some appends, then call any of its methods."""
    batch, heads_kv, dim, dim_v = d.size(0, 3), d.size(1, 3), d.size(), d.size()
    cache = layers.KVCache(d.size(0), d.choose(None, None, "float16", d.dtype))

    def tokens():
        n = d.size(0, 5)
        new = {"k": d.floats(batch, heads_kv, n, dim), "v": d.floats(batch, heads_kv, n, dim_v)}
        return {**new, **d.some(0.3, lengths=lambda: d.rng.integers(0, n + 1, batch))}

    for _ in range(d.size(0, 4)):
        cache.append(**tokens())
    if d.chance(0.6):
        # Anything may stand after a sequence's last token.
        return Call(
            cache.append,
            tokens(),
            names=("KVCache.append",),
            inside=cache,
            tolerance=np.inf,
            same_bits=lambda a: False,
        )
    if d.chance(0.5):
        return Call(
            cache.truncate, {"length": int(d.rng.integers(cache.length + 1))}, names=("KVCache.truncate",)
        )
    return Call(cache.select, {"sequences": d.integers(0, batch, d.size(0, 4))}, names=("KVCache.select",))
