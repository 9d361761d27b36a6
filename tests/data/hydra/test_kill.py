"""SIGKILL at 50 random instants: nothing that was recorded is asked again, the labels are the same.

What the server answers at the very instant of a kill can be lost on its way to the disk; such a
request is sent again under the same idempotency key, and a server that knows the key charges once.
So the rules are: a request whose reply is on disk is never sent again, and no key is ever charged
twice, nor any document under two keys.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from judge_server import JudgeServer

KILLS = 50
DOCUMENTS = 900
# Starts the real command in a child for each line it reads, so that the imports are done once.
STARTER = """
import os, sys
import nmoe_data.cli, nmoe_data.hydra.labelling
import openai, pyarrow
openai.AsyncOpenAI(api_key="none")
pyarrow.Table.from_pylist([{"imports": "more"}])
for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.argv = line.rstrip("\\n").split("\\t")
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(devnull, descriptor)
        code = 0
        try:
            nmoe_data.cli.main()
        except SystemExit as end:
            code = end.code or 0
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
"""


class Starter:
    """Starts commands and tells how they ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *arguments: object) -> int:
        """Return the process id of `nmoe-data ARGUMENTS...`."""
        self._process.stdin.write("\t".join(["nmoe-data", *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """Return the exit status of the command once it has ended."""
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.close()


def recorded(out: Path) -> set[str]:
    """Keys of the replies on disk."""
    if not (out / "requests.sqlite").is_file():
        return set()
    cache = sqlite3.connect(out / "requests.sqlite")
    try:
        return {key for (key,) in cache.execute("SELECT key FROM replies")}
    except sqlite3.OperationalError:
        return set()  # killed before it made its table
    finally:
        cache.close()


def labels_of(out: Path) -> list[dict[str, object]]:
    """The labels without what depends on the clock."""
    return pq.read_table(out / "labels.parquet").drop(["latency_s", "attempts"]).to_pylist()


@pytest.mark.slow
def test_50_kills_pay_nothing_twice_and_leave_the_same_labels(
    server: JudgeServer, starter: Starter, pieces_file, until: Callable, tmp_path: Path
) -> None:
    server.behaviour.latency_s = 0.05
    server.behaviour.faults = {"prose": 0.05, "refused": 0.05, "cut": 0.05, "fenced": 0.05}
    source = pieces_file(DOCUMENTS)
    judge = ("--model", "m", "--base-url", server.base_url, "--no-key", "--concurrency", "4")

    def command(out: Path) -> tuple[object, ...]:
        return ("hydra", "label", source, "--out", out, "--rubric", "code", *judge)

    out = tmp_path / "killed"
    draw = random.Random(0)
    on_disk_after: dict[str, int] = {}
    progress = []
    for kill in range(KILLS):
        sent = len(server.requests)
        child = starter.start(*command(out))
        if kill % 2:
            # From its first request on; the others also while it starts.
            until(lambda sent=sent: len(server.requests) > sent)
        time.sleep(draw.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        assert starter.wait() == signal.SIGKILL
        until(lambda: server.open == 0)
        for key in recorded(out):
            on_disk_after.setdefault(key, len(server.requests))
        progress.append(len(on_disk_after))
    # The instants were spread over the run, its start and its middle.
    assert len(set(progress)) > 20
    assert 50 < progress[-1] < len(server.payments) + 1
    server.behaviour.latency_s = 0.0
    starter.start(*command(out))
    assert starter.wait() == 0

    again = [r.key for n, r in enumerate(server.requests) if n >= on_disk_after.get(r.key, 1 << 60)]
    assert again == []
    assert len(recorded(out)) == len(server.payments)
    # In flight at a kill: at most one request for each of the four places.
    repeated = len(server.requests) - len(server.payments)
    assert 0 < repeated <= 4 * KILLS

    killed_payments = set(server.payments)
    starter.start(*command(tmp_path / "undisturbed"))
    assert starter.wait() == 0
    assert labels_of(out) == labels_of(tmp_path / "undisturbed")
    assert set(server.payments) == killed_payments
