"""Load `python -m fastattn serve`: with micro-batches, and with one request a call of the model.

    pip install -e '.[serve]'
    python -m bench.load_serve all-MiniLM-L6-v2 [--clients 8] [--seconds 5] [--options "OF serve"]
    python -m bench.load_serve all-MiniLM-L6-v2 --engines    # others behind the same server, 2 threads

Each client is a thread with one connection. It sends a text, waits for its vector in base64, as OpenAI's
client wants it, and sends the next. Texts are those of the bench, of --words words in the median. The
servers run in turn. `bench/strain_serve.py` shows what a server withstands.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench import texts as bench_texts

MOST_REQUESTS = 20_000  # of a client in a round


def draw(words: float, count: int) -> list[str]:
    """Texts of `words` words in the median, as skewed as those of the bench."""
    rng, known = np.random.default_rng(0), bench_texts.words()
    lengths = np.round(words * np.exp(bench_texts.SPREAD * rng.standard_normal(count)))
    starts = rng.integers(0, len(known) - bench_texts.MOST, count)
    lengths = np.clip(lengths, 1, bench_texts.MOST).astype(int)
    return [" ".join(known[start : start + n]) for start, n in zip(starts, lengths, strict=True)]


class Server:
    """A server in a process of its own, on a free port of the loopback."""

    def __init__(self, options: list[str]) -> None:
        self._start(["fastattn", "serve", "--model", *options, "--port", "0"])

    def _start(self, module: list[str]) -> None:
        command = [sys.executable, "-m", *module]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line.startswith("http://127.0.0.1:"):
            raise SystemExit(f"the server said {line!r}")
        self.port = int(line.rpartition(":")[2])

    def close(self) -> None:
        self.process.terminate()
        if self.process.wait(30) != 0:
            raise SystemExit(f"the server ended with {self.process.returncode}")

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


class Engine(Server):
    """A server in which another engine computes."""

    def __init__(self, options: list[str]) -> None:
        self._start(["bench.serve_engine", *options])


def client(port: int, texts: list[str], until: float, times: list[float], failures: list[str]) -> None:
    """Requests one after the other; their seconds go to `times`. Plain sockets cost little of the CPUs."""
    requests = []
    for text in texts:
        body = json.dumps({"input": text, "encoding_format": "base64"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        requests.append(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for i in range(MOST_REQUESTS):
            begin = time.perf_counter()
            if begin > until:
                break
            connection.sendall(requests[i % len(requests)])
            answer = connection.recv(1 << 16)
            head, _, body = answer.partition(b"\r\n\r\n")
            missing = int(re.search(rb"content-length: (\d+)", head)[1]) - len(body)
            while missing > 0:
                missing -= len(connection.recv(1 << 16))
            times.append(time.perf_counter() - begin)
            if not head.startswith(b"HTTP/1.1 200"):
                failures.append(head.splitlines()[0].decode())


def load(server: Server, texts: list[str], clients: int, seconds: float) -> tuple[list[float], float]:
    """Seconds of every request of a round, and requests a second."""
    times, failures, begin = [], [], time.perf_counter()
    until = begin + seconds
    threads = [
        threading.Thread(target=client, args=(server.port, texts[i::clients], until, times, failures))
        for i in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"{len(failures)} requests failed, the first with {failures[0]!r}")
    return times, len(times) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=bench_texts.MEDIAN, help="of a text, in the median")
    parser.add_argument("--options", default="", help='of the command serve, as "--weights-dtype int8"')
    parser.add_argument("--engines", action="store_true", help="others behind the same server")
    args = parser.parse_args()

    folder = TemporaryDirectory()
    texts = draw(args.words, 64 * args.clients)
    started = [args.model, *shlex.split(args.options)]
    ways = {"micro-batches": lambda: Server(started)}
    if args.engines:
        from bench import serve_engine

        path = Path(folder.name, "model.onnx")
        with ProcessPoolExecutor(1) as pool:  # the graph is made by torch, which is not loaded here
            pool.submit(serve_engine.graph, Path(args.model), path).result()
        ways["onnxruntime"] = lambda: Engine(["onnxruntime", "2", args.model, str(path)])
        ways["sentence-transformers"] = lambda: Engine(["sentence-transformers", "2", args.model])
    else:
        ways["one request a call"] = lambda: Server([*started, "--batch-tokens", "1"])
    found = {name: ([], []) for name in ways}
    for _ in range(args.rounds):
        for name, start in ways.items():
            server = start()
            load(server, texts, args.clients, 0.5)
            times, rate = load(server, texts, args.clients, args.seconds)
            said = server.get("/health")
            server.close()
            found[name][0].extend(times)
            found[name][1].append(rate)
            print(
                f"  {name}: {rate:.0f} texts a second, {said['texts'] / said['calls']:.1f} a call", flush=True
            )
    first, *others = found
    for name, (times, rates) in found.items():
        p50, p95 = (1e3 * np.quantile(times, q) for q in (0.5, 0.95))
        print(f"{name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms, {statistics.median(rates):.0f} texts a second")
    for name in others:
        ratios = [ours / theirs for ours, theirs in zip(found[first][1], found[name][1], strict=True)]
        print(f"micro-batches beside {name}: {statistics.median(ratios):.2f} times as fast", end="")
        print(f" ({min(ratios):.2f} to {max(ratios):.2f} in {args.rounds} rounds)")


if __name__ == "__main__":
    main()
