"""`python -m fastattn embed`, `rerank`, `generate` and `chat`."""

import io
import json
import re
import shutil
import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, child_environment
from model_folders import write_reranker
from tiny_routes import write_router
from tiny_tokenizers import TEXTS, write_tokenizer

import fastattn
from fastattn import _cli_models, models
from fastattn.__main__ import main
from fastattn._cli_models import Texts

ENVIRONMENT = child_environment() if COMPILED else child_environment(FASTATTN_BACKEND="numpy")


def run(*arguments, stdin="", status=0):
    """`python -m fastattn` with `arguments`, in this process; its standard output, or error."""
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    streams = {"stdin": given, "stdout": out, "stderr": error}
    with pytest.MonkeyPatch.context() as patch:
        for name, x in {"argv": ["fastattn", *map(str, arguments)], **streams}.items():
            patch.setattr(sys, name, x)
        try:
            ended = main()
        except SystemExit as argparse:
            ended = argparse.code
    printed, said = (x.buffer.getvalue().decode() for x in (out, error))
    assert ended == status, said
    return said if status else printed


def run_apart(*arguments, **variables):
    """The same in a process with these environment variables."""
    command = [sys.executable, "-W", "error", "-m", "fastattn", *map(str, arguments)]
    how = {"capture_output": True, "env": ENVIRONMENT | variables, "timeout": 120, "check": False}
    done = subprocess.run(command, **how)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def rows(printed):
    return [json.loads(line) for line in printed.splitlines()]


def test_the_command_embed(encoder, tmp_path):
    expected = models.load(encoder).encode(TEXTS)
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\n".join(TEXTS).encode() + b"\n")
    printed = run("embed", "--model", encoder, lines)
    np.testing.assert_array_equal(np.array(rows(printed), np.float32), expected)
    assert run("embed", "--model", encoder, stdin="\r\n".join(TEXTS) + "\n") == printed
    texts = "\n".join(TEXTS)
    assert run("embed", "--model", encoder, "--output", tmp_path / "out.npy", stdin=texts) == ""
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    for options, loaded, given in (
        (["--normalize", "--batch-size", 2, "--weights-dtype", "bfloat16", "--truncate-dim", 9],
            {"weights_dtype": "bfloat16"}, {"normalize_embeddings": True, "truncate_dim": 9}),
        (["--weights-dtype", "int4", "--activations", "int8"],
            {"weights_dtype": "int4", "activations": "int8"}, {}),
        (["--dtype", "float64", "--prompt", "the "], {"dtype": "float64"}, {"prompt": "the "}),
    ):  # fmt: skip
        run("embed", "--model", encoder, lines, "--output", tmp_path / "out.npy", *options)
        wanted, got = models.load(encoder, **loaded).encode(TEXTS, **given), np.load(tmp_path / "out.npy")
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == wanted.dtype
    said = run("embed", "--model", encoder, lines, "--activations", "int8", status=1)
    assert "activations is 'int8' for weights in float32" in said
    assert run("embed", "--model", encoder, stdin="") == ""
    run("embed", "--model", encoder, "--output", tmp_path / "out.npy", stdin="")
    assert np.load(tmp_path / "out.npy").shape == (0, 24)
    assert not list(tmp_path.glob("*.begun"))


def test_the_command_embed_takes_a_task(tmp_path):
    write_router(tmp_path)
    for options in ((), ("--task", "query")):
        printed = run("embed", "--model", tmp_path, *options, stdin="\n".join(TEXTS))
        vectors = np.array(rows(printed), np.float32)
        expected = models.load(tmp_path).encode(TEXTS, task=options[1] if options else None)
        np.testing.assert_array_equal(vectors, expected)
    said = run("embed", "--model", tmp_path, "--task", "no", status=1)
    assert "embed(): task is 'no'; expected one of 'query', 'document'" in said


def write_texts(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))


def test_the_command_embed_reads_columns(encoder, tmp_path):
    texts = [*TEXTS, 'the "cat",\nsat', "die Größe"]
    expected = models.load(encoder).encode(texts)
    file = tmp_path / "texts.jsonl"
    for options, column in (([], "text"), (["--column", "a body"], "a body")):
        write_texts(file, texts, column)
        run("embed", "--model", encoder, file, "--output", tmp_path / "out.npy", *options)
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    wrong = run("embed", "--model", encoder, file, status=1)
    assert wrong.startswith(f"error: {file}")
    assert "'text'" in wrong
    assert "--column" in wrong


