"""A run that is killed anywhere and started again ends with the bits of a run never stopped."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command, checkpoint_hashes, losses

STEPS = 24


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Polls as fast as it can; fails if the process ends before the condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the awaited instant did not come"


def steps_recorded(run: Path) -> int:
    live = run / "metrics" / "1-0.jsonl"
    return live.read_text().count("\n") if live.exists() else 0


INSTANTS: dict[str, Callable[[Path], bool]] = {
    "while shards are made": lambda run: (run / "data" / "tokenizer.json").exists(),
    "before the first checkpoint": lambda run: steps_recorded(run) >= 2,
    "between checkpoints": lambda run: steps_recorded(run) >= 13,
    "while a checkpoint is written": lambda run: any(
        not (folder / "COMPLETE").exists() for folder in run.glob("checkpoints/step-*")
    ),
}


@pytest.mark.slow
def test_killed_at_any_instant_it_resumes_bitwise(
    nmoe_train: Command, text_folder: Path, tmp_path: Path
) -> None:
    def start(run: Path) -> subprocess.Popen[str]:
        options = ("--text", text_folder, "--steps", str(STEPS), "--out", run, "--device", "cpu")
        return nmoe_train("quickstart", *options)

    undisturbed = tmp_path / "undisturbed"
    process = start(undisturbed)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    expected = losses(undisturbed)
    assert list(expected) == list(range(1, STEPS + 1))

    for number, (instant, reached) in enumerate(INSTANTS.items()):
        run = tmp_path / f"killed-{number}"
        process = start(run)
        wait_for(lambda run=run, reached=reached: reached(run), process)
        process.kill()
        process.communicate()
        process = start(run)
        output = process.communicate()[0]
        assert process.returncode == 0, f"{instant}: {output}"
        assert losses(run) == expected, instant
        assert checkpoint_hashes(run) == checkpoint_hashes(undisturbed), instant


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_leaves_and_resumes(
    nmoe_train: Command, text_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    options = ("--text", text_folder, "--steps", "100000", "--out", run, "--device", "cpu")
    process = nmoe_train("quickstart", *options)
    wait_for(lambda: steps_recorded(run) >= 3, process)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, output
    assert "goes on from there" in output
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "interrupted"
    saved = max((run / "checkpoints").glob("step-*/COMPLETE")).parent
    assert saved.name == f"step-{record['step']:08d}"
    assert sorted(losses(run)) == list(range(1, record["step"] + 1))
