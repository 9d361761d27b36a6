"""The one-sided protocol as a machine of atomic steps, explored over all interleavings.

Every rank runs, for each peer, a lane of steps in each phase: it puts into the peer's memory,
releases flags there, awaits flags of its own, and reads its own memory. Lanes of a rank run side by
side. What the rules of `nmoe_kernels.rdep.protocol` answer (area, what may be written, what may be
read) is asked of them, so that a test can hand over rules that are wrong. A search over all
reachable states then finds a read of what is not there, an overwrite of what was not read, or a
state in which nobody can go on.

Two orders are explored. "phases": a rank announces, puts and collects, one after another.
"overlapped": it puts as soon as the rules let it, whether or not it has collected the epoch before,
and announces when it has.

Where a step commutes with all that others can do before it, a search may take it alone (a
persistent set of one) and so visit states once that only differ in the order of such steps.
Reduction 0 does not; 1 does so for releases and for awaits that may go on, which they always will
where flags never fall; 2 also for accesses of a memory cell that its only other user cannot reach
first, whatever the others do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from nmoe_kernels.rdep.protocol import PHASES, Epoch

FLAG_OF = {"counts": "announced", "rows": "delivered"}
PHASE_OF = {"counts": "announce", "rows": "put"}

Lane = tuple[int, str, int]
Flag = tuple[int, int, str]
Cell = tuple[int, int, str, int]


class Broken(Exception):
    """An interleaving in which the protocol fails."""


@dataclass(frozen=True)
class Step:
    """kind: put, release, may_write, await or read. what: counts or rows."""

    kind: str
    what: str
    epoch: Epoch


@dataclass(frozen=True)
class Machine:
    """What the ranks do, under which rules. Tests change one method to break it."""

    ranks: int
    epochs: int
    order: str = "phases"
    epoch: type[Epoch] = Epoch

    def peers(self, rank: int) -> list[int]:
        return [peer for peer in range(self.ranks) if peer != rank]

    def steps(self, phase: str, rank: int, peer: int, number: int) -> list[Step]:
        """What a rank does with one peer in one phase of an epoch."""
        kinds = {
            "announce": (("may_write", "counts"), ("put", "counts"), ("release", "counts")),
            "put": (("may_write", "rows"), ("put", "rows"), ("release", "rows")),
            "collect": tuple((kind, what) for what in FLAG_OF for kind in ("await", "read")),
        }[phase]
        return [Step(kind, what, self.epoch(number)) for kind, what in kinds]

    def before(self, phase: str, number: int) -> list[tuple[str, int]]:
        """What a rank must have ended, with all peers, before a phase of an epoch."""
        wanted = {
            "announce": [("collect", number - 1)],
            "put": [("announce", number)] if self.order == "phases" else [],
            "collect": [("announce", number), ("put", number)],
        }[phase]
        return [(name, epoch) for name, epoch in wanted if epoch > 0]

    def may_write(self, step: Step, flags: dict[Flag, int], rank: int, peer: int) -> bool:
        return step.epoch.may_write(flags[rank, peer, "announced"])

    def awaits(self, step: Step, flags: dict[Flag, int], rank: int, peer: int) -> bool:
        """Whether a rank that sees its flags goes on to read."""
        ready = step.epoch.has_counts if step.what == "counts" else step.epoch.has_rows
        return ready(flags[rank, peer, FLAG_OF[step.what]])


@dataclass(frozen=True)
class State:
    """done: steps past in each lane (rank, phase, peer). flags: by (owner, writer, name). written,
    read: the epoch last put into and last read from a cell (owner, writer, what, area)."""

    done: dict[Lane, int]
    flags: dict[Flag, int]
    written: dict[Cell, int] = field(default_factory=dict)
    read: dict[Cell, int] = field(default_factory=dict)

    def key(self) -> tuple[int, ...]:
        """Each flag and each cell has one lane that writes it: the steps past determine them."""
        return tuple(self.done.values())


class Search:
    """A walk through all states of a machine."""

    def __init__(self, machine: Machine, reduction: int) -> None:
        self.machine, self.reduction = machine, reduction
        numbers, ranks = range(1, machine.epochs + 1), range(machine.ranks)
        self.lanes = {
            (rank, phase, peer): [machine.steps(phase, rank, peer, n) for n in numbers]
            for rank in ranks
            for phase in PHASES
            for peer in machine.peers(rank)
        }
        self.flat = {lane: [*chain(*epochs)] for lane, epochs in self.lanes.items()}
        # How many steps of a lane lie before the end of each epoch.
        self.ends = {
            lane: [sum(map(len, epochs[:n])) for n in range(machine.epochs + 1)]
            for lane, epochs in self.lanes.items()
        }

    def run(self) -> int:
        """Visits every reachable state; gives their number. Raises Broken."""
        pairs = [(a, b) for a in range(self.machine.ranks) for b in self.machine.peers(a)]
        flags = {(*pair, name): 0 for pair in pairs for name in FLAG_OF.values()}
        first = State(dict.fromkeys(self.lanes, 0), flags)
        seen, waiting = {first.key()}, [first]
        while waiting:
            state = waiting.pop()
            for lane, step in self.moves(state):
                following = self.take(state, lane, step)
                if following.key() not in seen:
                    seen.add(following.key())
                    waiting.append(following)
        return len(seen)

    def moves(self, state: State) -> list[tuple[Lane, Step]]:
        """The steps to branch on. Raises Broken if there are none before the end."""
        possible = list(self.possible(state))
        unfinished = [lane for lane, steps in self.flat.items() if state.done[lane] < len(steps)]
        if unfinished and not possible:
            where = {lane: self.flat[lane][state.done[lane]] for lane in unfinished}
            raise Broken(f"nobody can go on: {where}")
        if self.reduction:
            alone = (move for move in possible if self.commutes(state, *move))
            return [*alone][:1] or possible
        return possible

    def possible(self, state: State) -> Iterator[tuple[Lane, Step]]:
        """The steps that can be taken now."""
        for lane, steps in self.flat.items():
            past = state.done[lane]
            if past == len(steps):
                continue
            step, (rank, phase, peer) = steps[past], lane
            number = step.epoch.number
            if past == self.ends[lane][number - 1] and not self.open(state, rank, phase, number):
                continue
            guards = {"may_write": self.machine.may_write, "await": self.machine.awaits}
            guard = guards.get(step.kind)
            if guard is None or guard(step, state.flags, rank, peer):
                yield lane, step

    def open(self, state: State, rank: int, phase: str, number: int) -> bool:
        return all(
            state.done[rank, other, peer] >= self.ends[rank, other, peer][epoch]
            for other, epoch in self.machine.before(phase, number)
            for peer in self.machine.peers(rank)
        )

    def take(self, state: State, lane: Lane, step: Step) -> State:
        """The state after a step. Raises Broken for a wrong access of memory."""
        (rank, _, peer), number = lane, step.epoch.number
        flags, written, read = state.flags, state.written, state.read
        cell = cell_of(lane, step)
        if step.kind == "put":
            if read.get(cell, 0) < written.get(cell, 0):
                raise Broken(f"{cell} of epoch {written[cell]} overwritten before it was read")
            written = {**written, cell: number}
        elif step.kind == "release":
            flags = {**flags, (peer, rank, FLAG_OF[step.what]): number}
        elif step.kind == "read":
            if written.get(cell, 0) != number:
                raise Broken(f"{cell} read for epoch {number}, it holds {written.get(cell, 0)}")
            read = {**read, cell: number}
        return State({**state.done, lane: state.done[lane] + 1}, flags, written, read)

    def commutes(self, state: State, lane: Lane, step: Step) -> bool:
        """Whether a step commutes with all that other lanes can do before it."""
        if step.kind not in ("put", "read"):
            return True
        if self.reduction < 2:
            return False
        rank, _, peer = lane
        reader = step.kind == "read"
        other = (peer, PHASE_OF[step.what] if reader else "collect", rank)
        cell, steps = cell_of(lane, step), self.flat[other]
        kind = "put" if reader else "read"
        ahead = range(state.done[other], len(steps))
        users = [i for i in ahead if steps[i].kind == kind and cell_of(other, steps[i]) == cell]
        if not users:
            return True
        if users[0] == state.done[other] or steps[users[0] - 1].kind in ("put", "read"):
            return False
        guard = steps[users[0] - 1]
        flags = dict.fromkeys(state.flags, self.machine.epochs)
        if not reader:
            # Only this lane writes the flag that the reader awaits, and this step comes first.
            awaited = (peer, rank, FLAG_OF[step.what])
            flags[awaited] = state.flags[awaited]
            return guard.kind == "await" and not self.machine.awaits(guard, flags, peer, rank)
        flags[peer, rank, "announced"] = self.last_announced_before(step.epoch.number)
        return guard.kind == "may_write" and not self.machine.may_write(guard, flags, peer, rank)

    def last_announced_before(self, collected: int) -> int:
        """The last epoch that a rank can announce before it has collected an epoch."""
        for number in range(1, self.machine.epochs + 1):
            for phase, epoch in self.machine.before("announce", number):
                if phase == "collect" and epoch >= collected:
                    return number - 1
        return self.machine.epochs


def cell_of(lane: Lane, step: Step) -> Cell:
    """The cell that a put or a read is about: memory of the reader, written by the other."""
    rank, phase, peer = lane
    owner, writer = (rank, peer) if phase == "collect" else (peer, rank)
    return owner, writer, step.what, step.epoch.area


def explore(machine: Machine, reduction: int) -> int:
    """Visits every reachable state of a machine; gives their number. Raises Broken."""
    return Search(machine, reduction).run()
