"""A served model on the loopback: answers, micro-batches, 429, errors, measurements, graceful stops."""

import asyncio
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
from tiny_routes import write_entries, write_router, write_static
from tiny_tokenizers import write_tokenizer

from fastattn import models

if os.environ.get("FASTATTN_REQUIRE_MODEL") != "1":  # the gate claims these tests
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("uvicorn")

import uvicorn

from fastattn.serve import Limits, make_app
from fastattn.serve._app import _Limited, _Measured, app_of
from fastattn.serve._batcher import Batcher, Job
from fastattn.serve._service import MOST_ITEMS, Service

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

    def __call__(self, texts, prompt=""):
        self.calls.append(texts)
        assert self.is_open.wait(SECONDS)
        if self.error:
            raise self.error
        return self.compute(texts, prompt)


class Running:
    """A server in a thread of this process."""

    def __init__(self, model, **options):
        self.service = Service(model, "tiny", Limits(**{"body_bytes": 10_000, **options}))
        self.gate = self.service.batcher.compute = Gate(self.service.compute)
        app = app_of(self.service)
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
        result = answer.status, answer.read(), answer.headers
        if method != "HEAD" and answer.headers["Content-Type"] == "application/json":
            result = result[0], json.loads(result[1]), result[2]
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
    "no JSON": (b"{input", 400, None, "the body: Invalid JSON"),
    "no object": (["the cat"], 400, None, "the body: "),
    "no input": ({"model": "tiny"}, 400, "input", "input: Field required"),
    "no texts": ({"input": []}, 400, "input", "input: got a list of 0; expected a text, or a list of 1 to"),
    "a number": ({"input": 3}, 400, "input", "input: got int; expected a text, or a list"),
    "token ids": ({"input": [[3, 4]]}, 400, "input", "input: item 0 is list; expected a text"),
    "half a pair": ({"input": "\ud800"}, 400, None, "the body: Invalid JSON"),
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
        "model: there is no model 'ada'; expected 'tiny', or what --name says",
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


def test_what_may_be_asked_of_an_address_is_told(server):
    assert server.ask("GET", "/embed")[2]["Allow"] == "POST"
    assert server.ask("HEAD", "/health")[0] == 200
    assert server.ask("GET", "/docs")[0] == server.ask("GET", "/openapi.json")[0] == 404


def test_long_texts_are_cut_if_asked(start, model):
    server, longer = start(truncate=True), f"{LONG} " * 20
    spaced = "\n " * 2048 + TEXTS[0]
    status, answer, _ = server.embed({"input": [LONG, longer, spaced]})
    assert (status, answer["usage"]["total_tokens"]) == (200, 64 + len(model.text.encode(TEXTS)[0]))
    vectors = np.array([item["embedding"] for item in answer["data"]], np.float32)
    np.testing.assert_array_equal(vectors, model.encode([LONG, longer, spaced], normalize_embeddings=True))
    assert server.gate.calls == [[LONG, longer[:2048], TEXTS[0]]]  # the rest was not tokenized


def test_a_text_of_long_words_is_not_cut_to_something_else(server):
    """Without its end it would have fewer tokens than the model takes, and another vector."""
    for text in ("cat" + " " * 3000 + "dog", "a" * 3000 + " dog"):
        status, answer, _ = server.ask("POST", "/embed", {"inputs": text, "truncate": True})
        assert status == 413
        assert answer["error"].startswith("inputs: item 0 has words, or white space, of very many characters")


def test_texts_that_are_cut_at_their_beginning_keep_their_end(model, monkeypatch):
    tokenizer = type(model.text.tokenizer).from_str(model.text.tokenizer.to_str())
    tokenizer.enable_truncation(32, direction="left")
    monkeypatch.setitem(model.text.__dict__, "tokenizer", tokenizer)
    service = Service(model, "tiny", Limits())
    assert service.bounded(["b" + "a" * 2048 + " "], True, "input")[0] == ["a" * 2048]
    service.dropped = ""  # by a tokenizer that keeps white space
    assert service.bounded(["a" * 2048 + " "], True, "input")[0] == ["a" * 2047 + " "]
    service.batcher.close()


def test_health_and_names(server):
    status, said, _ = server.ask("GET", "/health")
    assert (status, said["status"], said["waiting"]) == (200, "ok", 0)
    status, answer, _ = server.ask("GET", "/v1/models")
    assert (status, [model["id"] for model in answer["data"]]) == (200, ["tiny"])
    assert server.ask("GET", "/v1/models/tiny")[1] == answer["data"][0]
    status, answer, _ = server.ask("GET", "/v1/models/an/other")
    assert (status, answer["error"]["param"]) == (404, "model")


