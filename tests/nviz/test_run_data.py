"""A run's tables: what the files hold while they grow, tear, repeat, break and vanish."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from nviz.store.parse import experts_table, metrics_table, parse_lines
from nviz.store.run_data import ROWS, RunData
from run_folder import RunFolder, expert_record, plain, record


def opened(run: RunFolder) -> RunData:
    """The run's tables, read once."""
    data = RunData(run.path, duckdb.connect(":memory:"), "run")
    data.refresh()
    return data


def counted(data: RunData, columns: str) -> list[tuple[Any, ...]]:
    """Rows that count, ordered."""
    return data.connection.execute(
        f"SELECT {columns} FROM ({ROWS}) ORDER BY attempt, rank, step"
    ).fetchall()


def test_only_new_lines_are_read_and_a_torn_line_waits_for_its_end(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1))
    run.tear('{"step": 2, "loss/tr')
    data = opened(run)
    assert counted(data, "step") == [(0,), (1,)]
    assert not data.problems()
    run.tear('ain": 1.5}\n')
    assert data.refresh()
    assert counted(data, 'step, "loss/train"')[-1] == (2, 1.5)
    assert not data.refresh()


def test_lines_across_blocks_are_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nviz.store.lines.CHUNK_BYTES", 1000)
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(50)])
    data = opened(run)
    assert counted(data, "step") == [(step,) for step in range(50)]
    assert not data.problems()


def test_two_objects_on_one_line_are_no_record() -> None:
    parsed = metrics_table(b'{"step": 1}{"step": 2}\n{"step": 3}\n')
    assert (parsed.table["step"].to_pylist(), parsed.skipped) == ([3], 1)


def test_a_torn_line_in_the_middle_costs_only_itself(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0))
    run.tear('{"step": 1, "loss/train": \n')
    run.append(record(2))
    data = opened(run)
    assert counted(data, "step") == [(0,), (2,)]
    assert data.problems() == ["1-0.jsonl: 1 unreadable line skipped"]


@pytest.mark.parametrize("sealed", [False, True])
def test_nan_is_recorded_and_a_missing_value_is_null(root: Path, sealed: bool) -> None:
    run = RunFolder(root, "a")
    rows = [
        record(0, loss=math.nan),
        record(1, loss__train=None),
        record(2, loss=math.inf),
        record(3, loss=-math.inf),
    ]
    (run.seal if sealed else run.append)(*rows)
    values = [row[0] for row in counted(opened(run), '"loss/train"')]
    assert math.isnan(values[0])
    assert values[1:] == [None, math.inf, -math.inf]


def test_a_sealed_row_goes_before_the_live_one_whichever_came_first(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss=1.0), record(1, loss=1.0), record(2, loss=1.0))
    data = opened(run)
    run.seal(record(0, loss=2.0), record(1, loss=2.0))
    data.refresh()
    run.append(record(1, loss=3.0), record(3, loss=3.0))
    data.refresh()
    assert counted(data, 'step, "loss/train"') == [(0, 2.0), (1, 2.0), (2, 1.0), (3, 3.0)]


def test_the_live_file_may_be_emptied_after_sealing(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(10)])
    data = opened(run)
    run.seal(*[record(step) for step in range(10)])
    (run.path / "metrics" / "1-0.jsonl").write_text("")
    run.append(record(10))
    data.refresh()
    assert counted(data, "step") == [(step,) for step in range(11)]


