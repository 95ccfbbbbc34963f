"""The peers of embeddings, each as its documentation says to make many vectors.

All sort texts by length, so that a batch holds little padding. Of the batch sizes, and of the ways to use
several threads, the fastest counts. The sizes that are tried were the best of 1 to 64 for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.suites.embeddings import convert, texts
from fastattn._bench.suites.embeddings.problem import ONE, TextProblem
from fastattn._bench.suites.models.peers import torch_int8
from fastattn._bench.ways import Unsupported, Way

Compute = Callable[[Array, Array], Array]  # hidden states of ids and a mask


def _sizes(problem: TextProblem, *sizes: int) -> tuple[int, ...]:
    return (1,) if problem.shape.order == ONE else sizes


def _batches(folder: Path, given: list[str], size: int) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Which texts, and their ids; the longest come first, as in sentence-transformers."""
    ids = texts.encode(folder, given)
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield chosen, [ids[i] for i in chosen]


def _vectors(folder: Path, given: list[str], size: int, streams: int, compute: Compute) -> Array:
    """The vectors of texts, `streams` batches at a time."""
    parts: dict[int, Array] = {}

    def one(batch: tuple[list[int], list[list[int]]]) -> None:
        chosen, sequences = batch
        ids, mask = texts.padded(sequences)
        parts.update(zip(chosen, texts.pooled(compute(ids, mask), mask), strict=True))

    if streams == 1:
        for batch in _batches(folder, given, size):
            one(batch)
    else:
        for _ in _pool(streams).map(one, _batches(folder, given, size)):
            pass
    return np.stack([parts[i] for i in range(len(parts))])


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _ways(
    problem: TextProblem, threads: int, graphs: Mapping[str, Callable[[int, int], Compute]], *sizes: int
) -> dict[str, Way]:
    """A way for each graph, batch size and number of streams.

    A graph is what makes `Compute` for so many streams of so many threads each.
    """
    made: dict[str, Way] = {}
    folder, given = problem.folder(), problem.texts()
    for name, graph in graphs.items():
        for streams in (1, threads) if threads > 1 and problem.shape.batch > 1 else (1,):
            loaded = cache(partial(graph, streams, threads // streams))

            def load(loaded: Any = loaded) -> None:
                assert loaded()
                assert texts.reader(folder)

            for size in _sizes(problem, *sizes):

                def call(size: int = size, streams: int = streams, loaded: Any = loaded) -> Array:
                    return _vectors(folder, given, size, streams, loaded())

                made[f"{name} {streams} x {threads // streams} threads, batches of {size}".strip()] = Way(
                    call, load=load
                )
    return made


def _onnx_files(problem: TextProblem) -> list[str]:
    if problem.rest == "bfloat16":
        raise Unsupported("has no bfloat16 product on CPUs")
    names = ("model", "model_O3")
    return [f"onnx/{name}{'_int8' * (problem.dtype == 'int8')}.onnx" for name in names]


def onnxruntime(problem: TextProblem, threads: int) -> dict[str, Way]:
    """Both graphs."""

    def session(path: str, streams: int, each: int) -> Compute:
        runtime = import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = each
        options.log_severity_level = 4
        made = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        wanted = {value.name for value in made.get_inputs()}

        def compute(ids: Array, mask: Array) -> Array:
            feeds = dict(zip(convert.INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))
            out: Array = made.run(None, {name: feeds[name] for name in wanted})[0]
            return out

        return compute

    graphs = {
        name.removeprefix("onnx/"): partial(session, str(convert.file(problem, name)))
        for name in _onnx_files(problem)
    }
    return _ways(problem, threads, graphs, 4, 8, 32)


def _openvino_file(problem: TextProblem) -> str:
    if problem.rest == "bfloat16" and runtimes.openvino_precision("bfloat16") != "bf16":
        raise Unsupported("computes bfloat16 in float32 on this CPU")
    if problem.dtype != "int8":
        return "openvino/openvino_model.xml"
    if util.find_spec("nncf") is None:
        raise Unsupported("needs NNCF to round its inputs: pip install nncf")
    return "openvino/openvino_model_int8.xml"


def _openvino_settings(problem: TextProblem, streams: int, threads: int) -> dict[str, Any]:
    return {
        "INFERENCE_PRECISION_HINT": runtimes.openvino_precision(problem.rest),
        "INFERENCE_NUM_THREADS": streams * threads,
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": streams,
    }


def openvino(problem: TextProblem, threads: int) -> dict[str, Way]:
    """The graph of any shape, for latency, and for throughput."""
    path = str(convert.file(problem, _openvino_file(problem)))

    def model(streams: int, each: int) -> Compute:
        core = import_module("openvino").Core()
        compiled = core.compile_model(path, "CPU", _openvino_settings(problem, streams, each))
        if problem.dtype == "int8":
            runtimes.demand_integers(compiled)
        requests = [compiled.create_infer_request() for _ in range(streams)]

        def compute(ids: Array, mask: Array) -> Array:
            request = requests.pop()
            feeds = dict(zip(convert.INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))
            out: Array = request.infer(feeds, share_inputs=True)[0]
            requests.append(request)
            return out

        return compute

    return _ways(problem, threads, {"": model}, 8, 16, 32)


def ctranslate2(problem: TextProblem, threads: int) -> dict[str, Way]:
    """Its encoder, by lists of ids; ways as of the runtimes."""
    name = problem.dtype
    library = import_module("ctranslate2")
    computed = name if name != "int8" else "int8" if problem.rest == "float32" else "int8_bfloat16"
    if computed not in library.get_supported_compute_types("cpu"):
        raise Unsupported(f"has no {computed} on this CPU")
    path = str(convert.file(problem, f"ctranslate2/{name}"))

    def model(streams: int, each: int) -> Compute:
        encoder = library.Encoder(
            path, device="cpu", compute_type=computed, inter_threads=streams, intra_threads=each
        )

        def compute(ids: Array, mask: Array) -> Array:
            sequences = [row[:length].tolist() for row, length in zip(ids, mask.sum(axis=1), strict=True)]
            hidden = encoder.forward_batch(sequences).last_hidden_state
            if computed == "int8_bfloat16":  # which NumPy cannot read
                hidden = hidden.to(library.DataType.float32)
            return np.asarray(hidden)

        return compute

    return _ways(problem, threads, {"": model}, 4, 8, 16)


def fastembed(problem: TextProblem, threads: int) -> dict[str, Way]:
    """A model of its own kind in a local folder. It keeps the order of texts: they are sorted before."""
    paths = _onnx_files(problem)
    for path in paths:
        convert.file(problem, path)
    chosen = problem.texts()
    order = sorted(range(len(chosen)), key=lambda i: -len(chosen[i]))
    inverse, ordered = np.argsort(order), [chosen[i] for i in order]

    def model(path: str) -> Any:
        library = import_module("fastembed")
        description = import_module("fastembed.common.model_description")
        name = f"bench/{path}"
        library.TextEmbedding.add_custom_model(
            model=name,
            pooling=description.PoolingType.MEAN,
            normalization=True,
            sources=description.ModelSource(hf=name),
            dim=384,
            model_file=path,
        )
        folder = str(convert.file(problem, path).parents[1])
        return library.TextEmbedding(name, specific_model_path=folder, threads=threads)

    made = {}
    for path in paths:
        loaded = cache(partial(model, path))
        for size in _sizes(problem, 8, 32):  # its default, 256, is far slower

            def call(size: int = size, loaded: Any = loaded) -> Array:
                return np.stack(list(loaded().embed(ordered, batch_size=size)))[inverse]

            made[f"{path}, batches of {size}"] = Way(call, load=loaded)
    return made


def sentence_transformers(problem: TextProblem, threads: int) -> dict[str, Way]:
    """On torch; in int8 by torch's dynamic quantisation."""
    if problem.dtype == "int8" and problem.rest == "bfloat16":
        raise Unsupported("quantises a model in float32")

    def model() -> Any:
        torch = runtimes.torch_inference(threads)
        made = _sentence_transformer(problem, "torch", {"torch_dtype": getattr(torch, problem.rest)})
        return torch_int8(made) if problem.dtype == "int8" else made

    return _sentence_ways(problem, {"": model})


def sentence_transformers_onnx(problem: TextProblem, threads: int) -> dict[str, Way]:
    def model(path: str) -> Any:
        runtime = import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        more = {"file_name": path, "provider": "CPUExecutionProvider", "session_options": options}
        return _sentence_transformer(problem, "onnx", more)

    paths = _onnx_files(problem)
    for path in paths:
        convert.file(problem, path)
    return _sentence_ways(problem, {f"{path}, ": partial(model, path) for path in paths})


def sentence_transformers_openvino(problem: TextProblem, threads: int) -> dict[str, Way]:
    path = _openvino_file(problem)
    convert.file(problem, path)

    def model() -> Any:
        more = {"file_name": path, "ov_config": _openvino_settings(problem, 1, threads)}
        return _sentence_transformer(problem, "openvino", more)

    return _sentence_ways(problem, {"": model})


def _sentence_transformer(problem: TextProblem, backend: str, options: dict[str, Any]) -> Any:
    """The model of its own folder, or of the one with the runtimes' files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_module("transformers").logging.set_verbosity_error()
    library = import_module("sentence_transformers")
    folder = problem.folder()
    if backend != "torch":
        folder = convert.file(problem, options["file_name"]).parents[1]
    return library.SentenceTransformer(str(folder), device="cpu", backend=backend, model_kwargs=options)


def _sentence_ways(problem: TextProblem, models: Mapping[str, Callable[[], Any]]) -> dict[str, Way]:
    """It sorts by length; its default is 32 texts a batch."""
    chosen, made = problem.texts(), {}
    for name, model in models.items():
        loaded = cache(model)
        for size in _sizes(problem, 8, 16, 32):

            def call(size: int = size, loaded: Any = loaded) -> Array:
                vectors = loaded().encode(chosen, batch_size=size, show_progress_bar=False)
                return np.asarray(vectors, np.float32)

            made[f"{name}batches of {size}"] = Way(call, load=loaded)
    return made
