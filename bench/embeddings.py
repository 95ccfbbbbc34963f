"""The suite "embeddings": texts in, vectors out.

The peers' files lie in a copy of MiniLM's folder, where sentence-transformers looks for it.
Each peer makes vectors as its documentation says: all sort texts by length, so that a batch holds little
padding. Of the batch sizes, and of the ways to use several threads, the fastest counts. The sizes that are
tried were the best of 1 to 64 for each.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import files, plain, texts
from bench.graphs import (
    bert_exported,
    bert_optimised,
    demand_integers,
    openvino_calibrated,
    refuse_without_nncf,
)
from bench.models import DTYPES, INT8_BFLOAT16, onnx_int8, torch_int8
from bench.suite import INT8_INPUTS, Request, Suite, WeightProblem, mean_cosine, peak_memory
from fastattn import models
from fastattn._bench import runtimes
from fastattn._bench.cases import Array
from fastattn._bench.harness import CONTEXT, Engine, Sections, Unsupported, Way, own_engines

# The largest error of a number in a vector of length 1, whose numbers are about 0.05; cosines say more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "int8": 3e-1}
ARRIVAL, SORTED, ONE = "in order of arrival", "sorted by length", "one short text"
COUNT = 512


class TextShape(NamedTuple):
    """Number of texts, and their order."""

    name: str
    order: str
    batch: int
    makes: str = "texts"  # a call makes `batch` vectors of them


@dataclass(frozen=True)
class TextProblem(WeightProblem):
    """The vectors of texts by MiniLM, of length 1."""

    shape: TextShape
    scratch: str = ""  # folder for the files that the bench writes

    alone = True

    @property
    def rest(self) -> str:
        """The type that is computed in, but for linear maps in int8."""
        return {INT8_INPUTS: "float32", INT8_BFLOAT16: "bfloat16"}.get(self.variant, self.dtype)

    def folder(self) -> Path:
        """The folder of MiniLM; it is written if it does not exist."""
        return texts.folder(Path(self.scratch))

    def texts(self) -> list[str]:
        """The texts in their order."""
        if self.shape.order == ONE:
            return texts.short(self.rng(0))
        made = texts.draw(self.rng(0), self.shape.batch)
        return sorted(made, key=len) if self.shape.order == SORTED else made

    def others(self, count: int) -> list[str]:
        """Other texts, from which ranges are found that a quantisation needs before it runs."""
        return texts.draw(self.rng(1), count)

    def reference(self) -> tuple[Array, Array]:
        known = vectors(self.folder(), tuple(sorted(self.texts())), np.float64)
        want = np.stack([known[text] for text in self.texts()])
        return np.arange(len(want)), want

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        """The mean cosine of a text's vector and that in float64."""
        return mean_cosine(got, want) | peak_memory()

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def work(self) -> float:
        """Operations of all matrix products, without padding."""
        config = files.read_config(self.folder())
        hidden, inner, layers = (
            config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        lengths = np.array([len(ids) for ids in texts.encode(self.folder(), self.texts())], float)
        maps = 2.0 * (4 * hidden * hidden + 2 * hidden * inner)
        return float(layers * (maps * lengths.sum() + 4 * hidden * np.square(lengths).sum()))


@cache
def vectors(folder: Path, chosen: tuple[str, ...], dtype: Any) -> dict[str, Array]:
    """The vector of each text by definition, those of one length together, so that nothing is padded."""
    config = files.read_config(folder)
    weights = {name: array.astype(dtype) for name, array in files.Tensors(folder).items()}
    lengths: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)
    for text, ids in zip(chosen, texts.encode(folder, list(chosen)), strict=True):
        lengths[len(ids)][text] = ids
    made: dict[str, Array] = {}
    for group in lengths.values():
        rows, mask = texts.padded(list(group.values()))
        made |= zip(group, texts.pooled(plain.bert(rows, weights, config), mask), strict=True)
    return made


def several(order: str, count: int = COUNT) -> TextShape:
    return TextShape(f"{count} texts {order}", order, count)


SHAPES = (several(ARRIVAL), several(SORTED), TextShape(ONE, ONE, 1))


