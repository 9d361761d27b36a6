"""A worker's line to the store ends with an error when the other end is silent."""

import socket
import threading
from collections.abc import Iterator

import pytest
from nmoe_train.elastic.link import Line, StoreGone
from torch._C._distributed_c10d import TCPStore


class Relay:
    """Passes on what is said to a port, until it is `mute`: as a network does that is cut."""

    def __init__(self, port: int) -> None:
        self._target, self.mute = port, threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            asker, _ = self._server.accept()
            answerer = socket.create_connection(("127.0.0.1", self._target))
            for pair in ((asker, answerer), (answerer, asker)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while said := source.recv(4096):
            if not self.mute.is_set():
                target.sendall(said)


@pytest.fixture
def relay() -> Iterator[Relay]:
    # It is served for as long as it is held.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Relay(server.port)


def test_a_store_that_falls_silent_is_gone(relay: Relay) -> None:
    line, failed = Line(relay.address, timeout_s=10.0), threading.Event()
    line.write("key", "value")
    assert line.read("key") == b"value"
    relay.mute.set()

    def ask() -> None:
        with pytest.raises(StoreGone):
            line.read("key")
        failed.set()

    threading.Thread(target=ask, daemon=True).start()
    assert failed.wait(120), "the wait for an answer has no end"