def test_features_as_text_embeddings_inference_gives_them(server, model):
    for path in ("/embed", "/"):
        for given in (TEXTS, TEXTS[0]):
            texts = [given] if isinstance(given, str) else given
            status, vectors, _ = server.ask("POST", path, {"inputs": given})
            assert status == 200
            np.testing.assert_array_equal(
                np.array(vectors, np.float32), model.encode(texts, normalize_embeddings=True)
            )
    _, vectors, _ = server.ask("POST", "/embed", {"inputs": TEXTS, "normalize": False, "dimensions": 7})
    np.testing.assert_array_equal(np.array(vectors, np.float32), model.encode(TEXTS)[:, :7])
    status, vectors, _ = server.ask("POST", "/embed", {"inputs": LONG, "truncate": True})
    expected = model.encode([LONG], normalize_embeddings=True)
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)


def test_similarities_as_text_embeddings_inference_gives_them(server, model):
    vectors = model.encode(TEXTS, normalize_embeddings=True)
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    for path in ("/similarity", "/"):
        status, cosines, _ = server.ask("POST", path, {"parameters": {}, "inputs": inputs})
        assert status == 200
        np.testing.assert_allclose(cosines, vectors[1:] @ vectors[0], rtol=0, atol=1e-6)
    body = {"inputs": {"source_sentence": LONG, "sentences": TEXTS[:1]}, "parameters": {"truncate": True}}
    _, cosines, _ = server.ask("POST", "/similarity", body)
    np.testing.assert_allclose(
        cosines, [model.encode(LONG, normalize_embeddings=True) @ vectors[0]], atol=1e-6
    )
    sentences = (TEXTS * 12)[1:]  # the bits of each are those that it has alone
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": sentences}}
    _, together, _ = server.ask("POST", "/similarity", body)
    for sentence, cosine in zip(sentences[:3], together, strict=False):
        body = {"inputs": {"source_sentence": TEXTS[0], "sentences": [sentence]}}
        assert_same_rows(server.ask("POST", "/similarity", body)[1], [cosine])
    texts = ['"inputs": {', "the cat"]  # no object, although it looks like one
    status, rows, _ = server.ask("POST", "/", {"inputs": texts})
    np.testing.assert_array_equal(np.array(rows, np.float32), model.encode(texts, normalize_embeddings=True))


def test_prompts_go_by_their_names(folder, tmp_path, start):
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
        np.testing.assert_array_equal(
            np.array([item["embedding"] for item in answer["data"]], np.float32), expected
        )
        server.gate.is_open.clear()  # two prompts that wait are two calls of the model
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(server.embed, {"input": "a"})
            wait_until(lambda: len(server.gate.calls) == 3)
            asked = [
                pool.submit(server.ask, "POST", "/embed", {"inputs": "a dog", "prompt_name": name})
                for name in ("query", "document")
            ]
            wait_until(lambda: server.service.waiting == 3)
            server.gate.is_open.set()
            rows = [each.result(SECONDS)[1][0] for each in asked]
            assert first.result(SECONDS)[0] == 200
        for name, row in zip(("query", "document"), rows, strict=True):
            expected = own.encode("a dog", prompt_name=name, normalize_embeddings=True)
            np.testing.assert_array_equal(np.array(row, np.float32), expected)
    finally:
        server.close()


