"""Pictures of attention: weights, masks, entropies. Requires matplotlib, the extra ``[plot]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastattn._args.errors import named, needed
from fastattn._args.types import Array, ArrayLike
from fastattn._args.values import MOST_SIZE, as_array, integer, integer_array, several, short
from fastattn.masks import Mask
from fastattn.masks._mask import dense_array, score_shape

__all__ = ["attention_map", "entropy", "mask", "selected"]

# Blocks along the longer side of a mask's picture, by default.
_BLOCKS = 128


def __dir__() -> list[str]:
    return __all__


@named("attention_map")
def attention_map(weights: ArrayLike, tokens: Sequence[str] | None = None, ax: Any = None) -> Any:
    """Draw attention weights: queries downwards, keys to the right; larger weights are darker.

    Parameters
    ----------
    weights : array_like, (len_q, len_k) or (heads, len_q, len_k)
        From `attention_weights`; heads are drawn side by side.
    tokens : sequence of str, optional
        Labels of the keys, and of the queries if their number is the same.
    ax : Axes, optional
        One Axes, or one per head; default: a new figure.

    Returns
    -------
    Axes or ndarray of Axes, (heads,)

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError, ValueError
        If an argument is invalid.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((4, 9, 16))
    >>> axes = fastattn.plot.attention_map(fastattn.attention_weights(x, x))
    """
    array = _numbers("weights", weights, (2, 3), "(len_q, len_k) or (heads, len_q, len_k)")
    len_q, len_k = array.shape[-2:]
    labels = None
    if tokens is not None:
        given = [*tokens] if isinstance(tokens, str) else tokens  # its characters
        labels = [str(token) for token in several("tokens", given, f"{len_k} strings, one a key")]
        if len(labels) != len_k:
            raise ValueError(f"(): tokens has length {len(labels)}; expected {len_k}, one a key")
    maps = array if array.ndim == 3 else array[None]
    axes = _axes(ax, len(maps))
    for head, (this, of_head) in enumerate(zip(axes, maps, strict=True)):
        _image(this, of_head, "Greys")
        if array.ndim == 3:
            this.set_title(f"head {head}", fontsize="small")
        if labels is not None:
            this.set_xticks(range(len_k), labels, rotation=90)
            if len_q == len_k:
                this.set_yticks(range(len_q), labels)
    return axes if array.ndim == 3 else axes[0]


@named("mask")
def mask(
    mask: Mask | ArrayLike,
    len_q: int,
    len_k: int | None = None,
    ax: Any = None,
    *,
    block: int | None = None,
    q_offset: int | None = None,
) -> Any:
    """Draw which keys a mask allows, block by block: queries downwards, keys to the right.

    Parameters
    ----------
    mask : Mask or array_like of bool, (len_q, len_k)
        A mask of `fastattn.masks`, or an array, True where a query attends a key.
    len_q, len_k : int
        Numbers of queries and keys; default ``len_k = len_q``.
    ax : Axes, optional
        Default: a new figure.
    block : int, optional
        Queries and keys per block; a block is darker the more of its pairs are attended. Default: at most
        128 blocks per side.
    q_offset : int, optional
        Position of the first query, as in `attention`.

    Returns
    -------
    Axes
        Errors are as in `attention_map`.

    Notes
    -----
    O(len_q * len_k) time, and one byte of memory per pair.
    """
    len_q = integer("len_q", len_q, 1, MOST_SIZE)
    len_k = len_q if len_k is None else integer("len_k", len_k, 1, MOST_SIZE)
    if isinstance(mask, Mask):
        attend: Array = dense_array(mask, score_shape((1, len_q, len_k), q_offset))[0]
    else:
        if mask is None or callable(mask):
            called = getattr(mask, "__name__", mask)
            raise TypeError(f"(): mask is {called}; expected bool or a mask, such as masks.causal()")
        attend = as_array("mask", mask)
        if attend.dtype != np.bool_:
            raise TypeError(f"(): mask has dtype {attend.dtype}; expected bool or a mask")
        if attend.shape != (len_q, len_k):
            expected = f"(len_q, len_k) = {(len_q, len_k)}"
            raise ValueError(f"(): mask has shape {attend.shape}; expected {expected}")
    size = -(-max(len_q, len_k) // _BLOCKS) if block is None else integer("block", block, 1, MOST_SIZE)
    ax = _axes(ax, 1)[0]
    # The last blocks are drawn as large as the others, and cut off at the last query and key.
    extent = (0, -(-len_k // size) * size, -(-len_q // size) * size, 0)
    _image(ax, _shares(attend, size), "Blues", vmin=0, vmax=1, extent=extent)
    ax.set(xlim=(0, len_k), ylim=(len_q, 0))
    return ax


@named("selected")
def selected(selected: ArrayLike, len_k: int, ax: Any = None, *, block_size: int = 1) -> Any:
    """Draw the keys that queries selected: queries downwards, keys to the right.

    Parameters
    ----------
    selected : array_like of int, (len_q, any number)
        Indices of keys, or of blocks of keys, per query, from `functional.select_keys` for one head; -1 is
        none.
    len_k : int
        Number of keys.
    ax : Axes, optional
        Default: a new figure.
    block_size : int, default 1
        Keys per block.

    Returns
    -------
    Axes
        At most 128 cells per side, darker the more is selected. Errors are as in `attention_map`.

    Notes
    -----
    Time of sorting the lists; no memory per pair of query and key.
    """
    array = integer_array("selected", selected, "integers: keys, or blocks of keys")
    if array.ndim != 2 or not len(array):
        raise ValueError(f"(): selected has shape {array.shape}; expected (len_q, any number)")
    len_k, size = integer("len_k", len_k, 1, MOST_SIZE), integer("block_size", block_size, 1, MOST_SIZE)
    len_q, blocks = len(array), -(-len_k // size)
    lists = np.sort(array.astype(np.int64), axis=1)
    if lists.size and not (lists.min() >= -1 and lists.max() < blocks):
        wrong = lists.min() if lists.min() < -1 else lists.max()
        raise ValueError(f"(): selected has {wrong}; expected -1 to {blocks - 1}")
    first = np.diff(lists, axis=1, prepend=-1) > 0  # of those named twice
    query, at = np.nonzero(first)
    rows, columns = (-(-n // _BLOCKS) for n in (len_q, blocks))
    shares = np.zeros((-(-len_q // rows), -(-blocks // columns)))
    np.add.at(shares, (query // rows, lists[query, at] // columns), 1 / (rows * columns))
    ax = _axes(ax, 1)[0]
    extent = (0, shares.shape[1] * columns * size, shares.shape[0] * rows, 0)
    _image(ax, shares, "Blues", vmin=0, vmax=1, extent=extent)
    ax.set(xlim=(0, len_k), ylim=(len_q, 0))
    return ax


@named("entropy")
def entropy(entropies: ArrayLike, ax: Any = None) -> Any:
    """Draw the attention entropy of each layer and head: layers downwards, heads to the right.

    Parameters
    ----------
    entropies : array_like, (layers, heads)
        For example the mean over queries of ``-sum(p * log(p))``.
    ax : Axes, optional
        Default: a new figure.

    Returns
    -------
    Axes
        With a colour bar. Errors are as in `attention_map`.
    """
    array = _numbers("entropies", entropies, (2,), "(layers, heads)")
    ax = _axes(ax, 1)[0]
    image = _image(ax, array, "viridis")
    ax.set(xlabel="head", ylabel="layer")
    ax.figure.colorbar(image, ax=ax, label="entropy")
    return ax


def _numbers(name: str, x: ArrayLike, n_dims: tuple[int, ...], dims: str) -> Array:
    """`x` as real numbers; the number of its axes is one of `n_dims`, and none of them is empty."""
    array = as_array(name, x)
    if array.dtype.name != "bfloat16" and array.dtype.kind not in "fiu":
        raise TypeError(f"(): {name} has dtype {array.dtype}; expected real numbers")
    if array.ndim not in n_dims or not array.size:
        raise ValueError(f"(): {name} has shape {array.shape}; expected {dims}")
    return array.astype(np.float64)


def _shares(attend: Array, block: int) -> Array:
    """Share of each block of `attend` that is True."""
    rows, columns = (np.arange(0, n, block) for n in attend.shape)
    counts = np.add.reduceat(np.add.reduceat(attend, rows, axis=0, dtype=np.int64), columns, axis=1)
    heights, widths = (np.diff(x, append=n) for x, n in zip((rows, columns), attend.shape, strict=True))
    shares: Array = counts / (heights[:, None] * widths)
    return shares


def _axes(ax: Any, n: int) -> Array:
    """`ax`, or n new Axes in a grid, as an array (n,)."""
    needed("matplotlib", "(): drawing needs matplotlib", "pip install matplotlib")
    from matplotlib import pyplot

    if ax is not None:
        axes = np.ravel(np.asarray(ax, object))
        if len(axes) != n or not all(hasattr(each, "imshow") for each in axes):
            raise ValueError(f"(): ax is {short(ax)}; expected {'an Axes' if n == 1 else f'{n} Axes'}")
        return axes
    columns = math.ceil(math.sqrt(n))
    _, grid = pyplot.subplots(-(-n // columns), columns, squeeze=False, layout="constrained")
    for unused in grid.ravel()[n:]:
        unused.remove()
    created: Array = grid.ravel()[:n]
    return created


def _image(ax: Any, array: Array, colours: str, **how: Any) -> Any:
    return ax.imshow(array, cmap=colours, interpolation="nearest", aspect="auto", **how)
