"""examples/serve.py on the loopback: OpenAI's shape, micro-batches, 429, errors, graceful stops."""

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from implementations import assert_same_rows, child_environment
from tiny_tokenizers import write_tokenizer

from fastattn import models

if os.environ.get("FASTATTN_REQUIRE_MODEL") != "1":  # the gate claims these tests
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")

import serve
import uvicorn

EXAMPLE = Path(serve.__file__)
SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write(path, "bert")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


class Gate:
    """Stands in for `encode`: remembers its calls, and lets them through when it is open."""

    def __init__(self, encode):
        self.encode, self.calls, self.is_open = encode, [], threading.Event()
        self.error = None
        self.is_open.set()

    def __call__(self, texts):
        self.calls.append(texts)
        assert self.is_open.wait(SECONDS)
        if self.error:
            raise self.error
        return self.encode(texts)


class Running:
    """A server in a thread of this process."""

    def __init__(self, model, **options):
        self.service = serve.Service(model, "tiny", **options)
        self.gate = self.service.batcher.encode = Gate(self.service.encode)
        app = serve.make_app(self.service, most_bytes=10_000)
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def ask(self, method, path, body=None):
        """Status, answer and headers; `body` is what is sent as JSON, or bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        result = answer.status, json.loads(answer.read()), answer.headers
        connection.close()
        return result

    def embed(self, body):
        return self.ask("POST", "/v1/embeddings", body)

    def close(self):
        self.gate.is_open.set()
        self.server.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def start(model):
    """Start a server: start(**options)."""
    running = []

    def started(**options):
        running.append(Running(model, **options))
        return running[-1]

    yield started
    for server in running:
        server.close()


@pytest.fixture(scope="module")
def server(model):
    running = Running(model, queue_texts=100)
    yield running
    running.close()


TEXTS = ["the cat sat", "a dog ran on the mat", "the tree"]


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
@pytest.mark.parametrize("given", [TEXTS, TEXTS[:1], TEXTS[0]], ids=["several", "list", "one"])
def test_answers_have_the_shape_of_openai_s(server, model, given, encoding_format):
    body = {"input": given, "model": "tiny"}
    status, answer, _ = server.embed(body | ({"encoding_format": encoding_format} if encoding_format else {}))
    texts = [given] if isinstance(given, str) else given
    expected = model.encode(texts, normalize_embeddings=True)
    assert status == 200
    assert list(answer) == ["object", "data", "model", "usage"]
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    tokens = sum(len(ids) for ids in model.text.encode(texts))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", i) for i in range(len(texts))
    ]
    vectors = [item["embedding"] for item in answer["data"]]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)


def test_fewer_dimensions_are_the_first_ones_at_length_1(server, model):
    _, answer, _ = server.embed({"input": TEXTS, "dimensions": 5})
    vectors = np.array([item["embedding"] for item in answer["data"]])
    expected = model.encode(TEXTS, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)


LONG = " ".join(["cat"] * 40)  # more than the model's 32 positions
WRONG = {
    "no body": (b"", 400, None, "the body: "),
    "no JSON": (b"{input", 400, None, "the body: JSON decode error"),
    "no object": (["the cat"], 400, None, "the body: "),
    "no input": ({"model": "tiny"}, 400, "input", "input: Field required"),
    "no texts": ({"input": []}, 400, "input", "input: got a list of 0; expected a text, or a list of 1 to"),
    "a number": ({"input": 3}, 400, "input", "input: got int; expected a text, or a list"),
    "token ids": ({"input": [[3, 4]]}, 400, "input", "input: item 0 is list; expected a text"),
    "half a pair": ({"input": "\ud800"}, 400, "input", "input: item 0 has half of a surrogate pair"),
    "empty": ({"input": ["a", ""]}, 400, "input", "input: item 1 is empty; expected at least one character"),
    "too long": (
        {"input": ["a", LONG]}, 400, "input",
        "input: item 1 has 42 tokens; expected at most 32 (a server that is started with --truncate cuts",
    ),
    "too many characters": (
        {"input": ["a", "a" * 2049]}, 400, "input",
        "input: item 1 has 2049 characters; expected at most 32 tokens, and 64 characters for each (",
    ),
    "too many": ({"input": ["a"] * 101}, 400, "input", "input: 101 texts; expected at most 100"),
    "format": ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "encoding_format: got"),
    "dimensions 0": ({"input": "a", "dimensions": 0}, 400, "dimensions", "dimensions: "),
    "dimensions 25": ({"input": "a", "dimensions": 25}, 400, "dimensions", "dimensions: got 25; expected"),
    "dimensions true": ({"input": "a", "dimensions": True}, 400, "dimensions", "dimensions: "),
    "unknown field": ({"input": "a", "task": "x"}, 400, "task", "task: there is no such field; expected"),
    "long name": ({"input": "a", "b" * 99: 1}, 400, "b" * 80, f"{'b' * 80}: there is no such field"),
    "unknown model": (
        {"input": "a", "model": "ada"}, 404, "model",
        "model: there is no model 'ada'; expected 'tiny', or what the server's --name says",
    ),
    "too large": ({"input": "a" * 10_001}, 413, None, "a body of more than 10000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "status", "name", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(server, body, status, name, message):
    calls = len(server.gate.calls)
    came, answer, _ = server.embed(body)
    assert came == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["param"] == name
    assert len(server.gate.calls) == calls
    assert server.service.waiting == 0


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/embeddings", 405), ("POST", "/v1/nothing", 404)]
)
def test_errors_of_addresses_have_the_same_shape(server, method, path, status):
    came, answer, _ = server.ask(method, path)
    assert (came, answer["error"]["param"]) == (status, None)


def test_long_texts_are_cut_if_asked(start, model):
    server, longer = start(truncate=True), f"{LONG} " * 20
    spaced = "\n " * 2048 + TEXTS[0]
    status, answer, _ = server.embed({"input": [LONG, longer, spaced]})
    assert (status, answer["usage"]["total_tokens"]) == (200, 64 + len(model.text.encode(TEXTS)[0]))
    vectors = np.array([item["embedding"] for item in answer["data"]], np.float32)
    np.testing.assert_array_equal(vectors, model.encode([LONG, longer, spaced], normalize_embeddings=True))
    assert server.gate.calls == [[LONG, longer[:2048], TEXTS[0]]]  # the rest was not tokenized


def test_texts_that_are_cut_at_their_beginning_keep_their_end(model, monkeypatch):
    tokenizer = type(model.text.tokenizer).from_str(model.text.tokenizer.to_str())
    tokenizer.enable_truncation(32, direction="left")
    monkeypatch.setitem(model.text.__dict__, "tokenizer", tokenizer)
    service = serve.Service(model, "tiny", truncate=True)
    assert service.bounded(["b" + "a" * 2048 + " "]) == ["a" * 2048]
    service.dropped = ""  # by a tokenizer that keeps white space
    assert service.bounded(["a" * 2048 + " "]) == ["a" * 2047 + " "]
    service.batcher.close()


def test_health_and_names(server):
    status, said, _ = server.ask("GET", "/health")
    assert (status, said["status"], said["waiting"]) == (200, "ok", 0)
    status, answer, _ = server.ask("GET", "/v1/models")
    assert (status, [model["id"] for model in answer["data"]]) == (200, ["tiny"])


def waiting(server, bodies):
    """Requests in threads of their own, once all of them wait: what `embed` will return for each."""
    pool, before = ThreadPoolExecutor(len(bodies)), server.service.waiting
    asked = [pool.submit(server.embed, {"input": body}) for body in bodies]
    pool.shutdown(wait=False)
    wait_until(lambda: server.service.waiting == before + sum(map(len, bodies)))
    return asked


def test_requests_that_wait_go_through_the_model_together(start, model):
    server = start(batch_tokens=20)
    server.gate.is_open.clear()
    first = waiting(server, [TEXTS[:1]])
    wait_until(lambda: server.gate.calls)
    rest = waiting(server, [["the cat"], ["a dog"], ["the mat"], ["a tree", "the mat"], ["the dog"]])
    server.gate.is_open.set()
    answers = [asked.result(SECONDS) for asked in first + rest]
    assert [status for status, _, _ in answers] == [200] * 6
    calls = server.gate.calls
    assert calls[0] == TEXTS[:1]
    assert len(calls) == 3  # 24 tokens, 20 at a time
    assert sorted(text for texts in calls[1:] for text in texts) == sorted(
        ["the cat", "a dog", "the mat", "a tree", "the mat", "the dog"]
    )
    expected = model.encode(["a tree", "the mat"], normalize_embeddings=True)
    vectors = [item["embedding"] for item in answers[4][1]["data"]]
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)


def test_a_full_queue_answers_429_and_loses_nothing(start):
    server = start(queue_texts=4)
    server.gate.is_open.clear()
    asked = waiting(server, [["the cat"], ["a dog", "a tree"]])
    status, answer, headers = server.embed({"input": ["a", "the"]})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert answer["error"]["message"].startswith("3 texts wait, and 2 more came; expected at most 4 in all")
    asked += waiting(server, [["a mat"]])
    assert server.ask("GET", "/health")[1]["waiting"] == 4
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in asked] == [200] * 3
    assert server.embed({"input": ["a", "the"]})[0] == 200
    assert server.service.waiting == 0


def test_a_model_that_fails_answers_500_and_goes_on(start):
    server = start()
    server.gate.error = MemoryError("none is left")
    status, answer, _ = server.embed({"input": "the cat"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert answer["error"]["message"] == "the model failed: MemoryError: none is left"
    server.gate.error = None
    assert server.embed({"input": "the cat"})[0] == 200


def test_a_large_request_goes_through_the_model_in_parts(start, model):
    server, texts = start(batch_tokens=20), TEXTS * 20
    status, answer, _ = server.embed({"input": texts})
    assert status == 200
    assert len(server.gate.calls) > 15
    assert [text for call in server.gate.calls for text in call] == texts
    lengths = [len(ids) for ids in model.text.encode(TEXTS)]
    assert answer["usage"]["total_tokens"] == 20 * sum(lengths)
    vectors = np.array([item["embedding"] for item in answer["data"]], np.float32)
    assert_same_rows(vectors, model.encode(texts, normalize_embeddings=True))


def test_a_request_of_as_many_texts_as_may_be_fits_the_queue(model):
    default = serve.arguments(["folder"]).queue_texts
    service = serve.Service(model, "tiny")
    assert default == service.queue_texts >= serve.MOST_TEXTS
    vectors, tokens = asyncio.run(service.vectors(["a"] * serve.MOST_TEXTS))
    assert (len(vectors), tokens) == (serve.MOST_TEXTS, 3 * serve.MOST_TEXTS)
    service.batcher.close()


def gone(server, count, texts):
    """Connections of clients whose requests wait."""
    body, before = json.dumps({"input": texts}).encode(), server.service.waiting
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
    connections = []
    for _ in range(count):
        connections.append(socket.create_connection(("127.0.0.1", server.port), SECONDS))
        connections[-1].sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    wait_until(lambda: server.service.waiting == before + count * len(texts))
    return connections


def test_requests_of_clients_that_have_gone_are_dropped(start):
    """The rest of one of which a part is being computed goes, too; what others wait for is computed next."""
    server = start(batch_tokens=10)
    server.gate.is_open.clear()
    connections = gone(server, 20, ["the cat", "a dog"] * 10)
    wait_until(lambda: server.gate.calls)
    live = waiting(server, [["a tree"]] * 3)
    for connection in connections:
        connection.close()
    wait_until(lambda: server.service.waiting == 3)  # before anything is computed
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in live] == [200] * 3
    assert [text for call in server.gate.calls[1:] for text in call] == ["a tree"] * 3
    assert len(server.gate.calls[0]) < 20


def test_clients_that_have_gone_do_not_hinder_the_end(start):
    server = start(batch_tokens=10)
    server.gate.is_open.clear()
    for connection in gone(server, 20, ["the cat", "a dog"] * 10):
        connection.close()
    wait_until(lambda: server.service.waiting == 0)
    server.server.should_exit = True
    server.gate.is_open.set()
    server.thread.join(SECONDS)
    assert not server.thread.is_alive()
    assert len(server.gate.calls) <= 1


def test_the_rest_of_a_request_that_failed_is_not_computed(start):
    server = start(batch_tokens=10)
    server.gate.error = ValueError("no")
    assert server.embed({"input": ["the cat", "a dog"] * 10})[0] == 500
    server.gate.error = None
    assert server.embed({"input": "a tree"})[0] == 200
    assert server.gate.calls[1:] == [["a tree"]]


def test_texts_that_nobody_waits_for_are_not_tokenized(server):
    given_up = threading.Event()
    assert len(server.service.count(TEXTS, given_up)) == 3
    given_up.set()
    assert server.service.count(TEXTS, given_up) == []


def test_what_was_given_up_is_not_computed_and_ends_nothing():
    gate = Gate(lambda texts: np.zeros((len(texts), 2)))
    gate.is_open.clear()
    batcher = serve.Batcher(gate, 100)
    jobs = [serve.Job([text], [1]) for text in ("first", "given up", "last")]
    batcher.submit(jobs[0])
    while not gate.calls:
        time.sleep(0.001)
    batcher.submit(jobs[1])
    assert jobs[1].vectors.cancel()
    gate.is_open.set()
    jobs[0].vectors.result(SECONDS)
    batcher.submit(jobs[2])
    assert jobs[2].vectors.result(SECONDS).shape == (1, 2)
    assert gate.calls == [["first"], ["last"]]
    batcher.close()


def test_what_waits_is_answered_before_the_end(start):
    server = start()
    server.gate.is_open.clear()
    asked = waiting(server, [["the cat"], ["a dog", "a tree"], ["a mat"]])
    server.server.should_exit = True  # what a signal does
    time.sleep(0.2)
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in asked] == [200] * 3
    server.thread.join(SECONDS)
    assert not server.service.batcher._thread.is_alive()


def run(*args):
    command = [sys.executable, str(EXAMPLE), *map(str, args)]
    return subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(folder, number):
    process = run(folder, "--port", 0)
    port = int(process.stdout.readline().rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/v1/embeddings", '{"input": "the cat"}', {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    process.send_signal(number)
    assert (process.wait(SECONDS), process.stderr.read()) == (0, "")
    process.stdout.close()
    process.stderr.close()
    connection.close()


HALF = b'POST /v1/embeddings HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{"inp'


def test_half_a_request_does_not_hinder_the_end(folder):
    process = run(folder, "--port", 0, "--grace", 1)
    port = int(process.stdout.readline().rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), SECONDS) as half:
        half.sendall(HALF)
        other = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        other.request("GET", "/health")
        assert other.getresponse().status == 200
        other.close()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0
        assert "Traceback" not in errors
        said = half.makefile("rb").read()
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"the server has been stopped" in said


def test_a_client_that_reads_nothing_does_not_hinder_the_end():
    async def forever(*args):
        await asyncio.Event().wait()

    async def ended():
        task = asyncio.create_task(serve.Limited(forever, 1)({"type": "http"}, None, forever))
        await asyncio.sleep(0)
        task.cancel()  # what uvicorn does after --grace
        return bool((await asyncio.wait([task], timeout=2))[0])

    assert asyncio.run(ended())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "error: nowhere is no folder"),
        (["{folder}", "--port", "70000"], "error: 127.0.0.1:70000: "),
        (["{folder}", "--queue-texts", "0"], "--queue-texts is 0; expected at least 1"),
    ],
)
def test_what_is_wrong_at_the_start(folder, args, said):
    process = run(*(str(folder) if arg == "{folder}" else arg for arg in args))
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode
    assert said in errors
