"""Multi-head attention with its projections: torch's layer, and what models have added to it since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np

from fastattn import ops
from fastattn._inputs import as_array, float_array, integer
from fastattn.attention import attention, attention_weights
from fastattn.cache import restored_on_error
from fastattn.layers.basic import Linear
from fastattn.layers.projections import Stack, stack
from fastattn.layers.scores import add_extra_keys, add_masks
from fastattn.layers.state import Layer, Parameter, lane_of, normal, ones, xavier_uniform, zeros

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from fastattn._args import Array
    from fastattn.cache import KVCache
    from fastattn.layers.rotary import Rope
    from fastattn.layers.state import Fields

    KeysValues = tuple[Array, Array]

_FUNC = "MultiHeadAttention"


class HeadOptions(TypedDict, total=False):
    """Fields of `MultiHeadAttention` that the layers around it pass on."""

    num_kv_heads: int | None
    head_dim: int | None
    rope: Rope | None
    qk_norm: bool
    qk_norm_eps: float
    output_gate: bool
    sinks: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    alibi_slopes: ArrayLike | None
    add_bias_kv: bool
    add_zero_attn: bool


class CallOptions(TypedDict, total=False):
    """Keyword arguments of a `MultiHeadAttention`'s call, but for `need_weights`."""

    key_padding_mask: ArrayLike | None
    attn_mask: ArrayLike | None
    average_attn_weights: bool
    is_causal: bool
    residual: ArrayLike | None
    cache: KVCache | None
    lengths: ArrayLike | None
    keys_values: KeysValues | None


