"""Multi-head attention with its projections: torch's layer, and what models have added to it since."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fastattn._args.errors import wrong_shape
from fastattn._args.ops import like, rows
from fastattn._args.options import require_options
from fastattn._args.values import flag
from fastattn._engine.scratch import keep, scratch
from fastattn.cache import KVCache, restored_on_error
from fastattn.functional._attention import attention_weights
from fastattn.layers import _calls
from fastattn.layers._heads import FUNC, AttentionParameters, CallOptions
from fastattn.layers._recorded import NAMES, recorded_call
from fastattn.layers._scores import add_extra_keys, add_masks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args.types import Array, Ints
    from fastattn.grad import Pullback
    from fastattn.layers._heads import KeysValues
    from fastattn.layers._projections import Stack
    from fastattn.layers._scores import Names

_NOTHING = nullcontext()


@dataclass(eq=False)
class MultiHeadAttention(AttentionParameters):
    """Attention between projections: ``out_proj(attention(q_proj(query), k_proj(key), v_proj(value)))``.

    It has the names, options and parameters of torch's ``nn.MultiheadAttention``, batch first, and from
    num_kv_heads on what later models have added. All options combine.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of queries and output; query heads.
    bias : bool, default True
        Of all projections.
    add_bias_kv : bool, default False
        One more key and value, parameters, that every query attends.
    add_zero_attn : bool, default False
        One more key and value of zeros that every query attends.
    kdim, vdim : int, optional
        Width of keys and values before they are projected; default embed_dim.
    num_kv_heads : int, optional
        Key and value heads, each for a group of query heads (Ainslie et al. 2023); default num_heads.
    head_dim : int, optional
        Default ``embed_dim // num_heads``.
    rope : Rope, optional
        Rotates queries and keys by their positions: those in a call, behind those in its cache.
    qk_norm : bool, default False
        RMSNorm of each head's queries and keys before `rope`.
    qk_norm_eps : float, default 1e-6
    output_gate : bool, default False
        Multiply the heads by ``sigmoid(gate_proj(query))`` before out_proj (Qiu et al. 2025).
    sinks : bool, default False
        A logit a query head, a parameter, that enters the softmax's denominator only.
    window, softcap, scale, alibi_slopes : optional
        Of `fastattn.attention`. Query i stands at key i, behind the keys of a cache.
    weights_dtype : {"float32", "float64", "bfloat16", "int8", "int4", "nf4"}
        How the projections' weights are stored, as `fastattn.ops.pack` does; "float64" for float64 input, the
        others for all others.
    activations : {"int8"}, optional
        Round the inputs of the projections, as `fastattn.ops.linear` does, for weights in int8, int4 or nf4.
    rng : Generator or int, optional
        Draws the parameters as torch does: a generator, or the seed of a new one, with which layers of one
        shape are alike. Without it, they are missing until `load_state_dict`.

    Notes
    -----
    The parameters are as in torch: ``in_proj_weight`` (queries, keys, values, one below the other; with kdim
    or vdim ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``), ``in_proj_bias``, ``out_proj.weight``,
    ``out_proj.bias``, ``bias_k``, ``bias_v``; and ``q_norm.weight``, ``k_norm.weight``, ``gate_proj.weight``,
    ``gate_proj.bias`` and ``sinks``. All projections of one input are one `linear`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.layers import MultiHeadAttention
    >>> mha = MultiHeadAttention(64, 8, num_kv_heads=2, rng=np.random.default_rng(0))
    >>> mha(np.ones((1, 10, 64), np.float32), is_causal=True).shape
    (1, 10, 64)
    """

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        need_weights: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        need_weights: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[Array, Array]: ...
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        need_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Attend from query (B, L, embed_dim) to key (B, S, kdim) and value (B, S, vdim).

        Parameters
        ----------
        query : array_like, (B, L, embed_dim)
            Or (L, embed_dim), with results to match; then key and value are 2-D, too.
        key, value : array_like, optional
            Default: key is query, value is key.
        key_padding_mask : array_like, (B, S), optional
            Bool: **True hides a key**, as in torch, the opposite of `fastattn.attention`'s mask. Float: added
            to the key's scores. With a cache, S counts its keys, too.
        need_weights : bool, default False
            Return ``(out, weights)``; torch's default is True. The fused kernel still computes the output.
        attn_mask : array_like, (L, S), (B * num_heads, L, S) or (B, num_heads, L, S), optional
            Bool: **True hides**. Float, of any type: added to the scores. In the last form, axes of length 1
            broadcast.
        average_attn_weights : bool, default True
            Return the mean of the heads' weights, (B, L, S), instead of (B, num_heads, L, S).
        is_causal : bool, default False
            Query i attends the keys up to key i, behind those of the cache, unless a mask hides them.
        residual : array_like, (B, L, embed_dim), optional
            Added to the output, by the same kernel as out_proj.
        cache : KVCache, optional
            Append the keys and values, and attend to all that it then holds.
        lengths : array_like of int, (B,), optional
            With `cache`: how many of this call's tokens count in each sequence, from the first.
        keys_values : (ndarray, ndarray), optional
            Of `project_keys_values`, instead of key and value. Both are (B, num_kv_heads, S, head_dim) in
            query's dtype, or for float32 both in a 16-bit one.

        Returns
        -------
        out : ndarray, (B, L, embed_dim)
            In query's dtype. A query that may attend nothing gets out_proj's bias, where torch gives NaN.
        weights : ndarray, (B, L, S) or (B, num_heads, L, S)
            With `need_weights`. The keys of add_bias_kv and add_zero_attn come last.
        """
        self._require_parts()
        require_options(FUNC, options, CallOptions)
        need_weights = flag(FUNC, "need_weights", need_weights)
        average = flag(FUNC, "average_attn_weights", options.pop("average_attn_weights", True))
        x = _calls.checked(FUNC, "query", query, self.embed_dim, self.weights_dtype)
        residual = like(FUNC, "residual", options.pop("residual", None), x.shape, x.dtype, "query")
        if value is key or (key is None and value is query):
            value = None
        if key is query:
            key = None
        batched = _calls.batch_first(FUNC, "query", x)
        if batched is not x:
            key, value = _calls.one_batch(FUNC, "key", key), _calls.one_batch(FUNC, "value", value)
            name = "key_padding_mask"
            options[name] = _calls.one_batch(FUNC, name, options.get(name))
        batch, length, _ = batched.shape
        if (given := options.get("keys_values")) is not None:
            if not (key is None and value is None and options.get("cache") is None):
                came = "keys_values is given with key, value or cache"
                raise ValueError(f"{FUNC}(): {came}; expected it alone")
            heads_kv, head_dim = self._heads_kv, self._head_dim
            options["keys_values"] = _calls.keys_values(FUNC, given, batch, heads_kv, head_dim, x.dtype)
        added = None if residual is None else rows(residual)
        options["need_weights"] = need_weights
        out, weights = self._attend(rows(x), batch, length, key, value, added, **options)
        out = out.reshape(x.shape)
        if not need_weights:
            return out
        weights = weights.mean(axis=1) if average else weights
        return out, weights if x.ndim == 3 else weights[0]

    def _vjp(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Array, Pullback]:
        """The result, and what makes gradients: ``dquery, grads = pullback(dout)``; see `Pullback`.

        With a key, and with a value, there are their gradients, too: ``dquery, dkey, dvalue, grads``. An
        array that is passed twice counts once. Options are those of a call, without a cache. Masks of floats
        are no parameters and have no gradient. With `dropout`, that share of the probabilities becomes 0, as
        `seed` says: see `fastattn.attention`.
        """
        require_options(FUNC, options, CallOptions)
        return recorded_call(self, query, key, value, checkpoint, dropout, seed, **options)

    def project_keys_values(self, key: ArrayLike, value: ArrayLike | None = None) -> KeysValues:
        """Keys and values of a memory, (B, heads_kv, S, head_dim), once for many calls: see `keys_values`."""
        k, v = self._keys_values(key, None if value is key else value, None)
        k = self._placed(k, self.k_norm, 0)
        return np.ascontiguousarray(k), np.ascontiguousarray(v)  # views would keep the whole product alive

    def _attend(
        self,
        x: Array,
        batch: int,
        length: int,
        key: Any = None,
        value: Any = None,
        residual: Array | None = None,
        *,
        key_padding_mask: Any = None,
        attn_mask: Any = None,
        is_causal: bool = False,
        cache: KVCache | None = None,
        lengths: Any = None,
        keys_values: KeysValues | None = None,
        need_weights: bool = False,
        q_offset: Ints | int = 0,
        names: Names = NAMES,
    ) -> tuple[Array, Any]:
        """A call's output, and the weights of each head or None; x, residual and out are rows of embed_dim.

        `key` is None if it is the query, `value` if it is the key. Without a cache, the first query stands at
        `q_offset`, and the first of `keys_values` at 0.
        """
        if lengths is not None and cache is None:
            expected = "both, or a key_padding_mask"
            raise ValueError(f"{names.func}(): lengths is given without cache; expected {expected}")
        if is_causal is not False:
            is_causal = flag(names.func, "is_causal", is_causal)
        if cache is not None:
            _calls.require(names.func, "cache", cache, KVCache, "a KVCache")
            if cache.batch not in (None, batch):
                expected = f"({cache.batch}, length, {self.embed_dim}), the batch in the cache"
                query = x.reshape(batch, length, self.embed_dim)
                raise wrong_shape(names.func, names.query, query, expected)
            q_offset = cache.offset
        options = self._options.copy()
        if self.sink_logits is not None:
            options["sinks"] = self.sink_logits

        maps = self.query_maps
        first = len(maps.sizes) - 1  # the queries' map: with a gate, that comes before it
        if self.all_maps is not None and key is None and value is None and keys_values is None:
            maps = self.all_maps
        product = scratch("product", len(x), maps.weight.out_features, x.dtype)
        _calls.linear(x, self._projection(maps), None, None, product)
        q, *k_v = self._heads(product, batch, length, maps, first)
        if k_v:
            k, v = k_v
        elif keys_values is not None:
            k, v = keys_values
        else:
            key = x.reshape(batch, length, self.embed_dim) if key is None else key
            k, v = self._keys_values(key, value, batch)
        q = self._placed(q, self.q_norm, q_offset)
        if keys_values is None:
            k = self._placed(k, self.k_norm, q_offset)
        with _NOTHING if cache is None else restored_on_error((cache,)):
            if cache is not None:
                k, v, kv_lengths, q_offset = cached = cache.append(k, v, lengths)
                if cached.k_scale is not None and cached.v_scale is not None:
                    options["k_scale"], options["v_scale"] = cached.k_scale, cached.v_scale
                if kv_lengths is not None:
                    options["kv_lengths"] = kv_lengths
                # A token behind all others attends to all of them without `causal`.
                is_causal = is_causal and (length > 1 or kv_lengths is not None)
            if is_causal or self._positional or self._extra:
                options["causal"], options["q_offset"] = is_causal, q_offset
            if attn_mask is not None or key_padding_mask is not None:
                shape = (batch, self.num_heads, length, k.shape[2])
                add_masks(options, names, attn_mask, key_padding_mask, shape, q.dtype)
            if self._extra:
                k, v = (  # extra keys are parameters: they join keys that are widened
                    _calls.widened(x, options.pop(name, None), q.dtype)
                    for name, x in (("k_scale", k), ("v_scale", v))
                )
                k, v = add_extra_keys(options, length, k, v, self._extra_keys())
            mixed = scratch("mixed", len(x), self._width, x.dtype)
            by_head = mixed.reshape(batch, length, self.num_heads, self._head_dim).transpose(0, 2, 1, 3)
            _calls.attention(FUNC, q, k, v, by_head, options, made_here=keys_values is None)
        gated = _calls.gate(product[:, : self._width], mixed) if self.output_gate else mixed
        out = _calls.linear(gated, self.out_proj._projection(), None, residual)
        weights = None
        if need_weights:
            k = _calls.widened(k, options.pop("k_scale", None), q.dtype)
            options.pop("v_scale", None)
            weights = attention_weights(q, k.astype(q.dtype, copy=False), **options)
        keep("mixed", mixed)
        keep("product", product)
        return out, weights

    def _keys_values(self, key: Any, value: Any, batch: int | None) -> KeysValues:
        """Projected key and value, (B, heads_kv, S, head_dim) each; value is None where it is key."""
        key = self._input("key", key, self.kdim, batch)
        if value is None and self.key_value_maps is not None:
            maps = self.key_value_maps
            product = _calls.linear(rows(key), self._projection(maps))
            k, v = self._heads(product, len(key), key.shape[1], maps, 0)
            return k, v
        value = self._input("value", key if value is None else value, self.vdim, len(key))
        length = key.shape[1]
        if value.shape[1] != length:
            raise wrong_shape(FUNC, "value", value, f"a length of {length}, as key has")
        k = _calls.linear(rows(key), self._projection(self.key_map))
        v = _calls.linear(rows(value), self._projection(self.value_map))
        (k,) = self._heads(k, len(key), length, self.key_map, 0)
        (v,) = self._heads(v, len(key), length, self.value_map, 0)
        return k, v

    def _input(self, name: str, x: Any, features: int | None, batch: int | None) -> Array:
        """`x`, key or value, checked."""
        array = _calls.checked(FUNC, name, x, features or self.embed_dim, self.weights_dtype)
        if array.ndim != 3 or batch not in (None, len(array)):
            expected = f"({'batch' if batch is None else batch}, length, {array.shape[-1]})"
            raise wrong_shape(FUNC, name, array, expected)
        return array

    def _heads(self, product: Array, batch: int, length: int, maps: Stack, first: int) -> list[Array]:
        """What the maps from `first` on made in product (B * L, features): views (B, heads, L, head_dim)."""
        width, head_dim = product.shape[1], self._head_dim
        places = zip(maps.begins[first:], maps.sizes[first:], strict=True)
        if maps.unit % head_dim == 0:  # views of one view, which are made faster
            heads = product.reshape(batch, length, width // head_dim, head_dim).transpose(0, 2, 1, 3)
            return [heads[:, begin // head_dim : (begin + size) // head_dim] for begin, size in places]
        parts = [product[:, begin : begin + size] for begin, size in places]
        shapes = [(batch, length, part.shape[1] // head_dim, head_dim) for part in parts]
        return [part.reshape(s).transpose(0, 2, 1, 3) for part, s in zip(parts, shapes, strict=True)]

    def _placed(self, x: Array, norm: Array | None, offset: Any) -> Array:
        """Queries or keys x (B, heads, L, head_dim), normalised and rotated if the layer does so."""
        if norm is not None:
            y = x.transpose(0, 2, 1, 3)
            z = _calls.norm("rms_norm", rows(y), norm, None, self.qk_norm_eps)
            x = z.reshape(y.shape).transpose(0, 2, 1, 3)
        if self.rope is not None:
            self.rope.rotate(x, offset)
        return x

    def _extra_keys(self) -> list[tuple[Any, Any]]:
        """Additional keys and values that every query attends, (heads_kv, head_dim) each."""
        extra: list[tuple[Any, Any]] = [] if self.bias_k is None else [(self.bias_k, self.bias_v)]
        return [*extra, (0, 0)] if self.add_zero_attn else extra
