"""A run folder over several attempts: one owner at a time, and nothing written over."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nmoe_data.errors import DataError
from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.loop import Outcome
from nmoe_train.telemetry import MetricsWriter, RunFolder, close_record

Tiny = Callable[..., Config]
Run = Callable[..., Outcome]


class Crash(BaseException):
    """The end of the process, as far as the loop can tell."""


def crash_after(step: int) -> Callable[[dict[str, Any]], None]:
    def hook(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Crash

    return hook


def test_a_rank_that_does_not_hold_the_folder_only_writes_its_metrics(tmp_path: Path) -> None:
    holder = RunFolder(tmp_path)
    follower = RunFolder(tmp_path, dict(holder.record), holds=False)
    follower.begin(0, steps=3)
    follower.progress(1)
    follower.event("fault", step=1)
    follower.end("completed")
    assert list(tmp_path.iterdir()) == []
    holder.begin(0, steps=3)
    assert follower.attempt == holder.attempt == 1
    for rank, folder in enumerate((holder, follower)):
        writer = MetricsWriter(folder.metrics, folder.attempt, rank, seal_every=10)
        writer.step({"step": 1}, {"step": 1, "load": [[4]]})
    names = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert names == ["1-0-experts.jsonl", "1-0.jsonl", "1-1.jsonl"]


def test_a_run_whose_processes_are_gone_is_closed_as_failed_and_an_ended_one_left(
    tmp_path: Path,
) -> None:
    def seen() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        lines = (tmp_path / "events.jsonl").read_text().splitlines()
        return json.loads((tmp_path / "run.json").read_text()), [json.loads(x) for x in lines]

    close_record(tmp_path, "nothing was begun")
    assert list(tmp_path.iterdir()) == []
    folder = RunFolder(tmp_path)
    folder.begin(0, steps=3)
    folder.progress(1)
    folder.begin(2, steps=3)
    close_record(tmp_path, "E-ELASTIC-STUCK: why")
    record, events = seen()
    assert (record["status"], record["step"], record["steps"]) == ("failed", 2, 3)
    assert record["ended_unix_s"] is not None
    found = [(e["event"], e["step"], e.get("what"), e.get("status")) for e in events[2:]]
    assert found == [("fault", 2, "E-ELASTIC-STUCK: why", None), ("end", 2, None, "failed")]
    close_record(tmp_path, "again")
    assert seen() == (record, events)


def test_without_run_json_no_attempt_writes_over_an_earlier_one(tiny: Tiny, run: Run) -> None:
    def metrics() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (tiny().run.dir / "metrics").iterdir()}

    for step in (3, 5):
        with pytest.raises(Crash):
            run(tiny(), crash_after(step))
    before = metrics()
    assert before.keys() >= {"1-0.jsonl", "2-0.jsonl"}
    (tiny().run.dir / "run.json").unlink()
    run(tiny())
    after = metrics()
    assert {name: after[name] for name in before} == before
    assert {name.split("-")[0] for name in after.keys() - before.keys()} == {"3"}
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert record["attempt"] == 3
    assert [attempt["attempt"] for attempt in record["attempts"]] == [3]


def test_attempts_are_counted_beyond_nine_and_by_run_json_too(tiny: Tiny, run: Run) -> None:
    metrics = tiny().run.dir / "metrics"
    metrics.mkdir(parents=True)
    for name in ("9-0.jsonl", "11-0-000.parquet", "2-0-experts.jsonl", "other-thing"):
        (metrics / name).touch()
    run(tiny(**{"train.steps": 2}))
    assert (metrics / "12-0.jsonl").exists()
    for file in metrics.iterdir():
        file.unlink()
    run(tiny(**{"train.steps": 4}))
    assert (metrics / "13-0.jsonl").exists()


def test_metrics_that_are_there_are_never_opened_for_writing(tmp_path: Path) -> None:
    (tmp_path / "1-0.jsonl").write_text("kept")
    with pytest.raises(FileExistsError):
        MetricsWriter(tmp_path, 1, 0, seal_every=4)
    assert (tmp_path / "1-0.jsonl").read_text() == "kept"


def test_two_processes_do_not_share_a_run_folder(
    tiny: Tiny, run: Run, fork: Callable[..., Any]
) -> None:
    folder = tiny().run.dir
    go = folder.parent / "go"

    def hold(_: object) -> None:
        (folder.parent / "held").touch()
        while not go.exists():
            time.sleep(0.01)

    child = fork(lambda: run(tiny(**{"train.steps": 1}), hold))
    child.wait_until((folder.parent / "held").exists)
    before = (folder / "run.json").read_bytes()
    try:
        with pytest.raises(DataError) as caught:
            run(tiny())
        assert caught.value.code == "E-OUT-BUSY"
        assert str(folder) in str(caught.value)
        assert (folder / "run.json").read_bytes() == before
    finally:
        go.touch()
        assert child.wait()[0] == 0
    assert run(tiny()).status == "completed"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b'"text"'])
def test_a_damaged_run_record_is_named_and_the_folder_given_up(
    tiny: Tiny, run: Run, content: bytes
) -> None:
    tiny().run.dir.mkdir()
    (tiny().run.dir / "run.json").write_bytes(content)
    for _ in range(2):
        with pytest.raises(TrainError) as caught:
            run(tiny())
        assert caught.value.code == "E-RUN-RECORD"
        assert re.search(r"run\.json", str(caught.value))
    (tiny().run.dir / "run.json").unlink()
    assert run(tiny()).status == "completed"


def test_a_torn_last_event_does_not_swallow_the_next(tiny: Tiny, run: Run) -> None:
    with pytest.raises(Crash):
        run(tiny(), crash_after(3))
    with (tiny().run.dir / "events.jsonl").open("a") as stream:
        stream.write('{"time_unix_s": 1.0, "eve')
    run(tiny())
    lines = (tiny().run.dir / "events.jsonl").read_text().splitlines()
    names = []
    for line in lines:
        if not line.endswith('"eve'):
            names.append(json.loads(line)["event"])
    assert "resume" in names
    assert len(lines) == len(names) + 1