@dataclass(eq=False)
class MultiHeadAttention(Layer):
    """Attention between projections: ``out_proj(attention(q_proj(query), k_proj(key), v_proj(value)))``.

    The names, options and parameters of torch's ``nn.MultiheadAttention``, batch first; further below, what
    later models have added. Everything combines.

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
        Of `fastattn.attention`; query i stands at key i, or behind the keys of the cache.
    weights_dtype : {"float32", "float64", "bfloat16", "int8"}
        How the projections' weights are stored; "float64" for float64 input, the others for all others.
    rng : numpy.random.Generator, optional
        Draws the parameters, as torch does; without it they are missing until `load_state_dict`.

    Notes
    -----
    Parameters: ``in_proj_weight`` (queries, keys, values, one below the other; with kdim or vdim
    ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``), ``in_proj_bias``, ``out_proj.weight``,
    ``out_proj.bias``, ``bias_k``, ``bias_v`` as in torch; ``q_norm.weight``, ``k_norm.weight``,
    ``gate_proj.weight``, ``gate_proj.bias`` and ``sinks``.

    All projections of one input are one `linear`; heads are strided views, which `attention` reads and
    writes.

    Examples
    --------
    >>> import fastattn, numpy as np
    >>> mha = fastattn.MultiHeadAttention(64, 8, num_kv_heads=2, rng=np.random.default_rng(0))
    >>> mha(np.ones((1, 10, 64), np.float32), is_causal=True).shape
    (1, 10, 64)
    """

    embed_dim: int
    num_heads: int
    _: KW_ONLY
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: Rope | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    output_gate: bool = False
    sinks: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi_slopes: ArrayLike | None = None
    weights_dtype: str = "float32"
    rng: InitVar[np.random.Generator | None] = None
    out_proj: Linear = field(init=False, repr=False)
    # Maps of the query: (gate,) q; of key and value, where torch stacks them; of all three, in this order.
    query_maps: Stack = field(init=False, repr=False)
    key_value_maps: Stack | None = field(init=False, default=None, repr=False)
    all_maps: Stack | None = field(init=False, default=None, repr=False)
    key_map: Stack = field(init=False, repr=False)
    value_map: Stack = field(init=False, repr=False)
    bias_k: Array | None = field(init=False, default=None, repr=False)
    bias_v: Array | None = field(init=False, default=None, repr=False)
    q_norm: Array | None = field(init=False, default=None, repr=False)
    k_norm: Array | None = field(init=False, default=None, repr=False)
    sink_logits: Array | None = field(init=False, default=None, repr=False)

    def __post_init__(self, rng: np.random.Generator | None) -> None:
        for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim"):
            value = getattr(self, name)
            if value is not None:
                integer(_FUNC, name, value, 1)
        heads, heads_kv = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % heads_kv:
            raise ValueError(
                f"{_FUNC}(): num_heads is {heads}; expected a multiple of num_kv_heads, {heads_kv}"
            )
        if self.head_dim is None and self.embed_dim % heads:
            raise ValueError(
                f"{_FUNC}(): embed_dim is {self.embed_dim}; expected a multiple of num_heads, {heads}, or"
                f" head_dim="
            )
        self._heads_kv, self._head_dim = heads_kv, self.head_dim or self.embed_dim // heads
        self._width, self._width_kv = heads * self._head_dim, heads_kv * self._head_dim
        self._stacked = (self.kdim or self.embed_dim) == (self.vdim or self.embed_dim) == self.embed_dim
        names = ("window", "softcap", "scale", "alibi_slopes")
        self._options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        self._extra = self.add_bias_kv or self.add_zero_attn
        self._positional = self.window is not None or self.alibi_slopes is not None
        self.out_proj = Linear(self._width, self.embed_dim, self.bias, weights_dtype=self.weights_dtype)
        self.out_proj._zero_bias = True
        self._set_up(rng)
        self.out_proj._set_up(rng)

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
        key_padding_mask: ArrayLike | None = None,
        need_weights: bool = False,
        attn_mask: ArrayLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        residual: ArrayLike | None = None,
        cache: KVCache | None = None,
        lengths: ArrayLike | None = None,
        keys_values: KeysValues | None = None,
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
            Return ``(out, weights)``; the output comes from the fused kernel all the same. torch's default
            is True.
        attn_mask : array_like, (L, S), (B * num_heads, L, S) or (B, num_heads, L, S), optional
            Bool: **True hides**. Float: added to the scores. Axes of length 1 of the last form broadcast.
        average_attn_weights : bool, default True
            Weights as their mean over the heads, (B, L, S), instead of (B, num_heads, L, S).
        is_causal : bool, default False
            Query i attends the keys up to key i (behind those of the cache), and what masks leave of them.
        residual : array_like, (B, L, embed_dim), optional
            Added to the output in out_proj's pass.
        cache : KVCache, optional
            Append the keys and values, and attend to all that it then holds.
        lengths : array_like of int, (B,), optional
            With `cache`: how many of this call's tokens count in each sequence, from the first.
        keys_values : (ndarray, ndarray), optional
            Of `project_keys_values`, instead of key and value.

        Returns
        -------
        out : ndarray, (B, L, embed_dim)
            In query's dtype. A query that may attend nothing gets out_proj's bias, where torch gives NaN.
        weights : ndarray, (B, L, S) or (B, num_heads, L, S)
            Only with `need_weights`; computed in NumPy. The keys of add_bias_kv and add_zero_attn come last.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or there are no parameters yet.
        """
        x = float_array(_FUNC, "query", query)
        if x.ndim == 2:
            key_3d, value_3d, padding, residual_3d = _batched(key, value, key_padding_mask, residual)
            out, weights = self._attend(
                x[None], key_3d, None if value is key else value_3d, padding, residual_3d, need_weights,
                attn_mask, average_attn_weights, is_causal, cache, lengths, keys_values,
                key is None or key is query,
            )  # fmt: skip
            return (out[0], weights[0]) if need_weights else out[0]
        out, weights = self._attend(
            x, key, value, key_padding_mask, residual, need_weights, attn_mask, average_attn_weights,
            is_causal, cache, lengths, keys_values, key is None or key is query,
        )  # fmt: skip
        return (out, weights) if need_weights else out

    def project_keys_values(self, key: ArrayLike, value: ArrayLike | None = None) -> KeysValues:
        """Keys and values of a memory, (B, heads_kv, S, head_dim), once for many calls: see `keys_values`.

        Contiguous, so that nothing else stays in memory. Raises as a call does.
        """
        k, v = self._keys_values(key, value)
        k = self._placed(k, self.k_norm, 0)
        return np.ascontiguousarray(k), np.ascontiguousarray(v)

    def _attend(
        self,
        x: Array,
        key: Any,
        value: Any,
        key_padding_mask: Any,
        residual: Any,
        need_weights: bool,
        attn_mask: Any,
        average_attn_weights: bool,
        is_causal: bool,
        cache: KVCache | None,
        lengths: Any,
        keys_values: KeysValues | None,
        to_itself: bool,
    ) -> tuple[Array, Any]:
        """(out, weights or None) of one call with three axes."""
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(
                f"{_FUNC}(): query has shape {x.shape}; expected (batch, length, {self.embed_dim}), embed_dim"
            )
        if keys_values is not None and not (key is None and value is None and cache is None):
            raise ValueError(f"{_FUNC}(): keys_values is given with key, value or cache; expected it alone")
        if lengths is not None and cache is None:
            raise ValueError(
                f"{_FUNC}(): lengths is given without cache; expected both, or a key_padding_mask"
            )
        batch, len_q, _ = x.shape
        q_offset = 0 if cache is None else cache.offset
        options: dict[str, Any] = self._options.copy()
        if self.sink_logits is not None:
            options["sinks"] = self.sink_logits
        q, k, v, gate = self._projected(x, key, value, keys_values, q_offset, to_itself)
        with restored_on_error((cache,)):
            if cache is not None:
                k, v, kv_lengths, q_offset = cache.append(k, v, lengths)
                if kv_lengths is not None:
                    options["kv_lengths"] = kv_lengths
                # One token behind all others sees them all, and nothing has to say so.
                is_causal = is_causal and (len_q > 1 or kv_lengths is not None)
            if is_causal or self._positional or self._extra:
                options["causal"], options["q_offset"] = is_causal, q_offset
            if attn_mask is not None or key_padding_mask is not None:
                shape = (batch, self.num_heads, len_q, k.shape[2])
                add_masks(options, _FUNC, attn_mask, key_padding_mask, shape)
            if self._extra:
                k, v = add_extra_keys(options, len_q, k, v, self._extra_keys())
            context = np.empty((batch, len_q, self.num_heads, self._head_dim), x.dtype)
            attention(q, k, v, out=context.transpose(0, 2, 1, 3), **options)
            heads = context.reshape(batch, len_q, self._width)
            if gate is not None:
                heads = ops.activate(gate, "sigmoid", up=heads)
            out = self.out_proj(heads, residual=residual)
            if not need_weights:
                return out, None
            weights = attention_weights(q, k.astype(q.dtype, copy=False), **options)
            return out, weights.mean(axis=1) if average_attn_weights else weights

    def _projected(
        self, x: Array, key: Any, value: Any, keys_values: KeysValues | None, offset: Any, to_itself: bool
    ) -> tuple[Array, Array, Array, Array | None]:
        """q, k, v (B, heads, length, head_dim), and the gate (B, L, width)."""
        maps = self.query_maps
        gates = len(maps.sizes) - 1
        to_itself = to_itself and (value is None or value is key) and keys_values is None
        if self.all_maps is not None and to_itself:
            maps = self.all_maps
            product = ops.linear(x, maps.weight, maps.bias)
            k = self._heads(product, maps.begins[gates + 1], self._heads_kv)
            v = self._heads(product, maps.begins[gates + 2], self._heads_kv)
        else:
            product = ops.linear(x, maps.weight, maps.bias)
            k, v = keys_values or self._keys_values(x if key is None else key, value)
        q = self._placed(self._heads(product, maps.begins[gates], self.num_heads), self.q_norm, offset)
        if keys_values is None:
            k = self._placed(k, self.k_norm, offset)
        return q, k, v, product[..., : self._width] if gates else None

    def _keys_values(self, key: Any, value: Any) -> KeysValues:
        """Projected key and value, (B, heads_kv, S, head_dim) each."""
        if self.key_value_maps is not None and (value is None or value is key):
            maps = self.key_value_maps
            product = ops.linear(key, maps.weight, maps.bias)
            k, v = (self._heads(product, begin, self._heads_kv) for begin in maps.begins)
            return k, v
        k = ops.linear(key, self.key_map.weight, self.key_map.bias)
        v = ops.linear(key if value is None else value, self.value_map.weight, self.value_map.bias)
        return self._heads(k, 0, self._heads_kv), self._heads(v, 0, self._heads_kv)

    def _heads(self, product: Array, begin: int, heads: int) -> Array:
        """Features from `begin` on of product (B, L, features), as (B, heads, L, head_dim): a view."""
        part = product[..., begin : begin + heads * self._head_dim]
        return part.reshape(*product.shape[:-1], heads, self._head_dim).swapaxes(-3, -2)

    def _placed(self, x: Array, norm: Array | None, offset: Any) -> Array:
        """Queries or keys x (B, heads, L, head_dim), normalised and rotated where that is on."""
        if norm is not None:
            x = ops.rms_norm(x.swapaxes(1, 2), norm, eps=self.qk_norm_eps).swapaxes(1, 2)
        if self.rope is not None:
            self.rope.rotate(x, offset)
        return x

    def _extra_keys(self) -> list[tuple[Any, Any]]:
        """Keys and values that every query attends, (heads_kv, head_dim) each."""
        extra: list[tuple[Any, Any]] = [] if self.bias_k is None else [(self.bias_k, self.bias_v)]
        return [*extra, (0, 0)] if self.add_zero_attn else extra

    def _children(self) -> dict[str, Layer]:
        return {"out_proj.": self.out_proj}

    def _parameters(self) -> dict[str, Parameter]:
        width, width_kv, head_dim = self._width, self._width_kv, self._head_dim
        parameters: dict[str, Parameter] = {}
        if self._stacked:
            parameters["in_proj_weight"] = Parameter((width + 2 * width_kv, self.embed_dim), xavier_uniform)
        else:
            parameters["q_proj_weight"] = Parameter((width, self.embed_dim), xavier_uniform)
            parameters["k_proj_weight"] = Parameter((width_kv, self.kdim or self.embed_dim), xavier_uniform)
            parameters["v_proj_weight"] = Parameter((width_kv, self.vdim or self.embed_dim), xavier_uniform)
        if self.bias:
            parameters["in_proj_bias"] = Parameter((width + 2 * width_kv,), zeros)
        if self.add_bias_kv:
            parameters["bias_k"] = Parameter((1, 1, width_kv), normal(width_kv**-0.5))
            parameters["bias_v"] = Parameter((1, 1, width_kv), normal(width_kv**-0.5))
        if self.qk_norm:
            parameters["q_norm.weight"] = Parameter((head_dim,), ones)
            parameters["k_norm.weight"] = Parameter((head_dim,), ones)
        if self.output_gate:
            parameters["gate_proj.weight"] = Parameter((width, self.embed_dim), xavier_uniform)
            if self.bias:
                parameters["gate_proj.bias"] = Parameter((width,), zeros)
        if self.sinks:
            parameters["sinks"] = Parameter((self.num_heads,), zeros)
        return parameters

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        lane = lane_of(weights_dtype)
        ends = [self._width, self._width + self._width_kv]
        if self._stacked:
            weights = np.split(arrays["in_proj_weight"], ends)
        else:
            weights = [arrays[f"{name}_proj_weight"] for name in "qkv"]
        biases = np.split(arrays["in_proj_bias"], ends) if self.bias else []
        if self.output_gate:
            weights = [arrays["gate_proj.weight"], *weights]
            biases = [arrays["gate_proj.bias"], *biases] if self.bias else []
        n = len(weights)
        fields: Fields = {"all_maps": None, "key_value_maps": None}
        if self._stacked:
            maps = stack(weights, biases, weights_dtype)
            fields["all_maps"], fields["key_value_maps"] = maps, maps.part(n - 2, n)
            parts = [maps.part(0, n - 2), maps.part(n - 2, n - 1), maps.part(n - 1, n)]
        else:
            runs = (slice(0, n - 2), slice(n - 2, n - 1), slice(n - 1, n))
            parts = [stack(weights[run], biases[run], weights_dtype) for run in runs]
        fields["query_maps"], fields["key_map"], fields["value_map"] = parts
        names = {"q_norm": "q_norm.weight", "k_norm": "k_norm.weight", "sink_logits": "sinks"}
        for field_name, name in names.items():
            fields[field_name] = arrays[name].astype(lane) if name in arrays else None
        for name in ("bias_k", "bias_v"):
            there = name in arrays
            fields[name] = arrays[name].astype(lane).reshape(self._heads_kv, -1) if there else None
        return fields

    def _unpack(self) -> dict[str, Array]:
        weights = [w for maps in (self.query_maps, self.key_map, self.value_map) for w in maps.weights()]
        biases = [b for maps in (self.query_maps, self.key_map, self.value_map) for b in maps.biases()]
        arrays: dict[str, Array] = {}
        if self.output_gate:
            arrays["gate_proj.weight"] = weights.pop(0)
            if self.bias:
                arrays["gate_proj.bias"] = biases.pop(0)
        if self._stacked:
            arrays["in_proj_weight"] = np.concatenate(weights)
        else:
            arrays |= {f"{name}_proj_weight": w for name, w in zip("qkv", weights, strict=True)}
        if self.bias:
            arrays["in_proj_bias"] = np.concatenate(biases)
        more = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm, "sinks": self.sink_logits}
        arrays |= {name: x.copy() for name, x in more.items() if x is not None}
        for name, x in (("bias_k", self.bias_k), ("bias_v", self.bias_v)):
            if x is not None:
                arrays[name] = x.reshape(1, 1, -1).copy()
        return arrays


def _batched(*arrays: Any) -> list[Any]:
    """Arrays of one sequence, as a batch of it."""
    return [None if x is None else as_array(_FUNC, "an argument", x)[None] for x in arrays]
