"""A worker's line to the launcher's key-value store, which outlives every worker.

The store (torch's TCPStore) is where workers and coordinator talk: `members` counts numbers given
out, `news` is a log that workers append to, `beat/<number>` is a worker's newest sign of life,
`place/<launcher>/<slot>` the number of the worker there, `control` what the coordinator wants of
all, `generation/<g>` a generation. Process groups of generation g find each other under
`groups/<g>/`, so nothing of an earlier one is read.
"""

import contextlib
import datetime
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from nmoe_train.elastic.cut import open_sockets
from nmoe_train.elastic.membership import Generation, Place

CONTROL, NEWS, MEMBERS = "control", "news", "members"
CALL_S = 10.0
"""The least that a call may wait for the store's answer."""
POLL_S = 0.002
_connecting = threading.Lock()
"""Held while a connection is made, so that it is told from those of other threads."""


@dataclass
class Control:
    """What the coordinator wants of all workers."""

    generation: int = 0
    """The newest."""
    stop: int = 0
    """This generation and those before it have ended: leave."""
    resize: int = 0
    """Leave this generation at the next step boundary: it can be a larger one."""
    lost: list[int] = field(default_factory=list)
    """Workers that are counted out; one that finds itself here leaves."""
    roster: dict[str, str] = field(default_factory=dict)
    """Address of every worker, by number."""
    end: dict[str, Any] | None = None
    """How the run has ended: `code`, and `what` for one that failed."""

    def encode(self) -> str:
        """JSON, for the store."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Beat:
    """A worker's sign of life: its count, and how far it is."""

    count: int = 0
    generation: int = 0
    """The newest that it took part in; 0 before the first."""
    step: int = 0
    """The last step that it has finished in there, 0 before the first."""
    furthest: int = 0
    """The last step that it has ever finished."""

    def encode(self) -> str:
        """JSON, for the store."""
        return json.dumps(asdict(self))


class StoreGone(Exception):
    """The launcher's store does not answer: there is nobody to agree with."""


def own_address(peer: str = "192.0.2.1:9") -> str:
    """This host's address on the way to host:port, or to anywhere else."""
    host, _, port = peer.rpartition(":")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # No packet is sent: this only asks the kernel for the route.
        probe.connect((host, int(port)))
        address: str = probe.getsockname()[0]
        return address
    return "127.0.0.1"


def _place_key(place: Place) -> str:
    launcher, slot = place
    return f"place/{launcher}/{slot}"


def connect(address: str, timeout_s: float = CALL_S) -> TCPStore:
    """A client of the store at host:port. Raises StoreGone."""
    host, _, port = address.rpartition(":")
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        with _connecting:
            before = set(open_sockets().items())
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
            # With the kernel's names, as descriptors are used again.
            new = set(open_sockets().items()) - before
            _bound_calls((descriptor for descriptor, _ in new), int(port), timeout_s)
    except (RuntimeError, ValueError) as error:
        raise StoreGone(f"the store at {address} does not answer") from error
    return store


def _bound_calls(descriptors: Iterable[int], port: int, timeout_s: float) -> None:
    """Lets no call on new connections to a port wait longer for the other end.

    torch bounds its waits for keys, but not those for an answer: with the network gone, these
    would last until the kernel gives the connection up, after a quarter of an hour.
    """
    seconds = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as shared:
            if shared.getpeername()[1] == port:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    shared.setsockopt(socket.SOL_SOCKET, option, seconds)


class Line:
    """One thread's client of the store; each method raises StoreGone once it does not answer."""

    def __init__(self, address: str, timeout_s: float = CALL_S) -> None:
        self._store: Any = connect(address, timeout_s)

    def read(self, key: str) -> bytes | None:
        """What a key holds; None if it is not there. Never waits for it."""

        def ask() -> bytes | None:
            return self._store.get(key) if self._store.check([key]) else None

        return self._call(ask)

    def write(self, key: str, value: str) -> None:
        """Sets a key."""
        self._call(lambda: self._store.set(key, value))

    def next_number(self) -> int:
        """A number that nobody had."""
        return self._call(lambda: self._store.add(MEMBERS, 1))

    def tell(self, kind: str, **fields: Any) -> None:
        """Appends a line to the log that the coordinator reads."""
        line = json.dumps({"kind": kind, **fields}) + "\n"
        self._call(lambda: self._store.append(NEWS, line))

    def take_place(self, place: Place, number: int) -> None:
        """Says which worker is at a place now."""
        self.write(_place_key(place), str(number))

    def last_beat(self, place: Place) -> Beat:
        """The newest sign of life of the worker that came last to a place."""
        number = self.read(_place_key(place))
        content = None if number is None else self.read(f"beat/{int(number)}")
        return Beat() if content is None else Beat(**json.loads(content))

    def control(self) -> Control:
        """What the coordinator wants now."""
        content = self.read(CONTROL)
        return Control() if content is None else Control(**json.loads(content))

    def generation(self, number: int) -> Generation:
        """A generation that `control` has named."""
        content = self.read(f"generation/{number}")
        if content is None:
            raise StoreGone(f"the store has no generation {number}")
        return Generation.decode(content)

    def _call(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            raise StoreGone(f"the launcher's store does not answer ({error})") from error


class GenerationStore(Store):
    """The store as a generation's process groups see it: waiting ends when the generation does.

    torch's own client waits in C++, where no other thread can call it off; this one asks again and
    again. `ended` says whether to give up, and `patience_s` when to do so in any case.
    """

    def __init__(self, address: str, ended: Callable[[], bool], patience_s: float) -> None:
        super().__init__()
        self._inner: Any = connect(address)
        self._ended, self._patience_s = ended, patience_s

    def _await(self, keys: Sequence[str]) -> None:
        until_s = time.monotonic() + self._patience_s
        while not self._inner.check(list(keys)):
            if self._ended():
                raise RuntimeError("the generation has ended")
            if time.monotonic() > until_s:
                raise RuntimeError(f"timed out: nobody wrote {', '.join(keys)}")
            time.sleep(POLL_S)

    def set(self, key: str, value: Any) -> None:
        """See torch's Store."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        self._await([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        """See torch's Store."""
        return self._inner.add(key, amount)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits for all keys."""
        self._await(keys)

    def check(self, keys: list[str]) -> bool:
        """See torch's Store."""
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        """See torch's Store."""
        return self._inner.delete_key(key)

    # The name by which C++ calls it.
    deleteKey = delete_key

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See torch's Store."""
        return self._inner.compare_set(key, expected, desired)

    def append(self, key: str, value: Any) -> None:
        """See torch's Store."""
        self._inner.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for all keys."""
        self._await(keys)
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """See torch's Store."""
        self._inner.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        """Whether there are `append`, `multi_get` and `multi_set`."""
        return True
