"""Loading of a folder's model: `_BUILDERS` has the families."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastattn._args.errors import named, wrong_type
from fastattn._args.ops import integer_activations
from fastattn._args.options import NoOptions
from fastattn._args.packed import PackedLinear
from fastattn._args.types import DTypeLike, Rounding, Unpack
from fastattn._args.values import short
from fastattn._args.weight_types import INTEGERS
from fastattn._args.words import not_an_argument
from fastattn.models import _gguf, _gguf_tokenizer
from fastattn.models._classify import CrossEncoder
from fastattn.models._decoder import Decoder
from fastattn.models._encode_calls import routed
from fastattn.models._encoder import Encoder
from fastattn.models._families import bert, clip, deberta, gemma4, gpt, hybrid, jina, llama, rotary, t5
from fastattn.models._files import GGUF, Config, ModelError, is_gguf
from fastattn.models._gguf_names import known_name
from fastattn.models._gguf_rows import ROWS, Row
from fastattn.models._hub import place_of
from fastattn.models._modules import SPARSE_STATIC, STATIC, first_of, router_of
from fastattn.models._multi_vector import MultiVectorEncoder
from fastattn.models._parameters import OF_FILE, Precision
from fastattn.models._sentences import Pooling
from fastattn.models._source import Source
from fastattn.models._sparse import SparseEncoder
from fastattn.models._static import static_encoder, static_sparse_encoder
from fastattn.models._task_heads import with_head
from fastattn.models._tensors import Tensors
from fastattn.models._towers import TwoTowers

Loaded = Encoder | TwoTowers | CrossEncoder | SparseEncoder | MultiVectorEncoder | Decoder

# By the `model_type` of config.json.
_BUILDERS: dict[str, Callable[[Source], Encoder | Decoder]] = {
    **dict.fromkeys(bert.TYPES, jina.by_positions),
    "albert": bert.albert,
    **dict.fromkeys(clip.TYPES, clip.clip),
    "deberta-v2": deberta.deberta,
    **dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), gemma4.embedding_gemma2),
    "gemma3": llama.gemma3,
    **dict.fromkeys(("gemma4", "gemma4_text"), gemma4.gemma4),
    "gpt2": gpt.gpt2,
    "gpt_oss": gpt.gpt_oss,
    "granitemoehybrid": hybrid.granite_hybrid,
    "jina_embeddings_v3": jina.v3,
    "lfm2": hybrid.lfm2,
    "mistral3": llama.mistral3,
    "modernbert": rotary.modernbert,
    "mpnet": bert.mpnet,
    **dict.fromkeys(("new", "gte"), rotary.gte),
    "nomic_bert": rotary.nomic,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), hybrid.qwen_next),
    **dict.fromkeys(("t5", "mt5"), t5.t5),
    **dict.fromkeys(llama.TYPES, llama.llama),
}
MODEL_TYPES = tuple(_BUILDERS)
_QUANTIZED = {("gpt_oss", "mxfp4")}  # model types with a `quant_method` that is read
_STATIC: dict[str, Callable[[Source], Encoder | SparseEncoder]] = {  # by the kind of the first module
    STATIC: static_encoder,
    SPARSE_STATIC: static_sparse_encoder,
}


@named("load")
def load(
    folder: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "float32",
    weights_dtype: DTypeLike | None = None,
    activations: Rounding | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    **others: Unpack[NoOptions],
) -> Encoder | TwoTowers | CrossEncoder | SparseEncoder | MultiVectorEncoder | Decoder:
    """Load a model from a Hugging Face folder or a GGUF file.

    Parameters
    ----------
    folder : path
        Folder with config.json and model.safetensors, or the parts listed in its index, as save_pretrained
        writes them, with tensors in float32, float16 or bfloat16. In a sentence-transformers folder,
        modules.json defines the vectors of `Encoder.encode`. Or a GGUF file of a Llama, Mistral, Ministral 3,
        Mixtral, Phi-3, SmolLM3, Qwen2, Qwen3, Qwen3-MoE, OLMo 2 or 3, Granite, LFM2, GPT-OSS, Gemma 2 to 4,
        or BERT. A str ``"organisation/name"`` that is not a local folder is a model of the Hugging Face Hub,
        which `huggingface_hub` downloads to its cache.
    dtype : {"float32", "float64", "bfloat16"}, default "float32"
        Type between layers and of cached keys and values. NumPy types are accepted.
    weights_dtype : str, optional
        Storage type of the weights of linear maps, a `dtype` of `fastattn.ops.pack`; default `dtype`.
        float64 requires ``dtype="float64"``. For a GGUF file, or GPT-OSS in MXFP4, the default is "file":
        quantized blocks are kept, other numbers are stored in `dtype`. Generation reads all weights for each
        token, so half or a quarter of the bytes is about two or four times the speed.
    activations : {"int8"}, optional
        Round the inputs of linear maps, as `fastattn.ops.linear` does; requires weights in int8 or in blocks.
        Faster if many tokens are computed at once, and for 4-bit weights also with few. In a GGUF file, maps
        with other weights keep their inputs. Default: not rounded.
    revision : str, optional
        Branch, tag or commit of a Hub model.
    gguf_file : str, optional
        Name of a GGUF file in the folder or in the Hub repository, of which only this file is downloaded.
    **others
        Not accepted: the error names the equivalent of another library's argument.

    Returns
    -------
    Encoder, TwoTowers, CrossEncoder, SparseEncoder, MultiVectorEncoder or Decoder
        Depends on `model_type` in config.json, one of `MODEL_TYPES`, on `architectures` and modules.json.

    Raises
    ------
    ModelError
        A ValueError, if the files do not describe a supported model, or weights are not finite. The message
        names the file, what it contains and what was expected.
    TypeError, ValueError
        If an argument is invalid.
    ImportError
        If a required package is missing.

    Examples
    --------
    >>> model = fastattn.models.load("all-MiniLM-L6-v2")  # a folder
    >>> vectors = model.encode(["A sentence.", "Another one."])
    >>> vectors.shape == (2, model.get_sentence_embedding_dimension())
    True
    """
    if others:
        raise not_an_argument(others, load)
    if not isinstance(folder, (str, os.PathLike)):
        raise wrong_type("folder", folder, "a path")
    precise = partial(Precision.of, dtype, weights_dtype, activations)
    precision = precise(of_file=True)  # refuses unknown names, whatever is there
    path = place_of(folder, revision, gguf_file)
    if is_gguf(path):
        return _of_gguf(path, precision)
    if os.path.isfile(path):
        raise ModelError(f"{path} is a file; expected its folder, {path.absolute().parent}, or a GGUF file")
    if not os.path.isdir(path):  # unlike Path.is_dir(), it raises nothing for a name that is too long
        hint = "`hf download NAME --local-dir FOLDER` brings one"
        expected = "expected one with config.json and model.safetensors, or a GGUF file"
        if len(path.parts) == 1 and path.suffix != GGUF:
            expected += f", or a name of the Hub with its organisation, as sentence-transformers/{path}"
        what = "does not exist" if path.suffix == GGUF else "is no folder"
        raise ModelError(f"{path} {what}; {expected}: {hint}")
    if not (path / "config.json").exists():
        came = f"{path} has no config.json; expected one"
        if found := sorted(x.name for x in path.glob("*.gguf")):
            raise ModelError(f"{came}, or the path of a GGUF file, as {found[0]}")
        inner = sorted(path.glob("[!0-9]*/config.json"))  # the others are modules'
        if inner and not (path / "modules.json").exists():
            raise ModelError(f"{came}; there is one in {inner[0].parent}")
    router = router_of(path)
    if router is None:
        return _of_folder(path, precise)
    by_route = {route: _of_folder(path, precise, route) for route in router.routes}
    dense = {route: model for route, model in by_route.items() if isinstance(model, Encoder)}
    sparse = {route: model for route, model in by_route.items() if isinstance(model, SparseEncoder)}
    if len(dense) == len(by_route):
        return routed(dense, router.usual, {})
    if len(sparse) == len(by_route):
        return routed(sparse, router.usual, {})
    came = ", ".join(f"{route} has a {type(model).__name__}" for route, model in by_route.items())
    raise ModelError(f"{path / 'modules.json'} has a Router: {came}; expected Encoders, or SparseEncoders")


def _of_folder(outer: Path, precise: Callable[..., Precision], route: str | None = None) -> Loaded:
    """The model of a folder, on a route of its Router."""
    kind, path = first_of(outer, route)
    static = _STATIC.get(kind)
    if static is not None:
        with ExitStack() as stack:
            config = Config.of(path, {})
            return static(Source(path, config, precise(), stack, outer, route=route))
    config = Config(path / "config.json")
    model_type = config.get("model_type", str)
    if model_type not in _BUILDERS:
        raise config.wrong("model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    if path != outer and route is None and model_type not in clip.TYPES:
        expected = f"clip or siglip, as {outer / 'modules.json'} has a CLIPModel"
        raise config.wrong("model_type", model_type, expected)
    quantized = config.values.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    blocks = (model_type, method) in _QUANTIZED
    if quantized is not None and not blocks:
        raise ModelError(f"{config.path} has a 'quantization_config'; expected floating-point weights")
    with ExitStack() as stack:
        source = Source(path, config, precise(of_file=blocks), stack, outer, route=route)
        model = _BUILDERS[model_type](source)
        return model if isinstance(model, (Decoder, TwoTowers)) else with_head(source, model)


def _of_gguf(path: Path, precision: Precision) -> Encoder | Decoder:
    """The model of a GGUF file."""
    with ExitStack() as stack:
        file = _gguf.opened(path, stack)
        config, tensors = _gguf.config_of(path, file), Tensors.of_gguf(path, file, precision.weights, stack)
        source = Source(path, config, precision, stack, tensors=tensors)
        model_type = config.get("model_type", str)
        factors = ROWS.get(model_type, Row()).factors.values()
        for name in file.names:
            if known_name(model_type, name) is None and name not in factors:
                raise ModelError(f"{path}: the tensor {short(name)} is not known")
        source.rename(lambda name: known_name(model_type, name) or name)
        source.tokenizer = _gguf_tokenizer.tokenizer_of
        try:
            model = _BUILDERS[model_type](source)
        except ModelError as error:
            if any(repr(name) in str(error) for name in (*file.metadata, *file.names)):
                raise
            raise ModelError(
                f"{error}; keys and tensors have their names of config.json and folders"
            ) from None
        if isinstance(model, Encoder):
            pooling = Pooling((config.get("pooling", str),))
            model = replace(model, sentences=replace(model.sentences, pooling=pooling))
        kinds = {x.parameter.dtype for x in source.parameters if isinstance(x.parameter, PackedLinear)}
        if kinds.isdisjoint(INTEGERS) and precision.weights == OF_FILE:
            integer_activations(precision.activations, ", ".join(sorted(kinds)))
        return model
