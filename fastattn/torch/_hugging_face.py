"""The attention interface of Hugging Face's transformers: ``attn_implementation="fastattn"``."""

from __future__ import annotations

from typing import Any

import torch

from fastattn.torch._attention import attention_op

NAME = "fastattn"


def register() -> None:
    """Let models of transformers and sentence-transformers have ``attn_implementation="fastattn"``.

    It holds for `from_pretrained`, for `model.set_attn_implementation` of a loaded model, and in
    ``SentenceTransformer(..., model_kwargs={"attn_implementation": "fastattn"})``. Calling it again changes
    nothing.

    Raises
    ------
    ImportError
        If transformers is not installed, or older than 4.53, where the interfaces are missing.

    Notes
    -----
    Masks are those that transformers makes for its "sdpa": bools, or none where causal is all. Softcaps,
    sinks (``s_aux``) and position biases go to the kernel, too, with their gradients. Calls with dropout, on
    other devices, with nested tensors or with a paged cache go to transformers' own "sdpa" function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attention as transformers calls it: the result is (batch, length, heads, head_dim)."""
    if dropout or query.is_nested or query.device.type != "cpu" or kwargs.get("cache") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = {"softcap": softcap, "position_bias": position_bias}
        kwargs |= {name: x for name, x in given.items() if x is not None}
        if s_aux is not None:
            raise NotImplementedError(f"fastattn: attention with sinks takes no {_reason(query, dropout)}")
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # As in transformers' own function: a mask says all, and one query attends every key.
    causal = bool(is_causal and attention_mask is None and query.shape[2] > 1)
    bias = position_bias
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        bias = attention_mask if bias is None else bias + attention_mask
        attention_mask = None
    out = attention_op(
        query, key, value, attention_mask, bias, s_aux, causal=causal, scale=scaling, softcap=softcap,
        q_offset=0 if causal else None,
    )  # fmt: skip
    return out.transpose(1, 2), None


def _reason(query: Any, dropout: float) -> str:
    if dropout:
        return "dropout"
    return "nested tensors" if query.is_nested else f"tensors on {query.device.type}, and no paged cache"
