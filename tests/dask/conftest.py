"""Skips this folder where dask is not installed: see [dask]."""

import importlib.util
import os

import pytest
from local_workers import workers

there = importlib.util.find_spec("distributed") or os.environ.get("FASTATTN_REQUIRE_PARITY")
collect_ignore_glob = [] if there else ["*"]


@pytest.fixture(scope="session")
def cluster():
    """Two processes, whose clients are closed at the end."""
    with workers() as client:
        yield client