def plan(request: Request) -> Sections:
    """Every precision; unless `full`, two of them."""
    dtypes = (request.dtype,) if request.dtype else DTYPES if request.full else DTYPES[::2]
    title = "MiniLM" if files.has_minilm() else "MiniLM (random)"
    sections: Sections = {}
    for dtype in dtypes:
        variants = (INT8_INPUTS, INT8_BFLOAT16) if dtype == "int8" else ("plain",)
        shapes = SHAPES if request.full else (SHAPES[0], SHAPES[-1])
        made = partial(TextProblem, scratch=str(request.folder))
        sections |= request.section(made, title, shapes, dtype, variants)
    return sections


INPUTS = ("input_ids", "attention_mask", "token_type_ids")
CALIBRATION = 300  # texts, as many as NNCF takes by default


def file(problem: TextProblem, name: str) -> Path:
    """The path of one of `MAKERS`, which is made if it is not there."""
    folder = Path(problem.scratch, "peers")
    if not folder.exists():
        shutil.copytree(problem.folder(), folder.with_suffix(".part"))
        folder.with_suffix(".part").rename(folder)
    path = folder / name
    if not path.exists():
        # In a process of its own: its memory would otherwise count as the peer's.
        with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
            pool.submit(_make, problem, path).result()
    return path


def _onnx(problem: TextProblem, path: Path) -> None:
    """Graph that torch exports; a mask is padding."""
    bert_exported(problem.folder(), path, INPUTS, "last_hidden_state")


def _onnx_optimised(problem: TextProblem, path: Path) -> None:
    """Graph after onnxruntime's BERT optimiser."""
    config = files.read_config(problem.folder())
    graph = file(problem, "onnx/model.onnx").read_bytes()
    path.write_bytes(bert_optimised(graph, config["num_attention_heads"], config["hidden_size"]))


def _onnx_int8(source: str) -> Callable[[TextProblem, Path], None]:
    """Linear maps by int8, the range of the inputs found in each call."""

    def make(problem: TextProblem, path: Path) -> None:
        onnx_int8(str(file(problem, source)), path)

    return make


def _openvino(problem: TextProblem, path: Path) -> None:
    """Graph that OpenVINO reads of torch's model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    openvino, torch = import_module("openvino"), import_module("torch")
    kind = import_module("transformers").BertModel
    bert = kind.from_pretrained(problem.folder(), add_pooling_layer=False).float().eval()
    examples = {name: torch.ones((2, 16), dtype=torch.int64) for name in INPUTS}
    model = openvino.convert_model(bert, example_input=examples)
    openvino.save_model(model, path, compress_to_fp16=False)


def _openvino_int8(problem: TextProblem, path: Path) -> None:
    """Graph after NNCF's quantisation, whose ranges are those of other texts."""
    model = import_module("openvino").Core().read_model(file(problem, "openvino/openvino_model.xml"))
    ids = [np.array([row]) for row in texts.encode(problem.folder(), problem.others(CALIBRATION))]
    feeds = [dict(zip(INPUTS, (row, row**0, row * 0), strict=True)) for row in ids]
    openvino_calibrated(model, feeds, path)


def _ctranslate2(quantization: str) -> Callable[[TextProblem, Path], None]:
    """The folder that CTranslate2's converter writes."""

    def make(problem: TextProblem, path: Path) -> None:
        converters: Any = import_module("ctranslate2.converters")
        converter = converters.TransformersConverter(str(problem.folder()))
        converter.convert(str(path), quantization=quantization, force=True)

    return make


MAKERS: dict[str, Callable[[TextProblem, Path], None]] = {
    "onnx/model.onnx": _onnx,
    "onnx/model_O3.onnx": _onnx_optimised,
    "onnx/model_int8.onnx": _onnx_int8("onnx/model.onnx"),
    "onnx/model_O3_int8.onnx": _onnx_int8("onnx/model_O3.onnx"),
    "openvino/openvino_model.xml": _openvino,
    "openvino/openvino_model_int8.xml": _openvino_int8,
    "ctranslate2/float32": _ctranslate2("float32"),
    "ctranslate2/bfloat16": _ctranslate2("bfloat16"),
    "ctranslate2/int8": _ctranslate2("int8"),
}


