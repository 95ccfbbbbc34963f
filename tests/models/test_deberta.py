"""DeBERTa's attention as a step of a program, against its formula in float64, and in any company."""

import ml_dtypes
import numpy as np
import pytest
from formulas import deberta, logarithmic_buckets
from implementations import COMPILED, each_isa, forced

from fastattn._args.types import ModifiersArgs
from fastattn._engine.program import build
from fastattn._engine.steps import OUT, Sequences, X
from fastattn.models._families.deberta import DisentangledStep

HEADS, SPAN, MOST, LONGEST = 3, 20, 50, 200  # two of the lengths are beyond what is made ready
LENGTHS = np.array([5, 0, 70, 1, 64, 64, 16, 17, 131])
BOUNDS = {np.float32: 2e-5, np.float64: 1e-12, ml_dtypes.bfloat16: 0.05}


def rows_of(distances, far):
    return logarithmic_buckets(distances, SPAN, MOST) if far else np.clip(distances + SPAN, 0, 2 * SPAN - 1)


def program(head_dim=16, tables=(True, True), far=True, dtype=np.float32, **changes):
    lane = np.float64 if dtype == np.float64 else np.float32
    rng = np.random.default_rng(0)
    keys, queries = rng.standard_normal((2, HEADS, 2 * SPAN, head_dim)).astype(lane)
    options = {
        "modifiers": ModifiersArgs((head_dim * (1 + sum(tables))) ** -0.5),
        "position_keys": keys if tables[0] else None,
        "position_queries": queries if tables[1] else None,
        "max_distance": MOST if far else None,
        "longest": 100,
    } | changes
    kind = options.pop("kind", DisentangledStep)
    return build("deberta", [kind(X, OUT, HEADS, HEADS, head_dim, **options)])


def told(lengths):
    begins = np.append(0, np.cumsum(lengths))
    return Sequences(len(lengths), begins=begins)


def inputs(n, head_dim=16, dtype=np.float32):
    return np.random.default_rng(1).standard_normal((n, 3 * HEADS * head_dim)).astype(dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("head_dim", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("tables", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 72, 73, 129, LONGEST])
def test_the_formula(length, far, tables, head_dim, dtype, implementation):
    """Lengths on either side of a vector, a tile, the rows of a task, and where few rows are left."""
    steps, x = program(head_dim, tables, far, dtype), inputs(2 * length, head_dim, dtype)
    got = steps.run(x, Sequences(2)).reshape(2, length, HEADS, head_dim).astype(np.float64)
    q, k, v = x.astype(np.float64).reshape(2, length, 3, HEADS, head_dim).transpose(2, 0, 3, 1, 4)
    bucket = rows_of(np.arange(length)[:, None] - np.arange(length), far)
    step = steps.steps[0]
    expected, _ = deberta(q, k, v, step.position_keys, step.position_queries, bucket)
    bound = BOUNDS[dtype] * np.abs(x.astype(np.float64)).max()
    np.testing.assert_allclose(got.swapaxes(1, 2), expected, rtol=0, atol=bound)


@each_isa
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_sequence_has_the_same_bits_alone(dtype, isa):
    steps, x = program(dtype=dtype), inputs(LENGTHS.sum(), dtype=dtype)
    for threads in (1, 2, 5):
        with forced(isa, num_threads=threads):
            together = steps.run(x, told(LENGTHS))
            for length, end in zip(LENGTHS, np.cumsum(LENGTHS), strict=True):
                own = slice(end - length, end)
                alone = steps.run(x[own], told(np.array([length])))
                assert together[own].tobytes() == alone.tobytes()
                if length:
                    assert steps.run(x[own], Sequences(1)).tobytes() == alone.tobytes()


def with_rows(rows):
    class Changed(DisentangledStep):
        def rows(self, longest):
            return rows(longest)

    return Changed


@pytest.mark.skipif(not COMPILED, reason="of what the compiled step checks")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": with_rows(lambda n: np.arange(2 * n - 2))}, "rows has shape"),
        ({"kind": with_rows(lambda n: np.arange(2 * n - 1))}, "expected rising numbers below 40"),
        ({"kind": with_rows(lambda n: np.arange(2 * n - 1)[::-1] // 10)}, "rows has shape"),
        ({"kind": with_rows(lambda n: np.abs(np.arange(2 * n - 1) // 10 - 3))}, "rising numbers below 40"),
        ({"kind": with_rows(lambda n: np.arange(2 * n - 1) // (5 if n == 100 else 2))},
         "rising numbers below"),
        ({"position_keys": np.zeros((HEADS, 2 * SPAN, 8), np.float32)}, "position_keys has shape"),
        ({"position_keys": np.zeros((HEADS, 2 * SPAN, 16))}, "position_keys has shape"),
        ({"position_keys": None, "position_queries": None}, "has no vectors of distances for its heads"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_it_is_read(changes, message):
    with pytest.raises(ValueError, match=message):
        program(**changes).run(inputs(LENGTHS.sum()), told(LENGTHS))
    with pytest.raises(ValueError, match="vectors of another type"):
        program().run(inputs(LENGTHS.sum(), dtype=np.float64), told(LENGTHS))
