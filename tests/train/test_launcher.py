"""How often a launcher starts a worker again, and when it gives up: with real processes."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import broken_worker
import pytest
from nmoe_train.config import Config, load_config
from nmoe_train.elastic.launcher import Launcher
from nmoe_train.presets import DRILL

RESTARTS = 2


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    # The process that workers are forked from looks here for what it should import.
    monkeypatch.setenv("PYTHONPATH", str(Path(broken_worker.__file__).parent))
    sets = {"run.dir": f'"{tmp_path / "run"}"', "elastic.restarts": RESTARTS}
    # How long a first host without workers waits for those of others, when there are none.
    sets["elastic.join_s"] = 0.1
    # Nobody here is counted out for silence.
    sets["elastic.deadline_s"] = 120
    return load_config(DRILL, [f"{key}={value}" for key, value in sets.items()])


def poll_until(true: Callable[[], bool], *launchers: Launcher) -> None:
    until_s = time.monotonic() + 300
    while not true():
        assert time.monotonic() < until_s
        for launcher in launchers:
            launcher.poll()


def starts(log: Path) -> int:
    return log.read_text().count("crashes") if log.exists() else 0


def test_a_worker_that_crashes_again_and_again_is_given_up(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Launcher(config, 1, "broken_worker:crashing_work", log=log) as launcher:
        poll_until(lambda: launcher.ended, launcher)
    assert starts(log) == 1 + RESTARTS
    assert launcher.exit_code == 1
    assert launcher.what.startswith("E-WORKER: no worker of this host can go on")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_host_without_workers_leaves_and_the_first_stays_for_the_others(
    config: Config, tmp_path: Path, broken: int
) -> None:
    log, mains = tmp_path / "log", ["broken_worker:living_work"] * 2
    mains[broken] = "broken_worker:crashing_beside_work"
    logs: list[Path | None] = [None, None]
    logs[broken] = log
    with ExitStack() as stack:
        first = stack.enter_context(Launcher(config, 1, mains[0], expected=2, log=logs[0]))
        assert first.coordinator is not None
        second = Launcher(config, 1, mains[1], expected=2, store=first.store, log=logs[1])
        both = first, stack.enter_context(second)
        gone = both[broken]
        poll_until(lambda: starts(log) == 1 + RESTARTS and not gone.processes(), *both)
        for _ in range(50):
            first.poll()
        assert not first.ended, "the other host still works"
        if broken == 1:
            poll_until(lambda: second.ended, *both)
            assert second.exit_code == 1
            assert second.what.startswith("E-WORKER")
        first.coordinator.finish(0, "completed")
        poll_until(lambda: first.ended and second.ended, *both)
        assert first.exit_code == 0
