"""Serve an encoder or a cross-encoder over HTTP, as OpenAI and text-embeddings-inference (TEI) do.

    pip install -e '.[models]' fastapi uvicorn
    python examples/serve.py --model all-MiniLM-L6-v2  # a model's folder; on http://127.0.0.1:8000
    curl localhost:8000/v1/embeddings -d '{"input": ["a text", "another"]}'

Requests of all clients that wait are computed in one call of the model. docs/howto/serve.md says more.
"""

import argparse
import asyncio
import base64
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, FailFast, Field, ValidationError
from starlette.requests import ClientDisconnect

from fastattn import models, ops

MOST_TEXTS = 2048  # in a request, as at OpenAI
QUEUE_TEXTS = 4096  # of all requests that wait
PART_TEXTS = 64  # of one request in a call of the model: others have their turn before the rest
BODY_BYTES = 1 << 22
# Not httptools, which drops the body of a request that offers another protocol, such as h2c.
UVICORN = {"http": "h11", "log_level": "error", "limit_concurrency": 512, "timeout_graceful_shutdown": 20}
# Statuses of errors under /v1, as OpenAI's, and elsewhere, as TEI's.
INVALID, LONG, LARGE = (400, 422), (400, 413), (413, 413)
UNKNOWN, BUSY, FAILED = (404, 404), (429, 429), (500, 424)

one_as_list = BeforeValidator(lambda x: [x] if isinstance(x, str) else x)
several = Field(min_length=1, max_length=MOST_TEXTS)
Full = Annotated[str, Field(min_length=1)]
Pair = Annotated[list[str], Field(min_length=1, max_length=2)]


class Embeddings(BaseModel, strict=True, extra="allow"):
    input: Annotated[list[Full], FailFast(), several, one_as_list]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None  # OpenAI's clients may send it; nothing is done with it


class Embed(BaseModel, strict=True, extra="allow"):
    inputs: Annotated[list[Full], FailFast(), several, one_as_list]
    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    truncate: bool | None = None


class Rerank(BaseModel, strict=True, extra="allow"):
    query: str
    texts: Annotated[list[str], FailFast(), several]
    return_text: bool = False
    raw_scores: bool = False
    truncate: bool | None = None


class Predict(BaseModel, strict=True, extra="allow"):
    inputs: Annotated[Pair | Annotated[list[Pair], several], one_as_list]
    raw_scores: bool = False
    truncate: bool | None = None


class Refused(Exception):  # a request that is not computed
    def __init__(self, statuses, message, field=None):
        super().__init__(f"{field}: {message}" if field else message)
        self.statuses, self.field = statuses, field


async def read(kind, request):  # and check it
    text = bytearray()
    async for piece in request.stream():
        text += piece
        if len(text) > BODY_BYTES:
            raise Refused(LARGE, f"a body of more than {BODY_BYTES} bytes; expected at most those")
    try:
        body = kind.model_validate_json(text)
    except ValidationError as error:
        *_, last = error.errors(include_url=False, include_input=False)
        field = last["loc"][0] if last["loc"] else None
        items = (f"item {x}: " for x in last["loc"] if isinstance(x, int))
        raise Refused(INVALID, next(items, "" if field else "the body: ") + last["msg"], field) from None
    for name in body.model_extra:  # the first: to list all may take seconds
        raise Refused(INVALID, f"there is no such field; expected {', '.join(kind.model_fields)}", name[:80])
    return body


class Batches:
    """Items of requests wait here, with the options of their call of the model."""

    def __init__(self, model):
        self.model, self.waiting, self.jobs = model, 0, deque()
        self.thread = ThreadPoolExecutor(1)  # one: each would start its own OpenMP threads
        self.compute([("warm",)], {})

    def compute(self, items, options):
        if isinstance(self.model, models.Encoder):
            return self.model.encode([text for (text,) in items], **options)
        return self.model.predict(items, activation_fn=np.asarray, **options).reshape(len(items), -1)

    def work(self):
        """Make one call of the model for all that waits, up to the first with other options."""
        batch = []
        while self.jobs and (not batch or self.jobs[0][1] == batch[0][1]):
            job = self.jobs.popleft()
            if job[2].set_running_or_notify_cancel():
                batch.append(job)
        try:
            rows = batch and self.compute([item for items, *_ in batch for item in items], batch[0][1])
            for items, _, future in batch:
                future.set_result(rows[: len(items)])
                rows = rows[len(items) :]
        except Exception as error:
            for *_, future in batch:
                future.set_exception(error)

    async def rows(self, request, field, items, truncate, **options):
        """The rows of all items, and their number of tokens. Nothing is computed once the client has gone."""
        if self.waiting + len(items) > QUEUE_TEXTS:
            raise Refused(BUSY, f"{self.waiting} texts wait, of at most {QUEUE_TEXTS}: try again later")
        self.waiting += len(items)
        gone = asyncio.ensure_future(request.receive())  # the body is there: what comes is the end
        try:
            tokens = await asyncio.to_thread(self.tokens, field, items, truncate, options.get("prompt_name"))
            parts = []
            for begin in range(0, len(items), PART_TEXTS):
                self.jobs.append((items[begin : begin + PART_TEXTS], options, future := Future()))
                self.thread.submit(self.work)  # which finds nothing where an earlier one has taken all
                part = asyncio.wrap_future(future)
                await asyncio.wait((part, gone), return_when=asyncio.FIRST_COMPLETED)
                if part.cancel():  # the client has gone
                    raise ClientDisconnect
                parts.append(part.result())
            return np.concatenate(parts), tokens
        finally:
            gone.cancel()
            self.waiting -= len(items)

    def tokens(self, field, items, truncate, prompt_name):
        """The number of tokens; an error if an item has more than the model takes, unless it may be cut."""
        encoder, text, count = getattr(self.model, "encoder", self.model), self.model.text, 0
        prompt = encoder.prompts.get(prompt_name or encoder.default_prompt_name, "")
        template, limit = getattr(self.model, "template", None), text.tokenizer.truncation
        join = template.render if template else lambda p, x: (p + x[0], x[1]) if x[1:] else p + x[0]
        inputs = (join(prompt, item) for item in items)
        for i, encoding in enumerate(text.encodings(inputs, text.special and not template)):
            if encoding.overflowing and not truncate:
                raise Refused(LONG, f"item {i} has more than {limit['max_length']} tokens", field)
            count += len(encoding.ids)
        return count


