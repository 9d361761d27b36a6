"""Single columns of runs: caches, live files that are sealed under the reader, broken parts."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nviz.store import columns
from nviz.store.columns import ColumnReader
from nviz.store.recent import Recent
from run_folder import RunFolder, record


class Look:
    """A reader of one run: what it gives as plain rows."""

    def __init__(self, run: RunFolder) -> None:
        self._reader, self._folder = ColumnReader(), run.path
        self._reader.rows(run.path, ["loss/train"])

    def rows(self, *names: str) -> list[tuple[float | None, ...]]:
        """Values of the columns, None where nothing was recorded."""
        found = self._reader.rows(self._folder, names)
        none = [None] * len(found.step)
        lists: dict[str, list[Any]] = {"step": found.step.tolist()}
        for name, column in found.columns.items():
            pairs = zip(column.values.tolist(), column.present.tolist(), strict=True)
            lists.setdefault(name, [value if there else None for value, there in pairs])
        return list(zip(*(lists.get(name, none) for name in names), strict=True))

    def metrics(self) -> list[str]:
        """Names in the newest files."""
        return self._reader.metrics(self._folder)

    def problems(self) -> list[str]:
        """What could not be read."""
        return list(self._reader.rows(self._folder, ["loss/train"]).problems)


def steps(reader: ColumnReader, run: RunFolder) -> list[int]:
    """The steps that count."""
    rows = reader.rows(run.path, ["loss/train"])
    assert rows.problems == ()
    return rows.step[~rows.superseded].tolist()


def test_rows_follow_a_run_that_grows_and_is_sealed(root: Path) -> None:
    run, reader = RunFolder(root, "a"), ColumnReader()
    for step in range(40):
        run.append(record(step))
        assert steps(reader, run) == list(range(step + 1))
    run.seal(*map(record, range(40)))
    assert steps(reader, run) == list(range(40)), "in both files, and once here"
    run.seal(*[record(step, loss=9.0) for step in range(40)])
    shown = reader.rows(run.path, ["loss/train"]).columns["loss/train"]
    assert set(shown.values.tolist()) == {9.0}, "the sealed row counts"
    run.seal(*map(record, range(40)))
    (run.path / "metrics" / "1-0.jsonl").write_text("")
    assert steps(reader, run) == list(range(40))
    run.append(record(40))
    assert steps(reader, run) == list(range(41))


def test_a_part_that_appears_while_the_live_rows_are_read_is_not_missed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reader = RunFolder(root, "a"), ColumnReader()
    run.append(*map(record, range(10)))
    inside = reader._pieces

    def seal_first(files: Any, names: Any, problems: Any) -> Any:
        if not (run.path / "metrics" / "1-0-000.parquet").exists():
            run.seal(*map(record, range(10)))
            (run.path / "metrics" / "1-0.jsonl").write_text("")
        return inside(files, names, problems)

    monkeypatch.setattr(reader, "_pieces", seal_first)
    assert steps(reader, run) == list(range(10))


def test_only_the_columns_asked_for_are_held_and_within_the_limit(root: Path) -> None:
    run = RunFolder(root, "a")
    for part in range(8):
        run.seal(*map(record, range(100 * part, 100 * part + 100)), part=part)
    reader = ColumnReader(most_bytes=10_000)
    for name in ("loss/train", "grad_norm", "step_ms"):
        found = reader.rows(run.path, [name])
        assert found.columns[name].values.tolist() == [record(step)[name] for step in range(800)]
        assert reader.size_bytes <= 10_000
    whole = ColumnReader()
    whole.rows(run.path, ["loss/train"])
    assert whole.size_bytes == 800 * 2 * 9, "steps and losses with their marks"


def test_what_was_read_of_a_part_is_not_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reader = RunFolder(root, "a"), ColumnReader()
    run.seal(*map(record, range(5)))
    assert steps(reader, run) == list(range(5))

    def refuse(*_: object) -> None:
        raise OSError("read again")

    monkeypatch.setattr(columns, "read_part", refuse)
    assert steps(reader, run) == list(range(5))
    reread = reader.rows(run.path, ["grad_norm"])
    assert reread.problems == ("1-0-000.parquet: unreadable (read again)",)


def test_a_broken_part_is_named_and_the_rest_is_read(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(7))
    (run.path / "metrics" / "1-0-000.parquet").write_bytes(b"PAR1 no")
    rows = ColumnReader().rows(run.path, ["loss/train"])
    assert rows.step.tolist() == [7]
    assert len(rows.problems) == 1 and rows.problems[0].startswith("1-0-000.parquet: unreadable")


def test_words_and_other_types_in_a_part_are_numbers_or_missing(root: Path) -> None:
    run = RunFolder(root, "a")
    table = pa.table(
        {
            "step": pa.array([0, 1, 2, 3], pa.int32()),
            "loss/train": ["1.5", "NaN", "-Infinity", None],
            "note": ["x", "y", "z", "w"],
            "flag": [True, False, True, False],
            "tokens": pa.array([1, None, 3, 4], pa.uint32()),
        }
    )
    pq.write_table(table, run.path / "metrics" / "1-0-000.parquet")
    rows = ColumnReader().rows(run.path, ["loss/train", "note", "flag", "tokens"])
    loss = rows.columns["loss/train"]
    assert loss.present.tolist() == [True, True, True, False]
    assert loss.values[0] == 1.5 and math.isnan(loss.values[1]) and loss.values[2] == -math.inf
    assert not rows.columns["note"].present.any() and "flag" not in rows.columns
    assert rows.columns["tokens"].present.tolist() == [True, False, True, True]


def test_a_run_that_vanishes_has_no_rows(root: Path) -> None:
    rows = ColumnReader().rows(root / "gone", ["loss/train"])
    assert len(rows.step) == 0 and rows.problems == ()


def test_the_metrics_of_a_run_are_those_of_its_newest_files(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal({"step": 0, "old": 1.0}, part=0)
    run.seal({"step": 1, "sealed": 1.0}, part=1)
    run.append({"step": 2, "live": 1.0, "sealed": 2.0})
    assert ColumnReader().metrics(run.path) == ["live", "sealed"]


def test_metrics_that_only_an_earlier_attempt_recorded_are_named_too(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal({"step": 0, "sealed first": 1.0})
    run.append({"step": 1, "live first": 1.0})
    run.seal({"step": 1, "sealed later": 1.0}, attempt=2)
    run.append({"step": 2, "live later": 1.0}, attempt=2, rank=0)
    found = ColumnReader().metrics(run.path)
    assert found == ["live first", "live later", "sealed first", "sealed later"]


def test_the_oldest_used_leave_first() -> None:
    kept: Recent[str, str] = Recent(10, len)
    for name in ("a", "b", "c"):
        kept.put(name, name * 3)
    assert kept.get("a") == "aaa"
    kept.put("d", "dddd")
    assert [kept.get(name) for name in "abcd"] == ["aaa", None, "ccc", "dddd"]
    kept.put("a", "a" * 99)
    assert kept.get("a") == "a" * 99 and kept.get("d") is None, "one too large stands alone"
    assert kept.size_bytes == 99


def test_the_horizon_is_the_lowest_first_step_of_any_later_attempt() -> None:
    attempt = np.array([1, 1, 1, 2, 2, 3])
    step = np.array([0, 3, 9, 3, 8, 6])
    found = columns.superseded(attempt, step)
    assert found.tolist() == [False, True, True, False, True, False]


@pytest.mark.parametrize("count", [3, 30])
def test_a_live_file_that_was_replaced_is_read_from_its_start(root: Path, count: int) -> None:
    run, reader = RunFolder(root, "a"), ColumnReader()
    run.append(*[record(step, loss=1.0) for step in range(10)])
    assert steps(reader, run) == list(range(10))
    (run.path / "metrics" / "1-0.jsonl").unlink()
    run.append(*[record(step, loss=2.0) for step in range(count)])
    found = reader.rows(run.path, ["loss/train"])
    assert found.step.tolist() == list(range(count))
    assert set(found.columns["loss/train"].values.tolist()) == {2.0}


def test_only_new_lines_are_read_and_a_torn_line_waits_for_its_end(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1))
    run.tear('{"step": 2, "loss/tr')
    look = Look(run)
    assert look.rows("step") == [(0,), (1,)]
    assert not look.problems()
    run.tear('ain": 1.5}\n')
    assert look.rows("step", "loss/train")[-1] == (2, 1.5)


def test_lines_across_blocks_are_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nviz.store.lines.CHUNK_BYTES", 1000)
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(50)])
    look = Look(run)
    assert look.rows("step") == [(step,) for step in range(50)]
    assert not look.problems()


def test_a_torn_line_in_the_middle_costs_only_itself(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0))
    run.tear('{"step": 1, "loss/train": \n')
    run.append(record(2))
    look = Look(run)
    assert look.rows("step") == [(0,), (2,)]
    assert look.problems() == ["1-0.jsonl: 1 unreadable line skipped"]


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
    values = [row[0] for row in Look(run).rows("loss/train")]
    assert math.isnan(values[0])
    assert values[1:] == [None, math.inf, -math.inf]


def test_a_sealed_row_goes_before_the_live_one_whichever_came_first(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss=1.0), record(1, loss=1.0), record(2, loss=1.0))
    look = Look(run)
    run.seal(record(0, loss=2.0), record(1, loss=2.0))
    run.append(record(1, loss=3.0), record(3, loss=3.0))
    assert look.rows("step", "loss/train") == [(0, 2.0), (1, 2.0), (2, 1.0), (3, 3.0)]


def test_the_live_file_may_be_emptied_after_sealing(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(10)])
    look = Look(run)
    run.seal(*[record(step) for step in range(10)])
    (run.path / "metrics" / "1-0.jsonl").write_text("")
    run.append(record(10))
    assert look.rows("step") == [(step,) for step in range(11)]


def test_keys_may_differ_between_lines_and_parts(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal({"step": 0, "old/metric": 1})
    run.append({"step": 1, "new/metric": 2.5}, {"step": 2, "text": "x", "flag": True, "list": [1]})
    look = Look(run)
    assert look.metrics() == ["new/metric", "old/metric"]
    assert look.rows("old/metric", "new/metric") == [(1.0, None), (None, 2.5), (None, None)]


def test_odd_names_are_names(root: Path) -> None:
    run = RunFolder(root, "a")
    evil = '"; DROP TABLE rows; --'
    run.append({"step": 0, evil: 1.0, "rank": 9, "attempt": 9, "sealed": 9, "seq": 9, "": 1})
    run.seal({"step": 1, evil: 2.0, "it's": 3.0})
    look = Look(run)
    assert {evil, "it's"} <= set(look.metrics())
    assert look.rows("step", evil) == [(0, 1.0), (1, 2.0)]


@pytest.mark.parametrize("step", [None, "7", -1, 1.5, True, [1], 2**70])
def test_a_line_without_a_valid_step_is_skipped_and_counted(root: Path, step: object) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1) | {"step": step}, {"loss/train": 1.0})
    look = Look(run)
    assert look.rows("step") == [(0,)]
    assert look.problems() == ["1-0.jsonl: 2 unreadable lines skipped"]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_live_file_replaced_by_a_longer_one_is_read_whole(root: Path, in_place: bool) -> None:
    run = RunFolder(root, "a")
    live = run.path / "metrics" / "1-0.jsonl"
    run.append(record(0))
    look = Look(run)
    first = 1
    for count in (2, 5, 11, 60):
        rows = [json.dumps(record(step)) + "\n" for step in range(first, first + count)]
        # Written in place, the inode stays, as it does when a deleted file's is given out again.
        target = live if in_place else live.with_suffix(".partial")
        target.write_text("".join(rows))
        target.replace(live)
        assert look.rows("step") == [(step,) for step in range(first, first + count)]
        first += count
    assert not look.problems()


def test_a_replaced_file_with_the_same_first_rows_is_read_whole(root: Path) -> None:
    run = RunFolder(root, "a")
    live = run.path / "metrics" / "1-0.jsonl"
    run.append(*[record(step) for step in range(40)])
    look = Look(run)
    rows = [json.dumps(record(step)) + "\n" for step in (*range(20), *range(120, 200))]
    live.write_text("".join(rows))
    assert look.rows("step") == [(step,) for step in (*range(20), *range(120, 200))]


def test_a_replaced_file_that_differs_in_its_first_row_only_is_read_again(root: Path) -> None:
    run = RunFolder(root, "a")
    live = run.path / "metrics" / "1-0.jsonl"
    run.append(record(0, loss=1.5), *[record(step) for step in range(1, 40)])
    look = Look(run)
    live.write_text(live.read_text().replace('"loss/train": 1.5,', '"loss/train": 2.5,', 1))
    run.append(record(40))
    assert look.rows("step", "loss/train")[0] == (0, 2.5)
    assert look.rows("step")[-1] == (40,)


def test_a_run_without_a_metrics_folder_is_empty(root: Path) -> None:
    run = RunFolder(root, "a")
    (run.path / "metrics").rmdir()
    look = Look(run)
    assert look.rows("step") == []
    assert look.metrics() == [] and look.problems() == []


def test_a_linked_metrics_file_is_not_read(root: Path, tmp_path: Path) -> None:
    run = RunFolder(root, "a")
    (tmp_path / "secret.jsonl").write_text(json.dumps(record(0)) + "\n")
    (run.path / "metrics" / "1-0.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert Look(run).rows("step") == []


def test_the_newest_steps_are_read_from_the_last_parts_alone(root: Path) -> None:
    run = RunFolder(root, "a")
    for part in range(5):
        run.seal(*[record(step) for step in range(100 * part, 100 * part + 100)], part=part)
    run.seal(*[record(step) for step in range(420, 450)], attempt=2)
    reader = ColumnReader()
    for newest, first in ((20, 420), (30, 420), (60, 300), (130, 300), (151, 200)):
        found = reader.rows(run.path, ["step_ms"], 0, newest)
        assert found.step.min() == first, newest
        whole = reader.rows(run.path, ["step_ms"], 0)
        counts = (whole.step >= first) & ~whole.superseded
        assert found.step[~found.superseded].tolist() == whole.step[counts].tolist()


def test_what_an_old_attempt_left_unsealed_is_not_taken_for_the_newest(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*map(record, range(90, 100)))
    for part in range(3):
        run.seal(*map(record, range(80 + 20 * part, 100 + 20 * part)), part=part, attempt=2)
    run.append(*map(record, range(140, 145)), attempt=2)
    found = ColumnReader().rows(run.path, ["loss/train"], 0, newest=30)
    assert found.step[found.attempt == 2].tolist() == list(range(100, 145))
