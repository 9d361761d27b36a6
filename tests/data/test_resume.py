"""Killed at any instant and started again, a run ends with the same bytes as one never stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nmoe_data.prep.pipeline as pipeline
import pytest
from kills import die_before_call
from nmoe_data.prep import prep


@pytest.fixture
def folder(tmp_path: Path, make_texts, write_jsonl) -> Path:
    """Two JSONL files with bad lines among them, and a binary."""
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(30))
    with (tmp_path / "in" / "a.jsonl").open("ab") as file:
        file.write(b"[]\n{\n")
    write_jsonl(tmp_path / "in" / "b.jsonl", make_texts(16, seed=1))
    (tmp_path / "in" / "c.txt").write_bytes(b"\0")
    return tmp_path


def start(folder: Path, kill_at: int, tokenizer: str = "bytes") -> int:
    """Run prep in a child with a checkpoint after each batch of 16; return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            sys.argv = ["nmoe-data", "prep", "in", "--out", "out"]
            pipeline.CHECKPOINT_SECONDS, pipeline.BATCH_DOCUMENTS = -1.0, 16
            die_before_call(kill_at)
            prep("in", Path("out"), tokenizer=tokenizer, held_out=0.3, shard_tokens=3000)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def undisturbed(folder: Path, tree, tokenizer: str = "bytes") -> dict[str, bytes]:
    assert start(folder, 0, tokenizer) == 0
    expected = tree(folder / "out")
    (folder / "out").rename(folder / "undisturbed")
    return expected


def test_killed_again_and_again_a_run_still_ends_with_the_same_bytes(folder: Path, tree) -> None:
    expected = undisturbed(folder, tree)
    assert {name.split("/")[0] for name in expected} == {
        "train",
        "held-out",
        "tokenizer.json",
        "rejected.jsonl",
    }
    # Each start dies a little later than the last one, wherever that finds it.
    kills, at = 0, 1
    while start(folder, at) == -signal.SIGKILL:
        kills, at = kills + 1, at + 3
    assert kills >= 5
    assert tree(folder / "out") == expected


def test_killed_once_before_any_durable_step_the_next_start_finishes(folder: Path, tree) -> None:
    expected = undisturbed(folder, tree)
    at = 1
    while start(folder, at) == -signal.SIGKILL:
        assert start(folder, 0) == 0, at
        assert tree(folder / "out") == expected, at
        shutil.rmtree(folder / "out")
        at += 1
    assert at > 50


def test_a_trained_tokenizer_is_the_same_after_a_kill(folder: Path, tree) -> None:
    expected = undisturbed(folder, tree, "bpe:300")
    for at in (3, 20):
        assert start(folder, at, "bpe:300") == -signal.SIGKILL
    assert start(folder, 0, "bpe:300") == 0
    assert tree(folder / "out") == expected


def test_ctrl_c_stops_with_a_hint_and_the_same_command_goes_on(
    tmp_path: Path, make_texts, write_jsonl, tree
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(3_000) * 4)
    code = "import sys; sys.argv[0] = 'nmoe-data'; from nmoe_data.cli import main; main()"
    command = [sys.executable, "-c", code, "prep", "in", "--out", "out"]
    command += ["--tokenizer", "bytes", "--shard-tokens", "100000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "train" / "shard-00001.npy").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == "stopped; run the same command again to go on\ninterrupted\n"
    assert (tmp_path / "out" / "state.json").exists()
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    resumed = tree(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert tree(tmp_path / "out") == resumed
