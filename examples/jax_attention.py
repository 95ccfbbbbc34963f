"""fastattn.attention as a function of JAX: it runs in jit, grad, vmap and checkpoint.

JAX calls back into Python while its program runs (`jax.pure_callback`), and learns the gradient from
`jax.custom_vjp`. Arrays are (..., heads, length, head_dim), as everywhere here. Copy this file and add the
options that you need: each is one more argument that is not differentiated.

    pip install jax
    python examples/jax_attention.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fastattn
from fastattn.functional import attention_backward


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(q, k, v, causal=False, scale=None):
    """q is (..., heads_q, len_q, head_dim), k and v have as many heads, or a divisor."""
    return _forward(q, k, v, causal, scale)[0]


def _forward(q, k, v, causal, scale):
    """The result, and what its gradient needs."""
    # What does not fit raises here, while JAX traces: in a callback, JAX would hide the error in its own.
    fastattn.explain(*(np.empty(x.shape, x.dtype) for x in (q, k, v)), causal=causal, scale=scale)

    def call(q, k, v):  # NumPy alone: what calls JAX in here may wait for the threads that wait for it
        q, k, v = map(np.asarray, (q, k, v))
        return fastattn.attention(q, k, v, causal=causal, scale=scale, return_lse=True)

    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:-1], jnp.promote_types(q.dtype, jnp.float32))
    # vmap adds a leading axis, which is one more axis of the batch.
    out, lse = jax.pure_callback(call, (out, lse), q, k, v, vmap_method="broadcast_all")
    return out, (q, k, v, out, lse)


def _backward(causal, scale, kept, dout):
    def call(*arrays):
        return attention_backward(*map(np.asarray, arrays), causal=causal, scale=scale)

    grads = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept[:3])
    return jax.pure_callback(call, grads, dout, *kept, vmap_method="broadcast_all")


attention.defvjp(_forward, _backward)


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 8, 300, 64)) for key in keys)

    @jax.jit
    def loss(q, k, v):
        return jnp.square(attention(q, k, v, True)).sum()

    value, (dq, dk, dv) = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    print(f"loss {value:.3f}, gradients {dq.shape}, {dk.shape}, {dv.shape}")


if __name__ == "__main__":
    main()
