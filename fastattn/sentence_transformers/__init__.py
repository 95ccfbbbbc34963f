"""The classes of sentence-transformers for inference, with its names and signatures, over `fastattn.models`.

Only the import changes in a program. Results are NumPy arrays; torch is imported only if a call requests
tensors. docs/sentence-transformers.md lists the differences.
"""

from fastattn.sentence_transformers._cross_encoder import CrossEncoder
from fastattn.sentence_transformers._sentence_transformer import SentenceTransformer
from fastattn.sentence_transformers._sparse_encoder import SparseEncoder

__all__ = ["CrossEncoder", "SentenceTransformer", "SparseEncoder"]


def __dir__() -> list[str]:
    return __all__