@pytest.fixture(scope="module", params=[1, 3])
def scoring(request, tmp_path_factory):
    """A server of a tiny cross-encoder with so many labels, and the model."""
    folder, labels = tmp_path_factory.mktemp("scores"), request.param
    changes = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(i): f"kind {i}" for i in range(labels)},
    }
    weights = {f"bert.{name}": x for name, x in tiny.tensors("bert", tiny.CONFIGS["bert"]).items()}
    rng = np.random.default_rng(5)
    for name, shape in {"bert.pooler.dense": (24, 24), "classifier": (labels, 24)}.items():
        weights[f"{name}.weight"] = rng.standard_normal(shape, np.float32)
        weights[f"{name}.bias"] = rng.standard_normal(shape[0], np.float32)
    tiny.write(folder, "bert", weights, **changes)
    write_tokenizer(folder)
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
        assert answer["error"] == "/rerank: the model has 3 labels; expected one, or POST /predict"
    _, answers, _ = server.ask("POST", "/predict", {"inputs": [list(pair) for pair in pairs]})
    for answer, expected in zip(answers, probabilities, strict=True):
        best = np.argsort(-expected)
        assert [each["label"] for each in answer] == [f"kind {i}" for i in best]
        np.testing.assert_allclose([each["score"] for each in answer], expected[best], rtol=1e-5)
    _, one, _ = server.ask("POST", "/predict", {"inputs": list(pairs[1])})
    assert_same_scores(one, answers[1])
    _, single, _ = server.ask("POST", "/predict", {"inputs": TEXTS[0], "raw_scores": True})
    expected = np.atleast_1d(model.predict((TEXTS[0],), activation_fn=raw))
    assert {each["label"]: each["score"] for each in single} == {
        f"kind {i}": x for i, x in enumerate(expected.tolist())
    }
    _, mixed, _ = server.ask("POST", "/predict", {"inputs": [[TEXTS[0]], ["a", "dog"]], "raw_scores": True})
    assert_same_scores(mixed[0], single)
    assert server.ask("GET", "/info")[1]["max_input_length"] == 32


def assert_same_scores(got, expected):
    """Assert the same labels in the same order, and their scores as rows in other company."""
    assert [each["label"] for each in got] == [each["label"] for each in expected]
    assert_same_rows([each["score"] for each in got], [each["score"] for each in expected])


