"""The suites of the bench, by the name that ``python -m fastattn bench --suite`` takes."""

from __future__ import annotations

from fastattn._bench.suites import (
    attention,
    embeddings,
    layers,
    models,
    normalisers,
    recurrent,
    training,
    variants,
)

SUITES = {
    "attention": attention.SUITE,
    "layers": layers.SUITE,
    "models": models.SUITE,
    "embeddings": embeddings.SUITE,
    "recurrent": recurrent.SUITE,
    "normalisers": normalisers.SUITE,
    "variants": variants.SUITE,
    "training": training.SUITE,
}
