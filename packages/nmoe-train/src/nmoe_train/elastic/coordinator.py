"""Decides, beside the store, who is in: hears workers, ends generations, forms the next.

It runs in the launcher that hosts the store, and is the only one who writes `control` and
generations. Time is its own clock alone: a worker is alive while its beat changes. A generation
ends once a worker is lost or complains; then every member says whom it reaches, or is counted out
after the deadline, and the next generation is formed by the rules of `membership`. Where one
generation after another ends by a fault before it has made a step that none had made, it ends the
run: what ends them does not pass.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nmoe_train.config import Config
from nmoe_train.elastic.link import CONTROL, NEWS, Beat, Control
from nmoe_train.elastic.membership import (
    Fault,
    Generation,
    Worker,
    chosen_workers,
    largest_layout,
    next_generation,
    side_that_goes_on,
)
from nmoe_train.errors import USER_ERROR, TrainError

logger = logging.getLogger("nmoe_train")

SETTLE_S = 1.0
REFUSED_S = 5.0


class KeyValues(Protocol):
    """What of torch's Store is needed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass
class _Known:
    """A worker that has joined and is not lost."""

    worker: Worker
    heard_s: float
    beat: bytes = b""
    reached: tuple[int, ...] | None = None
    """Whom it reaches, as it said last while it was in no generation."""
    complaint: str = ""
    refused_s: float | None = None
    """When it waited in vain for a generation that was made for it."""
    done: dict[str, Any] | None = None
    """What it ended the run with."""


@dataclass
class _Ending:
    """A generation that has ended, while its members are heard."""

    since_s: float
    fault_s: float
    """When the first that was lost gave its last sign of life."""
    faults: list[Fault] = field(default_factory=list)
    untold: tuple[Fault, ...] = ()
    """Those that led to the generation, where it never got as far as telling of them."""


