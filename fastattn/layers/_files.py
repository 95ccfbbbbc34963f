"""Parameters from a safetensors file, and the prefixes of their names."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from fastattn._safetensors import TensorFile

if TYPE_CHECKING:
    from contextlib import ExitStack

# Other files of parameters, and what makes a mapping of them.
_READERS = {".npz": "np.load({!r})"}
_READERS |= dict.fromkeys((".pt", ".pth", ".bin"), "torch.load({!r}, weights_only=True)")


def opened(file: str, stack: ExitStack) -> TensorFile:
    """The safetensors file `file`, open, which `stack` closes. It reads a tensor when asked for it."""
    reader = _READERS.get(os.path.splitext(file)[1])
    or_read = f", or what {reader.format(file)} returns" if reader else ""
    try:
        file.encode()
    except UnicodeEncodeError:  # the library takes no bytes of other encodings
        raise ValueError(f"(): state_dict is the path {file!r}; expected one in UTF-8") from None
    if os.path.isdir(file):
        raise ValueError(f"(): {file} is a folder; expected a safetensors file")
    if not os.path.exists(file):
        raise FileNotFoundError(f"(): {file} is missing; expected a safetensors file{or_read}")
    if reader:
        raise ValueError(f"(): {file} is not a safetensors file; expected one{or_read}")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        needed = "the safetensors package: pip install safetensors"
        raise ImportError(f"(): reading {file} needs {needed}") from error
    with suppress(ImportError):  # gives NumPy bfloat16, which files may hold
        import ml_dtypes  # noqa: F401
    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"(): {file} is not a sound safetensors file: {error}") from error
    return stack.enter_context(TensorFile(file, lambda message: ValueError(f"(): {message}")))


def prefixes(known: Collection[str], names: Collection[str]) -> list[str]:
    """Prefixes before all of `known` in `names`; in a file of a `Trainer`, those of the weights."""
    there, first = set(names), next(iter(known), "")
    found = [name.removesuffix(first) for name in names if first and name.endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + name in there for name in known)]
    return [prefix for prefix in found if prefix.startswith("params.")] or found
