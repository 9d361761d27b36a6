"""Ends collectives that wait for ranks which will not come, from another thread.

NCCL can abort a communicator. gloo cannot: an operation in progress ends when a connection does or
its time is up, so the connections of the generation's groups are shut down, and every operation on
them raises at once.
"""

import contextlib
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The sockets that are opened inside the `with` block, to be shut down by any thread."""

    def __init__(self) -> None:
        self._before: dict[int, str] = {}
        self._opened: set[str] | None = None

    def __enter__(self) -> "Connections":
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = self._new()

    def cut(self) -> None:
        """Shuts them down; inside the block, those that were opened so far."""
        opened = self._new() if self._opened is None else self._opened
        for descriptor, name in _sockets().items():
            if name in opened:
                _shut_down(descriptor)

    def _new(self) -> set[str]:
        before = set(self._before.values())
        return {name for name in _sockets().values() if name not in before}


def abort_groups(device: torch.device) -> None:
    """Aborts what NCCL waits for in all process groups of this process, if it does."""
    if device.type == "cuda" and dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def _sockets() -> dict[int, str]:
    """The sockets of this process: the kernel's name of each, by descriptor."""
    found = {}
    for entry in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as shared:
        # Only what is connected: gloo does not bear the loss of a socket that it listens on.
        shared.getpeername()
        shared.shutdown(socket.SHUT_RDWR)