def _make(problem: TextProblem, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    MAKERS[path.relative_to(Path(problem.scratch, "peers")).as_posix()](problem, path)


Compute = Callable[[Array, Array], Array]  # hidden states of ids and a mask


def _sizes(problem: TextProblem, *sizes: int) -> tuple[int, ...]:
    return (1,) if problem.shape.order == ONE else sizes


def _batches(folder: Path, given: list[str], size: int) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Batches of texts, and their ids; the longest come first, as in sentence-transformers."""
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
        library = import_module("onnxruntime")
        options = library.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = each, 4
        made = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        wanted = {value.name for value in made.get_inputs()}

        def compute(ids: Array, mask: Array) -> Array:
            feeds = dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))
            out: Array = made.run(None, {name: feeds[name] for name in wanted})[0]
            return out

        return compute

    graphs = {
        name.removeprefix("onnx/"): partial(session, str(file(problem, name)))
        for name in _onnx_files(problem)
    }
    return _ways(problem, threads, graphs, 4, 8, 32)


def _openvino_file(problem: TextProblem) -> str:
    if problem.rest == "bfloat16" and runtimes.openvino_precision("bfloat16") != "bf16":
        raise Unsupported("computes bfloat16 in float32 on this CPU")
    if problem.dtype != "int8":
        return "openvino/openvino_model.xml"
    refuse_without_nncf()
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
    path = str(file(problem, _openvino_file(problem)))

    def model(streams: int, each: int) -> Compute:
        core = import_module("openvino").Core()
        compiled = core.compile_model(path, "CPU", _openvino_settings(problem, streams, each))
        if problem.dtype == "int8":
            demand_integers(compiled)
        requests = [compiled.create_infer_request() for _ in range(streams)]

        def compute(ids: Array, mask: Array) -> Array:
            request = requests.pop()
            feeds = dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))
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
    path = str(file(problem, f"ctranslate2/{name}"))

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


def sentence_transformers(problem: TextProblem, threads: int) -> dict[str, Way]:
    """Encoder on torch; in int8 by torch's dynamic quantisation. It sorts by length."""
    if problem.dtype == "int8" and problem.rest == "bfloat16":
        raise Unsupported("quantises a model in float32")

    @cache
    def loaded() -> Any:
        torch = runtimes.torch_inference(threads)
        os.environ["HF_HUB_OFFLINE"] = "1"
        import_module("transformers").logging.set_verbosity_error()
        kind = import_module("sentence_transformers").SentenceTransformer
        options = {"torch_dtype": getattr(torch, problem.rest)}
        model = kind(str(problem.folder()), device="cpu", model_kwargs=options)
        return torch_int8(model) if problem.dtype == "int8" else model

    chosen, made = problem.texts(), {}
    for size in _sizes(problem, 8, 16, 32):  # its default is 32 texts a batch

        def call(size: int = size) -> Array:
            vectors = loaded().encode(chosen, batch_size=size, show_progress_bar=False)
            return np.asarray(vectors, np.float32)

        made[f"batches of {size}"] = Way(call, load=loaded)
    return made


def _own(problem: TextProblem, backend: str) -> Way:
    """The model as a user loads it, and its defaults."""
    options: dict[str, Any] = {"dtype": problem.rest}
    if problem.dtype == "int8":
        options |= {"weights_dtype": "int8", "activations": "int8"}
    folder, chosen = problem.folder(), problem.texts()
    model: Any = cache(lambda: models.load(folder, **options))

    def load() -> None:
        assert model().text.tokenizer

    return Way(lambda: model().encode(chosen), load=load)


def _numpy(problem: TextProblem, threads: int) -> Way:
    """Encoder by its definition, in float32; equal lengths together."""
    folder, chosen = problem.folder(), problem.texts()
    if problem.dtype != "float32":
        raise Unsupported("computes in float32")
    compute: Any = vectors.__wrapped__  # which does not remember

    def call() -> Any:
        made = compute(folder, tuple(chosen), np.float32)
        return np.stack([made[text] for text in chosen])

    return Way(call)


_TORCH = ("torch", "transformers", "tokenizers")  # which make the files of the runtimes
_ONNX = ("onnxruntime", "onnx", *_TORCH)

ENGINES = {
    **own_engines(_own, "safetensors", "tokenizers"),
    "numpy": Engine(("numpy", "tokenizers"), _numpy, "plain NumPy, by definition"),
    "ort": Engine(_ONNX, onnxruntime, "onnxruntime, torch's export, as it is and optimised"),
    "openvino": Engine(("openvino", *_TORCH), openvino, "OpenVINO, torch's graph"),
    "ct2": Engine(("ctranslate2", *_TORCH), ctranslate2, "CTranslate2, its own converter"),
    "st": Engine(("sentence_transformers",), sentence_transformers, "sentence-transformers on torch"),
}


SUITE = Suite(ENGINES, plan, DTYPES, "texts, and their order", "about half an hour")
