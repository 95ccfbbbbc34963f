"""A Hugging Face Hub in a thread: repositories that are folders, and a record of what was asked."""

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "c0ffee" * 6 + "c0ff"  # the only one, called main and v1


class SmallHub(ThreadingHTTPServer):
    """Answers as huggingface_hub reads them, of the folders by their names."""

    def __init__(self, folders):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders, self.fetched, self.tokens = folders, [], set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, name):
        root = Path(self.folders[name])
        return {x.relative_to(root).as_posix(): x for x in sorted(root.rglob("*")) if x.is_file()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        hub = self.server
        hub.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0].strip("/").split("/")
        about = path[:2] == ["api", "models"]
        name, rest = "/".join(path[2:4] if about else path[:2]), path[4:] if about else path[2:]
        if name not in hub.folders:
            return self.answer(b"{}", 401, X_Error_Code="RepoNotFound", X_Error_Message="no such repository")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            return self.answer(b"{}", 404, X_Error_Code="RevisionNotFound")
        files = hub.files(name)
        if not about:
            file = "/".join(rest[2:])
            if file not in files:
                return self.answer(b"{}", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            data = files[file].read_bytes()
            if self.command == "GET":
                hub.fetched.append(file)
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.answer(data, X_Repo_Commit=COMMIT, ETag=etag)
        if rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": x, "size": y.stat().st_size, "oid": "0" * 40}
                for x, y in files.items()
            ]
        else:
            listed = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": x} for x in files]}
        return self.answer(json.dumps(listed).encode(), Content_Type="application/json")

    do_HEAD = do_GET


@contextmanager
def small_hub(folders):
    with SmallHub(folders) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
