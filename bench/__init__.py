"""The suites of the bench, by name: ``python -m bench`` runs them from a checkout."""

from bench import attention, embeddings, flash, hybrids, layers, models, optimize, search, training, variants

SUITES = {
    "attention": attention.SUITE,
    "layers": layers.SUITE,
    "models": models.SUITE,
    "embeddings": embeddings.SUITE,
    "search": search.SUITE,
    "hybrids": hybrids.SUITE,
    "variants": variants.SUITE,
    "training": training.SUITE,
    "optimize": optimize.SUITE,
    "flash": flash.SUITE,
}
