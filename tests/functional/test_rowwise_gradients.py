"""Gradients of the variants with other normalisers or scores, on every implementation."""

import numpy as np
import pytest
from backward_oracle import OPTIONAL, assert_gradients
from oracle import assert_same_bits, poison, with_array
from rowwise_gradients import gradients
from rowwise_oracle import OPTIONS, inputs, lane, wider

from fastattn import functional
from fastattn._bench.cases import DTYPES, STRUCTURES, Shape, as_dtype
from fastattn.grad import vjp

KINDS = ["sparsemax", "entmax15", "top_k", "additive", "talking_heads", "sigmoid"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def own(kind, q, dtype=np.float32):
    """Draw the arguments that a kind takes beside q, k and v."""
    rng = np.random.default_rng(7)
    heads, dim = q.shape[-3], q.shape[-1]
    if kind == "additive":
        return {"weight": rng.standard_normal((heads, dim)).astype(dtype)}
    if kind == "talking_heads":
        pre, post = (rng.standard_normal((2, heads, heads)) / heads**0.5).astype(dtype)
        return {"pre": pre, "post": post}
    return {"top_k": 7} if kind == "top_k" else {}


def needed(kind, arguments):
    """All gradients that a call can have."""
    names = ["dq", "dk", "dv", *(x for name in arguments for x in OPTIONAL.get(name, ()))]
    return [*names, "dweight"] if kind == "additive" else [*names, "dscale"]


def run(kind, dout, q, k, v, arguments, need=None, more=None, **how):
    """The gradients by name."""
    more = own(kind, q) if more is None else more
    if need is None:
        need = [*needed(kind, arguments), *(f"d{name}" for name in ("pre", "post") if name in more)]
    function = getattr(functional, f"{kind}_attention")
    _, pullback = vjp(function, q, k, v, **more, **arguments, **how)
    return dict(zip(need, pullback(dout, need=need), strict=True))


def hold(kind, q, k, v, arguments, got=None, telling=False, more=None, dout=None):
    """max|got - ref| <= 2 max|plain - ref| + 4 eps max(sum of magnitudes), for each gradient."""
    more = own(kind, q) if more is None else more
    dout = cotangent(q, v) if dout is None else dout
    got = run(kind, dout, q, k, v, arguments, more=more) if got is None else got
    arguments = with_array(arguments, q, k)
    ref, sizes = gradients(kind, dout, q, k, v, wider(q.dtype), **more, **arguments)
    plain, _ = gradients(kind, dout, q, k, v, lane(q.dtype), **more, **arguments)
    assert_gradients(got, ref, plain, sizes, q.dtype, nonzero=telling / 4)


def cotangent(q, v, seed=3):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)


def spread(kind):
    return 1 if kind in ("additive", "sigmoid") else 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OPTIONS)
@every_kind
def test_options(kind, variant, dtype, implementation):
    q, k, v, arguments = inputs(as_dtype(dtype), variant, spread=spread(kind))
    hold(kind, q, k, v, arguments, telling=variant == "plain" and dtype != "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [(1, 1), (1, 70), (3, 5), (16, 64), (17, 63), (33, 65), (70, 129)], ids=str)
@every_kind
def test_sizes(kind, size, dtype, implementation):
    for dims in ((1, 1), (33, 17)):
        q, k, v, _ = inputs(
            dtype, len_q=size[0], len_k=size[1], dims=dims, batch=1, seed=1, spread=spread(kind)
        )
        hold(kind, q, k, v, {})
        hold(kind, q, k, v, {"causal": True, "softcap": 2.0})


@pytest.mark.parametrize("name", ["streaming", "mixed_documents", "block_sparse", "dilated"])
@every_kind
def test_structural_masks(kind, name, implementation):
    q, k, v, _ = inputs("float32", len_q=150, spread=spread(kind))
    mask = STRUCTURES[name](Shape("", 2, 4, 2, 150, 150, 24, 20), np.random.default_rng(3))
    hold(kind, q, k, v, {"mask": mask})


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "q_offset": 0, "softcap": 2.0}], ids=["plain", "softcap"]
)
@every_kind
def test_finite_differences(kind, options, implementation):
    """Each gradient is the slope of the scalar sum(dout * result)."""
    q, k, v, _ = inputs("float64", len_q=7, len_k=9, dims=(5, 3), spread=2)
    rng = np.random.default_rng(0)
    bias, slopes = rng.standard_normal((4, 7, 9)), np.array([0.1, 0.2, 0.3, 0.4])
    more = own(kind, q, float)
    given = {"q": q, "k": k, "v": v, **more, **({"bias": bias, "alibi_slopes": slopes} if options else {})}
    dout = cotangent(q, v)
    top_k = given.pop("top_k", None)
    fixed = {**options, **({} if top_k is None else {"top_k": 3})}
    need = [f"d{name}" for name in given]
    function = getattr(functional, f"{kind}_attention")
    got = dict(zip(need, vjp(function, **given, **fixed)[1](dout, need=need), strict=True))
    for name, x in given.items():
        step = 1e-6 * rng.standard_normal(np.shape(x))
        slope = sum(
            sign * (dout * function(**{**given, name: x + sign * step}, **fixed)).sum() for sign in (1, -1)
        )
        np.testing.assert_allclose(
            2 * (got[f"d{name}"] * step).sum(), slope, rtol=1e-5, atol=1e-14, err_msg=name
        )


