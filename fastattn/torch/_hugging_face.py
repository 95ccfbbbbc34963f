"""The attention interface of Hugging Face's transformers: ``attn_implementation="fastattn"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from fastattn._engine.settings import available_isas
from fastattn._undo import Undo
from fastattn.torch import _packed
from fastattn.torch._attention import attention_op, with_lse_op
from fastattn.torch._measure import attention_key, gains, measuring, sample, torchs
from fastattn.torch._modules import IN_USE, measures
from fastattn.torch._tensors import traced
from fastattn.torch._variants import selected_op

NAME = "fastattn"
# Traced calls cannot measure. With AMX, 16 bits are known to be faster in torch (docs/dev/intel.md),
# except bfloat16 where kernels with tiles are compiled in here.
_LEFT: tuple[torch.dtype, ...] = ()
if getattr(torch.cpu, "_is_amx_tile_supported", bool)():
    _LEFT = (torch.float16,) if "amx" in available_isas() else (torch.bfloat16, torch.float16)
# Keywords that reach attention functions and change nothing there: masks and positions are applied already.
HARMLESS = frozenset((
    "cache_params", "cache_position", "decoder_attention_mask", "decoder_input_ids",
    "decoder_inputs_embeds", "decoder_position_ids", "deterministic", "encoder_outputs", "grid_thw",
    "input_ids", "inputs_embeds", "labels", "logits_indices", "logits_processor_args", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "read_index",
    "return_dict", "seq_idx", "token_type_ids", "use_cache", "write_index",
))  # fmt: skip


def register(*, measure: bool = True) -> Undo:
    """Register ``attn_implementation="fastattn"`` for transformers and sentence-transformers.

    "fastattn_flash" is the same for packed sequences: transformers and sentence-transformers omit padding for
    names with "flash" in them, and continuous batching (``generate_batch``) requires one.

    Use it with `from_pretrained`, with `model.set_attn_implementation` of a loaded model, or as
    ``SentenceTransformer(..., model_kwargs={"attn_implementation": "fastattn"})``. Convolutions, delta rules
    and scans of hybrid models, deformable attention of detectors, and indexers of sparse attention are
    replaced at once, with any attention implementation. All of this applies to every model of the process.
    Further calls change only `measure`, until they are undone.

    Parameters
    ----------
    measure : bool, default True
        Time transformers' "sdpa" and this attention at the first call of each kind (see `patch_sdpa`), and
        keep "sdpa" unless this gains 5%; `measured` has the results. Not timed: attention with softcaps,
        sinks or position biases, and traced models, which leave 16 bits to torch on CPUs with AMX.
        Functions of hybrid models are timed in the same way. False: replace every call.

    Returns
    -------
    Undo
        ``undo()``, or the end of a ``with`` block, restores transformers' functions. The name of the
        attention implementation stays, since models may have it.

    Raises
    ------
    ImportError
        If transformers is not installed, or older than 4.53.

    Notes
    -----
    Masks are as for "sdpa": bools, or none for plain causal attention. Models without "sdpa" support get
    the masks of "eager". Softcaps, sinks, position biases and keys selected by an indexer are supported, with
    gradients. Calls with dropout, on other devices or with nested tensors use transformers' "sdpa" function.
    A NotImplementedError is raised if weights are requested (``output_attentions=True``), or if a model
    passes an unknown keyword.

    Packed sequences, told by ``cu_seq_lens_q`` or, with "fastattn_flash", by ``position_ids``, are attended
    each by itself, without a mask, and in the pages of a cache. A warning says, once, where a model has a
    custom mask or a position bias, with which a mask has to keep sequences apart.

    Functions of hybrid models and deformable attention have first-order gradients. transformers computes
    calls that are traced, in float64, on other devices, or refused here (see `measured`), and single-token
    updates of states that need gradients. Packed sequences are kept apart.

    Indexers select keys without storing all scores (the first of equal scores), unless the mask leaves other
    keys than the first ones of each query, under autocast, or if that gains nothing. docs/torch.md lists all
    families.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(_packed.NAME, packed_forward)
    AttentionMaskInterface.register(_packed.NAME, packed_mask)
    _packed.answer_to_name()
    return Undo([IN_USE.use(measure), lambda: _packed._tells.clear()], lambda: _SAID)


_SAID = (
    'attn_implementation="fastattn" and "fastattn_flash": registered in the whole process, also after undo,\n'
    "with transformers' _lazy_imports, which answers to the latter\n"
    "convolutions, delta rules and scans of hybrid models, deformable attention: replaced there, too"
)


