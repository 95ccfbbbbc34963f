"""A model's vectors over HTTP, in the shape of OpenAI's `/v1/embeddings`.

    pip install -e '.[models,serve]'
    python examples/serve.py all-MiniLM-L6-v2        # the model's folder; on http://127.0.0.1:8000
    curl localhost:8000/v1/embeddings --json '{"input": ["a text", "another"]}'

One thread computes. While it does, requests wait, and those that wait go through the model together, without
padding. So nobody waits for a batch to fill up. A client that goes takes its request along. See
docs/howto/serve.md.
"""

import argparse
import asyncio
import base64
import json
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.exceptions import HTTPException as AnyHTTPException

from fastattn import models

MOST_TEXTS = 2048  # of one request, as at OpenAI
QUEUE_TEXTS = 2 * MOST_TEXTS  # that wait, of all requests
MOST_BYTES = 1 << 22  # of its body
SHORT = 1 << 13  # characters that are tokenized in less time than a thread takes to be asked
CHARACTERS = 64  # of a text at most, for each token that the model takes: more would be tokenized for seconds
SPACE = " \t\r\n"
CUT = "(a server that is started with --truncate cuts texts)"
TYPES = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class EmbeddingsRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Any
    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None  # OpenAI's clients may send it; nothing is done with it

    @field_validator("input")
    @classmethod
    def texts(cls, value: Any) -> list[str]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_TEXTS:
            came = f"a list of {len(texts)}" if isinstance(texts, list) else type(texts).__name__
            raise ValueError(f"got {came}; expected a text, or a list of 1 to {MOST_TEXTS} texts")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(
                    f"item {i} is {type(text).__name__}; expected a text (token ids are not taken)"
                )
            if not text:
                raise ValueError(f"item {i} is empty; expected at least one character")
            try:
                text.encode()
            except UnicodeEncodeError:
                came = f"item {i} has half of a surrogate pair"
                raise ValueError(f"{came}; expected whole characters") from None
        return texts

    @field_validator("encoding_format")
    @classmethod
    def known(cls, value: str) -> str:
        if value not in ("float", "base64"):
            raise ValueError(f"got {value[:40]!r}; expected 'float' or 'base64'")
        return value


@dataclass
class Job:
    """The texts of one request, how many tokens each has, and where their vectors go."""

    texts: list[str]
    tokens: list[int]
    vectors: "Future[np.ndarray]" = field(default_factory=Future)
    parts: list[np.ndarray] = field(default_factory=list)
    taken: int = 0  # texts that are computed, or are being so


