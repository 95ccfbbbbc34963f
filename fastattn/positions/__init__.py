"""Positions: vectors added to inputs, slopes and biases added to scores, rotations of queries and keys.

Learned positions are rows of a table: ``ops.embedding(positions, table)``.
"""

from fastattn.positions._alibi import alibi_slopes
from fastattn.positions._rotary import apply_rope, rope_tables
from fastattn.positions._rotary_scaling import RopeFrequencies, rope_frequencies
from fastattn.positions._sinusoidal import sinusoidal
from fastattn.positions._t5 import t5_bias, t5_buckets

__all__ = [
    "RopeFrequencies",
    "alibi_slopes",
    "apply_rope",
    "rope_frequencies",
    "rope_tables",
    "sinusoidal",
    "t5_bias",
    "t5_buckets",
]
