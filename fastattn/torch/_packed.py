"""Sequences that are packed end to end, as transformers passes them to flash attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch

from fastattn.flash_attn import flash_attn_func, flash_attn_with_kvcache
from fastattn.torch._attention import varlen_op
from fastattn.torch._tensors import traced

# Beside "fastattn": transformers and sentence-transformers only pack for names with "flash" in them.
NAME = "fastattn_flash"
# Functions of transformers that make masks of what attention is also told by arguments.
_WINDOWS = {"sliding_window_bidirectional_overlay", "sliding_window_overlay"}
_TOLD = _WINDOWS | {
    "and_masks", "bidirectional_mask_function", "causal_mask_function", "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
}  # fmt: skip
_HAS_WINDOW = "_window_of_fastattn"  # an attribute of masks that say no more
# Whether attention of the models of a config has been told all that such masks say, by every layer so far.
_tells: dict[type, bool] = {}


def marked(mask: Any, options: dict[str, Any]) -> Any:
    """A mask that transformers has made, which knows whether arguments of attention say the same."""
    if mask is not None and (window := _window_in(options)) is not None:
        setattr(mask, _HAS_WINDOW, window)
    return mask


def is_needed(config: Any, options: dict[str, Any]) -> bool:
    """Whether attention would not be told what a mask says."""
    return not _tells.get(type(config), False) or _window_in(options) is None


def is_told(mask: Any, sliding_window: int | None) -> bool:
    """Whether a window and sequences are all that a mask says, if it says anything."""
    return mask is None or getattr(mask, _HAS_WINDOW, None) is (sliding_window is not None)


def learn(module: Any, query: Any, key: Any, mask: Any, sliding_window: int | None, positions: Any) -> None:
    """Note whether this layer is told what `mask` says, also where `cu_seq_lens_q` is not given."""
    row = (1, query.shape[2])
    if mask is None or traced() or row != (len(query), key.shape[2]) or row[1] == 1:
        return
    told = positions is not None and positions.shape == row
    if told and not hasattr(mask, _HAS_WINDOW):
        return  # it would be made again
    config = type(getattr(module, "config", None))
    _tells[config] = told and is_told(mask, sliding_window) and _tells.get(config, True)


def _window_in(options: dict[str, Any]) -> bool | None:
    """Whether the mask of a row of tokens has a window; None if it has what attention is not told."""
    padding = options.get("attention_mask")
    if torch.compiler.is_compiling() or options.get("batch_size") != 1:
        return None
    lengths = options.get("q_length"), options.get("kv_length")
    if lengths[0] is None or lengths[0] != lengths[1] or not (padding is None or padding.all()):
        return None
    names = set(_names(options.get("mask_function")))
    return bool(names & _WINDOWS) if names <= _TOLD else None


def _names(mask: Any) -> Iterator[str]:
    """The functions that a mask is made of."""
    yield getattr(mask, "__qualname__", "").partition(".")[0]
    for cell in getattr(mask, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part):
                yield from _names(part)


def models_of(config_class: type) -> list[Any]:
    """The classes of models of a config."""
    from transformers import PreTrainedModel

    found, classes = [], [PreTrainedModel]
    while classes:
        classes += (each := classes.pop()).__subclasses__()
        found += [each] * (each.config_class is config_class)
    return found


def begins_of(position_ids: Any, query: Any, key: Any, sliding_window: int | None) -> Any:
    """Where sequences begin in a row of tokens: where positions do not grow by 1, or at 0 with a window.

    None where there is one sequence. transformers' masks for "sdpa" have the same rule.
    """
    length = query.shape[2]
    if query.shape[0] != 1 or length == 1 or key.shape[2] != length or traced():
        return None
    first = torch.zeros(1, dtype=torch.int64)
    if position_ids is not None and position_ids.shape == (1, length):
        first = torch.cat((first, (position_ids[0].diff() != 1).nonzero()[:, 0] + 1))
    if len(first) == 1 and (sliding_window is None or sliding_window >= length):
        return None
    return torch.cat((first, first.new_tensor([length]))).to(torch.int32)


class Call(NamedTuple):
    """A call of attention for packed sequences, whose tensors are (batch, heads, length, head_dim)."""

    module: Any
    query: Any
    key: Any
    value: Any
    begins_q: Any  # the end of the last one, too
    begins_k: Any
    causal: bool
    sliding_window: int | None
    cache: Any  # a PagedAttentionCache
    given: dict[str, Any]

    def attend(self, sinks: Any, dropout: float, **options: Any) -> Any:
        """The result, (batch, length, heads, head_dim)."""
        table, begins_k = None, self.begins_k
        if self.cache is None:
            key, value = _rows(self.key), _rows(self.value)
        else:
            key, value, begins_k, table = self._pages()
        out = varlen_op(
            _rows(self.query), key, value, self.begins_q, begins_k, sinks, None, table, _seed(dropout),
            causal=self.causal, window=self._window(), dropout=dropout, **options,
        )  # fmt: skip
        return out.unflatten(0, (self.query.shape[0], -1))

    def masked(self, mask: Any, reasons: list[str]) -> tuple[Any, Any, Any]:
        """Keys, values and a mask for sequences that cannot be packed; `mask` says all within each."""
        if not traced():
            _say(type(self.module).__name__, " and ".join(reasons))
        key, value, begins_k = self.key, self.value, self.begins_k
        if self.cache is not None:
            key, value, begins_k = self._updated()
        if mask is None:
            mask = _mask_of(self.begins_q, begins_k, self.causal, self._window())
        else:
            own = _mask_of(self.begins_q, begins_k, False, None)
            mask = own & mask if mask.dtype is torch.bool else mask.masked_fill(~own, -torch.inf)
        return key, value, mask

    def _window(self) -> list[int] | None:
        """The window as transformers gives it to flash attention."""
        return None if self.sliding_window is None else [self.sliding_window - 1] * 2

    def _updated(self) -> tuple[Any, Any, Any]:
        """All keys and values of the cache, copied, and where those of each sequence begin."""
        given = self.given | {"cu_seq_lens_k": self.begins_k}
        key, value = self.cache.update(self.key, self.value, self.module.layer_idx, given)
        return key, value, given["cu_seq_lens_k"]

    def _pages(self) -> tuple[Any, Any, Any, Any]:
        """Keys and values after new ones are written, where those of each sequence begin, and a table.

        They are in pages, read in place; or in rows, without a table, if only the new ones are read, and in
        layers with windows, whose pages are rings.
        """
        layer = self.module.layer_idx
        allocator = self.cache.layer_to_allocator[layer]
        read, write = (self.given[name][allocator.index] for name in ("read_index", "write_index"))
        if not (allocator.supports_block_table and read.numel()):
            key, value, begins = self._updated()
            return _rows(key), _rows(value), begins, None
        allocator.update(_rows(self.key), _rows(self.value), layer, read[:0], write)  # which writes alone
        key, value = allocator.get_cache_for_block_table(layer)
        begins = self.begins_k[allocator.layer_type]
        return key, value, begins, _table_of(read, begins, key.shape[1])


def _seed(dropout: float) -> Any:
    """A seed from torch's generator, where there is dropout."""
    return torch.randint(2**62, ()) if dropout else None


