"""The keyword arguments of `attention`, and which of them each other function takes: said once, here.

A function says ``**options: Unpack[...]`` of one of these dictionaries: type checkers read it, and at run
time `require_options` refuses every other name. Defaults are those of `attention_args`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fastattn._args.words import not_an_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array
    from fastattn.masks import Mask

Backend = Literal["compiled", "numpy"]


class NoOptions(TypedDict, total=False):
    """Nothing: functions whose arguments are all said take ``**others`` to name the right one in an error."""


class ComputeOptions(TypedDict, total=False):
    """How to compute."""

    num_threads: int | None
    backend: Backend | None


class OutOption(TypedDict, total=False):
    """Where the result goes."""

    out: Array | None


class PlaceOptions(TypedDict, total=False):
    """Which keys a query attends."""

    mask: ArrayLike | Mask | None
    window: tuple[int | None, int | None] | None
    kv_lengths: ArrayLike | None
    q_offset: ArrayLike | None
    row_ranges: tuple[ArrayLike, ArrayLike] | None


class KeyOptions(PlaceOptions, total=False):
    """Options of places, and the bias."""

    bias: ArrayLike | None


class CausalOption(TypedDict, total=False):
    """See `attention`, as for all that follow."""

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
    """What else enters the softmax's denominator."""

    sinks: ArrayLike | None


class ScoreOptions(KeyOptions, CausalOption, ScaleOption, SoftcapOption, AlibiOption):
    """All that makes scores."""


class KeyScaleOption(TypedDict, total=False):
    """What int8 keys are multiplied by."""

    k_scale: ArrayLike | None


class ValueScaleOption(TypedDict, total=False):
    """And int8 values."""

    v_scale: ArrayLike | None


class DropoutOptions(TypedDict, total=False):
    """Which probabilities become 0."""

    dropout: float
    seed: int | None


class ProbOptions(ScoreOptions, SinksOption):
    """All that makes probabilities, of keys that are not int8."""


class InnerOptions(ProbOptions, ComputeOptions):
    """Those of an attention inside of another function, which returns something else."""


class VariantOptions(InnerOptions, OutOption):
    """Those that functions pass on which make an attention of other arrays."""


class WeightsOptions(ProbOptions, KeyScaleOption, DropoutOptions):
    """Those of `attention_weights`."""


class AttentionOptions(VariantOptions, KeyScaleOption, ValueScaleOption, DropoutOptions):
    """All of `attention`, but for `return_lse` and `stats`, on which the type of its result depends."""


class BackwardOptions(InnerOptions, DropoutOptions):
    """Those of `attention_backward`, but for its own."""


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
    """Those of `varlen_attention_backward`, but for its own."""

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
    """Those of `varlen_attention`, but for `return_lse`."""

    window: tuple[int | None, int | None] | None


class BlockOptions(
    CausalOption, ScaleOption, SoftcapOption, AlibiOption, SinksOption, ComputeOptions, total=False
):
    """Those of `fastattn.dask.attention`, which computes blocks of rows and keys apart."""

    window: tuple[int | None, int | None] | None
    kv_lengths: ArrayLike | None
    q_offset: ArrayLike | None


class NoSoftmaxInnerOptions(ScoreOptions, ComputeOptions):
    """Where there is no softmax, there are no sinks; of gradients."""


class NoSoftmaxOptions(NoSoftmaxInnerOptions, OutOption):
    """The same of what has one result."""


class SigmoidOptions(NoSoftmaxOptions, KeyScaleOption, ValueScaleOption):
    """Those of `sigmoid_attention`, which the kernels of `attention` run."""


class CosineInnerOptions(KeyOptions, CausalOption, SoftcapOption, AlibiOption, SinksOption, ComputeOptions):
    """Those of `cosine_attention_backward`, whose scale is its own."""


class CosineOptions(CosineInnerOptions, OutOption):
    """Those of `cosine_attention`."""


class ForgettingInnerOptions(KeyOptions, ScaleOption, SoftcapOption, AlibiOption, ComputeOptions):
    """Those of `forgetting_attention_backward`, which is causal."""


class ForgettingOptions(ForgettingInnerOptions, OutOption):
    """Those of `forgetting_attention`."""


class PlacedOptions(KeyOptions, CausalOption, ScaleOption, SinksOption, ComputeOptions):
    """Those of relative positions, to which a soft cap would not apply."""


class ShawInnerOptions(PlacedOptions):
    """Those of `shaw_attention_backward`, which takes keys apart by their distance."""


class ShawOptions(ShawInnerOptions, OutOption):
    """Those of `shaw_attention`."""


class RelativeInnerOptions(PlacedOptions, AlibiOption):
    """Those of the gradients of relative positions that are a bias."""


class RelativeOptions(RelativeInnerOptions, OutOption):
    """Those of these relative positions."""


class ScaledOptions(ScaleOption, ComputeOptions):
    """Those of the approximations, which return something else than the attention inside of them."""


class LinformerOptions(ScaledOptions, OutOption):
    """Those of `linformer_attention`."""


class NeighborhoodOptions(ScaledOptions, SoftcapOption, SinksOption):
    """Those of `neighborhood_attention`, whose results are made a strip of the grid at a time."""


class StridedInnerOptions(ScaleOption, SoftcapOption, SinksOption, ComputeOptions):
    """Those that know nothing of positions; of gradients."""


class StridedOptions(StridedInnerOptions, OutOption):
    """The same of what has one result."""


class LocationInnerOptions(PlaceOptions, CausalOption, ComputeOptions):
    """Those of `location_attention_backward`, whose scores are given."""


class LocationOptions(LocationInnerOptions, OutOption):
    """Those of `location_attention`."""


class DeltaOptions(ScaleOption, OutOption, ComputeOptions, total=False):
    """Of `linear_attention`, those of the named delta rules."""

    state: Array | None
    return_state: bool
    out_state: Array | None


class DecayOptions(ScaleOption, OutOption, ComputeOptions, total=False):
    """Of `linear_attention`, those of the named rules that can be normalised: then states are pairs."""

    normalize: bool
    eps: float
    state: Array | tuple[Array, Array] | None
    return_state: bool
    out_state: Array | tuple[Array, Array] | None


class DeltaGradientOptions(ScaleOption, ComputeOptions, total=False):
    """Of `linear_attention_backward`, those of the named delta rules."""

    state: Array | None
    dstate_out: Array | None


class DecayGradientOptions(ScaleOption, ComputeOptions, total=False):
    """Of `linear_attention_backward`, those of the named rules that can be normalised."""

    normalize: bool
    eps: float
    state: Array | tuple[Array, Array] | None
    dstate_out: Array | tuple[Array, Array] | None


def require_options(func: str, options: Mapping[str, Any], taken: type) -> None:
    """Raise unless `taken`, one of the classes above, has all `options`."""
    for name in options:
        if name not in taken.__annotations__:
            raise not_an_argument(func, options, taken)