TEI_WRONG = {
    "no texts": ("/embed", {"inputs": []}, 422, "inputs: got a list of 0; expected a text, or a list"),
    "token ids": ("/embed", {"inputs": [[3]]}, 422, "inputs: item 0 is list; expected a text (token ids"),
    "empty": ("/embed", {"inputs": ["a", ""]}, 422, "inputs: item 1 is empty; expected at least one"),
    "field": ("/embed", {"inputs": "a", "task": 1}, 422, "task: there is no such field; expected truncate"),
    "side": (
        "/embed", {"inputs": "a", "truncation_direction": "Left"}, 422,
        "truncation_direction: got 'Left'; expected 'Right'",
    ),
    "dimensions": ("/embed", {"inputs": "a", "dimensions": 25}, 422, "dimensions: got 25; expected 1 to 24"),
    "prompt": ("/embed", {"inputs": "a", "prompt_name": "no"}, 422, "prompt_name: "),
    "too long": ("/embed", {"inputs": LONG}, 413, "inputs: item 0 has 42 tokens; expected at most 32"),
    "too many": ("/embed", {"inputs": ["a"] * 101}, 413, "inputs: 101 texts; expected at most 100"),
    "too large": ("/embed", {"inputs": "a" * 10_001}, 413, "a body of more than 10000 bytes"),
    "no sentences": (
        "/similarity", {"inputs": {"source_sentence": "a", "sentences": "b"}}, 422,
        "inputs: got a text; expected a list of texts",
    ),
    "a field within": (
        "/", {"inputs": {"source_sentence": "a", "sentences": ["b"], "more": 1}}, 422,
        "more: there is no such field; expected source_sentence, sentences",
    ),
    "no scores": ("/rerank", {"query": "a", "texts": ["a"]}, 404, "/rerank: the model makes vectors"),
    "no labels": ("/predict", {"inputs": "a"}, 404, "/predict: the model makes vectors"),
    "three": ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "inputs: item 0 is no text and no pair"),
    "one text": ("/rerank", {"query": "a", "texts": "a"}, 422, "texts: got a text; expected a list of texts"),
    "no JSON": ("/embed", b"{", 422, "the body: Invalid JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "message"), TEI_WRONG.values(), ids=TEI_WRONG)
def test_errors_in_the_shape_of_text_embeddings_inference(server, path, body, status, message):
    calls = len(server.gate.calls)
    came, answer, _ = server.ask("POST", path, body)
    assert (came, set(answer)) == (status, {"error", "error_type"})
    assert answer["error"].startswith(message)
    assert (len(server.gate.calls), server.service.waiting) == (calls, 0)


def test_measurements(start):
    server = start()
    server.embed({"input": TEXTS})
    server.embed({"input": []})
    server.ask("GET", "/no/such/address")
    status, said, headers = server.ask("GET", "/metrics")
    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    lines = said.decode().splitlines()
    for line in (
        'fastattn_requests_total{path="/v1/embeddings",status="200"} 1.0',
        'fastattn_requests_total{path="/v1/embeddings",status="400"} 1.0',
        'fastattn_requests_total{path="other",status="404"} 1.0',
        'fastattn_request_seconds_count{path="/v1/embeddings"} 2.0',
        "fastattn_texts_total 3.0",
        "fastattn_calls_total 1.0",
        "fastattn_waiting 0.0",
    ):
        assert line in lines
    (tokens,) = (line for line in lines if line.startswith("fastattn_tokens_total "))
    assert tokens == f"fastattn_tokens_total {float(sum(map(len, server.service.model.text.encode(TEXTS))))}"


def test_a_body_that_is_too_large_is_not_read(server):
    head = b"POST /embed HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 100000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as client:
        client.sendall(head)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_goes_in_the_middle_of_its_request_is_no_failure(start):
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as client:
        client.sendall(HALF)
        wait_until(lambda: server.server.server_state.tasks)
    wait_until(lambda: not server.server.server_state.tasks)
    assert server.ask("GET", "/health")[0] == 200
    said = server.ask("GET", "/metrics")[1].decode()
    assert 'fastattn_requests_total{path="/v1/embeddings",status="499"} 1.0' in said.splitlines()


def test_other_models_are_refused(tmp_path):
    tiny.write(tmp_path, "gpt2")
    write_tokenizer(tmp_path)
    with pytest.raises(TypeError, match=r"model is .*; expected an Encoder or a CrossEncoder$"):
        make_app(models.load(tmp_path))
    for name in ("batch_tokens", "queue_texts", "body_bytes"):
        with pytest.raises(ValueError, match=rf"{name} is 0; expected an integer of at least 1$"):
            Limits(**{name: 0})


def test_a_model_that_needs_a_task_is_refused_without(tmp_path):
    write_router(tmp_path)
    model = models.load(tmp_path)
    with pytest.raises(ValueError, match=r"task is None, .* for each, 'query', 'document'; expected one"):
        make_app(model)
    with pytest.raises(ValueError, match=r"^make_app\(\): task is 'x'; expected one of 'query', 'document'"):
        make_app(model, task="x")


def test_a_prompt_for_requests_that_name_none(folder, tmp_path):
    path = tmp_path / "prompts"
    shutil.copytree(folder, path)
    settings = {"prompts": {"query": "the cat ", "document": ""}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    model = models.load(path)
    with pytest.raises(ValueError, match=r"^make_app\(\): prompt_name is 'x'; expected one of"):
        make_app(model, prompt_name="x")
    assert make_app(model).state.service.prompt == ""
    service = make_app(model, prompt_name="query").state.service
    assert (service.prompt, service.prompt_of("document")) == ("the cat ", "")


def test_tokens_are_those_of_a_model_without_special_ones(tmp_path):
    """Its tokenizer cuts, here at three, though the model has no limit."""
    write_static(tmp_path)
    write_entries(tmp_path, "StaticEmbedding")
    model = models.load(tmp_path)
    server = Running(model)
    try:
        assert server.embed({"input": "the cat"})[1]["usage"]["total_tokens"] == 2
        status, answer, _ = server.embed({"input": "the cat sat on"})
        assert (status, answer["error"]["message"][:50]) == (
            400,
            "input: item 0 has 4 tokens; expected at most 3 (a ",
        )
        body = {"inputs": "the cat sat on", "truncate": True, "normalize": False}
        (row,) = server.ask("POST", "/embed", body)[1]
        np.testing.assert_array_equal(np.array(row, np.float32), model.encode("the cat sat on"))
        assert server.ask("GET", "/info")[1]["max_input_length"] == 3
    finally:
        server.close()


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


def test_a_small_request_comes_before_the_rest_of_a_large_one(start):
    server = start(batch_tokens=10)
    server.gate.is_open.clear()
    first = waiting(server, [["the cat"] * 20])
    wait_until(lambda: server.gate.calls)
    asked = waiting(server, [["a tree"]])
    server.gate.is_open.set()
    assert [each.result(SECONDS)[0] for each in asked + first] == [200, 200]
    assert "a tree" in server.gate.calls[1] + server.gate.calls[2]


def test_a_body_of_many_wrong_fields_holds_nobody_up(start):
    server = start(body_bytes=1 << 22)
    body = {str(i): 1 for i in range(300_000)}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.embed, body)
        while not asked.done():
            assert server.ask("GET", "/health")[0] == 200
        status, answer, _ = asked.result()
    assert (status, answer["error"]["param"]) == (400, "0")


def test_a_thread_that_has_ended_is_told(start):
    server = start()
    server.service.batcher.close()
    assert server.ask("GET", "/health")[0] == 503


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
    service = Service(model, "tiny", Limits())
    vectors, tokens = asyncio.run(service.rows(["a"] * MOST_ITEMS, "", None, "input"))
    assert (len(vectors), tokens) == (MOST_ITEMS, 3 * MOST_ITEMS)
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
    assert len(server.service.count(TEXTS, set(), "", False, "input", given_up)) == 3
    given_up.set()
    assert server.service.count(TEXTS, set(), "", False, "input", given_up) == []


def test_what_was_given_up_is_not_computed_and_ends_nothing():
    gate = Gate(lambda texts, prompt: np.zeros((len(texts), 2)))
    gate.is_open.clear()
    batcher = Batcher(gate, 100)
    jobs = [Job([text], [1], "") for text in ("first", "given up", "last")]
    batcher.submit(jobs[0])
    while not gate.calls:
        time.sleep(0.001)
    batcher.submit(jobs[1])
    assert jobs[1].rows.cancel()
    gate.is_open.set()
    jobs[0].rows.result(SECONDS)
    batcher.submit(jobs[2])
    assert jobs[2].rows.result(SECONDS).shape == (1, 2)
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


def run(model, *args):
    command = [sys.executable, "-m", "fastattn", "serve", "--model", *map(str, (model, *args))]
    return subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(folder, number, tmp_path):
    (tmp_path / "link").symlink_to(folder)  # what the model is called
    process = run(tmp_path / "link", "--port", 0)
    port = int(process.stdout.readline().rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/v1/embeddings", '{"input": "the cat", "model": "link"}')
    answer = connection.getresponse()
    assert (answer.status, answer.read()[:1]) == (200, b"{")
    offers = {"Connection": "Upgrade", "Upgrade": "websocket"}  # no reason to log anything
    connection.request("GET", "/health", headers=offers)
    assert connection.getresponse().status == 200
    process.send_signal(number)
    assert (process.wait(SECONDS), process.stderr.read()) == (0, "")
    process.stdout.close()
    process.stderr.close()
    connection.close()


def test_one_way_of_several_is_served(tmp_path):
    write_router(tmp_path)
    process = run(tmp_path, "--port", 0, "--task", "query")
    port = int(process.stdout.readline().rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/embed", '{"inputs": "the cat", "normalize": false}')
    vectors = json.loads(connection.getresponse().read())
    connection.close()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=SECONDS) == ("", "")
    ways = [models.load(tmp_path).encode(["the cat"], task=task) for task in ("query", "document")]
    np.testing.assert_array_equal(np.float32(vectors), ways[0])
    assert (ways[0] != ways[1]).any()


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


def test_half_a_request_is_waited_for_as_long_as_the_command_says(folder):
    process = run(folder, "--port", 0, "--timeout", 1, "--connections", 1)
    port = int(process.stdout.readline().rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), SECONDS) as half:
        half.sendall(HALF)
        with socket.create_connection(("127.0.0.1", port), SECONDS) as other:
            assert other.makefile("rb").read().startswith(b"HTTP/1.1 503 ")
        assert half.makefile("rb").read().startswith(b"HTTP/1.1 408 ")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")


def test_a_client_that_reads_nothing_does_not_hinder_the_end():
    async def forever(*args):
        await asyncio.Event().wait()

    async def ended():
        limited = _Limited(forever, 1, _Measured(None))
        task = asyncio.create_task(limited({"type": "http", "headers": []}, None, forever))
        await asyncio.sleep(0)
        task.cancel()  # what uvicorn does after --grace
        return bool((await asyncio.wait([task], timeout=2))[0])

    assert asyncio.run(ended())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "error: nowhere is no folder"),
        (["{folder}", "--port", "70000"], "error: 127.0.0.1:70000: "),
        (["{folder}", "--name", ""], "error: --name is ''; expected what requests call the model"),
        (["{folder}", "--task", "query"], "task is 'query'; expected None: this model has one way"),
        (["{folder}", "--queue-texts", "0"], "--queue-texts: expected an integer of at least 1"),
    ],
)
def test_what_is_wrong_at_the_start(folder, args, said):
    process = run(*(str(folder) if arg == "{folder}" else arg for arg in args))
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode
    assert said in errors
