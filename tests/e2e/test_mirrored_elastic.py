"""An elastic run that loses a worker, then its host with all its files, and goes on by its mirror.

The bucket is that of a real S3 server. Saves are slowed down, and training with them, so that the
steps made meanwhile are few: what the test waits for are events.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import losses
from layout_runs import make_shards
from nmoe_train.drill.report import TOLERANCE, read_events
from nmoe_train.presets import DRILL
from nmoe_train.storage.mirror import Mirror
from nmoe_train.storage.target import Target
from process_tree import command_of, descendants
from s3_bucket import NAME, Bucket, bucket

__all__ = ["bucket"]

PATIENCE_S = 300
STEPS_AFTER = 12


class Started:
    """`nmoe-train ARGUMENTS... --set KEY=VALUE...` in a process; what it prints goes to a file."""

    def __init__(self, log: Path, *arguments: object, **sets: object) -> None:
        overrides = [f"{key}={value}" for key, value in sets.items()]
        command = [*map(str, arguments), *(w for o in overrides for w in ("--set", o))]
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nmoe_train", *command],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        """What a host's loss does to its processes."""
        # What the launcher starts meanwhile would live on.
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, true: Callable[[], Any]) -> None:
        """Waits while the process lives."""
        until_s = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until_s, self.log.read_text()
            time.sleep(0.02)

    def end(self) -> None:
        """Waits for the end, which must be a good one."""
        assert self.process.wait(PATIENCE_S) == 0, self.log.read_text()


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """Events of a kind, so far."""
    there = (run / "events.jsonl").exists()
    return [event for event in read_events(run) if event["event"] == name] if there else []


def first_rank(launcher: int) -> int:
    """The process id of rank 0, which is the parent of the uploader."""
    below = descendants(launcher)
    (found,) = {p for pid, p in below.items() if "nmoe_train.storage.uploader" in command_of(pid)}
    return found


@pytest.mark.slow
def test_a_lost_worker_and_then_a_lost_host_leave_no_trace_in_the_losses(
    tmp_path: Path, bucket: Bucket
) -> None:
    make_shards(tmp_path)
    run = tmp_path / "run"
    sets = {"data.dir": tmp_path / "data", "checkpoint.every": 5}
    far = {
        "run.dir": run,
        "checkpoint.mirror": f"s3://{NAME}/runs",
        "checkpoint.mirror_patience_s": 360,
        "elastic.deadline_s": 60,
    }
    ever = {"train.steps": 1_000_000, "checkpoint.limit_mb_s": 0.3, "parallel.ep": 2}
    first = Started(tmp_path / "1.log", "elastic", DRILL, "--workers", 2, **sets, **far, **ever)
    with first:
        first.wait_for(lambda: events(run, "mirror"))
        # With rank 0 goes the process that uploads.
        os.kill(first_rank(first.process.pid), signal.SIGKILL)
        first.wait_for(lambda: events(run, "recovery"))
        recovered = events(run, "recovery")[0]
        first.wait_for(lambda: events(run, "mirror")[-1]["step"] > recovered["step"])
        first.kill_all()
    assert recovered["from"] == "memory"
    before = losses(run)
    shutil.rmtree(run)

    step = int(Mirror(Target(f"s3://{NAME}/runs/run/checkpoints", 60)).complete()[0][5:])
    steps = {"train.steps": step + STEPS_AFTER}
    again = {**sets, **far, **steps, "parallel.ep": 3}
    with Started(tmp_path / "2.log", "elastic", DRILL, "--workers", 3, **again) as second:
        second.end()
    found = read_events(run)
    assert (found[0]["event"], found[0]["step"]) == ("start", step)
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "completed"
    assert record["layout"]["ep"] == 3
    assert events(run, "mirror")[-1]["step"] == step + STEPS_AFTER
    after = losses(run)
    assert list(after) == list(range(step + 1, step + STEPS_AFTER + 1))

    whole = {**sets, **steps, "run.dir": tmp_path / "whole"}
    with Started(tmp_path / "3.log", "run", DRILL, **whole) as undisturbed:
        undisturbed.end()
    want = losses(tmp_path / "whole")
    assert before.keys() | after.keys() >= want.keys()
    for curve in (before, after):
        for number in curve.keys() & want.keys():
            assert curve[number] == pytest.approx(want[number], rel=TOLERANCE), number
