"""Texts to vectors on a cluster: a task for each partition, and the model loaded once in each process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.bag import Bag
from dask.base import get_scheduler, is_dask_collection

from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Array, DTypeLike, Rounding, Unpack
from fastattn._args.values import flag, integer
from fastattn._engine.settings import set_num_threads
from fastattn._regular_files import BEGUN, irregular, replaced
from fastattn.models._encode_calls import EncodeOptions
from fastattn.models._encoder import Encoder
from fastattn.models._files import ModelError, require
from fastattn.models._load import load
from fastattn.models._parameters import Precision
from fastattn.models._text import strings
from fastattn.models._vectors import RANGED

_LOADING = Lock()
_MADE_BY = b"fastattn.dask.embed"  # in a file's metadata: `Embed.made_by` as JSON
_READ = (".json", ".safetensors", ".txt")  # how names end of files that decide what vectors are


@named("embed")
def embed(
    texts: Any,
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dtype: DTypeLike = "float32",
    weights_dtype: DTypeLike | None = None,
    activations: Rounding | None = None,
    num_threads: int | None = None,
    progress: bool = True,
    **options: Unpack[EncodeOptions],
) -> Any:
    """One vector for each text, as `encode` of the model makes it, by all workers.

    Parameters
    ----------
    texts : dask.bag.Bag or dask.dataframe.Series
        Of strings, as ``dask.dataframe.read_parquet("texts/*.parquet")["text"]``. A partition is a task.
    folder : path
        The model's, at the same path on all machines. A process loads it once, for all its tasks; it keeps
        the last model alone.
    output : path, optional
        A folder, made if it is not there, for Parquet files: ``part.00000.parquet`` of the first partition
        and so on, with the columns "text" and "vector". By default nothing is computed yet. Where a run that
        failed has left files, one that makes the same vectors goes on: it writes those that are missing.
    dtype, weights_dtype, activations : optional
        As in `fastattn.models.load`.
    num_threads : int, optional
        Each process of a worker gets so many by `fastattn.set_num_threads`. By default it keeps what it has:
        1 in processes that Dask starts, because it sets OMP_NUM_THREADS.
    progress : bool, default True
        Whether to show a progress bar while files are written.
    **options
        Those of `encode`, but for ``show_progress_bar``. The precisions "int8" and "uint8" are not there, as
        the ranges of all vectors would count.

    Returns
    -------
    dask.array.Array, (n, features), or list of Path
        The vectors, not computed yet, n unknown; or with `output`, its files, which are there.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, a text is no string, or `output` has other files than those of a run that
        makes the same vectors, also where they came while this one ran.
    ModelError
        If the folder cannot be loaded, its model makes no vectors of texts, or a worker finds another one
        there than this call has, in the bytes of its files.

    Notes
    -----
    A file has its name only when it is whole. What a worker that dies has begun, another does again; it may
    leave a hidden file whose name ends in ``.begun``, which can be deleted when no run is under way.
    """
    parts = _partitions(texts)
    if options.get("precision", "float32") in RANGED:
        precision = options.get("precision")
        raise ValueError(f"(): precision is {precision!r}; expected float32, binary or ubinary")
    if "show_progress_bar" in options:
        raise TypeError("(): show_progress_bar is not an argument; expected progress")
    progress = flag("progress", progress)
    if num_threads is not None:
        num_threads = integer("num_threads", num_threads, 1)
    model: tuple[Any, ...] = str(_path("folder", folder)), dtype, weights_dtype, activations
    kept = Precision.of(*model[1:])
    state = _state(model[0])
    with _LOADING:
        encoder = _loaded(state, *model)
    example = encoder._encode([], options)  # this checks all of them
    call = encoder._checked(options)
    made_by = {
        "folder": state,
        "dtype": kept.dtype.name,
        "weights_dtype": kept.weights,
        "activations": kept.activations,
        "prompt": call.prompt,
        "precision": call.precision,
        "normalize_embeddings": call.normalize,
        "truncate_dim": call.features,
    }
    task = Embed(model, state, options, num_threads, made_by)
    lazy = dask.delayed(task, pure=output is None)  # a file is looked for again in every run
    if output is None:
        shape = np.nan, example.shape[1]
        pieces = [da.from_delayed(lazy(part, i), shape, example.dtype) for i, part in enumerate(parts)]
        return da.concatenate(pieces, allow_unknown_chunksizes=True)
    require("pyarrow")
    paths = _paths(output, len(parts), task)
    _finish([lazy(part, i, str(paths[i])) for i, part in enumerate(parts)], progress)
    for path in paths:  # a task of a run that failed may have ended late, and written over one
        task.check(path)
    return paths


def _partitions(texts: Any) -> list[Any]:
    """The partitions of `texts`, lazy."""
    series = is_dask_collection(texts) and not isinstance(texts, da.Array) and getattr(texts, "ndim", 0) == 1
    if not (isinstance(texts, Bag) or series):
        raise wrong_type("texts", texts, "a dask.bag.Bag or a dask.dataframe.Series of strings")
    parts = list(texts.to_delayed())
    if not parts:
        raise ValueError("(): texts has no partitions; expected at least one")
    return parts


def _path(name: str, x: Any) -> Path:
    """The argument `name`, absolute: workers may have other working directories."""
    if not isinstance(x, (str, os.PathLike)):
        raise wrong_type(name, x, "a path")
    return Path(x).absolute()


def _paths(output: str | os.PathLike[str], n: int, task: Embed) -> list[Path]:
    """The files that `task` makes of n partitions, in a folder that has at most some of these."""
    folder = _path("output", output)
    paths = [folder / f"part.{i:05}.parquet" for i in range(n)]
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"(): output is {str(output)!r}, which is no folder; expected a new one")
    expected = set(paths)
    for found in folder.iterdir() if folder.exists() else ():
        if found in expected:
            task.check(found)
        elif found.suffix != BEGUN:
            raise _foreign(found, "no run with these texts")
    folder.mkdir(parents=True, exist_ok=True)
    return paths


def _finish(tasks: Sequence[Any], progress: bool) -> None:
    """Compute the tasks, by the scheduler that is in force, and show how many are done."""
    client = getattr(get_scheduler(), "__self__", None)
    if client is None:
        from dask.diagnostics import ProgressBar  # it costs time to import

        with ProgressBar(minimum=0 if progress else np.inf):
            dask.compute(*tasks)
        return
    from distributed import as_completed

    futures = client.compute(list(tasks))
    with require("tqdm").tqdm(total=len(futures), unit=" parts", disable=not progress) as bar:
        for future in as_completed(futures):
            future.result()
            bar.update()


def _foreign(path: Path, run: str) -> ValueError:
    came = f"output is {str(path.parent)!r}, which has {path.name}, of {run}"
    return ValueError(f"(): {came}; expected a new folder, or that of a run with these arguments")


def _state(folder: str) -> str:
    """A digest of a model's files: the same on disks that are not shared, another when a byte has changed."""
    root, whole = Path(folder), hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in _READ and path.is_file():
            about = path.stat()
            whole.update(str((path.relative_to(root).as_posix(), about.st_size)).encode())
            whole.update(_digest(path, about.st_size, about.st_mtime_ns))
    return whole.hexdigest()


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed: int) -> bytes:
    """Digest of a file, which is read once for its size and time of writing."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest()


@lru_cache(maxsize=1)
def _loaded(state: str, folder: str, dtype: Any, weights_dtype: Any, activations: Any) -> Encoder:
    model = load(folder, dtype=dtype, weights_dtype=weights_dtype, activations=activations)
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise ModelError(f"{folder} has a {kind}; expected a model that makes a vector of a text")
    if _state(folder) != state:  # asked after loading, as the files may change meanwhile
        raise ModelError(f"{folder} has another model than when embed was called; expected the same files")
    return model


@dataclass(frozen=True)
class Embed:
    """Work on each partition: its vectors, or a file of them."""

    model: tuple[Any, ...]
    state: str  # of the model's files: others make other tasks, whose results a cluster does not have
    options: EncodeOptions
    num_threads: int | None
    made_by: dict[str, Any]  # what decides what vectors are

    def check(self, path: Path) -> None:
        """Raise unless the file says that it has the vectors which this task would make."""
        if irregular(path):
            raise _foreign(path, "no run of embed")
        try:
            said = json.loads((require("pyarrow.parquet").read_schema(path).metadata or {})[_MADE_BY])
        except (OSError, ValueError, KeyError):  # no file of Parquet, or of others
            raise _foreign(path, "no run of embed") from None
        if others := [name for name, value in self.made_by.items() if said.get(name) != value]:
            raise _foreign(path, f"a run with another {', '.join(others)}")

    @named("embed")
    def __call__(self, texts: Any, number: int, path: str | None = None) -> Any:
        texts = list(strings(f"texts.partitions[{number}]", texts))
        if path is not None and Path(path).exists():  # by a worker that died, or a run before this one
            self.check(Path(path))
            if require("pyarrow.parquet").read_table(path, columns=["text"])["text"].to_pylist() == texts:
                return path
            came = f"partition {number} of texts has other texts than {path}"
            raise ValueError(f"(): {came}; expected the same, or a new folder for output")
        if self.num_threads is not None:
            set_num_threads(self.num_threads)
        with _LOADING:  # by one thread, the others wait for it
            model = _loaded(self.state, *self.model)
        vectors = model._encode(texts, self.options)
        return vectors if path is None else _write(path, texts, vectors, json.dumps(self.made_by).encode())


def _write(path: str, texts: list[str], vectors: Array, made_by: bytes) -> str:
    """One file of Parquet, all or nothing."""
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    flat = arrow.array(np.ascontiguousarray(vectors).reshape(-1))
    column = arrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    table = arrow.table({"text": arrow.array(texts, arrow.string()), "vector": column})
    with replaced(Path(path), "(): ") as begun:
        parquet.write_table(table.replace_schema_metadata({_MADE_BY: made_by}), begun)
    return path
