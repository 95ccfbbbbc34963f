"""flex_attention with a function of the scores, against the definition with an equal bias."""

import numpy as np
import pytest
from oracle import check, expect

import fastattn
from fastattn import functional, masks
from fastattn._bench.cases import DTYPES, Shape, make_inputs
from fastattn.grad import vjp

SHAPE = Shape("", 2, 6, 2, 70, 1100, 24, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_a_bias(dtype):
    rng = np.random.default_rng(0)
    q, k, v = make_inputs(SHAPE, dtype, rng)
    i, j = np.arange(70)[:, None] + 1030, np.arange(1100)
    b, h = np.arange(2)[:, None, None, None], np.arange(6)[:, None, None]
    bias = (np.sin(i + 3 * h) * np.cos(j) * (1 + b)).astype(np.promote_types(np.float32, q.dtype))
    bias[..., 100:130] = -np.inf

    def score_mod(scores, b, h, i, j):
        return np.where((j >= 100) & (j < 130), -np.inf, scores + (np.sin(i + 3 * h) * np.cos(j) * (1 + b)))

    mask = masks.window(900) | masks.first_keys(3)
    got = functional.flex_attention(q, k, v, score_mod=score_mod, mask=mask, scale=0.3, return_lse=True)
    check(got, expect(q, k, v, bias=bias, mask=mask, scale=0.3))


def test_what_it_hides_never_shows():
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(1))
    v[:, :, :40] = np.nan
    out = functional.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: np.where(j < 40, -np.inf, s))
    np.testing.assert_allclose(out, fastattn.attention(q, k[:, :, 40:], v[:, :, 40:]), atol=1e-6)
    out = functional.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: -np.inf)
    assert (out == 0).all()


def test_without_a_function(implementation):
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(2))
    out = functional.flex_attention(q, k, v, mask=masks.causal(), q_offset=4)
    np.testing.assert_array_equal(out, fastattn.attention(q, k, v, causal=True, q_offset=4))


def test_positions_of_each_sequence():
    q = np.ones((2, 3, 5, 4))
    seen = []
    functional.flex_attention(
        q, q, q, q_offset=[3, 7], score_mod=lambda s, b, h, i, j: seen.append((b, h.ravel(), i.ravel())) or s
    )
    assert [b for b, _, _ in seen] == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal([h for _, h, _ in seen], [[0], [1], [2]] * 2)
    np.testing.assert_array_equal(seen[0][2], 3 + np.arange(5))
    np.testing.assert_array_equal(seen[3][2], 7 + np.arange(5))


def test_errors():
    q = np.ones((2, 5, 4))
    with pytest.raises(TypeError, match=r"flex_attention\(\): score_mod is of type int"):
        functional.flex_attention(q, q, q, score_mod=3)
    with pytest.raises(TypeError, match=r"flex_attention\(\): mask has dtype"):
        functional.flex_attention(q, q, q, mask=np.ones((5, 5)))
    assert functional.flex_attention(q[:, :0], q, q, score_mod=lambda s, *_: s).shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (None, TypeError, "is None"),
        (1j, TypeError, "has dtype complex128"),
        (True, TypeError, "has dtype bool"),
        (np.ones(7), ValueError, r"has shape \(7,\)"),
        (np.ones((1, 1, 1, 5)), ValueError, r"has shape \(1, 1, 1, 5\)"),
    ],
)
def test_what_the_function_returns_is_checked(found, error, message):
    q = np.ones((2, 5, 4))
    with pytest.raises(error, match=r"^flex_attention\(\): what score_mod returns " + message):
        functional.flex_attention(q, q, q, score_mod=lambda *_: found)


def capped(scores, b, h, i, j):
    """Neither linear nor the same for all heads; hides some keys."""
    return np.where((i + j) % 5 == 3, -np.inf, (2 + h) * np.tanh(scores / (2 + h)) + 0.1 * b * (i - j))


def of_capped(dscores, scores, b, h, i, j):
    return dscores * (1 - np.tanh(scores / (2 + h)) ** 2)


