"""One bad run folder, and how little of the others it takes with it: pipes, links, odd text."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headless import Open, open_page, texts
from nviz import formats
from nviz.charts import log_marks
from nviz.errors import VizError
from nviz.queries import experts, hydra
from nviz.queries.experts import idle_experts
from nviz.store import lines, sql_worker
from nviz.store.checkpoints import list_checkpoints
from nviz.store.events import EventLog
from nviz.store.experts import ExpertLoads
from nviz.store.hydra import HydraIndex
from nviz.store.lines import GrowingLines
from nviz.store.manifests import find_datasets
from nviz.store.parse import parse_json, time_s
from nviz.store.plain import is_plain, open_plain, read_plain
from nviz.store.runs import RunIndex
from nviz.store.sql_worker import SqlWorker
from nviz.store.summary import Summaries
from run_folder import RunFolder, record

__all__ = ["open_page"]

PAGES = ("runs", "run", "compare", "experiments", "faults", "configuration", "checkpoints")


def good(root: Path) -> RunFolder:
    """A run that must stay visible."""
    run = RunFolder(root, "good", name="good run")
    run.append(*[record(step) for step in range(5)])
    run.event("start", 0)
    return run


def bad_json(root: Path, **fields: Any) -> Path:
    """A run folder whose run.json has these fields beside those of a good one."""
    run = RunFolder(root, "bad")
    path = run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return run.path


def all_pages_and_sql_work(root: Path, open_page: Open) -> None:
    for page in PAGES:
        open_page(page, **({} if page in ("runs", "compare", "experiments") else {"run": "good"}))
    assert "good run" in texts(open_page("run", run="good"))
    worker = SqlWorker(root)
    try:
        found = worker.query("SELECT count(*) FROM metrics WHERE run = 'good'", 10, 60.0)
        assert found.answer.rows == [(5,)]
        assert worker.query("SELECT count(*) FROM runs", 10, 60.0).answer.rows == [(2,)]
    finally:
        worker.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "x\ud800y", "tags": ["\udfff"], "config": {"a": {"\ud800": "\ud801"}}},
        {"started_unix_s": 1e300, "updated_unix_s": "NaN", "ended_unix_s": "Infinity"},
        {"started_unix_s": -(10**400), "ended_unix_s": 10**400, "results": {"loss": 10**400}},
    ],
    ids=["halves of surrogate pairs", "times beyond all calendars", "numbers beyond a float"],
)
def test_odd_values_in_one_run_json_hide_no_other_run(
    root: Path, open_page: Open, fields: dict[str, Any]
) -> None:
    good(root)
    bad_json(root, **fields)
    all_pages_and_sql_work(root, open_page)


def test_a_folder_whose_name_is_no_utf8_is_listed_and_hides_no_other(
    root: Path, open_page: Open
) -> None:
    good(root)
    bad = bad_json(root, name="named")
    bad.rename(Path(os.fsdecode(os.fsencode(root) + b"/odd\xff")))
    assert set(RunIndex(root).refresh()) == {"good", "odd\\xff"}
    all_pages_and_sql_work(root, open_page)


def test_halves_of_surrogate_pairs_become_question_marks_and_pairs_stay() -> None:
    assert parse_json(b'{"a\\ud800": ["\\uDFFF", "\\ud83d\\ude00", NaN]}') == {
        "a?": ["?", "\U0001f600", pytest.approx(math.nan, nan_ok=True)]
    }
    with pytest.raises(ValueError, match="deep"):
        parse_json(b"[" * 100_000 + b"]" * 100_000)


def test_only_moments_of_the_calendar_are_times() -> None:
    assert time_s(1.5) == 1.5 and time_s(0) == 0.0
    for value in ("Infinity", "NaN", -1.0, 1e15, 10**400, True, None, "1"):
        assert time_s(value) is None


def test_pipes_and_devices_are_not_opened(root: Path, open_page: Open) -> None:
    good(root)
    bad = bad_json(root)
    os.mkfifo(bad / "events.jsonl")
    inside = bad / "checkpoints" / "step-00000001"
    inside.mkdir(parents=True)
    os.mkfifo(inside / "COMPLETE")
    os.mkfifo(inside / "meta.json")
    log = EventLog(bad)
    log.refresh()
    assert log.problems() == ["events.jsonl: a link or no plain file, which is not read"]
    assert list_checkpoints(bad)[0].state == "unfinished"
    all_pages_and_sql_work(root, open_page)
    for page in ("run", "faults", "checkpoints"):
        open_page(page, run="bad")


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    plain, link, pipe = (tmp_path / name for name in ("plain", "link", "pipe"))
    plain.write_bytes(b"12345")
    link.symlink_to(plain)
    os.mkfifo(pipe)
    assert [is_plain(path) for path in (plain, link, pipe, tmp_path)] == [True, False, False, False]
    assert read_plain(plain, 5) == b"12345" and read_plain(plain, 4) is None
    for path in (link, pipe, tmp_path):
        with pytest.raises(OSError, match="no plain file"):
            open_plain(path)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")


def test_links_lead_to_nothing_outside(root: Path, tmp_path: Path) -> None:
    outside = RunFolder(tmp_path, "outside")
    outside.event("eval", 3, **{"loss/validation": 0.123456})
    (outside.path / "checkpoints" / "step-00000003").mkdir(parents=True)
    dropped = {"text": "a secret", "quality": 0.5, "decided_by": "head"}
    (outside.path / "dropped.jsonl").write_text(json.dumps(dropped) + "\n")
    run = good(root)
    (run.path / "events.jsonl").unlink()
    for name in ("events.jsonl", "checkpoints", "dropped.jsonl"):
        (run.path / name).symlink_to(outside.path / name)
    (found,) = RunIndex(root).refresh().values()
    assert Summaries().summary(found).validation is None
    assert list_checkpoints(run.path) == []
    assert hydra.dropped_examples(run.path) == []
    assert len(hydra.dropped_examples(outside.path)) == 1


def test_links_that_lead_to_themselves_hide_no_run(root: Path) -> None:
    good(root)
    (root / "loop").symlink_to(root / "loop")
    (root / "group").mkdir()
    (root / "group" / "up").symlink_to(root)
    assert "good" in RunIndex(root).refresh()
    assert HydraIndex(root).refresh() == {}
    assert find_datasets(root, []) == {}


def test_a_line_that_is_too_long_is_passed_over_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 300)
    path = tmp_path / "lines"
    found = GrowingLines(path)

    def read() -> bytes:
        return b"".join(found.new_blocks())

    path.write_bytes(b"x" * 5000)
    assert read() == b"" and found.is_empty
    with path.open("ab") as file:
        file.write(b"y" * 700)
        file.flush()
        assert read() == b"" and found.skipped == 0
        file.write(b"\nfirst\nsec")
        file.flush()
        assert (read(), found.skipped, found.is_empty) == (b"first\n", 1, False)
        file.write(b"ond\n")
        file.flush()
        assert (read(), found.skipped) == (b"second\n", 1)
    path.write_bytes(b"new\n")
    assert (read(), found.skipped) == (b"new\n", 0)


def test_what_is_passed_over_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE_BYTES", 1000)
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 50_000)
    found = GrowingLines(path)
    list(found.new_blocks())
    sizes: list[int] = []
    taken = GrowingLines._taken
    monkeypatch.setattr(
        GrowingLines, "_taken", lambda self, data: (sizes.append(len(data)), taken(self, data))[1]
    )
    with path.open("ab") as file:
        file.write(b"y" * 100)
    list(found.new_blocks())
    assert sizes == [100]


def test_a_load_that_was_not_recorded_is_a_gap_and_no_dead_expert(root: Path) -> None:
    run = good(root)
    rows = [{"step": step, "layers": [0], "load": [[10, None, 30, 0]]} for step in range(60)]
    run.append_experts(*rows)
    recorded = ExpertLoads(run.path)
    recorded.refresh()
    blocks = recorded.blocks()
    _, idle = idle_experts(blocks)
    assert [(item.dead, item.starved) for item in idle] == [([3], [])]
    loads = experts.loads_at(blocks)
    assert loads is not None
    np.testing.assert_allclose(loads.load_LE, [[0.75, np.nan, 2.25, 0.0]])
    over = experts.load_map(blocks, 0)
    np.testing.assert_allclose(over.load_ES[:, 0], [0.75, np.nan, 2.25, 0.0])


def test_runs_that_sql_cannot_take_are_no_lack_of_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good(root)
    start = sql_worker.START.replace("main()", "sql_worker.Snapshots.fresh = fail; main()")
    head = "from nviz.store import sql_worker\ndef fail(*a): raise TypeError('odd run')\n"
    monkeypatch.setattr(sql_worker, "START", head + start)
    worker = SqlWorker(root)
    try:
        for _ in range(2):
            with pytest.raises(VizError, match=r"^E-SQL-WORKER: .*TypeError: odd run"):
                worker.query("SELECT 1", 1, 60.0)
    finally:
        worker.close()
    monkeypatch.setattr(sql_worker, "START", "import sys; sys.exit(1)")
    with pytest.raises(VizError, match=r"^E-SQL-WORKER"):
        SqlWorker(root).query("SELECT 1", 1, 60.0)


def test_a_layer_of_five_thousand_digits_is_no_layer(root: Path, open_page: Open) -> None:
    run = good(root)
    run.append_experts({"step": 1, "layers": [0, 1], "load": [[1, 2], [3, 4]]})
    open_page("router", run="good", layer="9" * 5000)


def test_small_values_keep_their_digits() -> None:
    assert formats.value(0.0004) == "0.0004000" and formats.value(0.00012, 3) == "0.000120"
    assert formats.value(0.0123) == "0.01230" and formats.value(0.0) == "0.000"
    assert formats.value(12.345) == "12.35" and formats.value(-0.5, 3) == "-0.500"
    assert formats.duration(math.inf) == "–"


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.21, 3.4, [0.5, 1.0, 2.0]),
        (1e-4, 2e3, [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1000.0]),
        (5.31, 5.62, [5.4, 5.5, 5.6]),
        (2.0, 9.0, [2.0, 4.0, 6.0, 8.0]),
    ],
)
def test_marks_of_a_log_scale_are_few_and_round(
    low: float, high: float, marks: list[float]
) -> None:
    assert log_marks(low, high) == pytest.approx(marks)


def test_a_log_scale_of_one_value_has_its_mark() -> None:
    assert len(log_marks(3.0, 3.0)) <= 1
