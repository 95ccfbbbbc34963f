"""Gradients of the blocks of Set Transformer and Perceiver."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.types import lane_dtype
from fastattn._args.values import as_array
from fastattn.layers import _calls
from fastattn.layers._basic import FeedForward
from fastattn.layers._gradients import pulled_through
from fastattn.layers._scores import Names
from fastattn.layers._sets import (
    LATENT,
    LATENTS,
    LAYER,
    checked_sets,
    induced_set_attention,
    perceiver,
    pooling_by_attention,
    set_attention,
)
from fastattn.layers._stacks import TransformerEncoder
from fastattn.layers._transformer import TransformerEncoderLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Shape
    from fastattn._engine.tape import Tape, Value
    from fastattn.grad import Pullback

_PLAIN: Any = {"src_mask": None, "src_key_padding_mask": None, "is_causal": False}


def set_attention_vjp(
    layer: TransformerEncoderLayer,
    x: ArrayLike,
    y: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
    checkpoint: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Pullback]:
    """`set_attention`, and what makes gradients: ``dx, dy, grads = pullback(dout)``; see `Pullback`.

    Parameters
    ----------
    layer, x, y, key_padding_mask
        As in `set_attention`. The mask has no gradient; what it hides, NaN included, reaches none.
    checkpoint, dropout, seed
        As in `fastattn.grad.vjp`.

    Returns
    -------
    out : ndarray
        The result of `set_attention`; with dropout, what is left of it.
    pullback : Pullback
        From the gradient of `out` to those of x and y, each summed over what it was broadcast along, and the
        dict of those of the parameters.
    """
    call = _Call("set_attention", key_padding_mask)
    call.add("x", layer, x, y)

    def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
        ours, theirs = call.spread(tape, inputs)
        return call.attend(tape, layer, ours, call.shown(tape, theirs), key_padding_mask)

    return call.pulled([layer], compute, checkpoint, dropout, seed)


def induced_set_attention_vjp(
    first: TransformerEncoderLayer,
    second: TransformerEncoderLayer,
    inducing: ArrayLike,
    x: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
    checkpoint: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Pullback]:
    """`induced_set_attention`, and ``dinducing, dx, grads_first, grads_second = pullback(dout)``.

    Parameters
    ----------
    first, second, inducing, x, key_padding_mask
        As in `induced_set_attention`.
    checkpoint, dropout, seed
        As in `fastattn.grad.vjp`.

    Returns
    -------
    out : ndarray
        The result of `induced_set_attention`.
    pullback : Pullback
        As of `set_attention`, with a dict for each layer. A layer that is passed twice has
        the sum of its gradients in both.
    """
    call = _Call("induced_set_attention", key_padding_mask)
    _calls.require(call.func, "second", second, TransformerEncoderLayer, LAYER)
    call.add("inducing", first, inducing, x, ("first", "inducing", "x"))
    call.fits("second", second, first)

    def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
        points, ours = call.spread(tape, inputs)
        summary = call.attend(tape, first, points, call.shown(tape, ours), key_padding_mask)
        return call.attend(tape, second, ours, summary, None)

    return call.pulled([first, second], compute, checkpoint, dropout, seed, of=1)


def pooling_by_attention_vjp(
    layer: TransformerEncoderLayer,
    seeds: ArrayLike,
    x: ArrayLike,
    *,
    feed_forward: FeedForward | None = None,
    key_padding_mask: ArrayLike | None = None,
    checkpoint: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Pullback]:
    """`pooling_by_attention`, and ``dseeds, dx, grads = pullback(dout)``, last the dict of a `feed_forward`.

    Parameters
    ----------
    layer, seeds, x, feed_forward, key_padding_mask
        As in `pooling_by_attention`.
    checkpoint, dropout, seed
        As in `fastattn.grad.vjp`.

    Returns
    -------
    out : ndarray
        The result of `pooling_by_attention`.
    pullback : Pullback
        As of `set_attention`, with a dict more if there is a `feed_forward`.
    """
    call = _Call("pooling_by_attention", key_padding_mask)
    layers: list[Any] = [layer]
    if feed_forward is not None:
        _calls.require(call.func, "feed_forward", feed_forward, FeedForward, "a FeedForward")
        layers.append(feed_forward)
    call.add("seeds", layer, seeds, x, ("layer", "seeds", "x"))
    if feed_forward is not None:
        call.fits("feed_forward", feed_forward, layer)

    def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
        ours, theirs = call.spread(tape, inputs)
        theirs = call.shown(tape, theirs)
        if feed_forward is not None:
            theirs = feed_forward._record(tape, theirs)
        return call.attend(tape, layer, ours, theirs, key_padding_mask)

    return call.pulled(layers, compute, checkpoint, dropout, seed)


def perceiver_vjp(
    cross: TransformerEncoderLayer,
    latent: TransformerEncoder | TransformerEncoderLayer | None,
    latents: ArrayLike,
    x: ArrayLike,
    *,
    key_padding_mask: ArrayLike | None = None,
    checkpoint: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Pullback]:
    """`perceiver`, and ``dlatents, dx, grads_cross = pullback(dout)``, last the dict of `latent`, if given.

    Parameters
    ----------
    cross, latent, latents, x, key_padding_mask
        As in `perceiver`.
    checkpoint, dropout, seed
        As in `fastattn.grad.vjp`.

    Returns
    -------
    out : ndarray
        The result of `perceiver`.
    pullback : Pullback
        As of `induced_set_attention`.
    """
    call = _Call("perceiver", key_padding_mask)
    _calls.require(call.func, "latent", latent, LATENT, LATENTS)
    call.add("latents", cross, latents, x, ("cross", "latents", "x"))
    layers: list[Any] = [cross] if latent is None else [cross, latent]
    if latent is not None:
        call.fits("latent", latent.layers[0] if isinstance(latent, TransformerEncoder) else latent, cross)

    def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
        ours, theirs = call.spread(tape, inputs)
        out = call.attend(tape, cross, ours, call.shown(tape, theirs), key_padding_mask)
        if isinstance(latent, TransformerEncoder):
            return latent._record(tape, out, call.size, (), False, _PLAIN)
        return out if latent is None else latent._record(tape, out, call.size, **_PLAIN)

    return call.pulled(layers, compute, checkpoint, dropout, seed)


class _Call:
    """What one of these functions was called with, checked."""

    arrays: list[Array]  # both sets, as they were given
    batch: Shape  # of the result
    size: int  # sequences

    def __init__(self, func: str, mask: Any) -> None:
        self.func, self.mask = func, mask

    def add(
        self, queries: str, layer: Any, x: Any, y: Any, names: tuple[str, str, str] = ("layer", "x", "y")
    ) -> None:
        """Check the two sets of the first layer, of which `queries` is the name of the first one."""
        *arrays, self.batch = checked_sets(self.func, layer, x, y, self.mask, names)
        self.arrays = [
            _calls.checked(self.func, name, a, layer.d_model, layer.weights_dtype)
            for name, a in zip(names[1:], arrays, strict=True)
        ]
        if len({a.dtype for a in self.arrays}) > 1:
            came = f"{names[2]} has dtype {self.arrays[1].dtype}"
            raise TypeError(f"{self.func}(): {came}; expected {self.arrays[0].dtype}, as {names[1]} has")
        self.size = int(np.prod(self.batch))
        self.names = Names(self.func, queries, "attn_mask", "key_padding_mask")

    def fits(self, name: str, layer: Any, first: TransformerEncoderLayer) -> None:
        """Raise unless `layer` takes what the first one makes."""
        for what in ("d_model", "weights_dtype"):
            ours, theirs = getattr(layer, what), getattr(first, what)
            if ours != theirs and (what == "d_model" or "float64" in (ours, theirs)):
                raise ValueError(f"{self.func}(): {name} has {what} {ours!r}; expected {theirs!r}")

    def spread(self, tape: Tape, inputs: Sequence[Value]) -> list[Value]:
        """Rows of both sets, for each sequence of the batch."""
        return [self._repeated(tape, x, len(a)) for x, a in zip(inputs, self._sets(), strict=True)]

    def _sets(self) -> list[Array]:
        return [a.reshape(prod(a.shape[:-2]), *a.shape[-2:]) for a in self.arrays]

    def _repeated(self, tape: Tape, x: Value, sequences: int) -> Value:
        """The rows of all sequences, of which there is one or all."""
        if sequences == self.size:
            return x
        array, size = x.array, self.size

        def back(dout: Array, owned: bool) -> None:
            total = dout.reshape(size, *array.shape).sum(axis=0, dtype=lane_dtype(dout.dtype))
            x.put(total.astype(dout.dtype, copy=False), owned=True)

        return tape.note(np.tile(array, (size, 1)), back)

    def shown(self, tape: Tape, y: Value) -> Value:
        """Rows y, 0 where the mask hides them: NaN there would be in the gradients of what maps them."""
        if self.mask is None:
            return y
        mask = as_array(self.func, "key_padding_mask", self.mask)
        hidden: Bools = (mask if mask.dtype == np.bool_ else mask == -np.inf).ravel()
        return tape.cleared(y, hidden)

    def attend(
        self, tape: Tape, layer: TransformerEncoderLayer, x: Value, y: Value, mask: ArrayLike | None
    ) -> Value:
        """`set_attention` on a tape."""
        if mask is not None and not self.batch:
            mask = _calls.one_batch(self.func, "key_padding_mask", mask)
        how: Any = {"batch": self.size, "key": y, "key_padding_mask": mask, "names": self.names}
        total = layer._record_attention(tape, layer.norm1, x, layer.self_attn, **how)
        return layer._record_feed_forward(tape, layer.norm2, total)

    def pulled(
        self, layers: list[Any], compute: Any, checkpoint: bool, dropout: float, seed: int | None, of: int = 0
    ) -> tuple[Array, Pullback]:
        """The result, as long as the set number `of`, and its pullback."""
        shape = (*self.batch, *self.arrays[of].shape[-2:])
        return pulled_through(self.func, layers, compute, self.arrays, shape, checkpoint, dropout, seed)


_RECORDED: Any = {
    set_attention: set_attention_vjp,
    induced_set_attention: induced_set_attention_vjp,
    pooling_by_attention: pooling_by_attention_vjp,
    perceiver: perceiver_vjp,
}
for _function, _record in _RECORDED.items():
    _function._vjp = _record
