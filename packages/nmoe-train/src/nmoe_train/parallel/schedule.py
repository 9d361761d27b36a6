"""What each stage of a pipeline computes, in which order; plain arithmetic, without torch.

The model's layers are cut into P * C parts of consecutive layers, for P stages that hold C chunks
each: chunk c of stage s is part c * P + s. A plan lists each stage's actions: the forward of a
micro-batch through one chunk, its backward, and in zero-bubble plans the gradients of weights apart
from that of the input. Three kinds of plan:

- 1f1b: after P - s - 1 forwards, stage s alternates one forward and one backward (PipeDream-Flush,
  Narayanan et al. 2021), so that it holds at most P - s micro-batches.
- interleaved: the same over C chunks a stage, which shortens the bubble to its C-th part and sends
  C times as often (Megatron-LM, arXiv 2104.04473, section 2.2).
- zero-bubble: stage s makes the gradients of weights s micro-batches late, where 1f1b would wait
  (ZB-H1 of Qi et al. 2023, arXiv 2401.10241); it holds at most P micro-batches.

`simulate` runs any plan against costs: it proves that the plan ends, or says who waits for what.

Letters: P stages, C chunks of a stage, M micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

ScheduleName = Literal["1f1b", "interleaved", "zero-bubble"]


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradient of the input; of the weights too, unless the plan has WEIGHT actions."""
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a stage."""

    kind: Kind
    micro: int
    chunk: int = 0


StagePlan = list[Action]


@dataclass(frozen=True)
class Costs:
    """Time that a micro-batch takes in one part, in any unit."""

    forward: float = 1.0
    backward: float = 1.0
    """Gradient of the input alone."""
    weight: float = 1.0

    def of(self, kind: Kind, *, split: bool) -> float:
        """Time of an action; without `split` its backward makes the weights' gradients too."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.WEIGHT:
            return self.weight
        return self.backward if split else self.backward + self.weight


