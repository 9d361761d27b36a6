"""Starts the workers of one host, and starts them again when they die.

The launcher that is given no store hosts it, decides who is in (`coordinator`), prepares the data
and holds the run folder, all of which outlives workers; launchers on other hosts are given its
address. Workers are forked from a server process that has imported what they need, so that one
that comes back costs no import; each is in a session of its own, so that Ctrl-C reaches the
launcher alone, which passes it on once.

Where one worker after another ends before it has finished a new step, however it ends, no more is
started. A launcher that can start none leaves, but the first stays while those of other hosts work.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from nmoe_train.config import Config
from nmoe_train.elastic.coordinator import Coordinator
from nmoe_train.elastic.link import CALL_S, Control, Line, StoreGone, own_address
from nmoe_train.elastic.membership import Place
from nmoe_train.errors import USER_ERROR, TrainError

logger = logging.getLogger("nmoe_train")

POLL_S = 0.02
AGAIN_S = 0.3
LEAVE_S = 30.0
LEFT_TO_COME_BACK = 75
"""Exit code of a worker that was counted out, or lost the store: EX_TEMPFAIL of sysexits.h."""
NO_WORKER = (
    "E-WORKER: no worker of this host can go on: each ended again and again before it finished a "
    "new step; see what they said above, and run the same command again"
)


@dataclass
class _Slot:
    """A place for one worker on this host."""

    place: Place
    process: ForkServerProcess | None = None
    failures: int = 0
    """How many workers in a row have ended here before they finished a new step."""
    furthest: int = 0
    """The last step that any worker here has finished."""
    start_at_s: float = 0.0
    closed: bool = False


class Launcher:
    """The workers of this host. Call `poll` until `ended`; a context manager that leaves none.

    main: what a worker runs, with the configuration, the store's address and its place; as
    `package.module:function`, which is not imported here. `store`: address of the store of another
    launcher; None hosts it here, for `expected` workers on all hosts. What workers print goes to
    `log`, if given. Raises TrainError `E-STORE` when there is no such store.
    """

    def __init__(
        self,
        config: Config,
        workers: int,
        main: str,
        *,
        store: str | None = None,
        expected: int | None = None,
        log: Path | None = None,
    ) -> None:
        self._config, self._main, self._log = config, main, log
        self._context = _start_server(main, workers)
        expected = expected or workers
        self.coordinator: Coordinator | None = None
        if store is None:
            host = "127.0.0.1" if expected == workers else own_address()
            self._server = TCPStore(
                host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=CALL_S),
            )
            store = f"{host}:{self._server.port}"
            self.coordinator = Coordinator(config, self._server, expected)
        self.store = store
        try:
            # It outlives its workers, which the others count out after the deadline.
            self._line = Line(store, max(CALL_S, 2 * config.elastic.deadline_s))
            number = self._line.next_number()
        except StoreGone as error:
            remedy = "give the address that the first launcher prints, while it runs"
            raise TrainError("E-STORE", str(error), remedy) from None
        self._slots = [_Slot((number, slot)) for slot in range(workers)]
        self._signals: list[signal.Signals] = []
        self._passed_on = 0
        self._control = Control()
        self._leave_by_s: float | None = None
        self._alone_since_s: float | None = None
        self._other_hosts = expected > workers

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        for slot in self._slots:
            if slot.process is not None and slot.process.is_alive():
                slot.process.kill()
                slot.process.join()

    @property
    def ended(self) -> bool:
        """Whether the run has ended and no worker that needs this launcher is left."""
        if any(slot.process is not None for slot in self._slots):
            return False
        if self.coordinator is None and self._closed:
            return True
        if not self._ending:
            return False
        late = self._leave_by_s is not None and time.monotonic() > self._leave_by_s
        return self.coordinator is None or self.coordinator.alone or late

    @property
    def exit_code(self) -> int:
        """What the run ended with."""
        end = self._control.end
        if end is None:
            return 128 + self._signals[0] if self._signals else 1
        return int(end["code"])

    @property
    def what(self) -> str:
        """How the run ended, in words."""
        end = self._control.end
        if end is not None:
            return str(end["what"])
        return NO_WORKER if self._closed else ""

    @property
    def _closed(self) -> bool:
        """Whether no worker will be started here any more."""
        return all(slot.closed for slot in self._slots)

    @property
    def _ending(self) -> bool:
        return self._control.end is not None or bool(self._signals)

    def processes(self) -> dict[Place, int]:
        """Process ids of the workers that run, by place."""
        found = {slot.place: slot.process for slot in self._slots}
        return {place: p.pid for place, p in found.items() if p is not None and p.pid is not None}

    def pass_on(self, number: signal.Signals) -> None:
        """A signal for all workers: the first ends the run with a checkpoint, another at once."""
        self._signals.append(number)

    def poll(self) -> None:
        """Does what there is to do, and pauses a moment."""
        if self.coordinator is not None:
            self.coordinator.tick()
            self._control = self.coordinator.control
        else:
            try:
                self._control = self._line.control()
            except StoreGone as error:
                what = (
                    f"E-STORE: {error}; if the run goes on elsewhere, run the same command again "
                    "once it can be reached"
                )
                self._control = Control(end={"code": 1, "what": what})
        while self._passed_on < len(self._signals):
            for pid in self.processes().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, self._signals[self._passed_on])
            self._passed_on += 1
        for slot in self._slots:
            self._mind(slot)
        self._end_if_nobody_is_left()
        self._let_go()
        time.sleep(POLL_S)

    def _mind(self, slot: _Slot) -> None:
        """Notices the end of a worker, and starts another where that may help."""
        process = slot.process
        if process is not None and process.exitcode is not None:
            self._note_exit(slot, process, process.exitcode)
            process.close()
            slot.process = None
            return
        wanted = process is None and not slot.closed and not self._ending
        if wanted and time.monotonic() >= slot.start_at_s:
            self._start(slot)

    def _start(self, slot: _Slot) -> None:
        slot.process = self._context.Process(
            target=run_worker,
            args=(self._main, self._config, self.store, slot.place, self._log),
            daemon=True,
        )
        try:
            slot.process.start()
        except (EOFError, OSError) as error:
            raise TrainError(
                "E-WORKER",
                f"no worker can be started: what they are forked from is gone ({error!r})",
                "see what it said above, and run the same command again",
            ) from error

    def _note_exit(self, slot: _Slot, process: ForkServerProcess, code: int) -> None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        with contextlib.suppress(StoreGone):
            self._line.tell("exit", place=slot.place, pid=process.pid, how=how)
        slot.start_at_s = time.monotonic() + AGAIN_S
        self._count_failure(slot, code)
        # A worker that ended by an error of the configuration has said so itself.
        if slot.closed and slot.failures > self._config.elastic.restarts and not self._ending:
            logger.warning(
                "worker %d of this host is not started again: it %s, and had finished no new step "
                "%d times in a row (elastic.restarts = %d)",
                slot.place[1],
                how,
                slot.failures,
                self._config.elastic.restarts,
            )

    def _count_failure(self, slot: _Slot, code: int) -> None:
        """Notes whether the worker that has ended got anywhere; closes its slot if none does."""
        with contextlib.suppress(StoreGone):
            last = self._line.last_beat(slot.place)
            if last.furthest > slot.furthest:
                slot.furthest, slot.failures = last.furthest, 0
            # One that was left out without ever taking part has harmed nobody.
            slot.failures += code not in (0, LEFT_TO_COME_BACK) or last.generation > 0
        slot.closed = code == USER_ERROR or slot.failures > self._config.elastic.restarts

    def _end_if_nobody_is_left(self) -> None:
        """Ends the run once no worker can go on here, nor one of another host for a while."""
        if self.coordinator is None or self._ending or not self._closed:
            return
        # What a worker said last may still be on its way.
        self.coordinator.tick()
        now_s = time.monotonic()
        if not self.coordinator.alone:
            self._alone_since_s = None
            return
        self._alone_since_s = self._alone_since_s or now_s
        patience_s = self._config.elastic.join_s if self._other_hosts else 0.0
        if now_s - self._alone_since_s >= patience_s:
            self.coordinator.finish(1, NO_WORKER)

    def _let_go(self) -> None:
        """Once the run has ended, waits a while for the workers, and then does not."""
        if self._control.end is None:
            return
        now_s = time.monotonic()
        self._leave_by_s = self._leave_by_s or now_s + LEAVE_S
        late = now_s > self._leave_by_s
        for pid in self.processes().values():
            if late or _is_stopped(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _start_server(main: str, workers: int) -> ForkServerContext:
    """Starts the process that workers are forked from, which imports at once what they run.

    They share the cores of this host.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    # Lost peers are this run's daily bread: torch need not dump its stack for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.partition(":")[0]])
    forkserver.ensure_running()
    return context


def run_worker(main: str, config: Config, store: str, place: Place, log: Path | None) -> None:
    """The life of a worker's process, up to its exit code; it prints to a log, if given."""
    os.setsid()
    if log is not None:
        with log.open("ab", buffering=0) as stream:
            for descriptor in (1, 2):
                os.dup2(stream.fileno(), descriptor)
    module, _, name = main.partition(":")
    getattr(importlib.import_module(module), name)(config, store, place)


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP) and so cannot leave by itself."""
    try:
        with open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123
            return stream.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
