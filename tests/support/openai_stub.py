"""A tiny OpenAI-compatible server on loopback that says what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stub:
    """``words`` are streamed one chunk each; ``received`` collects (path, headers, body)."""

    words: list[str]
    status: int = 200
    truncate: bool = False
    error_in_stream: bool = False
    received: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def events(self, path: str) -> Iterator[str]:
        for word in self.words:
            choice = {"index": 0, "delta": {"content": word}} if "chat" in path else {"index": 0, "text": word}
            yield json.dumps({"choices": [choice], "usage": None})
        if self.error_in_stream:
            yield json.dumps({"error": {"message": "kernel failed", "type": "InternalServerError", "code": 500}})
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.words)}
        yield json.dumps({"choices": [], "usage": usage})
        if not self.truncate:
            yield "[DONE]"


@contextmanager
def openai_stub(words: list[str], **options: Any) -> Iterator[Stub]:
    stub = Stub(words, **options)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def reply(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(200, "application/json", json.dumps({"data": [{"id": "stub-model"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.received.append((self.path, dict(self.headers), body))
            if stub.status != 200:
                error = {"error": {"message": "no such thing", "type": "BadRequestError", "code": stub.status}}
                self.reply(stub.status, "application/json", json.dumps(error).encode())
                return
            lines = "".join(f"data: {event}\n\n" for event in stub.events(self.path))
            self.reply(200, "text/event-stream", lines.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
