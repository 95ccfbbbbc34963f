"""Attention between a set and a few vectors: the blocks of Set Transformer and Perceiver."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.types import ArrayLike, Bools
from fastattn._args.values import as_array, broadcast_batch, float_array, is_float
from fastattn.layers import _computation
from fastattn.layers._basic import FeedForward
from fastattn.layers._computation import Computation, differentiable
from fastattn.layers._scores import Names, wrong_mask
from fastattn.layers._stacks import TransformerEncoder
from fastattn.layers._transformer import TransformerEncoderLayer

if TYPE_CHECKING:
    from fastattn._engine.plain import Plain

_LAYER = "a TransformerEncoderLayer"
_LATENT = (TransformerEncoder, TransformerEncoderLayer, type(None))
_LATENTS = "an encoder, a layer of one, or None"


@differentiable
def set_attention(
    layer: TransformerEncoderLayer, x: ArrayLike, y: ArrayLike, *, key_padding_mask: ArrayLike | None = None
) -> Computation:
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
    sets = _Sets(layer, x, y, key_padding_mask, ("layer", "x", "y"))

    def run(tape: Plain, ours: Any, theirs: Any) -> Any:
        ours, theirs = sets.spread(tape, ours, theirs)
        return sets.attend(tape, layer, ours, sets.shown(tape, theirs), key_padding_mask)

    return sets.computation([layer], run)


@differentiable
def induced_set_attention(
    first: TransformerEncoderLayer,
    second: TransformerEncoderLayer,
    inducing: ArrayLike,
    x: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
) -> Computation:
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
    _computation.require("second", second, TransformerEncoderLayer, _LAYER)
    sets = _Sets(first, inducing, x, key_padding_mask, ("first", "inducing", "x"))
    sets.require_fit("second", second, first)

    def run(tape: Plain, points: Any, ours: Any) -> Any:
        points, ours = sets.spread(tape, points, ours)
        summary = sets.attend(tape, first, points, sets.shown(tape, ours), key_padding_mask)
        return sets.attend(tape, second, ours, summary, None)

    return sets.computation([first, second], run, result=1)


@differentiable
def pooling_by_attention(
    layer: TransformerEncoderLayer,
    seeds: ArrayLike,
    x: ArrayLike,
    *,
    feed_forward: FeedForward | None = None,
    key_padding_mask: ArrayLike | None = None,
) -> Computation:
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
    layers = [layer] if feed_forward is None else [layer, feed_forward]
    if feed_forward is not None:
        _computation.require("feed_forward", feed_forward, FeedForward, "a FeedForward")
    sets = _Sets(layer, seeds, x, key_padding_mask, ("layer", "seeds", "x"))
    if feed_forward is not None:
        sets.require_fit("feed_forward", feed_forward, layer)

    def run(tape: Plain, ours: Any, theirs: Any) -> Any:
        ours, theirs = sets.spread(tape, ours, theirs)
        theirs = sets.shown(tape, theirs)
        if feed_forward is not None:
            theirs = feed_forward._forward(tape, theirs)
        return sets.attend(tape, layer, ours, theirs, key_padding_mask)

    return sets.computation(layers, run)


@differentiable
def perceiver(
    cross: TransformerEncoderLayer,
    latent: TransformerEncoder | TransformerEncoderLayer | None,
    latents: ArrayLike,
    x: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
) -> Computation:
    """Perceiver's block: a few latents attend to the whole input, then to themselves [1]_.

    Parameters
    ----------
    cross : TransformerEncoderLayer
        Attends to the input: `set_attention`. It takes x as it is; a norm of the input comes
        before.
    latent : TransformerEncoder or TransformerEncoderLayer, optional
        Lets the latents attend to themselves.
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
    _computation.require("latent", latent, _LATENT, _LATENTS)
    sets = _Sets(cross, latents, x, key_padding_mask, ("cross", "latents", "x"))
    if latent is not None:
        inner = latent.layers[0] if isinstance(latent, TransformerEncoder) else latent
        sets.require_fit("latent", inner, cross)

    def run(tape: Plain, ours: Any, theirs: Any) -> Any:
        ours, theirs = sets.spread(tape, ours, theirs)
        out = sets.attend(tape, cross, ours, sets.shown(tape, theirs), key_padding_mask)
        return out if latent is None else latent._forward(tape, out, sets.sizes(tape, out))

    return sets.computation([cross] if latent is None else [cross, latent], run)


