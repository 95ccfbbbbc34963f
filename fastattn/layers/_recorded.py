"""Multi-head attention on a tape: what it computes without a cache, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import wrong_shape
from fastattn._args.grad_types import RowsGradArgs
from fastattn._args.ops import rows
from fastattn._args.types import FLOAT64, BackwardArgs
from fastattn._args.values import flag
from fastattn._engine import dispatch
from fastattn._engine.recycled import recycled_empty
from fastattn._engine.settings import get_num_threads
from fastattn.layers import _calls
from fastattn.layers._gradients import pulled, refuse_cache
from fastattn.layers._heads import FUNC
from fastattn.layers._scores import Names, add_extra_keys, add_masks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastattn._args.types import Array
    from fastattn._engine.tape import Tape, Value
    from fastattn.grad import Pullback
    from fastattn.layers._attention import MultiHeadAttention
    from fastattn.layers._projections import Stack


class _Product(NamedTuple):
    """What the maps of one input make, and where the heads are in it."""

    value: Value
    maps: Stack
    first: int  # the first map of heads: a gate may come before

    def empty(self) -> Array:
        """Room for its gradient, 0 where no map is."""
        maps, array = self.maps, self.value.array
        gaps = sum(maps.sizes) < maps.weight.out_features
        return np.zeros_like(array) if gaps else recycled_empty(array.shape, array.dtype)


NAMES = Names(FUNC, "query", "attn_mask", "key_padding_mask")


def recorded_call(
    layer: MultiHeadAttention,
    query: Any,
    key: Any,
    value: Any,
    checkpoint: bool,
    dropout: float,
    seed: int | None,
    *,
    key_padding_mask: Any = None,
    attn_mask: Any = None,
    is_causal: bool = False,
    residual: Any = None,
    **others: Any,
) -> tuple[Array, Pullback]:
    """`MultiHeadAttention._vjp`."""
    refuse_cache(FUNC, others)
    if "average_attn_weights" in others:
        expected = "none: weights are not returned"
        raise TypeError(f"{FUNC}(): average_attn_weights is given; expected {expected}")
    if residual is not None:
        expected = "None: add it to the result, whose gradient is the residual's, too"
        raise ValueError(f"{FUNC}(): residual is given; expected {expected}")
    x = _calls.checked(FUNC, "query", query, layer.embed_dim, layer.weights_dtype)
    key = None if key is query else key
    value = None if value is key or (key is None and value is query) else value
    batched = _calls.batch_first(FUNC, "query", x)
    if batched is not x:
        key, value = _calls.one_batch(FUNC, "key", key), _calls.one_batch(FUNC, "value", value)
        key_padding_mask = _calls.one_batch(FUNC, "key_padding_mask", key_padding_mask)
    batch = len(batched)
    keys = layer._input("key", batched if key is None else key, layer.kdim, batch)
    values = layer._input("value", keys if value is None else value, layer.vdim, batch)
    if values.shape[1] != keys.shape[1]:
        raise wrong_shape(FUNC, "value", values, f"a length of {keys.shape[1]}, as key has")
    given = {"x": batched}
    given |= {} if key is None else {"key": keys}
    given |= {} if value is None else {"value": values}
    options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    options["is_causal"] = flag(FUNC, "is_causal", is_causal)

    def compute(tape: Tape, inputs: Sequence[Value]) -> Value:
        values: dict[str, Any] = dict(zip(given, inputs, strict=True))
        return record(layer, tape, batch=batch, **values, **options)

    arrays = [array if batched is x else array[0] for array in given.values()]
    return pulled(layer, compute, arrays, x.shape, checkpoint, dropout, seed)


def record(
    layer: MultiHeadAttention,
    tape: Tape,
    x: Value,
    batch: int,
    key: Value | None = None,
    value: Value | None = None,
    residual: Value | None = None,
    *,
    key_padding_mask: Any = None,
    attn_mask: Any = None,
    is_causal: bool = False,
    names: Names = NAMES,
) -> Value:
    """`MultiHeadAttention._attend` on a tape, of rows; `key` is None if it is x, `value` if it is the key."""
    products = _products(layer, tape, x, key, value)
    length = len(x.array) // batch if batch else 0

    def heads(arrays: list[Array]) -> list[Array]:
        """Queries, keys and values, (batch, heads, length, head_dim) each, in their products' arrays."""
        found = []
        for array, product in zip(arrays, products, strict=True):
            own = len(array) // batch if batch else 0
            found += layer._heads(array, batch, own, product.maps, product.first)
        return found

    before = heads([product.value.array for product in products])
    q = layer._placed(before[0], layer.q_norm, 0)
    k, v = layer._placed(before[1], layer.k_norm, 0), before[2]
    options: dict[str, Any] = layer._options.copy()
    if layer.sink_logits is not None:
        options["sinks"] = layer.sink_logits
    if is_causal or layer._positional or layer._extra:
        options["causal"], options["q_offset"] = is_causal, 0
    len_k = k.shape[2]
    if attn_mask is not None or key_padding_mask is not None:
        shape = (batch, layer.num_heads, length, len_k)
        add_masks(options, names, attn_mask, key_padding_mask, shape, q.dtype)
    if layer._extra:
        k, v = add_extra_keys(options, length, k, v, layer._extra_keys())
    args = attention_args(FUNC, q, k, v, names=("query", "key", "value"), return_lse=True, **options)
    mixed = recycled_empty((len(x.array), layer._width), x.array.dtype)

    def by_head(array: Array) -> Array:
        return array.reshape(batch, length, layer.num_heads, layer._head_dim).transpose(0, 2, 1, 3)

    args.out = by_head(mixed)
    args.dropout, args.seed = tape.attention_dropout()
    dispatch.run(args)
    gate = products[0].value.array[:, : layer._width] if layer.output_gate else None
    out = mixed if gate is None else _calls.gate(gate, mixed)

    def back(dout: Array, owned: bool) -> None:
        arrays = [product.empty() for product in products]
        if gate is not None:
            dmixed = recycled_empty(mixed.shape, mixed.dtype)
            dgate = arrays[0][:, : layer._width]
            gated = RowsGradArgs("activate", dout, gate, get_num_threads(), dgate, None, None, mixed, dmixed)
            gated.activation = "sigmoid"
            dispatch.run_grad(gated)
            dout = dmixed
        dq, dk, dv = places = heads(arrays)
        if layer._extra:
            dk, dv = np.empty(args.k.shape, args.k.dtype), np.empty(args.v.shape, args.v.dtype)
        sinks = None
        if layer.sink_logits is not None:
            sinks = np.zeros((batch, layer.num_heads), FLOAT64)
        if args.out.size:
            backward = BackwardArgs(args, by_head(dout), None, dq, dk, dv, args.scale, dsinks=sinks)
            dispatch.run(backward)
        else:
            dq[...], dk[...], dv[...] = 0, 0, 0
        if sinks is not None and layer.sink_logits is not None:
            logits = layer.sink_logits
            tape.gradients.add(logits, sinks.sum(axis=0).astype(logits.dtype))
        if layer._extra:
            places[1][...], places[2][...] = dk[:, :, :len_k], dv[:, :, :len_k]
            for parameter, d in ((layer.bias_k, dk), (layer.bias_v, dv)):
                if parameter is not None:
                    tape.gradients.add(parameter, d[:, :, len_k].sum(axis=0, dtype=parameter.dtype))
        for d, x_, norm in zip(places, before, (layer.q_norm, layer.k_norm, None), strict=True):
            if norm is not None:
                _unplaced(layer, tape, d, x_, norm)
            elif layer.rope is not None and x_ is not before[2]:
                layer.rope.rotate(d, 0, back=True)
        for product, array in zip(products, arrays, strict=True):
            product.value.put(array, owned=True)

    attended = tape.note(out, back)
    return tape.linear(attended, *layer.out_proj._projection(), residual=residual)


