"""SQL over all runs: what the views hold, and that nothing but reading them is possible."""

from pathlib import Path

import pytest
from nviz.errors import VizError
from nviz.store.database import Database, fair_share
from nviz.store.runs import RunIndex
from run_folder import RunFolder, record, trained


def database(root: Path) -> Database:
    """A snapshot of the runs under `root`."""
    return Database(RunIndex(root).refresh().values())


def test_views_hold_all_runs_with_their_differing_metrics(root: Path) -> None:
    RunFolder(root, "a").append({"step": 0, "x": 1.0})
    run = RunFolder(root / "group", "b", name="it's b", config={"seed": 3})
    run.append({"step": 4, "y": 2.0}, {"step": 5, "X": 7.0})
    run.event("start", 4)
    base = database(root)
    rows = base.query("SELECT run, step, x, y FROM metrics ORDER BY ALL").rows
    assert rows == [("a", 0, 1.0, None), ("group/b", 4, None, 2.0), ("group/b", 5, 7.0, None)]
    assert base.query("SELECT run, event, step FROM events").rows == [("group/b", "start", 4)]
    found = base.query("SELECT name, config->>'seed' FROM runs WHERE run = 'group/b'").rows
    assert found == [("it's b", "3")]


def test_the_newest_runs_can_be_listed(root: Path) -> None:
    RunFolder(root, "b", name="old", started_unix_s=1e9, step=3, status="completed")
    RunFolder(root, "a", name="new", started_unix_s=2e9, step=7)
    rows = database(root).query("select name, step, status from runs order by started_unix_s desc")
    assert [row[:2] for row in rows.rows] == [("new", 7), ("old", 3)]


def test_superseded_and_repeated_rows_are_told_apart(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(*[record(step) for step in range(10)])
    run.seal(*[record(step) for step in range(5)])
    run.append(record(7), attempt=2)
    rows = (
        database(root)
        .query("SELECT attempt, superseded, count(*) FROM metrics GROUP BY ALL ORDER BY ALL")
        .rows
    )
    assert rows == [(1, False, 7), (1, True, 3), (2, False, 1)]


def test_rows_beyond_the_limit_are_cut_and_said_to_be(root: Path) -> None:
    base = database(root)
    assert base.query("FROM range(10)", most_rows=10).truncated is False
    answer = base.query("FROM range(11)", most_rows=10)
    assert (len(answer.rows), answer.truncated) == (10, True)
    assert base.query("SELECT 1", most_rows=10).rows == [(1,)], "the next query works"


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM runs",
        "DROP TABLE metrics",
        "CREATE TABLE t AS SELECT 1",
        "INSERT INTO runs(run) VALUES ('x')",
        "UPDATE runs SET run = 'x'",
        "COPY (SELECT 1) TO 'OUT'",
        "ATTACH 'OUT'",
        "INSTALL httpfs",
        "LOAD 'OUT'",
        "SET enable_external_access = true",
        "PRAGMA version",
        "CALL pragma_version()",
        "SELECT 1; DROP TABLE runs",
        "SELECT 1; SELECT 2",
        "EXPORT DATABASE 'OUT'",
        "",
        "-- nothing",
    ],
)
def test_anything_but_one_reading_statement_is_refused(root: Path, sql: str) -> None:
    with pytest.raises(VizError) as caught:
        database(root).query(sql.replace("OUT", str(root / "out")))
    assert caught.value.code in ("E-SQL-READ-ONLY", "E-SQL")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    "sql",
    [
        "WITH gone AS (DELETE FROM runs RETURNING *) SELECT * FROM gone",
        "EXPLAIN ANALYZE DELETE FROM runs",
    ],
)
def test_a_write_inside_a_reading_statement_is_refused(root: Path, sql: str) -> None:
    RunFolder(root, "a")
    base = database(root)
    with pytest.raises(VizError, match=r"^E-SQL"):
        base.query(sql)
    assert base.query("SELECT count(*) FROM runs").rows == [(1,)]


@pytest.mark.parametrize(
    "sql",
    [
        "FROM read_text('FILE')",
        "FROM read_csv('FILE')",
        "FROM 'FILE'",
        "FROM glob('FILE')",
        "FROM read_parquet('FILE')",
        "FROM read_json('FILE')",
        "FROM read_blob('FILE')",
        "FROM frame",
    ],
)
def test_files_and_python_objects_are_out_of_reach(root: Path, sql: str) -> None:
    import pyarrow as pa

    frame = pa.table({"secret": [1]})
    assert frame.num_rows
    secret = root / "secret.csv"
    secret.write_text("secret\n")
    with pytest.raises(VizError, match=r"^E-SQL: "):
        database(root).query(sql.replace("FILE", str(secret)))


