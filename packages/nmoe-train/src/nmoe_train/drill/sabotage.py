"""Faults that only the worker itself can be made to have, ordered by files in the run folder.

They replace functions of this process: a save that waits or fails as if the disk did, a batch that
comes late. A network that splits needs rights that a drill has not: here the connections between
the two sides are really shut down, and probes between them refused, until it is healed.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nmoe_data.loader import Loader

import nmoe_train.checkpoint.folder as checkpoint_folder
from nmoe_train.config import Config
from nmoe_train.drill.orders import Orders, orders_of
from nmoe_train.elastic import cut, probes
from nmoe_train.elastic.membership import Place
from nmoe_train.elastic_run import work

POLL_S = 0.03
SLOW_PEER_S = 1.2
STEP_S = 0.05
"""A step takes no less, so that a fault's delay is a few steps on the quickest machine too."""


def sabotaged_work(config: Config, store: str, place: Place) -> None:
    """A worker's process, with faults as ordered."""
    sabotage = _Sabotage(orders_of(config), place[1], store)
    sabotage.install()
    sabotage.await_network()
    work(config, store, place)


class _Sabotage(threading.Thread):
    """Looks for orders to this worker, and lets the functions that it has replaced obey."""

    def __init__(self, folder: Path, slot: int, store: str) -> None:
        super().__init__(name="sabotage", daemon=True)
        self._folder, self._slot, self._orders = folder, slot, Orders(folder, slot)
        self._store_port = int(store.rpartition(":")[2])
        self._slow_steps = 0
        self._far: set[int] = set()
        self._heals_unix_s = 0.0

    def install(self) -> None:
        """Replaces the functions that are to fail, and begins to look for orders."""
        checkpoint_folder._save_tensors = self._save(checkpoint_folder._save_tensors)
        # Functions of classes and modules, which types say are not to be replaced.
        Loader.batch = self._batch(Loader.batch)  # type: ignore[method-assign]
        probes.reaches = self._reaches(probes.reaches)  # type: ignore[assignment]
        self._announce_port()
        self.start()

    def await_network(self) -> None:
        """Where a split has cut this worker from the store, waits until it is healed."""
        for _, told in self._orders.waiting():
            if told["kind"] == "partition" and told["cuts_store"] and self._slot in told["small"]:
                time.sleep(max(0.0, told["heals_unix_s"] - time.time()))

    def run(self) -> None:
        """Obeys each order once, and forgets it."""
        while True:
            for path, told in self._orders.waiting():
                if told["kind"] == "partition":
                    self._split(told, path)
            if (slow := self._orders.take("slow-peer")) is not None:
                self._slow_steps = slow["steps"]
            time.sleep(POLL_S)

    def _save(self, real: Callable[..., None]) -> Callable[..., None]:
        def save(file: Path, *arguments: Any) -> None:
            if (slow := self._orders.take("slow-disk")) is not None:
                time.sleep(slow["seconds"])
            if self._orders.take("full-disk") is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            real(file, *arguments)

        return save

    def _batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def batch(*arguments: Any) -> Any:
            time.sleep(STEP_S)
            if self._slow_steps > 0:
                self._slow_steps -= 1
                time.sleep(SLOW_PEER_S)
            return real(*arguments)

        return batch

    def _split(self, told: dict[str, Any], path: Path) -> None:
        """Shuts down what leads to the other side, and refuses its probes until it is healed."""
        if time.time() >= told["heals_unix_s"]:
            path.unlink(missing_ok=True)
            self._far = set()
            return
        if self._heals_unix_s == told["heals_unix_s"]:
            return
        self._heals_unix_s = told["heals_unix_s"]
        small = set(told["small"])
        everyone = range(told["workers"])
        self._far = {slot for slot in everyone if (slot in small) != (self._slot in small)}
        if self._slot in small:
            self._shut_down(with_store=told["cuts_store"])

    def _shut_down(self, *, with_store: bool) -> None:
        for descriptor in cut.open_sockets():
            if with_store or not self._leads_to_store(descriptor):
                cut.shut_down(descriptor)

    def _leads_to_store(self, descriptor: int) -> bool:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as shared:
            port: int = shared.getpeername()[1]
            return port == self._store_port
        return False

    def _reaches(self, real: Callable[[int, int, str], bool]) -> Callable[[int, int, str], bool]:
        def reaches(own: int, number: int, address: str) -> bool:
            return self._slot_at(address) not in self._far and real(own, number, address)

        return reaches

    def _slot_at(self, address: str) -> int | None:
        """The slot of the worker that answers at an address."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / "ports" / address).read_text())
        return None

    def _announce_port(self) -> None:
        """Lets the others know at which slot an address is, as soon as this worker has one."""
        ports, slot, real = self._folder / "ports", self._slot, probes.AnsweringPort.__init__
        ports.mkdir(parents=True, exist_ok=True)

        def init(port: probes.AnsweringPort, host: str) -> None:
            real(port, host)
            (ports / port.address).write_text(str(slot))

        probes.AnsweringPort.__init__ = init  # type: ignore[method-assign, assignment]  # to fail
