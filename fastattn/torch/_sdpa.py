"""A kernel for torch's scaled_dot_product_attention on CPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fastattn._args.attention import attention_args
from fastattn._args.errors import named
from fastattn._engine import dispatch, settings
from fastattn._undo import Shared, Undo
from fastattn.torch._measure import attention_key, gains, measured, measuring, sample
from fastattn.torch._tensors import array_of, num_threads, tensor_of

_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_unmeasured: set[object] = set()  # patches that replace every call, while they last


def patch_sdpa(*, measure: bool = True) -> Undo:
    """Replace the CPU kernel of ``torch.nn.functional.scaled_dot_product_attention`` until undone.

    A switch, ``patch = patch_sdpa()`` and later ``patch.undo()``, or a context manager, ``with
    patch_sdpa():``. It applies to the whole process: all threads and all callers of the function, compiled or
    not, such as ``nn.MultiheadAttention``. Several patches end with the last one.

    Parameters
    ----------
    measure : bool, default True
        Time both kernels at the first call of each kind (dtype, mask, head_dim, powers of two of the other
        sizes), on at most 512 queries and 2048 keys, and keep torch's unless this gains 5%. False, here or in
        another active patch: replace every call.

    Returns
    -------
    Undo
        ``undo()`` ends the patch. Prints what was measured so far, as `measured` does.

    Raises
    ------
    RuntimeError
        If there are no compiled kernels: NumPy would be slower than torch.

    Notes
    -----
    The replaced kernel is ``_scaled_dot_product_flash_attention_for_cpu``, below torch's dispatcher. torch
    still computes what never reaches it: dropout, nested tensors, other devices, fewer than four dimensions,
    values of another head_dim than keys, gradients of masks. Gradients of q, k and v are torch's.
    """
    if why := settings.why_numpy():
        raise RuntimeError(f"patch_sdpa(): this process runs on NumPy: {why}")
    steps = [_PATCH.use()]
    if not measure:
        _unmeasured.add(steps[0])
        steps.append(partial(_unmeasured.discard, steps[0]))
    return Undo(steps, lambda: said(measure))


def said(measure: bool) -> str:
    """Summary of a patch, for the text of a change."""
    calls = "scaled_dot_product_attention on CPUs: fastattn"
    if not measure:
        return calls
    found = [f"\n    {kind}: {ratio}" for kind, ratio in measured().items() if kind.startswith("sdpa ")]
    return f"{calls}, if faster; measured at the first call of a kind{''.join(found)}"


def _patched() -> Callable[[], None]:
    library = torch.library.Library("aten", "IMPL")
    torchs = torch.library.get_kernel(_OP, "CPU")
    with warnings.catch_warnings():  # it is replaced on purpose
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(_OP._opname, _kernel(torchs), "CPU", with_keyset=True)
    return library._destroy  # type: ignore[no-any-return]


_PATCH = Shared(_patched)


def _kernel(torchs: Any) -> Callable[..., Any]:
    def kernel(
        keyset: Any, q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        def torch_s(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return torchs.call_boxed(keyset, q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)

        def ours(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return _attention(q, k, v, mask, is_causal, scale)

        call = q, k, v, attn_mask
        if dropout_p or measuring() or not _covered(*call):
            return torch_s(*call)
        try:
            if _unmeasured or gains(
                attention_key("sdpa", q, k, attn_mask, is_causal),
                lambda: (partial(torch_s, *sample(*call)), partial(ours, *sample(*call))),
            ):
                return ours(*call)
        except (TypeError, ValueError):  # before anything was computed: torch has a result, or its own error
            pass
        return torch_s(*call)

    return kernel


def _covered(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Whether the kernel here takes a call: what else there may be is torch's business."""
    dtype = q.dtype
    if not (dtype in _DTYPES and k.dtype is dtype and v.dtype is dtype and q.ndim == k.ndim == v.ndim == 4):
        return False
    if not q.numel() or q.shape[-1] != v.shape[-1] or settings.current.backend != "compiled":
        return False
    return mask is None or mask.dtype in (torch.bool, torch.float32, dtype)


@named("scaled_dot_product_attention")
def _attention(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    """Result and lse, in the memory layouts that torch's compiler expects of them."""
    out = torch.empty_like(q)
    if torch.is_grad_enabled():  # the dispatcher has noted already whose gradients there are
        q, k, v = q.detach(), k.detach(), v.detach()
    bias = None
    if mask is not None:
        array = array_of(mask)
        mask, bias = (array, None) if array.dtype == np.bool_ else (None, array)
    args = attention_args(
        array_of(q), array_of(k), array_of(v), mask, bias, causal,
        scale=scale, q_offset=0 if causal else None, return_lse=True, num_threads=num_threads(),
    )  # fmt: skip
    batch, heads, length = args.out.shape[:-1]
    args.out = array_of(out)
    args.lse = np.empty((batch, length, heads), args.result[1].dtype).swapaxes(1, 2)
    dispatch.run(args)
    np.copyto(args.lse, 0, where=np.isneginf(args.lse))  # of rows that attend nothing, as torch has it
    return out, tensor_of(args.lse)