def test_keys_may_differ_between_lines_and_parts(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal({"step": 0, "old/metric": 1})
    run.append({"step": 1, "new/metric": 2.5}, {"step": 2, "text": "x", "flag": True, "list": [1]})
    data = opened(run)
    assert data.metrics == ["new/metric", "old/metric"]
    assert counted(data, '"old/metric", "new/metric"') == [(1.0, None), (None, 2.5), (None, None)]


def test_names_from_a_file_cannot_become_sql(root: Path) -> None:
    run = RunFolder(root, "a")
    evil = '"; DROP TABLE rows; --'
    run.append({"step": 0, evil: 1.0, "rank": 9, "attempt": 9, "sealed": 9, "seq": 9, "": 1})
    run.seal({"step": 1, evil: 2.0, "it's": 3.0})
    data = opened(run)
    assert data.metrics == sorted([evil, "it's"])
    assert counted(data, "attempt, rank, step") == [(1, 0, 0), (1, 0, 1)]


def test_names_that_differ_in_case_share_a_column(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append({"step": 0, "Loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 2, "Step": 5.0})
    data = opened(run)
    assert len(data.metrics) == 1
    assert [row[0] for row in counted(data, "step")] == [0, 1, 2]


@pytest.mark.parametrize("step", [None, "7", -1, 1.5, True, [1], 2**70])
def test_a_line_without_a_valid_step_is_skipped_and_counted(root: Path, step: object) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1) | {"step": step}, {"loss/train": 1.0})
    data = opened(run)
    assert counted(data, "step") == [(0,)]
    assert data.problems() == ["1-0.jsonl: 2 unreadable lines skipped"]


def test_a_broken_part_is_named_and_the_rest_is_read(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(record(0))
    (run.path / "metrics" / "1-0-001.parquet").write_bytes(b"PAR1 no parquet")
    (run.path / "metrics" / "notes.txt").write_text("not ours")
    run.append(record(2))
    data = opened(run)
    assert counted(data, "step") == [(0,), (2,)]
    assert [line.split(":")[0] for line in data.problems()] == ["1-0-001.parquet"]
    run.seal(record(1), part=1)
    data.refresh()
    assert not data.problems()
    assert counted(data, "step") == [(0,), (1,), (2,)]


def test_a_replaced_live_file_is_read_from_its_start(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(5)])
    data = opened(run)
    (run.path / "metrics" / "1-0.jsonl").unlink()
    run.append(record(0, loss=9.0))
    data.refresh()
    assert counted(data, '"loss/train"')[0] == (9.0,)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_live_file_replaced_by_a_longer_one_is_read_whole(root: Path, in_place: bool) -> None:
    run = RunFolder(root, "a")
    live = run.path / "metrics" / "1-0.jsonl"
    run.append(record(0))
    data = opened(run)
    first = 1
    for count in (2, 5, 11, 60):
        rows = [json.dumps(record(step)) + "\n" for step in range(first, first + count)]
        # Written in place, the inode stays, as it does when a deleted file's is given out again.
        target = live if in_place else live.with_suffix(".partial")
        target.write_text("".join(rows))
        target.replace(live)
        data.refresh()
        first += count
        assert counted(data, "step") == [(step,) for step in range(first)]
    assert not data.problems()


def test_a_replaced_file_with_the_same_first_rows_is_read_whole(root: Path) -> None:
    run = RunFolder(root, "a")
    live = run.path / "metrics" / "1-0.jsonl"
    run.append(*[record(step) for step in range(40)])
    data = opened(run)
    rows = [json.dumps(record(step)) + "\n" for step in (*range(20), *range(120, 200))]
    live.write_text("".join(rows))
    data.refresh()
    assert counted(data, "step") == [(step,) for step in (*range(40), *range(120, 200))]


def test_a_replaced_file_that_differs_in_its_first_row_only_is_read_again(root: Path) -> None:
    run = RunFolder(root, "a")
    live = run.path / "metrics" / "1-0.jsonl"
    run.append(record(0, loss=1.5), *[record(step) for step in range(1, 40)])
    data = opened(run)
    live.write_text(live.read_text().replace('"loss/train": 1.5,', '"loss/train": 2.5,', 1))
    run.append(record(40))
    data.refresh()
    assert counted(data, 'step, "loss/train"')[0] == (0, 2.5)
    assert counted(data, "step")[-1] == (40,)


def test_rows_are_not_lost_if_they_could_not_be_stored_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1))
    data = RunData(run.path, duckdb.connect(":memory:"), "run")

    def fail(*_: object) -> None:
        raise duckdb.OutOfMemoryException("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(data, "_insert", fail)
        data.refresh()
    assert data.problems() == ["1-0.jsonl: unreadable (no memory)"]
    run.append(record(2))
    data.refresh()
    assert counted(data, "step") == [(0,), (1,), (2,)]


def test_a_run_that_vanishes_keeps_what_was_read(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0))
    data = opened(run)
    shutil.rmtree(run.path)
    assert not data.refresh()
    assert counted(data, "step") == [(0,)]


