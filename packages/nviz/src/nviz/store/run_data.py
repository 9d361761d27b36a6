"""One run's metrics and events as tables in an in-memory DuckDB.

`refresh` adds what the files gained since the last call: new whole lines of JSONL, and sealed
Parquet parts that are new or changed. A row may arrive twice (live, then sealed); `seq` and
`sealed` tell the two apart. NULL means "not recorded", NaN and infinities mean that they were
recorded.

Tables, in a schema of the run's own:
    rows(attempt, rank, seq, sealed, step, <a DOUBLE column per metric>)
    events(seq, time_unix_s, event, step, detail)

`ROWS` selects what counts: one row for each (attempt, rank, step), the sealed one first, and
whether it is superseded: a later attempt began at or before its step. A run that reached step 161,
then resumed at 110, shows the first attempt up to 109 and the second from 110 on.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from nviz.store.files import MetricsFile, list_metrics_files
from nviz.store.lines import GrowingLines
from nviz.store.parse import metrics_table, number, parse_lines, step_number
from nviz.store.runs import Signature

log = logging.getLogger("nviz")

MOST_METRICS = 2000
RESERVED = frozenset({"run", "run_id", "attempt", "rank", "seq", "sealed", "step", "superseded"})
# VARCHAR too: a part may keep non-finite values as words.
NUMERIC_TYPE = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL.*|VARCHAR")

STEP = "TRY_CAST(step AS BIGINT)"
ROW_KEYS = "attempt INTEGER, rank INTEGER, seq BIGINT, sealed BOOLEAN, step BIGINT"
EVENTS = (
    "CREATE TABLE events(seq BIGINT, time_unix_s DOUBLE, event VARCHAR, step BIGINT, "
    "detail VARCHAR)"
)
EVENT_SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("time_unix_s", pa.float64()),
        ("event", pa.string()),
        ("step", pa.int64()),
        ("detail", pa.string()),
    ]
)

# The rows that count; how, says the docstring above.
ROWS = """
    WITH starts AS (SELECT attempt AS later, min(step) AS first FROM rows GROUP BY attempt),
         horizons AS (
             SELECT s.later AS attempt, min(l.first) AS horizon
             FROM starts s JOIN starts l ON l.later > s.later GROUP BY s.later)
    SELECT rows.*, coalesce(step >= horizon, false) AS superseded
    FROM rows LEFT JOIN horizons USING (attempt)
    QUALIFY row_number() OVER (PARTITION BY attempt, rank, step ORDER BY sealed DESC, seq DESC) = 1
"""


def quoted(name: str) -> str:
    """`name` as a SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """`text` as a SQL string."""
    return "'" + text.replace("'", "''") + "'"


def one_row(
    connection: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object] = ()
) -> tuple[Any, ...]:
    """The only row of a query. All of it is fetched: a half-read result blocks the connection."""
    (row,) = connection.execute(sql, list(values)).fetchall()
    return row


