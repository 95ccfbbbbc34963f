"""Other sizes of tasks (src/tuning.inc), for tests."""

from contextlib import contextmanager

from fastattn._engine import settings


@contextmanager
def forced_sizes(**sizes):
    """A context with these sizes; every thread sees them."""
    before = settings.core.get_sizes()
    settings.core.set_sizes(sizes)
    try:
        yield
    finally:
        settings.core.set_sizes(before)
