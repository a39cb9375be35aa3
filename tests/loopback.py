"""A real server on the loopback that does what servers do: break off, lie, redirect, change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY = bytes(range(256)) * 3000


@dataclass
class Answer:
    """What the server does with one request; the last answer of a path is repeated."""

    body: bytes = BODY
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    etag: str | None = '"one"'
    ranges: bool = True
    if_range: bool = True
    stop_after: int | None = None
    length: bool = True
    hang: bool = False
    then: Callable[[], None] | None = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        script = self.server.scripts[self.path]
        answer = script.pop(0) if len(script) > 1 else script[0]
        self.server.log.append((self.path, dict(self.headers)))
        if answer.hang:
            self.server.released.wait(10)
            self.close_connection = True
            return
        body, status, extra = answer.body, answer.status, {}
        start = self.start_byte(answer)
        if start is not None and status == 200:
            if start >= len(body):
                status, body, extra = 416, b"", {"Content-Range": f"bytes */{len(body)}"}
            else:
                extra = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
                status, body = 206, body[start:]
        self.send_response(status)
        if answer.etag and status < 300:
            self.send_header("ETag", answer.etag)
        if answer.length:
            self.send_header("Content-Length", str(len(body)))
        for name, value in {**extra, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if answer.stop_after is None else body[: answer.stop_after])
        if answer.then:
            self.wfile.flush()
            answer.then()
            self.server.released.wait(10)
        self.close_connection = True

    def start_byte(self, answer):
        if not answer.ranges or "Range" not in self.headers:
            return None
        condition = self.headers.get("If-Range")
        if answer.if_range and condition and condition not in (answer.etag, answer.headers.get("Last-Modified")):
            return None
        return int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts, self.log, self.released = {}, [], threading.Event()

    def serve(self, path, *answers):
        self.scripts[path] = list(answers)
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def handle_error(self, request, client_address):
        pass


@contextmanager
def running() -> Iterator[Server]:
    """A server for the length of a block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