def _products(
    layer: MultiHeadAttention, tape: Tape, x: Value, key: Value | None, value: Value | None
) -> list[_Product]:
    """The projections: of all three together, or of what comes from another input apart."""
    maps = layer.query_maps
    first = len(maps.sizes) - 1
    parts = [(x, maps, first)]
    if key is None and value is None and layer.all_maps is not None:
        parts = [(x, layer.all_maps, first)]
    elif value is None and layer.key_value_maps is not None:
        parts.append((x if key is None else key, layer.key_value_maps, 0))
    else:
        key = x if key is None else key
        parts += [(key, layer.key_map, 0), (key if value is None else value, layer.value_map, 0)]
    return [
        _Product(tape.linear(source, *layer._projection(own)), own, begin) for source, own, begin in parts
    ]


def _unplaced(layer: MultiHeadAttention, tape: Tape, d: Array, x: Array, norm: Array) -> None:
    """Make d (B, heads, L, head_dim), the gradient of `_placed`, that of x, which was normalised first."""
    if layer.rope is not None:
        layer.rope.rotate(d, 0, back=True)
    by_row = d.transpose(0, 2, 1, 3)
    before = rows(x.transpose(0, 2, 1, 3))
    dx, dweight = recycled_empty(before.shape, before.dtype), np.empty_like(norm)
    args = RowsGradArgs("rms_norm", rows(by_row), before, get_num_threads(), dx, eps=layer.qk_norm_eps)
    args.weight, args.dweight = norm, dweight
    dispatch.run_grad(args)
    by_row[...] = dx.reshape(by_row.shape)
    tape.gradients.add(norm, dweight)
