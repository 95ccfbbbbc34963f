"""Attention over blocks: the bits of a fixed tree, the error of the contract, and what becomes no task."""

import functools

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from local_workers import tree
from oracle import assert_same_bits, check, expect

import fastattn
import fastattn.dask
from fastattn._bench.cases import DTYPES

RNG = np.random.default_rng(1)
Q_CHUNKS, KV_CHUNKS = (1, 2, 30, 16), (1, 1, 45, 16)

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "first": {"causal": True, "q_offset": 0},
    "window": {"window": (30, 5)},
    "left": {"causal": True, "window": (20, None), "q_offset": [3, 150]},
    "lengths": {"kv_lengths": [3, 200]},
    "padded": {"kv_lengths": [0, 77], "causal": True, "q_offset": 0},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4], "softcap": 3.0},
    "sinks": {"sinks": np.arange(8.0).reshape(2, 4), "scale": 0.2, "window": (4, 4)},
    "nothing": {"causal": True, "q_offset": -30, "sinks": np.array([-np.inf, 0, 1, 2])},
}


def inputs(dtype="float32", len_q=100, len_k=233):
    shapes = ((2, 4, len_q, 16), (2, 2, len_k, 16), (2, 2, len_k, 24))
    dtype = getattr(ml_dtypes, dtype, dtype)
    return [RNG.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def lazy(q, k, v):
    return da.from_array(q, Q_CHUNKS), *(da.from_array(x, KV_CHUNKS) for x in (k, v))


def keys_of(*arrays):
    return [key for x in arrays for key in dict(x.__dask_graph__())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_one_call(name, dtype):
    q, k, v = inputs(dtype)
    lazily = fastattn.dask.attention(*lazy(q, k, v), chunks=(32, 20), return_lse=True, **OPTIONS[name])
    assert [x.dtype for x in lazily] == [q.dtype, np.float64 if dtype == "float64" else np.float32]
    got = dask.compute(*lazily, scheduler="sync")
    check(got, expect(q, k, v, **OPTIONS[name]))
    alone = fastattn.dask.attention(*lazy(q, k, v), chunks=(32, 20), **OPTIONS[name])
    assert_same_bits(alone.compute(scheduler="threads"), got[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "q_offset": 40}], ids=str)
@pytest.mark.parametrize("chunks", [(100, 233), (30, 100), (64, 25), (1000, 9)])
def test_bits_are_those_of_the_tree(chunks, options, cluster):
    arrays = inputs()
    expected = tree(*arrays, *chunks, **options)
    lazily = fastattn.dask.attention(*lazy(*arrays), chunks=chunks, return_lse=True, **options)
    assert_same_bits(dask.compute(*lazily, scheduler="threads"), expected)
    assert_same_bits(cluster.gather(cluster.compute(lazily)), expected)


def test_one_head_and_batches_that_broadcast():
    q, k, v = inputs()
    one_head = (da.from_array(x[0, 0], (40, 16)) for x in (q, k, v))
    got = fastattn.dask.attention(*one_head, chunks=(30, 50), return_lse=True)
    check(dask.compute(*got, scheduler="sync"), expect(q[0, 0], k[0, 0], v[0, 0]))
    shared = da.from_array(k[:1], (1, 1, 50, 16)), da.from_array(v[1], (2, 60, 5))
    q_lazy, options = da.from_array(q, (1, 4, 9, 16)), {"chunks": (30, 50), "return_lse": True}
    got = fastattn.dask.attention(q_lazy, *shared, causal=True, **options)
    check(dask.compute(*got, scheduler="sync"), expect(q, k[:1], v[1], causal=True))
    q, k, v = lazy(q, k, v)
    none = fastattn.dask.attention(q[:, :, :0], k, v, chunks=(30, 50)).compute(scheduler="sync")
    assert none.shape == (2, 4, 0, 24)
    none = fastattn.dask.attention(q, k[:, :, :0], v[:, :, :0], chunks=(30, 50)).compute(scheduler="sync")
    assert none.shape == (2, 4, 100, 24)
    assert not none.any()


@pytest.mark.parametrize(
    "options", [{"causal": True, "q_offset": -40}, {"kv_lengths": 0, "q_offset": 0}], ids=str
)
def test_rows_that_attend_nothing_have_the_batch_axes_of_all(options):
    q, k, v = inputs(len_q=40, len_k=50)
    for arrays in ((q[0], k, v), (q[:1], k, v[0]), (q[0], k[:1], v), (q[:, None], k, v), (q, k[None], v[0])):
        lazily = fastattn.dask.attention(
            *map(da.asarray, arrays), chunks=(16, 20), return_lse=True, **options
        )
        expected = fastattn.attention(*arrays, return_lse=True, **options)
        for x, y in zip(dask.compute(*lazily, scheduler="sync"), expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_blocks_that_nobody_attends_are_no_tasks():
    q = k = v = da.zeros((8, 1024, 16), chunks=(8, 64, 16), dtype=np.float32)

    def blocks(**options):
        x = fastattn.dask.attention(q, k, v, chunks=(64, 64), **options)
        return sum("attend" in str(key[0]) or "part" in str(key[0]) for key in keys_of(x))

    everything = 16 * 16
    assert blocks() > everything
    assert blocks(causal=True) <= 16 * 17 // 2 * 1.4  # and merges
    assert blocks(causal=True, window=(64, 0)) <= 16 * 2
    shared = functools.partial(fastattn.dask.attention, q[None], k[None], v[None], chunks=(64, 64))
    x = shared(kv_lengths=np.array([100]), q_offset=0)
    assert {key[-1] for key in keys_of(x) if "part" in str(key[0])} == {0, 1}


WRONG = [
    ({"chunks": 5}, TypeError, r"chunks is 5; expected a pair \(rows, keys\) of integers"),
    ({"chunks": (5, 0)}, ValueError, r"chunks\[1\] is 0; expected at least 1"),
    ({"return_lse": "yes"}, TypeError, r"return_lse is 'yes'; expected True or False"),
    ({"mask": None}, TypeError, r"mask is not an argument; expected one of .*causal"),
    ({"dropout": 0.1}, TypeError, r"dropout is not an argument; expected one of"),
    ({"causal": 2}, TypeError, r"causal is 2; expected True or False"),
    ({"window": 3}, TypeError, r"window is 3; expected a pair"),
    ({"softcap": 0.0}, ValueError, r"softcap is 0.0; expected a number above 0"),
    ({"num_threads": 0}, ValueError, r"num_threads is 0; expected 1 to"),
    ({"backend": "cuda"}, ValueError, r"backend is 'cuda'; expected"),
    ({"sinks": [1.0, 2.0]}, ValueError, r"sinks has shape \(2,\); expected one that fits"),
    ({"kv_lengths": 234}, ValueError, r"kv_lengths has 234; expected 0 to 233"),
    ({"kv_lengths": 9, "causal": True}, ValueError, r"kv_lengths has 9 for 100 queries.*expected q_offset=0"),
    ({"q_offset": 0.5}, TypeError, r"q_offset has dtype float64; expected integers"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options_are_errors_before_anything_runs(options, error, message):
    with pytest.raises(error, match=r"^attention\(\): " + message):
        fastattn.dask.attention(*lazy(*inputs()), **{"chunks": (32, 50), **options})


def test_wrong_arrays_are_errors_before_anything_runs():
    q, k, v = lazy(*inputs())

    def refused(message, *arrays, error=ValueError):
        with pytest.raises(error, match=r"^attention\(\): " + message):
            fastattn.dask.attention(*arrays, chunks=(32, 50))

    refused("q is of type ndarray; expected a dask.array.Array", np.array(q), k, v, error=TypeError)
    refused("k has dtype int8; expected float32", q, k.astype("i1"), v, error=TypeError)
    refused("q, k and v have dtypes float64, float32 and float32", q.astype("f8"), k, v, error=TypeError)
    refused(r"q has shape \(16,\); expected", q[0, 0, 0], k, v)
    refused("k has a head_dim of 15", q, k[..., :15], v)
    refused("v has a length of 232", q, k, v[:, :, 1:])
    refused("q has 3 heads", q[:, :3], k, v)
    refused("q, k and v have batch dimensions", q, da.concatenate([k, k, k]), v)
    refused(r"q has shape .*; expected known sizes \(q.compute_chunk_sizes\(\)\)", q[q[:, 0, 0, 0] > 9], k, v)
