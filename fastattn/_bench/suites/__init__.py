"""The suites, by the name that ``python -m fastattn bench --suite`` takes."""

from __future__ import annotations

from fastattn._bench.cases import DTYPES
from fastattn._bench.suite import Suite
from fastattn._bench.suites.attention import engines
from fastattn._bench.suites.attention.plan import plan
from fastattn._bench.suites.attention.problem import Problem
from fastattn._bench.suites.layers import engines as layer_engines
from fastattn._bench.suites.layers import problem as layer_problem
from fastattn._bench.suites.models import engines as model_engines
from fastattn._bench.suites.models import problem as model_problem
from fastattn._bench.suites.normalisers import engines as rowwise_engines
from fastattn._bench.suites.normalisers import problem as rowwise_problem
from fastattn._bench.suites.recurrent import engines as recurrent_engines
from fastattn._bench.suites.recurrent import problem as recurrent_problem
from fastattn._bench.suites.variants import engines as variant_engines
from fastattn._bench.suites.variants import problem as variant_problem

SUITES = {
    "attention": Suite(
        engines.ENGINES,
        plan,
        Problem.from_list,
        DTYPES,
        "batch, heads, len_q, len_k, head_dim",
        "about a quarter of an hour",
    ),
    "layers": Suite(
        layer_engines.ENGINES,
        layer_problem.plan,
        layer_problem.LayerProblem.from_list,
        layer_problem.DTYPES,
        "rows, in, out of a weight; batch, length, width of a layer",
        "about five minutes",
    ),
    "models": Suite(
        model_engines.ENGINES,
        model_problem.plan,
        model_problem.ModelProblem.from_list,
        model_problem.DTYPES,
        "batch, length",
        "about a quarter of an hour",
    ),
    "recurrent": Suite(
        recurrent_engines.ENGINES,
        recurrent_problem.plan,
        recurrent_problem.RecurrentProblem.from_list,
        recurrent_problem.DTYPES,
        "batch, heads, length, head_dim",
        "about five minutes",
    ),
    "normalisers": Suite(
        rowwise_engines.ENGINES,
        rowwise_problem.plan,
        rowwise_problem.RowwiseProblem.from_list,
        rowwise_problem.DTYPES,
        "batch, heads, len_q, len_k, head_dim",
        "about five minutes",
    ),
    "variants": Suite(
        variant_engines.ENGINES,
        variant_problem.plan,
        variant_problem.VariantProblem.from_list,
        variant_problem.DTYPES,
        "variants of batch, heads, len_q, len_k, head_dim in the section's title",
        "about five minutes",
    ),
}
