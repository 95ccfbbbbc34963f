"""Clusters whose processes die or have less memory than the arrays; and embeddings on a cluster."""

import os
import signal
import time

import dask.array as da
import dask.bag as db
import numpy as np
import pytest
import tiny_models as tiny
from local_workers import loads, pid, slowly
from oracle import assert_same_bits
from tiny_tokenizers import TEXTS, write_tokenizer

import fastattn
import fastattn.dask
from fastattn import models

RNG = np.random.default_rng(1)


def kill_one(client):
    """Kill the process of a worker, and return when there is another in its place."""
    before = client.run(pid)
    os.kill(next(iter(before.values())), signal.SIGKILL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        now = client.run(pid, on_error="ignore")
        if len(now) == 2 and set(now.values()) != set(before.values()):
            return
        time.sleep(0.1)
    raise AssertionError("no other worker came")


def test_a_worker_that_is_killed_loses_nothing(cluster):
    arrays = [RNG.standard_normal((2, 640, 16)).astype(np.float32) for _ in range(3)]
    q, k, v = (da.from_array(x, (2, 64, 16)) for x in arrays)
    lazily = fastattn.dask.attention(q, k.map_blocks(slowly, dtype=k.dtype), v, chunks=(64, 64))
    expected = lazily.compute(scheduler="sync")
    future = cluster.compute(lazily.map_blocks(slowly, dtype=q.dtype))
    end = time.monotonic() + 60
    while not cluster.has_what() or not any(map(len, cluster.has_what().values())):  # something is done
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not future.done()
    kill_one(cluster)
    assert_same_bits(future.result(timeout=60), expected)


def test_threads_are_those_asked_for(cluster):
    """A call's number counts in a process that Dask starts with OMP_NUM_THREADS=1."""
    own = int(os.environ.get("FASTATTN_NUM_THREADS", 1))  # which counts for more
    assert set(cluster.run(fastattn.get_num_threads).values()) == {own}
    q = da.zeros((2, 64, 8), chunks=(2, 32, 8), dtype=np.float32)
    for given, used in ((None, 1), (3, 3)):
        graph = dict(fastattn.dask.attention(q, q, q, chunks=(32, 32), num_threads=given).__dask_graph__())
        blocks = [x[0] for x in graph.values() if isinstance(x, tuple)]
        assert {x.keywords["num_threads"] for x in blocks if hasattr(x, "keywords")} == {used}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.write(path, "bert")
    write_tokenizer(path)
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas: dask's own calls
@pytest.mark.parametrize("kind", ["bag", "series", "array"])
@pytest.mark.parametrize("options", [{}, {"truncate_dim": 5}], ids=str)
def test_embeddings_are_those_of_encode(kind, options, folder, cluster):
    texts = [f"{text} {i} the dog" for i in range(6) for text in TEXTS]
    expected = models.load(folder).encode(texts, **options)
    if kind == "bag":
        lazy = db.from_sequence(texts, npartitions=7)
    elif kind == "series":
        frame, pandas = pytest.importorskip("dask.dataframe"), pytest.importorskip("pandas")
        lazy = frame.from_pandas(pandas.DataFrame({"text": texts}), npartitions=7)["text"]
    else:
        lazy = da.from_array(np.array(texts, object), 5)
    lazily = fastattn.dask.embed(lazy, folder, **options)
    assert lazily.shape[1] == expected.shape[1]
    assert kind != "array" or lazily.shape == expected.shape
    assert_same_bits(lazily.compute(scheduler="threads"), expected)
    before = cluster.run(loads)
    assert_same_bits(cluster.compute(lazily).result(), expected)
    assert all(now - before[worker] <= 1 for worker, now in cluster.run(loads).items())  # once a process


def test_wrong_embeddings_are_errors_before_anything_runs(folder, tmp_path):
    bag = db.from_sequence(TEXTS, npartitions=2)

    def refused(error, message, *arguments, **options):
        with pytest.raises(error, match=message):
            fastattn.dask.embed(*arguments, **options)

    refused(TypeError, r"embed\(\): texts is of type list; expected a dask.bag.Bag", TEXTS, folder)
    refused(TypeError, r"embed\(\): texts is of type Array", da.ones((3, 3)), folder)
    refused(TypeError, r"embed\(\): folder is of type int; expected a path", bag, 3)
    refused(models.ModelError, "config.json is missing", bag, tmp_path)
    for name in ("dtype", "weights_dtype", "activations"):
        refused((TypeError, ValueError), rf"embed\(\): {name} is \[\]; expected", bag, folder, **{name: []})
    refused(ValueError, r"embed\(\): batch_size is 0; expected at least 1", bag, folder, batch_size=0)
    refused(TypeError, r"embed\(\): batch is not an argument; expected batch_size", bag, folder, batch=3)
    with pytest.raises(TypeError, match=r"embed\(\): sentences\[0\] is 5; expected a string"):
        fastattn.dask.embed(db.from_sequence([5]), folder).compute(scheduler="sync")


def test_a_model_that_changed_is_loaded_again(tmp_path, cluster):
    bag, kept = db.from_sequence(TEXTS, npartitions=2), []
    write_tokenizer(tmp_path)
    for scale in (1.0, 2.0):
        weights = tiny.tensors("bert", tiny.CONFIGS["bert"])
        name = "embeddings.word_embeddings.weight"
        tiny.write(tmp_path, "bert", {**weights, name: weights[name] * np.float32(scale)})
        lazily = fastattn.dask.embed(bag, tmp_path)
        expected = models.load(tmp_path).encode(TEXTS)
        with cluster.as_current():
            kept.append(
                lazily.persist()
            )  # what the cluster has of the first model does not count for the second
            assert_same_bits(kept[-1].compute(), expected)
        assert_same_bits(lazily.compute(scheduler="sync"), expected)
