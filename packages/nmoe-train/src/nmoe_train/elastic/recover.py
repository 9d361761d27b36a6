"""A worker of an elastic run: joins, trains in one generation after another, leaves.

The process stays; groups, model and optimizer are made anew in each generation, which costs less
than a second beside what a new process would. Between two generations a worker says whom it reaches
and waits to be named in the next. What ends a generation early is the heartbeat, which cuts the
connections that the main thread waits on.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from nmoe_data.errors import DataError
from nmoe_kernels.errors import KernelError
from torch.distributed.distributed_c10d import PrefixStore

from nmoe_train.config import Config
from nmoe_train.elastic.cut import Connections, abort_groups
from nmoe_train.elastic.heartbeat import Heart, Left
from nmoe_train.elastic.link import CALL_S, GenerationStore, Line, own_address
from nmoe_train.elastic.membership import Generation, Place, Worker
from nmoe_train.elastic.probes import AnsweringPort, reached_by
from nmoe_train.elastic.session import RESIZED, Session
from nmoe_train.elastic.snapshot import Memory
from nmoe_train.errors import USER_ERROR, TrainError
from nmoe_train.interrupt import Interrupt
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import OWN_ERRORS, PEER_CODES, Groups, join_groups

logger = logging.getLogger("nmoe_train")

USER_ERRORS = (TrainError, DataError, KernelError)
WAIT_S = 0.02
PROBE_EVERY_S = 1.0


@dataclass(frozen=True)
class End:
    """How an attempt ended: its status, and the exit code of the run that follows from it."""

    status: str
    code: int


Attempt = Callable[[Layout, Groups, Session], End]


class Evicted(Exception):
    """The others go on without this worker, or nobody is there to agree with."""


class ElasticWorker:
    """One process of an elastic run. `store`: host:port of the launcher's store."""

    def __init__(self, config: Config, store: str, place: Place, device: torch.device) -> None:
        self._config, self._device = config, device
        host = socket.gethostname()
        self._line = Line(store, max(CALL_S, config.elastic.deadline_s))
        self._rendezvous = GenerationStore(
            store, lambda: self._heart.ended(), 2 * config.elastic.deadline_s
        )
        self._port = AnsweringPort(own_address(store))
        self._number = self._port.number = self._line.next_number()
        elastic = config.elastic
        self._heart = Heart(store, self._number, elastic.beat_s, elastic.deadline_s)
        worker = Worker(self._number, place, host, self._port.address, os.getpid())
        self._line.take_place(place, self._number)
        self._line.tell("join", worker=asdict(worker))
        self._heart.start()
        self._memory = Memory(elastic.snapshot_every)

    def run(self, attempt: Attempt) -> int:
        """Trains until the run has ended; its exit code. Raises Evicted, and what ends the run."""
        generation, ended = 0, False
        with Interrupt() as interrupt, interrupt.noted(logger.info):
            try:
                while (following := self._await(generation, ended, interrupt)) is not None:
                    generation = following.number
                    ended = self._take_part(following, attempt, interrupt)
            except Left as error:
                raise Evicted(str(error)) from error
            finally:
                self._heart.stop()
        end = self._heart.control.end
        if end is None:
            assert interrupt.signal is not None
            return 128 + interrupt.signal
        return int(end["code"])

    def _take_part(self, generation: Generation, attempt: Attempt, interrupt: Interrupt) -> bool:
        """Trains in a generation; whether the run is at its end for this worker."""
        session = Session(generation, self._heart, self._memory, interrupt, self._recoverable)
        try:
            with self._groups(generation) as groups:
                end = attempt(groups.layout, groups, session)
        except Exception as error:  # which ones another generation may mend is asked next
            if not self._recoverable(error):
                self._say_why(error)
                raise
            self._complain(generation, error)
            return False
        if end.status == RESIZED:
            self._leave(generation, "")
            return False
        self._line.tell("done", number=self._number, code=end.code, what=end.status)
        return True

    def _recoverable(self, error: BaseException) -> bool:
        """Whether an error comes from others: any that is raised once the generation has ended.

        Never one of the device: what a GPU says after a fault it says until the process ends.
        """
        if isinstance(error, OWN_ERRORS):
            return False
        if isinstance(error, USER_ERRORS):
            return error.code in PEER_CODES
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError | ValueError) and self._heart.ended()
        )

    def _say_why(self, error: Exception) -> None:
        """A problem that the user can mend ends the run; of another kind, this worker alone."""
        if isinstance(error, USER_ERRORS):
            self._line.tell("failed", number=self._number, code=USER_ERROR, what=str(error))
        else:
            words = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
            self._line.tell("left", number=self._number, what=words[:500])

    def _complain(self, generation: Generation, error: Exception) -> None:
        self._memory.abandon()
        self._heart.check()
        self._leave(generation, str(error))

    def _leave(self, generation: Generation, why: str) -> None:
        reached = reached_by(self._number, self._roster())
        self._line.tell(
            "complaint",
            number=self._number,
            generation=generation.number,
            step=self._heart.step,
            reached=reached,
            what=why,
        )

    def _await(self, last: int, ended: bool, interrupt: Interrupt) -> Generation | None:
        """Waits for a generation after `last` that has this worker; None at the end of the run.

        ended: the run is at its end for this worker, if nobody needs it again.
        """
        seen: dict[int, str] | None = None
        said: list[int] | None = None
        probed_s, asked_s = 0.0, time.monotonic()
        patience_s = 2 * self._config.elastic.deadline_s
        while self._heart.control.end is None:
            self._heart.check()
            newest = self._heart.control.generation
            if newest > last:
                following = self._line.generation(newest)
                if following.rank_of(self._number) is not None:
                    return following
                last, ended = newest, False
                if interrupt.signal is not None:
                    # A spare holds nothing that would have to be saved.
                    self._goodbye(interrupt.signal)
                    return None
            if ended and self._heart.control.stop >= last:
                ended = False
            roster = self._roster()
            now_s = time.monotonic()
            due = roster != seen or now_s - probed_s > PROBE_EVERY_S
            if not ended and due:
                seen, probed_s = roster, now_s
                reached = reached_by(self._number, roster)
                if reached != said:
                    said = reached
                    self._line.tell("reached", number=self._number, reached=reached)
            if interrupt.signal is None:
                asked_s = now_s
            elif now_s - asked_s > (PROBE_EVERY_S if last == 0 else patience_s):
                # There is no generation that could save what this worker knows.
                self._goodbye(interrupt.signal)
                return None
            time.sleep(WAIT_S)
        return None

    def _goodbye(self, number: signal.Signals) -> None:
        self._line.tell("left", number=self._number, what=f"got {number.name}")

    def _roster(self) -> dict[int, str]:
        return {int(number): place for number, place in self._heart.control.roster.items()}

    @contextlib.contextmanager
    def _groups(self, generation: Generation) -> Iterator[Groups]:
        """The process groups of a generation, which the heartbeat cuts once it has ended."""
        layout = generation.layout_of(self._number)
        connections = Connections()

        def cut() -> None:
            abort_groups(self._device)
            connections.cut()

        self._heart.enter(generation.number, cut)
        try:
            groups = self._join(generation, layout)
            groups.guard = self._heart.guard
            yield groups
        except BaseException:
            # Others may still wait for this rank: their wait ends with the connections.
            cut()
            raise
        finally:
            self._heart.leave()
            _forget_groups()

    def _join(self, generation: Generation, layout: Layout) -> Groups:
        if layout.ranks == 1:
            return Groups(layout)
        return join_groups(
            layout,
            self._device,
            self._config.parallel.rdep.deadline_s,
            PrefixStore(f"groups/{generation.number}", self._rendezvous),
            connect_s=self._config.elastic.deadline_s,
        )


def _forget_groups() -> None:
    """Ends all process groups, so that the next ones get the names that they have elsewhere.

    torch numbers groups as they are made, and a name is where ranks look for each other. Where the
    very first could not be made there is nothing to end, but its number has been given away.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0