@pytest.mark.parametrize("mask", [None, masks.window(30)], ids=str)
def test_gradients_are_finite_differences(mask, monkeypatch):
    monkeypatch.setattr("fastattn._reference.attention._BLOCK_ROWS", 32)  # several blocks each way
    monkeypatch.setattr("fastattn._reference.attention.TILE_SCORES", 1)
    q, k, v = make_inputs(Shape("", 2, 4, 2, 40, 60, 8, 5), "float64", np.random.default_rng(3))
    options = {"score_mod": capped, "mask": mask, "q_offset": [3, 7]}
    given = {"q": q, "k": k, "v": v, "scale": 0.4}
    out, lse = functional.flex_attention(**given, **options, return_lse=True)
    rng = np.random.default_rng(4)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    need = ("dscale", "dv", "dq", "dk")
    more = {"score_mod_backward": of_capped, "return_lse": True}
    _, pullback = vjp(functional.flex_attention, **given, **options, **more)
    got = pullback(dout, dlse, need=need)
    for name, gradient in zip(need, got, strict=True):
        step = 1e-6 * rng.standard_normal(np.shape(gradient))
        ends = []
        for sign in (1, -1):
            moved = {**given, name[1:]: given[name[1:]] + sign * step}
            moved["scale"] = float(moved["scale"])
            ends.append(functional.flex_attention(**moved, **options, return_lse=True))
        slope = sum((a * (x - y)).sum() for a, x, y in zip((dout, dlse), *ends, strict=True)) / 2
        np.testing.assert_allclose((gradient * step).sum(), slope, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_against_a_bias(dtype):
    """The gradient of what score_mod reads is summed up by the caller's function."""
    q, k, v = make_inputs(Shape("", 2, 6, 2, 70, 300, 24, 9), dtype, np.random.default_rng(5))
    table = np.random.default_rng(6).standard_normal((6, 7)).astype(np.promote_types(np.float32, q.dtype))
    bucket = np.minimum(abs(np.arange(70)[:, None] + 230 - np.arange(300)) // 40, 6)
    dtable = np.zeros((6, 7))

    def score_mod(scores, b, h, i, j):
        return scores + table[h, np.minimum(abs(i - j) // 40, 6)]

    def score_mod_backward(dscores, scores, b, h, i, j):
        np.add.at(dtable, np.broadcast_arrays(h, np.minimum(abs(i - j) // 40, 6)), dscores)
        return dscores

    bias = table[np.arange(6)[:, None, None], bucket]
    out, lse = fastattn.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    dout = make_inputs(Shape("", 2, 6, 2, 70, 300, 9, 9), dtype, np.random.default_rng(7))[0]
    *expected, dbias = functional.attention_backward(
        dout, q, k, v, out, lse, bias=bias, causal=True, need=("dq", "dk", "dv", "dbias")
    )
    how = {"score_mod": score_mod, "score_mod_backward": score_mod_backward}
    got = vjp(functional.flex_attention, q, k, v, mask=masks.causal(), **how)[1](dout)
    of_table = np.zeros((6, 7))
    np.add.at(of_table, (np.arange(6)[:, None, None], bucket), dbias)
    bound = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for x, y in zip((*got, dtable), (*expected, of_table), strict=True):
        assert abs(x.astype(float) - y.astype(float)).max() < bound * abs(y.astype(float)).max()


def test_gradients_without_a_function(implementation):
    q, k, v = make_inputs(SHAPE, "float32", np.random.default_rng(2))
    options = {"mask": masks.causal(), "q_offset": 4, "return_lse": True}
    (out, lse), pullback = vjp(functional.flex_attention, q, k, v, **options)
    got = pullback(out)
    expected = functional.attention_backward(out, q, k, v, out, lse, causal=True, q_offset=4)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_the_functions_hide_never_shows_in_gradients():
    def score_mod(scores, b, h, i, j):
        return np.where((j % 3 == 1) | (i == 1033), -np.inf, scores)

    def run(q, k, v, dout):
        how = {"score_mod": score_mod, "score_mod_backward": lambda ds, s, *_: np.where(ds == 0, np.nan, ds)}
        _, pullback = vjp(functional.flex_attention, q, k, v, **how)
        return pullback(dout, need=("dq", "dk", "dv", "dscale"))

    clean = [*make_inputs(SHAPE, "float32", np.random.default_rng(1))]
    clean.append(np.ones((*clean[0].shape[:-1], clean[2].shape[-1]), np.float32))
    dirty = [x.copy() for x in clean]
    for x in dirty[1:3]:
        x[:, :, 1::3] = np.nan
    for x in (dirty[0], dirty[3]):
        x[:, :, 3] = np.nan  # the query at 1033
    for x, y in zip(run(*clean), run(*dirty), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)


def test_errors_of_gradients():
    q = np.ones((2, 5, 4))

    def run(need=("dq",), **options):
        return vjp(functional.flex_attention, q, q, q, **options)[1](q, need=need)

    name = r"^flex_attention\(\): "
    with pytest.raises(ValueError, match=name + "score_mod_backward is None, but score_mod is given"):
        vjp(functional.flex_attention, q, q, q, score_mod=lambda *_: pytest.fail("it is called"))
    with pytest.raises(ValueError, match=name + "score_mod_backward is given, but score_mod is None"):
        run(score_mod_backward=of_capped)
    with pytest.raises(TypeError, match=name + "score_mod_backward is of type int"):
        run(score_mod=capped, score_mod_backward=3)
    with pytest.raises(ValueError, match=r"what score_mod_backward returns has shape \(7,\)"):
        run(score_mod=lambda s, *_: s, score_mod_backward=lambda *_: np.ones(7))
    with pytest.raises(TypeError, match="what score_mod returns is None"):
        run(score_mod=lambda *_: None, score_mod_backward=of_capped)
    with pytest.raises(ValueError, match="need has 'dbias'; expected dq, dk, dv, dscale"):
        run(need=("dbias",))
    none = vjp(functional.flex_attention, q[:, :0], q, q)[1](q[:, :0])
    assert [x.shape for x in none] == [(2, 0, 4), q.shape, q.shape]