def make_app(model, name):  # requests may call the model so
    if not isinstance(model, models.Encoder | models.CrossEncoder) or getattr(model, "routes", None):
        raise TypeError(f"{name} is {model!r}; expected an encoder without tasks, or a cross-encoder")
    app, batches = FastAPI(openapi_url=None), Batches(model)
    app.state.batches = batches

    async def vectors(request, field, body):
        if not isinstance(model, models.Encoder):
            raise Refused(UNKNOWN, "the model scores texts and pairs; expected POST /rerank or /predict")
        if (body.dimensions or 1) > (most := model.get_sentence_embedding_dimension()):
            raise Refused(INVALID, f"got {body.dimensions}; expected 1 to {most}", "dimensions")
        if body.prompt_name not in (None, *model.prompts):
            raise Refused(INVALID, f"expected one of {sorted(model.prompts)}", "prompt_name")
        options = {"normalize_embeddings": body.normalize, "truncate_dim": body.dimensions}
        options["prompt_name"] = body.prompt_name
        return await batches.rows(request, field, [(x,) for x in body.inputs], body.truncate, **options)

    async def scores(request, field, items, body, labels=None):
        if isinstance(model, models.Encoder):
            raise Refused(UNKNOWN, "the model makes vectors; expected POST /embed or /v1/embeddings")
        if model.num_labels != (labels or model.num_labels):
            raise Refused(UNKNOWN, f"the model has {model.num_labels} labels; expected POST /predict")
        rows, _ = await batches.rows(request, field, [*map(tuple, items)], body.truncate)
        if not body.raw_scores:
            rows = ops.activate(rows, "sigmoid") if model.num_labels == 1 else ops.softmax(rows)
        return rows.tolist()

    @app.post("/v1/embeddings")
    async def embeddings(request: Request):
        body = await read(Embeddings, request)
        if body.model not in (None, name):
            raise Refused(UNKNOWN, f"there is no model {body.model[:80]!r}; expected {name!r}", "model")
        rows, tokens = await vectors(request, "input", Embed(inputs=body.input, dimensions=body.dimensions))
        values = rows.tolist()
        if body.encoding_format == "base64":
            values = [base64.b64encode(row).decode() for row in np.ascontiguousarray(rows, "<f4")]
        data = [{"object": "embedding", "index": i, "embedding": x} for i, x in enumerate(values)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    @app.post("/embed")
    async def embed(request: Request):
        rows, _ = await vectors(request, "inputs", await read(Embed, request))
        return JSONResponse(rows.tolist())

    @app.post("/rerank")
    async def rerank(request: Request):
        body = await read(Rerank, request)
        found = await scores(request, "texts", [(body.query, text) for text in body.texts], body, labels=1)
        ranked = [{"index": i, "score": score} for i, (score,) in enumerate(found)]
        for each in ranked if body.return_text else ():
            each["text"] = body.texts[each["index"]]
        return JSONResponse(sorted(ranked, key=lambda x: x["score"], reverse=True))

    @app.post("/predict")
    async def predict(request: Request):
        body = await read(Predict, request)
        one = isinstance(body.inputs[0], str)
        rows = await scores(request, "inputs", [body.inputs] if one else body.inputs, body)
        labelled = [[{"score": x, "label": model.labels[i]} for i, x in enumerate(row)] for row in rows]
        answers = [sorted(each, key=lambda x: x["score"], reverse=True) for each in labelled]
        return JSONResponse(answers[0] if one else answers)

    @app.get("/health")
    async def health():
        return {"status": "ok", "waiting": batches.waiting}

    async def refused(request, error):
        openai = request.url.path.startswith("/v1/")
        if not isinstance(error, Refused):
            error = Refused(FAILED, f"the model failed: {type(error).__name__}: {error}")
        status, message = error.statuses[not openai], str(error)
        said = {"error": message, "error_type": {424: "Backend", 429: "Overloaded"}.get(status, "Validation")}
        if openai:
            kind = "server_error" if status == 500 else "invalid_request_error"
            said = {"error": {"message": message, "type": kind, "param": error.field, "code": None}}
        return JSONResponse(said, status, {"Retry-After": "1"} if status == 429 else None)

    for kind in (Refused, ClientDisconnect, Exception):
        app.add_exception_handler(kind, refused)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="its folder, or a name of the Hub")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(make_app(models.load(args.model), args.model), host=args.host, port=args.port, **UVICORN)