def test_a_run_without_a_metrics_folder_is_empty(root: Path) -> None:
    run = RunFolder(root, "a")
    (run.path / "metrics").rmdir()
    data = opened(run)
    assert counted(data, "step") == []
    assert data.metrics == [] and data.problems() == []


def test_a_linked_metrics_file_is_not_read(root: Path, tmp_path: Path) -> None:
    run = RunFolder(root, "a")
    (tmp_path / "secret.jsonl").write_text(json.dumps(record(0)) + "\n")
    (run.path / "metrics" / "1-0.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert counted(opened(run), "step") == []


def test_events_keep_their_order_and_their_other_fields(root: Path) -> None:
    run = RunFolder(root, "a")
    run.event("start", 0)
    run.event("fault", 3, rank=1, reason="\ud800 odd")
    (run.path / "events.jsonl").open("a").write('{"event": "tor')
    rows = opened(run).connection.execute("SELECT event, step, detail FROM events").fetchall()
    assert [row[:2] for row in rows] == [("start", 0), ("fault", 3)]
    assert json.loads(rows[1][2]) == {"rank": 1, "reason": "\ud800 odd"}


def random_lines(seed: int) -> bytes:
    """Lines of which some make Arrow's reader give up."""
    drawn = random.Random(seed)
    odd = [math.nan, math.inf, None, 3, 2**40, -0.0, 1e-300]
    lines = []
    for step in range(drawn.randrange(1, 40)):
        row = {"step": step, "a/b": drawn.random(), "count": drawn.randrange(9)}
        if drawn.random() < 0.3:
            row["some"] = plain(drawn.choice(odd))
        lines.append(json.dumps(row))
        if seed % 3 == 0 and drawn.random() < 0.1:
            lines.append(drawn.choice(['{"step": 1', "[]", "{}", '{"step": "x"}', '{"step": 1}{"']))
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_and_the_slow_way_give_the_same_table(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_lines(seed)
    fast = metrics_table(data)
    monkeypatch.setattr("nviz.store.parse._fast", lambda _: None)
    slow = metrics_table(data)
    assert fast.skipped == slow.skipped
    # repr, as NaN differs from itself.
    rows = [repr(sorted(row.items())) for row in slow.table.to_pylist()]
    names = slow.table.column_names
    kept = fast.table.select([name for name in fast.table.column_names if name in names])
    assert [repr(sorted(row.items())) for row in kept.to_pylist()] == rows


def test_plain_lines_take_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: bytes) -> None:
        raise AssertionError("read line by line")

    monkeypatch.setattr("nviz.store.parse.parse_lines", refuse)
    metrics = "".join(json.dumps(record(step)) + "\n" for step in range(20)).encode()
    assert metrics_table(metrics).table.num_rows == 20
    loads = "".join(json.dumps(expert_record(step)) + "\n" for step in range(20)).encode()
    assert experts_table(loads).table.num_rows == 20


def test_expert_lines_of_a_wrong_shape_are_skipped() -> None:
    good = expert_record(0, 1, 2)
    lines = [
        good,
        {"step": 1},
        {"step": 2, "load": "x"},
        {"step": 3, "load": [1]},
        good | {"bias": 3},
    ]
    parsed = experts_table("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert (parsed.table.num_rows, parsed.skipped) == (2, 3)


def test_blank_lines_are_no_lines() -> None:
    assert parse_lines(b'\n  \n{"a": 1}\r\n') == ([{"a": 1}], 0)
