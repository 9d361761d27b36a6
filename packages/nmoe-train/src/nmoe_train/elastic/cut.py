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
    """The connections that this process opens from now on, to be shut down by any thread.

    Groups are made when they are needed, so that nothing but time tells theirs from others; who
    else has one open, such as an upload, finds it broken and tries again.
    """

    def __init__(self) -> None:
        self._before = set(open_sockets().values())

    def cut(self) -> None:
        """Shuts down all that are open by now."""
        for descriptor, name in open_sockets().items():
            if name not in self._before:
                shut_down(descriptor)


def abort_groups(device: torch.device) -> None:
    """Aborts what NCCL waits for in all process groups of this process, if it does."""
    if device.type == "cuda" and dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def open_sockets() -> dict[int, str]:
    """The sockets of this process: the kernel's name of each, by descriptor."""
    found = {}
    for entry in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


def shut_down(descriptor: int) -> None:
    """Ends a connection at both ends; leaves alone what is none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as shared:
        # Only what is connected: gloo does not bear the loss of a socket that it listens on.
        shared.getpeername()
        shared.shutdown(socket.SHUT_RDWR)
