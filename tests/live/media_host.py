"""A host of media on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def hosting(body: bytes) -> Iterator[str]:
    """Yield the URL of a file. `/moved` beside it is a redirect to the file."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = self.path == "/moved"
            self.send_response(HTTPStatus.FOUND if moved else HTTPStatus.OK)
            if moved:
                self.send_header("Location", "/a.png")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(b"" if moved else body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/a.png"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
