"""The keyword arguments of `attention`, and which of them each other function takes: said once, here.

A function says ``**options: Unpack[...]`` of one of these dictionaries: type checkers read it, and at run
time `require_options` refuses every other name. Defaults are those of `attention_args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fastattn._args.types import Array, ArrayLike
from fastattn._args.words import not_an_argument

if TYPE_CHECKING:
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


class PlaceOptions(TypedDict, total=False):
    """Keys that a query attends."""

    mask: ArrayLike | Mask | None
    window: tuple[int | None, int | None] | None
    kv_lengths: ArrayLike | None
    q_offset: ArrayLike | None
    row_ranges: tuple[ArrayLike, ArrayLike] | None


class KeyOptions(PlaceOptions, total=False):
    """Options of places, and the bias."""

    bias: ArrayLike | None


class CausalOption(TypedDict, total=False):
    """Whether attention is causal; see `attention`, as for all that follow."""

    causal: bool


class ScaleOption(TypedDict, total=False):
    """The factor of the products."""

    scale: float | None


class SoftcapOption(TypedDict, total=False):
    """The bound of the scores."""

    softcap: float | None


class AlibiOption(TypedDict, total=False):
    """The slopes of the distances."""

    alibi_slopes: ArrayLike | None


class SinksOption(TypedDict, total=False):
    """Logits of sinks, which enter the softmax's denominator alone."""

    sinks: ArrayLike | None


class ScoreOptions(KeyOptions, CausalOption, ScaleOption, SoftcapOption, AlibiOption):
    """Options that make scores."""


class KeyScaleOption(TypedDict, total=False):
    """Factors of int8 keys."""

    k_scale: ArrayLike | None


class ValueScaleOption(TypedDict, total=False):
    """Factors of int8 values."""

    v_scale: ArrayLike | None


class DropoutOptions(TypedDict, total=False):
    """Probabilities that become 0."""

    dropout: float
    seed: int | None


class ProbOptions(ScoreOptions, SinksOption):
    """Options that make probabilities of keys that are not int8."""


class InnerOptions(ProbOptions, ComputeOptions):
    """Options of an attention inside another function, which returns something else."""


class VariantOptions(InnerOptions, OutOption):
    """Options of functions that make other q, k, v and then call attention."""


class WeightsOptions(ProbOptions, KeyScaleOption, DropoutOptions):
    """Options of `attention_weights`."""


class AttentionOptions(VariantOptions, KeyScaleOption, ValueScaleOption, DropoutOptions):
    """Options of `attention`, but for `return_lse` and `stats`, on which the type of its result depends."""


class BackwardOptions(InnerOptions, DropoutOptions):
    """Options that `attention_backward` shares with `attention`."""


class VarlenBackwardOptions(
    CausalOption,
    ScaleOption,
    SoftcapOption,
    AlibiOption,
    SinksOption,
    DropoutOptions,
    ComputeOptions,
    total=False,
):
    """Options that `varlen_attention_backward` shares with `varlen_attention`."""

    window: tuple[int | None, int | None] | None


class VarlenOptions(
    CausalOption,
    ScaleOption,
    SoftcapOption,
    AlibiOption,
    SinksOption,
    KeyScaleOption,
    ValueScaleOption,
    DropoutOptions,
    OutOption,
    ComputeOptions,
    total=False,
):
    """Options of `varlen_attention`, but for `return_lse`."""

    window: tuple[int | None, int | None] | None


class BlockOptions(
    CausalOption, ScaleOption, SoftcapOption, AlibiOption, SinksOption, ComputeOptions, total=False
):
    """Options of `fastattn.dask.attention`, which computes blocks of rows and keys apart."""

    window: tuple[int | None, int | None] | None
    kv_lengths: ArrayLike | None
    q_offset: ArrayLike | None


class NoSoftmaxOptions(ScoreOptions, OutOption, ComputeOptions):
    """Options of attention without softmax, which has no sinks and one result."""


class SigmoidOptions(NoSoftmaxOptions, KeyScaleOption, ValueScaleOption):
    """Options of `sigmoid_attention`, which the kernels of `attention` run."""


class CosineOptions(
    KeyOptions, CausalOption, SoftcapOption, AlibiOption, SinksOption, OutOption, ComputeOptions
):
    """Options of `cosine_attention`, whose scale is its own."""


class ForgettingOptions(KeyOptions, ScaleOption, SoftcapOption, AlibiOption, OutOption, ComputeOptions):
    """Options of `forgetting_attention`, which is causal."""


class PlacedOptions(KeyOptions, CausalOption, ScaleOption, SinksOption, ComputeOptions):
    """Options of relative positions, which have no soft cap."""


class ShawOptions(PlacedOptions, OutOption):
    """Options of `shaw_attention`, which takes keys apart by their distance."""


class RelativeOptions(PlacedOptions, AlibiOption, OutOption):
    """Options of relative positions that are a bias."""


class ScaledOptions(ScaleOption, ComputeOptions):
    """Options of approximations, which return something else than the attention inside them."""


class LinformerOptions(ScaledOptions, OutOption):
    """Options of `linformer_attention`."""


class NeighborhoodOptions(ScaledOptions, SoftcapOption, SinksOption):
    """Options of `neighborhood_attention`, whose results are made a strip of the grid at a time."""


class StridedOptions(ScaleOption, SoftcapOption, SinksOption, OutOption, ComputeOptions):
    """Options of patterns that know no positions."""


class LocationOptions(PlaceOptions, CausalOption, OutOption, ComputeOptions):
    """Options of `location_attention`, whose scores are given."""


class DeltaOptions(ScaleOption, OutOption, ComputeOptions, total=False):
    """Options of `linear_attention` that the named delta rules take."""

    state: Array | None
    return_state: bool
    out_state: Array | None


class DecayOptions(ScaleOption, OutOption, ComputeOptions, total=False):
    """Options of `linear_attention` that named rules with normalisation take: then states are pairs."""

    normalize: bool
    eps: float
    state: Array | tuple[Array, Array] | None
    return_state: bool
    out_state: Array | tuple[Array, Array] | None


def require_options(options: Mapping[str, Any], taken: type) -> None:
    """Raise unless `taken`, one of the classes above, has all `options`."""
    for name in options:
        if name not in taken.__annotations__:
            raise not_an_argument(options, taken)
