"""Calls of attention with their gradients, and the bound on these."""

import gradients
import numpy as np
from oracle import assert_close, eps, with_array

import fastattn
from fastattn._reference import philox
from fastattn.functional import attention_backward

OPTIONAL = {
    "bias": ("dbias", "dbias_diagonals"),
    "sinks": ("dsinks",),
    "alibi_slopes": ("dalibi_slopes",),
    "softcap": ("dsoftcap",),
}


def needed(arguments):
    """All gradients that a call can have."""
    return ["dq", "dk", "dv", *(x for name in arguments for x in OPTIONAL.get(name, ())), "dscale"]


def cotangents(q, v, rng):
    """dout and dlse, of any sign."""
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return dout, rng.standard_normal(q.shape[:-1]).astype(np.float64 if q.dtype == np.float64 else np.float32)


def run(q, k, v, dout, dlse, arguments, need=None, **more):
    """The gradients by name, after a forward pass."""
    need = needed(arguments) if need is None else need
    out, lse = fastattn.attention(q, k, v, **arguments, return_lse=True)
    found = attention_backward(dout, q, k, v, out, lse, dlse=dlse, need=need, **arguments, **more)
    return dict(zip(need, found, strict=True))


def check(got, q, k, v, dout, dlse, arguments, telling=True, more=0.0):
    """max|got - ref| <= 2 max|plain - ref| + (4 eps + more) max(sum of magnitudes), for each gradient."""
    arguments = dict(with_array(arguments, q, k))
    if "dropout" in arguments:
        share, seed = arguments.pop("dropout"), arguments.pop("seed")
        heads = np.arange(q.shape[0] * q.shape[1]).reshape(*q.shape[:2], 1)
        kept = philox.kept(share, seed, heads, np.arange(q.shape[2]), slice(0, k.shape[2]))
        arguments["keep"] = kept / (1 - share)
    wider = np.longdouble if q.dtype == np.float64 else np.float64
    expected, sizes = gradients.attention(dout, q, k, v, dlse=dlse, dtype=wider, **arguments)
    plain, _ = gradients.attention(dout, q, k, v, dlse=dlse, dtype=q.dtype, **arguments)
    assert_gradients(got, expected, plain, sizes, q.dtype, more, telling / 2)


def assert_gradients(got, expected, plain, sizes, dtype, more=0.0, nonzero=0.0):
    """Gradients keep the bound; so large a part of the expected ones is `nonzero`, and above the bound."""
    for name, x in got.items():
        ref = np.asarray(expected[name])
        error = abs(np.asarray(plain[name]).astype(ref.dtype) - ref)
        error = error[np.isfinite(error)].max(initial=0)
        tolerance = 2 * error + (4 * eps(dtype) + more) * np.max(sizes[name], initial=0)
        if isinstance(x, np.ndarray) and x.dtype.itemsize < dtype.itemsize:  # of a bias in float32, say
            tolerance += eps(x.dtype) * abs(ref).max(initial=0)
        if nonzero and ref.ndim > 2:
            assert np.count_nonzero(ref) >= ref.size * nonzero, f"{name} is mostly zeros"
            assert tolerance < abs(ref).max() / 2, f"the bound of {name} is as wide as its values"
        try:
            assert_close(x, ref, np.broadcast_to(tolerance, ref.shape))
        except AssertionError as wrong:
            raise AssertionError(f"{name}: {wrong}") from None
