"""MTEB's tasks, whose data is on disk, by `fastattn.sentence_transformers` in several precisions.

    pip install mteb                                      # brings torch
    hf download --repo-type dataset mteb/stsbenchmark-sts --local-dir DATA/mteb/stsbenchmark-sts
    python -m bench mteb --tasks STSBenchmark --model FOLDER --data DATA [--choices float32 int8]

Without --data, data is taken from the cache of Hugging Face. Nothing is downloaded: a task without its data
is named and left out. Scores are the tasks' main ones, in points, with the difference to the first row's.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from bench.quality import EMBEDDED, described
from fastattn.sentence_transformers import SentenceTransformer

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import mteb
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta

CHOICES = {described(*choice): choice for choice in EMBEDDED}


class Model(AbsEncoder):
    """A model as MTEB's tasks call it: queries and documents have the model's own prompts."""

    def __init__(self, folder: Path, dtype: str, weights: str, activations: str | None) -> None:
        kwargs = {"dtype": dtype, "weights_dtype": weights, "activations": activations}
        self.model: Any = SentenceTransformer(str(folder), model_kwargs=kwargs)
        named = {"name": f"fastattn/{folder.name}", "revision": described(dtype, weights, activations)}
        self.mteb_model_meta = ModelMeta.create_empty(named)

    def encode(self, inputs: Any, *, prompt_type: Any = None, **options: Any) -> Any:
        made = {"query": self.model.encode_query, "document": self.model.encode_document}
        texts = [text for batch in inputs for text in batch["text"]]
        return made.get(getattr(prompt_type, "value", None), self.model.encode)(texts)


def tasks_of(names: list[str], data: Path | None) -> list[Any]:
    """The tasks whose data there is; others are named."""
    found = []
    for task in mteb.get_tasks(tasks=names):
        if data is not None:
            task.metadata.dataset["path"] = str(data / task.metadata.dataset["path"])
        try:
            task.load_data()
        except Exception as error:  # the library has dozens
            print(f"{task.metadata.name}: no data: {' '.join(str(error).split())[:200]}")
        else:
            found.append(task)


def scores(model: Model, tasks: list[Any]) -> dict[str, float]:
    """The main score of each task, in points."""
    result = mteb.evaluate(model, tasks, cache=None, show_progress_bar=False)
    return {each.task_name: 100 * each.get_score() for each in result.task_results}


def main(words: list[str]) -> None:
    """Parse the command line, measure and print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench mteb", description=__doc__, formatter_class=style)
    parser.add_argument("--tasks", nargs="+", required=True, help="names of MTEB")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, help="folder of datasets, by their names on the Hub")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    args = parser.parse_args(words)
    logging.getLogger("mteb").setLevel(logging.ERROR)  # it recommends other versions of tasks
    warnings.simplefilter("ignore")
    tasks = tasks_of(args.tasks, args.data)
    if not tasks:
        raise SystemExit("no task has its data on disk")
    found: dict[str, dict[str, float]] = {}
    for name in args.choices:
        found[name] = scores(Model(args.model, *CHOICES[name]), tasks)
        first = found[args.choices[0]]
        points = (f"{task} {x:.2f} ({x - first[task]:+.2f})" for task, x in found[name].items())
        print(f"{name:14} {', '.join(points)}", flush=True)