def test_the_command_embed_writes_all_or_nothing(encoder, tmp_path, monkeypatch):
    """Ctrl-C after some vectors leaves the file that was there, and no other."""
    lines, output, vectors = tmp_path / "lines.txt", tmp_path / "out.npy", models.Encoder._vectors
    lines.write_text("the cat\n" * 500)
    output.write_text("before")

    def interrupted(self, texts, call):
        yield from islice(vectors(self, texts, call), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(models.Encoder, "_vectors", interrupted)
    command = ["fastattn", "embed", "--model", str(encoder), str(lines), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 130
    assert output.read_text() == "before"
    assert list(tmp_path.glob("*out*")) == [output]


def test_the_command_embed_writes_while_it_reads(encoder):
    """The writer sends more lines when it has the first vectors: neither lines nor vectors are kept."""
    command = [sys.executable, "-W", "error", "-m", "fastattn", "embed", "--model", str(encoder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    lines = [f"{TEXTS[3]} {TEXTS[n % 5]}\n".encode() for n in range(12_000)]
    printed = threading.Event()

    def write():
        child.stdin.write(b"".join(lines))
        child.stdin.flush()
        printed.wait()
        child.stdin.write(lines[0])
        child.stdin.close()

    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as child:
        writer, too_late = threading.Thread(target=write, daemon=True), threading.Timer(120, child.kill)
        writer.start()
        too_late.start()
        try:
            assert child.stdout.readline().startswith(b"[")
            printed.set()
            assert child.stdout.read().count(b"\n") == 12_000, child.stderr.read()
        finally:
            too_late.cancel()
            child.kill()


def test_the_command_embed_refuses(encoder, writer, tmp_path):
    latin, output = tmp_path / "latin.txt", tmp_path / "out.npy"
    latin.write_bytes(b"\n".join([b"the cat"] * 50 + [b"caf\xe9"]))
    (tmp_path / "x.npy").write_text("the cat\n")
    for folder, options, status, said in (
        (writer, [], 1, "holds a Decoder (gpt2); expected a model of the class Encoder. The commands g"),
        (tmp_path / "nowhere", [], 1, "error: "),
        (encoder, ["the cat sat"], 1, "FILE 'the cat sat' does not exist; expected a file of texts"),
        (encoder, ["the cat sat"], 1, "(for a text itself, use standard input: echo TEXT | "),
        (encoder, ["--normalise", "lines.txt"], 2, "usage: python -m fastattn embed "),
        (encoder, ["--normalise", "lines.txt"], 2, "error: not known: --normalise\n"),
        (encoder, [latin, "--output", output], 1, "latin.txt is not UTF-8 in line 51"),
        (encoder, ["--output", "out.txt"], 2, "expected a name that ends in .npy, got 'out.txt'"),
        (encoder, ["--output", tmp_path / "no" / "out.npy"], 2, "its folder does not exist"),
        (encoder, [tmp_path / "x.npy", "--output", tmp_path / "x.npy"], 1, "x.npy' is written by --o"),
        (encoder, [latin, "--column", "a"], 1, "--column is 'a' for a file '.txt', which has lines of text"),
        (encoder, ["--column", "text"], 1, "for the standard input"),
        (encoder, [tmp_path / "a.csv"], 1, "a.csv' is a table; expected lines of text, or .jsonl"),
    ):  # fmt: skip
        assert said in run("embed", "--model", folder, *options, status=status)
    assert not list(tmp_path.glob("out*"))  # a file is looked through before anything is computed
    assert (tmp_path / "x.npy").read_text() == "the cat\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "a.jsonl, row 2: 3 is not a text; expected a string"),
        ("a.jsonl", b'{"text": "x"}\n{\n', "a.jsonl, row 2: "),
        ("a.jsonl", b'["x"]\n', "a.jsonl, row 1: ['x'] has no 'text'; expected it"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "row 1: the text has '\\ud800', half of a surrogate pair; exp"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl is not UTF-8 in row 1"),
    ],
)
def test_files_that_are_refused(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(message)):
        list(Texts(tmp_path / name, None))


def test_a_file_may_have_a_bom_and_empty_lines(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "", *lines[1:], " ", ""]), encoding="utf-8-sig")
    assert list(Texts(tmp_path / "a.jsonl", None)) == TEXTS


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_shown_on_a_terminal(is_terminal, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    said.isatty = lambda: is_terminal
    assert len(list(_cli_models._with_bar(iter([np.ones((2, 3))]), total=2))) == 1
    assert ("2/2" in said.getvalue()) == is_terminal
    monkeypatch.setitem(sys.modules, "tqdm", None)  # without it, there is no bar
    monkeypatch.setattr(_cli_models, "find_spec", lambda name: None)
    assert len(list(_cli_models._with_bar(iter([np.ones((2, 3))]), total=2))) == 1


def test_the_version():
    assert run_apart("--version") == f"fastattn {fastattn.__version__}\n"


def test_the_command_generate(writer):
    model = models.load(writer)
    prompt = model.text.encode(["Once, a café"])[0]
    assert len(prompt) == 13  # bytes
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 3}
    tokens = list(model.generate(prompt, 40, **options))
    expected = "".join(model.text.stream(prompt, tokens))
    printed = run("generate", "--model", writer, "Once, a café", "--max-new-tokens", 40, "--temperature", 0.9,
                  "--top-k", 50, "--top-p", 0.95, "--seed", 3)  # fmt: skip
    assert printed == expected + "\n"
    assert len(printed) > 10
    short = "generate", "--model", writer, "Once", "--max-new-tokens", 5
    assert run(*short) == run(*short) == run(*short, "--speculate", "lookup")
    assert run("generate", "--model", writer, "Once", "--max-new-tokens", 0) == "\n"


@pytest.fixture
def talker(writer, tmp_path):
    """`writer` with a chat template, and a generation_config.json that recommends a draw."""
    folder = tmp_path / "talker"
    shutil.copytree(writer, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    usual = {"do_sample": True, "top_p": 0.9, "temperature": 0.8}
    (folder / "generation_config.json").write_text(json.dumps(usual))
    return folder


def test_the_command_chat(talker):
    """Turns of a conversation; the model's files say how tokens are drawn, unless a temperature is given."""
    model = models.load(talker)
    usual = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
    said = "Hi\n/nothing\nAnd?\n/reset\nHi\n/quit\nno more\n"
    for options, own in (((), usual), (("--temperature", 0), {})):
        printed = run("chat", talker, "--max-new-tokens", 5, "--seed", 3, *options, stdin=said)
        messages, expected = [], []
        for text in ("Hi", "And?", "Hi"):
            messages = [*(messages if text == "And?" else []), {"role": "user", "content": text}]
            answer = "".join(map(str, model.generate(messages, 5, seed=3, **own)))
            messages.append({"role": "assistant", "content": answer})
            expected.append(answer)
        assert printed == "".join(f"{answer}\n" for answer in expected)


def test_chat_takes_any_bytes(talker):
    command = [sys.executable, "-m", "fastattn", "chat", str(talker), "--max-new-tokens", "2"]
    how = {"capture_output": True, "env": ENVIRONMENT, "check": True}
    done = subprocess.run(command, input=b"Hi\xff\nAnd?\n", **how)
    assert done.stdout.count(b"\n") >= 2
    assert not done.stderr


def test_the_command_generate_replaces_what_cannot_be_shown(writer):
    """The writer's random bytes hold characters that an ASCII terminal lacks: each is a question mark."""
    options = ["--max-new-tokens", 40, "--temperature", 0.9, "--seed", 3]
    printed = run("generate", "--model", writer, "Once", *options)
    assert not printed.isascii()
    shown = run_apart("generate", "--model", writer, "Once", *options, PYTHONIOENCODING="ascii")
    assert shown == printed.encode("ascii", "replace").decode()


def test_the_command_generate_refuses(encoder, writer, tmp_path):
    short = "Once", "--max-new-tokens", 5
    for folder, options, status, said in (
        (encoder, ["the"], 1, "expected a model of the class Decoder. The command embed takes it"),
        (writer, [""], 1, "PROMPT has no token"),
        (writer, ["--tempreature", 0.8, "Once"], 2, "usage: python -m fastattn generate "),
        (writer, ["--tempreature", 0.8, "Once"], 2, "error: not known: --tempreature\n"),
        (writer, [*short, "--top-k", 3], 1, "top_k is 3 and temperature 0"),
        (writer, [*short[:2], 61], 1, "max_new_tokens is 61 after a prompt of 4 tokens; expected at most 64"),
        (writer, [*short, "--temperature", -1], 1, "temperature is -1.0"),
        (tmp_path / "nowhere", ["Once"], 1, "error: "),
    ):
        assert said in run("generate", "--model", folder, *options, status=status)
    assert "needs --temperature" in " ".join(run("generate", "--help").split())


def test_the_command_line_alone_lists_its_commands():
    listed = run(status=2)
    assert all(f"    {name} " in listed for name in ("info", "selftest", "bench", "embed", "generate"))


def test_the_command_line_survives_a_closed_pipe(writer):
    command = f"{sys.executable} -m fastattn generate --model {writer} Once --max-new-tokens 60 | head -c 1"
    how = {"capture_output": True, "env": ENVIRONMENT, "timeout": 120, "check": True}
    assert subprocess.run(["bash", "-c", command], **how).stderr == b""


def write_scorer(folder, labels=1):
    write_reranker(folder, [f"kind {i}" for i in range(labels)])
    return models.load(folder)


def test_the_command_rerank(tmp_path):
    model, lines = write_scorer(tmp_path), "".join(f"{text}\n" for text in TEXTS)
    expected = model.rank("the cat", TEXTS, return_documents=True)
    assert rows(run("rerank", "--model", tmp_path, "the cat", stdin=lines)) == expected
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    told = ("--column", "body", "--top-k", 2, "--prompt", "a dog ", "--batch-size", 1)
    expected = model.rank("the cat", TEXTS, 2, return_documents=True, prompt="a dog ", batch_size=1)
    assert rows(run("rerank", "--model", tmp_path, "the cat", file, *told)) == expected
    assert run("rerank", "--model", tmp_path, "the cat") == ""


def test_what_the_commands_refuse(tmp_path):
    write_scorer(tmp_path / "three", 3)
    write_scorer(tmp_path / "one")
    tiny.write(tmp_path / "plain", "bert")
    write_tokenizer(tmp_path / "plain")
    for command, folder, options, said in (
        ("rerank", "plain", ["a"], "holds an Encoder (bert); expected a model of the class CrossEncoder"),
        ("rerank", "three", ["a"], "the model has 3 labels"),
        ("embed", "one", [], "expected a model of the class Encoder. The command rerank takes it"),
    ):
        assert said in run(command, "--model", tmp_path / folder, *options, stdin="a\n", status=1)
