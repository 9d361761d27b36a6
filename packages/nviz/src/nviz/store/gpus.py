"""GPU telemetry of a run: `gpu.parquet` in its folder, or `gpu-<n>.parquet` where several processes
write.

A row is one reading of one rank's GPU. Columns: `rank`, `time_unix_s`, and any of those in
`READINGS`. A trainer replaces the file by rename as it grows, so a reader sees a whole one. NULL
means that the driver gave no value.
"""

import os
import re
from pathlib import Path

import duckdb

from nviz.store.database import literal, quoted

NAME = re.compile(r"gpu(-\d{1,9})?\.parquet")
READINGS = (
    "utilisation_percent",
    "memory_used_gib",
    "memory_total_gib",
    "power_w",
    "power_limit_w",
    "temperature_c",
    "clock_sm_mhz",
    "clock_memory_mhz",
)


def gpu_files(folder: Path) -> list[Path]:
    """The GPU files of the run in `folder`, sorted; links are passed over."""
    try:
        with os.scandir(folder) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []
    return sorted(found)


def open_gpus(folder: Path) -> tuple[duckdb.DuckDBPyConnection | None, list[str]]:
    """A connection with the view `gpus(rank, time_unix_s, <READINGS>)`, and what cannot be read.

    None where there is no readable file. A reading that no file has is NULL everywhere.
    """
    connection = duckdb.connect(":memory:")
    parts, problems = [], []
    for path in gpu_files(folder):
        try:
            parts.append(_selection(connection, path))
        except duckdb.Error as error:
            problems.append(f"{path.name}: unreadable ({str(error).splitlines()[0][:160]})")
    if not parts:
        connection.close()
        return None, problems
    connection.execute(f"CREATE VIEW gpus AS {' UNION ALL '.join(parts)}")
    return connection, problems


def _selection(connection: duckdb.DuckDBPyConnection, path: Path) -> str:
    """A SELECT of the view's columns out of one file, those it lacks as NULL."""
    source = f"read_parquet({literal(str(path))})"
    described = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    present = {name for name, *_ in described}
    if not {"rank", "time_unix_s"} <= present:
        raise duckdb.InvalidInputException("no columns rank and time_unix_s")
    readings = [
        f"TRY_CAST({quoted(name)} AS DOUBLE) AS {name}" if name in present else f"NULL AS {name}"
        for name in READINGS
    ]
    return (
        "SELECT TRY_CAST(rank AS INTEGER) AS rank, TRY_CAST(time_unix_s AS DOUBLE) AS time_unix_s, "
        f"{', '.join(readings)} FROM {source} "
        "WHERE TRY_CAST(rank AS INTEGER) >= 0 AND isfinite(TRY_CAST(time_unix_s AS DOUBLE))"
    )
