"""Bounds of connections: how many there are, and how long a request and its answer are on their way.

uvicorn waits for a request and for a reader without end, and keeps heads of any size.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    import asyncio

_HEAD = 1 << 16  # bytes of a request's head, as most servers bound it
# What a connection is told when it is ended, and the error's type.
_ENDS = {
    "408 Request Timeout": ("the request did not come in time; expected it within --timeout", "Validation"),
    "431 Request Header Fields Too Large": (f"a head, or trailers, of more than {_HEAD} bytes", "Validation"),
    "503 Service Unavailable": ("more connections than --connections; try again later", "Overloaded"),
}


def _size(scope: Any) -> int:
    """Bytes of the head of a request, but for its first line's method and version."""
    names = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    return names + len(scope["raw_path"]) + len(scope["query_string"])


def bounded(connections: int, timeout: float, body_bytes: int) -> type[asyncio.Protocol]:
    """A protocol for uvicorn: one object of it is one connection.

    Of more than `connections` each is told 503 and closed. Within `timeout` seconds of its first byte a
    request has to be there, and an answer has to be read; then the connection ends.
    """

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _whole: Any = None  # the last request that came to its end, as uvicorn's cycle
        _came = 0  # bytes since then
        _arriving: asyncio.TimerHandle | None = None
        _leaving: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_request()
            if len(self.connections) > connections:
                self._end("503 Service Unavailable")

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_waiting()
            if self._leaving:
                self._leaving.cancel()

        def data_received(self, data: bytes) -> None:
            if self._arriving is None:
                self._await_request()
            before = self.cycle
            super().data_received(data)
            cycle, self._came = self.cycle, self._came + len(data)
            begun = cycle is not None and cycle.more_body
            if cycle is not before and _size(cycle.scope) > _HEAD:  # all of it came at once
                cycle.disconnected = True  # so nothing else is said
                self._end("431 Request Header Fields Too Large")
            elif begun and cycle.response_complete and self.headers is cycle.scope["headers"]:
                self._came = 0  # the rest of what was answered early is dropped
            elif cycle is not self._whole and not begun:
                self._whole, self._came = cycle, 0
                self._stop_waiting()
            elif self._came > _HEAD + begun * 2 * body_bytes:  # a body in chunks has their lengths, too
                self._end("431 Request Header Fields Too Large")

        def on_header(self, name: bytes, value: bytes) -> None:
            """Keep what httptools reads of a head; a cycle has its head already: the rest are trailers."""
            if self.cycle is None or self.headers is not self.cycle.scope["headers"]:
                super().on_header(name, value)

        def _unsupported_upgrade_warning(self) -> None:
            """Log nothing: a request that offers another protocol is answered in this one."""

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._leaving:
                self._leaving.cancel()
            self._leaving = self.loop.call_later(timeout, self._unread)

        def _await_request(self) -> None:
            self._arriving = self.loop.call_later(timeout, self._late)

        def _stop_waiting(self) -> None:
            if self._arriving:
                self._arriving.cancel()
            self._arriving = None

        def _late(self) -> None:
            if self._whole is not None and not self._whole.response_complete:  # its answer comes first
                self._await_request()
            elif not self._came:
                self.transport.close()  # nothing was asked
            else:
                self._end("408 Request Timeout")

        def _unread(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()

        def _end(self, status: str) -> None:
            """Close the connection; say why where no answer has begun."""
            cycle = self.cycle
            if self.transport.is_closing():  # the parser has said what is wrong
                return
            if not (cycle is not None and cycle.more_body and cycle.response_started):
                said = json.dumps(dict(zip(("error", "error_type"), _ENDS[status], strict=True)))
                head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\n"
                retry = "Retry-After: 1\r\n" if status.startswith("503") else ""
                text = f"{head}{retry}Content-Length: {len(said)}\r\n\r\n{said}"
                self.transport.write(text.encode())
            self.transport.close()

    return Bounded