def _rows(x: Any) -> Any:
    return x.transpose(1, 2).flatten(0, 1)


def _mask_of(begins_q: Any, begins_k: Any, causal: bool, window: list[int] | None) -> Any:
    """The mask (1, 1, len_q, len_k) by which queries attend the keys of their own sequence."""
    lengths_q, lengths_k = begins_q.diff(), begins_k.diff()
    count = partial(torch.arange, device=begins_q.device)
    numbers = count(len(lengths_q))
    of_q, of_k = numbers.repeat_interleave(lengths_q), numbers.repeat_interleave(lengths_k)
    # The last query of a sequence is at its last key.
    at_q = count(len(of_q)) - (begins_q[1:] - lengths_k)[of_q]
    away = count(len(of_k)) - begins_k[of_k] - at_q[:, None]
    seen = of_q[:, None] == of_k
    if causal:
        seen &= away <= 0
    if window is not None:
        seen &= (-window[0] <= away) & (away <= window[1])
    return seen[None, None]


@cache
def _say(name: str, what: str) -> None:
    """Warn once for each kind of module."""
    warnings.warn(
        f"fastattn: {name} has {what}, with which sequences are not packed: a mask keeps them apart, and"
        " memory and time grow with the square of the number of all tokens",
        stacklevel=4,
    )


def _table_of(read: Any, begins: Any, page: int) -> Any:
    """The pages of each sequence, from the rows `read` of all of its keys: the same in every layer."""
    table = getattr(read, "_pages_of_fastattn", None)
    if table is None:
        pages = -(-int(begins.diff().max()) // page)
        places = begins[:-1, None] + torch.arange(pages, dtype=torch.int32) * page
        table = (read[places.clamp(max=len(read) - 1)] // page).to(torch.int32)
        read._pages_of_fastattn = table
    return table


def answer_to_name() -> None:
    """Let transformers find the functions of flash attention that belong to our name."""
    from transformers import modeling_flash_attention_utils as utils

    theirs = getattr(utils, "_lazy_imports", None)
    padding = hasattr(utils, "_pad_input") and hasattr(utils, "_unpad_input")
    if theirs is None or not padding or hasattr(theirs, "_of_fastattn"):  # a version may not have them
        return

    @wraps(theirs)
    def lazy_imports(implementation: Any, *args: Any, **options: Any) -> tuple[Callable[..., Any], ...]:
        if implementation != NAME:
            return theirs(implementation, *args, **options)  # type: ignore[no-any-return]
        own = flash_attn_func, _flash_varlen, flash_attn_with_kvcache
        return *own, utils._pad_input, utils._unpad_input

    lazy_imports._of_fastattn = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


def _flash_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None, s_aux: Any = None,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func`, with the arguments of transformers alone."""
    options = {"causal": causal, "window": list(window_size), "scale": softmax_scale, "softcap": softcap}
    given = s_aux, None, None, _seed(dropout_p)
    return varlen_op(q, k, v, cu_seqlens_q, cu_seqlens_k, *given, dropout=dropout_p, **options)
