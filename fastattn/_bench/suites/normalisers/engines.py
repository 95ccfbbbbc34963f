"""What the suite "normalisers" times: fastattn, its fallback, plain NumPy, and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fastattn
from fastattn import functional
from fastattn._bench.suite import Engine, own_engines
from fastattn._bench.suites.normalisers import peers
from fastattn._bench.suites.normalisers.problem import K_KEYS, SOFTMAX, NormaliserProblem
from fastattn._bench.ways import Way, refuse_dense

FUNCTIONS: dict[str, Callable[..., Any]] = {
    SOFTMAX: fastattn.attention,
    "sparsemax": functional.sparsemax_attention,
    "entmax15": functional.entmax15_attention,
    "top_k": functional.top_k_attention,
    "talking_heads": functional.talking_heads_attention,
    "additive": functional.additive_attention,
}


def _own(problem: NormaliserProblem, backend: str) -> Way:
    q, k, v = problem.arrays()
    options: dict[str, Any] = {"out": np.empty_like(q)}
    if problem.variant == "top_k":
        options["top_k"] = K_KEYS
    function, matrices = FUNCTIONS[problem.variant], problem.matrices()
    return Way(lambda: function(q, k, v, *matrices, **options))


def _numpy(problem: NormaliserProblem, threads: int) -> Way:
    refuse_dense(problem.scores_bytes, 4)
    arrays, matrices = problem.arrays(), problem.matrices()
    return Way(lambda: problem.dense(*arrays, matrices))


ENGINES = {
    **own_engines(_own),
    "numpy": Engine(("numpy",), _numpy, "plain NumPy, all scores at once"),
    "torch": Engine(
        ("torch",), peers.torch_formulas, "the formulas in torch, all scores at once; SDPA for softmax"
    ),
}
