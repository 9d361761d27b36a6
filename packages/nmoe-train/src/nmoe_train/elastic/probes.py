"""Whether workers reach each other: each answers on a port of its own, and asks the others there.

A probe is one TCP connection over which the asker says its number and hears that of the other, so
that the port of a worker that is gone, taken by another one since, is not mistaken for it.
"""

import socket
import threading
from collections.abc import Mapping

PROBE_S = 1.0


class AnsweringPort:
    """Answers probes of others in a thread of its own, until the process ends."""

    def __init__(self, host: str) -> None:
        self.number = 0
        """The number to answer with; 0 before the worker has one."""
        self._socket = socket.create_server(("", 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, name="probes", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                try:
                    connection.settimeout(PROBE_S)
                    # Whoever says no number is no worker.
                    int(connection.recv(32))
                    connection.sendall(b"%d" % self.number)
                except (OSError, ValueError):
                    # Whoever asked has gone, or was no worker.
                    continue


def reaches(own: int, number: int, address: str) -> bool:
    """Whether worker `number` answers at its address within a second."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_S) as connection:
            connection.sendall(b"%d" % own)
            return connection.recv(32) == b"%d" % number
    except OSError:
        return False


def reached_by(own: int, roster: Mapping[int, str]) -> list[int]:
    """Which workers of a roster (number to address) answer, all asked at once; itself does."""
    found = [own]

    def ask(number: int, address: str) -> None:
        if reaches(own, number, address):
            found.append(number)

    others = [(number, address) for number, address in roster.items() if number != own]
    threads = [threading.Thread(target=ask, args=other, daemon=True) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PROBE_S)
    return sorted(found)
