"""examples/serve.py on the loopback: answers, batches of all that wait, errors, clients that go."""

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny_models as tiny
from implementations import assert_same_rows, child_environment
from model_folders import write_reranker
from tiny_routes import write_entries, write_router, write_static
from tiny_tokenizers import write_tokenizer

from fastattn import models

if os.environ.get("FASTATTN_REQUIRE_MODEL") != "1":  # the gate claims these tests
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")

import serve
import uvicorn

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
    """Stands in for `compute`: remembers its calls, and lets them through when it is open."""

    def __init__(self, compute):
        self.compute, self.calls, self.is_open = compute, [], threading.Event()
        self.error = None
        self.is_open.set()

    def __call__(self, items, options):
        self.calls.append([text for text, *_ in items])
        assert self.is_open.wait(SECONDS)
        if self.error:
            raise self.error
        return self.compute(items, options)


class Running:
    """A server in a thread of this process."""

    def __init__(self, model):
        app = serve.make_app(model, "tiny")
        self.batches = app.state.batches
        self.gate = self.batches.compute = Gate(self.batches.compute)
        config = uvicorn.Config(app, port=0, **{**serve.UVICORN, "log_level": "critical"})
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
        result = answer.status, answer.read(), answer.headers
        if method != "HEAD" and answer.headers["Content-Type"] == "application/json":
            result = result[0], json.loads(result[1]), result[2]
        connection.close()
        return result

    def raw(self, *parts):
        """The answer to parts of a request that are sent one after the other, until the server ends it."""
        with socket.create_connection(("127.0.0.1", self.port), SECONDS) as client:
            for part in parts:
                client.sendall(part)
                time.sleep(0.05)
            return client.makefile("rb").read()

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
    """Start a server: start()."""
    running = []

    def started():
        running.append(Running(model))
        return running[-1]

    yield started
    for server in running:
        server.close()


@pytest.fixture(scope="module")
def server(model):
    running = Running(model)
    yield running
    running.close()


TEXTS = ["the cat sat", "a dog ran on the mat", "the tree"]


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
@pytest.mark.parametrize("given", [TEXTS, TEXTS[0]], ids=["several", "one"])
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
    places = [(item["object"], item["index"]) for item in answer["data"]]
    assert places == [("embedding", i) for i in range(len(texts))]
    vectors = [item["embedding"] for item in answer["data"]]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)


