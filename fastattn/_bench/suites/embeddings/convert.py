"""The peers' files: ``python -m fastattn._bench.suites.embeddings.convert FILE PROBLEM``.

They are made in a process of their own: what torch and the quantisers need in memory would otherwise count as
the peers'. They lie in a copy of MiniLM's folder, in the places where sentence-transformers and fastembed
look for them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fastattn._bench import runtimes
from fastattn._bench.suites.embeddings import texts
from fastattn._bench.suites.embeddings.problem import TextProblem
from fastattn._bench.suites.models import files, peers

MODULE = "fastattn._bench.suites.embeddings.convert"  # __name__ is another where it is run
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
        command = [sys.executable, "-m", MODULE, name, json.dumps(problem.to_json())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return path


def _bert(problem: TextProblem, **options: Any) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    kind = transformers.BertModel
    return kind.from_pretrained(
        problem.folder(), add_pooling_layer=False, dtype=torch.float32, **options
    ).eval()


def _examples() -> dict[str, Any]:
    torch: Any = import_module("torch")
    return {name: torch.ones((2, 16), dtype=torch.int64) for name in INPUTS}


def _onnx(problem: TextProblem, path: Path) -> None:
    """As torch exports it, for any batch and length; a mask is padding."""
    torch: Any = import_module("torch")
    model = _bert(problem, attn_implementation="eager")

    class Encoder(torch.nn.Module):  # type: ignore[misc]
        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    alone = Encoder().eval()
    alone.model = model
    torch.onnx.export(
        alone,
        tuple(_examples().values()),
        str(path),
        input_names=list(INPUTS),
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in (*INPUTS, "last_hidden_state")},
        opset_version=17,
        dynamo=False,
    )


def _onnx_optimised(problem: TextProblem, path: Path) -> None:
    """After onnxruntime's BERT optimiser."""
    config = files.read_config(problem.folder())
    graph = file(problem, "onnx/model.onnx").read_bytes()
    path.write_bytes(runtimes.bert_optimised(graph, config["num_attention_heads"], config["hidden_size"]))


def _onnx_int8(source: str) -> Callable[[TextProblem, Path], None]:
    """Linear maps by int8, the range of the inputs found in each call."""

    def make(problem: TextProblem, path: Path) -> None:
        peers.onnx_int8(str(file(problem, source)), path)

    return make


def _openvino(problem: TextProblem, path: Path) -> None:
    """As OpenVINO reads torch's model."""
    openvino: Any = import_module("openvino")
    model = openvino.convert_model(_bert(problem), example_input=_examples())
    openvino.save_model(model, path, compress_to_fp16=False)


def _openvino_int8(problem: TextProblem, path: Path) -> None:
    """After NNCF's quantisation, whose ranges are those of other texts."""
    import numpy as np

    openvino: Any = import_module("openvino")
    nncf: Any = import_module("nncf")
    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(file(problem, "openvino/openvino_model.xml"))
    ids = [np.array([row]) for row in texts.encode(problem.folder(), problem.others(CALIBRATION))]
    feeds = [dict(zip(INPUTS, (row, row**0, row * 0), strict=True)) for row in ids]
    calibrated = nncf.quantize(
        model, nncf.Dataset(feeds), model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION
    )
    openvino.save_model(calibrated, path, compress_to_fp16=False)


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


def main(name: str, fields: str) -> None:
    problem = TextProblem.from_json(json.loads(fields))
    path = Path(problem.scratch, "peers", name)
    path.parent.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    MAKERS[name](problem, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
