"""Clusters whose processes die or have less memory than the arrays; and embeddings on a cluster."""

import os
import shutil
import signal
import time

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
import tiny_models as tiny
from implementations import assert_same_rows
from local_workers import loads, pid, slowly, tree, workers
from oracle import assert_same_bits
from tiny_tokenizers import TEXTS, write_tokenizer

import fastattn
import fastattn.dask
from fastattn import models
from fastattn.dask import _embed as dask_embed

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


@pytest.mark.parametrize("reread", [None, False], ids=["from disk", "spilled"])
def test_keys_and_values_larger_than_the_memory_of_all_workers(reread, tmp_path, request):
    if not request.config.getoption("full"):
        pytest.skip("it writes 1 GB, or with spilling 2 GB: --full")
    shape, limit = (8, 2**18, 64), 500 * 10**6  # what a worker holds by itself is 150 MB
    arrays = [RNG.standard_normal((8, 512, 64), np.float32)]
    for name in ("k", "v"):
        x = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, shape)
        for i in range(0, shape[1], 2**14):
            x[:, i : i + 2**14] = RNG.standard_normal((8, 2**14, 64), np.float32)
        x.flush()
        del x
        arrays.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    assert arrays[1].nbytes + arrays[2].nbytes > 2 * limit
    with workers(memory_limit=limit, local_directory=str(tmp_path)) as client:
        started = client.run(pid)
        for chunks in ((256, 8192), (512, 16384)):
            lazily = fastattn.dask.attention(
                *arrays, chunks=chunks, causal=True, reread=reread, return_lse=True
            )
            got = client.gather(client.compute(lazily), errors="raise")
            assert_same_bits(got, tree(*arrays, *chunks, causal=True))
            whole = fastattn.attention(*arrays, causal=True, return_lse=True)
            # Both are within the contract's bound of the exact result, which the other tests compare with.
            for x, y in zip(got, whole, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
        assert client.run(pid) == started  # no worker was killed for its memory


def test_threads_are_those_asked_for(cluster):
    """A call's number counts in a process that Dask starts with OMP_NUM_THREADS=1."""
    own = int(os.environ.get("FASTATTN_NUM_THREADS", 1))  # which counts for more
    assert set(cluster.run(fastattn.get_num_threads).values()) == {own}
    q = da.zeros((2, 64, 8), chunks=(2, 32, 8), dtype=np.float32)
    for given, used in ((None, 1), (3, 3)):
        graph = dict(fastattn.dask.attention(q, q, q, chunks=(32, 32), num_threads=given).__dask_graph__())
        told = {x[0].options["num_threads"] for x in graph.values() if hasattr(block_of(x), "options")}
        assert told == {used}


def block_of(task):
    return task[0] if isinstance(task, tuple) and task else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.write(path, "bert")
    write_tokenizer(path)
    return path


def test_embeddings_are_those_of_encode(folder, tmp_path, cluster, capsys):
    texts = [f"{text} {i} the dog" for i in range(6) for text in TEXTS]
    expected = models.load(folder).encode(texts)
    bag = db.from_sequence(texts, npartitions=7)
    lazily = fastattn.dask.embed(bag, folder)
    assert lazily.shape[1] == expected.shape[1]
    assert_same_bits(lazily.compute(scheduler="threads"), expected)
    with cluster.as_current():
        assert_same_bits(lazily.compute(), expected)
        paths = fastattn.dask.embed(bag, folder, tmp_path / "out" / "of", num_threads=1)
    assert set(cluster.run(loads).values()) <= {0, 1}  # once a process
    assert [path.name for path in paths] == [f"part.{i:05}.parquet" for i in range(bag.npartitions)]
    assert sorted((tmp_path / "out" / "of").iterdir()) == paths
    assert "parts" in capsys.readouterr().err
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "out" / "of")
    assert table["text"].to_pylist() == texts
    assert_same_bits(np.array(table["vector"].to_pylist(), np.float32), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas: dask's own calls
def test_parquet_in_and_out(folder, tmp_path):
    pytest.importorskip("pandas")
    dd, parquet, arrow = map(pytest.importorskip, ("dask.dataframe", "pyarrow.parquet", "pyarrow"))
    for i in range(3):
        parquet.write_table(
            arrow.table({"text": TEXTS[i:], "n": list(range(i, 5))}), tmp_path / f"{i}.parquet"
        )
    texts = dd.read_parquet(str(tmp_path / "*.parquet"))["text"]
    paths = fastattn.dask.embed(texts, folder, tmp_path / "out", precision="binary", progress=False)
    expected = models.load(folder).encode(TEXTS + TEXTS[1:] + TEXTS[2:], precision="binary")
    got = parquet.read_table(paths[0].parent)["vector"].to_pylist()
    np.testing.assert_array_equal(np.array(got, np.int8), expected)


def test_wrong_embeddings_are_errors_before_anything_runs(folder, tmp_path):
    bag = db.from_sequence(TEXTS, npartitions=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")

    def refused(error, message, *arguments, **options):
        with pytest.raises(error, match=message):
            fastattn.dask.embed(*arguments, **options)

    refused(TypeError, r"embed\(\): texts is of type list; expected a dask.bag.Bag", TEXTS, folder)
    refused(TypeError, r"embed\(\): texts is of type Array", da.ones(3), folder)
    refused(TypeError, r"embed\(\): folder is of type int; expected a path", bag, 3)
    refused(models.ModelError, "config.json is missing", bag, tmp_path)
    refused(TypeError, r"embed\(\): output is of type int; expected a path", bag, folder, 3)
    refused(ValueError, r"embed\(\): output is .* has x, of no run with", bag, folder, tmp_path / "full")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped/part.00000.parquet")  # nobody writes to it: to read it would never end
    refused(ValueError, r"has part.00000.parquet, of no run of embed", bag, folder, tmp_path / "piped")
    refused(ValueError, r"embed\(\): output is .* is no folder", bag, folder, tmp_path / "full/x")
    refused((TypeError, ValueError), r"embed\(\): dtype is \[\]; expected", bag, folder, dtype=[])
    refused((TypeError, ValueError), r"embed\(\): weights_dtype is \[\]", bag, folder, weights_dtype=[])
    refused((TypeError, ValueError), r"embed\(\): activations is \[\]", bag, folder, activations=[])
    refused(ValueError, r"embed\(\): batch_size is 0; expected at least 1", bag, folder, batch_size=0)
    refused(ValueError, r"precision is 'int8'; expected float32, binary", bag, folder, precision="int8")
    refused(TypeError, r"show_progress_bar is not an argument", bag, folder, show_progress_bar=True)
    refused(TypeError, r"embed\(\): batch is not an argument; expected batch_size", bag, folder, batch=3)
    refused(ValueError, r"embed\(\): num_threads is 0; expected at least 1", bag, folder, num_threads=0)
    refused(TypeError, r"embed\(\): progress is 2; expected True or False", bag, folder, progress=2)
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["x"]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (5, TypeError, r"is 5; expected a string"),
        ("\ud800", ValueError, r"has '\\ud800', half of a surrogate pair"),
    ],
)
def test_a_run_that_failed_is_continued(bad, error, message, folder, tmp_path, cluster):
    out, texts = tmp_path / "out", [*TEXTS, *TEXTS]
    faulty = [*texts[:-1], bad]

    def run(texts, npartitions=5, **options):
        bag = db.from_sequence(texts, npartitions=npartitions)
        return fastattn.dask.embed(bag, folder, out, progress=False, **options)

    with (
        dask.config.set(scheduler="sync"),
        pytest.raises(error, match=r"^embed\(\): texts.partitions\[4\]\[1\] " + message),
    ):
        run(faulty)
    assert not (out / "part.00004.parquet").exists()
    with cluster.as_current():
        paths = run(texts)
        paths[2].unlink()
        begun = out / ".part.00002.parquet.0.begun"
        begun.write_text("as a worker that is killed leaves it, or another run is writing it")
        written = {path: path.stat().st_mtime_ns for path in out.glob("part.*")}
        assert run(texts, batch_size=3, normalize_embeddings=False, dtype=np.float32) == paths
        assert sorted(out.iterdir()) == [begun, *paths]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    table = pytest.importorskip("pyarrow.parquet").read_table(out)
    assert table["text"].to_pylist() == texts
    assert_same_rows(np.array(table["vector"].to_pylist(), np.float32), models.load(folder).encode(texts))
    for arguments, other in (
        ({"truncate_dim": 3}, "a run with another truncate_dim;"),
        ({"dtype": "float64"}, "a run with another dtype, weights_dtype;"),
        ({"npartitions": 2}, "no run with these texts;"),
    ):
        with pytest.raises(ValueError, match=rf"output is .* has part.*, of {other}"):
            run(texts, **arguments)
    with pytest.raises(
        ValueError, match=r"partition 1 of texts has other texts than .*part.00001.parquet; expected"
    ):
        run([*texts[:2], "other", *texts[3:]])


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_task_of_another_run_is_noticed(late, folder, tmp_path):
    """Its file may come over one that this run has written, or before this run's task for it begins."""
    pytest.importorskip("pyarrow")
    out, bag = tmp_path / "out", db.from_sequence(TEXTS[:1])
    (other,) = fastattn.dask.embed(bag, folder, tmp_path / "other", truncate_dim=3, progress=False)

    def partition(i):
        end = time.monotonic() + 60
        while i == 1 and late == 0 and not (out / "part.00000.parquet").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        if i == 1:
            other.replace(out / f"part.0000{late}.parquet")
        return TEXTS

    bag = db.from_delayed([dask.delayed(partition)(i) for i in range(2)])
    message = rf"has part.0000{late}.parquet, of a run with another truncate_dim;"
    with dask.config.set(scheduler="threads", num_workers=2), pytest.raises(ValueError, match=message):
        fastattn.dask.embed(bag, folder, out, progress=False)


