"""The guide in apps/hydra-filter: its five commands, as they stand there, against a real server."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from guide import shell_commands
from judge_server import Behaviour, JudgeServer, hidden_scores, random_scores
from nmoe_data.hydra.rubric import load_rubric
from nmoe_data.prep import prep

APP = Path(__file__).parents[2] / "apps" / "hydra-filter"
# Fewer than the guide's, so that a test takes seconds.
SMALLER = {"--sample 2000": "--sample 500", "--injection 200": "--injection 40"}


def corpus(folder: Path) -> int:
    """Pieces of Python's own modules as JSON lines in two files; how many."""
    folder.mkdir()
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    pieces = [
        text[start : start + 1500]
        for text in (path.read_text(errors="ignore") for path in modules)
        for start in range(0, len(text) - 1500, 1500)
    ]
    for at, name in enumerate(("library", "more")):
        rows = (json.dumps({"text": piece}) for piece in pieces[at::2])
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return len(pieces)


def run_guide(folder: Path, server: JudgeServer) -> list[subprocess.CompletedProcess[str]]:
    """Run each command as a reader's shell would, in `folder`, until one fails."""
    ended = []
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {"CORPUS": "corpus", "MODEL": "judge", "JUDGE_URL": server.base_url}
    for command in shell_commands(APP / "README.md"):
        for shown, smaller in SMALLER.items():
            command = command.replace(shown, smaller)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={**os.environ, **places, "PATH": tools},
            capture_output=True,
            text=True,
        )
        ended.append(done)
        if done.returncode:
            break
    return ended


@pytest.mark.slow
def test_five_commands_lead_from_jsonl_to_a_filtered_set(tmp_path: Path) -> None:
    count = corpus(tmp_path / "corpus")
    with JudgeServer(Behaviour(rule=hidden_scores, noise=0.1)) as server:
        ended = run_guide(tmp_path, server)
    assert len(ended) == 5, ended[-1].stderr
    assert [done.returncode for done in ended] == [0] * 5, ended[-1].stderr
    assert all("Traceback" not in done.stderr for done in ended)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["verdict"]["verdict"] == "agreement"
    summary = json.loads((tmp_path / "filtered" / "filter.json").read_text())
    assert summary["counts"]["documents"] == count
    kept = list((tmp_path / "filtered" / "kept").iterdir())
    texts = []
    for path in kept:
        with path.open("rb") as file:
            stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            texts += [json.loads(line)["text"] for line in stream.read().splitlines()]
    assert len(texts) == summary["counts"]["kept"] and 0.35 < len(texts) / count < 0.65
    # What it is for: by the judge's own rule the kept ones are better than the corpus.
    rule = [sum(hidden_scores(text)) for text in texts]
    lines = [
        json.loads(line)["text"]
        for path in sorted((tmp_path / "corpus").iterdir())
        for line in path.read_text().splitlines()
    ]
    everything = [sum(hidden_scores(text)) for text in lines]
    assert sum(rule) / len(rule) > sum(everything) / len(everything) + 1.0
    made = prep(str(tmp_path / "filtered" / "kept"), tmp_path / "shards", tokenizer="bytes")
    assert made.documents == len(texts) and not made.rejected


@pytest.mark.slow
def test_without_a_signal_the_guide_ends_before_anything_is_filtered(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    with JudgeServer(Behaviour(rule=random_scores)) as server:
        ended = run_guide(tmp_path, server)
    assert [done.returncode for done in ended] == [0, 0, 2]
    assert "error E-HYDRA-" in ended[-1].stderr
    assert not (tmp_path / "filtered").exists()


def test_every_option_in_the_guide_is_one_that_the_command_has(
    run_help: Callable[[str], str],
) -> None:
    commands = shell_commands(APP / "README.md")
    assert len(commands) == 5
    for command in commands:
        name = command.split()[2]
        for option in re.findall(r"--[a-z-]+", command):
            assert option in run_help(name), f"{name} has no {option}"


@pytest.fixture
def run_help() -> Callable[[str], str]:
    """The help of a HYDRA command."""

    def shown(name: str) -> str:
        command = [sys.executable, "-m", "nmoe_data", "hydra", name, "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return shown


def test_the_rubric_of_the_guide_can_be_used() -> None:
    rubric = load_rubric(APP / "rubric.toml")
    content = tomllib.loads((APP / "rubric.toml").read_text())
    assert rubric.names == tuple(entry["name"] for entry in content["dimensions"])
