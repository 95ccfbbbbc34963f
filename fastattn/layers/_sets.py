"""Attention between a set and a few vectors: the blocks of Set Transformer and Perceiver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import wrong_dtype, wrong_shape
from fastattn._args.values import as_array, broadcast_batch, float_array, is_float
from fastattn.layers import _calls
from fastattn.layers._basic import FeedForward
from fastattn.layers._scores import MASK_DTYPES
from fastattn.layers._stacks import TransformerEncoder
from fastattn.layers._transformer import TransformerEncoderLayer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Shape

LAYER = "a TransformerEncoderLayer"
LATENT = (TransformerEncoder, TransformerEncoderLayer, type(None))
LATENTS = "an encoder, a layer of one, or None"


def set_attention(
    layer: TransformerEncoderLayer, x: ArrayLike, y: ArrayLike, *, key_padding_mask: ArrayLike | None = None
) -> Array:
    """Set Transformer's MAB: ``H = norm1(x + attend(x, y, y))``, then ``norm2(H + feed_forward(H))`` [1]_.

    This is `layer`, but its keys and values come from another set: MAB(x, x) is ``layer(x)``.

    Parameters
    ----------
    layer : TransformerEncoderLayer
        With norm_first, it normalises x before attention, and not y, as in Perceiver.
    x : array_like, (..., n, d_model)
        The set whose elements are updated; its batch dimensions broadcast against y's.
    y : array_like, (..., m, d_model)
        The set that is attended to.
    key_padding_mask : array_like of bool, (batch, m), optional
        True hides an element of y.

    Returns
    -------
    ndarray, (batch, n, d_model)
        Or (n, d_model) if neither has batch dimensions.

    References
    ----------
    .. [1] J. Lee et al., "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural
       Networks", 2019, arXiv:1810.00825.
    """
    return _set_attention("set_attention", layer, x, y, key_padding_mask)


def induced_set_attention(
    first: TransformerEncoderLayer,
    second: TransformerEncoderLayer,
    inducing: ArrayLike,
    x: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
) -> Array:
    """Set Transformer's ISAB: ``MAB(x, MAB(inducing, x))``, in time linear in the set's size.

    Parameters
    ----------
    first, second : TransformerEncoderLayer
        The inner MAB and the outer one: `set_attention`.
    inducing : array_like, (m, d_model)
        Inducing points.
    x : array_like, (..., n, d_model)
        The set, and the shape of the result.
    key_padding_mask : array_like of bool, (batch, n), optional
        True hides an element of x from the others. The result still has a vector for it.
    """
    func = "induced_set_attention"
    _calls.require(func, "second", second, TransformerEncoderLayer, LAYER)
    summary = _set_attention(func, first, inducing, x, key_padding_mask, ("first", "inducing", "x"))
    return _set_attention(func, second, x, summary, None, ("second", "x", "the summary of first"))


def pooling_by_attention(
    layer: TransformerEncoderLayer,
    seeds: ArrayLike,
    x: ArrayLike,
    *,
    feed_forward: FeedForward | None = None,
    key_padding_mask: ArrayLike | None = None,
) -> Array:
    """Set Transformer's PMA: ``MAB(seeds, feed_forward(x))``, k vectors (..., k, d_model) from a set.

    Parameters
    ----------
    layer, x, key_padding_mask
        The MAB, the set, and what hides its elements: as in `set_attention`.
    seeds : array_like, (k, d_model)
        Seed vectors.
    feed_forward : FeedForward, optional
        The paper's rFF; the authors' code has none.
    """
    func = "pooling_by_attention"
    if feed_forward is not None:
        _calls.require(func, "feed_forward", feed_forward, FeedForward, "a FeedForward")
        x = feed_forward(x)
    return _set_attention(func, layer, seeds, x, key_padding_mask, ("layer", "seeds", "x"))


def perceiver(
    cross: TransformerEncoderLayer,
    latent: TransformerEncoder | TransformerEncoderLayer | None,
    latents: ArrayLike,
    x: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
) -> Array:
    """Perceiver's block: a few latents attend to the whole input, then to themselves [1]_.

    Parameters
    ----------
    cross : TransformerEncoderLayer
        Of the attention to the input: `set_attention`. It takes x as it is; a norm of the input comes
        before.
    latent : TransformerEncoder or TransformerEncoderLayer, optional
        Of the latents' attention to themselves.
    latents : array_like, (m, d_model) or (batch, m, d_model)
        Learned ones, or the result of the block before.
    x, key_padding_mask
        The input, and what hides its elements: as in `set_attention`.

    Returns
    -------
    ndarray, (..., m, d_model)
        Perceiver IO reads it by one more `set_attention`, of output queries to the latents.

    References
    ----------
    .. [1] A. Jaegle et al., "Perceiver: General Perception with Iterative Attention", 2021, arXiv:2103.03206.
    """
    func = "perceiver"
    _calls.require(func, "latent", latent, LATENT, LATENTS)
    out = _set_attention(func, cross, latents, x, key_padding_mask, ("cross", "latents", "x"))
    return out if latent is None else latent(out)


def _set_attention(
    func: str,
    layer: TransformerEncoderLayer,
    x: ArrayLike,
    y: ArrayLike,
    mask: Any,
    names: tuple[str, str, str] = ("layer", "x", "y"),
) -> Array:
    """`set_attention`, for messages of `func`, in which layer, x and y have `names`."""
    ours, theirs, batch = checked_sets(func, layer, x, y, mask, names)
    ours, theirs = (np.broadcast_to(a, (*batch, *a.shape[-2:])) for a in (ours, theirs))
    queries = layer.norm1(ours) if layer.norm_first else ours
    total = layer.self_attn(queries, theirs, residual=ours, key_padding_mask=mask)
    if layer.norm_first:
        return layer.feed_forward(layer.norm2(total), residual=total)
    total = layer.norm1(total)
    return layer.norm2(layer.feed_forward(total, residual=total))


def checked_sets(
    func: str, layer: Any, x: Any, y: Any, mask: Any, names: tuple[str, str, str] = ("layer", "x", "y")
) -> tuple[Array, Array, Shape]:
    """Check the arguments of `set_attention`: both sets, and the batch dimensions of the result."""
    _calls.require(func, names[0], layer, TransformerEncoderLayer, LAYER)
    ours, theirs = float_array(func, names[1], x), float_array(func, names[2], y)
    width = layer.d_model
    for name, array in zip(names[1:], (ours, theirs), strict=True):
        if array.ndim not in (2, 3) or array.shape[-1] != width:
            raise wrong_shape(func, name, array, f"(n, {width}) or (batch, n, {width})")
    batch = ours.shape[:-2]
    if batch != theirs.shape[:-2]:  # the same inducing points, seeds or latents for all sets
        batch = broadcast_batch(func, **{names[1]: batch, names[2]: theirs.shape[:-2]})
    if mask is not None:  # checked here: the layer would name itself in its messages
        mask, shape = as_array(func, "key_padding_mask", mask), (*batch, theirs.shape[-2])
        if mask.shape != shape:
            name = "(batch, length)" if len(shape) > 1 else "(length,)"
            raise wrong_shape(func, "key_padding_mask", mask, f"{name} = {shape}")
        if mask.dtype != np.bool_ and not is_float(mask.dtype):
            raise wrong_dtype(func, "key_padding_mask", mask, MASK_DTYPES)
    return ours, theirs, batch
