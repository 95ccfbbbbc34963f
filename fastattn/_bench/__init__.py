"""The benchmark, its cases and its peers. Run it with ``python -m fastattn bench``."""
