"""Texts to vectors on a cluster: a task for each partition, and the model loaded once in each process."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
from dask.bag import Bag
from dask.base import is_dask_collection

from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Array, DTypeLike, Rounding, Unpack
from fastattn.models._encode_calls import EncodeOptions
from fastattn.models._encoder import Encoder
from fastattn.models._files import ModelError
from fastattn.models._load import load
from fastattn.models._parameters import Precision

_LOADING = Lock()  # one thread of a process loads, the others wait for it


@named("embed")
def embed(
    texts: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "float32",
    weights_dtype: DTypeLike | None = None,
    activations: Rounding | None = None,
    **options: Unpack[EncodeOptions],
) -> da.Array:
    """Embed texts on all workers, with the vectors of the model's `encode`.

    Parameters
    ----------
    texts : dask.bag.Bag, dask.dataframe.Series or dask.array.Array, (n,)
        Strings, as ``dask.dataframe.read_parquet("texts/*.parquet")["text"]``; a task per partition.
    folder : path
        Model folder, at the same path on all machines. Each process loads it once per call.
    dtype, weights_dtype, activations : optional
        As in `fastattn.models.load`.
    **options
        Options of `encode`.

    Returns
    -------
    dask.array.Array, (n, features)
        Lazy vectors, in the chunks of `texts`. From a bag or a series, n is unknown.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    ModelError
        If the folder cannot be loaded, or its model makes no vectors of texts.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise wrong_type("folder", folder, "a path")
    parts, sizes = _partitions(texts)
    Precision.of(dtype, weights_dtype, activations)
    # A call's own mark: where the folder's files change, later calls load them again.
    model = uuid4().hex, str(Path(folder).absolute()), dtype, weights_dtype, activations
    example = _encode([], model, options)  # checks them
    lazy = dask.delayed(_encode, pure=False)
    shapes = [(n, example.shape[1]) for n in sizes]
    pieces = [
        da.from_delayed(lazy(part, model, options), shape, example.dtype)
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return da.concatenate(pieces, allow_unknown_chunksizes=True)


def _partitions(texts: Any) -> tuple[list[Any], list[float]]:
    """The partitions of `texts`, lazy, and how many texts each has."""
    one_axis = is_dask_collection(texts) and getattr(texts, "ndim", 0) == 1
    if not (isinstance(texts, Bag) or one_axis):
        expected = "a dask.bag.Bag, dask.dataframe.Series or dask.array.Array (n,) of strings"
        raise wrong_type("texts", texts, expected)
    parts = list(texts.to_delayed())
    if not parts:
        raise ValueError("(): texts has no partitions; expected at least one")
    return parts, list(texts.chunks[0]) if isinstance(texts, da.Array) else [np.nan] * len(parts)


@named("embed")
def _encode(texts: Any, model: tuple[Any, ...], options: EncodeOptions) -> Array:
    """Vectors of one partition."""
    with _LOADING:
        encoder = _loaded(*model)
    return encoder._encode(list(texts), options)


@lru_cache(maxsize=1)
def _loaded(call: str, folder: str, dtype: Any, weights_dtype: Any, activations: Any) -> Encoder:
    model = load(folder, dtype=dtype, weights_dtype=weights_dtype, activations=activations)
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise ModelError(f"{folder} has a {kind}; expected a model that makes a vector of a text")
    return model