LONG = " ".join(["cat"] * 40)  # more than the model's 32 positions
ARRAY, STRING = "Input should be a valid array", "Input should be a valid string"
WRONG = {  # of OpenAI's interface: body, status, parameter, message
    "no body": (b"", 400, None, "the body: "),
    "no JSON": (b"{input", 400, None, "the body: Invalid JSON"),
    "no object": (["the cat"], 400, None, "the body: "),
    "no input": ({"model": "tiny"}, 400, "input", "input: Field required"),
    "no texts": ({"input": []}, 400, "input", "input: List should have at least 1 item"),
    "a number": ({"input": 3}, 400, "input", f"input: {ARRAY}"),
    "token ids": ({"input": [[3, 4]]}, 400, "input", f"input: item 0: {STRING}"),
    "half a pair": ({"input": "\ud800"}, 400, None, "the body: Invalid JSON"),
    "empty": ({"input": ["a", ""]}, 400, "input", "input: item 1: String should have at least 1 character"),
    "too long": ({"input": ["a", LONG]}, 400, "input", "input: item 1 has more than 32 tokens"),
    "too many": ({"input": ["a"] * 2049}, 400, "input", "input: List should have at most 2048 items"),
    "format": ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "encoding_format: Input"),
    "dimensions 0": ({"input": "a", "dimensions": 0}, 400, "dimensions", "dimensions: "),
    "dimensions 25": ({"input": "a", "dimensions": 25}, 400, "dimensions", "dimensions: got 25; expected"),
    "dimensions true": ({"input": "a", "dimensions": True}, 400, "dimensions", "dimensions: "),
    "unknown field": ({"input": "a", "task": "x"}, 400, "task", "task: there is no such field; expected"),
    "long name": ({"input": "a", "b" * 99: 1}, 400, "b" * 80, f"{'b' * 80}: there is no such field"),
    "unknown model": ({"input": "a", "model": "ada"}, 404, "model", "model: there is no model 'ada'; exp"),
    "too large": ({"input": "a" * 20_001}, 413, None, "a body of more than 20000 bytes"),
}  # fmt: skip
TEI_WRONG = {  # of text-embeddings-inference: path, body, status, message
    "no texts": ("/embed", {"inputs": []}, 422, "inputs: List should have at least 1 item"),
    "token ids": ("/embed", {"inputs": [[3]]}, 422, f"inputs: item 0: {STRING}"),
    "empty": ("/embed", {"inputs": ["a", ""]}, 422, "inputs: item 1: String should have at least 1 char"),
    "field": ("/embed", {"inputs": "a", "task": 1}, 422, "task: there is no such field; expected inputs"),
    "dimensions": ("/embed", {"inputs": "a", "dimensions": 25}, 422, "dimensions: got 25; expected 1 to 24"),
    "prompt": ("/embed", {"inputs": "a", "prompt_name": "no"}, 422, "prompt_name: expected one of ["),
    "too long": ("/embed", {"inputs": LONG}, 413, "inputs: item 0 has more than 32 tokens"),
    "too large": ("/embed", {"inputs": "a" * 20_001}, 413, "a body of more than 20000 bytes"),
    "no scores": ("/rerank", {"query": "a", "texts": ["a"]}, 404, "the model makes vectors; expected POST"),
    "no labels": ("/predict", {"inputs": "a"}, 404, "the model makes vectors; expected POST /embed or"),
    "three": ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "inputs: item 0: List should have at most 2"),
    "one text": ("/rerank", {"query": "a", "texts": "a"}, 422, f"texts: {ARRAY}"),
    "no JSON": ("/embed", b"{", 422, "the body: Invalid JSON"),
}  # fmt: skip
ALL_WRONG = [("/v1/embeddings", *each) for each in WRONG.values()]
ALL_WRONG += [(path, body, status, None, said) for path, body, status, said in TEI_WRONG.values()]


@pytest.mark.parametrize(("path", "body", "status", "name", "message"), ALL_WRONG, ids=[*WRONG, *TEI_WRONG])
def test_what_is_wrong_is_named(server, path, body, status, name, message, monkeypatch):
    monkeypatch.setattr(serve, "BODY_BYTES", 20_000)
    calls = len(server.gate.calls)
    came, answer, _ = server.ask("POST", path, body)
    assert came == status
    if path.startswith("/v1"):
        answer = answer["error"]
        assert set(answer) == {"message", "type", "param", "code"}
        assert (answer["message"][: len(message)], answer["param"]) == (message, name)
    else:
        assert set(answer) == {"error", "error_type"}
        assert answer["error"].startswith(message)
    assert (len(server.gate.calls), server.batches.waiting) == (calls, 0)


def test_features_as_text_embeddings_inference_gives_them(server, model):
    for given in (TEXTS, TEXTS[0]):
        texts = [given] if isinstance(given, str) else given
        status, vectors, _ = server.ask("POST", "/embed", {"inputs": given})
        assert status == 200
        expected = model.encode(texts, normalize_embeddings=True)
        np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
    _, vectors, _ = server.ask("POST", "/embed", {"inputs": TEXTS, "normalize": False, "dimensions": 7})
    np.testing.assert_array_equal(np.array(vectors, np.float32), model.encode(TEXTS)[:, :7])
    status, vectors, _ = server.ask("POST", "/embed", {"inputs": LONG, "truncate": True})
    expected = model.encode([LONG], normalize_embeddings=True)
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)


