"""The HTTP of a served model: addresses, answers, errors, measurements."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fastattn import ops
from fastattn._args.values import short
from fastattn._version import __version__
from fastattn.models import CrossEncoder, Encoder
from fastattn.models._routes import model_of
from fastattn.models._vectors import unit
from fastattn.serve._bodies import Body, Embed, Embeddings, Predict, Rerank, Similarity
from fastattn.serve._service import MOST_ITEMS, Limits, Refused, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping

    from fastattn._args.types import Array
    from fastattn.serve._batcher import Item
    from fastattn.serve._service import Reason

    T = TypeVar("T")
    B = TypeVar("B", bound=Body)

_OPENAI = "/v1/"
_OBJECT = re.compile(rb'"inputs"\s*:\s*{')  # of no text: there the quotes would be escaped
_SHORT = 1 << 14  # bytes of a body, or numbers of an answer, that take less than a millisecond
# Statuses and types of errors, as OpenAI and text-embeddings-inference have them.
_STATUSES: dict[Reason, tuple[int, int]] = {
    "invalid": (400, 422),
    "unknown": (404, 404),
    "long": (400, 413),
    "large": (400, 413),
    "busy": (429, 429),
    "failed": (500, 424),
    "stopped": (503, 503),
}
_OPENAI_TYPES = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_TEI_TYPES = {424: "Backend", 429: "Overloaded", 503: "Unhealthy"}


def make_app(
    model: Encoder | CrossEncoder,
    name: str = "model",
    limits: Limits | None = None,
    task: str | None = None,
    prompt_name: str | None = None,
) -> FastAPI:
    """Make the application that serves a model, for uvicorn or another ASGI server.

    Parameters
    ----------
    model : Encoder or CrossEncoder
        What `fastattn.models.load` returns. One thread computes with it.
    name : str, default "model"
        What requests call it.
    limits : Limits, optional
        Bounds of requests.
    task : str, optional
        Of a model that has several ways from a text to its vector, as `encode` takes it: the one served.
    prompt_name : str, optional
        The prompt of requests that name none, by default the model's own.

    Returns
    -------
    fastapi.FastAPI

    Raises
    ------
    TypeError
        If `model` is another one.
    ValueError
        If `model` has several ways and `task` is None, if it has no such task, or no such prompt.
    """
    if not isinstance(model, (Encoder, CrossEncoder)):
        raise TypeError(f"make_app(): model is {short(model)}; expected an Encoder or a CrossEncoder")
    routes = getattr(model, "routes", None)
    if routes is not None and task is None:  # nothing in a request would say which one
        came = (
            f"task is None, and model has a way of its own for each, {', '.join(map(short, routes.models))}"
        )
        raise ValueError(f"make_app(): {came}; expected one of them, as requests name none")
    if task is not None and isinstance(model, CrossEncoder):
        raise ValueError(f"make_app(): task is {short(task)}; expected None for a CrossEncoder")
    try:
        model = model if task is None else model_of(model, task)
        service = Service(model, name, limits or Limits(), prompt_name)
    except (Refused, ValueError) as error:
        raise ValueError(f"make_app(): {str(error).removeprefix('(): ')}") from error
    return app_of(service)


def app_of(service: Service) -> FastAPI:
    """The application of a service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.close)  # every request has its answer by now

    app = FastAPI(title="fastattn", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.service = service
    measured = _Measured(service)
    app.add_middleware(_Limited, most=service.limits.body_bytes, measured=measured)
    known = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "fastattn"}
    model = service.model

    def served(name: str) -> None:
        if name != service.name:
            came = f"there is no model {name[:80]!r}"
            raise Refused("unknown", f"{came}; expected {service.name!r}, or what --name says", "model")

    def encoder(address: str) -> Encoder:
        if isinstance(model, Encoder):
            return model
        expected = "an encoder, or POST /rerank or /predict"
        raise Refused("unknown", f"{address}: the model scores texts and pairs; expected {expected}")

    def cross_encoder(address: str) -> CrossEncoder:
        if isinstance(model, CrossEncoder):
            return model
        expected = "a cross-encoder, or POST /embed or /v1/embeddings"
        raise Refused("unknown", f"{address}: the model makes vectors of texts; expected {expected}")

    def width(dimensions: int | None, encoder: Encoder) -> int:
        features = encoder.get_sentence_embedding_dimension()
        if (dimensions or features) > features:
            raise Refused("invalid", f"got {dimensions}; expected 1 to {features}", "dimensions")
        return dimensions or features

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await _read(Embeddings, request)
        if body.model is not None:
            served(body.model)
        features = width(body.dimensions, encoder("/v1/embeddings"))
        rows, tokens = await _unless_gone(request, service.rows(body.input, service.prompt, None, "input"))

        def answer() -> dict[str, Any]:
            vectors = np.ascontiguousarray(_cut(unit(rows), features), "<f4")
            if body.encoding_format == "base64":
                values = [base64.b64encode(vector).decode() for vector in vectors]
            else:
                values = vectors.tolist()
            data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return {"object": "list", "data": data, "model": service.name, "usage": usage}

        return await _written(answer, rows.size)

    @app.post("/embed")
    async def embed(request: Request) -> Response:
        body = await _read(Embed, request)
        features = width(body.dimensions, encoder(request.url.path))
        prompt = service.prompt_of(body.prompt_name)
        rows, _ = await _unless_gone(request, service.rows(body.inputs, prompt, body.truncate, "inputs"))
        vectors = rows[:, :features]
        return await _written(lambda: (unit(vectors) if body.normalize else vectors).tolist(), vectors.size)

    @app.post("/similarity")
    async def similarity(request: Request) -> Response:
        body = await _read(Similarity, request)
        encoder(request.url.path)
        inputs, asked = body.inputs, body.parameters
        prompt, texts = service.prompt_of(asked.prompt_name), [inputs.source_sentence, *inputs.sentences]
        rows, _ = await _unless_gone(request, service.rows(texts, prompt, asked.truncate, "inputs"))
        vectors = unit(rows)
        # Not a product of matrices: its bits depend on how many rows there are.
        return _json((vectors[1:] * vectors[0]).sum(axis=1).tolist())

    @app.post("/")  # as huggingface_hub's InferenceClient asks for features and for similarities
    async def root(request: Request) -> Response:
        return await (similarity if _OBJECT.search(await request.body()) else embed)(request)

    @app.post("/rerank")
    async def rerank(request: Request) -> Response:
        body = await _read(Rerank, request)
        labels = cross_encoder("/rerank").num_labels
        if labels != 1:
            raise Refused(
                "unknown", f"/rerank: the model has {labels} labels; expected one, or POST /predict"
            )
        pairs: list[Item] = [(body.query, text) for text in body.texts]
        rows, _ = await _unless_gone(request, service.rows(pairs, service.prompt, body.truncate, "texts"))
        scores = _probabilities(rows, body.raw_scores)[:, 0].tolist()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        texts = [{"text": body.texts[i]} if body.return_text else {} for i in order]
        ranked = zip(order, texts, strict=True)
        return _json([{"index": i, "score": scores[i], **text} for i, text in ranked])

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        body = await _read(Predict, request)
        labels = cross_encoder("/predict").labels
        one, pairs = body.inputs
        rows, _ = await _unless_gone(request, service.rows(pairs, service.prompt, body.truncate, "inputs"))
        answers = []
        for scores in _probabilities(rows, body.raw_scores).tolist():
            scored = sorted(zip(scores, labels, strict=True), key=lambda each: each[0], reverse=True)
            answers.append([{"score": score, "label": label} for score, label in scored])
        return _json(answers[0] if one else answers)

    @app.get("/v1/models")
    async def names() -> Response:
        return _json({"object": "list", "data": [known]})

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> Response:
        served(name)
        return _json(known)

    @app.get("/info")
    async def info() -> Response:
        kind: dict[str, Any] = {"embedding": {"pooling": "of the model's files"}}
        if isinstance(model, CrossEncoder):
            label2id = {label: i for i, label in enumerate(model.labels)}
            name = "reranker" if model.num_labels == 1 else "classifier"
            kind = {name: {"id2label": dict(enumerate(model.labels)), "label2id": label2id}}
        limits = service.limits
        return _json(
            {
                "model_id": service.name,
                "model_dtype": str(model.dtype) if isinstance(model, Encoder) else str(model.encoder.dtype),
                "model_type": kind,
                "max_input_length": service.most_tokens,
                "max_batch_tokens": limits.batch_tokens,
                "max_client_batch_size": min(MOST_ITEMS, limits.queue_texts),
                "auto_truncate": limits.truncate,
                "version": __version__,
            }
        )

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        batcher = service.batcher
        if not batcher.works:
            raise Refused("stopped", "nothing is computed any more; start the server again")
        said = {"waiting": service.waiting, "calls": batcher.calls, "texts": batcher.items}
        return _json({"status": "ok", **said})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(measured.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: ValidationError) -> Response:
        first = error.errors(include_url=False, include_input=False)[0]
        where = [str(part)[:80] for part in first["loc"]]
        name = first.get("ctx", {}).get("name")
        if where and first["type"] not in ("json_invalid", "no_such_field"):
            name = where[0]
        text = first["msg"].removeprefix("Value error, ")
        return _error(request.url.path, Refused("invalid", text if name else f"the body: {text}", name))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return _error(request.url.path, error)

    @app.exception_handler(ClientDisconnect)  # in the middle of its request
    @app.exception_handler(_Gone)
    async def nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # as proxies log it: there is nobody to read it

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return _error(
            request.url.path, Refused("invalid", str(error.detail)), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        message = f"the model failed: {type(error).__name__}: {error}"
        return _error(request.url.path, Refused("failed", message))

    return app


def _cut(vectors: Array, features: int) -> Array:
    """The first features of vectors of length 1, at length 1 again."""
    return vectors if features == vectors.shape[1] else unit(vectors[:, :features])


def _probabilities(logits: Array, raw: bool) -> Array:
    """Scores of logits (n, labels): a sigmoid of one label, else a softmax; if `raw` themselves."""
    if raw:
        return logits
    return ops.activate(logits, "sigmoid") if logits.shape[1] == 1 else ops.softmax(logits)


async def _read(kind: type[B], request: Request) -> B:
    """The body of a request; a long one is read while others are answered."""
    body = await request.body()
    if len(body) <= _SHORT:
        return kind.model_validate_json(body)
    return await asyncio.to_thread(kind.model_validate_json, body)


async def _written(make: Callable[[], Any], numbers: int) -> Response:
    """The answer that `make` makes, of so many numbers: many are written while others are answered."""

    def text() -> str:
        return json.dumps(make(), separators=(",", ":"))

    said = text() if numbers <= _SHORT else await asyncio.to_thread(text)
    return Response(said, media_type="application/json")


def _json(content: Any) -> Response:
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def _error(
    path: str, error: Refused, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error in the shape of those whose address it is."""
    message = f"{error.name}: {error}" if error.name else str(error)
    headers = {"Retry-After": "1"} if error.reason == "busy" else headers
    status = status or _STATUSES[error.reason][0 if path.startswith(_OPENAI) else 1]
    if path.startswith(_OPENAI):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        content: dict[str, Any] = {"message": message, "type": kind, "param": error.name, "code": None}
        content = {"error": content}
    else:
        content = {"error": message, "error_type": _TEI_TYPES.get(status, "Validation")}
    return Response(json.dumps(content), status, headers, media_type="application/json")


class _Gone(Exception):
    """The client waits no longer."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine `work`; `_Gone`, and `work` is cancelled, once the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()


class _Measured:
    """Measurements for /metrics: requests and seconds, by address and status; texts, tokens and calls."""

    def __init__(self, service: Service):
        self._service, self.registry = service, CollectorRegistry()
        names, to = ("path", "status"), self.registry
        self.requests = Counter("fastattn_requests", "Requests that were answered.", names, registry=to)
        self.seconds = Histogram(
            "fastattn_request_seconds", "From a request to its answer.", ("path",), registry=to
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """The numbers that the service keeps."""
        service, batcher = self._service, self._service.batcher
        yield GaugeMetricFamily("fastattn_waiting", "Texts that wait for an answer.", service.waiting)
        yield CounterMetricFamily("fastattn_texts", "Texts and pairs that were computed.", batcher.items)
        yield CounterMetricFamily("fastattn_tokens", "Tokens of those that were answered.", service.tokens)
        yield CounterMetricFamily("fastattn_calls", "Calls of the model.", batcher.calls)


class _Limited:
    """Answers 413 to bodies of more than `most` bytes, before they are read; 503 to what is cancelled."""

    def __init__(self, app: Any, most: int, measured: _Measured):
        self.app, self.most, self.measured = app, most, measured

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        come, status, begin = 0, 499, time.perf_counter()
        declared = int(dict(scope["headers"]).get(b"content-length", 0))

        async def counted() -> Any:
            nonlocal come
            message = await receive() if declared <= self.most else {}
            come += len(message.get("body", b""))
            if max(come, declared) > self.most:
                raise HTTPException(413, f"a body of more than {self.most} bytes; expected at most those")
            return message

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, counted, sent)
        except asyncio.CancelledError:  # uvicorn waits no longer: the seconds of --grace are over
            status = 503
            late = Refused("stopped", "the server has been stopped before this was answered; try another one")
            said = _error(scope.get("path", "/"), late)(scope, receive, send).__await__()
            next(said, None)  # one step, all it takes unless the client reads nothing: that is not waited for
            said.close()
        finally:
            route = scope.get("route")  # None: an address that there is not, of which there may be any number
            path = "other" if route is None else route.path
            self.measured.requests.labels(path, str(status)).inc()
            self.measured.seconds.labels(path).observe(time.perf_counter() - begin)
