"""A model over HTTP, as clients of OpenAI and text-embeddings-inference ask for it; extra ``[serve]``.

``python -m fastattn serve --model MODEL`` starts it; `make_app` is for a server of your own.
"""

from fastattn.serve._app import make_app
from fastattn.serve._command import serve
from fastattn.serve._service import Limits

__all__ = ["Limits", "make_app", "serve"]


def __dir__() -> list[str]:
    return __all__