def test_prompts_go_by_their_names(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    settings = {"prompts": {"query": "the cat ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    own = models.load(tmp_path / "model")
    server = Running(own)
    try:
        expected = own.encode(TEXTS, prompt_name="document", normalize_embeddings=True)
        _, vectors, _ = server.ask("POST", "/embed", {"inputs": TEXTS, "prompt_name": "document"})
        np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
        expected = own.encode(TEXTS, normalize_embeddings=True)
        assert not np.array_equal(vectors, expected)
        _, answer, _ = server.embed({"input": TEXTS})
        vectors = [item["embedding"] for item in answer["data"]]
        np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
    finally:
        server.close()


@pytest.fixture(scope="module", params=[1, 3])
def scoring(request, tmp_path_factory):
    """A server of a tiny cross-encoder with so many labels, and the model."""
    folder = tmp_path_factory.mktemp("scores")
    write_reranker(folder, [f"kind {i}" for i in range(request.param)])
    model = models.load(folder)
    running = Running(model)
    yield running, model
    running.close()


def raw(logits):
    return logits


def test_scores_as_text_embeddings_inference_gives_them(scoring):
    server, model = scoring
    pairs = [("the cat", text) for text in TEXTS]
    logits = model.predict(pairs, activation_fn=raw).reshape(3, -1).astype(np.float64)
    if model.num_labels == 1:
        probabilities = 1 / (1 + np.exp(-logits))
        order = np.argsort(-logits[:, 0]).tolist()
        body = {"query": "the cat", "texts": TEXTS, "return_text": True}
        status, ranked, _ = server.ask("POST", "/rerank", body)
        assert (status, [each["index"] for each in ranked]) == (200, order)
        assert [each["text"] for each in ranked] == [TEXTS[i] for i in order]
        np.testing.assert_allclose([each["score"] for each in ranked], probabilities[order, 0], rtol=1e-5)
        _, ranked, _ = server.ask("POST", "/rerank", {"query": "the cat", "texts": TEXTS, "raw_scores": True})
        assert ranked == [{"index": i, "score": logits[i, 0]} for i in order]
    else:
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        status, answer, _ = server.ask("POST", "/rerank", {"query": "the cat", "texts": TEXTS})
        assert (status, answer["error_type"]) == (404, "Validation")
        assert answer["error"] == "the model has 3 labels; expected POST /predict"
    _, answers, _ = server.ask("POST", "/predict", {"inputs": [list(pair) for pair in pairs]})
    for answer, expected in zip(answers, probabilities, strict=True):
        best = np.argsort(-expected)
        assert [each["label"] for each in answer] == [f"kind {i}" for i in best]
        np.testing.assert_allclose([each["score"] for each in answer], expected[best], rtol=1e-5)
    _, one, _ = server.ask("POST", "/predict", {"inputs": list(pairs[1])})
    assert_same_scores(one, answers[1])
    _, single, _ = server.ask("POST", "/predict", {"inputs": TEXTS[0], "raw_scores": True})
    expected = np.atleast_1d(model.predict((TEXTS[0],), activation_fn=raw))
    named = {f"kind {i}": x for i, x in enumerate(expected.tolist())}
    assert {each["label"]: each["score"] for each in single} == named
    _, mixed, _ = server.ask("POST", "/predict", {"inputs": [[TEXTS[0]], ["a", "dog"]], "raw_scores": True})
    assert_same_scores(mixed[0], single)
    for path in ("/embed", "/v1/embeddings"):
        body = {"inputs" if path == "/embed" else "input": "a"}
        status, answer, _ = server.ask("POST", path, body)
        assert status == 404
        assert "the model scores texts and pairs; expected POST /rerank or /predict" in str(answer["error"])
    wrong = "inputs: item 0: List should have at most 2 items"
    for given, said in (([["a", "b", "c"]], wrong), ("cat " * 40, "inputs: item 0 has more than 32 tokens")):
        assert server.ask("POST", "/predict", {"inputs": given})[1]["error"].startswith(said)


def assert_same_scores(got, expected):
    """Assert the same labels in the same order, and their scores as rows in other company."""
    assert [each["label"] for each in got] == [each["label"] for each in expected]
    assert_same_rows([each["score"] for each in got], [each["score"] for each in expected])


def head(length, more=""):
    return f"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def test_a_body_without_a_length_that_is_too_large_is_not_read(server, monkeypatch):
    monkeypatch.setattr(serve, "BODY_BYTES", 100)
    chunk = b"40\r\n" + b"a" * 64 + b"\r\n"  # none of them is the last
    begin = b"POST /embed HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server.raw(begin, chunk, chunk).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("apart", [False, True])
def test_a_client_that_offers_another_protocol_keeps_its_body(server, model, apart):
    """As Java's client does, and curl with --http2."""
    body = json.dumps({"inputs": TEXTS}).encode()
    offers = "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    begin = head(len(body), offers)
    said, _, vectors = server.raw(*((begin, body) if apart else (begin + body,))).partition(b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 ")
    expected = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_array_equal(np.array(json.loads(vectors), np.float32), expected)


def test_other_models_are_refused(tmp_path):
    tiny.write(tmp_path / "gpt2", "gpt2")
    write_tokenizer(tmp_path / "gpt2")
    (tmp_path / "router").mkdir()
    write_router(tmp_path / "router")
    for name in ("gpt2", "router"):
        with pytest.raises(TypeError, match="expected an encoder without tasks, or a cross-encoder"):
            serve.make_app(models.load(tmp_path / name), name)


def test_tokens_are_those_of_a_model_without_special_ones(tmp_path):
    """Its tokenizer cuts, here at three, though the model has no limit."""
    write_static(tmp_path)
    write_entries(tmp_path, "StaticEmbedding")
    model = models.load(tmp_path)
    server = Running(model)
    try:
        assert server.embed({"input": "the cat"})[1]["usage"]["total_tokens"] == 2
        status, answer, _ = server.embed({"input": "the cat sat on"})
        assert (status, answer["error"]["message"]) == (400, "input: item 0 has more than 3 tokens")
        body = {"inputs": "the cat sat on", "truncate": True, "normalize": False}
        (row,) = server.ask("POST", "/embed", body)[1]
        np.testing.assert_array_equal(np.array(row, np.float32), model.encode("the cat sat on"))
    finally:
        server.close()


def waiting(server, bodies):
    """Requests in threads of their own, once all of them wait: what `embed` will return for each."""
    pool, before = ThreadPoolExecutor(len(bodies)), server.batches.waiting
    asked = [pool.submit(server.embed, {"input": body}) for body in bodies]
    pool.shutdown(wait=False)
    wait_until(lambda: server.batches.waiting == before + sum(map(len, bodies)))
    return asked


def test_requests_that_wait_go_through_the_model_together(start, model):
    server = start()
    server.gate.is_open.clear()
    first = waiting(server, [TEXTS[:1]])
    wait_until(lambda: server.gate.calls)
    texts = [["the cat"], ["a dog"], ["the mat"], ["a tree", "the mat"], ["the dog"]]
    rest = waiting(server, texts)
    wait_until(lambda: len(server.batches.jobs) == 5)
    server.gate.is_open.set()
    answers = [asked.result(SECONDS) for asked in first + rest]
    assert [status for status, _, _ in answers] == [200] * 6
    assert server.gate.calls[0] == TEXTS[:1]
    assert len(server.gate.calls) == 2
    assert sorted(server.gate.calls[1]) == sorted(text for each in texts for text in each)
    expected = model.encode(["a tree", "the mat"], normalize_embeddings=True)
    vectors = [item["embedding"] for item in answers[4][1]["data"]]
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)


def test_a_full_queue_answers_429_and_loses_nothing(start, monkeypatch):
    monkeypatch.setattr(serve, "QUEUE_TEXTS", 4)
    server = start()
    server.gate.is_open.clear()
    asked = waiting(server, [["the cat"], ["a dog", "a tree"]])
    status, answer, headers = server.embed({"input": ["a", "the"]})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert answer["error"]["message"] == "3 texts wait, of at most 4: try again later"
    asked += waiting(server, [["a mat"]])
    assert server.ask("GET", "/health")[1] == {"status": "ok", "waiting": 4}
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in asked] == [200] * 3
    assert server.embed({"input": ["a", "the"]})[0] == 200
    assert server.batches.waiting == 0


def test_a_model_that_fails_answers_500_and_goes_on(start):
    server = start()
    server.gate.error = MemoryError("none is left")
    status, answer, _ = server.embed({"input": "the cat"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert answer["error"]["message"] == "the model failed: MemoryError: none is left"
    server.gate.error = None
    assert server.embed({"input": "the cat"})[0] == 200


def test_a_large_request_goes_through_the_model_in_parts(start, model):
    server, texts = start(), TEXTS * 50
    status, answer, _ = server.embed({"input": texts})
    assert status == 200
    assert server.gate.calls == [texts[:64], texts[64:128], texts[128:]]
    lengths = [len(ids) for ids in model.text.encode(TEXTS)]
    assert answer["usage"]["total_tokens"] == 50 * sum(lengths)
    vectors = np.array([item["embedding"] for item in answer["data"]], np.float32)
    assert_same_rows(vectors, model.encode(texts, normalize_embeddings=True))


def gone(server, count, texts):
    """Connections of clients whose requests wait."""
    body, before = json.dumps({"input": texts}).encode(), server.batches.waiting
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
    connections = []
    for _ in range(count):
        connections.append(socket.create_connection(("127.0.0.1", server.port), SECONDS))
        connections[-1].sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    wait_until(lambda: server.batches.waiting == before + count * len(texts))
    return connections


def test_requests_of_clients_that_have_gone_are_dropped(start, monkeypatch):
    """The rest of one of which a part is being computed goes, too; what others wait for is computed next."""
    monkeypatch.setattr(serve, "PART_TEXTS", 5)
    server = start()
    server.gate.is_open.clear()
    connections = gone(server, 20, ["the cat", "a dog"] * 10)
    wait_until(lambda: server.gate.calls)
    live = waiting(server, [["a tree"]] * 3)
    wait_until(lambda: len(server.batches.jobs) == 22)
    for connection in connections:
        connection.close()
    wait_until(lambda: server.batches.waiting == 3)  # before anything is computed
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in live] == [200] * 3
    assert [text for call in server.gate.calls[1:] for text in call] == ["a tree"] * 3
    assert len(server.gate.calls[0]) == 5


def test_what_waits_is_answered_before_the_end(start):
    server = start()
    server.gate.is_open.clear()
    asked = waiting(server, [["the cat"], ["a dog", "a tree"], ["a mat"]])
    server.server.should_exit = True  # what a signal does
    time.sleep(0.2)
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in asked] == [200] * 3
    server.thread.join(SECONDS)
    assert not server.thread.is_alive()


def test_the_command(folder):
    """It answers, and a signal ends it; it logs nothing, also of offers of other protocols."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, serve.__file__, "--model", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE, text=True)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    def answers():
        try:
            connection.request("GET", "/health", headers={"Connection": "Upgrade", "Upgrade": "h2c"})
            return connection.getresponse().read()
        except ConnectionRefusedError:
            assert process.poll() is None
            connection.close()

    wait_until(answers)
    connection.request("POST", "/v1/embeddings", json.dumps({"input": "the cat", "model": str(folder)}))
    answer = connection.getresponse()
    assert (answer.status, answer.read()[:1]) == (200, b"{")
    connection.close()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=SECONDS) == (None, "")
