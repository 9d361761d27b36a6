"""An HTTP server before another one, which a test lets fail as networks and storages do."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from s3_bucket import Bucket

PASS, FAIL, CUT, HOLD, SPOIL = "pass", "fail", "cut", "hold", "spoil"
HELD_S = 600.0
# Of one connection to the next server, and not of the next server's answer.
OWN_HEADERS = {"connection", "transfer-encoding", "keep-alive", "content-length", "expect"}

Rule = Callable[[str, str], str]


class FaultyProxy:
    """Passes requests on, as `rule(method, path)` says: PASS, FAIL (error 500), CUT (the connection
    breaks within the request's body), HOLD (silence until `release`), SPOIL (one bit of the body
    changes)."""

    def __init__(self, endpoint: str) -> None:
        self.rule: Rule = lambda method, path: PASS
        self.seen: list[tuple[str, str]] = []
        """Method and path of every request, whatever became of it."""
        self.held = threading.Event()
        """That a request is held."""
        self._open = threading.Event()
        self.target = urlsplit(endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                """Tests have no use for a log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def release(self) -> None:
        """Lets what is held go on, and holds nothing any more."""
        self._open.set()

    def stop(self) -> None:
        """Ends the server."""
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """One request, from its head to the answer."""
        self.seen.append((request.command, request.path))
        fate = self.rule(request.command, request.path)
        if fate == HOLD and not self._open.is_set():
            self.held.set()
            self._open.wait(HELD_S)
        if fate == CUT:
            request.rfile.read(int(request.headers.get("Content-Length", 0)) // 2)
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        body = _body(request)
        if fate == SPOIL and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        # Whoever held the line may have left it.
        with contextlib.suppress(ConnectionError):
            if fate == FAIL:
                request.send_response(500)
                request.send_header("Content-Length", "0")
                request.end_headers()
                return
            self._pass(request, body)

    def _pass(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        onward = http.client.HTTPConnection(self.target, timeout=60)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in OWN_HEADERS}
        onward.request(request.command, request.path, body, headers)
        answer = onward.getresponse()
        content = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OWN_HEADERS:
                request.send_header(name, value)
        length = answer.headers.get("Content-Length") if request.command == "HEAD" else None
        request.send_header("Content-Length", length or str(len(content)))
        request.end_headers()
        request.wfile.write(content)
        onward.close()


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    parts = []
    while size := int(request.rfile.readline().split(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the bucket's server; clients made from now on speak to it."""
    found = FaultyProxy(bucket.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
    yield found
    found.stop()
