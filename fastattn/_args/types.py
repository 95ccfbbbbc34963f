"""The argument objects that go down to the kernels and to their NumPy twins; checked, normalised, cheap."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike as ArrayLike
    from numpy.typing import DTypeLike as DTypeLike
    from numpy.typing import NDArray as NDArray
    from typing_extensions import Self as Self
    from typing_extensions import TypeIs as TypeIs
    from typing_extensions import Unpack as Unpack

    Array = NDArray[Any]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]
else:  # names in annotations, which nothing evaluates: importing what they are of takes milliseconds
    ArrayLike = DTypeLike = NDArray = Self = TypeIs = Unpack = Array = Bools = Ints = Any
Shape = tuple[int, ...]

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

# Bytes of rows in 4 bits, which nobody takes for numbers, and of a block: src/int4.inc.h.
INT4 = np.dtype([("int4", np.uint8)])
INT4_BLOCK, INT4_BYTES = 32, 18

_ALL = slice(None)

# The formulas are in src/activations.inc, their NumPy twins in _reference/activations.py.
Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "quick_gelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
# What `linear` can round its input to: the argument `activations`.
Rounding: TypeAlias = Literal["int8"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


class KernelArgs:
    """The arguments of one kernel, which has their name: "rows_grad" of RowsGradArgs."""

    __slots__ = ()
    kernel: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "kernel" not in vars(cls):
            cls.kernel = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__.removesuffix("Args")).lower()


@dataclass(slots=True)
class StatisticsArgs:
    """Arrays for the statistics, in the lane dtype, with an axis of heads; None for those not asked for."""

    row_max: Array | None = None  # (*batch_shape, heads_q, len_q)
    entropy: Array | None = None  # the same
    top_weights: Array | None = None  # (*batch_shape, heads_q, len_q, at most len_k)
    top_keys: Ints | None = None  # the same
    # These two are 0 before, and added to by a second pass over the scores.
    key_sums: Array | None = None  # (*batch_shape, heads_q, len_k)
    mean_weights: Array | None = None  # (*batch_shape, 1, len_q, len_k)
    norm: Array | None = None  # (*batch_shape, heads_q, len_q, 2): for the second pass, from the first
    n_top: int = 0  # of top_weights and top_keys

    @property
    def second_pass(self) -> bool:
        """Whether scores are computed once more."""
        return self.key_sums is not None or self.mean_weights is not None


# The arrays of an attention call, and their axes after the batch dimensions. Inputs broadcast: such an axis
# may have the length 1, batch dimensions may be missing. src/interface/attention.h says the same.
AXES = {
    "q": ("heads_q", "len_q", "head_dim"),
    "k": ("heads_kv", "len_k", "head_dim"),
    "v": ("heads_kv", "len_k", "head_dim_v"),
    "out": ("heads_q", "len_q", "head_dim_v"),
    **dict.fromkeys(("k_scale", "v_scale"), ("heads_kv", "len_k")),
    **dict.fromkeys(("mask", "bias"), ("heads_q", "len_q", "len_k")),
    **dict.fromkeys(("lse", "row_begin", "row_end", "range_first", "range_last"), ("heads_q", "len_q")),
    **dict.fromkeys(("sinks", "alibi_slopes"), ("heads_q",)),
    "q_position": (),
}
ARRAYS_OF_HEADS = tuple(name for name, axes in AXES.items() if axes == ("heads_q",))


class ModifiersArgs(NamedTuple):
    """Modifiers of scores that are numbers, for whoever hands them on; `AttentionArgs` has their names."""

    scale: float
    softcap: float = 0.0


# Options whose gradients are a sum for each head; those of numbers are then summed over the heads.
OF_NUMBERS = tuple(name for name in ModifiersArgs._fields if name != "scale")
OF_HEADS = (*ARRAYS_OF_HEADS, *OF_NUMBERS)


@dataclass(init=False, eq=False)
class AttentionArgs(KernelArgs):
    """One attention call, checked and normalised: all that the compiled layer and its NumPy twin read.

    Defaults are options that are off; as the class holds them, a call sets only what it has. `AXES` has the
    shapes. Values of the lane dtype are in the accumulator's: float64 for float64, else float32.
    """

    batch_shape: Shape  # of the result: those of q, k and v broadcast
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    # Native byte order, aligned, last axis contiguous.
    q: Array
    k: Array
    v: Array
    out: Array  # q's dtype
    num_threads: int
    result: Any  # what the caller gets: out[, lse][, stats]; without the heads axis where there was none
    scale: float
    # k and v may be in INT4: `shape_of`.
    # Both or neither: then k and v are int8 and stand for k * k_scale[..., None] and v * v_scale[..., None].
    k_scale: Array | None = None  # lane dtype
    v_scale: Array | None = None
    integers: bool = False  # products of int8 are asked for
    hadamard: bool = False  # k was multiplied by a Hadamard matrix, and the kernel of `integers` multiplies q
    lse: Array | None = None  # lane dtype
    softcap: float = 0.0  # 0: none
    mask: Bools | None = None
    bias: Array | None = None  # float32 or q's dtype
    alibi_slopes: Array | None = None  # lane dtype
    sinks: Array | None = None  # lane dtype
    # Row i attends keys row_begin[i] <= j < row_end[i]; values in [0, len_k]; None is an open side.
    row_begin: Ints | None = None
    row_end: Ints | None = None
    # And of those, the keys in ranges[range_first[i] : range_last[i]]: pairs (begin, end) in [0, len_k], of a
    # row not empty, sorted, none touching the next. They are (n, 2), C-contiguous.
    ranges: Ints | None = None
    range_first: Ints | None = None
    range_last: Ints | None = None
    q_position: Ints | None = None  # of query row 0, with `has_distances`
    # sigmoid(score + that) in place of the softmax: no lse, sinks, statistics, dropout.
    sigmoid_bias: float | None = None
    statistics: StatisticsArgs | None = None  # of the probabilities before dropout
    dropout: float = 0.0  # in [0, 1): this share of the probabilities becomes 0; see _reference/philox.py
    seed: int = 0  # in [0, 2**64)
    # The number of the first batch item, from which dropout counts heads.
    first_item: int = 0
    # Of a ragged call, where each sequence's queries and keys begin, and the end: (sequences + 1,). Then
    # batch_shape is (sequences,), axes of length len_q and len_k hold the tokens of all sequences, and ranges
    # count from a sequence's first key. A bias is that of any of them, as it depends on distances alone. No
    # mask, lists of ranges or statistics are there.
    begins: tuple[Ints, Ints] | None = None
    # (*batch_shape, n) int32, C-contiguous: key j of a sequence is row j % page of page table[j // page] of k
    # and v, (pages, heads_kv, page, head_dim); scales are (pages, heads_kv, page). len_k is n * page, or of a
    # ragged call the sum of the lengths.
    block_table: Array | None = None
    copies: tuple[str, ...] = ()  # what was copied, and why

    @property
    def has_distances(self) -> bool:
        """Whether scores depend on distances of keys."""
        return self.alibi_slopes is not None

    def cut(self, **slices: slice) -> AttentionArgs:
        """The call over slices of the axes "len_q" and "len_k"; its arrays are views of these."""
        part = copy(self)
        for name, axes in AXES.items():
            x = getattr(self, name)
            if x is not None and not slices.keys().isdisjoint(axes):
                sizes = zip(axes, x.shape[x.ndim - len(axes) :], strict=True)
                index = [slices.get(a, _ALL) if n == getattr(self, a) else _ALL for a, n in sizes]
                setattr(part, name, x[(..., *index)])
        for axis, chosen in slices.items():
            setattr(part, axis, chosen.stop - chosen.start)
        return part


def plain_args(q: Array, k: Array, v: Array, out: Array, num_threads: int) -> AttentionArgs:
    """Attention without any option, of arrays (batch, heads, length, head_dim) that are known to fit."""
    args = AttentionArgs()
    batch, args.heads_q, args.len_q, args.head_dim = q.shape
    _, args.heads_kv, args.len_k, args.head_dim_v = shape_of(v)
    args.batch_shape = (batch,)
    args.q, args.k, args.v, args.out, args.result = q, k, v, out, out
    args.scale, args.num_threads = args.head_dim**-0.5, num_threads
    return args


@dataclass(slots=True, eq=False)
class SelectedArgs(KernelArgs):
    """Attention of each query to blocks of keys that are listed for it.

    The call has neither mask, ranges of its own, bias, ALiBi, dropout nor statistics.
    """

    attention: AttentionArgs
    selected: Ints  # broadcasts to (*batch_shape, heads_kv, len_q, any number); -1: none
    block_size: int

    @property
    def out(self) -> Array:
        """Array for the result."""
        return self.attention.out

    def by_key_head(self) -> AttentionArgs:
        """The call with key heads as the last axis of the batch, one head each; its arrays are views."""
        a = self.attention
        part, group = copy(a), a.heads_q // a.heads_kv
        part.batch_shape, part.heads_q, part.heads_kv = (*a.batch_shape, a.heads_kv), group, 1
        for name, axes in AXES.items():
            x = getattr(a, name)
            if x is None or not axes:
                continue
            at = x.ndim - len(axes)
            split = (a.heads_kv, group) if x.shape[at] == a.heads_q else (1, 1)
            if axes[0] == "heads_kv":
                split = (x.shape[at], 1)
            setattr(part, name, x.reshape(*x.shape[:at], *split, *x.shape[at + 1 :]))
        return part


@dataclass(slots=True, eq=False)
class BackwardArgs(KernelArgs):
    """The gradients of one attention call; a gradient that is None is not asked for.

    Axes that the forward's inputs broadcast over are summed in those of the bias alone; the others have the
    whole batch_shape, and the caller sums.
    """

    kernel: ClassVar[str] = "attention_backward"

    attention: AttentionArgs  # its `out` and `lse` are results of the forward pass; k and v are no integers
    dout: Array  # as attention.out
    dlse: Array | None = None  # broadcasts to (*batch_shape, heads_q, len_q), lane dtype
    # (*batch_shape, heads, length, head_dim), in the input's dtype or the lane dtype.
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dq_factor: float = 1.0  # what the sum over keys of dS k is multiplied by: the scale, or 1 to find dscale
    # Lane dtype, 0 before: bias's own shape; or summed along diagonals, number j - i + len_q - 1, bias's
    # leading axes and (len_q + len_k - 1).
    dbias: Array | None = None
    dbias_diagonals: Array | None = None
    # Of OF_HEADS, (*batch_shape, heads_q), float64: sums over a head's rows.
    dsinks: Array | None = None
    dalibi_slopes: Array | None = None
    dsoftcap: Array | None = None

    def __post_init__(self) -> None:
        if self.attention.k.dtype == INT4:
            raise TypeError("(): k is in int4, which has no gradients")

    @property
    def out(self) -> Array:
        """Array that has no elements if nothing is computed."""
        return self.attention.out


@dataclass(slots=True, eq=False)
class RowwiseArgs(KernelArgs):
    """One call: all that the compiled layer and its NumPy twin read. Matrices are lanes, C-contiguous."""

    attention: AttentionArgs
    kind: str  # "sparsemax", "entmax15", "top_k", "additive", "talking_heads"
    top_k: int = 0  # of "top_k"
    weight: Array | None = None  # (heads_q, head_dim), of "additive"
    pre: Array | None = None  # (heads_q, heads_q), of "talking_heads"
    post: Array | None = None

    @property
    def out(self) -> Array:
        """Array for the result."""
        return self.attention.out


@dataclass(slots=True, eq=False)
class RowwiseBackwardArgs(BackwardArgs):
    """A BackwardArgs whose dk and dv are in the lane dtype, 0 before the call, and added to.

    The forward pass left nothing: neither attention.out nor attention.lse is read.
    """

    rowwise: RowwiseArgs | None = None  # the forward pass; its `attention` is the one above
    # Float64, 0 before; sums over a batch item's rows.
    dweight: Array | None = None  # (*batch_shape, heads_q, head_dim)
    dpre: Array | None = None  # (*batch_shape, heads_q, heads_q)
    dpost: Array | None = None


@dataclass(slots=True, eq=False)
class SelectionArgs(KernelArgs):
    """A choice of keys; of `attention`, nothing of values counts, and `row_end` is (*batch, 1, len_q)."""

    attention: AttentionArgs
    out: Ints  # (*batch_shape, heads_kv, len_q, top_k)
    top_k: int  # at least 1
    first: int  # of top_k, how many are the first and the last that a query may select
    last: int
    relu: bool
    weights: Array | None = None  # lane dtype, (*batch_shape, heads_q, len_q)
    scores: Array | None = None  # lane dtype, (*batch_shape, heads_kv, len_q, len_k): in place of q and k

    def rows(self, begin: int, end: int, scores: Array) -> SelectionArgs:
        """The choice of queries `begin` to `end` by their scores."""
        part = copy(self)
        part.attention = self.attention.cut(len_q=slice(begin, end))
        part.out, part.weights, part.scores = self.out[..., begin:end, :], None, scores
        return part


@dataclass(slots=True, eq=False)
class NearestArgs(KernelArgs):
    """A search for the rows of a corpus that have the largest products with each query.

    Queries of "lanes" have the lane type, and the corpus what is widened to it. In "whole" both are int8. In
    "bits" they are, too, and their bits are the features: a score is minus the number of those that differ.
    """

    queries: Array  # (queries, features), rows contiguous, as the corpus's
    corpus: Array  # (vectors, features)
    kind: Literal["lanes", "whole", "bits"]
    by_length: bool  # products are divided by the length of the corpus's row
    top_k: int  # at most the corpus has
    run: int  # rows that a thread looks at before it says which were the best
    out: Ints  # (queries, top_k), ascending
    scores: Array  # (queries, top_k), lanes
    num_threads: int = 1


@dataclass(slots=True, eq=False)
class DeformableArgs(KernelArgs):
    """Deformable attention: points on levels, which are grids of the rows of v; last axes are contiguous."""

    batch_shape: Shape  # of the result: those of v, locations and weights broadcast
    levels: Ints  # (levels, 4): height, width, the first row of v, the number of points up to its end
    heads: int
    v: Array  # (..., heads, len_v, head_dim)
    locations: Array  # (..., heads, len_q, 2 * points), lane dtype: x and y in turn
    weights: Array  # (..., heads, len_q, points), lane dtype
    out: Array  # (*batch_shape, heads, len_q, head_dim), v's dtype
    discrete: bool
    num_threads: int


@dataclass(slots=True, eq=False)
class RowsArgs(KernelArgs):
    """One pass over the rows of x (m, n): `kind` says which; the rest is None where it takes no part."""

    kind: str  # "layer_norm", "rms_norm", "softmax", "activate"
    x: Array
    out: Array  # (m, n), x's dtype
    num_threads: int
    residual: Array | None = None  # (m, n), x's dtype: added to x first
    total: Array | None = None  # (m, n): receives x + residual
    up: Array | None = (
        None  # (m, n), or (m / h, h n): a factor of "activate"'s result, the gate of "rms_norm"
    )
    weight: Array | None = None  # (n), lane dtype
    bias: Array | None = None
    eps: float = 0.0
    activation: Activation | None = None  # of x in "activate", of up in a norm
    gate_first: bool = False  # the norm's input is gated, not its result


@dataclass(slots=True, eq=False)
class RopeArgs(KernelArgs):
    """out = x (..., heads, length, head_dim) rotated; cos and sin are (..., 1, length, pairs), lane dtype.

    With `hadamard`, each row is then multiplied by a matrix: see src/hadamard.inc.h. With `scale`, it is then
    rounded to int8; an `out` in INT4 is rounded, too: see `fastattn.layers.KVCache`.
    """

    x: Array  # last axis contiguous, at least three dimensions, as of all
    out: Array  # x's shape and dtype; may be x. With `scale` int8. Or INT4, (..., heads, length, bytes)
    cos: Array
    sin: Array
    interleaved: bool
    num_threads: int
    scale: Array | None = None  # (..., heads, length), lane dtype: receives what the rows of out are times
    hadamard: bool = False  # rows of out are multiplied by a Hadamard matrix; by compiled kernels alone


def lane_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Type in which results of `dtype`, in any byte order, are accumulated."""
    return FLOAT64 if dtype.type is np.float64 else FLOAT32


def shape_of(x: Array) -> Shape:
    """Shape of the numbers of `x`, (..., n), whose last axis may be bytes in INT4."""
    return (*x.shape[:-1], x.shape[-1] // INT4_BYTES * INT4_BLOCK) if x.dtype == INT4 else x.shape


def columns(dtype: np.dtype[Any], head_dim: int) -> int:
    """Length of the last axis of keys or values in `dtype`."""
    return head_dim // INT4_BLOCK * INT4_BYTES if dtype == INT4 else head_dim


def dtype_name(dtype: np.dtype[Any]) -> str:
    """What messages call `dtype`."""
    return "int4" if dtype == INT4 else str(dtype)
