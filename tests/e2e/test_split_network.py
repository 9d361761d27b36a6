"""Two hosts of an elastic run whose network is really cut: one side goes on, the other leaves.

The hosts are network namespaces, which the kernel must permit; they share the run's folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from layout_runs import make_shards
from nmoe_train.drill.report import read_events
from nmoe_train.presets import DRILL
from split_network import INTERFACE, NotPermitted, TwoHosts, two_hosts

PATIENCE_S = 240


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts(f"nmoe{os.getpid()}") as connected:
            yield connected
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")


class Host:
    """The launcher on one host, with two workers of four."""

    def __init__(self, hosts: TwoHosts, number: int, folder: Path, *options: str) -> None:
        sets = {"run.dir": folder / "run", "data.dir": folder / "data", "train.steps": 1_000_000}
        sets |= {"checkpoint.every": 50, "parallel.ep": 2, "parallel.rdep.deadline_s": 120}
        overrides = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "nmoe_train", "elastic", str(DRILL), "--workers", "2"]
        command += ["--expected", "4", *options, *overrides]
        self.log = folder / f"host-{number}-{time.monotonic_ns()}.log"
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                hosts.command(number, *command),
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE},
            )

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def store(self) -> str:
        """The address that it prints."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("store: ")]
        return lines[0].removeprefix("store: ") if lines else ""


def wait_for(true: Callable[[], Any], *hosts: Host, alive: bool = True) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not true():
        for host in hosts:
            assert not alive or host.process.poll() is None, host.log.read_text()
        assert time.monotonic() < until_s, "\n".join(host.log.read_text() for host in hosts)
        time.sleep(0.05)


def newest(run: Path) -> dict[str, Any]:
    """The run's record; empty before there is one."""
    path = run / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def ranks(run: Path) -> int:
    layout = newest(run).get("layout")
    return layout["dp"] if layout else 0


@pytest.mark.slow
def test_of_two_hosts_that_lose_each_other_one_goes_on_and_the_other_leaves_and_returns(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    make_shards(tmp_path)
    run = tmp_path / "run"
    with Host(hosts, 0, tmp_path) as first:
        wait_for(first.store, first)
        with Host(hosts, 1, tmp_path, "--store", first.store()) as second:
            wait_for(lambda: ranks(run) == 4 and newest(run)["step"] > 0, first, second)
            hosts.cut()
            wait_for(lambda: ranks(run) == 2, first)
            split = newest(run)
            # The side without the store says why it leaves, and has written nothing meanwhile.
            wait_for(lambda: second.process.poll() is not None, first, second, alive=False)
            assert second.process.returncode == 1
            assert "error E-STORE: " in second.log.read_text()
            wait_for(lambda: newest(run)["step"] > split["step"], first)
        assert attempts_of_other_ranks(run) <= set(range(1, split["attempt"]))
        faults = [e for e in read_events(run) if e["event"] == "fault"]
        assert len({fault["worker"] for fault in faults}) >= 2, "both are told of"
        hosts.connect()
        with Host(hosts, 1, tmp_path, "--store", first.store()) as returned:
            wait_for(lambda: ranks(run) == 4 and newest(run)["status"] == "running", first)
            first.process.send_signal(signal.SIGTERM)
            wait_for(lambda: first.process.poll() is not None, first, alive=False)
            wait_for(lambda: returned.process.poll() is not None, returned, alive=False)
    assert first.process.returncode == 128 + signal.SIGTERM, first.log.read_text()
    assert newest(run)["status"] == "interrupted"
    assert (run / "checkpoints" / f"step-{newest(run)['step']:08d}" / "COMPLETE").exists()


def attempts_of_other_ranks(run: Path) -> set[int]:
    """The attempts in which the ranks of the second host have recorded a step."""
    found = [path.name.split("-") for path in (run / "metrics").iterdir()]
    return {int(attempt) for attempt, rank, *_ in found if rank.split(".")[0] in ("2", "3")}
