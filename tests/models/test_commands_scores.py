"""`python -m fastattn rerank` and `predict`, each in a process of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, child_environment
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models


def write(folder, labels=1):
    """The folder of a tiny BERT with a head."""
    changes = {
        "type_vocab_size": 2,
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(i): f"kind {i}" for i in range(labels)},
    }
    rng = np.random.default_rng(1)
    weights = tiny.tensors("bert", {**tiny.CONFIGS["bert"], **changes})
    weights = {f"bert.{name}": x for name, x in weights.items()}
    for name, features in (("bert.pooler.dense", 24), ("classifier", labels)):
        weights[f"{name}.weight"] = rng.standard_normal((features, 24), np.float32)
        weights[f"{name}.bias"] = rng.standard_normal(features, np.float32)
    tiny.write(folder, "bert", weights, **changes)
    write_tokenizer(folder)
    return models.load(folder)


def run(*arguments, stdin="", status=0):
    """The JSON lines of `python -m fastattn` with `arguments`, or what it says of an error."""
    command = [sys.executable, "-W", "error", "-m", "fastattn", *map(str, arguments)]
    env = child_environment() if COMPILED else child_environment(FASTATTN_BACKEND="numpy")
    done = subprocess.run(
        command, input=stdin.encode(), capture_output=True, env=env, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    if status:
        return done.stderr.decode()
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


def test_the_command_rerank(tmp_path):
    model, lines = write(tmp_path), "".join(f"{text}\n" for text in TEXTS)
    expected = model.rank("the cat", TEXTS, return_documents=True)
    assert run("rerank", "--model", tmp_path, "the cat", stdin=lines) == expected
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    told = ("--column", "body", "--top-k", 2, "--prompt", "a dog ", "--batch-size", 1)
    expected = model.rank("the cat", TEXTS, 2, return_documents=True, prompt="a dog ")
    assert run("rerank", "--model", tmp_path, "the cat", file, *told) == expected
    assert run("rerank", "--model", tmp_path, "the cat") == []


@pytest.mark.parametrize("labels", [1, 3])
def test_the_command_predict(labels, tmp_path):
    model, lines = write(tmp_path, labels), "".join(f"{text}\n" for text in TEXTS)
    names = [f"kind {i}" for i in range(labels)]
    expected = model.predict([(text,) for text in TEXTS]).reshape(5, labels).tolist()
    got = run("predict", "--model", tmp_path, stdin=lines)
    assert got == [{"labels": names, "scores": row} for row in expected]
    file = tmp_path / "pairs.csv"
    file.write_text(
        "".join(f"{a},{b}\n" for a, b in (("text", "other"), *zip(TEXTS, TEXTS[::-1], strict=True)))
    )
    expected = (
        model.predict(list(zip(TEXTS, TEXTS[::-1], strict=True)), prompt="a dog ").reshape(5, labels).tolist()
    )
    got = run("predict", "--model", tmp_path, file, "--pair", "other", "--prompt", "a dog ")
    assert [row["scores"] for row in got] == expected


def test_what_the_commands_refuse(tmp_path):
    write(tmp_path / "three", 3)
    write(tmp_path / "one")
    plain = tmp_path / "plain"
    tiny.write(plain, "bert")
    write_tokenizer(plain)
    for command in (("rerank", "a"), ("predict",)):
        message = run(command[0], "--model", plain, *command[1:], status=1)
        assert "holds a bert; its class is Encoder; expected a CrossEncoder" in message
    assert "the model has 3 labels" in run("rerank", "--model", tmp_path / "three", "a", status=1)
    message = run("predict", "--model", tmp_path / "one", "--pair", "b", stdin="a\n", status=1)
    assert "--pair is 'b' for the standard input" in message
    message = run("embed", "--model", tmp_path / "one", stdin="a\n", status=1)
    said = "holds a CrossEncoder (bert); expected an Encoder. Use the commands rerank and predict"
    assert said in message
