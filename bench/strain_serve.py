"""Strain `python -m fastattn serve`: many clients, full queues, signals, clients that are slow or go away.

    pip install -e '.[serve]'
    python -m bench.strain_serve all-MiniLM-L6-v2 [--clients 200] [--seconds 5] [--tries load full ...]

It prints a line for each try, and fails at the first that shows a wrong answer, a request without an answer
or a word, a server that ends badly, or one that is held by clients that hold it up.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.load_serve import Server, draw
from fastattn import models

LIMIT = 60  # seconds without a word from the server are a failure
SLOW = 4  # clients that hold the server up
TIMEOUT = 3  # of the server towards these, in seconds


class Failed(SystemExit):
    """A try that went wrong."""


def require(holds: Any, said: str) -> None:
    if not holds:
        raise Failed(f"FAILED: {said}")


def request_of(body: bytes, path: str = "/v1/embeddings") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


class Strain:
    """Texts, what their vectors have to be, and the options of a server."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, args.model
        self.texts = draw(8, 512)
        vectors = models.load(args.model).encode(self.texts, normalize_embeddings=True)
        self.expected = [base64.b64encode(vector.astype("<f4")).decode() for vector in vectors]

    @contextmanager
    def server(self, *options: str) -> Iterator[Server]:
        """A server, which has to end well; `pid` is that of its process."""
        server = Server([self.folder, *self.args.options.split(), *options])
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.terminate()
        require(server.process.wait(LIMIT) == 0, f"the server ended with {server.process.returncode}")

    def rss(self, server: Server) -> float:
        """Memory of the server in MB."""
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    async def client(self, port: int, i: int, until: float, found: Counter[str], times: list[float]) -> None:
        """Requests of one to four texts, one after the other: what becomes of each is counted in `found`."""
        rng = np.random.default_rng(i)
        while time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                found["not connected"] += 1
                return
            try:
                while time.monotonic() < until:
                    chosen = rng.integers(0, len(self.texts), rng.integers(1, 5)).tolist()
                    texts = [self.texts[j] for j in chosen]
                    body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
                    begin = time.monotonic()
                    writer.write(request_of(body))
                    status, headers, said = await asyncio.wait_for(answer(reader), LIMIT)
                    times.append(time.monotonic() - begin)
                    if status == 200:
                        vectors = [item["embedding"] for item in json.loads(said)["data"]]
                        right = vectors == [self.expected[j] for j in chosen]
                        found["right" if right else "WRONG"] += 1
                    else:
                        found[str(status)] += 1
                        if status == 429:
                            await asyncio.sleep(float(headers["retry-after"]) / 10)
                    if headers.get("connection") == "close":
                        break
            except asyncio.TimeoutError:
                found["NO ANSWER"] += 1
            except (asyncio.IncompleteReadError, OSError):
                found["connection closed"] += 1
            finally:
                writer.close()

    async def clients(
        self, server: Server, seconds: float, during: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[Counter[str], list[float]]:
        """Count what all clients were told, and time it, for so many seconds."""
        found: Counter[str] = Counter()
        times: list[float] = []
        until = time.monotonic() + seconds
        work = [self.client(server.port, i, until, found, times) for i in range(self.args.clients)]
        await asyncio.gather(*work, *([during()] if during else []))
        require(not found["WRONG"] and not found["NO ANSWER"], f"{dict(found)}")
        return found, times

    async def load(self) -> str:
        """Many clients, texts of mixed lengths; vectors are those of `encode`, to the bit."""
        with self.server() as server:
            before = self.rss(server)
            found, times = await self.clients(server, self.args.seconds)
            require(set(+found) == {"right"}, f"{dict(found)}")
            p50, p95 = np.quantile(times, (0.5, 0.95))
            return (
                f"{dict(found)}; p50 {p50:.2f} s, p95 {p95:.2f} s; {before:.0f} to {self.rss(server):.0f} MB"
            )

    async def full(self) -> str:
        """A queue of 100 texts: what it does not take is told 429, the rest is answered."""
        with self.server("--queue-texts", "100") as server:
            found, _ = await self.clients(server, self.args.seconds)
            require(found["429"] and set(+found) == {"right", "429"}, f"{dict(found)}")
            return f"{dict(found)}"

    async def signalled(self, number: signal.Signals) -> str:
        """A signal in the middle: everybody is answered, or told by the end of the connection."""
        with self.server() as server:

            async def stop() -> None:
                await asyncio.sleep(self.args.seconds / 2)
                server.process.send_signal(number)

            found, _ = await self.clients(server, self.args.seconds, stop)
            require(set(+found) <= {"right", "connection closed", "not connected"}, f"{dict(found)}")
            return f"{dict(found)}"

    async def sigterm(self) -> str:
        """SIGTERM under load."""
        return await self.signalled(signal.SIGTERM)

    async def sigint(self) -> str:
        """SIGINT under load."""
        return await self.signalled(signal.SIGINT)

    async def killed(self) -> str:
        """Clients that are killed in the middle of large requests: what they asked for is dropped."""
        with self.server() as server:
            body = json.dumps({"input": [" ".join(self.texts[:8])] * 256})
            script = f"import socket, sys, time; s = socket.create_connection(('127.0.0.1', {server.port})); "
            script += "s.sendall(sys.stdin.buffer.read()); time.sleep(99)"
            killed = [
                subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) for _ in range(8)
            ]
            for process in killed:
                process.stdin.write(request_of(body.encode()))
                process.stdin.close()
            waiting = await self.until(server, lambda said: said["waiting"] >= 8 * 256)
            for process in killed:
                process.kill()
                process.wait()
            begin = time.monotonic()
            said = await self.until(server, lambda said: not said["waiting"])
            require(said["texts"] < 4 * 256, f"{said}")
            seconds, count = time.monotonic() - begin, waiting["waiting"]
            return f"{count} texts waited; gone after {seconds:.2f} s, {said['texts']} were computed"

    async def until(self, server: Server, holds: Callable[[Any], bool]) -> Any:
        """Ask /health until something holds of its answer, which is returned."""
        end = time.monotonic() + LIMIT
        while not holds(said := await asyncio.to_thread(server.get, "/health")):
            require(time.monotonic() < end, f"{said}")
            await asyncio.sleep(0.05)
        return said

    async def slow(self, open_one: Callable[[Server], Awaitable[Any]]) -> str:
        """Slow clients beside others, which have their answers; the slow ones are ended in time."""
        with self.server("--timeout", str(TIMEOUT), "--queue-texts", "32768") as server:
            before, begin = self.rss(server), time.monotonic()
            slow = [asyncio.create_task(open_one(server)) for _ in range(SLOW)]
            found, times = await self.clients(server, self.args.seconds)
            require(set(+found) == {"right"}, f"{dict(found)}")
            end = time.monotonic() + 2 * LIMIT  # what slow readers ask for is computed, too
            while count := connections(server):
                require(time.monotonic() < end, f"{count} connections are open")
                await asyncio.sleep(0.1)
            seconds = time.monotonic() - begin
            await asyncio.wait(slow, timeout=1)
            ended = dict(Counter(task.result() for task in slow if task.done()))
            for task in slow:  # a slow reader has yet to read that it is over
                task.cancel()
            said = f"others {dict(found)}, p95 {np.quantile(times, 0.95):.2f} s; slow ones ended {ended}"
            return f"{said} by {seconds:.1f} s; {before:.0f} to {self.rss(server):.0f} MB"

    async def slow_readers(self) -> str:
        """Clients that read a byte a second of an answer of megabytes."""
        body = json.dumps({"input": ["a"] * 1024}).encode()

        async def read(server: Server) -> str:
            socket_ = socket.socket()
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # else the kernel reads ahead
            socket_.connect(("127.0.0.1", server.port))
            reader, writer = await asyncio.open_connection(sock=socket_, limit=1)
            writer.write(request_of(body))
            try:
                while await reader.read(1):
                    await asyncio.sleep(1)
            except OSError:
                return "reset"
            return "closed"

        return await self.slow(read)

    async def slow_heads(self) -> str:
        """Clients whose head comes a byte at a time."""
        return await self.slow(lambda server: drip(server, b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 999))

    async def slow_bodies(self) -> str:
        """Clients whose body comes a byte at a time."""
        head, _, body = request_of(b" " * 4_000_000).partition(b"\r\n\r\n")
        return await self.slow(lambda server: drip(server, body[:999], head + b"\r\n\r\n" + body[:2_000_000]))

    async def many_connections(self) -> str:
        """More connections than there may be: the others are told 503."""
        with self.server("--connections", "50", "--timeout", str(TIMEOUT)) as server:
            found = Counter(
                await asyncio.gather(*(drip(server, b"GET / HTTP/1.1\r\n" * 9) for _ in range(80)))
            )
            require(found["503"] == 30, f"{dict(found)}")
            await asyncio.to_thread(server.get, "/health")
            return f"{dict(found)}"

    async def large_bodies(self) -> str:
        """Bodies of 100 MB are told 413 before they have been sent; so are those without a length."""
        whole, sent, statuses = 100_000_000, [], Counter()
        with self.server() as server:
            before = self.rss(server)
            for length in (f"Content-Length: {whole}", "Transfer-Encoding: chunked"):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n"
                writer.write(head.encode())
                said = asyncio.create_task(answer(reader))
                piece = b"x" * 65536
                chunk = piece if "Length" in length else b"10000\r\n" + piece + b"\r\n"
                count = 0
                while not said.done() and count < whole:
                    writer.write(chunk)
                    await writer.drain()
                    await asyncio.sleep(0)
                    count += len(piece)
                statuses[str((await asyncio.wait_for(said, LIMIT))[0])] += 1
                sent.append(count)
                writer.close()
            require(
                set(statuses) == {"413"} and max(sent) < whole / 2, f"{dict(statuses)} after {sent} bytes"
            )
            mb = ", ".join(f"{count / 1e6:.1f}" for count in sent)
            return f"{dict(statuses)} after {mb} MB; {before:.0f} to {self.rss(server):.0f} MB"


