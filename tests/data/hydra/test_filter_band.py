"""The band goes to the judge in the order of the corpus, within the budget, and is paid once."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nmoe_data.hydra.filter.band as band
import nmoe_data.hydra.filter.parts as parts
import nmoe_data.hydra.filter.plan as plan
import pyarrow.parquet as pq
import pytest
import zstandard
from hydra_heads import make_heads
from inline_executor import inline
from judge_server import JudgeServer, hidden_scores
from kills import in_child
from nmoe_data.errors import DataError
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.filter import Asking, FilterResult, FilterSettings, filter_corpus
from nmoe_data.hydra.heads import save_heads

__all__ = ["inline"]
pytestmark = pytest.mark.usefixtures("inline")

Tree = Callable[[Path], dict[str, bytes]]
Judge = Callable[..., JudgeSettings]


@pytest.fixture
def folder(tmp_path: Path, documents, write_jsonl) -> Path:
    """Real text as JSON lines, and heads whose band is nearly half of it."""
    texts = [document.text for document in documents(120)]
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    make_heads(tmp_path / "heads", texts, judge=False, share=(0.3, 0.75))
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 15_000)
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 50)
    monkeypatch.setattr(band, "WINDOW", 8)


def run(folder: Path, out: str, asking: Asking | None, **named: Any) -> FilterResult:
    settings = FilterSettings(asking=asking, **named)
    return filter_corpus(str(folder / "in"), folder / "heads", folder / out, settings)


def scores(out: Path) -> list[dict[str, Any]]:
    paths = sorted((out / "scores").iterdir())
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def texts_of(folder: Path) -> list[str]:
    lines = (folder / "in" / "a.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def results(tree: Tree, out: Path) -> dict[str, bytes]:
    """All that must be the same whenever a run was stopped: all but time and the paid replies."""
    found = tree(out)
    return {
        name: data
        for name, data in found.items()
        if name != "timing.json" and not name.startswith("requests.sqlite")
    }


def test_every_document_of_the_band_is_decided_by_the_judges_scores(
    folder: Path, server: JudgeServer, judge: Judge
) -> None:
    run(folder, "without", None)
    result = run(folder, "out", Asking(judge()))
    before, after = scores(folder / "without"), scores(folder / "out")
    asked = [n for n, row in enumerate(before) if row["decided_by"] == "band"]
    assert 40 < len(asked) < 70
    texts = texts_of(folder)
    for number, row in enumerate(after):
        if number not in asked:
            assert row == before[number]
            continue
        true = hidden_scores(texts[number])
        assert row["decided_by"] == "llm" and tuple(row["scores"]) == true
        assert row["quality"] == pytest.approx(sum(true) / 25, abs=1e-4)
        assert row["decision"] == ("keep" if sum(true) / 25 >= 0.6 else "drop")
    assert {row["decision"] for n, row in enumerate(after) if n in asked} == {"keep", "drop"}
    assert len(server.requests) == len(asked) == result.summary["llm"]["requests"]
    kept = []
    for path in sorted((folder / "out" / "kept").iterdir()):
        with path.open("rb") as file:
            stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            kept += [json.loads(line)["text"] for line in stream.read().splitlines()]
    assert kept == [texts[n] for n, row in enumerate(after) if row["decision"] == "keep"]
    dropped = [json.loads(line) for line in (folder / "out/dropped.jsonl").read_text().splitlines()]
    assert sorted(row["text"] for row in dropped) == sorted(
        texts[n] for n, row in enumerate(after) if row["decision"] == "drop"
    )


def test_a_budget_of_documents_goes_to_the_first_of_the_corpus(
    folder: Path, server: JudgeServer, judge: Judge
) -> None:
    result = run(folder, "out", Asking(judge(), max_requests=21), band="drop")
    by = [row["decided_by"] for row in scores(folder / "out")]
    band_rows = [each for each in by if each in ("llm", "band")]
    assert band_rows == ["llm"] * 21 + ["band"] * (len(band_rows) - 21)
    assert len(server.requests) == 21
    assert result.summary["llm"]["stopped"]
    left = [row["decision"] for row in scores(folder / "out") if row["decided_by"] == "band"]
    assert left and set(left) == {"drop"}


def test_a_budget_of_money_is_never_passed(folder: Path, server: JudgeServer, judge: Judge) -> None:
    priced = judge(price_in=1.0, price_out=1.0)
    whole = run(folder, "whole", Asking(priced)).summary["llm"]
    limit = whole["cost"] * 0.9
    spent = run(folder, "out", Asking(priced, max_cost=limit)).summary["llm"]
    # What stays is less than the worst case of one document more.
    assert limit - 0.04 < spent["cost"] <= limit
    assert spent["stopped"] and not whole["stopped"]
    by = [row["decided_by"] for row in scores(folder / "out") if row["decided_by"] != "probe"]
    assert by == sorted(by, reverse=True) and set(by) == {"llm", "band"}


def test_when_a_document_does_not_fit_no_later_one_is_asked(
    tmp_path: Path, documents, write_jsonl, server: JudgeServer, judge: Judge
) -> None:
    texts = [document.text for document in documents(20)]
    texts[5] = "".join(texts[6:18])
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    heads = make_heads(tmp_path / "heads", texts, judge=False)
    assert heads.calibration is not None
    everything = replace(heads.calibration, tau_drop=0.0, tau_keep=1.0)
    save_heads(tmp_path / "heads", replace(heads, calibration=everything))
    # Four times the worst case of a short document fits, that of the long one does not.
    llm = run(tmp_path, "out", Asking(judge(), max_tokens=60_000)).summary["llm"]
    by = [row["decided_by"] for row in scores(tmp_path / "out")]
    assert by == ["llm"] * 5 + ["band"] * 15
    assert llm["stopped"] and llm["requests"] == len(server.requests) == 5


def test_what_the_judge_did_not_score_falls_to_the_rule_and_is_no_low_score(
    folder: Path, server: JudgeServer, judge: Judge
) -> None:
    server.behaviour.faults = {"refused": 0.5}
    llm = run(folder, "out", Asking(judge())).summary["llm"]
    rows = scores(folder / "out")
    left = [row for row in rows if row["decided_by"] == "band"]
    assert left and {row["decision"] for row in left} == {"keep"}
    unscored = {name: count for name, count in llm["classes"].items() if name != "scored"}
    assert sum(unscored.values()) == len(left)
    assert llm["classes"]["scored"] == sum(row["decided_by"] == "llm" for row in rows) > 0


@pytest.mark.parametrize("max_requests", [None, 30])
def test_killed_between_replies_it_ends_the_same_and_pays_nothing_twice(
    folder: Path, server: JudgeServer, judge: Judge, tree: Tree, max_requests: int | None
) -> None:
    asking = Asking(judge(), max_requests=max_requests)
    run(folder, "undisturbed", asking)
    paid = len(server.requests)
    server.requests.clear()
    for window in (1, 2, 3):

        def until(window: int = window) -> None:
            inner, left = band.BandJudge._grade, window

            def graded(self: band.BandJudge, rows: list[Any]) -> Any:
                nonlocal left
                labels = inner(self, rows)
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return labels

            band.BandJudge._grade = graded  # type: ignore[method-assign, assignment]
            run(folder, "out", asking)

        assert in_child(until) == -signal.SIGKILL
    run(folder, "out", asking)
    assert len(server.requests) == paid
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


def test_a_judge_without_quota_ends_the_run_which_goes_on_later(
    folder: Path, server: JudgeServer, judge: Judge, tree: Tree
) -> None:
    server.behaviour.quota = 12
    with pytest.raises(DataError, match="E-HYDRA-QUOTA"):
        run(folder, "out", Asking(judge()))
    server.behaviour.quota = 1 << 30
    run(folder, "out", Asking(judge()))
    run(folder, "undisturbed", Asking(judge()))
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


def test_another_judge_or_budget_is_refused_on_resume(
    folder: Path, server: JudgeServer, judge: Judge
) -> None:
    run(folder, "out", Asking(judge(), max_requests=5))
    for other in (None, Asking(judge(), max_requests=6)):
        with pytest.raises(DataError, match=r"E-HYDRA-RESUME.*judge"):
            run(folder, "out", other)


def test_no_key_reaches_the_folder(
    folder: Path, server: JudgeServer, judge: Judge, monkeypatch: pytest.MonkeyPatch, tree: Tree
) -> None:
    monkeypatch.setenv("SECRET_KEY", "sk-this-is-a-secret")
    run(folder, "out", Asking(judge(key_variable="SECRET_KEY")))
    assert all(b"sk-this-is-a-secret" not in data for data in tree(folder / "out").values())


@pytest.mark.parametrize("named", [{"max_cost": 0.0}, {"max_tokens": -1}, {"max_requests": 0}])
def test_budgets_of_nothing_are_refused(judge: Judge, named: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="E-ARGUMENT"):
        Asking(judge(), **named)
