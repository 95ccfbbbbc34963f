"""A cluster of Dask on this machine, what its workers run, and what attention has to be, to the bit.

Workers import what they run by its name: they know the folder of this file, but no test.
"""

import os
import time
import warnings
from contextlib import contextmanager

import numpy as np

import fastattn


@contextmanager
def workers(**how):
    """A client of two workers of one thread each, in processes of their own."""
    from distributed import Client, LocalCluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", **how)
        with local, Client(local, set_as_default=False) as client:
            yield client


def pid():
    """Return the worker's process id."""
    return os.getpid()


def slowly(block):
    """Return the block after a while, so that a worker is killed while there is much left to do."""
    time.sleep(0.05)
    return block


def loads():
    """Count the models that this worker has loaded."""
    from fastattn.dask import _embed

    return _embed._loaded.cache_info().misses


def tree(q, k, v, rows, keys, **options):
    """Attend to chunks of keys one by one and merge four states at a time; q_offset is a number."""
    len_q, len_k = q.shape[-2], k.shape[-2]
    offset, causal = options.pop("q_offset", len_k - len_q), options.get("causal", False)
    outs, lses = [], []
    for i in range(0, len_q, rows):
        states = {}
        for n, j in enumerate(range(0, len_k, keys)):
            if not causal or j <= offset + min(i + rows, len_q) - 1:
                parts = q[..., i : i + rows, :], k[..., j : j + keys, :], v[..., j : j + keys, :]
                states[n] = fastattn.attention(*parts, return_lse=True, q_offset=offset + i - j, **options)
        while len(states) > 1:
            groups = {}
            for n, state in states.items():
                groups.setdefault(n // 4, []).append(state)
            states = {n: merged(group) for n, group in groups.items()}
        ((out, lse),) = states.values()
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs, -2), np.concatenate(lses, -1)


def merged(states):
    return states[0] if len(states) == 1 else fastattn.merge_states(*zip(*states, strict=True))