def connections(server: Server) -> int:
    """How many connections the server has: established, or closed by the client alone."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(line[1].endswith(f":{server.port:04X}") and line[3] in ("01", "08") for line in lines)


async def drip(server: Server, slowly: bytes, first: bytes = b"") -> str:
    """Send some bytes, and others five a second, until the server ends it: its status, if it said one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(first)
        for i in range(len(slowly)):
            writer.write(slowly[i : i + 1])
            try:
                if said := await asyncio.wait_for(reader.read(99), 0.2):
                    return said.split()[1].decode()
                return "closed"
            except asyncio.TimeoutError:
                pass
    except OSError:
        return "reset"
    finally:
        writer.close()
    raise Failed("FAILED: a slow client was waited for")


TRIES = (
    "load", "full", "sigterm", "sigint", "killed", "slow_readers", "slow_heads", "slow_bodies",
    "many_connections", "large_bodies",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5, help="of a try")
    parser.add_argument("--options", default="", help="of the command serve")
    parser.add_argument("--tries", nargs="+", choices=TRIES, default=TRIES)
    args = parser.parse_args()
    strain = Strain(args)
    for name in args.tries:
        try_ = getattr(strain, name)
        print(f"{name}: {try_.__doc__.splitlines()[0]}", flush=True)
        print(f"    {asyncio.run(try_())}", flush=True)


if __name__ == "__main__":
    main()
