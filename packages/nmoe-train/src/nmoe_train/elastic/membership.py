"""Who trains together after workers came or went: pure rules, which the coordinator applies.

A worker gets a number when it joins, and no number is given twice: one that leaves and comes back
at once is another worker. A generation is a set of workers, by rank, and a layout; every change
makes the next one. One coordinator decides, so of two sides that lost each other at most one goes
on: among the workers that reach the coordinator, the largest side whose members all reach each
other, and of two equally large ones that with the lowest rank. A side that does not reach the
coordinator stops. Ranks follow places (launcher, slot there), so that whoever returns to a place
gets the rank of the one who left it, and nobody else's experts move.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.parallel import Layout
from nmoe_train.parallel.layout import check_shares

Place = tuple[int, int]


@dataclass(frozen=True)
class Worker:
    """One process that trains or waits to: its number, place (launcher, slot) and whereabouts."""

    number: int
    place: Place
    host: str
    address: str
    """Host and port at which it answers probes."""
    pid: int


@dataclass(frozen=True)
class Fault:
    """A worker, or the connection between workers, that the generation before has lost."""

    what: str
    time_unix_s: float
    """When it was noticed, by the coordinator's clock."""
    detected_s: float
    """Seconds since the last sign of life before that."""
    step: int
    """The last step that any worker had finished."""
    worker: int | None = None
    rank: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class Generation:
    """Workers that train together, by rank, and what led to this."""

    number: int
    members: tuple[Worker, ...]
    sizes: dict[str, int]
    """dp, tp, pp and ep."""
    sizes_before: dict[str, int] | None = None
    faults: tuple[Fault, ...] = ()
    joined: tuple[int, ...] = ()
    """Numbers of the members that the generation before did not have."""
    step_before: int = 0
    """The last step that any worker had finished."""
    fault_age_s: float = 0.0
    """Seconds from the last sign of life of the first that was lost to the publishing of this."""

    def rank_of(self, number: int) -> int | None:
        """The rank of a worker; None if it is not a member."""
        return next((r for r, worker in enumerate(self.members) if worker.number == number), None)

    def layout_of(self, number: int) -> Layout:
        """The layout as a member sees it; its GPU is that of its slot."""
        rank = self.rank_of(number)
        assert rank is not None
        launcher, slot = self.members[rank].place
        slots = [worker.place[1] for worker in self.members if worker.place[0] == launcher]
        return Layout(**self.sizes, rank=rank, local_rank=slot, local_ranks=max(slots) + 1)

    def encode(self) -> str:
        """JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, content: str | bytes) -> "Generation":
        """The inverse of `encode`."""
        fields: dict[str, Any] = json.loads(content)
        members = (Worker(**{**w, "place": tuple(w["place"])}) for w in fields.pop("members"))
        faults = (Fault(**fault) for fault in fields.pop("faults"))
        joined = tuple(fields.pop("joined"))
        return cls(members=tuple(members), faults=tuple(faults), joined=joined, **fields)


def largest_layout(config: Config, workers: int) -> Layout | None:
    """The layout that uses the most of so many workers, or None where none can hold the model.

    tp, etp and pp stay as configured, and `parallel.dp` is a bound. Data parallelism shrinks until
    the batch divides; experts are spread as `parallel.ep` says where that divides, else over the
    nearest number of ranks that does: more ranks first, which hold less each, then fewer, down to
    `elastic.min_ep`.
    """
    parallel = config.parallel
    most = workers // (parallel.tp * parallel.pp)
    for dp in range(min(most, parallel.dp or most), 0, -1):
        try:
            check_shares(config, dp)
        except TrainError:
            continue
        layout = Layout(dp=dp, tp=parallel.tp, pp=parallel.pp, etp=parallel.etp)
        ep = _expert_ranks(config, layout.stage_ranks // parallel.etp)
        if ep is not None and layout.ranks >= config.elastic.min_ranks:
            return replace(layout, ep=ep)
    return None


def _expert_ranks(config: Config, ranks: int) -> int | None:
    """Over how many of a stage's ranks, or of their groups that split experts, these are spread."""
    wanted, experts = config.parallel.ep, config.model.moe.experts
    if wanted == 1:
        return 1
    possible = [n for n in range(1, ranks + 1) if ranks % n == 0 and experts % n == 0]
    above = [n for n in possible if n >= wanted]
    below = [n for n in possible if config.elastic.min_ep <= n < wanted]
    return min(above) if above else max(below, default=None)


def side_that_goes_on(
    last: Sequence[int], reached: Mapping[int, Collection[int]]
) -> tuple[int, ...]:
    """Of the last generation, by rank, those that go on: they all reach each other.

    reached: for each worker that the coordinator hears, whom it reaches. Links count if both ends
    say so. Sides that are whole in themselves are compared by size, then by their lowest rank;
    in one with holes, whoever lacks the most links is left out first (the highest rank of
    several), until none is lacking.
    """
    heard = [number for number in last if number in reached]
    sides = [_without_holes(side, reached) for side in _connected(heard, reached)]
    sides.sort(key=lambda side: (-len(side), last.index(side[0])))
    return tuple(sides[0]) if sides else ()


def chosen_workers(
    goes_on: Sequence[int], waiting: Iterable[int], reached: Mapping[int, Collection[int]]
) -> tuple[int, ...]:
    """Those that could train together: the side that goes on, then whoever waits and reaches all.

    A worker that waits is taken in the order of `waiting`.
    """
    chosen = list(goes_on)
    for number in waiting:
        if number not in chosen and all(_linked(number, other, reached) for other in chosen):
            chosen.append(number)
    return tuple(chosen)


def next_generation(
    config: Config, last: Generation | None, candidates: Sequence[Worker], **story: Any
) -> Generation | None:
    """The next generation of these workers, first come first in; None if they are too few.

    Those beyond the layout wait as spares. `story`: fields of the generation that tell why.
    """
    layout = largest_layout(config, len(candidates))
    if layout is None:
        return None
    members = sorted(candidates[: layout.ranks], key=lambda worker: (worker.place, worker.number))
    before = () if last is None else tuple(worker.number for worker in last.members)
    return Generation(
        number=1 if last is None else last.number + 1,
        members=tuple(members),
        sizes=layout.sizes(),
        joined=tuple(worker.number for worker in members if worker.number not in before),
        **story,
    )


def _linked(one: int, other: int, reached: Mapping[int, Collection[int]]) -> bool:
    return one == other or (other in reached.get(one, ()) and one in reached.get(other, ()))


def _connected(numbers: Sequence[int], reached: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Sides: workers that reach each other, by way of others or not, in the order given."""
    left, sides = list(numbers), []
    while left:
        side = [left.pop(0)]
        for member in side:
            side += [other for other in left if _linked(member, other, reached)]
            left = [other for other in left if other not in side]
        sides.append(sorted(side, key=numbers.index))
    return sides


def _without_holes(side: list[int], reached: Mapping[int, Collection[int]]) -> list[int]:
    """A side without those that do not reach all the others."""
    side = list(side)
    while True:
        lacking = [sum(not _linked(a, b, reached) for b in side) for a in side]
        worst = max(lacking)
        if worst == 0:
            return side
        del side[len(side) - 1 - lacking[::-1].index(worst)]