class _Sets:
    """Two sets, checked; messages call the layer and them by `names`."""

    def __init__(self, layer: Any, x: Any, y: Any, mask: Any, names: tuple[str, str, str]):
        _computation.require(names[0], layer, TransformerEncoderLayer, _LAYER)
        ours, theirs = float_array(names[1], x), float_array(names[2], y)
        width = layer.d_model
        for name, array in zip(names[1:], (ours, theirs), strict=True):
            if array.ndim not in (2, 3) or array.shape[-1] != width:
                raise wrong_shape(name, array, f"(n, {width}) or (batch, n, {width})")
        batch = ours.shape[:-2]
        if batch != theirs.shape[:-2]:  # the same inducing points, seeds or latents for all sets
            batch = broadcast_batch(**{names[1]: batch, names[2]: theirs.shape[:-2]})
        self._hidden: Bools | None = None  # rows of y that nobody attends
        if mask is not None:  # checked here: the layer would name itself in its messages
            mask, shape = as_array("key_padding_mask", mask), (*batch, theirs.shape[-2])
            if mask.shape != shape:
                name = "(batch, length)" if len(shape) > 1 else "(length,)"
                raise wrong_shape("key_padding_mask", mask, f"{name} = {shape}")
            if mask.dtype != np.bool_ and not is_float(mask.dtype):
                raise wrong_mask("key_padding_mask", mask)
            self._hidden = (mask if mask.dtype == np.bool_ else mask == -np.inf).ravel()
        self._batch, self.size = batch, prod(batch)
        self._arrays = {
            name: _computation.checked(name, array, width, layer.weights_dtype)
            for name, array in zip(names[1:], (ours, theirs), strict=True)
        }
        self._names = Names(names[1], "attn_mask", "key_padding_mask")

    def require_fit(self, name: str, layer: Any, first: TransformerEncoderLayer) -> None:
        """Raise unless `layer` takes the result of the first one."""
        for field in ("d_model", "weights_dtype"):
            ours, theirs = getattr(layer, field), getattr(first, field)
            if ours != theirs and (field == "d_model" or "float64" in (ours, theirs)):
                raise ValueError(f"(): {name} has {field} {ours!r}; expected {theirs!r}")

    def spread(self, tape: Plain, *sets: Any) -> list[Any]:
        """Rows of both sets for each sequence of the batch."""
        counts = [prod(a.shape[:-2]) for a in self._arrays.values()]
        sequences = zip(sets, counts, strict=True)
        return [x if n == self.size else tape.repeated(x, self.size) for x, n in sequences]

    def shown(self, tape: Plain, y: Any) -> Any:
        """Rows y, 0 where the mask hides them: NaN there would be in the gradients of their maps."""
        return tape.cleared(y, self._hidden) if tape.recording and self._hidden is not None else y

    def sizes(self, tape: Plain, x: Any) -> tuple[int, int]:
        """The batch and the length of rows x."""
        return self.size, len(tape.array(x)) // max(1, self.size)

    def attend(self, tape: Plain, layer: TransformerEncoderLayer, x: Any, y: Any, mask: Any) -> Any:
        """`set_attention` of rows."""
        if mask is not None and not self._batch:
            mask = _computation.one_batch("key_padding_mask", mask)
        sizes = self.sizes(tape, x)
        how: Any = {"key": y, "key_padding_mask": mask, "names": self._names}
        total, _ = layer._add_attention(tape, layer.norm1, x, layer.self_attn, sizes, **how)
        return layer._add_feed_forward(tape, layer.norm2, total)

    def computation(self, layers: list[Any], run: Any, result: int = 0) -> Computation:
        """The call, whose result is as long as the set of that number."""
        for layer in layers:
            layer._require_parts()
        shape = (*self._batch, *list(self._arrays.values())[result].shape[-2:])
        return Computation(layers, self._arrays, run, shape)
