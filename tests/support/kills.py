"""Processes that end before they are done: before a chosen durable step, or at a random instant."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def die_before_call(number: int) -> None:
    """Let this process kill itself before the n-th call that makes a change durable or visible."""
    left = number

    def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*arguments, **named)

        return call

    # A kill leaves what the kernel holds, so the disk itself need not be waited for.
    os.fsync = counted(lambda descriptor: None)
    for name in ("replace", "unlink", "mkdir", "touch"):
        setattr(Path, name, counted(getattr(Path, name)))


def in_child(work: Callable[[], object]) -> int:
    """Do `work` in a fork of this process; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_until_done(command: Sequence[str], folder: Path, longest_s: float, seed: int) -> int:
    """Start `command` again and again, each time killed at a random instant; how many kills.

    Each start is given a little more time than the last one, so that one ends.
    """
    draw, kills = random.Random(seed), 0
    while True:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + draw.uniform(0.2, 1.0) * longest_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is None:
            process.kill()
            kills += 1
        assert process.stderr is not None
        said = process.stderr.read()
        process.wait()
        if process.returncode == 0:
            return kills
        assert process.returncode == -signal.SIGKILL, said
        longest_s *= 1.1