class Batcher:
    """The thread that computes. It takes texts that wait, in order, up to `batch_tokens` at a time.

    A large job takes several calls. Between them it is dropped if nobody waits for it any more.
    """

    def __init__(self, encode, batch_tokens):
        self.encode, self.batch_tokens = encode, batch_tokens
        self.calls = self.texts = 0
        self._jobs, self._closed, self._changed = deque(), False, threading.Condition()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def submit(self, job):
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self):
        """Compute what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _batch(self):
        """The texts of the next call, as (job, its texts); None when no more will come."""
        batch, tokens = [], 0
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            while self._jobs:
                job = self._jobs[0]
                if not job.vectors.done():  # neither given up nor failed
                    begin = job.taken
                    while job.taken < len(job.texts):
                        if tokens and tokens + job.tokens[job.taken] > self.batch_tokens:
                            break
                        tokens += job.tokens[job.taken]
                        job.taken += 1
                    if begin < job.taken:
                        batch.append((job, job.texts[begin : job.taken]))
                    if job.taken < len(job.texts):
                        break
                self._jobs.popleft()
        return batch

    def _work(self):
        while (batch := self._batch()) is not None:
            if batch:
                self._compute(batch)

    def _compute(self, batch):
        texts = [text for _, part in batch for text in part]
        self.calls, self.texts = self.calls + 1, self.texts + len(texts)
        try:
            vectors = self.encode(texts)
        except Exception as error:
            for job, _ in batch:
                if job.vectors.set_running_or_notify_cancel():
                    job.vectors.set_exception(error)
            return
        done = 0
        for job, part in batch:
            job.parts.append(vectors[done : done + len(part)])
            done += len(part)
            if job.taken == len(job.texts) and job.vectors.set_running_or_notify_cancel():
                job.vectors.set_result(np.concatenate(job.parts))


class Service:
    """A model, its batcher, and how many texts have not been answered yet."""

    def __init__(self, model, name, *, batch_tokens=768, queue_texts=QUEUE_TEXTS, truncate=False):
        self.model, self.name, self.truncate = model, name, truncate
        self.queue_texts, self.waiting = queue_texts, 0
        self.prompt = model.prompts[model.default_prompt_name] if model.default_prompt_name else ""
        around = (self.prompt + text for text in ("a", f"{SPACE}a{SPACE}"))
        bare, spaced = (encoding.ids for encoding in model.text.encodings(around))
        self.dropped = SPACE if bare == spaced else ""  # by the tokenizer, at both ends of a text
        self.encode(["warm"])
        self.batcher = Batcher(self.encode, batch_tokens)

    def encode(self, texts):
        return self.model.encode(texts, normalize_embeddings=True)  # as OpenAI's vectors are

    def bounded(self, texts):
        """The texts, those of too many characters cut; an error if they may not be."""
        tokens = self.model.max_seq_length
        most = CHARACTERS * (tokens or MOST_BYTES)
        texts = [text.strip(self.dropped) if len(text) > most else text for text in texts]
        for i, text in enumerate(texts):
            if len(text) > most and not self.truncate:
                expected = f"expected at most {tokens} tokens, and {CHARACTERS} characters for each"
                raise HTTPException(400, (f"item {i} has {len(text)} characters; {expected} {CUT}", "input"))
        left = tokens and self.model.text.tokenizer.truncation["direction"] == "left"
        return [text[-most:] if left else text[:most] for text in texts]

    def count(self, texts, given_up):
        """Tokens of each text; an error if one would be cut. It ends early where `given_up` is set."""
        tokens = []
        for i, encoding in enumerate(self.model.text.encodings(self.prompt + text for text in texts)):
            if given_up.is_set():
                break
            if encoding.overflowing and not self.truncate:
                special = sum(encoding.special_tokens_mask)
                parts = (encoding, *encoding.overflowing)
                came = special + sum(len(part.ids) - special for part in parts)
                expected = f"expected at most {self.model.max_seq_length}"
                raise HTTPException(400, (f"item {i} has {came} tokens; {expected} {CUT}", "input"))
            tokens.append(len(encoding.ids))
        return tokens

    async def vectors(self, texts):
        """Vectors (n, features) of the texts, and their number of tokens. Cancelled, it computes no more."""
        if len(texts) > self.queue_texts:
            raise HTTPException(400, (f"{len(texts)} texts; expected at most {self.queue_texts}", "input"))
        if self.waiting + len(texts) > self.queue_texts:
            came = f"{self.waiting} texts wait, and {len(texts)} more came"
            raise HTTPException(
                429,
                (f"{came}; expected at most {self.queue_texts} in all: try again later", None),
                {"Retry-After": "1"},
            )
        texts, given_up = self.bounded(texts), threading.Event()
        self.waiting += len(texts)  # only the event loop's thread counts
        try:
            try:
                if sum(map(len, texts)) <= SHORT:
                    tokens = self.count(texts, given_up)
                else:
                    tokens = await asyncio.to_thread(self.count, texts, given_up)
            except (TypeError, ValueError) as error:
                raise HTTPException(400, (str(error), "input")) from error
            job = Job(texts, tokens)
            self.batcher.submit(job)
            return await asyncio.wrap_future(job.vectors), sum(tokens)
        finally:
            given_up.set()
            self.waiting -= len(texts)


async def unless_gone(request, work):
    """The result of the coroutine `work`; None, and `work` is cancelled, once the client has gone."""

    async def gone():
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(each) for each in (work, gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


class Limited:
    """Answers 413 to bodies of more than `most` bytes, before they are all read; 503 to what is cancelled."""

    def __init__(self, app, most):
        self.app, self.most = app, most

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        come = 0

        async def counted():
            nonlocal come
            message = await receive()
            come += len(message.get("body", b""))
            if come > self.most:
                raise HTTPException(
                    413, (f"a body of more than {self.most} bytes; expected at most those", None)
                )
            return message

        try:
            await self.app(scope, counted, send)
        except asyncio.CancelledError:  # uvicorn waits no longer: the seconds of --grace are over
            late = "the server has been stopped before this was answered; try another one"
            said = answer(503, late, None)(scope, receive, send).__await__()
            next(said, None)  # one step, all it takes unless the client reads nothing: that is not waited for
            said.close()


def make_app(service, most_bytes=MOST_BYTES):
    @asynccontextmanager
    async def lifespan(app):
        yield
        await asyncio.to_thread(service.batcher.close)  # every request has its answer by now

    app = FastAPI(title="fastattn embeddings", lifespan=lifespan)
    app.add_middleware(Limited, most=most_bytes)
    started = int(time.time())

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        if body.model not in (None, service.name):
            came = f"there is no model {body.model[:80]!r}"
            expected = f"{service.name!r}, or what the server's --name says"
            raise HTTPException(404, (f"{came}; expected {expected}", "model"))
        features = service.model.get_sentence_embedding_dimension()
        dimensions = body.dimensions or features
        if dimensions > features:
            raise HTTPException(400, (f"got {dimensions}; expected 1 to {features}", "dimensions"))
        found = await unless_gone(request, service.vectors(body.input))
        if found is None:
            return Response(status_code=499)  # as proxies log it: there is nobody to read it
        vectors, tokens = found
        if dimensions < features:
            vectors = vectors[:, :dimensions]
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        vectors = np.ascontiguousarray(vectors, "<f4")
        if body.encoding_format == "base64":
            values = [base64.b64encode(vector).decode() for vector in vectors]
        else:
            values = vectors.tolist()
        data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": service.name, "usage": usage}
        return Response(json.dumps(answer, separators=(",", ":")), media_type="application/json")

    @app.get("/v1/models")
    async def names() -> dict[str, Any]:
        model = {"id": service.name, "object": "model", "created": started, "owned_by": "fastattn"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> Response:
        said = {
            "status": "ok",
            "waiting": service.waiting,
            "calls": service.batcher.calls,
            "texts": service.batcher.texts,
        }
        return Response(json.dumps(said), media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [str(part)[:80] for part in first["loc"][1:]]
        name = where[0] if where and first["type"] != "json_invalid" else None
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = f"there is no such field; expected {', '.join(EmbeddingsRequest.model_fields)}"
        return answer(400, f"{name or 'the body'}: {text}", name)

    @app.exception_handler(AnyHTTPException)
    async def refused(request: Request, error: AnyHTTPException) -> Response:
        text, name = error.detail if isinstance(error.detail, tuple) else (error.detail, None)
        return answer(error.status_code, f"{name}: {text}" if name else text, name, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return answer(500, f"the model failed: {type(error).__name__}: {error}", None)

    return app


def answer(status, message, name, headers=None):
    """An error in OpenAI's shape; `name` is the field that is wrong."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": name, "code": None}
    return Response(json.dumps({"error": error}), status, headers, media_type="application/json")


