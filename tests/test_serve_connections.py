"""Bounds of a served model's connections, with both of uvicorn's parsers, around a small application."""

import asyncio
import json
import os
import socket
import threading
import time

import pytest

if os.environ.get("FASTATTN_REQUIRE_MODEL") != "1":  # the gate claims these tests
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("uvicorn")

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastattn.serve import _connections

SECONDS = 60
TIMEOUT = 0.4
BODY = 1000
LARGE = 1 << 20  # more than the sockets below hold


async def app(scope, receive, send):
    """Answers as many bytes as the path says: when the body is there, "early", or "late"."""
    _, length, when = (scope["path"] + "/").split("/")[:3]
    more = when != "early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    await asyncio.sleep(2 * TIMEOUT if when == "late" else 0)
    sent = dict(scope["headers"]).get(b"content-length", b"none")
    headers = [(b"content-length", length.encode()), (b"x-sent", sent)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * int(length)})


@pytest.fixture(params=["auto", "h11"])
def server(request, monkeypatch):
    """A server of `app` in a thread of this process."""
    if request.param == "h11":
        monkeypatch.setattr(_connections, "AutoHTTPProtocol", H11Protocol)
    http = _connections.bounded(3, TIMEOUT, BODY)
    options = {"lifespan": "off", "log_level": "critical", "timeout_keep_alive": 1}
    config = uvicorn.Config(app, port=0, http=http, ws="none", **options)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_until(lambda: running.started)
    yield running
    running.should_exit = running.force_exit = True
    thread.join(SECONDS)
    assert not thread.is_alive()


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def connect(server, sent=b""):
    listening = server.servers[0].sockets[0]
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the kernel takes all of an answer
    client = socket.socket()
    client.settimeout(SECONDS)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", listening.getsockname()[1]))
    client.sendall(sent)
    return client


def rest(client):
    """All that comes until the server ends it."""
    with client:
        try:
            return client.makefile("rb").read()
        except ConnectionResetError:
            return b"reset"


def answer(client, body=1):
    """An answer with so many bytes: its head and its body may come apart."""
    said = b""
    while not (end := said.find(b"\r\n\r\n") + 4) > 3 or len(said) < end + body:
        more = client.recv(1 << 16)
        assert more, said
        said += more
    return said


def post(path, body=b"", length=None):
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n".encode() + body


LATE = {
    "half a head": b"POST /1 HTTP/1.1\r\nX-",
    "half a body": post("/1", b"ab", 5),
    "half a chunk": b"POST /1 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
}


@pytest.mark.parametrize("sent", LATE.values(), ids=LATE)
def test_a_request_has_to_come_in_time(server, sent):
    begin = time.monotonic()
    said = rest(connect(server, sent))
    assert said.startswith(b"HTTP/1.1 408 ")
    assert set(json.loads(said.partition(b"\r\n\r\n")[2])) == {"error", "error_type"}
    assert time.monotonic() - begin >= TIMEOUT / 2
    wait_until(lambda: not server.server_state.connections)


def test_a_connection_that_asks_nothing_is_told_nothing(server):
    assert rest(connect(server)) == b""


def test_bytes_that_come_now_and_then_win_no_time(server):
    client, begin = connect(server, b"GET /1 HTTP/1.1\r\nX-Long: "), time.monotonic()
    try:
        while time.monotonic() < begin + SECONDS:
            client.sendall(b"G")
            time.sleep(TIMEOUT / 8)
    except OSError:
        pass
    client.close()
    assert time.monotonic() - begin < SECONDS


def test_the_next_request_of_a_connection_has_its_own_time(server):
    client = connect(server)
    for _ in range(3):
        client.sendall(post("/1", b"a"))
        assert answer(client).startswith(b"HTTP/1.1 200 ")
        time.sleep(TIMEOUT / 2)
    client.sendall(post("/1", b"a", 2))
    assert rest(client).startswith(b"HTTP/1.1 408 ")


def test_half_a_request_behind_a_whole_one_has_to_come_in_time(server):
    said = rest(connect(server, post("/1", b"a") + b"POST /1 HT"))
    assert said.startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: not server.server_state.connections)


def test_an_answer_may_take_longer(server):
    client = connect(server, post("/1/late", b"a"))
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    client.close()


@pytest.mark.parametrize("path", [f"/{LARGE}", f"/{LARGE}/early"])
def test_an_answer_has_to_be_read_in_time(server, path):
    client = connect(server, post(path, b"a"))
    wait_until(lambda: server.server_state.connections)
    wait_until(lambda: not server.server_state.connections)
    assert len(rest(client)) < LARGE


def test_an_answer_that_is_read_comes_whole(server):
    client = connect(server, post(f"/{LARGE}", b"a"))
    assert len(answer(client, LARGE)) > LARGE
    client.close()


def test_more_connections_than_there_may_be_are_told(server):
    clients = [connect(server) for _ in range(3)]
    wait_until(lambda: len(server.server_state.connections) == 3)
    head, _, body = rest(connect(server)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 1\r\n" in head
    assert json.loads(body)["error_type"] == "Overloaded"
    clients.pop().close()
    wait_until(lambda: len(server.server_state.connections) == 2)
    client = connect(server, post("/1", b"a"))
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    for each in (client, *clients):
        each.close()


def test_a_request_behind_one_that_was_answered_early_keeps_its_head(server):
    client = connect(server, post("/1/early", b"a", 3))
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    head = post("/1", b"abcd")
    client.sendall(b"bc" + head[:-9])
    time.sleep(TIMEOUT / 8)
    client.sendall(head[-9:])
    assert b"x-sent: 4\r\n" in answer(client)
    client.close()


def flood(client, piece, most):
    """Send a piece again and again, until the server ends it: how many bytes were sent."""
    count = 0
    try:
        while count < most:
            client.sendall(piece)
            count += len(piece)
    except OSError:
        pass
    client.close()
    return count


MOST = 1 << 25


def test_a_head_of_any_length_is_not_kept(server):
    client = connect(server, b"POST /1 HTTP/1.1\r\nHost: h\r\n")
    assert flood(client, b"X-Long: " + b"x" * 1000 + b"\r\n", MOST) < MOST


def test_a_long_head_that_comes_at_once_is_not_answered(server):
    """A whole request follows on a connection of its own: the bound is of the head alone."""
    head = b"POST /1 HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nX-Long: %s\r\n\r\n"
    assert b" 200 " not in rest(connect(server, head % (b"x" * 66_000)))
    client = connect(server, head % (b"x" * 60_000))
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    client.close()


CHUNKED = b"HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"


def test_trailers_of_any_length_are_not_kept(server):
    client = connect(server, b"POST /1 " + CHUNKED)
    assert flood(client, b"X-Long: " + b"x" * 1000 + b"\r\n", MOST) < MOST


def test_trailers_of_a_request_are_not_kept(server):
    client = connect(server, b"POST /1 " + CHUNKED + b"X-Short: x\r\n" * 100)
    wait_until(lambda: server.server_state.connections)
    (connection,) = server.server_state.connections
    client.sendall(b"\r\n")
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    assert [name for name, _ in connection.headers] == [b"host", b"transfer-encoding"]
    client.close()


def test_trailers_behind_an_early_answer_are_not_kept(server):
    client = connect(server, b"POST /1/early " + CHUNKED)
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    (connection,) = server.server_state.connections
    client.sendall(b"X-Short: x\r\n" * 100)
    time.sleep(TIMEOUT / 4)
    assert len(connection.headers) < 100
    client.close()
