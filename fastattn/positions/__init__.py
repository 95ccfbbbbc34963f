"""Positions: vectors added to inputs, slopes and biases added to scores, rotations of queries and keys.

Learned positions are rows of a table: ``ops.embedding(positions, table)``.
"""

from fastattn._args.names import show_public
from fastattn.positions._added import alibi_slopes, sinusoidal, t5_bias, t5_buckets
from fastattn.positions._rotary import apply_rope, rope_tables
from fastattn.positions._rotary_scaling import RopeFrequencies, rope_frequencies

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

show_public(__name__)
