"""What one dashboard process knows: the index, the summaries and the data of the runs being looked
at.

Sessions are threads. The list of runs is walked at most once in `INDEX_S` seconds; summaries are
made by one thread beside the sessions, so that a list of thousands does not wait for all of them.
Events and expert loads of the `OPEN_RUNS` runs that were looked at last stay in memory, the loads
within `MOST_EXPERT_BYTES`.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from nviz.store.columns import ColumnReader
from nviz.store.events import Event, EventLog
from nviz.store.experts import ExpertLoads
from nviz.store.heat import Heat
from nviz.store.hydra import HydraFolder, HydraIndex
from nviz.store.runs import Run, RunIndex
from nviz.store.sql_worker import SqlWorker
from nviz.store.summary import Summaries, Summary

OPEN_RUNS = 8
INDEX_S = 1.0
MOST_EXPERT_BYTES = 512 * 2**20


class Workspace:
    """Reads the runs under `root` for all sessions of one process."""

    def __init__(self, root: Path) -> None:
        """Raises VizError `E-RUNS-MISSING` if `root` is no readable folder."""
        self.root = root
        self._index = RunIndex(root)
        self._hydra = HydraIndex(root)
        self._lock = threading.RLock()
        self._summaries = Summaries()
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="nviz-summaries")
        self._summed: Future[None] | None = None
        self.columns = ColumnReader()
        self.heat = Heat()
        self._events: OrderedDict[tuple[str, int], EventLog] = OrderedDict()
        self._experts_lock = threading.Lock()
        self._experts: OrderedDict[tuple[str, int], ExpertLoads] = OrderedDict()
        self._runs: dict[str, Run] = {}
        self._walked = -INDEX_S
        self.sql = SqlWorker(root)

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
        return self._summaries.summary(run)

    def summaries(self, runs: Sequence[Run], wait_s: float) -> dict[str, Summary]:
        """What is known of `runs` by key; waits at most `wait_s` seconds for what is missing.

        The rest is made meanwhile, and is there at a later call.
        """
        known = {run.key: self._summaries.known(run) for run in runs}
        missing = [run for run in runs if not known[run.key][1]]
        if missing:
            with self._lock:
                if self._summed is None or self._summed.done():
                    self._summed = self._summing.submit(self._summarise, missing)
                making = self._summed
            wait([making], timeout=wait_s)
        found = {run.key: self._summaries.known(run)[0] for run in runs}
        return {key: summary for key, summary in found.items() if summary is not None}

    def _summarise(self, runs: Sequence[Run]) -> None:
        self._summaries.forget(self.runs())
        for run in runs:
            self._summaries.summary(run)

    def events(self, run: Run) -> list[Event]:
        """The newest events of `run`, in the order in which they were written."""
        with self._lock:
            key = (run.key, run.identity)
            log = self._events.pop(key, None) or EventLog(run.folder)
            self._events[key] = log
            while len(self._events) > OPEN_RUNS:
                self._events.popitem(last=False)
            log.refresh()
            return list(log.events)

    def event_problems(self, run: Run) -> list[str]:
        """What of the events could not be read, as of the last call of `events`."""
        with self._lock:
            log = self._events.get((run.key, run.identity))
            return log.problems() if log else []

    @contextmanager
    def experts(self, run: Run) -> Iterator[ExpertLoads]:
        """The expert loads of `run`, just refreshed. Leave the block soon: others wait for it."""
        with self._experts_lock:
            key = (run.key, run.identity)
            loads = self._experts.pop(key, None) or ExpertLoads(run.folder)
            self._experts[key] = loads
            loads.refresh()
            while len(self._experts) > 1 and self._too_many_experts():
                self._experts.popitem(last=False)
            yield loads

    def _too_many_experts(self) -> bool:
        held = sum(loads.size_bytes for loads in self._experts.values())
        return len(self._experts) > OPEN_RUNS or held > MOST_EXPERT_BYTES
