"""The filter's worker inside the calling process, for tests of what it does."""

from collections.abc import Sequence

import pytest
from nmoe_data.hydra.filter import run
from nmoe_data.hydra.filter.work import Done, Job, Task, Worker


class InlineExecutor:
    """Does a task when it is waited for; as many may wait as there would be workers."""

    def __init__(self, job: Job, devices: Sequence[str]) -> None:
        self.workers = len(devices)
        self._worker = Worker(job, devices[0])
        self._tasks: list[Task] = []

    def can_take(self) -> bool:
        return len(self._tasks) < 2 * self.workers

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def wait(self, seconds: float) -> list[Done]:
        """The newest task first, so that chunks come back out of order."""
        return [self._worker.run(self._tasks.pop())] if self._tasks else []

    def close(self) -> None:
        self._tasks.clear()


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let filter runs of this test work in this process."""
    monkeypatch.setattr(run, "ProcessExecutor", InlineExecutor)