@every_kind
def test_matrices_in_part(kind, implementation):
    """One of both matrices; one weight for all heads."""
    q, k, v, _ = inputs("float32", spread=spread(kind))
    more = own(kind, q)
    if kind == "talking_heads":
        for name in more:
            hold(kind, q, k, v, {}, more={name: more[name]})
        hold(kind, q, k, v, {}, more={})
    if kind == "additive":
        hold(kind, q, k, v, {"scale": 0.5}, more={"weight": more["weight"][:1]})
        for size in (1e-3, 30):  # tangents as small as their arguments, and of 1
            hold(kind, q * np.float32(size), k * np.float32(size), v, {})


BIASES = [(4, 1, 150), (1, 1, 150), (4, 37, 1), (1, 37, 150), (2, 1, 37, 150), (2, 4, 37, 150)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
@every_kind
def test_broadcast_biases_have_summed_gradients(kind, shape, implementation):
    q, k, v, _ = inputs("float32", spread=spread(kind))
    bias = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    hold(kind, q, k, v, {"bias": bias})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_kind
def test_broadcast_inputs_have_summed_gradients(kind, dtype, implementation):
    q, k, v, _ = inputs(as_dtype(dtype), spread=spread(kind))
    dout, need = cotangent(q, v), ["dq", "dk", "dv"]
    wide = run(kind, dout, q, *(np.broadcast_to(x[:1], x.shape) for x in (k, v)), {}, need)
    got = run(kind, dout, q, k[0], v[:1], {}, need)
    assert_same_bits([got["dq"]], [wide["dq"]])
    for name, x in (("dk", k[0]), ("dv", v[:1])):
        assert got[name].shape == x.shape
        total = wide[name].astype(float).sum(0).reshape(x.shape)
        np.testing.assert_allclose(got[name].astype(float), total, rtol=2e-2, atol=2e-2 * abs(total).max())


@every_kind
def test_what_masks_hide_never_shows(kind, implementation):
    """Garbage in keys that nobody attends, and in the rows of q and dout that attend nothing."""
    rng = np.random.default_rng(5)
    q, k, v, _ = inputs("float32", spread=spread(kind))
    dout, mask = cotangent(q, v), rng.random((37, 150)) < 0.7
    hidden = rng.random(150) < 0.3
    mask[:, hidden], mask[5:9] = False, False
    for options in ({}, {"softcap": 2.0}):
        ref = run(kind, dout, q, k, v, {"mask": mask, **options})
        dirty = [x.copy() for x in (dout, q, k, v)]
        for x in dirty[2:]:
            poison(x, hidden, rng)
        for x in dirty[:2]:
            poison(x, np.isin(np.arange(37), range(5, 9)), rng)
        got = run(kind, *dirty, {"mask": mask, **options})
        # Additive scores of a tile are computed in a way that depends on its largest query, attending or not.
        same = np.testing.assert_allclose if kind == "additive" else np.testing.assert_array_equal
        loose = {"rtol": 1e-4, "atol": 1e-4} if kind == "additive" else {}
        for x, y in zip(got.values(), ref.values(), strict=True):
            same(x, y, **loose)
        assert all((got[name][..., hidden, :] == 0).all() for name in ("dk", "dv"))
        assert (got["dq"][..., 5:9, :] == 0).all()


def test_a_head_that_attends_nothing_has_no_part_in_the_mixing(implementation):
    """NaN in its keys reaches the heads that mix its scores, but no gradient of its own scores."""
    q, k, v, _ = inputs("float32", heads=(2, 2))
    mask = np.ones((2, 1, 150), bool)
    mask[0] = False
    k[:, 0], v[:, 0] = np.nan, np.nan
    got = run("talking_heads", cotangent(q, v), q, k, v, {"mask": mask}, ["dpre", "dpost"])
    assert (got["dpre"][:, 0] == 0).all()
    assert (got["dpost"][0] == 0).all()
    assert np.isnan(got["dpre"][:, 1]).all()


@pytest.mark.parametrize("kind", ["sparsemax", "entmax15", "top_k"])
def test_what_has_no_probability_never_shows(kind, implementation):
    q, k, v, _ = inputs("float32", len_q=1, heads=(2, 2))
    dout = cotangent(q, v)
    ref = run(kind, dout, q, k, v, {}, ["dq", "dk", "dv"])
    unused = (ref["dv"] == 0).all(-1)
    assert 0 < unused.mean() < 1
    v[unused] = np.nan
    assert_same_bits(run(kind, dout, q, k, v, {}, ["dq", "dk", "dv"]).values(), ref.values())


@every_kind
def test_nan_stays_in_its_rows(kind, implementation):
    """NaN in a row of q or dout reaches the keys that it attends, and no other row."""
    q, k, v, _ = inputs("float32", spread=spread(kind))
    dout, need = cotangent(q, v), ["dq", "dk", "dv"]
    more = {} if kind == "talking_heads" else None
    ref = run(kind, dout, q, k, v, {"causal": True}, need, more)
    for i, name in enumerate(("dout", "q")):
        dirty = [x.copy() for x in (dout, q)]
        dirty[i][:, 1, 3] = np.nan  # query 3 stands at key 116
        got = run(kind, *dirty, k, v, {"causal": True}, need, more)
        assert np.isnan(got["dq"][:, 1, 3]).all(), name
        # Rows of a tile share the blocks of keys that are left, so that they may be summed otherwise.
        np.testing.assert_allclose(np.delete(got["dq"], 3, -2), np.delete(ref["dq"], 3, -2), atol=1e-5)
        np.testing.assert_array_equal(got["dq"][:, 2:], ref["dq"][:, 2:])
        assert np.isnan(got["dk"][:, 0]).any(), name
        np.testing.assert_allclose(got["dk"][:, 0, 117:], ref["dk"][:, 0, 117:], atol=1e-5)
        np.testing.assert_array_equal(got["dv"][:, 1], ref["dv"][:, 1])


@every_kind
def test_same_bits(kind, implementation):
    """Bits are equal for any number of threads, whatever else is in the batch, and in any layout."""
    q, k, v, _ = inputs("float32", len_q=150, heads=(6, 3), batch=3, spread=spread(kind))
    bias = np.random.default_rng(2).standard_normal((6, 150, 150)).astype(np.float32)
    dout, arguments = cotangent(q, v), {"causal": True, "bias": bias, "softcap": 3.0}
    one = run(kind, dout, q, k, v, arguments, num_threads=1)
    for threads in (2, 5):
        other = run(kind, dout, q, k, v, arguments, num_threads=threads)
        assert_same_bits(map(np.asarray, other.values()), map(np.asarray, one.values()))
    need = ["dq", "dk", "dv"]
    one = run(kind, dout, q, k, v, arguments, need)
    alone = run(kind, dout[1:2], q[1:2], k[1:2], v[1:2], arguments, need)
    assert_same_bits(alone.values(), [one[name][1:2] for name in need])
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (dout, q, k, v)]
    assert_same_bits(run(kind, *turned, arguments, need).values(), [one[name] for name in need])