def make_mask(*args: Any, config: Any = None, **options: Any) -> Any:
    """The mask that transformers makes for its "sdpa", or for "eager" where a model is not made for that."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    make = sdpa_mask if config is None or _takes_bools(type(config)) else eager_mask
    return _packed.marked(make(*args, config=config, **options), options)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def _takes_bools(config_class: type) -> bool:
    """Whether the models of a config are made for masks of bools, and for none where causal is all.

    Others may add what they get to scores, or not say that they are causal.
    """
    models = _packed.models_of(config_class)
    return bool(models) and all(
        x._supports_sdpa or (x._supports_attention_backend and x._supports_flex_attn) for x in models
    )


def packed_mask(config: Any, **options: Any) -> Any:
    """No mask for what attention is told by arguments; for others as `make_mask`."""
    return make_mask(config=config, **options) if _packed.is_needed(config, options) else None


def packed_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any,
    cu_seq_lens_q: Any = None, position_ids: Any = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Any, None]:  # fmt: skip
    """`attention_forward` for models that take it for flash attention, with masks of `packed_mask`."""
    _packed.learn(module, query, key, attention_mask, sliding_window, position_ids)
    if cu_seq_lens_q is None and _packed.is_told(attention_mask, sliding_window):
        cu_seq_lens_q = _packed.begins_of(position_ids, query, key, sliding_window)
    kwargs |= {"cu_seq_lens_q": cu_seq_lens_q, "sliding_window": sliding_window}
    return attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


def attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Any = None,
    softcap: float | None = None, s_aux: Any = None, sinks: Any = None, indices: Any = None,
    block_indices: Any = None, output_attentions: bool | None = None, cache: Any = None,
    cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention as transformers calls it; the result is (batch, length, heads, head_dim).

    `s_aux` are sinks per head, `sinks` (batch, heads, length, 1) per query. An indexer selects keys for each
    query: `indices` (batch, length, any number) or, for blocks of keys, `block_indices` (batch, groups,
    length, any number), where -1 is none. Sequences packed end to end begin at `cu_seq_lens_q`; they may
    have a `PagedAttentionCache`. Only they read `sliding_window`, which masks have otherwise.
    """
    if cache is None:
        _check_keywords(output_attentions or _collects_weights(), kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if cu_seq_lens_q is not None:
        if _packed.is_told(attention_mask, sliding_window):
            attention_mask = None
        not_packed = {
            "a mask": attention_mask, "position_bias": position_bias, "sinks per query": sinks,
            "indices": indices, "block_indices": block_indices, _left_to_sdpa(query, 0.0): query,
        }  # fmt: skip
        reasons = [name for name, x in not_packed.items() if name and x is not None]
        begins = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        window = sliding_window if attention_mask is None else None
        packed = _packed.Call(module, query, key, value, *begins, bool(is_causal), window, cache, kwargs)
        if not reasons:
            return packed.attend(s_aux, dropout, scale=scaling, softcap=softcap), None
        key, value, attention_mask = packed.masked(attention_mask, reasons)
    # As in transformers' own function: a mask says all, and one query attends every key.
    causal = bool(is_causal and attention_mask is None and query.shape[2] > 1)
    why = _left_to_sdpa(query, dropout)
    selects = indices is not None or block_indices is not None
    if selects:
        size = module.indexer.block_size if indices is None else 1
        lists = block_indices if indices is None else indices[:, None]
        if lists.shape[1] not in (1, key.shape[1]):  # groups of heads that were repeated
            lists = lists.repeat_interleave(key.shape[1] // lists.shape[1], 1)
        if not why and position_bias is None and sinks is None:
            out = _attend_lists(
                module, query, key, value, attention_mask, lists, size, s_aux, causal, scaling, softcap
            )
            if out is not None:
                return out.transpose(1, 2), None
        attention_mask = _masked(query, key, lists, size, causal, attention_mask)
        causal = False
    if why:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = {"softcap": softcap, "position_bias": position_bias}
        kwargs |= {name: x for name, x in given.items() if x is not None}
        if s_aux is not None or sinks is not None:
            raise NotImplementedError(f"fastattn: attention with sinks does not support {why}")
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if softcap is position_bias is s_aux is sinks is None and _left_to_torch(
        module, query, key, value, attention_mask, scaling, causal
    ):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        call = sdpa_attention_forward
        if not torch.compiler.is_compiling():
            call = partial(torchs, call)  # sdpa that is patched does not choose anew
        return call(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, 0.0, scaling, causal, **kwargs
        )
    bias = position_bias
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        bias = attention_mask if bias is None else bias + attention_mask
        attention_mask = None
    args = query, key, value, attention_mask, bias, s_aux
    options = {"causal": causal, "scale": scaling, "softcap": softcap, "q_offset": 0 if causal else None}
    if sinks is None:
        out = attention_op(*args, **options)
    else:
        if sinks.shape[1:] != (*query.shape[1:3], 1):
            expected = f"(batch, {query.shape[1]}, {query.shape[2]}, 1), one of each query"
            raise ValueError(f"fastattn: sinks has shape {tuple(sinks.shape)}; expected {expected}")
        out, lse = with_lse_op(*args, **options)
        out = out * torch.sigmoid(lse - sinks[..., 0])[..., None].to(out.dtype)
    return out.transpose(1, 2), None


def _left_to_torch(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None, causal: bool
) -> bool:
    """Whether transformers' "sdpa" is as fast or faster for such calls."""
    if not measures() or measuring():
        return False
    if traced():
        return query.dtype in _LEFT
    if type(query) is not torch.Tensor or not query.numel() or not key.numel():
        return False  # a fake tensor's time says nothing

    def pair() -> tuple[Callable[[], Any], Callable[[], Any]]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        args = module, *sample(query, key, value, mask), 0.0, scaling, causal
        return partial(sdpa_attention_forward, *args), partial(attention_forward, *args)

    return not gains(attention_key("transformers", query, key, mask, causal), pair)


def _collects_weights() -> bool:
    """Whether transformers collects weights from its layers, which are not told so."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before transformers 5
        return False
    return bool({"attentions", "cross_attentions"} & set(_active_collector.get() or ()))


def _check_keywords(output_attentions: bool | None, others: dict[str, Any]) -> None:
    """Refuse what would be dropped: weights that are wanted, and keywords that may say what is attended."""
    if output_attentions:
        raise NotImplementedError(
            "fastattn: output_attentions is True, and a fused kernel has no weights to return; expected"
            ' False, or a model after set_attn_implementation("eager")'
        )
    for name, x in others.items():
        if x is not None and name not in HARMLESS:
            raise NotImplementedError(
                f"fastattn: attention is given {name}=, which is not known here and may change what is"
                ' attended; expected none, or a model after set_attn_implementation("eager")'
            )


def _attend_lists(
    module: Any, query: Any, key: Any, value: Any, mask: Any, lists: Any, size: int, sinks: Any, causal: bool,
    scaling: float | None, softcap: float | None,
) -> Any:  # fmt: skip
    """Attention to the keys in `lists`, or to blocks of `size` keys; None where it does not gain.

    A mask that adds anything but 0 and what hides gives None, too.
    """
    if mask is not None:
        if mask.ndim != 4 or mask.shape[1] != 1 or (mask.dtype is not torch.bool and traced()):
            return None
        lists, size = _without_masked(lists, size, mask, key.shape[2]), 1
        if lists is None:
            return None
    options = {"causal": causal, "scale": scaling, "softcap": softcap, "q_offset": 0 if causal else None}

    def pair() -> tuple[Callable[[], Any], Callable[[], Any]]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        q, k, v = (x[:1].detach() for x in (query[:, :, -_SAMPLE:], key, value))
        rows = lists[:1, :, -_SAMPLE:]
        later = options | {"causal": False, "q_offset": None}
        return (
            lambda: sdpa_attention_forward(
                module, q, k, v, _masked(q, k, rows, size, False, None), 0.0, scaling
            ),
            lambda: selected_op(q, k, v, rows, None, block_size=size, **later),
        )

    if measures() and not traced() and query.numel() and sinks is None and softcap is None:
        kind = attention_key("transformers", query, key, None, causal)
        if not gains((*kind, (lists.shape[3] * size).bit_length()), pair):
            return None
    return selected_op(query, key, value, lists, sinks, block_size=size, **options)


_SAMPLE = 64  # queries of a measurement, the last ones


def _without_masked(lists: Any, size: int, mask: Any, length: int) -> Any:
    """Lists of keys without those that a mask (batch, 1, len_q, len_k) hides; None if it adds numbers."""
    keys = lists.long()[..., None] * size + torch.arange(size)
    keys = keys.masked_fill((keys < 0) | (keys >= length), -1).flatten(-2)
    whole = mask.expand(keys.shape[0], keys.shape[1], keys.shape[2], mask.shape[3])
    of_keys = whole.gather(-1, keys.clamp(min=0))
    hidden = ~of_keys if mask.dtype is torch.bool else of_keys <= torch.finfo(mask.dtype).min
    if mask.dtype is not torch.bool and not (hidden | (of_keys == 0)).all():
        return None
    return keys.masked_fill(hidden, -1)


def _masked(query: Any, key: Any, lists: Any, size: int, causal: bool, mask: Any) -> Any:
    """A mask, of bools or to be added, that hides what is not in `lists`, too, and later keys if `causal`."""
    count = -(-key.shape[2] // size)
    # -1 goes into a column that is cut off.
    found = lists.new_zeros((*lists.shape[:-1], count + 1), dtype=torch.bool)
    found = found.scatter(-1, lists.long().masked_fill(lists < 0, count), 1)[..., :count]
    if size > 1:
        found = found.repeat_interleave(size, -1)[..., : key.shape[2]]
    groups = found.shape[1]
    found = found if groups == 1 else found.repeat_interleave(query.shape[1] // groups, 1)
    found = found.tril() if causal else found
    if mask is None:
        return found
    return mask & found if mask.dtype is torch.bool else mask.masked_fill(~found, -torch.inf)


def _left_to_sdpa(query: Any, dropout: float) -> str:
    """Find the argument of a call that is left to transformers' own "sdpa" function; mostly there is none."""
    if dropout:
        return "dropout"
    if query.is_nested:
        return "nested tensors"
    return "" if query.device.type == "cpu" else f"tensors on {query.device.type}"
