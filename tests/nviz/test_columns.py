"""Single columns of runs: caches, live files that are sealed under the reader, broken parts."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nviz.store import columns
from nviz.store.columns import ColumnReader
from nviz.store.recent import Recent
from run_folder import RunFolder, record


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

    def seal_first(files, names, problems):  # type: ignore[no-untyped-def]
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
