"""An elastic run from its configuration to its end: what `nmoe-train elastic` does."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nmoe_data.errors import DataError
from nmoe_data.files import only_writer, os_errors
from nmoe_kernels.errors import KernelError
from rich.console import Console

from nmoe_train.config import Config
from nmoe_train.console import ConsoleObserver
from nmoe_train.data import prepare
from nmoe_train.device import pick_device
from nmoe_train.elastic.launcher import LEFT_TO_COME_BACK, Launcher
from nmoe_train.elastic.link import StoreGone
from nmoe_train.elastic.membership import Place
from nmoe_train.elastic.recover import ElasticWorker, End, Evicted
from nmoe_train.elastic.session import Session
from nmoe_train.errors import USER_ERROR, TrainError
from nmoe_train.interrupt import SIGNALS, signal_of
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups
from nmoe_train.run import run_config
from nmoe_train.telemetry import close_record

logger = logging.getLogger("nmoe_train")

WORK = "nmoe_train.elastic_run:work"


def work(config: Config, store: str, place: Place) -> None:
    """A worker's process: trains until the run has ended, and exits as it did."""
    show_logs(logging.WARNING)
    device = pick_device(
        config.run.device,
        deterministic=config.run.deterministic,
        local_rank=place[1],
        local_ranks=place[1] + 1,
    )

    def attempt(layout: Layout, groups: Groups, session: Session) -> End:
        observer = ConsoleObserver(Console(quiet=layout.rank != 0))
        outcome = run_config(config, groups, device, observer, session=session)
        stopped = outcome.stopped_by
        return End(outcome.status, 0 if stopped is None else 128 + stopped)

    try:
        sys.exit(ElasticWorker(config, store, place, device).run(attempt))
    except (Evicted, StoreGone) as error:
        logger.warning("a worker leaves: %s", error)
        sys.exit(LEFT_TO_COME_BACK)
    except (TrainError, DataError, KernelError) as error:
        logger.error("error %s", error)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt as stop:
        sys.exit(128 + signal_of(stop))


@contextmanager
def held_run(config: Config, observer: ConsoleObserver) -> Iterator[None]:
    """Takes the run folder and prepares the data, for workers that come and go."""
    path = config.run.dir
    with os_errors("use the run folder", path):
        path.mkdir(parents=True, exist_ok=True)
        with only_writer(path):
            with observer:
                prepare(config, observer.preparation)
            yield


def run_elastic(config: Config, workers: int, expected: int, store: str | None) -> int:
    """Starts this host's workers and minds them until the run has ended; its exit code.

    `expected`: workers of all hosts. `store`: address that the first launcher printed; None where
    this is the first. Raises TrainError and nmoe_data's DataError.
    """
    _check(config)
    if expected < workers:
        raise TrainError(
            "E-ELASTIC",
            f"--expected {expected} is fewer than the --workers {workers} of this host",
            "give the workers of all hosts together, or leave it out where this is the only one",
        )
    observer = ConsoleObserver(Console())
    if store is not None:
        return _mind(config, workers, expected, store, observer)
    with held_run(config, observer):
        return _mind(config, workers, expected, None, observer)


def _check(config: Config) -> None:
    """Refuses what does not survive a change of layout. Raises TrainError `E-ELASTIC`."""
    rdep = config.parallel.rdep
    if rdep.capacity != "exact":
        raise TrainError(
            "E-ELASTIC",
            f"parallel.rdep.capacity = {rdep.capacity:g} drops other tokens on another layout, so "
            "that the loss would depend on who died",
            'set it to "exact"',
        )
    on_gpus = pick_device(config.run.device, deterministic=False).type == "cuda"
    one_sided = rdep.transport in ("p2p", "nvshmem") or (on_gpus and rdep.transport is None)
    if config.parallel.ep > 1 and one_sided:
        raise TrainError(
            "E-ELASTIC",
            "a GPU that waits for one-sided puts of the dead cannot be told to stop before "
            "parallel.rdep.deadline_s",
            'set parallel.rdep.transport to "collective"',
        )


def _mind(
    config: Config, workers: int, expected: int, store: str | None, observer: ConsoleObserver
) -> int:
    with Launcher(config, workers, WORK, expected=expected, store=store) as launcher:
        if expected > workers:
            observer.message(f"store: {launcher.store}")

        def pass_on(number: int, _frame: FrameType | None) -> None:
            launcher.pass_on(signal.Signals(number))

        before = {number: signal.signal(number, pass_on) for number in SIGNALS}
        try:
            while not launcher.ended:
                launcher.poll()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if launcher.exit_code not in (0, *(128 + number for number in SIGNALS)):
            observer.message(f"error {launcher.what}")
            if store is None:
                close_record(config.run.dir, launcher.what)
        return launcher.exit_code


def show_logs(level: int) -> None:
    """Sends what the packages log to stderr."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for package in ("nmoe_train", "nmoe_data", "nmoe_kernels"):
        logging.getLogger(package).setLevel(level)