def arguments(argv=None):
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--name", help="what requests call it; by default the folder's name")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--weights-dtype", help="how weights are kept, such as int8")
    parser.add_argument("--activations", help="int8: inputs of the linear maps are rounded, too")
    parser.add_argument("--batch-tokens", type=int, default=768, help="of a call at most; 1: a text a call")
    parser.add_argument("--queue-texts", type=int, default=QUEUE_TEXTS, help="that wait at most; 429 to more")
    parser.add_argument("--grace", type=int, default=20, help="seconds that a stop waits for requests")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long; otherwise 400")
    args = parser.parse_args(argv)
    for name in ("batch_tokens", "queue_texts", "grace"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected at least 1")
    return args


def main(argv=None):
    args = arguments(argv)
    try:
        model = models.load(args.model, weights_dtype=args.weights_dtype, activations=args.activations)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if not isinstance(model, models.Encoder):
        raise SystemExit(
            f"error: {args.model} is {model!r}; expected an encoder, which makes vectors of texts"
        )
    service = Service(
        model,
        args.name or args.model.resolve().name,
        batch_tokens=args.batch_tokens,
        queue_texts=args.queue_texts,
        truncate=args.truncate,
    )
    try:
        socket_ = socket.create_server((args.host, args.port))
    except (OSError, OverflowError) as error:
        raise SystemExit(f"error: {args.host}:{args.port}: {error}") from None
    # Without it an answer of two packets waits 40 ms for the client's word that the first one came.
    socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(f"http://{args.host}:{socket_.getsockname()[1]}", flush=True)
    # A signal ends it: no connection is accepted from then on, and requests that have come are answered. A
    # client that never ends its request, or reads no answer, is waited for no longer than --grace. Then
    # uvicorn raises the signal again, and these handlers make it a good end.
    for signal_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_, lambda number, frame: sys.exit(0))
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=args.grace,
    )
    uvicorn.Server(config).run(sockets=[socket_])


if __name__ == "__main__":
    main()