def test_a_model_that_changes_during_a_run_is_an_error(tmp_path):
    def partition(i):
        weights = tiny.tensors("bert", tiny.CONFIGS["bert"])
        tiny.write(tmp_path, "bert", {name: -x for name, x in weights.items()})
        dask_embed._loaded.cache_clear()  # as in another process
        return TEXTS

    write_tokenizer(tmp_path)
    tiny.write(tmp_path, "bert")
    bag = db.from_delayed([dask.delayed(partition)(0)])
    lazily = fastattn.dask.embed(bag, tmp_path)
    with pytest.raises(models.ModelError, match="has another model than when embed was called"):
        lazily.compute(scheduler="sync")


def test_a_model_is_the_same_by_its_bytes(folder, tmp_path):
    """A copy on another disk, with other times and notes, goes on with the files of a run."""
    pytest.importorskip("pyarrow")
    bag = db.from_sequence(TEXTS, npartitions=1)
    (path,) = fastattn.dask.embed(bag, folder, tmp_path / "out", progress=False)
    written = path.stat().st_mtime_ns
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    (tmp_path / "copy/README.md").write_text("of the same model")
    assert fastattn.dask.embed(bag, tmp_path / "copy", tmp_path / "out", progress=False) == [path]
    assert path.stat().st_mtime_ns == written


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