@every_kind
def test_nothing_to_attend(kind, implementation):
    q, k, v, _ = inputs("float32", spread=spread(kind))
    dout = cotangent(q, v)
    hold(kind, q, k, v, {"kv_lengths": [0, 150]})
    for arrays in ((dout, q, k[:, :, :0], v[:, :, :0]), (dout[:, :, :0], q[:, :, :0], k, v)):
        got = run(kind, *arrays, {"softcap": 2.0})
        assert [np.count_nonzero(x) for x in got.values()] == [0] * len(got)
    one = run(kind, dout[0, 0], q[0, 0], k[0, 0], v[0, 0], {}, ["dk", "dq"], more=own(kind, q[:, :1]))
    assert [x.shape for x in one.values()] == [(150, 24), (37, 24)]


def test_errors():
    q = np.ones((2, 5, 4), np.float32)
    for kind in KINDS:
        function, more = getattr(functional, f"{kind}_attention"), own(kind, q)
        name = rf"^pullback of {kind}_attention\(\): "
        for changes, error, message in [
            ({"dout": q[0]}, ValueError, r"dout has shape \(5, 4\); expected \(2, 5, 4\)"),
            ({"dout": q.astype(float)}, TypeError, "dout has dtype float64; expected float32, as the result"),
            ({"dmore": q}, ValueError, "dmore is given; expected None, since there is one result"),
            ({"need": "dq"}, TypeError, "need is 'dq'; expected a tuple of names"),
            ({"need": ("dsinks",)}, ValueError, "need has 'dsinks'; expected dq, dk, dv"),
            ({"need": ("dbias",)}, ValueError, "need has dbias, but bias is not given"),
        ]:
            _, pullback = vjp(function, q, q, q, **more)
            with pytest.raises(error, match=name + message):
                pullback(**{"dout": q, **changes})
        with pytest.raises(TypeError, match=rf"^{kind}_attention\(\): sinks is not an argument"):
            vjp(function, q, q, q, **more, sinks=1)
        with pytest.raises(ValueError, match=r"^vjp\(\): out is given; expected None"):
            vjp(function, q, q, q, **more, out=q)
    _, pullback = vjp(functional.additive_attention, q, q, q, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="need has 'dscale'; expected"):
        pullback(q, need=("dscale",))
    _, pullback = vjp(functional.talking_heads_attention, q, q, q)
    with pytest.raises(ValueError, match="need has dpre, but pre is not given"):
        pullback(q, need=("dpre",))