class RunData:
    """Tables of one run in schema `schema` of `connection`.

    Not safe to use from several threads.
    """

    def __init__(
        self,
        folder: Path,
        connection: duckdb.DuckDBPyConnection,
        schema: str,
        metrics: Sequence[str] = (),
    ) -> None:
        """`metrics` are names to expect, which saves adding their columns one by one."""
        self.folder = folder
        self.connection = connection.cursor()
        self.schema = schema
        self.version = 0
        self._columns = {name.lower(): name for name in metrics}
        self._seq = 0
        self._tails: dict[Path, GrowingLines] = {}
        self._read: dict[Path, Signature] = {}
        self._broken: dict[Path, tuple[Signature, str]] = {}
        self.connection.execute(f"CREATE SCHEMA {quoted(schema)}")
        self.connection.execute(f"USE {quoted(schema)}")
        columns = "".join(f", {quoted(name)} DOUBLE" for name in self._columns.values())
        self.connection.execute(f"CREATE TABLE rows({ROW_KEYS}{columns})")
        self.connection.execute(EVENTS)

    def close(self) -> None:
        """Drop the run's tables."""
        self.connection.execute("USE main")
        self.connection.execute(f"DROP SCHEMA {quoted(self.schema)} CASCADE")
        self.connection.close()

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics seen so far, sorted."""
        return sorted(self._columns.values())

    def problems(self) -> list[str]:
        """One line for each thing that could not be read: torn or foreign lines, broken files."""
        lines = [
            f"{path.name}: {tail.skipped} unreadable line{'s' if tail.skipped > 1 else ''} skipped"
            for path, tail in self._tails.items()
            if tail.skipped
        ]
        return lines + [f"{path.name}: {problem}" for path, (_, problem) in self._broken.items()]

    def refresh(self) -> bool:
        """Read what the run's files gained. Returns whether anything was added."""
        before = self.version
        for file in list_metrics_files(self.folder):
            if not file.experts:
                self._guarded(file)
        self._read_events()
        return self.version != before

    def _guarded(self, file: MetricsFile) -> None:
        """Read one file; a file that cannot be read is noted and does not stop the others."""
        if self._broken.get(file.path, (None,))[0] == file.signature:
            return
        try:
            if file.sealed:
                self._read_part(file)
            else:
                self._read_tail(file)
            self._broken.pop(file.path, None)
        except (OSError, duckdb.Error, pa.ArrowException) as error:
            problem = f"unreadable ({str(error).splitlines()[0][:160]})"
            log.warning("%s: %s", file.path.name, problem)
            self._broken[file.path] = (file.signature, problem)
            # Lines may have been passed whose rows did not arrive: begin again next time.
            self._tails.pop(file.path, None)

    def _read_tail(self, file: MetricsFile) -> None:
        tail = self._tails.setdefault(file.path, GrowingLines(file.path))
        if self._read.get(file.path) == file.signature:
            return
        for block in tail.new_blocks():
            parsed = metrics_table(block)
            tail.skipped += parsed.skipped
            self._insert("rows", self._row_table(file, parsed.table))
        self._read[file.path] = file.signature

    def _read_part(self, file: MetricsFile) -> None:
        if self._read.get(file.path) == file.signature:
            return
        source = f"read_parquet({literal(str(file.path))})"
        described = self.connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
        types = {name: kind for name, kind, *_ in described}
        if "step" not in types:
            raise duckdb.InvalidInputException("no column named step")
        columns = self._metric_columns(types)
        self._seq += 1
        self.connection.execute(
            f"INSERT INTO rows BY NAME SELECT {file.attempt} AS attempt, {file.rank} AS rank, "
            f"{self._seq} AS seq, true AS sealed, {', '.join(columns)} FROM {source} "
            f"WHERE {STEP} >= 0"
        )
        self._read[file.path] = file.signature
        self.version += 1

    def _metric_columns(self, types: dict[str, str]) -> list[str]:
        numeric = [name for name, kind in types.items() if NUMERIC_TYPE.fullmatch(kind)]
        known = self._known_columns(numeric)
        return [
            f"{STEP} AS step",
            *(
                f"TRY_CAST({quoted(name)} AS DOUBLE) AS {quoted(column)}"
                for name, column in known.items()
            ),
        ]

    def _known_columns(self, names: Iterable[str]) -> dict[str, str]:
        """Column of each metric, made if it is new; names that differ in case share one column."""
        known = {}
        for name in names:
            folded = name.lower()
            if not name or folded in RESERVED or not name.isprintable():
                continue
            if folded not in self._columns:
                if len(self._columns) >= MOST_METRICS:
                    continue
                self.connection.execute(f"ALTER TABLE rows ADD COLUMN {quoted(name)} DOUBLE")
                self._columns[folded] = name
            known[name] = self._columns[folded]
        return known

    def _row_table(self, file: MetricsFile, found: pa.Table) -> pa.Table:
        """Parsed metrics with their key columns, each metric under its column's name."""
        known = self._known_columns(name for name in found.column_names if name != "step")
        columns: dict[str, pa.ChunkedArray] = {}
        for name, column in known.items():
            columns.setdefault(column, found[name])
        return pa.table(self._keys(file, found) | columns)

    def _keys(self, file: MetricsFile, found: pa.Table) -> dict[str, pa.Array]:
        count = found.num_rows
        first, self._seq = self._seq + 1, self._seq + count
        return {
            "attempt": pa.repeat(file.attempt, count),
            "rank": pa.repeat(file.rank, count),
            "seq": pa.array(range(first, first + count), pa.int64()),
            "sealed": pa.repeat(False, count),
            "step": found["step"],
        }

    def _insert(self, table: str, batch: pa.Table) -> None:
        if batch.num_rows == 0:
            return
        self.connection.register("batch", batch)
        try:
            self.connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM batch")
        finally:
            self.connection.unregister("batch")
        self.version += 1

    def _read_events(self) -> None:
        path = self.folder / "events.jsonl"
        tail = self._tails.setdefault(path, GrowingLines(path))
        try:
            for block in tail.new_blocks():
                records, skipped = parse_lines(block)
                tail.skipped += skipped
                self._insert("events", self._event_table(records))
        except OSError as error:
            log.warning("events.jsonl: %s", error)

    def _event_table(self, records: list[dict[str, Any]]) -> pa.Table:
        rows = []
        for record in records:
            self._seq += 1
            rest = {k: v for k, v in record.items() if k not in ("time_unix_s", "event", "step")}
            rows.append(
                {
                    "seq": self._seq,
                    "time_unix_s": number(record.get("time_unix_s")),
                    "event": str(record.get("event"))[:200].encode(errors="replace").decode(),
                    "step": step_number(record.get("step")),
                    "detail": json.dumps(rest, sort_keys=True),
                }
            )
        return pa.Table.from_pylist(rows, schema=EVENT_SCHEMA)
