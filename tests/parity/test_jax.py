"""The recipe for JAX, beside JAX's own attention."""

import runpy
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax_attention
import numpy as np
import pytest

import fastattn
from fastattn._args.values import as_array

real = fastattn.attention
attention = jax_attention.attention


def operands(dtype=jnp.float32, heads_kv=2):
    shapes = (2, 4, 9, 16), (2, heads_kv, 9, 16), (2, heads_kv, 9, 16)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def jaxs(q, k, v, causal=False, scale=None):
    q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, scale=scale).swapaxes(-3, -2)


def close(x, y, dtype=jnp.float32):
    x, y = (np.asarray(array, np.float64) for array in (x, y))
    np.testing.assert_allclose(x, y, atol=8 * float(jnp.finfo(dtype).eps) * np.abs(y).max(), rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3)])
def test_results_and_gradients(causal, scale, dtype):
    inputs = operands(dtype)
    out = jax.jit(attention, static_argnums=(3, 4))(*inputs, causal, scale)
    assert out.dtype == dtype
    weights = jax.random.normal(jax.random.key(1), out.shape).astype(dtype)
    found = jax.jit(jax.grad(lambda *x: (attention(*x, causal, scale) * weights).sum(), (0, 1, 2)))(*inputs)
    with jax.enable_x64(True):
        *wide, weights = (jnp.asarray(np.asarray(x, np.float64)) for x in (*inputs, weights))
        result = jaxs(*wide, causal, scale)
        expected = jax.grad(lambda *x: (jaxs(*x, causal, scale) * weights).sum(), (0, 1, 2))(*wide)
    assert result.dtype == np.float64
    close(out, result, dtype)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype
        close(x, y, dtype)


def test_vmap_and_checkpoint():
    inputs = operands()

    def f(q, k, v):
        return jnp.square(attention(q, k, v, True)).sum()

    each = jax.vmap(jax.grad(jax.checkpoint(f)))(*inputs)
    close(each, jax.grad(f)(*inputs))
    shared = jax.vmap(lambda q: attention(q, *(x[0] for x in inputs[1:])))(inputs[0])
    close(shared[1], attention(inputs[0][1], *(x[0] for x in inputs[1:])))


def test_many_steps_that_are_not_waited_for():
    """JAX dispatches them at once, from two threads of Python; none waits for another for ever."""
    q, k, v = (jnp.ones((2, 4, 256, 64)) * (1 + jnp.arange(256)[:, None] / 256) for _ in range(3))

    @jax.jit
    def step(q):
        x = attention(jnp.tanh(attention(q, k, v, True)), k, v)
        return q - 0.1 * jax.grad(lambda q: (attention(q, k, v, True) * x).sum())(q)

    def steps(q):
        for _ in range(8):
            q = step(q)
        return q

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(steps, [q, q]))
    assert np.array_equal(found[0], found[1])
    assert np.isfinite(found[0]).all()


def test_errors_are_those_of_attention():
    q, k, v = operands()
    for call in (attention, jax.jit(attention)):
        with pytest.raises(TypeError, match=r"^explain\(\): q, k and v have dtypes float32, float32 and bfl"):
            call(q, k, v.astype(jnp.bfloat16))
        with pytest.raises(ValueError, match=r"^explain\(\): k has a head_dim of 8"):
            call(q, k[..., :8], v)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attention, (q, k, v), (q, k, v))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_memory_of_an_array_is_shared(dtype):
    x = operands(dtype)[0]
    array = as_array("q", x)
    assert array.__array_interface__["data"][0] == x.unsafe_buffer_pointer()
    assert np.array_equal(fastattn.attention(x, x, x), fastattn.attention(array, array, array))


def test_it_runs_as_a_script(capsys):
    runpy.run_path(jax_attention.__file__, run_name="__main__")
    assert "gradients (2, 8, 300, 64)" in capsys.readouterr().out
