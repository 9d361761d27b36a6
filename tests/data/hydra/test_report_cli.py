"""`hydra filter` and `hydra report` as a person types them: words, exit codes, no traceback."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra_heads import make_heads
from hydra_labels import write_label_folder
from inline_executor import inline
from judge_server import JudgeServer, hidden_scores, random_scores

__all__ = ["inline"]
pytestmark = pytest.mark.usefixtures("inline")

Run = Callable[..., object]


@pytest.fixture
def folder(tmp_path: Path, documents, write_jsonl, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder: `in`, `heads` and `labels` of the same real text."""
    texts = [document.text for document in documents(200)]
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    make_heads(tmp_path / "heads", texts)
    write_label_folder(tmp_path / "labels", texts, {"judge": random_scores})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_filter_says_what_it_did_and_then_that_it_was_done(folder: Path, run_cli) -> None:
    command = ("hydra", "filter", "in", "--heads", "heads", "--out", "out")
    first = run_cli(*command)
    assert first.code == 0, first.err
    counts = json.loads((folder / "out" / "filter.json").read_text())["counts"]
    assert first.out.startswith("filtered: out\n  documents 200\n")
    assert f"kept      {counts['kept']} (" in first.out
    assert f"probe drop    {counts['decided']['probe drop']}" in first.out
    again = run_cli(*command)
    assert again.code == 0 and again.out.startswith("already filtered: out\n")


def test_filter_asks_a_judge_about_the_band_within_a_budget(
    folder: Path, run_cli, server: JudgeServer
) -> None:
    server.behaviour.rule = hidden_scores
    done = run_cli(
        *("hydra", "filter", "in", "--heads", "heads", "--out", "out", "--band", "drop"),
        *("--band-model", "m", "--base-url", server.base_url, "--no-key", "--max-requests", "9"),
    )
    assert done.code == 0, done.err
    assert "judge     9 documents, " in done.out and "then the budget was spent" in done.out
    assert len(server.requests) == 9


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--band", "perhaps"], "E-ARGUMENT"),
        (["--workers", "0"], "E-ARGUMENT"),
        (["--workers", "2", "--devices", "cuda:0"], "E-ARGUMENT"),
        (["--max-cost", "1"], "E-ARGUMENT"),
        (["--band-model", "m", "--base-url", "nowhere"], "E-ARGUMENT"),
        (["--band-model", "m", "--api-key-env", "NO_SUCH_VARIABLE"], "E-HYDRA-KEY"),
        (["--band-model", "m", "--no-key", "--max-cost", "1"], "E-ARGUMENT"),
    ],
)
def test_wrong_options_are_one_line(folder: Path, run_cli, options: list[str], code: str) -> None:
    done = run_cli("hydra", "filter", "in", "--heads", "heads", "--out", "out", *options)
    assert done.code == 2
    assert done.err.startswith(f"error {code}: ") and done.err.count("\n") == 1


def test_missing_folders_are_one_line(folder: Path, run_cli) -> None:
    for arguments in (
        ("filter", "in", "--heads", "none", "--out", "out"),
        ("filter", "none", "--heads", "heads", "--out", "out"),
        ("report", "--heads", "none", "--labels", "labels", "--out", "report"),
        ("report", "--heads", "heads", "--labels", "none", "--out", "report"),
        ("report", "--heads", "heads", "--labels", "labels", "--filtered", "none", "--out", "r"),
    ):
        done = run_cli("hydra", *arguments)
        assert done.code == 2 and done.err.startswith("error E-"), arguments
        assert done.err.count("\n") == 1 and "none" in done.err


def test_no_agreement_is_exit_0_with_a_line_and_2_on_demand(folder: Path, run_cli) -> None:
    command = ("hydra", "report", "--heads", "heads", "--labels", "labels", "--out", "report")
    done = run_cli(*command)
    assert done.code == 0 and done.out == "report: report/report.html\n"
    assert done.err.startswith("  no agreement: Spearman ") and done.err.count("\n") == 1
    strict = run_cli(*command, "--fail-below", "0.8")
    assert strict.code == 2 and "below 0.8" in strict.err
    content = json.loads((folder / "report" / "report.json").read_text())
    assert content["verdict"]["verdict"] == "no agreement"
    lenient = run_cli(*command, "--fail-below", "-1")
    assert lenient.code == 0