class Coordinator:
    """Call `tick` often. `start_workers`: how many to wait for before the first generation."""

    def __init__(self, config: Config, store: KeyValues, start_workers: int) -> None:
        self._config, self._store, self._start_workers = config, store, start_workers
        self._began_s: float | None = None
        self._workers: dict[int, _Known] = {}
        self._heard = 0
        self._now_s = 0.0
        self._last_join_s = 0.0
        self._ending: _Ending | None = None
        self.generation: Generation | None = None
        self._began_at = 0.0
        self._trained: Generation | None = None
        """The newest generation that has made a step."""
        self.step = 0
        """The last step that any worker has finished, since the last recovery that made one."""
        self._furthest = 0
        """The last step that any worker has ever finished."""
        self._fruitless = 0
        """Generations in a row that a fault has ended before they went beyond that."""
        self.control = Control()
        self._publish()

    @property
    def end(self) -> dict[str, Any] | None:
        """How the run has ended, once it has."""
        return self.control.end

    @property
    def alone(self) -> bool:
        """Whether no worker is left, as far as is known."""
        return not self._workers

    def finish(self, code: int, what: str) -> None:
        """Ends the run."""
        if self.control.end is None:
            self.control.end = {"code": code, "what": what}
            self._publish()

    def tick(self, now_s: float | None = None) -> None:
        """Hears all news, and decides what follows from them."""
        now_s = time.monotonic() if now_s is None else now_s
        self._now_s = now_s
        self._began_s = now_s if self._began_s is None else self._began_s
        for news in self._news():
            self._hear(news, now_s)
        self._hear_beats(now_s)
        for number, known in list(self._workers.items()):
            silent_s = now_s - known.heard_s
            if silent_s > self._config.elastic.deadline_s:
                self._lose(number, f"did not answer for {silent_s:.1f} s", now_s)
        if self.control.end is None:
            self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        if (done := self._all_done()) is not None:
            self.finish(done["code"], done["what"])
        elif self._ending is not None:
            self._form_when_heard(self._ending, now_s)
        elif self.generation is None:
            self._form_first(now_s)
        elif self.control.resize < self.generation.number and self._could_grow():
            self.control.resize = self.generation.number
            self._publish()

    def _all_done(self) -> dict[str, Any] | None:
        """What all members ended the run with: rank 0 too, which closes the run's record."""
        members = self._members()
        if self.generation is None or not all(known.done for known in members):
            return None
        ranks = [self.generation.rank_of(known.worker.number) for known in members]
        return members[0].done if 0 in ranks else None

    def _news(self) -> Iterator[dict[str, Any]]:
        """What was appended to the log since."""
        if not self._store.check([NEWS]):
            return
        content = self._store.get(NEWS)
        lines = content[self._heard :].splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._heard += len(line)
                yield json.loads(line)

    def _hear(self, news: dict[str, Any], now_s: float) -> None:
        kind, number = news["kind"], news.get("number")
        if kind == "join":
            worker = Worker(**{**news["worker"], "place": tuple(news["worker"]["place"])})
            self._workers[worker.number] = _Known(worker, now_s)
            self._last_join_s = now_s
            self.control.roster[str(worker.number)] = worker.address
            self._publish()
        elif kind == "exit":
            self._hear_exit(news, now_s)
        elif kind == "failed":
            self.finish(news["code"], news["what"])
        elif number in self._workers:
            self._hear_worker(self._workers[number], news, now_s)

    def _hear_exit(self, news: dict[str, Any], now_s: float) -> None:
        """A launcher says that a process of its own has ended."""
        place, pid = tuple(news["place"]), news["pid"]
        for number, known in list(self._workers.items()):
            if known.worker.place == place and known.worker.pid == pid:
                self._lose(number, news["how"], now_s)

    def _hear_worker(self, known: _Known, news: dict[str, Any], now_s: float) -> None:
        known.heard_s = now_s
        if news["kind"] == "left":
            self._lose(known.worker.number, news["what"], now_s)
        elif news["kind"] == "reached":
            known.reached = tuple(news["reached"])
        elif news["kind"] == "done":
            known.done = {"code": news["code"], "what": news["what"]}
        elif news["kind"] == "complaint" and self._is_current(known, news["generation"]):
            self._note_progress(news["generation"], news["step"])
            known.reached, known.complaint = tuple(news["reached"]), news["what"]
            logger.debug("worker %d left its generation: %s", known.worker.number, news["what"])
            self._end_generation(now_s, now_s)

    def _is_current(self, known: _Known, generation: int) -> bool:
        return self.generation is not None and self.generation.number == generation

    def _hear_beats(self, now_s: float) -> None:
        for number, known in self._workers.items():
            key = f"beat/{number}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != known.beat:
                known.beat, known.heard_s = beat, now_s
                said = Beat(**json.loads(beat))
                self._note_progress(said.generation, said.step)

    def _note_progress(self, generation: int, step: int) -> None:
        """A worker has finished a step of a generation; 0 is none."""
        if self.generation is None or self.generation.number != generation or step == 0:
            return
        if self._trained is not self.generation:
            self._trained, self.step = self.generation, 0
        self.step = max(self.step, step)
        if step > self._furthest:
            self._furthest, self._fruitless = step, 0

    def _members(self) -> list[_Known]:
        """Members of the generation that are not lost, by rank."""
        members = () if self.generation is None else self.generation.members
        return [self._workers[w.number] for w in members if w.number in self._workers]

    def _lose(self, number: int, how: str, now_s: float) -> None:
        """Counts a worker out, which ends a generation that it is in."""
        known = self._workers.pop(number)
        if self.control.end is not None:
            return
        self.control.lost.append(number)
        self.control.roster.pop(str(number), None)
        rank = None if self.generation is None else self.generation.rank_of(number)
        if rank is not None:
            logger.warning("rank %d on %s %s", rank, known.worker.host, how)
            ending = self._end_generation(now_s, known.heard_s)
            ending.faults.append(
                Fault(
                    what=f"rank {rank} on {known.worker.host} {how}",
                    time_unix_s=time.time(),
                    detected_s=now_s - known.heard_s,
                    step=self.step,
                    worker=number,
                    rank=rank,
                    host=known.worker.host,
                )
            )
        self._publish()

    def _end_generation(self, now_s: float, fault_s: float) -> _Ending:
        assert self.generation is not None
        if self._ending is None:
            self._ending = _Ending(now_s, fault_s)
            if self._trained is not self.generation and self.generation.faults:
                self._ending.untold = self.generation.faults
                self._ending.fault_s = self._began_at - self.generation.fault_age_s
            self.control.stop = self.generation.number
            self._publish()
        self._ending.fault_s = min(self._ending.fault_s, fault_s)
        return self._ending

    def _form_first(self, now_s: float) -> None:
        assert self._began_s is not None
        everyone = self._workers.keys()
        here = all(k.reached and everyone <= set(k.reached) for k in self._workers.values())
        late = now_s - self._began_s > self._config.elastic.join_s
        settled = late and now_s - self._last_join_s > SETTLE_S
        if settled or (here and len(everyone) >= self._start_workers):
            self._form((), ())

    def _form_when_heard(self, ending: _Ending, now_s: float) -> None:
        """Forms the next generation once all members have said whom they reach, or are out."""
        silent = [known for known in self._members() if known.reached is None]
        waited_s = now_s - ending.since_s
        if silent and waited_s <= self._config.elastic.deadline_s:
            return
        for known in silent:
            if known.done is None:
                how = f"did not leave its generation for {waited_s:.1f} s"
                self._lose(known.worker.number, how, now_s)
        assert self.generation is not None
        last = [worker.number for worker in self.generation.members]
        reached = {n: k.reached for n, k in self._workers.items() if k.reached is not None}
        side = side_that_goes_on(last, reached)
        if not side and now_s - self._last_join_s < SETTLE_S:
            # All are new: those that come together should start together.
            return
        self._form(last, side)

    def _form(self, last: Sequence[int], side: tuple[int, ...]) -> None:
        """Forms the next generation if there are enough for it; else it is tried again later."""
        candidates = [self._workers[number].worker for number in self._candidates(side)]
        ending = self._ending
        faults = [] if ending is None else [*ending.faults, *self._unreachable(last, side, ending)]
        untold = () if ending is None else ending.untold
        story: dict[str, Any] = {
            "faults": (*untold, *faults),
            "sizes_before": None if self._trained is None else self._trained.sizes,
            "step_before": self.step,
            "fault_age_s": 0.0 if ending is None else self._now_s - ending.fault_s,
        }
        formed = next_generation(self._config, self.generation, candidates, **story)
        if formed is None or self._gives_up(faults):
            return
        self._store.set(f"generation/{formed.number}", formed.encode())
        self.generation, self._ending, self._began_at = formed, None, self._now_s
        for known in self._workers.values():
            if formed.rank_of(known.worker.number) is not None:
                known.reached, known.complaint, known.done = None, "", None
            elif known.reached is not None:
                known.refused_s = self._now_s
        self.control.generation = formed.number
        self._publish()

    def _gives_up(self, faults: Sequence[Fault]) -> bool:
        """Counts a generation that faults have ended; ends the run after too many in vain."""
        self._fruitless += bool(faults)
        most = self._config.elastic.fruitless
        if self._fruitless < most:
            return False
        error = TrainError(
            "E-ELASTIC-STUCK",
            f"{most} generations in a row ended before step {self._furthest + 1} was made, the "
            f"last because {faults[-1].what}",
            "mend that, and run the same command again to go on (elastic.fruitless allows more)",
        )
        self.finish(USER_ERROR, str(error))
        return True

    def _candidates(self, side: tuple[int, ...]) -> tuple[int, ...]:
        """The side that goes on, and whoever waits and reaches it, first come first in."""
        reached = {n: k.reached for n, k in self._workers.items() if k.reached is not None}
        return chosen_workers(side, sorted(reached), reached)

    def _could_grow(self) -> bool:
        """Whether those that wait would make the layout larger."""
        assert self.generation is not None
        members = tuple(worker.number for worker in self.generation.members)
        reached = {n: set(k.reached) for n, k in self._workers.items() if k.reached is not None}
        waiting = [n for n in reached if n not in members and self._may_ask_again(n)]
        if not waiting:
            return False
        # Members are busy training with each other: that they reach whoever reaches them is taken
        # for granted until they are asked.
        for number in members:
            reached[number] = {*members, *waiting}
        candidates = chosen_workers(members, sorted(waiting), reached)
        layout = largest_layout(self._config, len(candidates))
        return layout is not None and layout.ranks > len(members)

    def _may_ask_again(self, number: int) -> bool:
        """Not at once, if there was no room for a worker, or it was not reached, just now."""
        refused_s = self._workers[number].refused_s
        return refused_s is None or self._now_s - refused_s > REFUSED_S

    def _unreachable(
        self, last: Sequence[int], side: tuple[int, ...], ending: _Ending
    ) -> list[Fault]:
        """Members that live and are left out, and a complaint where nobody was lost."""
        assert self.generation is not None
        found = []
        for number in last:
            if number in self._workers and number not in side:
                rank = self.generation.rank_of(number)
                what = f"rank {rank} is not reached by all others"
                found.append(self._fault(what, ending, number))
        if not found and not ending.faults:
            complaints = [k for k in self._members() if k.complaint]
            if complaints:
                first = complaints[0]
                found.append(self._fault(first.complaint, ending, first.worker.number))
        return found

    def _fault(self, what: str, ending: _Ending, number: int) -> Fault:
        assert self.generation is not None
        known = self._workers[number]
        return Fault(
            what=what,
            time_unix_s=time.time() - (self._now_s - ending.since_s),
            detected_s=max(0.0, ending.since_s - ending.fault_s),
            step=self.step,
            worker=number,
            rank=self.generation.rank_of(number),
            host=known.worker.host,
        )

    def _publish(self) -> None:
        self._store.set(CONTROL, self.control.encode())
