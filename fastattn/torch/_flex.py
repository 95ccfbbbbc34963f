"""torch's flex_attention on CPUs: a BlockMask as ranges of keys, a score_mod as scale, softcap and bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_mask, noop_mask

from fastattn._args import key_ranges
from fastattn._args.attention import attention_args
from fastattn._args.errors import named, wrong_shape, wrong_type
from fastattn._args.key_ranges import Resolved
from fastattn._args.types import Array, Ints
from fastattn._engine import dispatch
from fastattn.functional import attention_backward
from fastattn.masks._mask import Mask, ScoreShape, runs_of
from fastattn.positions._added import toeplitz
from fastattn.torch._score_mod import ScoreMod, read
from fastattn.torch._tensors import array_of, heads_inside, num_threads, tensor_of

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CHUNK = 2**20  # scores for which a mask_mod is evaluated at a time
_SIDE = 128  # queries, and keys, of a block for that: larger ones are cut
# Of each BlockMask: its function and its blocks, which may be replaced, their versions, as they may be
# written in place, and the ranges made of them.
_known: WeakKeyDictionary[Any, tuple[Any, Any, Mask | Array]] = WeakKeyDictionary()


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` on CPUs, with gradients and without a compiler.

    Parameters
    ----------
    query, key, value : Tensor, (batch, heads, length, head_dim)
        In one dtype: float32, float64, float16 or bfloat16.
    score_mod : callable, optional
        ``f(score, b, h, q_idx, kv_idx)``. It may add tensors to the score, multiply it by numbers or tensors
        of b, h and q_idx, use ``torch.where`` and ``masked_fill``, and take tanh before anything is added.
    block_mask : BlockMask, optional
        From torch's ``create_block_mask``. Converted once per BlockMask.
    scale : float, optional
        Default ``head_dim ** -0.5``.
    enable_gqa : bool, default False
        Allow grouped heads.
    return_lse : bool, default False
        Return ``(out, lse)``.
    kernel_options : dict, optional
        Options of other kernels; no effect here.
    return_aux : AuxRequest, optional
        Return ``(out, AuxOutput(lse))``.

    Returns
    -------
    Tensor, (batch, heads_q, len_q, head_dim_v)
        Differentiable once. 0 for a query without keys. With lse: (batch, heads_q, len_q), float32, or
        float64 for float64.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    NotImplementedError
        If `score_mod` calls anything else on a score; the error names it.

    Notes
    -----
    A mask takes O(len_q) memory if each query attends one range of keys, otherwise 16 bytes per range or a
    byte per score, whichever is less. `mask_mod` is evaluated in partial blocks only. Terms that `score_mod`
    adds take memory for the axes that they depend on: len_q + len_k numbers per head if they depend on
    ``q_idx - kv_idx``, as ALiBi and relative positions, otherwise up to len_q * len_k. Tensors that they are
    made of get gradients.

    Source: J. Dong et al., "Flex Attention", 2024, arXiv:2412.05496.
    """
    return _computed(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch.compile(flex_attention) would ignore it there
@named("flex_attention")
def _computed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any,
    scale: float | None, enable_gqa: bool, return_lse: bool, return_aux: Any,
) -> Any:  # fmt: skip
    tensors = {"query": query, "key": key, "value": value}
    _check(tensors, enable_gqa, block_mask, return_lse, return_aux)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x if x.dtype is torch.float64 else x.to(dtype) for x in tensors.values())
    shape = *query.shape[:3], key.shape[2]
    options: dict[str, Any] = {
        "scale": query.shape[3] ** -0.5 if scale is None else scale,
        "mask": None if block_mask is None else _mask_of(block_mask, shape),
        "q_offset": 0,
    }
    mod = None
    if score_mod is not None and 0 not in shape:
        mod = read(score_mod, shape, torch.float64 if query.dtype is torch.float64 else torch.float32)
        scaled = _scaled(query, mod, options)
        # float32 queries attend 16-bit keys: nothing is rounded once more. Others are refused as they are.
        alike = query.dtype is key.dtype is value.dtype
        query = scaled if alike else scaled.to(query.dtype)
    bias, diagonals = (None, None) if mod is None else (mod.bias, mod.diagonals)
    out, lse = _Flex.apply(query, key, value, bias, diagonals, options)
    out = out.to(value.dtype)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check(tensors: Any, grouped: bool, block_mask: Any, return_lse: bool, return_aux: Any) -> None:
    """What the arguments of attention do not say, in torch's terms."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            came = f"on {x.device}" if isinstance(x, torch.Tensor) else f"of type {type(x).__name__}"
            raise TypeError(f"(): {name} is {came}; expected a tensor on the CPU")
        if x.ndim != 4 or x.dtype not in _DTYPES:
            expected = "(batch, heads, length, head_dim), floating"
            raise ValueError(f"(): {name} has shape {tuple(x.shape)}, {x.dtype}; expected {expected}")
    (batch_q, heads_q), (batch_kv, heads_kv) = (tensors[n].shape[:2] for n in ("query", "key"))
    if heads_q != heads_kv and not grouped:
        expected = "the same, or enable_gqa=True"
        raise ValueError(f"(): query has {heads_q} heads, and key {heads_kv}; expected {expected}")
    if batch_kv not in (1, batch_q):
        raise ValueError(f"(): key has {batch_kv} batch items; expected {batch_q}, as query has, or 1")
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise wrong_type("block_mask", block_mask, "a BlockMask of torch's create_block_mask")
    if return_aux is not None and (return_lse or return_aux.max_scores):
        raise NotImplementedError("(): return_aux has lse alone on CPUs, and replaces return_lse")


def _scaled(query: Any, mod: ScoreMod, options: dict[str, Any]) -> Any:
    """The query times the factor of `mod`, which becomes a scale or a softcap if it is one number."""
    factor = mod.factor
    one = factor.numel() == 1 and not factor.requires_grad
    if mod.ratio is not None:
        if not one or mod.ratio.numel() > 1 or mod.ratio.requires_grad:
            came = "tanh in score_mod has factors that differ or need a gradient"
            raise NotImplementedError(f"(): {came}; expected c * tanh(score / c) with one number c")
        if not 0 < abs(factor.item()) < torch.inf:
            came = f"score_mod multiplies tanh of scores by {factor.item()}"
            raise ValueError(f"(): {came}; expected a finite number other than 0")
        options["softcap"] = abs(factor.item())
        options["scale"] *= mod.ratio.item() * factor.item()
    elif one:
        options["scale"] *= factor.item()
    elif factor.shape[-1] > 1:
        came = "score_mod multiplies scores by what differs by key"
        raise NotImplementedError(f"(): {came}; expected factors of batch items, heads and queries")
    else:
        query = query * factor
    return query


class _Flex(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, diagonals: Any, options: Any) -> Any:
        options = options | {"num_threads": num_threads()}
        if bias is not None:
            options["bias"] = array_of(bias.detach())
        elif diagonals is not None:
            options["bias"] = toeplitz(array_of(diagonals.detach()), q.shape[2], k.shape[2])
        q_array, k_array, v_array = (array_of(x.detach()) for x in (q, k, v))
        names = ("query", "key", "value")
        args = attention_args(q_array, k_array, v_array, return_lse=True, names=names, **options)
        args.out = heads_inside(args.out.shape, args.out.dtype)
        dispatch.run(args)
        out, lse = tensor_of(args.out), tensor_of(args.result[1])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        names = ("dq", "dk", "dv", "dbias", "dbias_diagonals")
        need = [n for n, wanted in zip(names, ctx.needs_input_grad, strict=False) if wanted]
        dout = torch.zeros_like(out) if dout is None else dout
        arrays = [array_of(x.detach()) for x in (dout, q, k, v, out, lse)]
        like = {"dq": arrays[1], "dk": arrays[2], "dv": arrays[3]}
        into = [heads_inside(like[n].shape, like[n].dtype) if n in like else None for n in need]
        dlse = None if dlse is None else array_of(dlse)
        found = attention_backward(*arrays, dlse=dlse, need=need, into=into, **ctx.options)
        grads = dict(zip(need, map(tensor_of, found), strict=True))
        return *(grads.get(n) for n in names), None


@dataclass(frozen=True, repr=False, eq=False)
class _OfBlocks(Mask):
    """The ranges of keys of a BlockMask."""

    resolved: Resolved

    def resolve(self, shape: ScoreShape) -> Resolved:
        return self.resolved


def _mask_of(block_mask: BlockMask, shape: tuple[int, ...]) -> Mask | Array:
    """The mask that `block_mask` is, for scores of this shape."""
    *lead, len_q, len_k = block_mask.shape
    fits = all(n in (1, m) for n, m in zip(lead, shape[:2], strict=True)) if len(lead) == 2 else False
    if not fits or (len_q, len_k) != shape[2:]:
        expected = f"{shape}, with 1 in place of the first two where they broadcast"
        raise wrong_shape("block_mask", block_mask, expected)
    if block_mask.kv_indices.device.type != "cpu":
        raise ValueError(f"(): block_mask is on {block_mask.kv_indices.device}; expected the CPU")
    names = "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    parts = [getattr(block_mask, name) for name in names]
    # Tensors made in inference mode have no version.
    versions = [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in parts]
    known, at, mask = _known.get(block_mask, ((), [], None))
    if mask is None or at != versions or any(x is not y for x, y in zip(known, parts, strict=True)):
        mask = _made(block_mask, len_q, len_k)
        _known[block_mask] = parts, versions, mask
    return mask


def _bitmap(count: Any, indices: Any) -> Array:
    """Blocks of keys (batch, heads, blocks_q, blocks_k) that each block of queries has, True."""
    places = np.where(
        np.arange(indices.shape[-1]) < count.numpy()[..., None], indices.numpy(), indices.shape[-1]
    )
    found = np.zeros((*places.shape[:-1], places.shape[-1] + 1), np.bool_)
    np.put_along_axis(found, places, True, axis=-1)
    return found[..., :-1]


def _made(block_mask: BlockMask, len_q: int, len_k: int) -> Mask | Array:
    """The keys that are in full blocks, and those of partial blocks for which mask_mod is true."""
    partial = _bitmap(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _bitmap(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if block_mask.mask_mod is noop_mask:
        full, partial = full | partial, np.zeros_like(partial)
    size = np.minimum(block_mask.BLOCK_SIZE, (len_q, len_k))
    rows = np.arange(full.shape[0] * full.shape[1] * len_q).reshape(*full.shape[:2], len_q)
    run, begin, end = runs_of(full)
    group, block = np.divmod(run, full.shape[2])
    query = block[:, None] * size[0] + np.arange(size[0])
    some = query < len_q
    owner = (group[:, None] * len_q + query)[some]
    begin, end = (np.broadcast_to(x[:, None] * size[1], some.shape)[some] for x in (begin, end))
    parts = [(owner, begin, end), *_partial_runs(block_mask.mask_mod, partial, size, rows, len_k)]
    owner, begin, end = map(np.concatenate, zip(*parts, strict=True))
    lists = key_ranges.union(rows, rows.size, owner, begin, end, len_k)
    if lists.ranges.nbytes <= rows.size * len_k:
        return _OfBlocks(key_ranges.simplified(lists))
    return key_ranges.as_array(Resolved(lists=lists), (*rows.shape, len_k))  # a bool each is less


def _partial_runs(function: Any, partial: Array, size: Ints, rows: Ints, len_k: int) -> Iterator[Any]:
    """Runs of keys for which `function` is true in the blocks of `partial`: row, begin and end."""
    side = np.minimum(size, _SIDE)
    b, h, *block = np.nonzero(partial)
    first = np.stack(block, axis=-1) * size  # query and key
    cuts = np.stack(np.meshgrid(*map(np.arange, (0, 0), size, side)), axis=-1).reshape(-1, 2)
    last = np.repeat(np.minimum(first + size, (rows.shape[2], len_k)), len(cuts), axis=0)
    first = (first[:, None] + cuts).reshape(-1, 2)
    last = np.minimum(first + side, last)
    some = (first < last).all(axis=-1)
    pieces = np.stack([np.repeat(b, len(cuts)), np.repeat(h, len(cuts)), *first.T, *last.T])[:, some]
    at_once = max(1, _CHUNK // int(side.prod()))
    for start in range(0, pieces.shape[1], at_once):
        chunk = pieces[:, start : start + at_once]
        b, h, q, k, last_q, last_k = chunk[:, :, None]
        found = _evaluated(function, torch.from_numpy(chunk), side)
        inside = (q + np.arange(side[0]) < last_q)[..., None] & (k + np.arange(side[1]) < last_k)[:, None]
        run, begin, end = runs_of(found & inside)
        piece, query = np.divmod(run, side[0])
        row, key = rows[b, h, q][piece, 0] + query, k[piece, 0]
        yield row, key + begin, key + end


def _evaluated(function: Any, pieces: Any, side: Ints) -> Array:
    """`function` in each of the `pieces` of the scores; places beyond them are the last ones inside."""

    def called(n: Any, _: Any, i: Any, j: Any) -> Any:
        b, h, q, k, last_q, last_k = (x[n] for x in pieces)
        return function(b, h, torch.minimum(q + i, last_q - 1), torch.minimum(k + j, last_k - 1))

    with torch.no_grad():
        found = create_mask(called, pieces.shape[1], 1, *side.tolist(), "cpu")
    if found.dtype is not torch.bool:
        raise TypeError(f"(): mask_mod of block_mask returns {found.dtype}; expected bool")
    return found[:, 0].numpy()  # type: ignore[no-any-return]
