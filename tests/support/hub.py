"""The Hugging Face hub, played by a server on this machine: what it serves is up to its handler."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves a folder at a commit, and remembers which paths were asked for."""

    daemon_threads = True

    def __init__(self, folder: Path, handler: type["HubHandler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.folder = folder
        self.commit = COMMIT
        self.asked: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    """Answers a request; `do_GET` is to be written."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")


@contextmanager
def serving(folder: Path, handler: type[HubHandler]) -> Iterator[Hub]:
    """A hub that serves the folder until the end of the context."""
    with Hub(folder, handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
