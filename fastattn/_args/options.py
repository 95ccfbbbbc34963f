"""The keyword arguments of `attention`, and which of them each other function takes: said once, here.

A function says ``**options: Unpack[...]`` of one of these dictionaries: type checkers read it, and at run
time `require_options` refuses every other name. Defaults are those of `attention_args`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fastattn._args.types import Array, ArrayLike
from fastattn._args.words import not_an_argument

if TYPE_CHECKING:
    import numpy as np

    from fastattn.masks import Mask

Backend = Literal["compiled", "numpy"]


class NoOptions(TypedDict, total=False):
    """No options: where all arguments are named, ``**others`` lets an error name the right one."""


class ComputeOptions(TypedDict, total=False):
    """Threads and backend of a computation."""

    num_threads: int | None
    backend: Backend | None


class OutOption(TypedDict, total=False):
    """Array for the result."""

    out: Array | None


class _Mask(TypedDict, total=False):
    mask: ArrayLike | Mask | None


class _Window(TypedDict, total=False):
    window: tuple[int | None, int | None] | None


class _Offsets(TypedDict, total=False):
    kv_lengths: ArrayLike | None
    q_offset: ArrayLike | None


class PlaceOptions(_Mask, _Window, _Offsets, total=False):
    """Keys that a query attends."""

    row_ranges: tuple[ArrayLike, ArrayLike] | None


class _Keys(PlaceOptions, total=False):
    bias: ArrayLike | None


class _Causal(TypedDict, total=False):
    causal: bool


class _Scale(TypedDict, total=False):
    scale: float | None


class _Softcap(TypedDict, total=False):
    softcap: float | None


class _Alibi(TypedDict, total=False):
    alibi_slopes: ArrayLike | None


class _Sinks(TypedDict, total=False):
    sinks: ArrayLike | None


class _Scores(_Keys, _Causal, _Scale, _Softcap, _Alibi):
    """Options that make scores."""


class _KeyScale(TypedDict, total=False):
    k_scale: ArrayLike | None


class _ValueScale(TypedDict, total=False):
    v_scale: ArrayLike | None


class _Products(TypedDict, total=False):
    products: Literal["int8"] | None


class _Pages(TypedDict, total=False):
    block_table: ArrayLike | None


class _Dropout(TypedDict, total=False):
    dropout: float
    seed: int | None


class _Probs(_Scores, _Sinks):
    """Options that make probabilities of keys that are not int8."""


class InnerOptions(_Probs, ComputeOptions):
    """Options of an attention inside another function, which returns something else."""


class VariantOptions(InnerOptions, OutOption):
    """Options of functions that make other q, k, v and then call attention."""


class WeightsOptions(_Probs, _KeyScale, _Dropout):
    """Options of `attention_weights`."""


class AttentionOptions(VariantOptions, _KeyScale, _ValueScale, _Products, _Dropout, _Pages):
    """Options of `attention`, but for `return_lse` and `stats`, on which the type of its result depends."""


class BackwardOptions(InnerOptions, _Dropout):
    """Options that `attention_backward` shares with `attention`."""


class _RowOptions(_Causal, _Scale, _Softcap, _Alibi, _Sinks, ComputeOptions, _Window):
    """Options that need no array of scores."""


class VarlenBackwardOptions(_RowOptions, _Dropout):
    """Options that `varlen_attention_backward` shares with `varlen_attention`."""


class VarlenOptions(VarlenBackwardOptions, _KeyScale, _ValueScale, _Products, OutOption, _Pages):
    """Options of `varlen_attention`, but for `return_lse`."""


class BlockOptions(_RowOptions, _Offsets):
    """Options of `fastattn.dask.attention`, which computes blocks of rows and keys apart."""


class SelectedOptions(
    _Causal, _Scale, _Softcap, _Sinks, _KeyScale, _ValueScale, OutOption, ComputeOptions, _Window, _Offsets
):
    """Options of `selected_attention`, but for `return_lse`."""


class NoSoftmaxOptions(_Scores, OutOption, ComputeOptions):
    """Options of attention without softmax, which has no sinks and one result."""


class SigmoidOptions(NoSoftmaxOptions, _KeyScale, _ValueScale):
    """Options of `sigmoid_attention`, which the kernels of `attention` run."""


class RelativeOptions(_Keys, _Causal, _Scale, _Sinks, ComputeOptions, _Alibi, OutOption):
    """Options of relative positions that are a bias, without softcap."""


class SamplingOptions(TypedDict, total=False):
    """Options of the choice of next tokens."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    logits_processor: Callable[[Array, Array], Array] | None
    seed: int | np.random.SeedSequence | None


def require_options(options: Mapping[str, Any], taken: type, *named: str) -> None:
    """Raise unless `taken`, one of the classes above, has all `options`; messages list those `named`, too."""
    for name in options:
        if name not in taken.__annotations__:
            raise not_an_argument(options, taken, *named)
