"""Multi-head attention with its projections: torch's layer, and what models have added to it since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from fastattn._args.attention import attention_args
from fastattn._args.errors import named, wrong_shape
from fastattn._args.ops import like, rows
from fastattn._args.options import require_options
from fastattn._args.types import Array, ArrayLike, Bools, Ints, Unpack, lane_dtype, plain_args
from fastattn._args.values import flag, is_int4
from fastattn._engine import settings
from fastattn._engine.tape import PLAIN
from fastattn._reference import int4
from fastattn.functional._attention import attention_weights
from fastattn.layers import _computation
from fastattn.layers._attention_parameters import AttentionParameters, CallOptions
from fastattn.layers._cache import Cached, KVCache
from fastattn.layers._computation import Made
from fastattn.layers._scores import add_extra_keys, add_masks

if TYPE_CHECKING:
    from fastattn._engine.tape import Tape
    from fastattn.layers._attention_parameters import KeysValues, StackedMaps
    from fastattn.layers._scores import Masks

    # Keys and values, values of a tape, or what a cache returned of them.
    Attended = tuple[Any, Any] | Cached

_NAMES = ("query", "attn_mask", "key_padding_mask")
_NO_MASKS = _NAMES, None, None, False
_pair: Any = _computation.computed("key_padding_mask and attn_mask", "tuple[Array, Array | None]")


@dataclass(eq=False)
class MultiHeadAttention(AttentionParameters):
    """Multi-head attention: ``out_proj(attention(q_proj(query), k_proj(key), v_proj(value)))``.

    Names, options and parameters are torch's (``nn.MultiheadAttention``), batch first; options from
    num_kv_heads on are additions of later models. All options combine.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of queries and output; query heads.
    bias : bool, default True
        Whether all projections have a bias.
    add_bias_kv, add_zero_attn : bool, default False
        Append a key and a value that every query attends: parameters, or zeros.
    kdim, vdim : int, optional
        Width of keys and values before projection; default embed_dim.
    num_kv_heads : int, optional
        Key and value heads, each for a group of query heads (Ainslie et al. 2023); default num_heads.
    head_dim : int, optional
        Default ``embed_dim // num_heads``.
    query_only : bool, default False
        Project queries only, and attend the keys and values of `project_keys_values`, or of an earlier layer
        of a stack, with the same num_kv_heads and head_dim.
    rope : Rope, optional
        Rotate queries and keys by their positions, which follow those in a cache.
    qk_norm : bool, default False
        RMSNorm of each head's queries and keys before `rope`.
    qk_norm_eps : float, default 1e-6
    output_gate : bool, default False
        Multiply the heads by ``sigmoid(gate_proj(query))`` before out_proj (Qiu et al. 2025).
    sinks : bool, default False
        One logit per query head, a parameter, in the softmax's denominator only.
    window, softcap, scale, alibi_slopes : optional
        As in `fastattn.attention`. Query i has the position of key i, after the keys of a cache.
    weights_dtype : str, default "float32"
        Stored type of the projections' weights, a `dtype` of `fastattn.ops.pack`; "float64" for float64
        input, and only for it.
    activations : {"int8"}, optional
        Round the inputs of the projections, as in `fastattn.ops.linear`, for weights in int8 or in blocks.
    rng : Generator or int, optional
        Draws the parameters as torch does: a generator, or a seed, which gives layers of one shape the same
        parameters. Without it, `load_state_dict` has to follow.

    Notes
    -----
    Parameters are torch's: ``in_proj_weight`` (queries, keys, values stacked; with kdim or vdim
    ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``), ``in_proj_bias``, ``out_proj.weight``,
    ``out_proj.bias``, ``bias_k``, ``bias_v``; and ``q_norm.weight``, ``k_norm.weight``, ``gate_proj.weight``,
    ``gate_proj.bias`` and ``sinks``. With `query_only`: ``q_proj_weight`` and the queries' part of
    ``in_proj_bias``. All projections of one input are one `linear`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.layers import MultiHeadAttention
    >>> mha = MultiHeadAttention(64, 8, num_kv_heads=2, rng=np.random.default_rng(0))
    >>> out, _ = mha(np.ones((1, 10, 64), np.float32), is_causal=True)
    >>> out.shape
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
    ) -> tuple[Array, None]: ...
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
    @_pair  # type: ignore[untyped-decorator]
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        need_weights: bool = False,
        **options: Any,
    ) -> Made:
        """Attend from query (B, L, embed_dim) to key (B, S, kdim) and value (B, S, vdim).

        Parameters
        ----------
        query : array_like, (B, L, embed_dim)
            Or (L, embed_dim); then key, value and results have no batch axis either.
        key, value : array_like, optional
            Default: key is query, value is key.
        key_padding_mask : array_like, (B, S), optional
            Bool: **True hides a key**, as in torch, the opposite of `fastattn.attention`'s mask. Float: added
            to the key's scores. With a cache, S includes its keys.
        need_weights : bool, default False
            Also return the weights; torch's default is True. The fused kernel still computes the output.
        attn_mask : array_like, (L, S), (B * num_heads, L, S) or (B, num_heads, L, S), optional
            Bool: **True hides**. Float, of any type: added to the scores. In the last form, axes of length 1
            broadcast.
        average_attn_weights : bool, default True
            Return the mean of the heads' weights, (B, L, S), instead of (B, num_heads, L, S).
        is_causal : bool, default False
            Query i attends the keys up to key i, after the keys of the cache, unless a mask hides them.
        residual : array_like, (B, L, embed_dim), optional
            Added to the output, in the kernel of out_proj.
        cache : KVCache, optional
            Append the keys and values, and attend all keys in it.
        lengths : array_like of int, (B,), optional
            With `cache`: number of tokens of this call in each sequence; the rest is padding.
        keys_values : (ndarray, ndarray), optional
            From `project_keys_values`, instead of key and value. Both are (B, num_kv_heads, S, head_dim) in
            query's dtype, or for float32 both in a 16-bit one.

        Returns
        -------
        out : ndarray, (B, L, embed_dim)
            In query's dtype. A query that may attend nothing gets out_proj's bias, where torch gives NaN.
        weights : ndarray, (B, L, S) or (B, num_heads, L, S), or None
            None without `need_weights`. The keys of add_bias_kv and add_zero_attn are last.
        """
        average, residual = True, None  # what follows is skipped in a plain call, to save microseconds
        need_weights = flag("need_weights", need_weights)
        if options:
            require_options(options, CallOptions, "need_weights")
            average = flag("average_attn_weights", options.pop("average_attn_weights", True))
            residual = options.pop("residual", None)
        x, sizes, key_length, memory, masks = self._checked(query, key, value, options)
        if residual is not None:
            residual = rows(cast("Array", like("residual", residual, x.shape, x.dtype, "query")))
        only_value = memory and "key" not in memory
        found: Any = None

        def run(tape: Tape, x: Any, k: Any = None, v: Any = None) -> Any:
            nonlocal found
            own = (residual, need_weights, key_length, *((None, k) if only_value else (k, v)))
            out, found, _ = self._attend(tape, x, sizes, masks, *own, **options)
            return out

        def weights() -> Any:
            if found is None:
                return None
            each = found.mean(axis=1) if average else found
            return each if x.ndim == 3 else each[0]

        return [self], {"query": x, **memory}, run, x.shape, False, weights

    def _checked(
        self, query: ArrayLike, key: Any, value: Any, options: dict[str, Any]
    ) -> tuple[Array, tuple[int, int], int, dict[str, Array], Masks]:
        """The query; its batch and length; that of the keys; key and value, if given; the masks.

        A key that is the query, or a value that is the key, is not given. `options` lose the masks.
        """
        self._require_parts()
        x = _computation.checked("query", query, self.embed_dim, self.weights_dtype)
        if value is key or (key is None and value is query):
            value = None
        if key is query:
            key = None
        batched, masks = _computation.batch_first("query", x), _NO_MASKS
        if batched is not x:
            key, value = _computation.one_batch("key", key), _computation.one_batch("value", value)
        if options:
            padding, attn_mask = options.pop("key_padding_mask", None), options.pop("attn_mask", None)
            padding = padding if batched is x else _computation.one_batch("key_padding_mask", padding)
            masks = _NAMES, attn_mask, padding, flag("is_causal", options.pop("is_causal", False))
        batch, length, _ = batched.shape
        key_length = length
        memory: dict[str, Array] = {}
        if (given := options.get("keys_values")) is not None:
            if not (key is None and value is None and options.get("cache") is None):
                came = "keys_values is given with key, value or cache"
                raise ValueError(f"(): {came}; expected it alone")
            heads_kv, head_dim = self._heads_kv, self._head_dim
            given = _computation.keys_values(given, batch, heads_kv, head_dim, x.dtype)
            options["keys_values"] = given
        elif not self.query_only and (key is not None or value is not None or self.all_maps is None):
            k, v = self._memory(batched if key is None else key, value, batch)
            key_length = k.shape[1]
            if key is not None:
                memory["key"] = k if batched is x else k[0]
            if value is not None:
                memory["value"] = v if batched is x else v[0]
        return x, (batch, length), key_length, memory, masks

    @named("{cls}")
    def project_keys_values(self, key: ArrayLike, value: ArrayLike | None = None) -> KeysValues:
        """Project a memory to keys and values (B, heads_kv, S, head_dim), for `keys_values` of many calls."""
        if self.query_only:
            raise ValueError("(): query_only is True; expected a layer with keys")
        keys, values = self._memory(key, None if value is key else value, None)
        memory = None if value is None or value is key else rows(values)
        k, v = self._keys_values(PLAIN, rows(keys), memory, keys.shape[:2])
        k = self._placed(PLAIN, k, self.k_norm, 0)
        return np.ascontiguousarray(k), np.ascontiguousarray(v)  # views would keep the whole product alive

    def _attend(
        self,
        tape: Tape,
        x: Any,
        sizes: tuple[int, int],
        masks: Masks,
        residual: Any = None,
        need_weights: bool = False,
        key_length: int | None = None,
        key: Any = None,
        value: Any = None,
        cache: KVCache | None = None,
        lengths: Any = None,
        keys_values: Attended | None = None,
        q_offset: Ints | int = 0,
        counted: Bools | None = None,
        share: bool = False,
        out: Array | None = None,
    ) -> tuple[Any, Any, Attended | None]:
        """A call's output; the weights of each head, or None; with `share`, the keys and values attended.

        x, key, value, residual and the output are rows. `key` is None if it is the query, `value` if it is
        the key. Without a cache, the first query is at `q_offset`, and the first of `keys_values` at 0.
        Of the rows of `sizes`, x, residual and the output have those that are `counted`; None: all. A
        recording tape takes no cache and gives no weights. A plain one writes to `out`.
        """
        if self.query_only and keys_values is None:
            expected = "keys_values, or a stack in which an earlier layer has keys"
            came = "query_only is True, and there are no projected keys"
            raise ValueError(f"(): {came}; expected {expected}")
        cached = keys_values if isinstance(keys_values, Cached) else None
        if lengths is not None and cache is None and cached is None:
            expected = "both, or a key_padding_mask"
            raise ValueError(f"(): lengths is given without cache; expected {expected}")
        (batch, length), dtype = sizes, tape.array(x).dtype
        if cache is not None:
            _computation.require("cache", cache, KVCache, "a KVCache")
            if cache.batch not in (None, batch):
                expected = f"({cache.batch}, length, {self.embed_dim}), the batch in the cache"
                query = tape.array(x).reshape(*sizes, self.embed_dim)
                raise wrong_shape(masks[0][0], query, expected)
            q_offset = cache.offset
        elif cached is not None:
            q_offset = cached.q_offset + cached._dropped
        options, (_, attn_mask, key_padding_mask, is_causal) = self._options.copy(), masks
        if self.sink_logits is not None:
            options["sinks"] = self.sink_logits

        maps = self.query_maps
        first = len(maps.sizes) - 1  # the queries' map: with a gate, that comes before it
        if self.all_maps is not None and key is None and value is None and keys_values is None:
            maps = self.all_maps
        product = tape.linear(x, maps.weight, maps.bias, self.activations, use="product")
        all_rows = product if counted is None else tape.spread(product, counted)
        heads = self._heads(tape, all_rows, sizes, maps, first)
        gate = heads[0] if first else None
        q = heads[first]
        if maps is self.all_maps:
            k, v = heads[first + 1 :]
        elif keys_values is not None:
            k, v = keys_values[:2]
        else:
            if key_length is None:
                own = x if key is None and value is None else key if value is None else value
                key_length = len(tape.array(own)) // max(1, batch)
            k, v = self._keys_values(tape, x if key is None else key, value, (batch, key_length))
        if self.q_norm is not None or self.rope is not None:
            q = self._placed(tape, q, self.q_norm, q_offset)
            if keys_values is None:
                k = self._placed(tape, k, self.k_norm, q_offset)
        before = None if cache is None else dict(vars(cache))  # see `restored_on_error`, which takes longer
        try:
            if cache is not None:
                cached = cache.append(k, v, lengths)
            elif share:
                k, v = tape.shared(k), tape.shared(v)
            keys = (k, v) if cached is None else cached
            if cached is not None:
                k, v, kv_lengths, q_offset = cached
                if cached.k_scale is not None and cached.v_scale is not None:
                    options["k_scale"], options["v_scale"] = cached.k_scale, cached.v_scale
                if kv_lengths is not None:
                    options["kv_lengths"] = kv_lengths
                # A token after all others attends to all of them without `causal`.
                is_causal = is_causal and (length > 1 or kv_lengths is not None)
            if is_causal or self._positional or self._extra:
                options["causal"], options["q_offset"] = is_causal, q_offset
            if attn_mask is not None or key_padding_mask is not None:
                add_masks(options, masks, (batch, self.num_heads, length, tape.array(k).shape[2]), dtype)
            if self._extra:
                k, v = self._with_extra_keys(tape, options, length, k, v, dtype)
            mixed = tape.empty("mixed", batch * length, self._width, dtype)

            def by_head(array: Array) -> list[Array]:
                heads = array.reshape(batch, length, self.num_heads, self._head_dim)
                return [heads.transpose(0, 2, 1, 3)]

            a, b, c = arrays = tape.array(q), tape.array(k), tape.array(v)
            by_heads, given = by_head(mixed)[0], bool(options) or keys_values is not None
            if given or not a.dtype == b.dtype == c.dtype or b.shape[2] != c.shape[2]:
                names = "query", "key", "value"
                held = isinstance(keys_values if cached is None else cached, Cached)
                args = attention_args(*arrays, names=names, cached=held, **options)
                if args.out.shape != by_heads.shape:
                    raise ValueError(f"(): attention gives shape {args.out.shape}; expected {by_heads.shape}")
                args.out = by_heads
            else:  # nothing to check in a layer's own projections: a third of a small layer's Python
                args = plain_args(*arrays, by_heads, settings.get_num_threads())
            attended = tape.attend([(args, q, k, v)], mixed, by_head, self.sink_logits)
        except BaseException:
            if cache is not None and before is not None:
                vars(cache).update(before)
            raise
        gated = attended if gate is None else tape.gate(gate, attended)
        if counted is not None:
            gated = tape.rows(gated, counted)
        last = self.out_proj
        parameters = last.packed_weight, last.bias_vector, last.activations
        result = tape.linear(gated, *parameters, residual=residual, out=out)
        weights = None
        if need_weights:
            k = _widened(k, options.pop("k_scale", None), q.dtype)
            options.pop("v_scale", None)
            weights = attention_weights(q, k.astype(q.dtype, copy=False), **options)
        tape.done("mixed", attended)
        tape.done("product", product)
        return result, weights, keys if share else None

    def _keys_values(self, tape: Tape, key: Any, value: Any, sizes: tuple[int, int]) -> tuple[Any, Any]:
        """Projected key and value, (B, heads_kv, S, head_dim) each; value is None where it is key."""

        def projected(x: Any, maps: StackedMaps) -> Sequence[Any]:
            product = tape.linear(x, maps.weight, maps.bias, self.activations)
            return self._heads(tape, product, sizes, maps, 0)

        if value is None and self.key_value_maps is not None:
            k, v = projected(key, self.key_value_maps)
        else:
            assert self.key_map is not None
            assert self.value_map is not None
            (k,) = projected(key, self.key_map)
            (v,) = projected(key if value is None else value, self.value_map)
        return k, v

    def _memory(self, key: Any, value: Any, batch: int | None) -> tuple[Array, Array]:
        """Key and value, checked; value is None where it is key."""
        keys = self._input("key", key, self.kdim, batch)
        values = self._input("value", keys if value is None else value, self.vdim, len(keys))
        if values.shape[1] != keys.shape[1]:
            raise wrong_shape("value", values, f"a length of {keys.shape[1]}, as key has")
        return keys, values

    def _input(self, name: str, x: Any, features: int | None, batch: int | None) -> Array:
        """`x`, key or value, checked."""
        array = _computation.checked(name, x, features or self.embed_dim, self.weights_dtype)
        if array.ndim != 3 or batch not in (None, len(array)):
            expected = f"({'batch' if batch is None else batch}, length, {array.shape[-1]})"
            raise wrong_shape(name, array, expected)
        return array

    def _heads(
        self, tape: Tape, product: Any, sizes: tuple[int, int], maps: StackedMaps, first: int
    ) -> Sequence[Any]:
        """Views (B, heads, L, head_dim) of each map from `first` on in product (B * L, features).

        If another map comes before, it is the gate: (B * L, width).
        """
        (batch, length), head_dim = sizes, self._head_dim

        def views(array: Array) -> list[Array]:
            if maps.in_heads:  # views of one view, which are made faster
                heads = array.reshape(batch, length, maps.weight.out_features // head_dim, head_dim)
                heads = heads.transpose(0, 2, 1, 3)
                found = [heads[:, place] for place in maps.places]
            else:
                parts = [array[:, place] for place in maps.places]
                shapes = [(batch, length, part.shape[1] // head_dim, head_dim) for part in parts]
                found = [x.reshape(s).transpose(0, 2, 1, 3) for x, s in zip(parts, shapes, strict=True)]
            if first:
                found[0] = array[:, : self._width]
            return found

        return tape.views(product, views, maps.whole)

    def _placed(self, tape: Tape, x: Any, norm: Array | None, offset: Any) -> Any:
        """Queries or keys x (B, heads, L, head_dim), normalised and rotated if the layer does so."""
        if norm is not None:
            batch, heads, length, size = tape.array(x).shape

            def by_head(array: Array) -> list[Array]:
                return [array.reshape(batch, length, heads, size).transpose(0, 2, 1, 3)]

            normed = tape.norm(tape.by_row(x), "rms_norm", norm, None, self.qk_norm_eps)
            (x,) = tape.views(normed, by_head)
        return x if self.rope is None else self.rope.rotate(tape, x, offset)

    def _with_extra_keys(
        self, tape: Tape, options: dict[str, Any], length: int, k: Any, v: Any, dtype: np.dtype[Any]
    ) -> list[Any]:
        """Keys and values with the additional ones that every query attends."""
        extra: list[tuple[Any, Any]] = [] if self.bias_k is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            extra.append((0, 0))
        scales = (options.pop(name, None) for name in ("k_scale", "v_scale"))
        # Additional keys are parameters: they join keys that are widened.
        k_wide, v_wide = (
            _widened(tape.array(x), scale, dtype) for x, scale in zip((k, v), scales, strict=True)
        )
        longer = add_extra_keys(options, length, k_wide, v_wide, extra)
        given = zip((k, v), longer, (self.bias_k, self.bias_v), strict=True)
        return [tape.extended(x, array, parameter) for x, array, parameter in given]


def _widened(x: Array, scale: Array | None, dtype: np.dtype[Any]) -> Array:
    """Keys or values of a cache in int8 or int4 as `dtype`; others as they are."""
    if is_int4(x):
        return int4.lanes(x, lane_dtype(dtype)).astype(dtype)
    return x if scale is None else (x * scale[..., None]).astype(dtype)