def test_a_query_that_takes_too_long_is_stopped_and_the_next_one_works(root: Path) -> None:
    base = database(root)
    with pytest.raises(VizError, match="E-SQL-TIME"):
        base.query("SELECT count(*) FROM range(100000000000) WHERE random() > 2", limit_s=0.3)
    assert base.query("SELECT 1").rows == [(1,)]


def test_an_error_names_the_trouble_and_the_views(root: Path) -> None:
    with pytest.raises(VizError, match=r"(?s)nothing_here.*runs, metrics, events"):
        database(root).query("SELECT * FROM nothing_here")


def test_an_error_is_one_line_that_tells_where(root: Path) -> None:
    with pytest.raises(VizError, match=r"near \"wrong\" in line 2; mend the query") as caught:
        database(root).query("SELECT *\nFROM runs wrong wrong")
    assert "\n" not in str(caught.value)


def test_events_of_all_runs_share_their_place_and_the_newest_of_each_stay(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("few", 3), ("many", 400), ("most", 900)):
        run = RunFolder(root, name)
        for step in range(count):
            run.event("eval", step)
    asked = "SELECT run, min(step), max(step), count(*) FROM events GROUP BY run ORDER BY run"
    whole = database(root)
    assert whole.query(asked).rows == [
        ("few", 0, 2, 3),
        ("many", 0, 399, 400),
        ("most", 0, 899, 900),
    ]
    assert whole.problems == []
    monkeypatch.setattr("nviz.store.database.MOST_EVENT_BYTES", 20_000)
    base = database(root)
    few, *others = base.query(asked).rows
    assert few == ("few", 0, 2, 3)
    for (_, first, last, count), end in zip(others, (399, 899), strict=True):
        assert last == end and count == end - first + 1
        assert 100 < count < 250
    assert base.problems == ["many and 1 more run(s): only the newest events are in the view"] or (
        base.problems == ["most and 1 more run(s): only the newest events are in the view"]
    )


def test_a_fair_share_gives_small_ones_all_and_fills_the_place() -> None:
    assert fair_share([], 10) == 0
    assert fair_share([3, 4, 3], 10) == 4
    assert fair_share([1, 50, 60], 21) == 10
    for sizes, most in (([5, 9, 2, 40], 30), ([7] * 9, 50)):
        share = fair_share(sizes, most)
        assert most - len(sizes) < sum(min(size, share) for size in sizes) <= most


def test_events_behind_a_link_are_not_read(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"event": "secret", "time_unix_s": 1}\n')
    path = RunFolder(root, "a").path / "events.jsonl"
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    assert database(root).query("SELECT event FROM events").rows == []


def test_a_whole_run_can_be_asked(root: Path) -> None:
    trained(root, "a", steps=120)
    rows = (
        database(root)
        .query('SELECT count(*), max(step), min("lr/dense") FROM metrics WHERE NOT superseded')
        .rows
    )
    assert rows == [(120, 119, pytest.approx(3e-4 / 40))]


def test_sealed_rows_from_a_later_attempts_first_step_on_are_superseded(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(*map(record, range(6)), part=0)
    run.seal(*map(record, range(6, 10)), part=1)
    run.seal(*map(record, range(7, 12)), attempt=2)
    sql = "SELECT attempt, list(step ORDER BY step) FROM metrics WHERE superseded GROUP BY attempt"
    assert database(root).query(sql).rows == [(1, [7, 8, 9])]
    total = database(root).query("SELECT count(*) FROM metrics WHERE NOT superseded").rows
    assert total == [(12,)]


def test_a_part_is_only_read_by_the_query_that_asks_for_it(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(*map(record, range(5)))
    base = database(root)
    (run.path / "metrics" / "1-0-000.parquet").unlink()
    assert base.query("SELECT count(*) FROM runs").rows == [(1,)]
    with pytest.raises(VizError, match=r"^E-SQL: "):
        base.query("SELECT count(*) FROM metrics")


def test_a_broken_part_is_named_and_the_rest_can_be_asked(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(*map(record, range(5)))
    (run.path / "metrics" / "1-0-001.parquet").write_bytes(b"no")
    base = database(root)
    assert base.query("SELECT count(*) FROM metrics").rows == [(5,)]
    assert len(base.problems) == 1 and base.problems[0].startswith("a: 1-0-001.parquet: unreadable")


def test_no_other_file_below_the_runs_can_be_read(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal(record(0))
    base = database(root)
    for name in ("run.json", "metrics/../run.json"):
        with pytest.raises(VizError, match=r"^E-SQL: "):
            base.query(f"FROM read_text('{run.path / name}')")
