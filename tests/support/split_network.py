"""Two network namespaces joined by a cable that can be pulled: two hosts, as far as TCP knows."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "nmoe0"


REFUSALS = (
    "Operation not permitted",
    "Permission denied",
    "Operation not supported",
    "Function not implemented",
    "Unknown device type",
)
"""What `ip` says where this user may make no namespaces or cables, or the kernel has none."""


class NotPermitted(Exception):
    """The kernel has no network namespaces, or whoever runs this may not make them."""


class TwoHosts:
    """Hosts 0 and 1; each reaches the other at its address while the cable is in."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names

    def command(self, host: int, *command: str) -> list[str]:
        """A command as one that runs on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def connect(self) -> None:
        """Plugs the cable in."""
        for host, name in enumerate(self._names):
            _ip("-n", name, "link", "set", INTERFACE, "up")
            # What is pulled out loses its routes.
            _ip("-n", name, "route", "replace", "default", "dev", INTERFACE, "src", address(host))

    def cut(self) -> None:
        """Pulls it out: nothing arrives any more, and nobody is told."""
        _ip("-n", self._names[1], "link", "set", INTERFACE, "down")


def address(host: int) -> str:
    """A host's address."""
    return f"10.213.7.{host + 1}"


@contextmanager
def two_hosts(name: str) -> Iterator[TwoHosts]:
    """Two connected hosts for as long as it lasts.

    Raises NotPermitted where there can be none, CalledProcessError for any other failure of `ip`.
    """
    names = (f"{name}-0", f"{name}-1")
    try:
        _make(names)
        hosts = TwoHosts(names)
        hosts.connect()
        yield hosts
    finally:
        for namespace in names:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _make(names: tuple[str, str]) -> None:
    """The namespaces, each with an end of the cable."""
    if shutil.which("ip") is None:
        raise NotPermitted("there is no `ip` command")
    try:
        for namespace in names:
            _ip("netns", "add", namespace)
        ends = [("name", INTERFACE, "netns", namespace) for namespace in names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    except subprocess.CalledProcessError as error:
        if any(refusal in error.stderr for refusal in REFUSALS):
            raise NotPermitted(error.stderr.strip()) from error
        raise
    for host, namespace in enumerate(names):
        _ip("-n", namespace, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
        _ip("-n", namespace, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, done.args, stderr=done.stderr)
        error.add_note(done.stderr.strip())
        raise error
