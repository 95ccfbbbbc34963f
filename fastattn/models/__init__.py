"""Models in NumPy on fastattn's kernels: the BERT family, GPT-2, the Llama family, CLIP.

`load` reads a folder, or a GGUF file; see docs/models.md. A TypeError or a ValueError names the argument that
does not fit.
"""

from fastattn._args.names import show_public
from fastattn.models._classify import CrossEncoder
from fastattn.models._decoder import Decoder
from fastattn.models._encoder import Encoder
from fastattn.models._files import ModelError
from fastattn.models._generation import Piece, message_of
from fastattn.models._load import MODEL_TYPES, load
from fastattn.models._multi_vector import MultiVectorEncoder
from fastattn.models._save import save
from fastattn.models._scores import Score
from fastattn.models._search import Nearest, nearest
from fastattn.models._session import Session
from fastattn.models._similarity import quantize_embeddings
from fastattn.models._sparse import SparseEncoder
from fastattn.models._towers import TwoTowers

__all__ = [
    "MODEL_TYPES",
    "CrossEncoder",
    "Decoder",
    "Encoder",
    "ModelError",
    "MultiVectorEncoder",
    "Nearest",
    "Piece",
    "Score",
    "Session",
    "SparseEncoder",
    "TwoTowers",
    "load",
    "message_of",
    "nearest",
    "quantize_embeddings",
    "save",
]

show_public(__name__)
