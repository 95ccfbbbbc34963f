"""Attention and embeddings on a Dask cluster, for arrays larger than one machine's memory.

Importing this package imports dask (the extra ``[dask]``). docs/scale.md is the guide.
"""

try:
    import dask.array  # noqa: F401 - said once, and by the name of what to install
except ImportError as error:
    needed = "pip install 'dask[array,dataframe,distributed]'"  # as the extra has it
    raise ImportError(f"fastattn.dask needs dask: {needed} ({error})") from error

from fastattn.dask._attention import attention
from fastattn.dask._embed import embed

__all__ = ["attention", "embed"]


def __dir__() -> list[str]:
    return __all__
