"""The command that serves a model until a signal ends it."""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn

from fastattn.serve._app import make_app
from fastattn.serve._connections import bounded
from fastattn.serve._service import Limits

if TYPE_CHECKING:
    from fastattn.models import CrossEncoder, Encoder


def serve(
    model: Encoder | CrossEncoder,
    name: str = "model",
    host: str = "127.0.0.1",
    port: int = 8000,
    grace: int = 20,
    limits: Limits | None = None,
    connections: int = 512,
    timeout: float = 60,
    task: str | None = None,
    prompt_name: str | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C, then answer what has come, and end the process.

    Parameters
    ----------
    model : Encoder or CrossEncoder
        What `fastattn.models.load` returns.
    name : str, default "model"
        What requests call it.
    host : str, default "127.0.0.1"
        The address to listen at: by default for this machine alone.
    port : int, default 8000
        0: a free one. The address is printed.
    grace : int, default 20
        Seconds that a stop waits for clients which do not end their request, or do not read the answer.
    limits : Limits, optional
        Bounds of requests.
    connections : int, default 512
        That are open at a time; others are told 503.
    timeout : float, default 60
        Seconds in which a request has to come whole, and an answer has to be read.
    task, prompt_name : str, optional
        As in `make_app`.

    Raises
    ------
    TypeError
        If `model` is another one.
    ValueError
        If nothing can listen there, or `make_app` raises one.
    """
    limits = limits or Limits()
    app = make_app(model, name, limits, task, prompt_name)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket_ = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(f"{host}:{port}: {error}") from None
    # Without it an answer of two packets waits 40 ms for the client's word that the first one came.
    socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{socket_.getsockname()[1]}", flush=True)
    # A signal ends it: no connection is accepted from then on, and requests that have come are answered. A
    # client that never ends its request, or reads no answer, is waited for no longer than `grace`. Then
    # uvicorn raises the signal again, and these handlers make it a good end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(0))
    http = bounded(connections, timeout, limits.body_bytes)
    config = uvicorn.Config(
        app, http=http, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=grace
    )
    uvicorn.Server(config).run(sockets=[socket_])
