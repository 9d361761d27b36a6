"""The temperature of a run's GPUs as they were read last, kept until the files change."""

from pathlib import Path

import duckdb

from nviz.store.gpus import gpu_files, open_gpus
from nviz.store.recent import Recent
from nviz.store.runs import Signature, signature

MOST_BYTES = 4 * 2**20
ENTRY_BYTES = 512
Key = tuple[Path, tuple[Signature | None, ...]]


class Heat:
    """Temperatures by run. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: Recent[Key, tuple[int, float] | None] = Recent(
            MOST_BYTES, lambda _: ENTRY_BYTES
        )

    def hottest(self, folder: Path) -> tuple[int, float] | None:
        """Rank and degrees Celsius of the hottest GPU, each by its newest reading.

        None where no GPU file gives a temperature.
        """
        files = gpu_files(folder)
        if not files:
            return None
        key = (folder, tuple(signature(path) for path in files))
        found = self._known.get(key)
        if found is None:
            found = _read(folder)
            self._known.put(key, found)
        return found


def _read(folder: Path) -> tuple[int, float] | None:
    connection, _ = open_gpus(folder)
    if connection is None:
        return None
    try:
        rows = connection.execute(
            "SELECT rank, arg_max(temperature_c, time_unix_s) AS degrees FROM gpus "
            "WHERE isfinite(temperature_c) GROUP BY rank ORDER BY degrees DESC LIMIT 1"
        ).fetchall()
    except duckdb.Error:
        # The file vanished or was replaced meanwhile: the next look reads it again.
        return None
    finally:
        connection.close()
    return (int(rows[0][0]), float(rows[0][1])) if rows else None
