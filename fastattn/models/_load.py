"""From a folder to a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fastattn.models import _bert, _gpt2, _llama
from fastattn.models._files import Config, ModelError, Tensors, read_json
from fastattn.models._weights import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

    from fastattn.models._decoder import Decoder
    from fastattn.models._encoder import Bert

# `model_type` of config.json
_BUILDERS: dict[str, Callable[[Config, Tensors, Precision, Path], Bert | Decoder]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _bert.build),
    "gpt2": _gpt2.build,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama.build),
}
MODEL_TYPES = tuple(_BUILDERS)


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "float32",
    weights_dtype: DTypeLike | None = None,
) -> Bert | Decoder:
    """Load a model: config.json, and model.safetensors or its parts that model.safetensors.index.json lists.

    Parameters
    ----------
    folder : path
        As Hugging Face's save_pretrained writes it, with tensors in float32, float16 or bfloat16. Pooling and
        normalisation are read from a sentence-transformers folder's modules.json, where there is one.
    dtype : {"float32", "float64", "bfloat16"}, default "float32"
        What is computed in, between layers and in the cache of keys and values; a NumPy type does, too.
    weights_dtype : {"float32", "bfloat16", "int8"}, optional
        How the weights of linear maps are kept; by default in `dtype` (float64 can be kept in that only).
        Generation reads all of them for each token: where memory limits it, half or a quarter of the bytes
        is two or four times the speed.

    Returns
    -------
    Bert or Decoder
        By the `model_type` in config.json: bert, roberta, xlm-roberta, camembert; gpt2, llama, mistral,
        qwen2, qwen3.

    Raises
    ------
    ModelError
        If the files do not make up such a model, or hold weights that are not finite: the message names the
        file, what is there and what was expected. It is a ValueError.
    TypeError, ValueError
        If an argument does not fit.
    ImportError
        If a library is missing: ``pip install 'fastattn[models]'``.

    Examples
    --------
    >>> model = fastattn.models.load("all-MiniLM-L6-v2")  # doctest: +SKIP
    >>> model.embed(["A sentence.", "Another one."]).shape  # doctest: +SKIP
    (2, 384)
    """
    precision = Precision.of("load", dtype, weights_dtype)
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"load(): folder is of type {type(folder).__name__}; expected a path")
    path = Path(folder)
    if not os.path.isdir(path):  # which a name too long for the system is not, either
        raise ModelError(f"{path} is no folder; expected one with config.json and model.safetensors")
    config = Config(path / "config.json", read_json(path / "config.json"))
    model_type = config.text("model_type")
    if model_type not in _BUILDERS:
        raise ModelError(
            f"{config.path}: 'model_type' is {model_type!r}; expected one of {', '.join(MODEL_TYPES)}"
        )
    if config.values.get("quantization_config") is not None:
        raise ModelError(f"{config.path} has a 'quantization_config'; expected floating-point weights")
    with Tensors(path, precision.weights) as tensors:
        return _BUILDERS[model_type](config, tensors, precision, path)