@dataclass(frozen=True)
class Simulation:
    """What came of a plan."""

    span: float
    """Time from the first action to the end of the last."""
    busy: list[float]
    """Time that each stage computes."""
    in_flight: list[int]
    """Most (micro-batch, chunk) pairs whose activations a stage holds at one time."""

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait."""
        return 1.0 - sum(self.busy) / (self.span * len(self.busy)) if self.span else 0.0


def make_plan(
    schedule: ScheduleName, stages: int, micro_batches: int, chunks: int = 1
) -> list[StagePlan]:
    """Every stage's actions in order.

    Interleaved plans need two chunks at least, and stages that divide the micro-batches; the others
    take one chunk.
    """
    assert stages >= 1 and micro_batches >= 1
    if schedule == "interleaved":
        assert chunks >= 2 and micro_batches % stages == 0
        return [_interleaved(stage, stages, micro_batches, chunks) for stage in range(stages)]
    assert chunks == 1
    if schedule == "zero-bubble":
        return [_zero_bubble(stage, stages, micro_batches) for stage in range(stages)]
    return [
        _alternate(
            [(micro, 0) for micro in range(micro_batches)],
            [(micro, 0) for micro in range(micro_batches)],
            ahead=stages - stage - 1,
        )
        for stage in range(stages)
    ]


def forward_plan(stages: int, micro_batches: int, chunks: int = 1) -> list[StagePlan]:
    """Forwards alone, as validation needs them: every micro-batch through all parts in turn."""
    whole = [
        Action(Kind.FORWARD, micro, chunk)
        for micro in range(micro_batches)
        for chunk in range(chunks)
    ]
    return [list(whole) for _ in range(stages)]


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], ahead: int
) -> StagePlan:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    plan = [Action(Kind.FORWARD, *pair) for pair in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        plan += [Action(Kind.FORWARD, *forward), Action(Kind.BACKWARD, *backward)]
    return plan + [Action(Kind.BACKWARD, *pair) for pair in backwards[len(forwards) - ahead :]]


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> StagePlan:
    """Runs of P micro-batches go through a chunk before the stage turns to its next one."""
    runs = range(0, micro_batches, stages)
    forwards = [
        (first + place, chunk)
        for first in runs
        for chunk in range(chunks)
        for place in range(stages)
    ]
    backwards = [(micro, chunks - 1 - chunk) for micro, chunk in forwards]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return _alternate(forwards, backwards, ahead)


def _zero_bubble(stage: int, stages: int, micro_batches: int) -> StagePlan:
    """Backwards at once; gradients of weights `stage` micro-batches later, before the next forward.

    So a stage that the gradient reaches early fills with them what would be a wait at the end, and
    every stage holds P micro-batches at most.
    """
    ahead = min(stages - stage, micro_batches)
    plan = [Action(Kind.FORWARD, micro) for micro in range(ahead)]
    for micro in range(micro_batches):
        plan.append(Action(Kind.BACKWARD, micro))
        if micro >= stage:
            plan.append(Action(Kind.WEIGHT, micro - stage))
        if ahead + micro < micro_batches:
            plan.append(Action(Kind.FORWARD, ahead + micro))
    late = range(max(0, micro_batches - stage), micro_batches)
    return plan + [Action(Kind.WEIGHT, micro) for micro in late]


class PlanError(AssertionError):
    """A plan that cannot be carried out: an action that waits for ever, or one out of order."""


def simulate(plan: Sequence[StagePlan], costs: Sequence[Costs]) -> Simulation:
    """Carries out a plan with messages that take no time; `costs` are those of each part.

    Raises PlanError when an action comes before what it needs on its own stage, is made twice, or
    waits for another stage for ever.
    """
    stages = len(plan)
    split = any(action.kind is Kind.WEIGHT for actions in plan for action in actions)
    finished: dict[tuple[Kind, int, int], float] = {}
    clock, busy, place = [0.0] * stages, [0.0] * stages, [0] * stages
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        while place[stage] < len(plan[stage]):
            action = plan[stage][place[stage]]
            part = action.chunk * stages + stage
            key = (action.kind, action.micro, part)
            if key in finished:
                raise PlanError(f"stage {stage} makes {action} twice")
            needs = list(_needs(action.kind, action.micro, part, len(costs)))
            if any(need not in finished for need in needs):
                break
            cost = costs[part].of(action.kind, split=split)
            start = max([clock[stage], *(finished[need] for need in needs)])
            clock[stage] = finished[key] = start + cost
            busy[stage] += cost
            place[stage] += 1
            ready += [neighbour % stages for neighbour in (stage - 1, stage + 1)]
    for stage, actions in enumerate(plan):
        if place[stage] < len(actions):
            waiting = actions[place[stage]]
            raise PlanError(f"stage {stage} waits for ever before {waiting}")
    return Simulation(max(clock), busy, [_in_flight(actions, split) for actions in plan])


def _needs(kind: Kind, micro: int, part: int, parts: int) -> Iterator[tuple[Kind, int, int]]:
    """What must be finished before an action on a part, on this stage or another."""
    if kind is Kind.WEIGHT:
        yield (Kind.BACKWARD, micro, part)
    elif kind is Kind.FORWARD and part > 0:
        yield (Kind.FORWARD, micro, part - 1)
    elif kind is Kind.BACKWARD:
        yield (Kind.FORWARD, micro, part)
        if part + 1 < parts:
            yield (Kind.BACKWARD, micro, part + 1)


def _in_flight(actions: StagePlan, split: bool) -> int:
    """Most activations held at one time; a micro-batch's go with its last gradient."""
    last = Kind.WEIGHT if split else Kind.BACKWARD
    held = most = 0
    for action in actions:
        held += (action.kind is Kind.FORWARD) - (action.kind is last)
        most = max(most, held)
    return most
