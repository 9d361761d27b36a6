"""The main job as a user runs it, and what it says when the input is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command, losses

LAST_LINE = re.compile(r"^validation loss (\d+\.\d+) \(unigram (\d+\.\d+)\)$", re.MULTILINE)


@pytest.mark.slow
def test_quickstart_learns_and_its_run_opens_in_the_dashboards_query(
    nmoe_train: Command, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "first"
    process = nmoe_train("quickstart", "--out", run, "--device", "cpu", small=False)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    validation, unigram = map(float, LAST_LINE.findall(output)[-1])
    assert validation <= 0.8 * unigram, output
    assert f"nviz serve {run.parent}" in output
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "completed"
    assert record["results"]["loss/validation"] == pytest.approx(validation, abs=0.005)
    assert list(losses(run)) == list(range(1, record["steps"] + 1))

    query = "select name, step from runs"
    command = [sys.executable, "-m", "nviz", "query", str(run.parent), query, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == {"name": "first", "step": record["steps"]}


def nul_bytes(folder: Path) -> None:
    (folder / "a.txt").write_bytes(bytes(1000))


def one_character(folder: Path) -> None:
    (folder / "a.txt").write_text("x")


WRONG_TEXT = {
    "empty folder": (lambda folder: None, "E-SOURCE-EMPTY"),
    "a file of NUL bytes": (nul_bytes, "E-NO-TEXT"),
    "one character": (one_character, "E-DATA-HELD-OUT"),
}


def error_line(process: "subprocess.Popen[str]") -> str:
    """The one line of an error that the user can mend."""
    output = process.communicate()[0]
    assert process.returncode == 2, output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error ")]
    return line


@pytest.mark.parametrize("wrong", WRONG_TEXT)
def test_useless_text_gives_one_clear_line(nmoe_train: Command, tmp_path: Path, wrong: str) -> None:
    make, code = WRONG_TEXT[wrong]
    folder = tmp_path / "text"
    folder.mkdir()
    make(folder)
    line = error_line(nmoe_train("quickstart", "--text", folder, "--out", tmp_path / "run"))
    assert code in line and str(tmp_path) in line


def test_missing_text_and_unwritable_output_give_one_clear_line(
    nmoe_train: Command, tmp_path: Path
) -> None:
    missing = tmp_path / "nowhere"
    line = error_line(nmoe_train("quickstart", "--text", missing, "--out", tmp_path / "run"))
    assert "E-SOURCE-MISSING" in line and str(missing) in line
    (tmp_path / "file").touch()
    line = error_line(nmoe_train("quickstart", "--out", tmp_path / "file" / "run"))
    assert str(tmp_path / "file") in line


@pytest.mark.slow
def test_damage_is_reported_and_nothing_is_lost(
    nmoe_train: Command, text_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def train(steps: int) -> subprocess.Popen[str]:
        return nmoe_train("quickstart", "--text", text_folder, "--steps", str(steps), "--out", run)

    process = train(10)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    before = losses(run)
    (newest,) = run.glob("checkpoints/step-00000010/*.safetensors")
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    process = train(12)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "E-CHECKPOINT-CORRUPT" in output and "resuming from step-00000005" in output
    after = losses(run)
    assert all(after[step] == before[step] for step in range(1, 6))
    assert list(after) == list(range(1, 13))

    shard = run / "data" / "train" / "shard-00000.npy"
    os.truncate(shard, shard.stat().st_size // 2)
    assert str(shard) in error_line(train(14))
