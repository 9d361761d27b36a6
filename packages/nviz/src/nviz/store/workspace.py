"""What one dashboard process knows: the index, the summaries and the tables of the runs being
looked at.

Sessions are threads, so everything is behind one lock. Tables of the `OPEN_RUNS` runs that were
looked at last stay in memory; the list of runs is walked at most once in `INDEX_S` seconds.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from nviz.store.database import Database
from nviz.store.hydra import HydraFolder, HydraIndex
from nviz.store.run_data import RunData
from nviz.store.runs import Run, RunIndex
from nviz.store.summary import Summaries, Summary

OPEN_RUNS = 8
INDEX_S = 1.0
SNAPSHOT_S = 15.0


class Workspace:
    """Reads the runs under `root` for all sessions of one process."""

    def __init__(self, root: Path) -> None:
        """Raises VizError `E-RUNS-MISSING` if `root` is no readable folder."""
        self.root = root
        self._index = RunIndex(root)
        self._hydra = HydraIndex(root)
        self._lock = threading.RLock()
        # Its own: reading all runs takes seconds, and the other pages go on meanwhile.
        self._snapshot_lock = threading.Lock()
        self._connection = duckdb.connect(":memory:")
        self._summaries = Summaries(self._connection.cursor())
        self._open: OrderedDict[tuple[str, int], RunData] = OrderedDict()
        self._opened = 0
        self._runs: dict[str, Run] = {}
        self._walked = -INDEX_S
        self._snapshot: tuple[float, Database] | None = None

    def runs(self) -> dict[str, Run]:
        """Runs by key, the newest first."""
        with self._lock:
            if time.monotonic() - self._walked >= INDEX_S:
                self._runs = self._index.refresh()
                self._walked = time.monotonic()
            return self._runs

    def run(self, key: str) -> Run | None:
        """The run of that key, or None if there is none (any more)."""
        return self.runs().get(key)

    def hydra(self) -> dict[str, HydraFolder]:
        """Folders of the judge pipeline by key, the newest first."""
        return self._hydra.refresh()

    def summary(self, run: Run) -> Summary:
        """What the list shows of `run`."""
        with self._lock:
            return self._summaries.summary(run)

    @contextmanager
    def data(self, run: Run) -> Iterator[RunData]:
        """The tables of `run`, just refreshed. Leave the block soon: other sessions wait for it."""
        with self._lock:
            key = (run.key, run.identity)
            data = self._open.pop(key, None) or self._new_data(run)
            self._open[key] = data
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)[1].close()
            data.refresh()
            yield data

    def _new_data(self, run: Run) -> RunData:
        self._opened += 1
        return RunData(run.folder, self._connection, f"run_{self._opened}")

    def database(self) -> tuple[float, Database]:
        """When the newest SQL snapshot was taken (seconds since the epoch), and the snapshot."""
        with self._snapshot_lock:
            if self._snapshot is None or time.time() - self._snapshot[0] > SNAPSHOT_S:
                self._snapshot = (time.time(), Database(self.runs().values()))
            return self._snapshot
